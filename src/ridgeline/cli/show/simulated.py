"""Print the latencies and rates of a simulated or measured workload as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ridgeline.cli.show.tables import Column, Table
from ridgeline.plan.units import decimal_bytes as size

if TYPE_CHECKING:
    from ridgeline.sim import Percentiles, Report


def report_tables(r: Report) -> tuple[Table, Table]:
    """Return the tables of latencies and of rates."""
    return _latencies(r), _rates(r)


def spread_table(*more: str) -> Table:
    """Return an empty table of latencies. more: names of the columns after the percentiles."""
    return Table(
        "",
        (
            Column("per request", right=False), Column("mean"), Column("p50"), Column("p90", drop=2),
            Column("p95", drop=1), Column("p99"), Column("max", drop=3), *(Column(name) for name in more),
        ),
    )  # fmt: skip


def _latencies(r: Report) -> Table:
    table = spread_table()
    rows: list[tuple[str, Percentiles | None]] = [
        ("TTFT, with queueing", r.ttft_s), ("TPOT", r.tpot_s), ("between two tokens", r.itl_s),
        ("end to end", r.e2e_s),
    ]  # fmt: skip
    for name, p in rows:
        if p is not None:
            table.add_row(name, *map(_time, (p.mean, p.p50, p.p90, p.p95, p.p99, p.max)))
    return table


def _rates(r: Report) -> Table:
    table = Table("", (Column("", right=False), Column("value", right=False, wraps=True)), has_header=False)
    limits = {"TTFT": r.slo and r.slo.ttft_s, "TPOT": r.slo and r.slo.tpot_s, "end to end": r.slo and r.slo.e2e_s}
    if r.goodput is not None and r.attainment is not None:
        asked = ", ".join(f"{name} {_time(limit)}" for name, limit in limits.items() if limit)
        table.add_row("goodput", f"{r.goodput:,.2f} requests/s; {r.attainment:.1%} of all stay within {asked}")
    table.add_row(
        "throughput",
        f"{r.requests_per_s:,.2f} requests/s, {r.output_tokens_per_s:,.0f} tokens/s out, "
        f"{r.total_tokens_per_s:,.0f} in and out",
    )
    table.add_row("replicas busy", f"{r.utilization:.1%} of the time")
    if (d := r.drafts) is not None:
        share = "" if d.drafting_share is None else f"; drafting takes {d.drafting_share:.1%} of the busy time"
        table.add_row(
            "drafts",
            f"{d.tokens_per_verification:.2f} tokens a verification; {d.num_accepted:,} of {d.num_drafts:,} accepted"
            f"{share}",
        )
    table.add_row("batch", f"mean {r.mean_batch:,.1f} sequences a step, {r.mean_waiting:,.1f} waiting, per replica")
    table.add_row(
        "state", f"mean {size(r.mean_used_bytes)}, peak {size(r.peak_bytes)} of {size(r.state_bytes)}, per replica"
    )
    table.add_row("prefix hits", f"{r.hit_rate:.1%} of prompt tokens")
    table.add_row("preemptions", f"{r.preemptions:,}")
    return table


def _time(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.2f} ms"
