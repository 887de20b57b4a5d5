"""Compute what a model costs on a machine: memory, step time and latencies.

    step     one token for every sequence of the batch, all at the full context; in a diffusion model a pass over a
             block of each
    TTFT     time to first token of a prompt alone on the machine: the sum of its chunks; in a diffusion model the time
             to the first block, whose tokens come together
    TPOT     time per output token: (time of the last - time of the first) / (tokens - 1), the mean over the contexts
             of the answer, in steps without prefill
    latency  TTFT + (tokens - 1) TPOT
    served   steady state: each request of the batch is followed by another one when it ends. Between two tokens of
             one sequence, the prompts of the others are computed too, so a token takes
             TPOT + (batch - 1) TTFT / (tokens - 1). Each chunk of a prompt shares a step with the decodes of the
             others, so the first token takes TTFT + chunks x step.

Times follow the roofline, so no engine can be faster on the machine. On a calibrated machine they are the times that
this engine is expected to take (cost/calibrated.py), with launches and the host. textbook.py has a one-line formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace

from ridgeline.cost.efficiency import Efficiency
from ridgeline.cost.footprint import Footprint, Memory
from ridgeline.cost.operations import Slice
from ridgeline.cost.precision import Precision
from ridgeline.cost.roofline import StepTime
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.plan import rewrite
from ridgeline.plan.blocks import BlockPasses
from ridgeline.plan.offload import Offload
from ridgeline.plan.speculation import Draft, Speculation
from ridgeline.plan.steps import Steps
from ridgeline.spec import ModelSpec
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.sight import BEYOND

PAGE_TOKENS, CHUNK_TOKENS = 16, 512  # the engine's defaults if memory allows them (settings/fit.py)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model, a machine, and how the model runs on it.

    page_tokens: tokens of a page of the KV cache. chunk: prompt tokens in one step. prefix_hit: share of each prompt
    that is in the prefix cache. offload: shares of weights and state in the host's memory. diffusion: passes over the
    blocks of a diffusion model; None: one token a pass if the model is one, or the most passes over a canvas. Raises
    RequestError for values out of range.
    """

    spec: ModelSpec
    hardware: HardwareSpec
    precision: Precision = field(default_factory=Precision)
    scheme: Scheme = field(default_factory=Scheme)
    page_tokens: int = PAGE_TOKENS
    chunk: int = CHUNK_TOKENS
    prefix_hit: float = 0.0
    speculation: Speculation | None = None
    offload: Offload = field(default_factory=Offload)
    diffusion: BlockPasses | None = None

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.chunk < 1:
            raise RequestError(f"the page has {self.page_tokens} and the chunk {self.chunk} tokens; use at least 1")
        if not 0 <= self.prefix_hit < 1:
            raise RequestError(f"the prefix hit rate is {self.prefix_hit}; it must be at least 0 and below 1")
        self.scheme.check(self.spec)
        self.offload.check(self.hardware)
        if self.draft is not None:
            self._check_draft(self.draft)

    @property
    def blocks(self) -> BlockPasses | None:
        """Return the passes over blocks; None if the model is autoregressive."""
        if self.diffusion is None and self.spec.diffusion is not None and self.spec.block < BEYOND:
            return BlockPasses(self.spec.open_tokens, self.spec.diffusion.tokens_per_pass)
        return self.diffusion

    @property
    def draft(self) -> Draft | None:
        """Return what proposes drafts; None if nothing does, or if only its cost is given."""
        return self.speculation.draft if self.speculation else None

    def _check_draft(self, draft: Draft) -> None:
        if (problem := draft.misfit(self.spec)) is not None:
            raise RequestError(f"{draft.name} cannot propose drafts here: {problem}")
        if draft.spec is None:
            return
        if self.scheme.pp > 1:
            raise RequestError(
                f"drafts of {draft.name} are not planned over {self.scheme.pp} pipeline stages; set pp to 1"
            )
        if isinstance(draft.spec, ModelSpec):
            Scheme(tp=self.scheme.tp).check(draft.spec)


