"""`ridgeline doctor`: report the machine, the installed packages, and the backend of each operation on each device."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Table
    from ridgeline.ops import OpsTable

PACKAGES = (
    "ridgeline", "numpy", "ml_dtypes", "tokenizers", "safetensors", "huggingface_hub", "jinja2", "torch", "triton",
)  # fmt: skip
# Schemes of `ridgeline quantize` and types of checkpoints -> the format of their matrices.
SCHEMES = {
    "awq-int4, gptq-int4": "int4-asym-exact", "gptq-int4, groups of 128": "int4-128-asym-exact",
    "GPTQ without zero points": "int4-128-exact", "gptq-int3": "int3-asym-exact", "gptq-int2": "int2-asym-exact",
    "gptq-int6": "int6-asym-exact", "rtn-int8": "int8-exact", "smooth-int8, W8A8": "int8", "llm.int8": "int8-outliers",
    "fp8": "fp8", "FP8_DYNAMIC": "fp8-fp8", "fp8 in blocks": "fp8-128x128", "GGUF Q4_0": "int4-exact",
    "GGUF Q8_0": "int8-32-exact", "nf4": "nf4-64", "MXFP4": "fp4-32", "NVFP4": "fp4-16",
}  # fmt: skip
CPU_FLAGS = ("avx2", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
ARM_FLAGS = ("asimd", "asimddp", "i8mm")


def doctor(
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help="Report on one device: auto, cpu, reference, cuda or cuda:N. Default: all devices."
        ),
    ] = None,
    ops: o.Ops = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the machine, its devices, package versions, and the backend that serves each operation."""
    from ridgeline.ops import devices, open_table, resolve_device

    found, overrides = {d.name: d.description for d in devices()}, o.parse_ops(ops)
    if device is None and overrides:
        device = "auto"  # backends of other devices have other names
    names = list(found) if device is None else [resolve_device(device)]
    report = {
        "machine": machine(),
        "kernels": kernels(),
        "devices": {name: f"{text}{_calibrated(name)}" for name, text in found.items()} | missing_devices(),
        "versions": versions(),
        "schemes": {name: scheme_rows(open_table(name, overrides)) for name in names},
        "ops": {name: op_rows(open_table(name, overrides)) for name in names},
    }
    if json_output:
        import json

        print(json.dumps(report, indent=2))
    else:
        _print(report)


def machine() -> dict[str, str]:
    """Return facts about this computer that need no measurement."""
    from ridgeline.spec.text import num_bytes
    from ridgeline.system import cpu_info, cpu_name, free_bytes, huge_pages, num_cores, total_bytes

    cpu, huge = cpu_info(), huge_pages()
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpu": cpu_name(),
        "cores": str(num_cores()),
        "instructions": " ".join(f for f in CPU_FLAGS + ARM_FLAGS if f in flags) or "unknown",
        "memory": f"{total_bytes() / 2**30:.1f} GiB, {free_bytes() / 2**30:.1f} GiB available",
        "huge pages": f"{num_bytes(huge.size) if huge.size else 'none'}: {huge.reason}",
        "python": f"{platform.python_version()} ({sys.executable})",
    }


def kernels() -> dict[str, str]:
    """Return facts about the C++ kernels of device cpu, or why they are missing, the cost and the remedy."""
    from ridgeline.ops.devices import KERNELS_COST, KERNELS_REMEDY

    try:
        module: Any = import_module("ridgeline._kernels")
    except ImportError as e:
        return {
            "extension": f"missing: {e}",
            "cost": KERNELS_COST,
            "remedy": f"{KERNELS_REMEDY}; pip -v shows what failed",
        }
    unit = module.matrix_unit()
    found = {"extension": str(module.__file__), "instructions": module.isa()}
    found["matrix unit"] = f"none: {module.unit_refusal()}" if unit == "none" else unit
    if unit != "none":
        refusal = module.bf16_refusal()
        found["matrix unit for bf16"] = f"none: {refusal}" if refusal else unit
    refusal = module.dots_refusal()
    found["dot products of bf16"] = f"none: {refusal}" if refusal else "for bfloat16 matrices with --activations bf16"
    refusal = module.rounded_refusal()
    found["rounded attention"] = f"none: {refusal}" if refusal else "for a KV cache of 16 bits with --attention bf16"
    return {**found, "threads": str(module.usable_cores())}


