"""What a model costs on a machine: memory, step time, and what a request waits for.

    step     one token for every sequence of the batch, all at the full context
    TTFT     time to the first token of a prompt alone on the machine: its chunks, one after the other
    TPOT     time per output token: (time of the last - time of the first) / (tokens - 1), the mean over the contexts
             that the answer passes through, with nothing but decodes in the steps
    latency  TTFT + (tokens - 1) TPOT
    served   as many requests as the batch, each followed by another at its end: between two tokens of one, the prompts
             of the others are read too, so that each token takes TPOT + (batch - 1) TTFT / (tokens - 1), and each chunk
             of a prompt is in a step with the decodes of the others: TTFT + chunks x step

Times are the roofline's: nothing can be faster on this machine; on one that was calibrated (clock.py) they are what the
engine is expected to take, with launches and the host. The formula of the same in one line is textbook.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from ridgeline.cost.calibrated import calibrated_step, facts_of
from ridgeline.cost.footprint import Footprint, Memory
from ridgeline.cost.operations import Forward, Slice
from ridgeline.cost.precision import Precision
from ridgeline.cost.roofline import StepTime, time_step
from ridgeline.cost.shard import Scheme, device_operations
from ridgeline.errors import RequestError
from ridgeline.spec import ModelSpec
from ridgeline.spec.hardware import HardwareSpec

PAGE_TOKENS, CHUNK_TOKENS = 16, 512  # what the engine chooses where memory allows it (settings/fit.py)


@dataclass(frozen=True, slots=True)
class Speculation:
    """depth drafts in a step, of which each is accepted with probability `acceptance` if those before it were.

    draft_cost: of a draft, in steps of one token (arXiv:2211.17192: c). Raises RequestError for what cannot be.
    """

    acceptance: float
    depth: int
    draft_cost: float = 0.05

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1:
            raise RequestError(f"the acceptance of drafts is {self.acceptance}; it must be from 0 to 1")
        if self.depth < 1:
            raise RequestError(f"{self.depth} drafts; there must be at least 1")
        if not self.draft_cost >= 0:
            raise RequestError(f"a draft costs {self.draft_cost} steps; it must not be negative")

    @property
    def tokens(self) -> float:
        """Expected tokens of a verification: (1 - a^(k+1)) / (1 - a) (arXiv:2211.17192, equation 1)."""
        a = self.acceptance
        return self.depth + 1.0 if a == 1 else (1 - a ** (self.depth + 1)) / (1 - a)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model, a machine, and how one runs on the other.

    page_tokens: of a page of rows. chunk: tokens of a prompt in one step. prefix_hit: share of a prompt that lies in
    the prefix cache. Raises RequestError for what cannot be.
    """

    spec: ModelSpec
    hardware: HardwareSpec
    precision: Precision = field(default_factory=Precision)
    scheme: Scheme = field(default_factory=Scheme)
    page_tokens: int = PAGE_TOKENS
    chunk: int = CHUNK_TOKENS
    prefix_hit: float = 0.0
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.chunk < 1:
            raise RequestError(f"a page of {self.page_tokens} and a chunk of {self.chunk} tokens: at least 1 each")
        if not 0 <= self.prefix_hit < 1:
            raise RequestError(f"the prefix hit rate is {self.prefix_hit}; it must be from 0 to below 1")
        self.scheme.check(self.spec)


@dataclass(frozen=True, slots=True)
class Load:
    """What runs at once on each replica: batch sequences, each with a prompt and an answer of so many tokens."""

    batch: int
    prompt: int
    output: int

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "output"):
            if (value := getattr(self, name)) < 1:
                raise RequestError(f"{name} is {value}; it must be at least 1")

    @property
    def context(self) -> int:
        return self.prompt + self.output


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one load; see the top of the file. Seconds; tokens_per_s: of all replicas, decodes only, served_...: with the
    prompts. naive_step_s: the same step without a cache, the whole history computed again.
    """

    load: Load
    step_s: float
    ttft_s: float
    tpot_s: float
    naive_step_s: float
    chunks: int
    replicas: int
    devices: int

    @property
    def latency_s(self) -> float:
        return self.ttft_s + (self.load.output - 1) * self.tpot_s

    @property
    def served_tpot_s(self) -> float:
        gaps = max(self.load.output - 1, 1)
        return self.tpot_s + (self.load.batch - 1) * self.ttft_s / gaps

    @property
    def served_ttft_s(self) -> float:
        """The prompt's chunks, each in a step with the decodes of the others."""
        return self.ttft_s + (self.chunks * self.step_s if self.load.batch > 1 else 0.0)

    @property
    def request_tokens_per_s(self) -> float:
        return 1 / self.tpot_s

    @property
    def tokens_per_s(self) -> float:
        return self.replicas * self.load.batch / self.tpot_s

    @property
    def served_tokens_per_s(self) -> float:
        """Output tokens of all replicas, when every request that ends is followed by another."""
        life = self.load.batch * self.ttft_s + max(self.load.output - 1, 1) * self.tpot_s
        return self.replicas * self.load.batch * self.load.output / life

    @property
    def device_seconds_per_token(self) -> float:
        """What an output token costs, prompts included."""
        return self.devices / self.served_tokens_per_s


