"""Separate devices for prefill and decode: engines that compute prompts, and engines that compute answers.

A prompt is computed alone, in one chunk if it is not too long; its state is then sent to an engine that decodes. So
TTFT is the wait for a prefill engine, the prompt's time, and the time to send its state; and no prompt lengthens the
gaps between tokens. sim/ask_split.py simulates both groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from ridgeline.catalog.machines import link
from ridgeline.catalog.prices import Price
from ridgeline.cost.footprint import largest
from ridgeline.plan.ask import FULLEST, Layout, Question
from ridgeline.plan.expected import Sureness
from ridgeline.plan.planner import Deployment, Planner

LONGEST_CHUNK = 8192  # tokens of a prompt in one step
DECODE_CHUNK = 128
BETWEEN = "infiniband-400g"  # the link over which the state is sent, one for each device


@dataclass(frozen=True, slots=True)
class Split:
    """Separate devices for prefill and decode, as one replica of each kind.

    prompt_s: time of a prompt alone. sending_s: time to send its state. batch: largest batch of a decode engine within
    the limit of TPOT. tpot_s: its mean TPOT. price: price of one device. sure: margins with which limits are kept;
    the times are without them.
    """

    prefill: Deployment
    decode: Deployment
    prompt_s: float
    sending_s: float
    batch: int
    tpot_s: float
    price: Price | None
    sure: Sureness

    @property
    def devices(self) -> int:
        """Return the devices of one engine."""
        return self.decode.scheme.devices

    def least(self, question: Question) -> tuple[int, int]:
        """Return the fewest engines of both kinds that could serve the users if requests arrived evenly."""
        rate = question.requests_per_s * self.sure.tpot
        answer_s = max(question.output - 1, 1) * self.tpot_s
        return ceil(rate * self.prompt_s / FULLEST), ceil(rate * answer_s / self.batch / FULLEST)

    def cost(self, engines: int) -> float:
        """Return the dollars per hour of so many engines, or their devices if there is no price."""
        return engines * self.devices * (self.price.dollars_per_hour if self.price else 1.0)


def split_of(layout: Layout, question: Question) -> Split | None:
    """Return separate engines with the devices and types of a layout; None if they do not keep the limits."""
    d, limits, context, sure = layout.deployment, question.promise, question.load.context, layout.sure
    chunk = min(LONGEST_CHUNK, 1 << (question.prompt - 1).bit_length())
    prefill, decode = (Planner(replace(d, chunk=n), sure.efficiency) for n in (chunk, DECODE_CHUNK))
    assert limits.ttft_s is not None and limits.tpot_s is not None
    prompt_s = prefill.ttft_s(question.prompt)
    sending_s = prefill.memory.sequence_bytes(question.prompt) / link(BETWEEN).bytes_per_s
    room = min(decode.memory.largest_batch(context, 1 << 12), 1 << 12)
    load, limit = question.load, limits.tpot_s / sure.tpot
    batch = largest(lambda n: decode.tpot_s(replace(load, batch=n)) <= limit, room) if room else 0
    fits = prefill.memory.footprint(1, context).fits and batch > 0
    if not fits or prompt_s * sure.ttft + sending_s > limits.ttft_s:
        return None
    tpot_s = decode.tpot_s(replace(load, batch=batch))
    return Split(prefill.deployment, decode.deployment, prompt_s, sending_s, batch, tpot_s, layout.price, sure)
