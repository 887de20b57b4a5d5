"""Read text to measure on; write a changed model, read it back, and report its price."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from ridgeline.archs import OUR_MODEL_TYPE
from ridgeline.compress.changed import ChangedWeights
from ridgeline.compress.compare import Comparison, compare
from ridgeline.compress.data import NAMED, Samples, read_samples
from ridgeline.compress.elsewhere import checked_elsewhere
from ridgeline.compress.folder import Format, changed_model, config_for, read_back, write_folder
from ridgeline.compress.price import FILE, PriceReport, machine_note, prices_of
from ridgeline.compress.write import write_json
from ridgeline.errors import RequestError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel

OnProgress = Callable[[str, int, int], None]  # called with what is done, the finished amount and the whole amount


class SampleOptions(Protocol):
    """The options that say how text is cut into sequences."""

    @property
    def sequences(self) -> int:
        """Return the number of calibration sequences."""
        ...

    @property
    def length(self) -> int | None:
        """Return the tokens of a sequence; None: 512, or the model's longest context."""
        ...

    @property
    def seed(self) -> int:
        """Return the random seed of the draw of sequences."""
        ...

    @property
    def held_out_tokens(self) -> int:
        """Return the most tokens on which perplexity is measured."""
        ...


@dataclass(frozen=True, slots=True)
class Facts:
    """A title that says what was done, the name of the result in the report, the format of its config, and remarks."""

    title: str
    name: str
    format: Format
    notes: tuple[str, ...] = ()


def deliver(
    folder: Path, original: LoadedModel, weights: ChangedWeights, facts: Facts, samples: Samples | None, source: str,
    on_progress: OnProgress,
) -> PriceReport:  # fmt: skip
    """Write a changed model to a folder that does not exist, read it back, and report the price.

    samples: text that is measured on; None for none. source: where it comes from.
    """
    config, names, note = config_for(original, weights, facts.format)
    on_progress("writing", 0, 1)
    write_folder(folder, original, weights, config, names)
    made = changed_model(original, weights)
    ids, family = _some_ids(original, samples), config["model_type"]
    off, elsewhere = read_back(folder, made, ids), ""
    if family not in (OUR_MODEL_TYPE, original.checkpoint.config.get("model_type")):
        elsewhere = checked_elsewhere(folder, family, made, ids)
    comparison = None if samples is None else _compared(original, made, facts.name, samples, on_progress)
    threads = original.table.driver.threads if original.table.driver else None
    on_progress("measuring the speed", 0, 1)
    folders = {"original": original.checkpoint.folder, facts.name: folder}
    prices, remarks = prices_of(original, weights.spec, folders, threads)
    notes = (*facts.notes, *(() if samples is None else samples.notes), *filter(None, (note, elsewhere)), *remarks)
    report = PriceReport(facts.title, prices, comparison, off, weights.kept, source, machine_note(), notes)
    write_json(folder / FILE, report.to_json())
    return report


def samples_of(original: LoadedModel, data: Sequence[str | Path], options: SampleOptions) -> Samples:
    """Return sequences of texts. Raises RequestError for a length that is impossible, and text that is too short."""
    longest = original.max_model_len
    length = options.length if options.length is not None else min(512, longest)
    if not 2 <= length <= longest:
        raise RequestError(f"length (--sequence-length) is {length}; it must be from 2 to {longest} tokens")
    return read_samples(
        data, Tokenizer.from_folder(original.checkpoint.folder), length=length, count=options.sequences,
        held_out_tokens=options.held_out_tokens, seed=options.seed,
    )  # fmt: skip


def source_of(samples: Samples, data: Sequence[str | Path]) -> str:
    """Return in words where sequences come from."""
    more = f" and {len(data) - NAMED} more" if len(data) > NAMED else ""
    return f"{len(samples.calibration)} sequences of {', '.join(map(str, data[:NAMED]))}{more}"


def _some_ids(original: LoadedModel, samples: Samples | None) -> list[int]:
    if samples is not None:
        return list(samples.held_out[0].token_ids)
    count = min(64, original.max_model_len)
    found: list[int] = np.random.default_rng(0).integers(0, original.spec.vocab_size, count).tolist()
    return found


def _compared(
    original: LoadedModel, made: LoadedModel, name: str, samples: Samples, on_progress: OnProgress
) -> Comparison:
    total, done = sum(d.num_scored for d in samples.held_out), 0

    def on_tokens(scored: int) -> None:
        nonlocal done
        done += scored
        on_progress("measuring on the held-out part", done, total)

    return compare(original, {name: made}, samples.held_out, on_tokens)
