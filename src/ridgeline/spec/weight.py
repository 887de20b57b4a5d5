"""Define a parameter: a name, a shape, and the axis along which a matrix may be split over devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

# Small matrices that are never rounded: their results decide something (which expert, how fast a state decays).
DECIDING = frozenset(("router", "shared_gate", "decay", "decay_a", "decay_b", "beta", "dt", "x"))
SINUSOIDS: Final[Literal["sinusoids"]] = "sinusoids"
SplitAxis = Literal["out", "in", "head", None]  # head: the first axis of [head, out, in]


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter. `shape` is as the forward pass uses it: a matrix is [out, in], experts are [expert, out, in] with
    biases [expert, out], a matrix per head is [head, out, in].

    fused: rows of the parts that the first axis consists of, each of which ranks divide by itself; (): it is one part.
    constant: the value of every number, or SINUSOIDS, which then no checkpoint holds; None: a parameter.
    """

    name: str
    shape: tuple[int, ...]
    split: SplitAxis = None
    fused: tuple[int, ...] = ()
    constant: float | Literal["sinusoids"] | None = None

    @property
    def num_params(self) -> int:
        return prod(self.shape) if self.constant is None else 0

    @property
    def is_matrix(self) -> bool:
        """Return whether it may be stored in 16 bits or quantized; norms, biases, sinks and decays are float32."""
        return len(self.shape) > 1 and self.name.endswith(".weight")

    @property
    def may_be_rounded(self) -> bool:
        """Return whether a lossy format may store it. For the embedding, this holds for the head that is tied to it."""
        module = self.name.split(".")[-2:-1]
        is_product = len(self.shape) == 2 or ".experts." in self.name
        return self.is_matrix and is_product and not DECIDING.intersection(module)


def linear(
    name: str, n_in: int, n_out: int, *, bias: bool = False, split: SplitAxis = "out", fused: tuple[int, ...] = ()
) -> Iterator[Weight]:
    """Yield the weights of `x @ weight.T + bias`. A matrix split along "in" adds its bias once, on rank 0."""
    yield Weight(f"{name}.weight", (n_out, n_in), split, fused)
    if bias:
        yield Weight(f"{name}.bias", (n_out,), "out" if split == "out" else None, fused)
