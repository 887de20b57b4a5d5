"""Put the host's work into a simulation: the server's process before the engine, and the engine's work between steps.

    the server's process   reads and tokenizes requests one after the other, and sends tokens. A request waits until
                           those before it are read. Sending takes its share of the process, so reading takes longer by
                           1 / (1 - share), and without end where the share reaches 1
    the engine's process   detokenizes each token, and prepares each step; both lengthen the step

A calibration knows neither, since it runs steps without texts; the times are the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from ridgeline.errors import RequestError
from ridgeline.plan.limits import parse_time
from ridgeline.sim.cost import StepCost, Sums
from ridgeline.sim.workload import SECOND, Workload

FLAG = "--host-times"


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of the host's work.

    request: reading and checking one request. prompt_token: tokenizing one token of a prompt. sent_token: sending one
    token of an answer. step: preparing one step. token: detokenizing one token of an answer.
    """

    request: float = 0.0
    prompt_token: float = 0.0
    sent_token: float = 0.0
    step: float = 0.0
    token: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `request=1ms,prompt_token=2us,step=100us`. Raises RequestError for anything else."""
        names = [field.name for field in fields(cls)]
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in names or name in found:
                raise RequestError(f"{FLAG} {part!r:.60}: write NAME=TIME with {', '.join(names)}, each once")
            found[name] = parse_time(f"{FLAG} {name}", value)
        return cls(**found)

    def waits_ns(self, workload: Workload) -> Sequence[int]:
        """Return, for each request, the nanoseconds from its arrival until the engine gets it.

        Raises RequestError for clients that wait for answers, and if sending alone takes the whole process.
        """
        if workload.clients is not None:
            raise RequestError(f"{FLAG} needs times of arrival, as poisson:8 and traces have; closed:N has none")
        requests = workload.requests
        span = max(requests[-1].arrival_ns - requests[0].arrival_ns, 1) / SECOND if requests else 1.0
        sending = sum(r.output_tokens for r in requests) * self.sent_token / span if len(requests) > 1 else 0.0
        if sending >= 1:
            raise RequestError(
                f"{FLAG}: sending takes {sending:.2f} s of each second, more than one process has; lower the rate, or "
                "sent_token"
            )
        waits, free = [], 0
        for r in requests:
            own = (self.request + r.prompt_tokens * self.prompt_token) / (1 - sending)
            free = max(free, r.arrival_ns) + round(own * SECOND)
            waits.append(free - r.arrival_ns)
        return waits


def delayed(workload: Workload, waits_ns: Sequence[int]) -> Workload:
    """Return the workload as the engine gets it."""
    later = [r._replace(arrival_ns=r.arrival_ns + wait) for r, wait in zip(workload.requests, waits_ns, strict=True)]
    return replace(workload, requests=later)


@dataclass(frozen=True, slots=True)
class HostedCost:
    """The cost of steps with the host's part: a time for each step, and one for each row of logits: for each token."""

    cost: StepCost
    host: HostTimes

    def of(self, tokens: int, context: int) -> tuple[int, ...]:
        return self.cost.of(tokens, context)

    def seconds(self, tokens: int, rows: int, sums: Sums) -> Any:
        return self.cost.seconds(tokens, rows, sums) + (self.host.step + rows * self.host.token)