@dataclass(frozen=True, slots=True)
class Load:
    """The load on each replica: `batch` sequences at a time, each with these tokens of prompt and of output."""

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
    """The figures of one load, in seconds; the module's docstring defines them.

    tokens_per_s: decode rate of all replicas. served_...: figures of the steady state, with prefill. naive_step_s: the
    same step without a KV cache, so that the whole history is computed again. first: tokens that come first, together.
    """

    load: Load
    step_s: float
    ttft_s: float
    tpot_s: float
    naive_step_s: float
    chunks: int
    replicas: int
    devices: int
    first: int = 1

    @property
    def latency_s(self) -> float:
        return self.ttft_s + max(self.load.output - self.first, 0) * self.tpot_s

    @property
    def served_tpot_s(self) -> float:
        gaps = max(self.load.output - self.first, 1)
        return self.tpot_s + (self.load.batch - 1) * self.ttft_s / gaps

    @property
    def served_ttft_s(self) -> float:
        """Return the TTFT in the steady state, where each chunk of the prompt shares a step with decodes of others."""
        return self.ttft_s + (self.chunks * self.step_s if self.load.batch > 1 else 0.0)

    @property
    def request_tokens_per_s(self) -> float:
        return 1 / self.tpot_s

    @property
    def tokens_per_s(self) -> float:
        return self.replicas * self.load.batch / self.tpot_s

    @property
    def served_tokens_per_s(self) -> float:
        """Return the output tokens per second of all replicas in the steady state."""
        life = self.load.batch * self.ttft_s + max(self.load.output - self.first, 1) * self.tpot_s
        return self.replicas * self.load.batch * self.load.output / life

    @property
    def device_seconds_per_token(self) -> float:
        """Return the device seconds per output token, prompts included."""
        return self.devices / self.served_tokens_per_s


