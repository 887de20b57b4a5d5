"""Convert a model, write it, and report the price."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ridgeline.compress.convert.heads import PooledWeights, with_kv_heads
from ridgeline.compress.convert.options import DEFAULTS, ConvertOptions
from ridgeline.compress.data import Samples
from ridgeline.compress.deliver import Facts, OnProgress, deliver, samples_of, source_of
from ridgeline.compress.folder import open_original, stored_types, whole_folder
from ridgeline.compress.price import PriceReport
from ridgeline.errors import RequestError
from ridgeline.runtime.load import LoadedModel

FORM = "--to: write kv_heads=2, the number of KV heads"


def convert(
    model: str, to: str, *, out: str | Path, data: Sequence[str | Path] = (), options: ConvertOptions = DEFAULTS,
    on_progress: OnProgress = lambda what, done, total: None,
) -> PriceReport:  # fmt: skip
    """Convert a model and write it to a new folder.

    Args:
        model: a folder or a hub id, which is not quantized.
        to: the change, such as `kv_heads=2`.
        out: the folder to write, which must not exist.
        data: text files or folders to measure on what was lost; none: only the price is reported.

    Raises:
        RidgelineError: with one line, for each input that cannot be used. Nothing is left on disk then.
    """
    count = _parsed(to)
    with whole_folder(Path(out)) as folder:
        original = open_original(model, options.threads)
        samples = samples_of(original, data, options) if data else None
        source = "" if samples is None else source_of(samples, data)
        return write_converted(model, original, count, samples, source, folder, options, on_progress)


def write_converted(
    name: str, original: LoadedModel, kv_heads: int, samples: Samples | None, source: str, folder: Path,
    options: ConvertOptions, on_progress: OnProgress = lambda what, done, total: None,
) -> PriceReport:  # fmt: skip
    """Convert a model that is open to fewer KV heads, write it, and report the price."""
    spec = with_kv_heads(original.spec, kv_heads)
    weights = PooledWeights(
        original.spec, spec, original.model.weights, stored_types(original), original.table.memory.get, options.pool,
        options.seed,
    )  # fmt: skip
    facts = Facts(f"{name} -> kv_heads {kv_heads} ({options.pool})", "converted", options.format)
    return deliver(folder, original, weights, facts, samples, source, on_progress)


def _parsed(to: str) -> int:
    """Return the number of KV heads that a change names. Raises RequestError for anything else."""
    name, sign, value = (part.strip() for part in to.partition("="))
    if name != "kv_heads":
        raise RequestError(f"--to {to!r}: {name!r} is not a conversion that is known; use kv_heads")
    if not sign or not value.isdecimal() or int(value) < 1:
        raise RequestError(f"{FORM}, not {to!r}")
    return int(value)
