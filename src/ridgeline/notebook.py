"""Use a model in a notebook: an LLM with bars of progress, and with tables of answers, plans, checks and times.

Import `LLM` from here instead of from `ridgeline`; its arguments and its answers are the same. Tables are HTML
in Jupyter, and text of 80 columns elsewhere. The figure of `beside` needs matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from time import monotonic
from typing import Any

import ridgeline.llm
from ridgeline.cli.show.beside import Beside, asked_of, beside_table, beside_times, expected
from ridgeline.cli.show.tables import Cell, Column, Line, Table
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sched.stats import StepShape
from ridgeline.spec.request import RequestOutput
from ridgeline.verify.report import CaseResult

TEXT_WIDTH = 80  # columns of a table that is shown as text
LEAST_S = 0.1  # seconds between two updates of a bar
Part = Table | Line | Cell


@dataclass(frozen=True, repr=False)
class Shown:
    """Tables and lines that Jupyter shows as HTML. data: the figures for programs. svg: a picture below them."""

    parts: Sequence[Part]
    data: Any = None
    svg: str = ""

    def __repr__(self) -> str:
        """Return the tables as text."""
        blocks = [part if isinstance(part, Table | Line) else Line(part) for part in self.parts]
        return "\n".join(line.plain for block in blocks for line in block.lines(TEXT_WIDTH))

    def _repr_html_(self) -> str:
        """Return the tables as HTML. Every text in it is escaped."""
        return "".join(map(_html, self.parts)) + self.svg


class Answers(list[RequestOutput]):
    """The results of `generate`: a list that Jupyter shows as a table with a row for each answer."""

    def _repr_html_(self) -> str:
        names = "prompt", "answer", "end"
        columns = (
            *(Column(name, right=False, wraps=True) for name in names),
            Column("tokens"),
            Column("TTFT"),
            Column("TPOT"),
        )
        table = Table("", columns)
        for output in self:
            times = output.timing.ttft_s, output.timing.tpot_s
            for answer in output.outputs:
                table.add_row(
                    output.prompt or f"{len(output.prompt_token_ids)} tokens", answer.text,
                    answer.error or str(answer.finish_reason), str(len(answer.token_ids)),
                    *("-" if time is None else f"{time * 1e3:.1f} ms" for time in times),
                )  # fmt: skip
        return _html(table)


class LLM(ridgeline.llm.LLM):
    """`ridgeline.LLM` for notebooks, with the same arguments and the same answers."""

    def __init__(self, model: str, **options: Any) -> None:
        options.setdefault("progress_bar", lambda total: Bar("loading, bytes", total).add)
        super().__init__(model, **options)

    def _repr_html_(self) -> str:
        """Return a table of the engine's settings with their reasons."""
        table = Table(repr(self), (Column("setting", right=False), Column("value"), Column("reason", right=False)))
        for name, reason in (self.config.reasons if self.config else {}).items():
            table.add_row(name, str(getattr(self.config, name, "")), reason)
        return _html(table)

    def answer(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_text: Callable[[int, int, str], None] = lambda request, choice, text: None,
        on_done: Callable[[int, RequestOutput], None] = lambda request, output: None,
        on_step: Callable[[StepShape], None] = lambda shape: None,
    ) -> Answers:
        """Answer requests as `ridgeline.LLM` does, with a bar over them."""
        bar = Bar("prompts", len(requests))

        def done(index: int, output: RequestOutput) -> None:
            bar.add(1)
            on_done(index, output)

        return Answers(super().answer(requests, on_text=on_text, on_done=done, on_step=on_step))

    def plan(
        self, *, batch: int = 1, context: int | None = None, prompt: int | None = None, output: int | None = None
    ) -> Shown:
        """Predict what this model costs on this machine with this engine's settings, as `ridgeline plan` does.

        batch: sequences at once. context, prompt, output: tokens of a sequence, as for `ridgeline plan`; default: the
        engine's longest context, at most 4096, a quarter of it for the answer. `data` is the report of `--json`. Raises
        RequestError for lengths that do not fit, and for a model or a device that cannot be planned.
        """
        from ridgeline.cli.flags.known import local_gpu
        from ridgeline.cli.plan import shape
        from ridgeline.cli.show.plan_tables import plan_parts
        from ridgeline.cost.calibration import find_machine
        from ridgeline.errors import RequestError
        from ridgeline.measure.predict import planner_of
        from ridgeline.plan.remarks import remarks
        from ridgeline.plan.report import plan_json

        if self.config is None or self.loaded.spec.encoder or self.loaded.spec.diffusion is not None:
            raise RequestError(
                "llm.plan() describes the engine of a model that writes one token after another; use `ridgeline plan` "
                'for other models, and cache="on"'
            )
        machine, note = find_machine("local", local_gpu)
        planner = planner_of(self.loaded, self.config, machine)
        load = shape(batch, context, prompt, output, self.max_model_len)
        report = plan_json(self.checkpoint.folder.name, planner, load)
        report |= {"times": note, "remarks": remarks(planner.deployment)}
        return Shown(plan_parts({**report, "_planner": planner, "_load": load}), report)

    def verify(self, *, quick: bool = False, seed: int = 0) -> Shown:
        """Check that no setting of the engine changes a token, as `ridgeline verify` does; `data` is its Report.

        quick: fewer cases with shorter answers. seed: for prompts, sampling and combinations.
        """
        from ridgeline.cli.verify import report_parts
        from ridgeline.ops.arithmetic import arithmetic_lines
        from ridgeline.verify import verify

        bar: Bar | None = None

        def on_case(result: CaseResult, total: int) -> None:
            nonlocal bar
            bar = bar or Bar("cases", total)
            bar.add(1)

        report = verify(self.loaded, self.tokenizer, quick=quick, seed=seed, on_case=on_case)
        lines = arithmetic_lines(self.loaded.model.formats.formats, table=self.loaded.table)
        return Shown(report_parts(report, lines), report)

    def beside(self, outputs: Sequence[RequestOutput]) -> Shown:
        """Compare the times of one call of `generate` with the predicted ones and the roofline: a table and a figure.

        outputs: the list that the call returned. `data` has a row for each time, in seconds. On a machine that was not
        calibrated there is one line instead, which says so. Without matplotlib there is no figure.
        """
        found, note = expected(self, asked_of(outputs))
        if found is None:
            return Shown([note], [])
        rows = beside_times(found, outputs, max(output.timing.total_s for output in outputs))
        return Shown([beside_table(rows), note], rows, _figure(rows))


