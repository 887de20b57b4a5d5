"""Activation functions, by name."""

from __future__ import annotations

from typing import Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


def check_activation(name: str) -> None:
    """Raise ValueError for a name that is none."""
    if name not in get_args(Activation):
        raise ValueError(f"activation {name!r} is none of {get_args(Activation)}")
