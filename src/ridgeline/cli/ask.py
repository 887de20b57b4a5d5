"""`ridgeline plan MODEL --users N`: find devices, layout and price for a number of users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from ridgeline.cli.option import option

if TYPE_CHECKING:
    from ridgeline.catalog.prices import Price
    from ridgeline.plan.ask import Budget, Question
    from ridgeline.plan.planner import Deployment
    from ridgeline.sim.ask import Trial
    from ridgeline.sim.ask_offers import Answered, Offer

_USERS = "Users"
DEFAULT_MACHINE = "h100"
SHARE = 0.9  # of the even load, for the number of users that a budget serves


def _option(*names: str, help: str) -> Any:
    return option(*names, help=help, panel=_USERS)


@dataclass(eq=False, repr=False)
class AskFlags:
    """Users, what they expect, and what it may cost."""

    users: Annotated[
        int | None,
        _option("--users", help="Number of users who read answers at the same time: asks for devices. Default: none."),
    ] = None
    tokens_per_second: Annotated[
        float, _option("--tokens-per-second", help="Slowest stream of an answer, at p99. Default: 20.")
    ] = 20.0
    ttft: Annotated[str, _option("--ttft", help="Longest time to first token, at p99. Default: 1s.")] = "1s"
    think: Annotated[
        str, _option("--think", help="Time between the end of an answer and the user's next request. Default: 0s.")
    ] = "0s"
    budget: Annotated[
        str | None, _option("--budget", help="Most devices, with their machine: 8xh100. Default: no limit.")
    ] = None
    dollars_per_hour: Annotated[
        float | None,
        _option(
            "--dollars-per-hour",
            help="Most dollars per hour; without --hardware, any machine with a known price. Default: no limit.",
        ),
    ] = None
    price: Annotated[
        float | None,
        _option("--price", help="Dollars per hour of one device. Default: the known price, with its date and source."),
    ] = None
    slowdown: Annotated[
        float | None,
        _option(
            "--slowdown",
            help="Factor by which an engine is slower than the roofline, in place of the times to expect. "
            "Default: none; 1.6 where too little is known of the machine.",
        ),
    ] = None
    length_cv: Annotated[
        float, _option("--length-cv", help="Coefficient of variation of prompts' and answers' lengths. Default: 0.5.")
    ] = 0.5
    seed: Annotated[int, _option("--seed", help="Random seed of arrivals and lengths. Default: 0.")] = 0

    def given(self) -> list[str]:
        """Return the flags that were given, besides --users."""
        fresh = AskFlags()
        names = [n for n in vars(fresh) if n != "users" and getattr(self, n) != getattr(fresh, n)]
        return [f"--{name.replace('_', '-')}" for name in names]


def check_unused(flags: AskFlags, others: dict[str, Any]) -> None:
    """Raise RequestError for flags that do not go together. others: flags of a plan that --users has no use for."""
    from ridgeline.errors import RequestError

    if flags.users is None:
        if given := flags.given():
            raise RequestError(f"{given[0]} needs --users, the number of users who read answers at the same time")
        return
    if given := [name for name, value in others.items() if value]:
        raise RequestError(f"{given[0]} does not go with --users, which chooses it; leave one of them out")


def question_of(flags: AskFlags, prompt: int | None, output: int | None) -> Question:
    """Return the question that the flags ask."""
    from ridgeline.plan.ask import Question
    from ridgeline.plan.limits import parse_time

    assert flags.users is not None
    return Question(
        flags.users, flags.tokens_per_second, 1024 if prompt is None else prompt, 256 if output is None else output,
        parse_time("--ttft", flags.ttft), parse_time("--think", flags.think),
    )  # fmt: skip


def machines_of(flags: AskFlags, hardware: str | None, budget: Budget) -> list[str]:
    """Return the names of the machines to search. Raises RequestError if the flags contradict each other."""
    from ridgeline.catalog.machines import hardware as find
    from ridgeline.catalog.prices import prices
    from ridgeline.errors import RequestError

    if budget.machine is not None:
        if hardware is not None and find(hardware).name != budget.machine:
            raise RequestError(f"--budget names {budget.machine} and --hardware {hardware}; leave out --hardware")
        return [budget.machine]
    if hardware is not None:
        return [hardware]
    if flags.price is not None:
        return [DEFAULT_MACHINE]
    return list(prices()) if budget.dollars_per_hour is not None else [DEFAULT_MACHINE]


def answer_users(
    name: str, deployments: list[Deployment], flags: AskFlags, question: Question, budget: Budget, confidence: float
) -> dict[str, Any]:
    """Search and simulate layouts; return the report that --json prints. Names with an underscore are for tables.

    confidence: probability with which the expected times keep each limit.
    """
    from ridgeline.catalog.models import BUILT_IN
    from ridgeline.cli.show.progress import parts_bar
    from ridgeline.plan.ask import layouts, num_searches
    from ridgeline.plan.ask_commands import Start, serve_command, vllm_command
    from ridgeline.sim.ask import Spread
    from ridgeline.sim.ask_offers import num_offers, offers

    spread = Spread(flags.length_cv, flags.seed)
    for d in deployments:
        check_length(question, d.spec.max_position_embeddings)
    priced = [(d, price_for(flags, d.hardware.name)) for d in deployments]
    with parts_bar("searching", num_searches(priced)) as done:
        found = layouts(priced, question, done, confidence if flags.slowdown is None else None)
    with parts_bar("simulating", num_offers(found)) as done:
        answered = offers(found, question, budget, spread, done)
    best = answered.answer
    report = report_of(name, question, answered) | {"confidence": confidence}
    report["_answered"], report["_question"], report["_budget"] = answered, question, budget
    if best is not None:
        start = Start(name, best.layout, best.replicas, best.max_model_len, best.prefill, best.decode)
        report["serve"] = serve_command(start)
        report["vllm"] = f"# {name} ships with Ridgeline only." if name in BUILT_IN else vllm_command(start)
    return report


def check_length(question: Question, limit: int) -> None:
    """Raise RequestError for requests that are longer than the model's positions."""
    from ridgeline.errors import RequestError

    if question.load.context > limit:
        raise RequestError(
            f"--input-len {question.prompt:,} and --output-len {question.output:,} are {question.load.context:,} "
            f"tokens together, but the model has {limit:,} positions; lower them"
        )


