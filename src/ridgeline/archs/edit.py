"""Say a changed ModelSpec in the config of its original family, where that config can say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ridgeline.archs import OUR_MODEL_TYPE, Names, family_of, spec_from_config
from ridgeline.archs.names import OURS
from ridgeline.archs.write import config_of
from ridgeline.errors import ConfigError
from ridgeline.spec import Attention, Mamba, Mamba2, ModelSpec, MoE, SharedAttention, to_json

# The names of sizes in the configs of all families.
_WIDTH = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS, _KV_HEADS = ("num_attention_heads", "n_head"), ("num_key_value_heads",)
_DENSE, _ROUTED = ("intermediate_size", "n_inner"), ("moe_intermediate_size", "intermediate_size")
_SHARED = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
)  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_STATE_HEADS = ("mamba_num_heads", "mamba_n_heads", "num_heads")


def said_by_family(config: Mapping[str, Any], spec: ModelSpec, kept: list[int]) -> tuple[dict[str, Any] | None, str]:
    """Return the config of the original family that describes a spec, and why there is none.

    config: the original's. kept: indices of the layers of the original that the spec has, in order.
    """
    family = family_of(config)
    if family.within is not None:
        return None, f"a {family.model_type} config also describes parts that were not read"
    reason = ""
    for candidate in _candidates(config, spec, kept):
        try:
            found = spec_from_config(candidate)
        except ConfigError as e:
            reason = reason or str(e).removeprefix("config.json: ")
            continue
        if found == spec:
            return candidate, ""
        reason = reason or _difference(found, spec)
    return None, f"a {family.model_type} config cannot say it: {reason}"


def described(spec: ModelSpec) -> tuple[dict[str, Any], Names]:
    """Return a config that describes a spec, of a family that transformers supports or our own, and the names of its
    weights.
    """
    found = config_of(spec)
    if found["model_type"] != OUR_MODEL_TYPE:
        return found, family_of(found).names
    return {"model_type": OUR_MODEL_TYPE, "spec": to_json(spec)}, OURS


def _candidates(config: Mapping[str, Any], spec: ModelSpec, kept: list[int]) -> Iterator[dict[str, Any]]:
    """Yield configs with the new sizes in the fields that the original has, and then with fields that it left out."""
    old_layers = next((config[name] for name in _LAYERS if name in config), len(kept))
    sizes = _sizes(spec)
    edited = {
        name: [value[i] for i in kept] if isinstance(value, list) and len(value) == old_layers else value
        for name, value in config.items()
    }
    edited |= {name: size for name, size in sizes.items() if name in config and type(config[name]) is int}
    yield edited
    attention = next(iter(spec.attentions(shared=True)), None)
    for more in ({"head_dim": attention.head_dim if attention else 0}, {"n_inner": sizes.get("n_inner")}):
        yield {**edited, **more}


def _sizes(spec: ModelSpec) -> dict[str, int]:
    """Return sizes by every name of a field that may mean them."""
    found = dict.fromkeys(_LAYERS, len(spec.layers)) | dict.fromkeys(_WIDTH, spec.hidden_size)
    for layer in reversed(spec.layers):
        mixer = layer.mixer.attention if isinstance(layer.mixer, SharedAttention) else layer.mixer
        match mixer:
            case Attention():
                found |= dict.fromkeys(_HEADS, mixer.num_heads) | dict.fromkeys(_KV_HEADS, mixer.num_kv_heads)
            case Mamba2():
                found |= dict.fromkeys(_STATE_HEADS, mixer.num_heads)
            case Mamba():
                found["intermediate_size"] = mixer.inner_size
            case None:
                pass
            case _ if heads := getattr(mixer, "num_heads", 0):
                found |= dict.fromkeys((*_HEADS, *_KV_HEADS), heads)
    for layer in reversed(spec.layers):
        if isinstance(layer.mlp, MoE):
            found |= dict.fromkeys(_ROUTED, layer.mlp.intermediate_size) | dict.fromkeys(
                _EXPERTS, layer.mlp.num_experts
            )
            if layer.mlp.shared is not None:
                found |= dict.fromkeys(_SHARED, layer.mlp.shared.intermediate_size)
    for layer in reversed(spec.layers):
        if layer.mlp is not None and not isinstance(layer.mlp, MoE):
            found |= dict.fromkeys(_DENSE, layer.mlp.intermediate_size)
    return found


def _difference(a: Any, b: Any, path: str = "") -> str:
    """Return where two specs differ first, and both values."""
    if type(a) is type(b) and is_dataclass(a):
        for name in (f.name for f in fields(a)):
            if getattr(a, name) != getattr(b, name):
                return _difference(getattr(a, name), getattr(b, name), f"{path}.{name}" if path else name)
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        i = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        return _difference(a[i], b[i], f"{path}[{i}]")
    shown = [
        f"{x:.6g}" if isinstance(x, float) else str(x) if isinstance(x, int | str) else type(x).__name__ for x in (a, b)
    ]
    return f"{path} would be {shown[0]} instead of {shown[1]}"
