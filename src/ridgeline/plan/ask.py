"""Find layouts that serve a number of users: how many requests they send, and what each layout could serve.

    requests   users / (output / tokens per second + think): each user reads an answer at this speed, thinks, and asks
               again; with 500 users, 20 tokens per second and answers of 400 tokens, 25 requests a second arrive
    a layout   one replica: a machine, the devices that share the model, types, the chunk, and the largest batch whose
               steady state keeps both limits (plan/slo.py)
    replicas   at least requests / requests that one replica could serve; sim/ask.py finds how many keep the limits at
               p99, since arrivals are random

Times are those to expect of a machine (plan/expected.py), and a limit counts as kept if it is kept with the confidence
that was asked for. Where too little is known of a machine, its roofline is multiplied by a factor first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, isfinite

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.prices import Price
from ridgeline.cost.precision import storage_of
from ridgeline.errors import RequestError
from ridgeline.plan.changes import change
from ridgeline.plan.expected import ROOF, Sureness
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Figures, Load
from ridgeline.plan.slo import settings_within
from ridgeline.spec.hardware import HardwareSpec

# Where nothing was fitted, for TPUs and CPUs: times of published results of GPUs divided by those of the roofline.
SLOWDOWN = 1.6
# Changes that alter the output; they are proposed, and never taken without being asked for.
LOSSY = ("weights=fp8", "weights=fp8,kv=fp8", "weights=int4", "weights=int4,kv=fp8")
MOST_USERS = 10**7
FULLEST = 0.95  # share of the even load that replicas may have: beyond it a queue grows for longer than a trial lasts


@dataclass(frozen=True, slots=True)
class Question:
    """Users, and what each of them expects.

    tokens_per_s: the slowest stream of an answer. prompt, output: mean tokens. ttft_s: longest time to first token.
    think_s: seconds between the end of an answer and the user's next request. Raises RequestError for values out of
    range.
    """

    users: int
    tokens_per_s: float
    prompt: int
    output: int
    ttft_s: float
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.users <= MOST_USERS:
            raise RequestError(f"--users is {self.users:,}; it must be from 1 to {MOST_USERS:,}")
        for flag, value in (("tokens-per-second", self.tokens_per_s), ("ttft", self.ttft_s)):
            if not (value > 0 and isfinite(value)):
                raise RequestError(f"--{flag} is {value}; it must be above 0")
        for flag, count in (("input-len", self.prompt), ("output-len", self.output)):
            if count < 1:
                raise RequestError(f"--{flag} is {count}; it must be at least 1")
        if not (self.think_s >= 0 and isfinite(self.think_s)):
            raise RequestError(f"--think is {self.think_s} s; it must not be negative")

    @property
    def requests_per_s(self) -> float:
        return self.users / (self.output / self.tokens_per_s + self.think_s)

    @property
    def output_tokens_per_s(self) -> float:
        """Return the tokens per second that all answers together take."""
        return self.requests_per_s * self.output

    @property
    def promise(self) -> Slo:
        return Slo(ttft_s=self.ttft_s, tpot_s=1 / self.tokens_per_s)

    @property
    def load(self) -> Load:
        return Load(1, self.prompt, self.output)


@dataclass(frozen=True, slots=True)
class Layout:
    """One replica of a model that keeps the limits on average.

    figures: expected figures of the largest batch within the limits. why: the limit that bounds this batch. changed: a
    change of the output that it needs. price: price of one device; None if it is not known. sure: margins over the
    expected times with which the limits are kept.
    """

    deployment: Deployment
    figures: Figures
    why: str
    changed: str = ""
    price: Price | None = None
    sure: Sureness = ROOF

    @property
    def devices(self) -> int:
        """Return the devices of one replica."""
        return self.deployment.scheme.devices

    @property
    def batch(self) -> int:
        return self.figures.load.batch

    @property
    def requests_per_s(self) -> float:
        """Return the requests that one replica could serve, margin included, if they arrived evenly."""
        return self.figures.served_tokens_per_s / self.figures.load.output / self.sure.tpot

    def least_replicas(self, question: Question) -> int:
        """Return the least number of replicas that could serve the users."""
        return max(1, ceil(question.requests_per_s / self.requests_per_s - 1e-9))

    def cost(self, replicas: int) -> float:
        """Return the dollars per hour of so many replicas, or their devices if there is no price."""
        return replicas * self.devices * (self.price.dollars_per_hour if self.price else 1.0)


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits on what an answer may take. machine: the only machine; None: any. Each number may be None: no limit."""

    machine: str | None = None
    devices: int | None = None
    dollars_per_hour: float | None = None

    @classmethod
    def parse(cls, text: str | None, dollars_per_hour: float | None) -> Budget:
        """Parse `8xh100`. Raises RequestError for another form, and for a budget that is not positive."""
        if dollars_per_hour is not None and not (dollars_per_hour > 0 and isfinite(dollars_per_hour)):
            raise RequestError(f"--dollars-per-hour is {dollars_per_hour}; it must be above 0")
        if text is None:
            return cls(dollars_per_hour=dollars_per_hour)
        count, sign, machine = text.lower().partition("x")
        if not (sign and count.isdecimal() and 1 <= int(count) <= MOST_USERS and machine):
            raise RequestError(f"--budget is {text!r:.60}; write a number of devices and their machine: 8xh100")
        return cls(hardware(machine).name, int(count), dollars_per_hour)

    def most_replicas(self, layout: Layout) -> int:
        """Return how many replicas of a layout the budget pays for. Raises RequestError if there is no price."""
        most = MOST_USERS
        if self.devices is not None:
            most = min(most, self.devices // layout.devices)
        if self.dollars_per_hour is not None:
            if layout.price is None:
                raise RequestError(
                    f"the price of {layout.deployment.hardware.name} is not known; give it: --price 2.50 (dollars per "
                    "device and hour)"
                )
            most = min(most, int(self.dollars_per_hour / (layout.devices * layout.price.dollars_per_hour) + 1e-9))
        return most


def slowed(machine: HardwareSpec, factor: float) -> HardwareSpec:
    """Return a machine on which every time of the roofline is `factor` times as long."""
    if not 1 <= factor <= 100:
        raise RequestError(f"--slowdown is {factor}; it must be from 1 to 100")
    link, host = machine.link, machine.host
    return replace(
        machine,
        read_bytes_per_s=machine.read_bytes_per_s / factor,
        flops_per_s={kind: rate / factor for kind, rate in machine.flops_per_s.items()},
        link=link and replace(link, bytes_per_s=link.bytes_per_s / factor, latency_s=link.latency_s * factor),
        host=host and replace(host, bytes_per_s=host.bytes_per_s / factor, latency_s=host.latency_s * factor),
        op_overhead_s=machine.op_overhead_s * factor,
        step_overhead_s=machine.step_overhead_s * factor,
    )


def layouts(
    deployments: Sequence[tuple[Deployment, Price | None]], question: Question, on_done: Callable[[], None],
    confidence: float | None = None,
) -> list[Layout]:  # fmt: skip
    """Return the layouts that keep the limits, the cheapest first, and of equal cost the one with fewer devices.

    on_done: called after each deployment and change. confidence: probability with which the expected times keep each
    limit; None: times are those of the machine as it is given, without a margin.
    """
    found: list[Layout] = []
    for deployment, price in deployments:
        for text, changed in _changed(deployment):
            settings, _ = settings_within(changed, question.load, question.promise, confidence)
            found += [
                Layout(s.deployment, s.figures, s.why, text, price, s.sure)
                for s in settings if can_simulate(s.deployment)
            ]  # fmt: skip
            on_done()
    return sorted(found, key=lambda one: (one.cost(one.least_replicas(question)), one.devices))


def num_searches(deployments: Sequence[tuple[Deployment, Price | None]]) -> int:
    """Return how often `layouts` calls `on_done`."""
    return sum(1 for deployment, _ in deployments for _ in _changed(deployment))


def _changed(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    """Yield the deployment as it is, and then with each change that makes its types narrower."""
    yield "", deployment
    if deployment.hardware.kind == "cpu":
        return
    weights, state = _bits(deployment)
    for text in LOSSY:
        after = change(deployment, text).deployment
        narrow = _bits(after)
        if narrow != (weights, state) and narrow[0] <= weights and narrow[1] <= state:
            yield text, after


def _bits(d: Deployment) -> tuple[int, int]:
    """Return the bits of the weights and of the state."""
    return storage_of(d.precision.weights).bits, storage_of(d.precision.state).bits


def can_simulate(d: Deployment) -> bool:
    """Return whether the simulator has the deployment: tensor parallelism, one device of a calibrated machine, and
    nothing in the host's memory.
    """
    scheme = d.scheme
    return scheme.ep == scheme.pp == 1 and not d.offload and (d.hardware.rates is None or scheme.tp == 1)
