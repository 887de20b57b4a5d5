"""A plan as tables: each row a figure with its unit and its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table

from ridgeline.plan.units import decimal_bytes, flops, number, seconds

if TYPE_CHECKING:
    from ridgeline.plan.compare import Row
    from ridgeline.plan.limits import Slo
    from ridgeline.plan.planner import Load, Planner
    from ridgeline.plan.slo import Answer, Setting

Line = tuple[str, str, str]
WIDTH = 132  # of a console that is no terminal
BARS = {"compute": "red", "weights": "blue", "state": "green", "activations": "yellow", "link": "magenta",
        "overhead": "white"}  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """Print a report of cli/plan.py."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    planner, load = report["_planner"], report["_load"]
    console.print(_title(report, planner, load))
    if "_rows" in report:
        console.print(_comparison(report["_rows"], load), _given_up(report["_rows"]))
    elif "_answer" in report:
        console.print(_promise(report["_answer"], report["_promise"]))
    else:
        console.print(figures_table("Memory of a device", _memory(report, planner, load)))
        console.print(figures_table("Time", _time(report, load)))
        console.print(
            operations_table("decode", report["decode"]), operations_table("prefill, one chunk", report["prefill"])
        )
        console.print(f"[dim]{report['times']}.[/dim]")
    if "explain" in report:
        table = _table("Where the figures come from", ("figure", "left"), ("formula", "left"))
        for name, text in report["explain"].items():
            table.add_row(name, text)
        console.print(table)


def _title(report: dict[str, Any], planner: Planner, load: Load) -> Group:
    from rich.text import Text

    d = planner.deployment
    params, active = report["num_params"], report["num_active_params"]
    used = f" ({active / 1e9:,.2f} B used per token)" if active != params else ""
    scheme = "".join(f", {name} {n}" for name in ("tp", "ep", "pp", "replicas") if (n := getattr(d.scheme, name)) > 1)
    experts = f" (experts {d.precision.experts})" if d.precision.experts else ""
    tokens = f"{load.context:,} tokens ({load.prompt:,} of prompt, {load.output:,} of answer)"
    first = Text.assemble((report["model"], "bold"), " on ", (d.hardware.name, "bold"), scheme)
    first.append(f": {params / 1e9:,.2f} B parameters{used}")
    second = Text(
        f"{d.precision.weights} weights{experts}, {d.precision.state} state, {d.precision.activations} activations; "
        f"batch {load.batch:,} of {tokens}"
    )
    return Group(first, second)


def _memory(report: dict[str, Any], planner: Planner, load: Load) -> Iterator[Line]:
    from ridgeline.plan.changes import query_heads
    from ridgeline.plan.footprint import formula_bytes
    from ridgeline.plan.rewrite import with_kv_heads

    d, m, size = planner.deployment, report["memory"], decimal_bytes
    slack = m["pages_bytes"] / m["formula_bytes"] - 1 if m["formula_bytes"] else 0.0
    yield "weights", size(m["weight_bytes"]), f"{d.precision.weights} matrices and their scales, float32 vectors"
    yield "state, by formula", size(m["formula_bytes"]), (
        f"{load.batch:,} x {size(m['sequence_bytes'])} a sequence: the numbers that its layers keep"
    )  # fmt: skip
    yield (
        "state, allocated",
        size(m["pages_bytes"]),
        (
            f"in pages of {d.page_tokens} tokens: {slack:.1%} more, for pages that are not full, the null page"
            + (", recurrent states twice" if any(g.snapshot for g in planner.memory.groups) else "")
        ),
    )
    yield (
        "activations",
        size(m["activation_bytes"]),
        (f"of a step of {max(d.chunk, load.batch):,} tokens, tables and libraries, as the engine counts them"),
    )
    yield "logits", size(m["logits_bytes"]), "with what sampling and log probabilities make of them"
    yield "reserve", size(m["reserve_bytes"]), "10 % of what weights leave: the allocator, other programs"
    free = m["spare_bytes"]
    yield "free", size(free) if m["fits"] else f"[red]{size(free)}[/red]", (
        f"of {size(m['memory_bytes'])}" if m["fits"] else _remedy(report, planner, load)
    )  # fmt: skip
    yield "largest batch", f"{m['largest_batch']:,}", f"sequences of {load.context:,} tokens that fit"
    limit = d.spec.max_position_embeddings
    yield (
        "longest context",
        f"{m['longest_context']:,}",
        (
            f"tokens of each of {load.batch:,}"
            + (": all of the model's positions" if m["longest_context"] == limit else "")
        ),
    )
    if heads := query_heads(d.spec):
        often = formula_bytes(with_kv_heads(d.spec, heads), d.precision, load.context) * load.batch
        own = formula_bytes(d.spec, d.precision, load.context) * load.batch
        everywhere = ", on all devices together" if d.scheme.devices > d.scheme.replicas else ""
        yield (
            f"(kv_heads={heads})",
            size(often),
            (
                "the state if each query head had keys of its own, as is often quoted; grouped ones take "
                f"{size(own)}{everywhere}"
            ),
        )


