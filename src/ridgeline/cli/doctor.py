"""`ridgeline doctor`: the machine, what is installed, and which kernel serves what, with the reason."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli import options as o

if TYPE_CHECKING:
    from ridgeline.ops import OpsTable

PACKAGES = ("ridgeline", "torch", "numpy", "tokenizers", "safetensors", "huggingface_hub", "jinja2", "triton")
CPU_FLAGS = ("avx2", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd")


def doctor(
    device: o.Device = "auto",
    ops: o.Ops = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the machine, its devices, the versions, and who serves each operation."""
    from ridgeline.ops import devices, open_table, resolve_device

    name = resolve_device(device)
    table = open_table(name, o.parse_ops(ops))
    report = {
        "machine": machine(),
        "devices": {d.name: d.description for d in devices()},
        "device": name,
        "versions": versions(),
        "ops": op_rows(table),
    }
    if json_output:
        import json

        print(json.dumps(report, indent=2))
    else:
        _print(report)


def machine() -> dict[str, str]:
    """What can be said of this computer without measuring."""
    cpu = _cpuinfo()
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cpu": cpu.get("model name", platform.processor() or "unknown"),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "instructions": " ".join(f for f in CPU_FLAGS if f in flags) or "unknown",
        "memory": _memory(),
        "python": f"{platform.python_version()} ({sys.executable})",
    }


def versions() -> dict[str, str]:
    out = {}
    for package in PACKAGES:
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out


def op_rows(table: OpsTable) -> list[dict[str, Any]]:
    """Who serves each op, for a plain case and for those that kernels tend to refuse."""
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

    rope, rms = Rope(64), RMSNorm()
    plain = Attention(8, 2, 64, 0.125, rope)
    latent = LatentAttention(16, 512, 128, 64, 128, 192**-0.5, rms, rope=rope)
    mamba, mamba2 = Mamba(1024, 16, 4, 32), Mamba2(16, 64, 64, 1, 4, rms)
    deltas = [("GatedDelta", GatedDelta(16, 8, 64, 64, 4, rms)), ("KimiDelta", KimiDelta(16, 64, 4, 64, rms))]
    cases: dict[str, list[tuple[str, object]]] = {
        "norm": [("RMSNorm", rms), ("LayerNorm", LayerNorm())],
        "rope": [("halves", rope), ("interleaved", Rope(64, interleaved=True))],
        "attention": [
            ("grouped", plain),
            ("sliding window", Attention(8, 2, 64, 0.125, rope, window=4096)),
            ("softcap", Attention(8, 2, 64, 0.125, rope, softcap=50.0)),
            ("sinks", Attention(8, 2, 64, 0.125, rope, sinks=True)),
        ],
        "latent_attention": [("latent", latent)],
        "paged_latent_attention": [("latent", latent)],
        "activation": [("GatedMLP", GatedMLP(1024))],
        "route": [("MoE", MoE(8, 2, 1024))],
        "experts": [("MoE", MoE(8, 2, 1024))],
        "attention_input": [("grouped", AttentionInput(plain, rms, 1.0))],
        "query_input": [("grouped", AttentionInput(plain, rms, 1.0))],
        "latent_input": [("latent", LatentInput(latent, rms, 1.0))],
        "attention_output": [("grouped", plain)],
        "mlp_block": [
            ("GatedMLP", MLPBlock(GatedMLP(1024), rms, 1.0)),
            ("MoE", MLPBlock(MoE(8, 2, 1024), rms, 1.0)),
        ],
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


def _cpuinfo() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory() -> str:
    path = Path("/proc/meminfo")
    if not path.exists():
        return "unknown"
    kib = {line.split(":")[0]: int(line.split()[1]) for line in path.read_text().splitlines() if line}
    return f"{kib['MemTotal'] / 2**20:.1f} GiB, {kib['MemAvailable'] / 2**20:.1f} GiB available"


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for title in ("machine", "devices", "versions"):
        console.print(f"[bold]{title}[/bold]")
        for name, value in report[title].items():
            console.print(f"  {name:<16} {value}", markup=False)
    console.print(f"[bold]ops on {report['device']}[/bold]")
    console.print(f"  {'op':<22} {'case':<15} {'served by':<10} refused by")
    for row in report["ops"]:
        refusals = "; ".join(f"{backend}: {reason}" for backend, reason in row["refusals"].items())
        line = f"  {row['op']:<22} {row['case']:<15} {row['backend']:<10} {refusals}"
        console.print(line.rstrip(), markup=False)