class Planner:
    """Answers what a deployment costs. Holds what is the same for all loads."""

    def __init__(self, deployment: Deployment) -> None:
        d = self.deployment = deployment
        self.forward = Forward(d.spec, d.precision)
        self._facts = facts_of(d.spec)
        self.drafts = d.speculation.depth if d.speculation else 0
        self.memory = Memory(
            d.spec, d.precision, d.hardware, d.scheme, page_tokens=d.page_tokens, chunk=d.chunk, drafts=self.drafts
        )

    def with_chunk(self, chunk: int) -> Planner:
        """The same with another chunk, and what is the same for both shared."""
        other = copy(self)
        other.deployment = replace(self.deployment, chunk=chunk)
        other.memory = self.memory.with_chunk(chunk)
        return other

    def step(self, batch: Sequence[Slice]) -> StepTime:
        """A step of any mix of sequences; of a pipeline, until its last device is done."""
        ops, hardware = device_operations(self.forward, batch, self.deployment.scheme), self.deployment.hardware
        if hardware.rates is None:
            return time_step(ops, hardware)
        return calibrated_step(ops, self._facts, batch, hardware)

    def decode(self, batch: int, context: int, tokens: int = 1) -> StepTime:
        """`tokens` tokens, the last ones of `context`, of each of so many sequences; logits of them all."""
        context = max(context, tokens)
        return self.step([Slice(batch, tokens, context, tokens)])

    def naive(self, batch: int, context: int) -> StepTime:
        """The next token with nothing kept: every token of the history again."""
        return self.step([Slice(batch, context, context)])

    def token_s(self, batch: int, context: int) -> float:
        """Seconds per token of a sequence at a context, speculation included."""
        step = self.decode(batch, context).seconds
        spec = self.deployment.speculation
        if spec is None:
            return step
        verify = self.decode(batch, context, spec.depth + 1).seconds
        return (verify + spec.depth * spec.draft_cost * step) / spec.tokens

    def chunks(self, prompt: int) -> Iterator[StepTime]:
        """The steps in which a prompt alone is read."""
        start = min(int(prompt * self.deployment.prefix_hit), prompt - 1)
        while start < prompt:
            end = min(start + self.deployment.chunk, prompt)
            yield self.step([Slice(1, end - start, end, 1 if end == prompt else 0)])
            start = end

    def num_chunks(self, prompt: int) -> int:
        """Steps in which a prompt is read."""
        d = self.deployment
        return -(-(prompt - min(int(prompt * d.prefix_hit), prompt - 1)) // d.chunk)

    def ttft_s(self, prompt: int) -> float:
        """Of a prompt alone. Its chunks follow each other through a pipeline."""
        steps = [step.seconds for step in self.chunks(prompt)]
        stages = self.deployment.scheme.pp
        return sum(steps) / stages * (1 + (stages - 1) / len(steps))

    def tpot_s(self, load: Load) -> float:
        """Mean over the contexts of the answer, by Simpson's rule: exact where time is linear in the context."""
        first, last = load.prompt + 1, load.context
        ends = self.token_s(load.batch, first) + self.token_s(load.batch, last)
        return (ends + 4 * self.token_s(load.batch, (first + last) // 2)) / 6

    def figures(self, load: Load) -> Figures:
        """Of one load. Raises RequestError for a context that the model's positions do not allow."""
        self.check(load.context)
        scheme = self.deployment.scheme
        return Figures(
            load, self.decode(load.batch, load.context).seconds, self.ttft_s(load.prompt), self.tpot_s(load),
            self.naive(load.batch, load.context).seconds, self.num_chunks(load.prompt), scheme.replicas,
            scheme.devices,
        )  # fmt: skip

    def check(self, context: int) -> None:
        """Raises RequestError for a context that the model's positions do not allow."""
        limit = self.deployment.spec.max_position_embeddings
        if context > limit:
            raise RequestError(f"a context of {context:,} tokens is above the {limit:,} that the model has; lower it")

    def footprint(self, load: Load) -> Footprint:
        return self.memory.footprint(load.batch, load.context)

    def knee(self, load: Load, most: int = 1 << 14) -> int:
        """The batch with the most throughput per second of step (Kleinrock 1979: power), in powers of two and halves
        between them: below it a step hardly grows with the batch, above it hardly anything else does.
        """
        return max(batch_sizes(most), key=lambda n: n / self.token_s(n, load.context) ** 2)

    def speculation_pays_below(self, context: int, most: int = 1 << 14) -> int | None:
        """The batch from which on a token with drafts takes no less than without, None where they always pay; 1 where
        they never do.
        """
        if self.deployment.speculation is None:
            return None

        def pays(batch: int) -> bool:
            return self.token_s(batch, context) < self.decode(batch, context).seconds

        if pays(most):
            return None
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if pays(middle) else (low, middle)
        return high


def batch_sizes(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to `most`."""
    sizes = {n for k in range(most.bit_length()) for n in (1 << k, 3 << k) if n <= most}
    return sorted(sizes)
