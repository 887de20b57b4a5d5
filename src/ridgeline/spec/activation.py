"""Activation functions, by name. relu2: the square of relu (arXiv:2109.08668)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


@dataclass(frozen=True, slots=True)
class XIELU:
    """An activation with two learned numbers a and b of each layer (arXiv:2411.13010, Apertus).

    softplus(a) x^2 + beta x for x > 0, else (beta + softplus(b)) (exp(min(x, eps)) - 1 - x) + beta x.
    """

    eps: ClassVar[float] = -1e-6

    beta: float = 0.5


def check_activation(name: str) -> None:
    """Raise ValueError for an unknown name."""
    if name not in get_args(Activation):
        raise ValueError(f"activation {name!r} is none of {get_args(Activation)}")
