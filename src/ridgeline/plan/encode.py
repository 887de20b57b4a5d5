"""Plan encoders: the memory and the time of one pass over whole texts, which gives their embeddings or scores."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.cost.memory import pass_bytes
from ridgeline.cost.operations import Slice
from ridgeline.cost.roofline import StepTime
from ridgeline.errors import RequestError
from ridgeline.plan.planner import Planner


@dataclass(frozen=True, slots=True)
class Encoding:
    """The cost of a pass over `batch` texts of `tokens` tokens on one device: bytes, and seconds.

    workspace_bytes: the most memory of a pass besides the weights.
    """

    batch: int
    tokens: int
    replicas: int
    weight_bytes: float
    workspace_bytes: int
    memory_bytes: int
    step: StepTime

    @property
    def used_bytes(self) -> float:
        return self.weight_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.memory_bytes

    @property
    def texts_per_s(self) -> float:
        """Return the texts per second of all replicas."""
        return self.replicas * self.batch / self.step.seconds

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens per second of all replicas."""
        return self.tokens * self.texts_per_s


def encode(planner: Planner, batch: int, tokens: int) -> Encoding:
    """Plan a pass over `batch` texts. Raises RequestError for texts that are too long, and for a model in parts."""
    planner.check(tokens)
    d = planner.deployment
    if d.scheme.devices > d.scheme.replicas:
        raise RequestError("an encoder is planned on one device and in replicas only; leave out tp, ep and pp")
    step = planner.step([Slice(batch, tokens, tokens, 0)])
    workspace = pass_bytes(d.spec, batch * tokens, tokens, on_cpu=d.hardware.kind == "cpu")
    return Encoding(
        batch, tokens, d.scheme.replicas, planner.memory.weight_bytes, workspace, d.hardware.memory_bytes, step
    )
