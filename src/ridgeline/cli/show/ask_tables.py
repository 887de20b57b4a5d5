"""Print the answer to --users: the layout, what it costs, what a failure costs, other layouts, commands to paste."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from ridgeline.cli.show.plan_tables import Figure, figures_table
from ridgeline.cli.show.tables import Cell, Column, Line, Table, screen, show
from ridgeline.plan.units import number, seconds

if TYPE_CHECKING:
    from ridgeline.plan.ask import Budget, Question
    from ridgeline.sim.ask import Trial
    from ridgeline.sim.ask_offers import Answered, Offer


def show_answer(report: dict[str, Any]) -> None:
    """Print a report of cli/ask.py."""
    answered, question = report["_answered"], report["_question"]
    parts: list[Table | Line | Cell] = [_title(report["model"], question)]
    best = answered.answer
    if best is None:
        parts.append(Text(_nothing(answered, question, report["_budget"]), "red"))
    else:
        parts.append(figures_table("Answer", _figures(best, answered, question, report["confidence"])))
    if answered.others:
        parts.append(_others(answered.others, question))
    parts += [Line(f"{text}.", style="dim") for text in report["remarks"]]
    show(screen(), *parts)
    if best is not None:
        # Not as a table: lines that are pasted must not be cut or aligned.
        print(f"\nRidgeline:\n{report['serve']}\n\nvLLM:\n{report['vllm']}")


def _title(name: str, q: Question) -> Text:
    return Text.assemble(
        (name, "bold"), f" for {q.users:,} users at {number(q.tokens_per_s)} tokens/s: "
        f"{number(q.requests_per_s)} requests/s, {number(q.requests_per_s * q.prompt)} tokens/s in and "
        f"{number(q.output_tokens_per_s)} out",
    )  # fmt: skip


def layout_text(offer: Offer) -> str:
    """Return a layout in a few words: `9 x 4 h100`."""
    machine, tp = offer.layout.deployment.hardware.name, offer.layout.devices
    each = machine if tp == 1 else f"(tp {tp} {machine})"
    if offer.split is not None:
        return f"{offer.prefill} prefill + {offer.decode} decode x {each}"
    return f"{offer.replicas} x {each}"


def _figures(best: Offer, answered: Answered, q: Question, confidence: float) -> Iterator[Figure]:
    """Yield the figures of the answer. confidence: probability with which times are at most those of its trial."""
    d, trial, expected = best.layout.deployment, best.trial, answered.bands.get("p50")
    replicas = _counted(best.replicas, "engine" if best.split else "replica")
    yield "devices", f"{best.devices}", f"{layout_text(best)}: {replicas} of {_counted(best.layout.devices, 'device')}"
    batch = best.split.batch if best.split else best.layout.batch
    why = f"largest batch within both limits, bounded by {best.layout.why}; {trial.mean_batch:.0f} run on average"
    yield "batch", f"{batch}", why if best.split is None else "largest batch of a decode engine"
    yield "chunk", f"{d.chunk:,} tokens", "of prompts in one step"
    yield "types", d.precision.weights, f"weights; state in {d.precision.state}; the output is the model's own"
    limit_s = 1 / q.tokens_per_s
    if expected is None:
        yield "TTFT, p99", seconds(trial.ttft_p99_s), _headroom(trial.ttft_p99_s, q.ttft_s, trial.ttft_p50_s)
        yield "TPOT, p99", seconds(trial.tpot_p99_s), _headroom(trial.tpot_p99_s, limit_s, trial.tpot_p50_s)
    else:
        yield "TTFT, p99", seconds(expected.ttft_p99_s), _headroom(expected.ttft_p99_s, q.ttft_s, expected.ttft_p50_s)
        yield "", seconds(trial.ttft_p99_s), _kept(trial.ttft_p99_s, q.ttft_s, confidence)
        yield "TPOT, p99", seconds(expected.tpot_p99_s), _headroom(expected.tpot_p99_s, limit_s, expected.tpot_p50_s)
        yield "", seconds(trial.tpot_p99_s), _kept(trial.tpot_p99_s, limit_s, confidence)
    sure = "" if expected is None else f"; {expected.load:.0%} at the expected times"
    yield "load", f"{trial.load:.0%}", f"of the requests that these replicas could serve if they arrived evenly{sure}"
    yield "one failure", *_failure(best, answered.failure, q)
    if best.dollars_per_hour is not None and best.layout.price is not None:
        price = best.layout.price
        when = f", read on {price.date}" if price.date else ""
        yield (
            "cost",
            f"${best.dollars_per_hour:,.2f}/h",
            f"${best.dollars_per_million(q):,.2f} per million (1M) tokens of answers, at ${price.dollars_per_hour:.2f} "
            f"a device and hour ({price.source}{when})",
        )
    else:
        yield "cost", "not known", "no price of this machine is known; give it: --price 2.50"


def _counted(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count != 1)}"


def _headroom(value: float, limit: float, median: float) -> str:
    return f"{1 - value / limit:.0%} below the limit of {seconds(limit)}; median {seconds(median)}"


def _kept(value: float, limit: float, confidence: float) -> str:
    return f"at most this, with a probability of {confidence:.0%}: {1 - value / limit:.0%} below the limit"


def _failure(best: Offer, failure: Trial | None, q: Question) -> tuple[str, str]:
    more = best.cost / best.replicas
    extra = f"${more:,.2f}/h" if best.layout.price else _counted(round(more), "device")
    if failure is None:
        return "no answers", f"there is one replica only; a second one costs {extra}"
    left = f"with {failure.replicas} left, p99 of TTFT is {seconds(failure.ttft_p99_s)} and of TPOT "
    left += seconds(failure.tpot_p99_s)
    if failure.kept:
        return "no limit broken", left
    within = failure.ttft_p99_s <= q.ttft_s and failure.tpot_p99_s <= 1 / q.tokens_per_s
    why = f"the load is {failure.load:.0%}, and the queue grows" if within else "a limit is broken"
    return f"{failure.share:.0%} in time", f"{left}: {why}; one replica more costs {extra}"


def _others(others: tuple[Offer, ...], q: Question) -> Table:
    columns = (
        Column("other layouts", right=False, wraps=True), Column("devices", drop=2), Column("$/h", drop=3),
        Column("$/1M", drop=1), Column("TTFT p99"), Column("TPOT p99"), Column("needs", right=False, wraps=True),
    )  # fmt: skip
    table = Table("", columns)
    for o in others:
        per_hour, per_million = o.dollars_per_hour, o.dollars_per_million(q)
        broken = "" if o.trial.kept else "breaks a limit"
        table.add_row(
            layout_text(o), f"{o.devices}", f"{per_hour:,.2f}" if per_hour else "",
            f"{per_million:,.2f}" if per_million else "", seconds(o.trial.ttft_p99_s), seconds(o.trial.tpot_p99_s),
            Text(broken, "red") if broken else o.layout.changed,
        )  # fmt: skip
    return table


def _nothing(answered: Answered, q: Question, budget: Budget) -> str:
    """Say that the budget does not suffice, and for how many users it does."""
    from ridgeline.cli.ask import SHARE
    from ridgeline.sim.ask_offers import users_within

    exact = [o for o in answered.others if not o.layout.changed and o.split is None]
    most = max((users_within(o.layout, q, budget, SHARE) for o in exact), default=0)
    text = "No layout with unchanged outputs keeps the limits within the budget"
    return f"{text}; it would serve about {most:,} users." if most else f"{text}."
