"""EAGLE-3 heads: folders with the keys of SafeAILab/EAGLE, as vLLM and SGLang read them, and those of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.archs.config import HARMLESS, Config
from ridgeline.errors import CheckpointError, RequestError
from ridgeline.load.heads.eagle import EMBEDDING, layer_names
from ridgeline.load.heads.head import HeadFile, Ids, vocabulary_problem
from ridgeline.load.heads.layer import layer_config, read_layer
from ridgeline.load.heads.tensors import ids_tensor, named, read_ids, read_weights
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.spec.heads import LAYER, Eagle3Spec

AUX = "eagle_aux_hidden_state_layer_ids"
OLD_LAYER, NEW_LAYER = "midlayer", "layers.0"
TABLES = ("d2t", "t2d")
SPECULATORS_VERSION = "0.9.0"
DEPTH = 3  # draft tokens that a written config recommends if the head names none


class Eagle3:
    """The layer is called `midlayer` (EAGLE, SpecForge) or `layers.0` (vLLM); `midlayer` is written."""

    name, file = "eagle3", "model.safetensors"

    def matches(self, config: Mapping[str, Any], keys: frozenset[str]) -> bool:
        return any(f"{layer}.hidden_norm.weight" in keys for layer in (OLD_LAYER, NEW_LAYER)) or (
            "draft_vocab_size" in config
        )

    def read(self, config: Mapping[str, Any], files: TensorFiles) -> HeadFile:
        c = Config(config)
        c.expect("bias", False)
        aux, target_width = _aux(c), c.get_size("target_hidden_size", None, None)
        residual, layers = c.get_bool("norm_before_residual", False), c.get_size("target_layer_count", None)
        draft_vocab = c.get_size("draft_vocab_size", None, None)
        facts = read_layer(c)
        spec = Eagle3Spec(
            **facts.fields(), draft_vocab_size=facts.vocab_size if draft_vocab is None else draft_vocab,
            target_layers=layers, aux_layers=aux, target_width=target_width, norm_before_residual=residual,
            own_embedding=EMBEDDING in files,
        )  # fmt: skip
        old = any(key.startswith(f"{OLD_LAYER}.") for key in files)
        return _read(spec, OLD_LAYER if old else NEW_LAYER, files, self.name)

    def write(self, head: HeadFile) -> tuple[dict[str, Any], dict[str, HostTensor]]:
        spec = _eagle3(head, self.name)
        for name in ("norm_before_fc", "fc_norm", "norm_output"):
            if getattr(spec, name):
                raise RequestError(f"the format {self.name} holds no head with {name}; take speculators")
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"], **layer_config(spec),
            "draft_vocab_size": spec.draft_vocab_size, "norm_before_residual": spec.norm_before_residual,
        }  # fmt: skip
        if spec.target_width is not None:
            config["target_hidden_size"] = spec.target_width
        if spec.target_layers is not None:
            config["target_layer_count"] = spec.target_layers
        if spec.aux_layers is not None:
            config[AUX] = list(spec.aux_layers)
            if min(spec.aux_layers) > 0:  # SGLang's number of a stream is that of the layer before it
                config["eagle_config"] = {AUX: [i - 1 for i in spec.aux_layers], "use_aux_hidden_state": True}
        return config, _tensors(spec, head, OLD_LAYER)


class Speculators:
    """The format of speculators: the layer has a config of its own, and what vLLM needs is in `speculators_config`."""

    name, file = "speculators", "model.safetensors"

    def matches(self, config: Mapping[str, Any], keys: frozenset[str]) -> bool:
        return "speculators_model_type" in config

    def read(self, config: Mapping[str, Any], files: TensorFiles) -> HeadFile:
        c = Config(config, model_type="speculators")
        if (kind := c.get_str("speculators_model_type")) != "eagle3":
            raise c.error("speculators_model_type", f"is {kind!r:.100}; only eagle3 is supported")
        c.get_str("speculators_version", None, None)
        if not c.present("norm_before_residual"):
            raise c.error(
                "norm_before_residual", "is missing: speculators takes false then, and vLLM true; write the right one"
            )
        layer = c.sub("transformer_layer_config")
        if layer is None:
            raise c.error("transformer_layer_config", "is missing")
        facts = read_layer(layer)
        flags: dict[str, Any] = {name: c.get_bool(name, False) for name in ("norm_before_fc", "fc_norm", "norm_output")}
        aux = c.get_indices(AUX, None)
        target, depth = _verifier(c)
        spec = Eagle3Spec(
            **facts.fields(), draft_vocab_size=c.get_size("draft_vocab_size"),
            norm_before_residual=c.get_bool("norm_before_residual", False), aux_layers=tuple(aux) if aux else None,
            target_width=c.get_size("target_hidden_size", None, None), own_embedding=EMBEDDING in files,
            target_layers=c.get_size("target_layer_count", None), **flags,
        )  # fmt: skip
        c.finish(HARMLESS | {"embed_requires_grad", "tie_word_embeddings"})
        return _read(spec, NEW_LAYER, files, self.name, target, depth)

    def write(self, head: HeadFile) -> tuple[dict[str, Any], dict[str, HostTensor]]:
        spec = _eagle3(head, self.name)
        depth = DEPTH if head.depth is None else head.depth
        config: dict[str, Any] = {
            "architectures": ["Eagle3DraftModel"],
            "speculators_model_type": "eagle3",
            "speculators_version": SPECULATORS_VERSION,
            "draft_vocab_size": spec.draft_vocab_size,
            "norm_before_residual": spec.norm_before_residual,
            "norm_before_fc": spec.norm_before_fc,
            "fc_norm": spec.fc_norm,
            "norm_output": spec.norm_output,
            "target_hidden_size": spec.target_width,
            AUX: None if spec.aux_layers is None else list(spec.aux_layers),
            "transformer_layer_config": layer_config(spec),
            "speculators_config": {
                "algorithm": "eagle3",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": head.target, "architectures": []},
            },
        }
        if spec.target_layers is not None:
            config["target_layer_count"] = spec.target_layers
        return config, _tensors(spec, head, NEW_LAYER)


def _eagle3(head: HeadFile, name: str) -> Eagle3Spec:
    if not isinstance(head.spec, Eagle3Spec):
        raise RequestError(f"the format {name} holds heads of EAGLE-3, and this one is {head.spec.kind}")
    return head.spec


def _modules(spec: Eagle3Spec, layer: str) -> dict[str, str]:
    """Return the checkpoint's names of our modules. layer: the name of the decoder layer there."""
    norms = {f"{LAYER}.mixer_norm": f"{layer}.input_layernorm", f"{LAYER}.hidden_norm": f"{layer}.hidden_norm"}
    own = {name: name for name in ("fc", "norm", "input_norm", *(f"fc_norm.{i}" for i in range(spec.num_aux)))}
    return {"embed": "embed_tokens", "head": "lm_head", **own, **norms, **layer_names(layer)}