def _remedy(report: dict[str, Any], planner: Planner, load: Load) -> str:
    """The smallest change that makes it fit."""
    from ridgeline.plan.slo import smallest_fit

    batch, context = report["memory"]["largest_batch"], report["memory"]["longest_context"]
    found = [f"--batch {batch}"] if batch else []
    found += [f"--context {context}"] if context > 1 else []
    if not found:
        found = [smallest_fit(planner.deployment, load)]
    return f"does not fit in {decimal_bytes(report['memory']['memory_bytes'])}: {' or '.join(found)} does"


def _time(report: dict[str, Any], load: Load) -> Iterator[Line]:
    t, step = report["time"], report["decode"]
    causes = {name: s / step["seconds"] for name, s in step["by_cause"].items() if s / step["seconds"] > 0.005}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(causes.items(), key=lambda x: -x[1]))
    yield "step", seconds(t["step_s"]), f"one token of each of {load.batch:,} at {load.context:,} tokens: {shares}"
    yield "TTFT", seconds(t["ttft_s"]), f"a prompt of {load.prompt:,} tokens alone, in chunks of {_chunk(report):,}"
    yield "TPOT", seconds(t["tpot_s"]), "per token after the first, mean over the answer, nothing else in the steps"
    yield "latency", seconds(t["latency_s"]), f"TTFT + {load.output - 1:,} x TPOT"
    yield "per request", f"{number(t['request_tokens_per_s'])} tokens/s", "1 / TPOT"
    yield "in sum", f"{number(t['tokens_per_s'])} tokens/s", "batch x replicas / TPOT"
    yield (
        "served",
        f"{number(t['served_tokens_per_s'])} tokens/s",
        (
            f"requests follow each other, prompts included: TPOT {seconds(t['served_tpot_s'])}, "
            f"TTFT {seconds(t['served_ttft_s'])}"
        ),
    )
    yield "knee", f"batch {t['knee_batch']:,}", "most throughput per time of a step; beyond it latency grows faster"
    yield (
        "without a cache",
        seconds(t["naive_step_s"]),
        (
            f"the step as naive sampling does it, all {load.context:,} tokens again: "
            f"{t['naive_step_s'] / t['step_s']:.0f} x"
        ),
    )


def _chunk(report: dict[str, Any]) -> int:
    return int(report["deployment"]["chunk"])


def figures_table(title: str, lines: Iterator[Line]) -> Table:
    """Each line a figure, its value with a unit, and its reason."""
    table = _table(title, ("", "left"), ("", "right"), ("why", "left"))
    for name, value, why in lines:
        table.add_row(name, value, f"[dim]{why}[/dim]")
    return table


def operations_table(title: str, step: dict[str, Any]) -> Table:
    """Of a step as plan/report.py has it, the longest first."""
    columns = (
        ("operation", "left"), ("layers", "right"), ("work", "right"), ("moved", "right"), ("FLOP/B", "right"),
        ("ridge", "right"), ("time", "right"), ("share", "right"), ("bound by", "left"),
    )  # fmt: skip
    table = _table(f"Operations of a step: {title}, {seconds(step['seconds'])}", *columns)
    for op in sorted(step["operations"], key=lambda op: -op["seconds"]):
        color, slack = BARS[op["bound"]], op["slack"]
        by = op["bound"] + (f", {number(slack)} x" if slack and op["bound"] not in ("link", "overhead") else "")
        moved = decimal_bytes(op["bytes"] or op["link_bytes"])
        table.add_row(
            op["name"], f"{op['layers']}", flops(op["flops"]) if op["flops"] else "", moved,
            number(op["intensity"]) if op["flops"] else "", number(op["ridge"]) if op["flops"] else "",
            seconds(op["seconds"]), f"{op['seconds'] / step['seconds']:.1%}", f"[{color}]{by}[/{color}]",
        )  # fmt: skip
    return table


