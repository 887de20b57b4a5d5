"""With what an engine would run a model on a machine: pages, sequences, tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.errors import RequestError
from ridgeline.plan.footprint import Memory, largest
from ridgeline.plan.planner import Deployment
from ridgeline.plan.units import decimal_bytes
from ridgeline.spec.groups import StateGroup

MAX_SEQS = 256  # what the engine chooses where memory allows it (plan/fit.py)


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one replica. num_pages: per group, the null page included. max_model_len: of a sequence, in tokens."""

    groups: tuple[StateGroup, ...]
    num_pages: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def state_bytes(self) -> int:
        """Bytes of all pages."""
        return sum((n - 1) * g.page_bytes for n, g in zip(self.num_pages, self.groups, strict=True))


def settings(deployment: Deployment, *, max_model_len: int | None = None, max_num_seqs: int = MAX_SEQS) -> Settings:
    """Pages fill what weights and workspace leave, at most for `max_num_seqs` sequences of full length.

    Tokens of a step and of a page are the deployment's. Raises RequestError where not even one sequence of full length
    fits, with the numbers and what would.
    """
    if max_num_seqs < 1:
        raise RequestError(f"max_num_seqs is {max_num_seqs}; it must be at least 1")
    length = deployment.spec.resolve_max_model_len(max_model_len)
    memory = Memory(
        deployment.spec, deployment.precision, deployment.hardware, deployment.scheme,
        page_tokens=deployment.page_tokens, chunk=deployment.chunk,
    )  # fmt: skip
    one = memory.footprint(1, length)
    if not one.fits:
        fits = largest(lambda n: memory.footprint(1, n).fits, length)
        remedy = f"lower --max-model-len to {fits}" if fits else "take narrower weights, or a larger machine"
        raise RequestError(
            f"{decimal_bytes(one.weight_bytes)} of weights, {decimal_bytes(one.workspace_bytes)} of workspace and "
            f"{decimal_bytes(one.pages_bytes)} for one sequence of {length} tokens do not fit into "
            f"{deployment.hardware.name}'s {decimal_bytes(one.memory_bytes)}; {remedy}"
        )
    seqs = largest(lambda n: memory.footprint(n, 1).fits, max_num_seqs)
    step = memory.footprint(seqs, length)
    groups = memory.groups
    room = step.memory_bytes - step.reserve_bytes - step.weight_bytes - step.workspace_bytes
    each = sum(g.most_pages(length) * g.page_bytes for g in groups)
    share = min(max(1.0, (room - sum(g.page_bytes for g in groups)) / each), seqs)
    pages = tuple(int(g.most_pages(length) * share) + 1 for g in groups)
    return Settings(groups, pages, seqs, deployment.chunk, length)