def _read(
    spec: Eagle3Spec, layer: str, files: TensorFiles, name: str, target: str | None = None, depth: int | None = None
) -> HeadFile:
    weights = read_weights(spec, _modules(spec, layer), files, extra=TABLES)
    return HeadFile(spec, weights, _vocabulary(spec, files), name, target, depth)


def _vocabulary(spec: Eagle3Spec, files: TensorFiles) -> Ids | None:
    """Return the target's tokens from d2t, the distance of each from its own number. Raises CheckpointError if t2d,
    which marks them, marks others.
    """
    count = spec.draft_vocab_size
    if "d2t" not in files:
        if spec.has_table:
            raise CheckpointError(f"the eagle3 head lacks d2t, which draft_vocab_size {count} requires")
        return None
    offsets = read_ids("d2t", files)
    if offsets.shape != (count,):
        raise CheckpointError(f"d2t has shape {list(offsets.shape)}, but config.json requires [{count}]")
    found = np.arange(count) + offsets
    if not spec.has_table:
        if offsets.any():
            raise CheckpointError("d2t changes the order of the vocabulary, and draft_vocab_size is that of the target")
        return None
    if (problem := vocabulary_problem(spec, found)) is not None:
        raise CheckpointError(problem)
    if "t2d" in files:
        info = files.info("t2d")
        if info.dtype not in ("BOOL", "U8") or info.shape != (spec.vocab_size,):
            raise CheckpointError(f"t2d has type {info.dtype} and shape {list(info.shape)}; it must be "
                                  f"[{spec.vocab_size}] truth values")  # fmt: skip
        if not np.array_equal(np.flatnonzero(files.array("t2d")), np.sort(found)):
            raise CheckpointError("t2d marks other tokens than d2t names; one of the two tables is wrong")
    return found


def _tensors(spec: Eagle3Spec, head: HeadFile, layer: str) -> dict[str, HostTensor]:
    tensors = named(spec, head.weights, _modules(spec, layer))
    if head.vocabulary is not None:
        marks = np.zeros(spec.vocab_size, np.uint8)
        marks[head.vocabulary] = 1
        tensors["d2t"] = ids_tensor(head.vocabulary - np.arange(len(head.vocabulary)))
        tensors["t2d"] = HostTensor(marks, "bool")
    return tensors


def _aux(c: Config) -> tuple[int, ...] | None:
    """Return the ids of streams: vLLM's at the top level, or SGLang's in `eagle_config`, which are less by one."""
    top, inner = c.get_indices(AUX, None), c.sub("eagle_config")
    nested: list[int] | None = None
    if inner is not None:
        nested = inner.get_indices(AUX, None)
        for name in ("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"):
            inner.expect(name, True)
        inner.expect("use_mtp_layernorm", False)
        inner.expect("next_layer_regular", True)
        inner.expect("parallel_draft_step", 1)
        inner.finish(HARMLESS | {"parallel_draft_heads_num_layers"})
    if top and nested and top != [i + 1 for i in nested]:
        raise c.error(AUX, f"is {top}, but eagle_config has {nested}, which must be the same numbers less one")
    ids = top or ([i + 1 for i in nested] if nested else None)
    return tuple(ids) if ids else None


def _verifier(c: Config) -> tuple[str | None, int | None]:
    """Return the target's name and the recommended number of draft tokens."""
    inner = c.sub("speculators_config")
    if inner is None:
        return None, None
    if (algorithm := inner.get_str("algorithm")) != "eagle3":
        raise inner.error("algorithm", f"is {algorithm!r:.100}, and speculators_model_type is 'eagle3'")
    inner.get_str("default_proposal_method", None, None)
    methods, depth = inner.get_list("proposal_methods", []), None
    if methods and isinstance(methods[0], dict):
        depth = Config(methods[0], "config.json: proposal_methods[0].").get_size("speculative_tokens", None, None)
    verifier = inner.sub("verifier")
    inner.finish(())
    return (None if verifier is None else verifier.get_str("name_or_path", None, None)), depth
