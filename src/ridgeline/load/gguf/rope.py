"""Read the rotation of a GGUF model as the `rope_parameters` of a config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ridgeline.archs.rope import yarn_temperature
from ridgeline.errors import CheckpointError
from ridgeline.load.gguf.facts import Facts, shortest

# The factors of low and high frequencies and the trained length of all published Llama 3 models.
_LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_fields(f: Facts, rotated: int, length: int) -> dict[str, Any]:
    """Return `rope_parameters`. rotated: rotated numbers of a head. length: longest context in tokens."""
    theta = f.real("rope.freq_base", 10_000.0)
    factor = f.real("rope.scaling.factor", f.real("rope.scale_linear", 0.0))
    kind = f.text("rope.scaling.type", "linear" if factor else "none")
    f.skip("rope.scaling.finetuned")
    fields: dict[str, Any] = {"rope_theta": theta, "rope_type": "default"}
    divisors = _divisors(f, "rope_freqs.weight", rotated)
    if divisors is not None and (divisors != 1).any():
        return {"rope_parameters": {**fields, **_by_divisors(divisors, theta, rotated, length)}}
    if "rope_factors_long.weight" in f.tensors:
        fields |= _long(f, rotated, length)
    elif kind == "linear" and factor not in (0.0, 1.0):
        fields |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        fields |= _yarn(f, factor, length)
    elif kind not in ("none", "linear"):
        raise f.error("rope.scaling.type", f"is {kind!r}, which is not supported without tensors of factors")
    f.skip("rope.scaling.original_context_length")
    return {"rope_parameters": fields}


def _yarn(f: Facts, factor: float, length: int) -> dict[str, Any]:
    """Return yarn's fields. The file may give the factor of queries and keys, or how it differs from the usual one."""
    if factor <= 0:
        raise f.error("rope.scaling.factor", f"is {factor}; it must be positive")
    f.expect("rope.scaling.yarn_ext_factor", 1.0)
    usual = yarn_temperature(factor, 1.0) * f.real("rope.scaling.attn_factor", 1.0)
    usual /= yarn_temperature(factor, f.real("rope.scaling.yarn_log_multiplier", 0.0))
    return {
        "rope_type": "yarn", "factor": factor,
        "original_max_position_embeddings": f.number("rope.scaling.original_context_length", length),
        "attention_factor": f.real("rope.scaling.yarn_attn_factor", usual),
        "beta_fast": f.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": f.real("rope.scaling.yarn_beta_slow", 1.0),
    }  # fmt: skip


def _long(f: Facts, rotated: int, length: int) -> dict[str, Any]:
    """Return LongRoPE, with factors for short and for long contexts."""
    short, long = (_divisors(f, f"rope_factors_{kind}.weight", rotated) for kind in ("short", "long"))
    if short is None or long is None:
        raise CheckpointError(f"{f.name} has rope_factors_long.weight without rope_factors_short.weight")
    fields: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [shortest(v) for v in short],
        "long_factor": [shortest(v) for v in long],
        "original_max_position_embeddings": f.number("rope.scaling.original_context_length", length),
    }
    if "rope.scaling.attn_factor" in f:
        fields["attention_factor"] = f.real("rope.scaling.attn_factor")
    return fields


def _divisors(f: Facts, name: str, rotated: int) -> np.ndarray[Any, Any] | None:
    """Return the numbers that divide the frequencies, or None."""
    tensor = f.tensors.get(name)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or tensor.shape != (rotated // 2,):
        raise CheckpointError(
            f"{f.name}: {name} is {tensor.type.name} {list(tensor.shape)}; it must be F32 [{rotated // 2}]"
        )
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        values = np.frombuffer(file.read(tensor.stop - tensor.start), "<f4")
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise CheckpointError(f"{f.name}: {name} must contain positive numbers only")
    return values


def _by_divisors(divisors: np.ndarray[Any, Any], theta: float, rotated: int, length: int) -> dict[str, Any]:
    """Return Llama 3's scaling if it has these divisors, otherwise a LongRoPE that has them for all lengths."""
    factor = shortest(divisors.max())
    if np.allclose(llama3_divisors(theta, rotated, factor, **_LLAMA3), divisors, rtol=1e-4):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    listed = [shortest(v) for v in divisors]
    return {
        "rope_type": "longrope", "short_factor": listed, "long_factor": listed, "attention_factor": 1.0,
        "original_max_position_embeddings": length,
    }  # fmt: skip


def llama3_divisors(
    theta: float, rotated: int, factor: float, low_freq_factor: float, high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray[Any, Any]:  # fmt: skip
    """Return the numbers by which Llama 3's scaling divides the frequencies (arXiv:2407.21783), float64."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, rotated, 2) / rotated)
    rotations = original_max_position_embeddings / wavelength
    smooth = np.clip((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
