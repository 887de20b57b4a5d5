"""EAGLE-1 and EAGLE-2 heads with the keys of SafeAILab/EAGLE, which vLLM and SGLang read too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.archs.config import Config
from ridgeline.errors import RequestError
from ridgeline.load.heads.head import HeadFile
from ridgeline.load.heads.layer import layer_config, read_layer
from ridgeline.load.heads.tensors import named, read_weights
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.spec.heads import LAYER, EagleSpec

EMBEDDING = "embed_tokens.weight"


def layer_names(prefix: str) -> dict[str, str]:
    """Return the checkpoint's names of the modules of a decoder layer. prefix: the layer's name there."""
    attention = {f"{LAYER}.mixer.{n}": f"{prefix}.self_attn.{n}_proj" for n in "qkvo"}
    norms = {f"{LAYER}.mixer.{n}_norm": f"{prefix}.self_attn.{n}_norm" for n in "qk"}
    mlp = {f"{LAYER}.mlp.{n}": f"{prefix}.mlp.{n}_proj" for n in ("gate", "up", "down")}
    return {**attention, **norms, **mlp, f"{LAYER}.mlp_norm": f"{prefix}.post_attention_layernorm"}


MODULES = {"embed": "embed_tokens", "fc": "fc", **layer_names("layers.0")}


class Eagle:
    """fc.weight [h, 2h], and one layer without an input norm. The head has no output matrix: it uses the target's."""

    name, file = "eagle", "model.safetensors"

    def matches(self, config: Mapping[str, Any], keys: frozenset[str]) -> bool:
        return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= keys and not (
            {"lm_head.weight", "layers.0.hidden_norm.weight"} & keys or "draft_vocab_size" in config
        )

    def read(self, config: Mapping[str, Any], files: TensorFiles) -> HeadFile:
        c = Config(config)
        bias, layers = c.get_bool("bias", True), c.get_size("target_layer_count", None)  # as in EAGLE's own loader
        facts = read_layer(c)
        spec = EagleSpec(
            **facts.fields(), draft_vocab_size=facts.vocab_size, target_layers=layers, fc_bias=bias,
            own_embedding=EMBEDDING in files,
        )  # fmt: skip
        return HeadFile(spec, read_weights(spec, MODULES, files), format=self.name)

    def write(self, head: HeadFile) -> tuple[dict[str, Any], dict[str, HostTensor]]:
        spec = head.spec
        if not isinstance(spec, EagleSpec):
            raise RequestError(f"the format {self.name} holds heads of EAGLE-1 and -2, and this one is {spec.kind}")
        layers = {} if spec.target_layers is None else {"target_layer_count": spec.target_layers}
        # A plain Llama class, as EAGLE's own files have it: the programs are told that this is an EAGLE head.
        config = {"architectures": ["LlamaForCausalLM"], **layer_config(spec), "bias": spec.fc_bias, **layers}
        return config, named(spec, head.weights, MODULES)
