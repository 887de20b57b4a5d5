"""DiffusionGemma: Gemma 4 with experts, which fills canvases of tokens that see themselves whole."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import WITHOUT_SIGHT, Family, decoder, rms_norm
from ridgeline.archs.gemma4 import Kinds, mixers_of, names_under
from ridgeline.archs.names import Elsewhere, Tensor
from ridgeline.spec import CanvasDiffusion, GatedMLP, Layer, ModelSpec, MoE, PairedMLP


def diffusion_gemma(c: Config) -> ModelSpec:
    """DiffusionGemma 26B-A4B: the language model of one that also sees, with a canvas of one token."""
    c.expect("use_bidirectional_attention", "vision")  # images see themselves whole; a text does not
    c.expect("attention_k_eq_v", True, False)  # the class does not read it: global layers have no matrix of values
    c.expect("tie_word_embeddings", True)
    norm, kinds = rms_norm(c), Kinds.read(c, keys_are_values=True)
    activation = c.get_activation("hidden_activation", "gelu_pytorch_tanh")
    dense = GatedMLP(c.get_size("intermediate_size"), activation)
    experts, chosen, inner = (c.get_size(n) for n in ("num_experts", "top_k_experts", "moe_intermediate_size"))
    mlp = PairedMLP(dense, MoE(experts, chosen, inner, activation, expert_scale=True), norm)
    mixers = mixers_of(c, kinds, norm, shared=True)
    layers = tuple(Layer(mixers[kind], mlp, norm, norm, out_scale=True, canvas_scale=True) for kind in kinds.layers)
    return decoder(
        c, layers, norm, tied=True, max_len=c.get_size("max_position_embeddings"),
        embedding_scale=c.get_size("hidden_size") ** 0.5, logit_softcap=c.get_positive("final_logit_softcapping", 30.0),
        diffusion=CanvasDiffusion(1, dense, norm),
    )  # fmt: skip


def _with_canvas(c: Config, spec: ModelSpec) -> ModelSpec:
    assert isinstance(spec.diffusion, CanvasDiffusion)
    return replace(spec, diffusion=replace(spec.diffusion, canvas=c.get_size("canvas_length", 256)))


_NAMES = names_under("model.decoder")
NAMES = _NAMES.with_parts(
    root={
        **_NAMES.root,
        "conditioning_norm": "model.decoder.self_conditioning.pre_norm",
        **{f"conditioning.{n}": f"model.decoder.self_conditioning.{n}_proj" for n in ("gate", "up", "down")},
    },
    parts={
        "scale": Elsewhere("model.encoder.language_model.layers.{i}.layer_scalar"),
        "canvas_scale": Tensor("layer_scalar"),
    },
    ignore=(*_NAMES.ignore, r"^model\.encoder\.(vision_tower|embed_vision)\."),
)
FAMILIES = (
    Family(
        "diffusion_gemma", diffusion_gemma, NAMES,
        harmless=("vision_config", "image_token_id", "boi_token_id", "eoi_token_id", "vision_soft_tokens_per_image"),
        within="text_config", note=WITHOUT_SIGHT, around=_with_canvas,
    ),
)  # fmt: skip