def missing_devices() -> dict[str, str]:
    """Return devices that need packages which are not installed."""
    from ridgeline.ops.devices import has_torch
    from ridgeline.ops.table import REFERENCE

    needs = "needs torch, as does training: pip install 'ridgeline[torch]'"
    return {} if has_torch() else {f"{REFERENCE}, cuda": needs}


def _calibrated(device: str) -> str:
    """Return what a GPU is and whether it was calibrated, to be added to its name; nothing for other devices."""
    from ridgeline.cost.gpu_calibration import GPU_REMEDY, load_gpu
    from ridgeline.ops.devices import gpu_facts

    if not device.startswith("cuda"):
        return ""
    facts = gpu_facts(device)
    found = load_gpu(facts)
    size = f"{int(facts['memory']) / 2**30:.0f} GiB, compute capability {facts['capability']}"
    if found is None:
        return f", {size}; not calibrated: {GPU_REMEDY}"
    rates = found.rates
    peaks = ", ".join(f"{kind} {flops / 1e12:.0f}" for kind, flops in rates.flops_per_s.items())
    return f", {size}; calibrated on {found.date}: copies {rates.copy_bytes_per_s / 1e12:.2f} TB/s, TFLOP/s: {peaks}"


def versions() -> dict[str, str]:
    from importlib import metadata

    out = {}
    for package in PACKAGES:
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out


def scheme_rows(table: OpsTable) -> list[dict[str, str]]:
    """Return for each scheme of quantized models the backend that multiplies with its matrices.

    dequantized: the device has kernels, but none for the scheme, so that its matrices become floats when they load.
    """
    from ridgeline.ops import api
    from ridgeline.ops.table import COMPOSED
    from ridgeline.spec.quant import PLAIN, format_of

    has_kernels = table.choose(api.PRODUCT, PLAIN).backend != COMPOSED
    rows = []
    for scheme, name in SCHEMES.items():
        choice = table.choose(api.PRODUCT, format_of(name))
        is_served = choice.backend != COMPOSED
        served = choice.backend if is_served else "dequantized" if has_kernels else choice.backend
        refusals = "; ".join(f"{backend}: {reason}" for backend, reason in choice.refusals)
        rows.append(
            {"scheme": scheme, "format": name, "served by": served, "refused by": "" if is_served else refusals}
        )
    return rows


def op_rows(table: OpsTable) -> list[dict[str, Any]]:
    """Return the backend of each op, for a plain case and for cases that kernels may refuse."""
    rows = []
    for op, label, case in _cases():
        choice = table.choose(op, case)
        rows.append(
            {
                "op": choice.op,
                "level": choice.level,
                "case": label,
                "backend": choice.backend,
                "refusals": dict(choice.refusals),
            }
        )
    return rows


def _indexed() -> dict[str, list[tuple[str, object]]]:
    from ridgeline.ops.indexed import IndexedInput
    from ridgeline.spec import IndexedAttention, Indexer, LatentAttention, LayerNorm, RMSNorm, Rope

    latent = LatentAttention(16, 512, 128, 64, 128, 192**-0.5, RMSNorm(), q_lora_rank=1536, rope=Rope(64))
    case = IndexedAttention(latent, Indexer(64, 128, 2048, LayerNorm()))
    both: dict[str, list[tuple[str, object]]] = {n: [("indexed", case)] for n in ("select_keys", "indexed_attention")}
    return {**both, "indexed_input": [("indexed", IndexedInput(case, RMSNorm(), 1.0))]}