def _comparison(rows: tuple[Row, ...], load: Load) -> Table:
    columns = (
        ("change", "left"), ("tokens/s", "right"), ("", "right"), ("devices", "right"), ("TPOT", "right"),
        ("TTFT", "right"), ("weights", "right"), ("state/seq", "right"), ("memory", "right"),
        ("max batch", "right"), ("tokens/s there", "right"),
    )  # fmt: skip
    table = _table(f"Ranked by tokens/s in sum, batch {load.batch:,} of {load.context:,} tokens", *columns)
    base = next(row for row in rows if not row.gives_up).figures.tokens_per_s
    for row in rows:
        f, m = row.figures, row.footprint
        used = decimal_bytes(m.used_bytes)
        table.add_row(
            row.text, number(f.tokens_per_s), f"{f.tokens_per_s / base:.2f} x", f"{f.devices}", seconds(f.tpot_s),
            seconds(f.ttft_s), decimal_bytes(m.weight_bytes), decimal_bytes(row.sequence_bytes),
            used if m.fits else f"[red]{used} too much[/red]", f"{row.largest_batch:,}",
            number(row.best_tokens_per_s), style="bold" if not row.gives_up else None,
        )  # fmt: skip
    return table


def _given_up(rows: tuple[Row, ...]) -> Table:
    table = _table("What each gives up", ("change", "left"), ("", "left"))
    for row in rows:
        table.add_row(row.text, "; ".join(text for text in (row.gives_up, *row.notes) if text))
    return table


def _promise(answer: Answer, promise: Slo) -> Table:
    asked = ", ".join(f"{name} {seconds(limit)}" for name, limit in promise.limits.items())
    columns = (
        ("setting", "left"), ("devices", "right"), ("batch", "right"), ("chunk", "right"), ("TTFT", "right"),
        ("TPOT", "right"), ("tokens/s", "right"), ("device-hours per 1M tokens", "right"),
        ("the batch ends at", "left"),
    )  # fmt: skip
    if answer.settings:
        table = _table(f"At most {asked}, served among others: the cheapest first", *columns)
        found = answer.settings
    else:
        table = _table(
            f"At most {asked}: not on this machine as it is; what comes closest, and what would do", *columns
        )
        found = ((answer.closest,) if answer.closest else ()) + answer.otherwise
    for s in found:
        table.add_row(*_setting(s, promise))
    if not found:
        table.add_row("nothing that was tried", *[""] * 8)
    return table


def _setting(s: Setting, promise: Slo) -> tuple[str, ...]:
    f, scheme = s.figures, s.deployment.scheme
    shared = "".join(f" --{n} {v}" for n in ("tp", "ep", "pp", "replicas") if (v := getattr(scheme, n)) > 1)
    name = s.changed + shared if s.changed else shared.strip() or "one device"
    from ridgeline.plan.slo import kept

    is_kept = kept(promise, f)
    return (
        name, f"{f.devices}", f"{f.load.batch:,}", f"{s.deployment.chunk:,}", seconds(f.served_ttft_s),
        seconds(f.served_tpot_s), number(f.served_tokens_per_s), number(f.device_seconds_per_token * 1e6 / 3600),
        s.why if is_kept else f"[red]{s.why} too long[/red]",
    )  # fmt: skip


def _table(title: str, *columns: tuple[str, Any]) -> Table:
    from rich.box import SIMPLE_HEAD

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for name, justify in columns:
        wraps = justify == "left" and name in ("why", "", "formula", "setting")
        table.add_column(name, justify=justify, no_wrap=not wraps, overflow="fold")
    return table