def price_for(flags: AskFlags, machine: str) -> Price | None:
    """Return the user's price, else the known one; None if there is neither. Raises RequestError for a bad one."""
    from math import isfinite

    from ridgeline.catalog.prices import Price, price_of
    from ridgeline.errors import RequestError

    if flags.price is None:
        return price_of(machine)
    if not (flags.price > 0 and isfinite(flags.price)):
        raise RequestError(f"--price is {flags.price}; it must be above 0")
    return Price(flags.price, "--price")


def report_of(name: str, question: Question, answered: Answered) -> dict[str, Any]:
    """Return question and offers in base units."""
    from dataclasses import asdict

    return {
        "model": name,
        "question": asdict(question) | {
            "requests_per_s": question.requests_per_s, "output_tokens_per_s": question.output_tokens_per_s,
        },
        "answer": offer_json(answered.answer, question) if answered.answer else None,
        "others": [offer_json(o, question) for o in answered.others],
        "one_failure": trial_json(answered.failure) if answered.failure else None,
        "expected": {name: trial_json(trial) for name, trial in answered.bands.items()},
    }  # fmt: skip


def offer_json(offer: Offer, question: Question) -> dict[str, Any]:
    d, price = offer.layout.deployment, offer.layout.price
    return {
        "hardware": d.hardware.name, "replicas": offer.replicas, "tp": d.scheme.tp, "devices": offer.devices,
        "batch": offer.split.batch if offer.split else offer.layout.batch, "chunk": d.chunk,
        "weights": d.precision.weights, "state": d.precision.state, "changed": offer.layout.changed,
        "prefill_engines": offer.prefill, "decode_engines": offer.decode, "max_model_len": offer.max_model_len,
        "dollars_per_hour": offer.dollars_per_hour, "dollars_per_million_tokens": offer.dollars_per_million(question),
        "price": {"dollars_per_device_hour": price.dollars_per_hour, "date": price.date, "source": price.source}
        if price else None,
        **trial_json(offer.trial),
    }  # fmt: skip


def trial_json(trial: Trial) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(trial)
