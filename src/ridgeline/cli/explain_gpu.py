"""`ridgeline explain --device cuda`: the settings of an engine on a GPU, which this machine need not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ridgeline.cli.flags.groups import StorageFlags
    from ridgeline.settings import EngineConfig, EngineOptions

DEFAULT_GPU = "h100"  # of the catalog
SERVED = "a100", "h100", "h200", "b200", "l4", "l40s", "rtx4090", "rtx5090"  # of the catalog: those with kernels


class _Gpu(NamedTuple):
    """A GPU, the bytes that are free on it without a model, and a line that says where they come from."""

    name: str
    free_bytes: int
    note: str


class _Explained(NamedTuple):
    """Facts about an engine on a GPU. parts: bytes within the workspace, by use."""

    name: str
    gpu: _Gpu
    config: EngineConfig
    weight_bytes: int
    parts: Mapping[str, int]
    arithmetic: Sequence[str]


def explain_gpu(
    model: str, storage: StorageFlags, engine: EngineOptions, hardware: str | None, *, json_output: bool
) -> None:
    """Print the settings with their reasons, the memory, and the arithmetic of products."""
    found = _explained(model, storage, engine, _gpu(hardware))
    if json_output:
        import json
        from dataclasses import asdict

        memory_of = found.config.memory(found.weight_bytes, on_host=False)
        out = {
            "model": found.name, "device": "cuda", "hardware": found.gpu.name, "machine": found.gpu.note,
            "settings": [asdict(s) for s in found.config.settings()], "memory": dict(memory_of),
            "workspace": dict(found.parts), "arithmetic": list(found.arithmetic),
        }  # fmt: skip
        print(json.dumps(out, indent=2))
        return
    from ridgeline.cli.flags.settings import settings_tables
    from ridgeline.cli.show.tables import Column, Line, Table, screen, show
    from ridgeline.spec.text import num_bytes

    settings, memory = settings_tables(
        f"{found.name} on {found.gpu.name}", found.config, found.weight_bytes, on_host=False
    )
    parts = Table("in the workspace", (Column("use", right=False), Column("at most")))
    for use, size in found.parts.items():
        parts.add_row(use, num_bytes(size))
    lines = (*found.arithmetic, found.gpu.note)
    show(screen(), settings, memory, parts, *(Line(line, style="dim") for line in lines))


def _gpu(name: str | None) -> _Gpu:
    """Return a GPU of the catalog, this machine's, or the default one. Raises RequestError for one without kernels."""
    from ridgeline.catalog.machines import hardware
    from ridgeline.errors import RequestError
    from ridgeline.ops.devices import first_gpu
    from ridgeline.spec.text import num_bytes

    if name is None and (facts := first_gpu()) is not None:
        return _Gpu(facts["gpu"], int(facts["memory"]), f"{facts['gpu']} has {num_bytes(int(facts['memory']))}")
    machine = hardware(name or DEFAULT_GPU)
    if machine.name not in SERVED:
        raise RequestError(f"hardware (--hardware) {name!r} has no kernels for GPUs; take one of {', '.join(SERVED)}")
    chosen = "" if name else "this machine has no GPU, so this is "
    return _Gpu(
        machine.name, machine.memory_bytes,
        f"{chosen}{machine.name} of the catalog with {num_bytes(machine.memory_bytes)}; its driver takes some of that, "
        "and nothing of this was run on a GPU",
    )  # fmt: skip


def _explained(model: str, flags: StorageFlags, engine: EngineOptions, gpu: _Gpu) -> _Explained:
    """Return all facts about an engine. Raises RequestError if the weights do not fit."""
    from ridgeline.cli.flags.known import find_known_writer
    from ridgeline.cost.memory import Workspace
    from ridgeline.errors import RequestError
    from ridgeline.ops.arithmetic import arithmetic_lines
    from ridgeline.ops.table import GPU_BACKEND
    from ridgeline.settings import resolve
    from ridgeline.spec.dtype import DTYPE_NAMES
    from ridgeline.spec.footprint import footprint
    from ridgeline.spec.quant import FormatTable, format_of
    from ridgeline.spec.text import num_bytes
    from ridgeline.system import free_bytes

    known, format = find_known_writer(model, on_cpu=False), format_of(flags.weights, flags.activations)
    formats = FormatTable(format, None if format.is_lossy else known.formats.by_name)
    dtype = DTYPE_NAMES.get(flags.dtype if flags.dtype != "auto" else known.weights, "bfloat16")
    own = {} if format.is_lossy or flags.dtype != "auto" else known.dtypes
    shown = formats.type_of_most(dtype)
    length = known.spec.resolve_max_model_len(flags.max_model_len)
    size = footprint(known.spec, formats, dtype, packs=True, dtypes=own).total + known.spec.frequency_bytes(length)
    if size >= gpu.free_bytes:
        raise RequestError(
            f"the weights of {known.name} need {num_bytes(size)}, and {gpu.name} has {num_bytes(gpu.free_bytes)}; use "
            "--weights int8 or int4, or a GPU with more memory (--hardware)"
        )
    config = resolve(
        known.spec, length, engine, kv_cache_dtype=flags.kv_cache_dtype, attention=flags.attention, weights=shown,
        free_bytes=gpu.free_bytes - size, fixed_len=flags.max_model_len is not None, device_is_host=False,
        host_free_bytes=free_bytes(), undrafted="chosen, because only device cpu is calibrated",
    )  # fmt: skip
    parts = Workspace(
        known.spec, config.groups, on_cpu=False, drafts=config.num_speculative_tokens
    ).on_gpu(config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len)  # fmt: skip
    return _Explained(
        known.name, gpu, config, size, parts, arithmetic_lines(formats.formats, GPU_BACKEND)
    )  # fmt: skip
