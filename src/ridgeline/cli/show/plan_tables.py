"""Print a plan as tables: each row has a figure with its unit and an explanation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ridgeline.cli.show.tables import Cell, Column, Line, Table, screen, show
from ridgeline.plan.units import decimal_bytes, flops, number, seconds

if TYPE_CHECKING:
    from ridgeline.plan.compare import Row
    from ridgeline.plan.limits import Slo
    from ridgeline.plan.planner import Load, Planner
    from ridgeline.plan.slo import Answer, Setting

Figure = tuple[str, Cell, Cell]  # a name, a value with its unit, and an explanation
EXPECTED = {"ttft_s": "TTFT", "tpot_s": "TPOT", "tokens_per_s": "total", "served_ttft_s": "TTFT, served",
            "served_tpot_s": "TPOT, served", "served_tokens_per_s": "served"}  # fmt: skip
BARS = {"compute": "red", "weights": "blue", "state": "green", "activations": "yellow", "link": "magenta",
        "overhead": "white"}  # fmt: skip
BOUND = "*"  # marks a row of a machine that was not measured, beside rows of one that was
BOUND_WHY = (
    "The times are lower bounds by the roofline, because too little is known of the machine; those of the other rows "
    "are times to expect, and the two cannot be compared."
)


def show_plan(report: dict[str, Any]) -> None:
    """Print a report of cli/plan.py."""
    show(screen(), *plan_parts(report))


def plan_parts(report: dict[str, Any]) -> list[Table | Line | Cell]:
    """Return the tables and the lines of a report of cli/plan.py."""
    planner, load = report["_planner"], report["_load"]
    parts: list[Table | Line | Cell] = [_title(report, planner, load)]
    if "_rows" in report:
        parts += [_comparison(report["_rows"], load), _given_up(report["_rows"])]
        if "_within" in report:
            promise, confidence = report["_promise"], report["slo"]["confidence"]
            title = f"Cheapest setting of each change within {_limits(promise, confidence)} in steady state"
            parts += _settings(title, report["_within"], promise, confidence)
    elif "_answer" in report:
        parts += _promise(report["_answer"], report["_promise"], report["slo"]["confidence"])
    else:
        parts += [
            figures_table("Memory per device", _memory(report, planner, load)),
            figures_table("Time", _time(report, load)),
            *([expected_table(report["expected"])] if "expected" in report else []),
            operations_table("decode", report["decode"]),
            operations_table("prefill, one chunk", report["prefill"]),
            Line(f"{report['times']}.", style="dim"),
        ]
    parts += [Line(f"{text}.", style="dim") for text in report.get("remarks", ())]
    if "weights" in report:
        parts.append(Line(f"{report['weights']}.", style="dim"))
    if "explain" in report:
        columns = Column("figure", right=False), Column("formula", right=False, wraps=True)
        table = Table("Where the figures come from", columns)
        for name, text in report["explain"].items():
            table.add_row(name, text)
        parts.append(table)
    return parts


def _title(report: dict[str, Any], planner: Planner, load: Load) -> Text:
    d = planner.deployment
    params, active = report["num_params"], report["num_active_params"]
    used = f" ({active / 1e9:,.2f} B active per token)" if active != params else ""
    scheme = "".join(f", {name} {n}" for name in ("tp", "ep", "pp", "replicas") if (n := getattr(d.scheme, name)) > 1)
    experts = f" (experts {d.precision.experts})" if d.precision.experts else ""
    tokens = f"{load.context:,} tokens ({load.prompt:,} of prompt, {load.output:,} of answer)"
    first = Text.assemble((report["model"], "bold"), " on ", (d.hardware.name, "bold"), scheme)
    billions = params >= 1e8
    first.append(f": {params / (1e9 if billions else 1e6):,.2f} {'B' if billions else 'M'} parameters{used}")
    return first.append(
        f"\n{d.precision.weights} weights{experts}, {d.precision.state} state, {d.precision.activations} activations; "
        f"batch {load.batch:,} of {tokens}"
    )


def _memory(report: dict[str, Any], planner: Planner, load: Load) -> Iterator[Figure]:
    from ridgeline.cost.footprint import formula_bytes
    from ridgeline.plan.changes import query_heads
    from ridgeline.plan.rewrite import with_kv_heads

    d, m, size = planner.deployment, report["memory"], decimal_bytes
    page = next((g.page_tokens for g in planner.memory.groups if not g.snapshot), d.page_tokens)
    slack = m["pages_bytes"] / m["formula_bytes"] - 1 if m["formula_bytes"] else 0.0
    yield "weights", size(m["weight_bytes"]), f"{d.precision.weights} matrices and their scales, float32 vectors"
    yield "state, by formula", size(m["formula_bytes"]), (
        f"batch {load.batch:,} x {size(m['sequence_bytes'])} per sequence, without empty parts of pages"
    )  # fmt: skip
    yield (
        "state, allocated",
        size(m["pages_bytes"]),
        (
            f"in pages of {page} tokens: {slack:.1%} more for partly filled pages and the null page"
            + (", and two copies of recurrent states" if any(g.snapshot for g in planner.memory.groups) else "")
        ),
    )
    yield (
        "activations",
        size(m["activation_bytes"]),
        (f"for a step of {max(d.chunk, load.batch):,} tokens, with tables and libraries, as the engine counts them"),
    )
    yield "logits", size(m["logits_bytes"]), "with the buffers of sampling and log probabilities"
    reserve = "10% of the memory besides weights, for the allocator and other programs"
    yield "reserve", size(m["reserve_bytes"]), reserve
    free = m["spare_bytes"]
    yield "free", size(free) if m["fits"] else Text(size(free), "red"), (
        f"of {size(m['memory_bytes'])}" if m["fits"] else _remedy(report, planner, load)
    )  # fmt: skip
    yield "largest batch", f"{m['largest_batch']:,}", f"number of sequences of {load.context:,} tokens that fit"
    limit = d.spec.max_position_embeddings
    yield (
        "longest context",
        f"{m['longest_context']:,}",
        (
            f"tokens per sequence that fit at batch {load.batch:,}"
            + ("; it is the model's maximum" if m["longest_context"] == limit else "")
        ),
    )
    if heads := query_heads(d.spec):
        often = formula_bytes(with_kv_heads(d.spec, heads), d.precision, load.context) * load.batch
        own = formula_bytes(d.spec, d.precision, load.context) * load.batch
        everywhere = " on all devices together" if d.scheme.devices > d.scheme.replicas else ""
        yield (
            f"(kv_heads={heads})",
            size(often),
            (
                f"state if each of the {heads} query heads had its own keys and values, as is often quoted; the "
                f"model's KV heads need {size(own)}{everywhere}"
            ),
        )


def _remedy(report: dict[str, Any], planner: Planner, load: Load) -> str:
    """Return the smallest change that makes the deployment fit."""
    from ridgeline.plan.slo import smallest_fit

    batch, context = report["memory"]["largest_batch"], report["memory"]["longest_context"]
    found = [f"--batch {batch}"] if batch else []
    found += [f"--context {context}"] if context > 1 else []
    if not found:
        found = [smallest_fit(planner.deployment, load)]
    return f"does not fit in {decimal_bytes(report['memory']['memory_bytes'])}; it fits with {' or '.join(found)}"


def _time(report: dict[str, Any], load: Load) -> Iterator[Figure]:
    t, step = report["time"], report["decode"]
    causes = {name: s / step["seconds"] for name, s in step["by_cause"].items() if s / step["seconds"] > 0.005}
    shares = ", ".join(f"{name} {share:.0%}" for name, share in sorted(causes.items(), key=lambda x: -x[1]))
    blocks = report["deployment"]["blocks"]
    one, first = (f"a pass over {blocks['size']} tokens", blocks["size"]) if blocks else ("decode", 1)
    yield (
        "step",
        seconds(t["step_s"]),
        f"{one} at batch {load.batch:,}, {load.context:,} tokens each; limited by {shares}",
    )
    yield (
        "TTFT",
        seconds(t["ttft_s"]),
        f"a prompt of {load.prompt:,} tokens alone, in chunks of {_chunk(report):,}"
        + (", and its first block" if blocks else ""),
    )
    yield "TPOT", seconds(t["tpot_s"]), "mean time per token after the first, in steps without prefill"
    if speculation := report["deployment"]["speculation"]:
        yield "drafts", f"{speculation['tokens']:.2f} tokens", _drafts(speculation, t)
    if blocks:
        kept = f"{blocks['tokens_per_pass']:g} kept in each pass; fewer passes need `diffusion={blocks['size']}:TOKENS`"
        yield "passes", f"{blocks['size'] / blocks['tokens_per_pass']:g}", f"over a block: {kept}"
    yield "latency", seconds(t["latency_s"]), f"TTFT + {max(load.output - first, 0):,} x TPOT"
    yield "per request", f"{number(t['request_tokens_per_s'])} tokens/s", "1 / TPOT"
    yield "total", f"{number(t['tokens_per_s'])} tokens/s", "batch x replicas / TPOT"
    yield (
        "served",
        f"{number(t['served_tokens_per_s'])} tokens/s",
        (
            f"in steady state, where prefill shares the steps: TPOT {seconds(t['served_tpot_s'])}, "
            f"TTFT {seconds(t['served_ttft_s'])}"
        ),
    )
    yield (
        "knee",
        f"batch {t['knee_batch']:,}",
        "largest throughput per step time; above it, latency grows faster than throughput",
    )
    yield (
        "without a cache",
        seconds(t["naive_step_s"]),
        (
            f"a step without a KV cache, which computes all {load.context:,} tokens again; it takes "
            f"{t['naive_step_s'] / t['step_s']:.0f} times as long"
        ),
    )


def _drafts(speculation: dict[str, Any], t: dict[str, Any]) -> str:
    """Describe a verification, where the acceptance comes from, and the factor over plain decode."""
    verification, drafting = t["verification_s"], t["drafting_s"]
    factor = speculation["tokens"] * t["step_s"] / (verification + drafting)
    acceptance = ", ".join(f"{a:.2g}" for a in speculation["acceptance"])
    return (
        f"in each verification of {speculation['depth']} drafts by {speculation['draft'] or 'anything'}, at acceptance "
        f"{acceptance} ({speculation['acceptance_source']}); it takes {seconds(verification)}, its drafts "
        f"{seconds(drafting)}: {factor:.2f} times plain decode"
    )


def _chunk(report: dict[str, Any]) -> int:
    return int(report["deployment"]["chunk"])


def figures_table(title: str, figures: Iterator[Figure]) -> Table:
    """Return a table with a row for each figure: its name, its value with a unit, and an explanation."""
    columns = Column("", right=False), Column("value"), Column("why", right=False, wraps=True, style="dim")
    table = Table(title, columns, has_header=False)
    for name, value, why in figures:
        table.add_row(name, value, why)
    return table


def expected_table(found: dict[str, Any]) -> Table:
    """Return a table of what to expect: the median of each figure, and the band of four times in five."""
    columns = (Column("", right=False), Column("expected"), Column("p10"), Column("p90"))
    table = Table(f"Expected, with p10 to p90: {found['why']}", columns)
    for name, label in EXPECTED.items():
        band, text = found["figures"][name], seconds if name.endswith("_s") and "per" not in name else _rate
        table.add_row(label, text(band["p50"]), text(band["p10"]), text(band["p90"]))
    return table


def _rate(value: float) -> str:
    return f"{number(value)} tokens/s"


def operations_table(title: str, step: dict[str, Any]) -> Table:
    """Return a table of a step's operations, the slowest first. step: as plan/report.py returns it."""
    columns = (
        Column("operation", right=False), Column("layers", drop=3), Column("work", drop=5), Column("moved", drop=4),
        Column("FLOP/B", drop=2), Column("ridge", drop=1), Column("time"), Column("share"),
        Column("bound by", right=False),
    )  # fmt: skip
    table = Table(f"Operations of a step: {title}, {seconds(step['seconds'])}", columns)
    for op in sorted(step["operations"], key=lambda op: -op["seconds"]):
        slack = op["slack"]
        by = op["bound"] + (f", {number(slack)} x" if slack and op["bound"] not in ("link", "overhead") else "")
        moved = decimal_bytes(op["bytes"] or op["link_bytes"])
        table.add_row(
            op["name"], f"{op['layers']}", flops(op["flops"]) if op["flops"] else "", moved,
            number(op["intensity"]) if op["flops"] else "", number(op["ridge"]) if op["flops"] else "",
            seconds(op["seconds"]), f"{op['seconds'] / step['seconds']:.1%}", Text(by, BARS[op["bound"]]),
        )  # fmt: skip
    return table


