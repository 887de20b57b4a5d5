"""Add up the reports of several engines, so that /metrics and the live page show them as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any

from ridgeline.sched.counts import Histogram
from ridgeline.sched.page_times import PageTimes
from ridgeline.sched.stats import GroupStats, Stats
from ridgeline.serve.engine.messages import Report
from ridgeline.serve.engine.meters import EngineMeters

LARGEST = ("alive_s", "last_step_s", "drift")  # figures of one engine, of which the sum says nothing
SUMMED = (
    "running", "waiting", "queried_tokens", "hit_tokens", "preempted_recompute", "preempted_swap", "snapshots",
    "restored", "recomputed_tokens",
)  # fmt: skip


def total(reports: Sequence[Report]) -> Report:
    """Return the sum of one report or more: counters and histograms are added, the rest is that of the first report."""
    return reduce(_plus, reports)


def _plus(one: Report, other: Report) -> Report:
    stats = one.stats if other.stats is None else other.stats if one.stats is None else _stats(one.stats, other.stats)
    return Report(one.id, stats, _meters(one.meters, other.meters))


def _meters(one: EngineMeters, other: EngineMeters) -> EngineMeters:
    return EngineMeters(**{f.name: _sum(f.name, getattr(one, f.name), getattr(other, f.name)) for f in fields(one)})


def _sum(name: str, one: Any, other: Any) -> Any:
    if name in LARGEST:
        return max(one, other)
    if isinstance(one, Histogram):
        return one.plus(other)
    return Counter({key: one[key] + other[key] for key in {*one, *other}}) if isinstance(one, Counter) else one + other


def _stats(one: Stats, other: Stats) -> Stats:
    summed = {name: getattr(one, name) + getattr(other, name) for name in SUMMED}
    times = one.page_times
    if times is not None and other.page_times is not None:
        times = PageTimes(
            **{f.name: getattr(times, f.name).plus(getattr(other.page_times, f.name)) for f in fields(times)}
        )
    return replace(
        one, groups=tuple(map(_group, one.groups, other.groups)), drafts=one.drafts.plus(other.drafts),
        resident_pages=tuple(a + b for a, b in zip(one.resident_pages, other.resident_pages, strict=True)),
        page_times=times, last_step=one.last_step or other.last_step, **summed,
    )  # fmt: skip


def _group(one: GroupStats, other: GroupStats) -> GroupStats:
    numbers = {f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(one) if f.name != "name"}
    return replace(one, **numbers)