class Planner:
    """Computes what a deployment costs. Holds the parts that are equal for all loads.

    efficiency: times are then those that are expected of the machine, and not its roof.
    """

    def __init__(self, deployment: Deployment, efficiency: Efficiency | None = None) -> None:
        d = self.deployment = deployment
        self._steps = Steps(d.spec, d.precision, d.hardware, d.scheme, efficiency=efficiency)
        self._request_s = efficiency.values["request_s"] if efficiency else 0.0
        self.forward = self._steps.forward
        self.drafts = d.speculation.depth if d.speculation else 0
        draft = d.draft.running(self.drafts) if d.draft else None
        self._draft_steps = (
            Steps(draft, d.precision, d.hardware, d.scheme, drafts=True, efficiency=efficiency)
            if draft is not None
            else None
        )
        self.memory = memory_of(d)

    def with_chunk(self, chunk: int) -> Planner:
        """Return a planner with another chunk size, which shares everything else with this one."""
        other = copy(self)
        other.deployment = replace(self.deployment, chunk=chunk)
        other.memory = self.memory.with_chunk(chunk)
        return other

    def step(self, batch: Sequence[Slice]) -> StepTime:
        """Return the time of a step with any mix of sequences. With pipeline stages, the step ends on the last one."""
        return self.deployment.offload.timed(self._steps.time(batch), self.deployment.hardware)

    def decode(self, batch: int, context: int, tokens: int | None = None) -> StepTime:
        """Return the time of a decode step: the last `tokens` tokens of `context` for each of `batch` sequences, with
        logits for all. None: one token, or a pass over the block of a diffusion model.
        """
        blocks = self.deployment.blocks
        tokens = tokens or (1 if blocks is None else blocks.size)
        context = max(context, tokens)
        return self.step([Slice(batch, tokens, context, tokens)])

    def naive(self, batch: int, context: int) -> StepTime:
        """Return the time of the next token without a KV cache: every token of the history is computed again."""
        return self.step([Slice(batch, context, context)])

    def token_s(self, batch: int, context: int) -> float:
        """Return the seconds per token of a sequence at a context, speculation and passes over blocks included."""
        if (blocks := self.deployment.blocks) is not None:
            return self.block_s(blocks, batch, context) / blocks.size
        step = self.decode(batch, context).seconds
        spec = self.deployment.speculation
        if spec is None:
            return step
        return (self.verification_s(batch, context) + self.drafting_s(batch, context)) / spec.tokens

    def block_s(self, blocks: BlockPasses, batch: int, context: int) -> float:
        """Return the seconds of all passes over a block of each of `batch` sequences, which ends at `context`."""
        size, end = blocks.size, max(context, 2 * blocks.size)
        first = self.step([Slice(batch, 2 * size, end, size)]).seconds
        return first + (blocks.passes - 1) * self.decode(batch, context).seconds

    def verification_s(self, batch: int, context: int) -> float:
        """Return the seconds of a step that verifies all drafts of `batch` sequences."""
        return self.decode(batch, context, self.drafts + 1).seconds

    def drafting_s(self, batch: int, context: int) -> float:
        """Return the seconds in which the drafts for one verification of `batch` sequences are proposed."""
        spec = self.deployment.speculation
        if spec is None:
            return 0.0
        if spec.draft is None:
            return spec.depth * spec.draft_cost * self.decode(batch, context).seconds
        if self._draft_steps is None:
            return 0.0
        timed: dict[Slice, float] = {}
        for one in (slices := spec.draft.slices(spec.depth, batch, context, spec.tokens)):
            if one not in timed:
                timed[one] = self._draft_steps.time([one]).seconds
        return sum(timed[one] for one in slices)

    def diffusion_pays_below(self, context: int, most: int = 1 << 14) -> int | None:
        """Return the least batch, among powers of two and the sizes halfway between them, at which one token after the
        other is as fast as passes over blocks; None if it never is, or if the model is autoregressive.
        """
        if self.deployment.blocks is None:
            return None
        plain = Planner(replace(self.deployment, spec=rewrite.autoregressive(self.deployment.spec), diffusion=None))
        sizes = batch_sizes(most)
        return next((n for n in sizes if plain.token_s(n, context) <= self.token_s(n, context)), None)

    def chunks(self, prompt: int) -> Iterator[StepTime]:
        """Yield the steps that compute a prompt alone."""
        start = min(int(prompt * self.deployment.prefix_hit), prompt - 1)
        while start < prompt:
            end = min(start + self.deployment.chunk, prompt)
            yield self.step([Slice(1, end - start, end, 1 if end == prompt else 0)])
            start = end

    def num_chunks(self, prompt: int) -> int:
        """Return the number of steps that compute a prompt."""
        d = self.deployment
        return -(-(prompt - min(int(prompt * d.prefix_hit), prompt - 1)) // d.chunk)

    def ttft_s(self, prompt: int) -> float:
        """Return the time to first token of a prompt alone. Its chunks overlap in a pipeline."""
        steps = [step.seconds for step in self.chunks(prompt)]
        stages = self.deployment.scheme.pp
        blocks = self.deployment.blocks
        own = 0.0 if blocks is None else self.block_s(blocks, 1, prompt + blocks.size)
        return self._request_s + sum(steps) / stages * (1 + (stages - 1) / len(steps)) + own

    def tpot_s(self, load: Load) -> float:
        """Return the mean TPOT over the contexts of the answer, by Simpson's rule: exact if the time is linear in the
        context.
        """
        first, last = load.prompt + 1, load.context
        ends = self.token_s(load.batch, first) + self.token_s(load.batch, last)
        return (ends + 4 * self.token_s(load.batch, (first + last) // 2)) / 6

    def figures(self, load: Load) -> Figures:
        """Return the figures of one load. Raises RequestError for a context beyond the model's positions."""
        self.check(load.context)
        scheme, blocks = self.deployment.scheme, self.deployment.blocks
        return Figures(
            load, self.decode(load.batch, load.context).seconds, self.ttft_s(load.prompt), self.tpot_s(load),
            self.naive(load.batch, load.context).seconds, self.num_chunks(load.prompt), scheme.replicas,
            scheme.devices, 1 if blocks is None else blocks.size,
        )  # fmt: skip

    def check(self, context: int) -> None:
        """Raise RequestError for a context that is longer than the model's positions."""
        limit = self.deployment.spec.max_position_embeddings
        if context > limit:
            raise RequestError(f"the context is {context:,} tokens, but the model has {limit:,} positions; lower it")

    def footprint(self, load: Load) -> Footprint:
        return self.memory.footprint(load.batch, load.context)

    def knee(self, load: Load, most: int = 1 << 14) -> int:
        """Return the knee: the batch with the largest throughput per step time (Kleinrock 1979: power), among powers of
        two and the sizes halfway between them.

        Below the knee, the step time hardly grows with the batch; above it, the step time grows faster than the
        throughput.
        """
        return max(batch_sizes(most), key=lambda n: n / self.token_s(n, load.context) ** 2)

    def speculation_pays_below(self, context: int, most: int = 1 << 14) -> int | None:
        """Return the batch from which on drafts no longer make a token faster; None if they always do, 1 if they never
        do.
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


def memory_of(d: Deployment) -> Memory:
    """Return the memory of a deployment, with the weights and the state of what proposes drafts."""
    drafts = d.speculation.depth if d.speculation else 0
    if d.blocks is not None:
        drafts = d.blocks.size - 1  # each of its rows has logits
    return Memory(
        d.spec, d.precision, d.hardware, d.scheme, page_tokens=d.page_tokens, chunk=d.chunk, drafts=drafts,
        draft=d.draft.spec if d.draft else None, kept_weights=1 - d.offload.weights, kept_state=1 - d.offload.state,
    )  # fmt: skip


def batch_sizes(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ... up to `most`."""
    sizes = {n for k in range(most.bit_length()) for n in (1 << k, 3 << k) if n <= most}
    return sorted(sizes)