def _comparison(rows: tuple[Row, ...], load: Load) -> Table:
    columns = (
        Column("change", right=False), Column("tokens/s"), Column("expected", drop=7), Column("ratio"),
        Column("devices", drop=6), Column("TPOT"), Column("TTFT", drop=5), Column("weights", drop=4),
        Column("state/seq", drop=3), Column("memory"), Column("max batch", drop=2), Column("tokens/s there", drop=1),
    )  # fmt: skip
    table = Table(f"Ranked by total tokens/s, batch {load.batch:,} of {load.context:,} tokens", columns)
    base = next(row for row in rows if not row.gives_up).figures.tokens_per_s
    for row in rows:
        f, m = row.figures, row.footprint
        used, likely = decimal_bytes(m.used_bytes), number(row.expected["p50"]) if row.expected else "-"
        table.add_row(
            row.text, number(f.tokens_per_s), likely, f"{f.tokens_per_s / base:.2f} x", f"{f.devices}",
            seconds(f.tpot_s), seconds(f.ttft_s), decimal_bytes(m.weight_bytes), decimal_bytes(row.sequence_bytes),
            used if m.fits else Text(f"{used}, does not fit", "red"), f"{row.largest_batch:,}",
            number(row.best_tokens_per_s), style="" if row.gives_up else "bold",
        )  # fmt: skip
    return table


