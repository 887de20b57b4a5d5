"""Activation functions, by name. relu2: the square of relu (arXiv:2109.08668)."""

from __future__ import annotations

from typing import Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


def check_activation(name: str) -> None:
    """Raise ValueError for an unknown name."""
    if name not in get_args(Activation):
        raise ValueError(f"activation {name!r} is none of {get_args(Activation)}")