class Bar:
    """A bar of progress in a notebook. Outside of a notebook nothing is shown. total: parts until it is full."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done, self._last = what, total, 0, monotonic()
        self._handle: Any = None

    def add(self, parts: int) -> None:
        """Show that so many more parts are done."""
        self._done += parts
        if not in_notebook() or (self._done < self._total and monotonic() < self._last + LEAST_S):
            return
        import IPython.display

        jupyter: Any = IPython.display  # it has no types

        self._last = monotonic()
        counted = f"{escape(self._what)}: {self._done:,} of {self._total:,}"
        page = jupyter.HTML(f'<progress value="{self._done}" max="{self._total}"></progress> {counted}')
        if self._handle is None:
            self._handle = jupyter.display(page, display_id=True)
        else:
            self._handle.update(page)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def _html(part: Part) -> str:
    """Return a table or a line as HTML."""
    if isinstance(part, Line):
        part = part.text
    if not isinstance(part, Table):
        return f"<p>{escape(str(part))}</p>"
    sides = ["right" if column.right else "left" for column in part.columns]

    def row(tag: str, cells: Iterator[str]) -> str:
        return "<tr>" + "".join(
            f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for side, cell in zip(sides, cells, strict=True)
        ) + "</tr>"  # fmt: skip

    head = row("th", (column.name for column in part.columns)) if part.has_header else ""
    body = "".join(row("td", (str(cell) for cell in cells)) for cells in part.rows)
    title = f"<caption><b>{escape(part.title)}</b></caption>" if part.title else ""
    return f"<table>{title}<thead>{head}</thead><tbody>{body}</tbody></table>"


def _figure(rows: Sequence[Beside]) -> str:
    """Return an SVG with bars of the measured, the predicted and the least time of each row; "" without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    figure = Figure(figsize=(7, 0.9 * len(rows) + 0.8), layout="constrained")
    axes = figure.subplots()
    kinds = ("measured", "#1f77b4"), ("predicted", "#ff7f0e"), ("roof", "#7f7f7f")
    for i, (name, color) in enumerate(kinds):
        times = [(getattr(row, name) or 0) * 1e3 for row in rows]
        bars = axes.barh([n + 0.27 * i for n in range(len(rows))], times, 0.25, label=name, color=color)
        axes.bar_label(bars, fmt="%.3g ms", padding=3, fontsize=8)
    axes.set_yticks([n + 0.27 for n in range(len(rows))], [row.name for row in rows])
    axes.set(xscale="log", xlabel="milliseconds")
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.legend()
    file = StringIO()
    figure.savefig(file, format="svg")
    return file.getvalue()