def _given_up(rows: tuple[Row, ...]) -> Table:
    columns = Column("change", right=False), Column("trade-off", right=False, wraps=True)
    table = Table("Trade-offs", columns, has_header=False)
    for row in rows:
        if lost := "; ".join(text for text in (row.gives_up, *row.notes) if text):
            table.add_row(row.text, lost)
    return table


def _promise(answer: Answer, promise: Slo, confidence: float) -> list[Table | Line | Cell]:
    asked = _limits(promise, confidence)
    if answer.settings:
        title = f"Settings within {asked} in steady state, the cheapest first"
        return _settings(title, answer.settings, promise, confidence)
    title = f"No setting stays within {asked} on this machine; the closest one, and changes that would help"
    return _settings(title, ((answer.closest,) if answer.closest else ()) + answer.otherwise, promise, confidence)


def _limits(promise: Slo, confidence: float) -> str:
    limits = ", ".join(f"{name} {seconds(limit)}" for name, limit in promise.limits.items())
    return f"{limits} at {confidence:.0%} confidence"


def _settings(title: str, found: Sequence[Setting], promise: Slo, confidence: float) -> list[Table | Line | Cell]:
    """Return a table of settings, and a line on the machines in it of which too little is known."""
    columns = (
        Column("setting", right=False, wraps=True), Column("devices", drop=2), Column("batch"), Column("chunk"),
        Column("TTFT", drop=5), Column(f"TTFT {confidence:.0%}"), Column("TPOT", drop=4),
        Column(f"TPOT {confidence:.0%}"), Column("tokens/s"), Column("device-hours per 1M tokens", drop=3),
        Column("batch limited by", right=False, drop=1),
    )  # fmt: skip
    table = Table(title, columns)
    mixed = len({s.is_bound for s in found}) > 1  # predictions of a measured machine beside lower bounds of others
    for s in found:
        table.add_row(*_setting(s, promise, marked=mixed and s.is_bound))
    if not found:
        table.add_row("no setting fits", *[""] * 10)
    return [table, Line(f"{BOUND} {BOUND_WHY}", style="dim")] if mixed else [table]


def _setting(s: Setting, promise: Slo, *, marked: bool) -> tuple[Cell, ...]:
    from ridgeline.plan.slo import kept

    f, scheme = s.figures, s.deployment.scheme
    shared = "".join(f" --{n} {v}" for n in ("tp", "ep", "pp", "replicas") if (v := getattr(scheme, n)) > 1)
    name = s.changed + shared if s.changed else shared.strip() or "one device"
    return (
        f"{name} {BOUND}" if marked else name, f"{f.devices}", f"{f.load.batch:,}", f"{s.deployment.chunk:,}",
        seconds(f.served_ttft_s), seconds(s.sure_ttft_s), seconds(f.served_tpot_s), seconds(s.sure_tpot_s),
        number(f.served_tokens_per_s), number(f.device_seconds_per_token * 1e6 / 3600),
        s.why if kept(promise, f, s.sure) else Text(f"{s.why} too long", "red"),
    )  # fmt: skip
