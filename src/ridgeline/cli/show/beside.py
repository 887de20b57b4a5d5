"""Print predicted figures beside measured ones, for `generate --verbose` and `bench`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Table
    from ridgeline.llm import LLM
    from ridgeline.measure.predict import Asked, Predicted
    from ridgeline.spec.request import RequestOutput


class Beside(NamedTuple):
    """One figure, measured and predicted. roof: the best that the machine's peaks allow; None if there is no bound.
    unit: "s" or "bytes".
    """

    name: str
    measured: float
    predicted: float
    roof: float | None
    unit: str = "s"

    def cells(self) -> tuple[str, ...]:
        """Return the cells of its row: name, measured, predicted, error, roofline."""
        from ridgeline.plan.units import decimal_bytes, seconds

        say = seconds if self.unit == "s" else decimal_bytes
        off = f"{self.predicted / self.measured - 1:+.0%}" if self.measured else ""
        roof = f"{say(self.roof)} ({self.roof / self.measured:.0%})" if self.roof and self.measured else ""
        return self.name, say(self.measured), say(self.predicted), off, roof


def expected(llm: LLM, requests: Sequence[Asked]) -> tuple[Predicted | None, str]:
    """Return the prediction for requests and a line about it. Without a prediction, the line gives the reason and the
    remedy.
    """
    from ridgeline.measure.predict import calibrated_machine, predict

    if llm.config is None or not requests:
        return None, "no prediction: only the engine with its cache can be predicted"
    if llm.loaded.spec.ranks > 1:
        return None, "no prediction: a calibration does not time the sums of ranks (--tensor-parallel-size)"
    machine, note = calibrated_machine(llm.loaded.table.driver, llm.loaded.table.memory.device)
    if machine is None:
        return None, note
    return predict(llm.loaded, llm.config, requests, machine, note, kept_pages(llm)), f"predictions: {note}"


def kept_pages(llm: LLM) -> tuple[int, ...]:
    """Return how many free pages of each group stay in the prefix cache now."""
    stats = llm.stats()
    return () if stats is None else tuple(group.kept_pages for group in stats.groups)


def memory_line(llm: LLM, requests: Sequence[Asked], base_bytes: int) -> str:
    """Return a line with the memory of the process now, as it is and as it was predicted.

    base_bytes: memory of the process before the model was loaded.
    """
    from ridgeline.cli.show.report import resident_now
    from ridgeline.cost.process_memory import TOKEN_BYTES
    from ridgeline.measure.predict import memory_of
    from ridgeline.spec.text import num_bytes

    config, now, longest = llm.config, resident_now(llm), max(requests, key=lambda r: r.prompt + r.new)
    assert config is not None
    count = min(len(requests), config.max_num_seqs)
    size = memory_of(
        llm.loaded, config, count, longest.prompt, longest.new, earlier=len(requests) - count, kept=kept_pages(llm)
    ).total
    size += base_bytes + (0 if llm.tokenizer is None else TOKEN_BYTES * llm.loaded.spec.vocab_size)
    return (
        f"memory now: {num_bytes(now['process'])} in this process, {num_bytes(size)} predicted; of it "
        f"{num_bytes(now['state pages'])} in pages of state, at most {num_bytes(config.state_bytes)}"
    )


def predicted_json(found: Predicted | None) -> dict[str, Any] | None:
    """Return the mean predicted figures and the note about them, or None without a prediction."""
    if found is None:
        return None
    each = [x for x in found.tpot_s if x is not None]
    return {
        "elapsed_s": found.elapsed_s, "ttft_s": fmean(found.ttft_s), "tpot_s": fmean(each) if each else None,
        "step_s": found.step_s, "memory_bytes": found.memory_bytes, "note": found.note,
    }  # fmt: skip


def asked_of(outputs: Iterable[RequestOutput]) -> list[Asked]:
    """Return the lengths of finished requests, one entry for each choice. Choices of one request share their prompt."""
    from ridgeline.measure.predict import Asked

    return [
        Asked(prompt, len(choice.token_ids), prompt if choice.index else out.num_cached_tokens)
        for out in outputs
        for prompt in [len(out.prompt_token_ids)]
        for choice in out.outputs
        if choice.token_ids
    ]


def say_beside(llm: LLM, outputs: Sequence[RequestOutput], elapsed_s: float, base_bytes: int | None) -> None:
    """Print predicted beside measured figures of a run on stderr, or one line that says why there is no prediction.

    base_bytes: memory of the process before the model was loaded.
    """
    from ridgeline.cli.show.report import say, say_tables
    from ridgeline.system import resident_bytes

    asked = asked_of(outputs)
    if llm.config is not None and asked and base_bytes is not None:
        say(memory_line(llm, asked, base_bytes))
    found, note = expected(llm, asked)
    if found is None:
        say(note)
        return
    rows = beside_times(found, outputs, elapsed_s)
    peak = resident_bytes(peak=True)
    if base_bytes is not None:
        rows.append(Beside("peak memory", peak - base_bytes, found.memory_bytes, None, "bytes"))
    say_tables(beside_table(rows))
    say(note)


def beside_times(found: Predicted, outputs: Sequence[RequestOutput], elapsed_s: float) -> list[Beside]:
    """Return the times of a run: all of it (`elapsed_s`), to the first token, and per token after the first."""
    rows = [Beside("total time", elapsed_s, found.elapsed_s, found.roof_elapsed_s)]
    first = fmean(out.timing.ttft_s for out in outputs)
    rows.append(Beside("TTFT, mean", first, fmean(found.ttft_s), fmean(found.roof_ttft_s)))
    each = [out.timing.tpot_s for out in outputs if out.timing.tpot_s is not None]
    predicted = [x for x in found.tpot_s if x is not None]
    if each and predicted:
        roof = fmean(x for x in found.roof_tpot_s if x is not None)
        rows.append(Beside("TPOT, mean", fmean(each), fmean(predicted), roof))
    return rows


def beside_table(rows: Sequence[Beside]) -> Table:
    """Return a table with a row for each figure."""
    from ridgeline.cli.show.tables import Column, Table

    names = "measured", "predicted", "error", "roofline"
    table = Table("", (Column("", right=False), *(Column(name) for name in names)))
    for row in rows:
        table.add_row(*row.cells())
    return table
