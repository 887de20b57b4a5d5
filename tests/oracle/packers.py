"""Quantized checkpoints, packed number by number as the tools' own sources define their formats.

A recipe packs one matrix [out, in] of floats. It returns the tensors of its module, and the dequantized matrix. No code
of the readers is used here, and each number is put on its own, so that mistakes are hard to make twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor, np.random.Generator], tuple[Tensors, torch.Tensor]]
# Modules that tools leave in floats: tables, heads, routers, and matrices that decide how others are used.
KEPT = re.compile(
    r"embed|wte|wpe|lm_head|(gate|router|layer|proj)\.weight_|\.gate\.weight$|router|shared_expert_gate|conv1d|x_proj|dt_proj"
)


@dataclass(frozen=True)
class Recipe:
    """How to pack the matrices of a checkpoint.

    pack: packs one matrix. config: the quantization_config. extra: tensors by their whole names.
    """

    pack: Pack
    config: Mapping[str, Any]
    extra: Tensors = field(default_factory=dict)
    kept: re.Pattern[str] = KEPT


def write(recipe: Recipe, source: Path, target: Path, transposed: bool = False) -> Tensors:
    """Write a packed copy of a model's folder. Return the tensors of the dequantized checkpoint.

    transposed: whether matrices are stored [in, out] (GPT-2).
    """
    rng = np.random.default_rng(5)
    packed: Tensors = dict(recipe.extra)
    dense: Tensors = {}
    for name, value in load_file(source / "model.safetensors").items():
        if value.ndim != 2 or not name.endswith(".weight") or recipe.kept.search(name):
            packed[name] = dense[name] = value
            continue
        parts, wide = recipe.pack(value.T if transposed else value, rng)
        packed.update({name.removesuffix("weight") + part: x.contiguous().clone() for part, x in parts.items()})
        dense[name] = (wide.T if transposed else wide).contiguous()
    target.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": dict(recipe.config)}))
    save_file(packed, target / "model.safetensors")
    return dense


# ---- numbers -------------------------------------------------------------------------------------------------


def spread(per_group: np.ndarray, columns: int, group: int) -> np.ndarray:
    return np.repeat(per_group, group, axis=1)[:, :columns]


def rounded(w: np.ndarray, bits: int, group: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes from 0 to 2^bits - 1 [out, in], scales in float16 and zero points, both [out, groups]."""
    rows, columns = w.shape
    group = group or columns
    most, groups = 2**bits - 1, -(-columns // group)
    scales, zeros = np.empty((rows, groups), np.float16), np.empty((rows, groups), np.int64)
    for g in range(groups):
        part = w[:, g * group : (g + 1) * group]
        if symmetric:
            scales[:, g] = 2 * np.abs(part).max(1) / most + 1e-6
            zeros[:, g] = 2 ** (bits - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, g] = (high - low) / most + 1e-6
            zeros[:, g] = np.clip(np.rint(-low / scales[:, g]), 0, most)
    wide = spread(scales.astype(np.float32), columns, group)
    codes = np.clip(np.rint(w / wide) + spread(zeros, columns, group), 0, most).astype(np.int64)
    return codes, scales, zeros


def dequantized(codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group: int) -> torch.Tensor:
    columns = codes.shape[1]
    group = group or columns
    steps = (codes - spread(zeros, columns, group)).astype(np.float32)
    return torch.from_numpy(steps * spread(scales.astype(np.float32), columns, group))


def bit_stream(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Return the words of a row of numbers, each at bit `index * bits`, int32."""
    total = 0
    for i, number in enumerate(numbers):
        total |= int(number) << (i * bits)
    words = -(-len(numbers) * bits // 32)
    return np.array([total >> (32 * k) & 0xFFFFFFFF for k in range(words)], np.uint32).view(np.int32)


def in_words(rows: np.ndarray, bits: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([bit_stream(row, bits) for row in rows]))


# ---- AWQ and GPTQ ----------------------------------------------------------------------------------------------


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ, awq/utils/packing_utils.py and awq/modules/linear/gemm.py


def awq_words(numbers: np.ndarray) -> torch.Tensor:
    """Return numbers [n, out] as words [n, out / 8]; see `WQLinear_GEMM.from_linear`."""
    out = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
    for column in range(out.shape[1]):
        for i in range(8):
            out[:, column] |= numbers[:, column * 8 + AWQ_ORDER[i]].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(out.view(np.int32))


def awq(group: int = 32) -> Recipe:
    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = rounded(w.numpy(), 4, group, False)
        parts = {
            "qweight": awq_words(codes.T), "qzeros": awq_words(zeros.T), "scales": torch.from_numpy(scales.T.copy()),
        }  # fmt: skip
        return parts, dequantized(codes, scales, zeros, group)

    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True, "version": "gemm"}
    return Recipe(pack, config)


def gptq(
    bits: int = 4, group: int = 32, *, symmetric: bool = False, v2: bool = False, ordered: bool = False, **more: Any
) -> Recipe:
    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        columns = w.shape[1]
        order = rng.permutation(columns) if ordered else np.arange(columns)
        codes, scales, zeros = rounded(w.numpy()[:, order], bits, group, symmetric)
        members = np.empty(columns, np.int32)
        members[order] = np.arange(columns) // (group or columns)
        dense = torch.empty(w.shape)
        dense[:, order] = dequantized(codes, scales, zeros, group)
        placed = np.empty_like(codes)
        placed[:, order] = codes
        stored = zeros if v2 else (zeros - 1) & (2**bits - 1)
        parts = {
            "qweight": in_words(placed, bits).T, "qzeros": in_words(stored.T, bits),
            "scales": torch.from_numpy(scales.T.copy()), "g_idx": torch.from_numpy(members),
        }  # fmt: skip
        return parts, dense

    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": ordered,
        "checkpoint_format": "gptq_v2" if v2 else "gptq", "lm_head": False, **more,
    }  # fmt: skip
    return Recipe(pack, config)


# ---- compressed-tensors ----------------------------------------------------------------------------------------


def compressed(format: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a quantization_config with one group."""
    group = {"targets": ["Linear"], "weights": dict(weights), "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group}, "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }  # fmt: skip


def args(bits: int, kind: str, strategy: str, group: int | None = None, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "group_size": group} | more


TOKEN_INT8 = args(8, "int", "token", dynamic=True)
TOKEN_FP8 = args(8, "float", "token", dynamic=True)


def ct_packed(bits: int = 4, group: int = 32, *, symmetric: bool = True, ordered: bool = False) -> Recipe:
    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        columns = w.shape[1]
        order = rng.permutation(columns) if ordered else np.arange(columns)
        codes, scales, zeros = rounded(w.numpy()[:, order], bits, group, symmetric)
        dense, placed = torch.empty(w.shape), np.empty_like(codes)
        dense[:, order] = dequantized(codes, scales, zeros, group)
        placed[:, order] = codes
        parts = {
            "weight_packed": in_words(placed, bits), "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(w.shape),
        }  # fmt: skip
        if not symmetric:
            parts["weight_zero_point"] = in_words(zeros.T, bits).T
        if ordered:
            members = np.empty(columns, np.int32)
            members[order] = np.arange(columns) // (group or columns)
            parts["weight_g_idx"] = torch.from_numpy(members)
        return parts, dense

    own = args(bits, "int", "group" if group else "channel", group or None, actorder="group" if ordered else None)
    return Recipe(pack, compressed("pack-quantized", own | {"symmetric": symmetric}))


def ct_int8(*, symmetric: bool = True, static: bool = False) -> Recipe:
    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = rounded(w.numpy(), 8, 0, symmetric)
        parts = {"weight": torch.from_numpy((codes - 128).astype(np.int8)), "weight_scale": torch.from_numpy(scales)}
        if not symmetric:
            parts["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8))
        if static:
            parts["input_scale"] = torch.tensor([0.05])
        return parts, dequantized(codes, scales, zeros, 0)

    inputs = args(8, "int", "tensor", dynamic=False) if static else TOKEN_INT8
    return Recipe(pack, compressed("int-quantized", args(8, "int", "channel") | {"symmetric": symmetric}, inputs))


def fp8_codes(w: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = (w / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.float() * scale


def fp8_scale(w: torch.Tensor, by: str) -> torch.Tensor:
    peak = w.abs().max() if by == "tensor" else w.abs().amax(1, keepdim=True)
    return (peak / 448).float()


def ct_fp8(strategy: str = "channel", block: tuple[int, int] = (16, 24)) -> Recipe:
    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        if strategy == "block":
            scale = blocks_of(w, block)
            codes, dense = fp8_codes(w, over_blocks(scale, w.shape, block))
            return {"weight": codes, "weight_scale": scale}, dense
        scale = fp8_scale(w, strategy)
        codes, dense = fp8_codes(w, scale)
        return {"weight": codes, "weight_scale": scale.reshape(1) if strategy == "tensor" else scale}, dense

    own = args(8, "float", strategy) | ({"block_structure": list(block)} if strategy == "block" else {})
    inputs = args(8, "float", "group", 24, dynamic=True) if strategy == "block" else TOKEN_FP8
    return Recipe(pack, compressed("float-quantized", own, inputs))


def blocks_of(w: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return the scale of each block: its largest magnitude over 448."""
    shape = [-(-n // size) for n, size in zip(w.shape, block, strict=True)]
    scale = torch.zeros(shape)
    for i in range(shape[0]):
        for j in range(shape[1]):
            part = w[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scale[i, j] = part.abs().max() / 448
    return scale


def over_blocks(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Return the scale of each number of a matrix."""
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return scale[rows][:, columns]


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def fp4_codes(w: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    """Return codes [out, in] of the nearest fp4 numbers, and the dequantized matrix. scale: [out, in]."""
    levels = np.array([*FP4, *(-x for x in FP4)], np.float32)
    codes = np.abs((w / scale)[..., None] - levels).argmin(-1)
    return codes, torch.from_numpy(levels[codes] * scale)


def fp4_bytes(codes: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8))


def nvfp4(*, modelopt: bool = False) -> Recipe:
    """Two scales are divided by compressed-tensors and multiplied by ModelOpt."""

    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        peaks = w.abs().reshape(w.shape[0], -1, 16).amax(2)
        factor = 448 * 6 / w.abs().max()
        scale = (peaks / 6 * factor).to(torch.float8_e4m3fn)
        wide = scale.float() * (1 / factor) if modelopt else scale.float() / factor
        codes, dense = fp4_codes(w.numpy(), wide.repeat_interleave(16, 1).numpy())
        if modelopt:
            return {
                "weight": fp4_bytes(codes), "weight_scale": scale, "weight_scale_2": 1 / factor,
                "input_scale": torch.tensor(0.01),
            }, dense  # fmt: skip
        parts = {"weight_packed": fp4_bytes(codes), "weight_scale": scale, "weight_global_scale": factor.reshape(1)}
        return parts, dense

    if modelopt:
        return Recipe(pack, {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]})
    own = args(4, "float", "tensor_group", 16, dynamic=False)
    return Recipe(pack, compressed("nvfp4-pack-quantized", own))


def ct_mxfp4() -> Recipe:
    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        peaks = w.abs().reshape(w.shape[0], -1, 32).amax(2)
        exponent = torch.floor(torch.log2(peaks)) - 2
        scale = torch.exp2(exponent)
        codes, dense = fp4_codes(w.numpy(), scale.repeat_interleave(32, 1).numpy())
        return {"weight_packed": fp4_bytes(codes), "weight_scale": (exponent + 127).to(torch.uint8)}, dense

    own = args(4, "float", "group", 32, scale_dtype="torch.uint8")
    return Recipe(pack, compressed("mxfp4-pack-quantized", own))


# ---- bitsandbytes ------------------------------------------------------------------------------------------------


def bnb_int8() -> Recipe:
    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        peak = w.abs().amax(1)
        codes = torch.round(w * (127 / peak)[:, None]).to(torch.int8)
        return {"weight": codes, "SCB": peak, "weight_format": torch.tensor(0, dtype=torch.uint8)}, (
            codes.float() * (peak / 127)[:, None]
        )

    return Recipe(pack, {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0})


# bitsandbytes, csrc/kernels.cu: the numbers of nf4, from the smallest.
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def bnb_nf4(*, nested: bool = False, block: int = 64) -> Recipe:
    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        flat = w.reshape(-1).numpy()
        starts = range(0, len(flat), block)
        peaks = np.array([np.abs(flat[i : i + block]).max() for i in starts], np.float32)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(w.shape)}
        parts: Tensors = {"weight.quant_map": torch.tensor(NF4)}
        if nested:
            offset = float(peaks.mean())
            table = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            outer = np.array([np.abs(peaks[i : i + 256] - offset).max() for i in range(0, len(peaks), 256)], np.float32)
            wide = np.repeat(outer, 256)[: len(peaks)]
            codes = np.abs(((peaks - offset) / wide)[:, None] - table).argmin(1).astype(np.uint8)
            peaks = table[codes] * wide + np.float32(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            parts |= {
                "weight.absmax": torch.from_numpy(codes), "weight.nested_absmax": torch.from_numpy(outer),
                "weight.nested_quant_map": torch.from_numpy(table),
            }  # fmt: skip
        else:
            parts["weight.absmax"] = torch.from_numpy(peaks)
        levels, wide = np.array(NF4, np.float32), np.repeat(peaks, block)[: len(flat)]
        found = np.abs((flat / wide)[:, None] - levels).argmin(1)
        dense = torch.from_numpy(levels[found] * wide).reshape(w.shape)
        found = np.concatenate((found, np.zeros(len(found) % 2, found.dtype)))
        parts["weight"] = torch.from_numpy((found[0::2] << 4 | found[1::2]).astype(np.uint8))[:, None]
        text = json.dumps(state).encode()
        parts["weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return parts, dense

    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
    return Recipe(pack, config | {"bnb_4bit_use_double_quant": nested})


# ---- fp8 ---------------------------------------------------------------------------------------------------------


def plain_fp8(by: str, config: Mapping[str, Any], extra: Tensors | None = None, scale_shape: Any = None) -> Recipe:
    """A matrix in fp8 with a scale for the matrix or for each row. extra: further tensors of each module."""

    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        scale = fp8_scale(w, by)
        codes, dense = fp8_codes(w, scale)
        stored = scale if scale_shape is None else scale.reshape(scale_shape)
        return {"weight": codes, "weight_scale": stored, **(extra or {})}, dense

    return Recipe(pack, config)


def fp8_blocks(block: tuple[int, int] = (16, 24)) -> Recipe:
    """Blocks with a scale each, as DeepSeek-V3 stores them."""

    def pack(w: torch.Tensor, rng: np.random.Generator) -> tuple[Tensors, torch.Tensor]:
        scale = blocks_of(w, block)
        codes, dense = fp8_codes(w, over_blocks(scale, w.shape, block))
        return {"weight": codes, "weight_scale_inv": scale}, dense

    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return Recipe(pack, config)


MODELOPT_FP8 = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "exclude_modules": ["lm_head"],
    "kv_cache_quant_algo": None,
}
AUTO_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
DYNAMIC_FP8 = AUTO_FP8 | {"activation_scheme": "dynamic"}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
RECIPES: dict[str, Recipe] = {
    "awq": awq(), "awq-rows": awq(0), "gptq-v1": gptq(), "gptq-v2": gptq(v2=True), "gptq-sym": gptq(symmetric=True),
    "gptq-order": gptq(ordered=True), "gptq-8": gptq(8, 0), "gptq-3": gptq(3, 32, v2=True),
    "gptq-3-sym-order": gptq(3, 32, symmetric=True, ordered=True), "gptq-2-order": gptq(2, 16, ordered=True),
    "packed-4": ct_packed(), "packed-4-asym": ct_packed(symmetric=False), "packed-3": ct_packed(3),
    "packed-3-asym": ct_packed(3, symmetric=False), "packed-2": ct_packed(2, 16), "packed-8": ct_packed(8, 0),
    "packed-6": ct_packed(6, 24, symmetric=False), "packed-order": ct_packed(4, symmetric=False, ordered=True),
    "int8": ct_int8(), "int8-asym": ct_int8(symmetric=False), "int8-static": ct_int8(static=True),
    "fp8-channel": ct_fp8(), "fp8-tensor": ct_fp8("tensor"), "fp8-block": ct_fp8("block"), "nvfp4": nvfp4(),
    "mxfp4": ct_mxfp4(), "bnb-int8": bnb_int8(), "nf4": bnb_nf4(), "nf4-nested": bnb_nf4(nested=True),
    "modelopt-fp8": plain_fp8("tensor", MODELOPT_FP8, {"input_scale": torch.tensor(0.02)}),
    "modelopt-rows": plain_fp8("row", MODELOPT_FP8 | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, scale_shape=(-1,)),
    "modelopt-nvfp4": nvfp4(modelopt=True),
    "fp8-static": plain_fp8("tensor", AUTO_FP8, {"input_scale": torch.tensor([0.02])}, (1,)),
    "fp8-blocks": fp8_blocks(), "fp8-dynamic": plain_fp8("tensor", DYNAMIC_FP8),
    "fbgemm": plain_fp8("row", FBGEMM, {"input_scale_ub": torch.tensor([1200.0])}),
}  # fmt: skip
