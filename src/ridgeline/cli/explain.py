"""`ridgeline explain`: show every engine setting for a model on this machine, without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.groups import EngineFlags, grouped

if TYPE_CHECKING:
    from ridgeline.settings import EngineConfig


@dataclass(eq=False, repr=False)
class StorageFlags:
    """Types and lengths that memory depends on."""

    dtype: o.DType = "auto"
    weights: o.WeightFormat = "auto"
    activations: o.Activations = None
    kv_cache_dtype: o.KVCacheDType = "auto"
    max_model_len: o.MaxModelLen = None


@grouped
def explain(
    *,
    model: Annotated[str, typer.Argument(help="A published model by name, a folder, or a config.json.")],
    storage: StorageFlags,
    engine: EngineFlags,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every engine setting for a model on this machine's CPU, with its reason and the flag that overrides it.

    No weights are loaded. Flags that are given here have the same effect as in `generate`.
    """
    from ridgeline.cost.calibration import this_machine

    config, weight_bytes, name = _config(model, storage, engine)
    _, note = this_machine()
    if json_output:
        import json
        from dataclasses import asdict

        settings = [asdict(s) for s in config.settings()]
        memory = dict(config.memory(weight_bytes))
        print(json.dumps({"model": name, "settings": settings, "memory": memory, "machine": note}, indent=2))
        return
    from ridgeline.cli.flags.settings import settings_tables
    from ridgeline.cli.show.tables import Line, screen, show

    show(screen(), *settings_tables(name, config, weight_bytes), Line(note, style="dim"))


def _config(model: str, flags: StorageFlags, engine: EngineFlags) -> tuple[EngineConfig, int, str]:
    """Return the settings, the bytes of the weights and the model's name. Raises RequestError if the weights do not
    fit.
    """
    from dataclasses import replace

    from ridgeline.cli.models import planned_writer, stored_formats
    from ridgeline.errors import RequestError
    from ridgeline.settings import choose_storage, resolve
    from ridgeline.settings.advice import machine_advice
    from ridgeline.spec.dtype import DTYPE_NAMES
    from ridgeline.spec.footprint import footprint
    from ridgeline.spec.quant import FormatTable, format_of
    from ridgeline.spec.text import num_bytes
    from ridgeline.system import free_bytes, num_cores

    known, format = planned_writer(model), format_of(flags.weights, flags.activations)
    formats = FormatTable(format)
    if not format.is_lossy and known.weights not in DTYPE_NAMES and model.endswith(".gguf"):
        formats = stored_formats(model, known.spec)
    dtype = DTYPE_NAMES.get(flags.dtype if flags.dtype != "auto" else known.weights, "bfloat16")
    storage, _ = choose_storage(flags.kv_cache_dtype)
    length = known.spec.resolve_max_model_len(flags.max_model_len)
    size = footprint(known.spec, formats, dtype, packs=True).total + known.spec.frequency_bytes(length)
    free = free_bytes() - size
    if free <= 0:
        raise RequestError(
            f"the weights of {known.name} need {num_bytes(size)}, but only {num_bytes(free + size)} are free; "
            "use --weights int8 or int4, or free some memory"
        )
    advice = machine_advice(known.spec, formats.main.name if formats.is_lossy else dtype, storage.dtype)
    config = resolve(
        known.spec, length, engine.options(), kv_cache_dtype=flags.kv_cache_dtype,
        free_bytes=free, fixed_len=flags.max_model_len is not None, fraction=0.5, advice=advice,
    )  # fmt: skip
    reasons = {"threads": f"one per physical core that this process may use; the machine has {num_cores()} CPUs"}
    more = {n: r for n, r in (advice.reasons if advice else {}).items() if n not in config.reasons}
    return replace(config, threads=_threads(), reasons={**config.reasons, **reasons, **more}), size, known.name


def _threads() -> int | None:
    from importlib.util import find_spec

    if find_spec("ridgeline._kernels") is None:
        return None
    from ridgeline._kernels import usable_cores

    return usable_cores()
