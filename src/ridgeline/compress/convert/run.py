"""Convert a model, write it, and report the price."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.compress.changed import SameWeights
from ridgeline.compress.convert.heads import PooledWeights, with_kv_heads
from ridgeline.compress.convert.latent.weights import latent_weights
from ridgeline.compress.convert.options import DEFAULTS, ConvertOptions
from ridgeline.compress.convert.recurrent.weights import Hybrid, recurrent_weights
from ridgeline.compress.convert.shared import TiedWeights, fitted_inputs, with_shared_keys
from ridgeline.compress.convert.windows import with_measured_windows
from ridgeline.compress.data import Samples
from ridgeline.compress.deliver import Facts, OnProgress, deliver, samples_of, source_of
from ridgeline.compress.folder import open_original, stored_types, whole_folder
from ridgeline.compress.price import PriceReport
from ridgeline.errors import RequestError
from ridgeline.plan import rewrite
from ridgeline.runtime.load import LoadedModel

MOST_DIGITS = 20  # of the numbers of a change, more than any size has
FORMS: Mapping[str, str] = {
    "kv_heads": "kv_heads=2: number of KV heads",
    "hybrid": "hybrid=mamba2:3: recurrent mixer, and recurrent layers per layer with attention",
    "cla": "cla=2: number of layers that share keys and values, at least 2",
    "mla": "mla=64+16: numbers of the latent, and rotated numbers that all heads share",
    "window": "window=256:3: tokens of the window, at least 1, and windowed layers per layer with full attention",
    "linear": "linear=64:1 or linear=hedgehog:64:1: tokens of the window of the layers that keep attention, and linear "
    "layers for each of them",
}  # fmt: skip
SEPARATORS: Mapping[str, str] = {"window": ":", "linear": ":", "mla": "+"}  # of the two numbers of a change


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the architecture.

    number: KV heads, layers that share keys, numbers of a latent, tokens of a window, or 0. local: windowed or
    recurrent layers for each one that is not. rotated: rotated numbers beside a latent. kind: the recurrent mixer.
    """

    name: str
    number: int
    local: int | None = None
    rotated: int = 0
    kind: str = ""


def convert(
    model: str, to: str, *, out: str | Path, data: Sequence[str | Path] = (), options: ConvertOptions = DEFAULTS,
    on_progress: OnProgress = lambda what, done, total: None,
) -> PriceReport:  # fmt: skip
    """Convert a model and write it to a new folder.

    Args:
        model: a folder or a hub id, which is not quantized.
        to: the change, such as `kv_heads=2` or `window=256:3`.
        out: the folder to write, which must not exist.
        data: text files or folders to measure on what was lost; none: only the price is reported.

    Raises:
        RidgelineError: with one line, for each input that cannot be used. Nothing is left on disk then.
    """
    change = parse_change(to)
    with whole_folder(Path(out)) as folder:
        original = open_original(model, options.threads)
        samples = samples_of(original, data, options) if data else None
        source = "" if samples is None else source_of(samples, data)
        return write_converted(model, original, change, samples, source, folder, options, on_progress)


def write_converted(
    name: str, original: LoadedModel, change: Change, samples: Samples | None, source: str, folder: Path,
    options: ConvertOptions, on_progress: OnProgress = lambda what, done, total: None,
) -> PriceReport:  # fmt: skip
    """Convert a model that is open, write it to a folder that does not exist, and report the price."""
    notes: tuple[str, ...] = ()
    given = original.model.weights, stored_types(original), original.table.memory.get
    if change.name == "kv_heads":
        spec, how = with_kv_heads(original.spec, change.number), f"({options.pool})"
        weights: SameWeights = PooledWeights(original.spec, spec, *given, options.pool, options.seed)
    elif change.name == "cla":
        spec, how = with_shared_keys(original.spec, change.number), f"({options.tie})"
        inputs = None
        if options.tie == "fit":
            if samples is None:
                raise RequestError("--tie fit is measured on text: name some with --calibrate, or take --tie mean")
            inputs = fitted_inputs(original, spec, samples.calibration, on_progress)
        weights = TiedWeights(original.spec, spec, *given, inputs)
    elif change.name == "mla":
        weights, notes = latent_weights(original, change.number, change.rotated, samples, options, on_progress)
        how = f"+ {change.rotated} ({options.rotate})"
    elif change.name in ("hybrid", "linear"):
        to = Hybrid(change.kind, change.local, change.number or None)
        weights = recurrent_weights(original, to, samples, options, on_progress)
        how = f"{change.kind} {_all_but([i for i in range(len(weights.spec.layers)) if weights.spec.attention(i)])}"
    else:
        spec = with_measured_windows(original, change.number, change.local, samples, on_progress)
        how = _all_but([i for i in range(len(spec.layers)) if spec.layers[i] == original.spec.layers[i]])
        weights = SameWeights(spec, *given)
    number = f" {change.number}" if change.number else ""
    facts = Facts(f"{name} -> {change.name}{number} {how}", "converted", options.format, notes)
    return deliver(folder, original, weights, facts, samples, source, on_progress)


def _all_but(layers: Sequence[int]) -> str:
    return f"in all layers but {', '.join(map(str, layers))}" if layers else "in all layers"


def parse_change(to: str) -> Change:
    """Return the change that a text names. Raises RequestError for anything else."""
    name, sign, value = (part.strip() for part in to.partition("="))
    if name not in FORMS:
        raise RequestError(f"--to {to!r:.60}: {name!r:.30} is not a conversion that is known; use {', '.join(FORMS)}")
    kind, separator = "", SEPARATORS.get(name)
    if name == "linear":
        kind, value = rewrite.linear_features(value)
    first, found, second = value.partition(separator) if separator else (value, "", "")
    if name == "hybrid":
        return _hybrid(to, value)
    numbers = [first, second] if found else [first]
    is_whole = len(value) <= MOST_DIGITS and all(n.isdecimal() and int(n) > 0 for n in numbers)
    if not sign or not is_whole or (name in ("mla", "linear") and not found):
        raise RequestError(f"--to: write {FORMS[name]}, not {to!r:.60}")
    if name == "mla":
        return Change(name, int(first), rotated=int(second))
    return Change(name, int(first), int(second) if found else None, kind=kind)


def _hybrid(to: str, value: str) -> Change:
    kind, found, many = (part.strip() for part in value.partition(":"))
    is_number = many.isdecimal() and len(many) <= MOST_DIGITS and int(many) > 0
    if not kind or (found and not is_number):
        raise RequestError(f"--to: write {FORMS['hybrid']}, not {to!r:.60}")
    return Change("hybrid", 0, int(many) if found else None, kind=kind)
