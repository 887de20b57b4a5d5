"""`ridgeline explain`: show every engine setting for a model on this machine, without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.groups import EngineFlags, grouped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ridgeline.cli.show.matrices import MatrixRow
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
    model: Annotated[str, typer.Argument(help="A published model by name, a folder, a GGUF file, or a config.json.")],
    storage: StorageFlags,
    engine: EngineFlags,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every engine setting for a model on this machine's CPU, with its reason and the flag that overrides it.

    No weights are loaded. Flags that are given here have the same effect as in `generate`.
    """
    from ridgeline.cost.calibration import this_machine

    config, weight_bytes, name, matrices = _config(model, storage, engine)
    _, note = this_machine()
    if json_output:
        import json
        from dataclasses import asdict

        settings = [asdict(s) for s in config.settings()]
        memory = dict(config.memory(weight_bytes))
        found = {"model": name, "settings": settings, "memory": memory, "machine": note}
        print(json.dumps({**found, "matrices": [asdict(row) for row in matrices]}, indent=2))
        return
    from ridgeline.cli.flags.settings import settings_tables
    from ridgeline.cli.show.matrices import matrix_table
    from ridgeline.cli.show.tables import Line, screen, show

    tables = settings_tables(name, config, weight_bytes)
    show(screen(), *tables, *([matrix_table(matrices)] if matrices else []), Line(note, style="dim"))


def _config(model: str, flags: StorageFlags, engine: EngineFlags) -> tuple[EngineConfig, int, str, Sequence[MatrixRow]]:
    """Return the settings, the bytes of the weights, the model's name and its matrices. Raises RequestError if the
    weights do not fit.
    """
    from dataclasses import replace

    from ridgeline.cli.flags.known import StoredMatrices, find_known_writer
    from ridgeline.cli.show.matrices import matrix_rows
    from ridgeline.errors import RequestError
    from ridgeline.settings import choose_storage, resolve
    from ridgeline.settings.advice import machine_advice
    from ridgeline.spec.dtype import DTYPE_NAMES
    from ridgeline.spec.footprint import footprint
    from ridgeline.spec.quant import FormatTable, format_of
    from ridgeline.spec.text import num_bytes
    from ridgeline.system import free_bytes, num_cores

    known, format = find_known_writer(model), format_of(flags.weights, flags.activations)
    formats = FormatTable(format) if format.is_lossy else known.formats
    dtype = DTYPE_NAMES.get(flags.dtype if flags.dtype != "auto" else known.weights, "bfloat16")
    storage, _ = choose_storage(flags.kv_cache_dtype)
    length = known.spec.resolve_max_model_len(flags.max_model_len)
    own = {} if format.is_lossy or flags.dtype != "auto" else known.dtypes
    size = footprint(known.spec, formats, dtype, packs=True, dtypes=own).total + known.spec.frequency_bytes(length)
    free = free_bytes() - size
    if free <= 0:
        raise RequestError(
            f"the weights of {known.name} need {num_bytes(size)}, but only {num_bytes(free + size)} are free; "
            "use --weights int8 or int4, or free some memory"
        )
    main = formats.main
    advice = machine_advice(known.spec, main.name if main.is_lossy else dtype, storage.dtype)
    config = resolve(
        known.spec, length, engine.options(), kv_cache_dtype=flags.kv_cache_dtype,
        free_bytes=free, fixed_len=flags.max_model_len is not None, fraction=0.5, advice=advice,
    )  # fmt: skip
    reasons = {"threads": f"one per physical core that this process may use; the machine has {num_cores()} CPUs"}
    more = {n: r for n, r in (advice.reasons if advice else {}).items() if n not in config.reasons}
    stored = StoredMatrices(formats, known.dequantized if not format.is_lossy else {}, own)
    rows = tuple(matrix_rows(known.spec, stored, dtype)) if formats.is_lossy or known.dtypes else ()
    return replace(config, threads=_threads(), reasons={**config.reasons, **reasons, **more}), size, known.name, rows


def _threads() -> int | None:
    from importlib.util import find_spec

    if find_spec("ridgeline._kernels") is None:
        return None
    from ridgeline._kernels import usable_cores

    return usable_cores()
