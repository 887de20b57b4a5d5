"""Published results of engines on machines that nobody has here: what they measured, and the steps that it consists of.

data/published.json has one row a result. Every row was read in a source that the file names, and quotes it. The
kinds of a figure, each as seconds:

    decode       one token of each sequence, the mean over the answer; published as tokens per second of a sequence
    served_tpot  the same in a closed loop, where the prompts of other requests are computed between two tokens
    ttft         a prompt alone
    prefill      a prompt alone in chunks of 512 tokens; published as tokens of the prompt per second
    latency      one static batch, from its prompts to its last token
    throughput   the same; published as tokens of all answers per second, of a device or of all

bench/plan_published.py fits cost/data/efficiency.json to them, and states the error on sources that were left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.operations import Slice
from ridgeline.cost.precision import Precision
from ridgeline.cost.shard import Scheme
from ridgeline.plan.planner import Deployment

Kind = Literal["decode", "served_tpot", "ttft", "prefill", "latency", "throughput"]
CHUNK, SMALL_CHUNK = 8192, 512  # tokens of a prompt in one step: of the engines that serve, and of llama.cpp
AS_PUBLISHED = "published"  # types of weights as in the catalog


@dataclass(frozen=True, slots=True)
class Source:
    """A text with results. read: how a figure was read there. retrieved: day, ISO 8601."""

    title: str
    address: str
    engine: str
    version: str
    read: str
    retrieved: str


@dataclass(frozen=True, slots=True)
class Result:
    """One published figure, in `unit`: ms, s, tokens/s or tokens/s/device.

    activations: type of the operands of products. state: type of the KV cache. tp: number of devices. batch: sequences,
    or requests at a time. prompt, output: tokens of each. quote: the row or the sentence that has the figure. read: how
    it was read, if not as the source says.
    """

    source: str
    model: str
    machine: str
    engine: str
    version: str
    weights: str
    activations: str
    state: str
    tp: int
    batch: int
    prompt: int
    output: int
    kind: Kind
    figure: float
    unit: str
    quote: str
    read: str = ""

    @property
    def seconds(self) -> float:
        """Return the figure as seconds of what `steps` describes."""
        if self.unit in ("ms", "s"):
            return self.figure * (1e-3 if self.unit == "ms" else 1.0)
        rate = self.figure * (self.tp if self.unit == "tokens/s/device" else 1)
        tokens = {"prefill": self.prompt, "throughput": self.batch * self.output}.get(self.kind, 1)
        return tokens / rate

    @property
    def deployment(self) -> Deployment:
        """Return the model on the machine, as the planner describes it."""
        known, machine = find_model(self.model), hardware(self.machine)
        if self.weights == AS_PUBLISHED:
            experts = None if known.experts == known.weights else known.experts
            precision = Precision(known.weights, self.state, self.activations, experts, self.activations)
        else:
            wide = self.activations if self.activations in ("float16", "bfloat16") else "bfloat16"
            precision = Precision(self.weights, self.state, wide, None, self.activations, wide)
        return Deployment(known.spec, machine, precision, Scheme(tp=self.tp))

    @property
    def prompts(self) -> float:
        """Return the number of prompts that arrive during `seconds`."""
        if self.kind == "served_tpot":
            return (self.batch - 1) / max(self.output - 1, 1)
        return 1.0 if self.kind == "ttft" else 0.0

    @property
    def steps(self) -> tuple[tuple[float, Slice], ...]:
        """Return the steps that the figure is the time of: how often each runs, and its sequences."""
        return tuple(self._steps())

    def _steps(self) -> Iterator[tuple[float, Slice]]:
        if self.kind in ("latency", "throughput"):
            yield 1.0, Slice(self.batch, self.prompt, self.prompt)
        elif self.kind != "decode":
            size = SMALL_CHUNK if self.kind == "prefill" else CHUNK
            for start in range(0, self.prompt, size):
                end = min(start + size, self.prompt)
                often = self.prompts if self.kind == "served_tpot" else 1.0
                if often:
                    yield often, Slice(1, end - start, end, 1 if end == self.prompt else 0)
        if self.kind in ("ttft", "prefill"):
            return
        often = self.output - 1 if self.kind in ("latency", "throughput") else 1
        first, last = self.prompt + 1, self.prompt + self.output
        for share, context in ((1 / 6, first), (4 / 6, (first + last) // 2), (1 / 6, last)):  # Simpson's rule
            yield often * share, Slice(self.batch, 1, context)


@cache
def sources() -> Mapping[str, Source]:
    """Return the sources by the name that results give."""
    return {name: Source(**entry) for name, entry in _data()["sources"].items()}


@cache
def results() -> tuple[Result, ...]:
    """Return all results in the order of the file."""
    return tuple(Result(**row) for row in _data()["rows"])


def _data() -> Any:
    return json.loads(files("ridgeline.plan").joinpath("data", "published.json").read_text(encoding="utf-8"))