def _cases() -> Iterator[tuple[Any, str, object]]:
    from ridgeline.ops import api
    from ridgeline.ops.stages import AttentionInput, Head, LatentInput, MLPBlock, RecurrentBlock
    from ridgeline.spec import (
        Attention,
        GatedDelta,
        GatedMLP,
        KimiDelta,
        LatentAttention,
        LayerNorm,
        Mamba,
        Mamba2,
        MoE,
        RMSNorm,
        Rope,
        TaylorAttention,
    )
    from ridgeline.spec.quant import FORMATS
    from ridgeline.spec.storage import STORAGES

    rope, rms = Rope(64), RMSNorm()
    plain = Attention(8, 2, 64, 0.125, rope)
    latent = LatentAttention(16, 512, 128, 64, 128, 192**-0.5, rms, rope=rope)
    mamba, mamba2 = Mamba(1024, 16, 4, 32), Mamba2(16, 64, 64, 1, 4, rms)
    deltas: list[tuple[str, object]] = [
        ("GatedDelta", GatedDelta(16, 8, 64, 64, 4, rms)),
        ("KimiDelta", KimiDelta(16, 64, 4, 64, rms)),
    ]
    cases: dict[str, list[tuple[str, object]]] = {
        "norm": [("RMSNorm", rms), ("LayerNorm", LayerNorm())],
        "rope": [("halves", rope), ("interleaved", Rope(64, interleaved=True))],
        **dict.fromkeys(("attention", "paged_attention"), _attention()),
        "write_pages": [("grouped", plain), ("latent", latent)],
        **{name: [("latent", latent)] for name in ("latent_attention", "paged_latent_attention")},
        "store_rows": [(name, storage) for name, storage in STORAGES.items() if not storage.is_exact],
        "activation": [("GatedMLP", GatedMLP(1024))],
        **{name: [("MoE", MoE(8, 2, 1024))] for name in ("route", "experts", "expert_block")},
        "product": [*FORMATS.items(), *_gguf_types()],
        **{name: [("int8", FORMATS["int8"])] for name in ("quantize", "dequantize", "quantized_linear")},
        **{name: [("grouped", AttentionInput(plain, rms, 1.0))] for name in ("attention_input", "query_input")},
        "latent_input": [("latent", LatentInput(latent, rms, 1.0))],
        **_indexed(),
        "attention_output": [("grouped", plain)],
        "mlp_block": [(type(m).__name__, MLPBlock(m, rms, 1.0)) for m in (GatedMLP(1024), MoE(8, 2, 1024))],
        "selective_scan": [("Mamba", mamba)],
        "ssd": [("Mamba2", mamba2)],
        "gated_norm": [("Mamba2", mamba2)],
        "taylor_attention": [("TaylorAttention", TaylorAttention(16, 64, 16))],
        "delta_rule": deltas,
        "norm_gate": deltas,
        "recurrent_block": [("Mamba", RecurrentBlock(mamba, rms, 1.0)), ("Mamba2", RecurrentBlock(mamba2, rms, 1.0))],
        "head": [("plain", Head(rms, 1.0, 1.0, None))],
    }
    for op in (*api.PRIMITIVES, *api.STAGES):
        for label, case in cases.get(op.name, [("-", None)]):
            yield op, label, case


def _attention() -> list[tuple[str, object]]:
    from ridgeline.spec import Attention, Blocks, Rope, WholeSequence

    plain = Attention(8, 2, 64, 0.125, Rope(64))
    more: dict[str, dict[str, Any]] = {
        "sliding window": {"window": 4096},
        "softcap": {"softcap": 50.0},
        "sinks": {"sinks": True},
        "blocks": {"sight": Blocks(16)},
        "whole sequence": {"sight": WholeSequence()},
    }
    return [("grouped", plain), *((name, replace(plain, **fields)) for name, fields in more.items())]


def _gguf_types() -> list[tuple[str, object]]:
    """Return the quantized types of GGUF files, with the format of their matrices."""
    from ridgeline.load.gguf.blocks import TYPES
    from ridgeline.load.gguf.stored import format_of_block

    return [(f"GGUF {kind.name}", format_of_block(kind)) for kind in TYPES.values() if not kind.is_float]


def _print(report: dict[str, Any]) -> None:
    from ridgeline.cli.show.tables import screen, show

    titles = ("machine", "kernels", "devices", "versions")
    facts = [facts_table(title, report[title]) for title in titles]
    schemes = (schemes_table(f"schemes on {device}", rows) for device, rows in report["schemes"].items())
    ops = (ops_table(f"ops on {device}", rows) for device, rows in report["ops"].items())
    show(screen(), *facts, *schemes, *ops)


def facts_table(title: str, facts: Mapping[str, str]) -> Table:
    """Return a table of facts by name."""
    from ridgeline.cli.show.tables import Column, Table

    table = Table(title, (Column("", right=False), Column("value", right=False, wraps=True)), has_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def schemes_table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of the rows of `scheme_rows`."""
    from ridgeline.cli.show.tables import Column, Table

    names = ("scheme", "format", "served by", "refused by")
    table = Table(title, [Column(name, right=False, wraps=name == "refused by") for name in names])
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def ops_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the rows of `op_rows`."""
    from ridgeline.cli.show.tables import Column, Table

    names = ("op", "case", "served by", "refused by")
    table = Table(title, [Column(name, right=False, wraps=name == "refused by") for name in names])
    for row in rows:
        refusals = "; ".join(f"{backend}: {reason}" for backend, reason in row["refusals"].items())
        table.add_row(row["op"], row["case"], row["backend"], refusals)
    return table
