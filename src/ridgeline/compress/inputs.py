"""Collect facts about the inputs of each matrix: second moments, means and largest magnitudes of columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from ridgeline.compress.grid import Floats
from ridgeline.nn.capture import EXPERTS, INPUT


class MatrixKey(NamedTuple):
    """A matrix of a model: the name of its weight, and for one expert of several its index."""

    name: str
    expert: int | None = None

    @property
    def input_name(self) -> str:
        """Return the name of the matrix's input, as `nn.capture.input_names` yields it."""
        module = self.name.removesuffix(".weight")
        if self.expert is not None:
            module = module.replace(f".{EXPERTS}.", f".{EXPERTS}.{self.expert}.")
        return module + INPUT

    def __str__(self) -> str:
        return self.name if self.expert is None else f"{self.name}[{self.expert}]"


class Inputs:
    """Sums over the inputs x [T, in] of a matrix; matrices that read one input share them.

    with_products: whether to sum x x^T, which takes in x in x 4 bytes.
    """

    def __init__(self, columns: int, *, with_products: bool) -> None:
        self.num_tokens = 0
        self._products = np.zeros((columns, columns), np.float32) if with_products else None
        self._absolute, self._squares = np.zeros(columns), np.zeros(columns)
        self.max_abs: Floats = np.zeros(columns, np.float32)

    def add(self, x: Floats) -> None:
        """Add inputs [T, in]."""
        magnitude = np.abs(x)
        self.num_tokens += len(x)
        self._absolute += magnitude.sum(0, dtype=np.float64)
        self._squares += np.einsum("ti,ti->i", x, x, dtype=np.float64)
        np.maximum(self.max_abs, magnitude.max(0, initial=0.0), out=self.max_abs)
        if self._products is not None:
            self._products += x.T @ x

    @property
    def has_products(self) -> bool:
        """Return whether x x^T is summed."""
        return self._products is not None

    @property
    def mean_abs(self) -> Floats:
        """Return the mean of |x|, [in], float32."""
        found: Floats = (self._absolute / max(1, self.num_tokens)).astype(np.float32)
        return found

    @property
    def mean_square(self) -> Floats:
        """Return the mean of x^2, [in], float32."""
        found: Floats = (self._squares / max(1, self.num_tokens)).astype(np.float32)
        return found

    @property
    def hessian(self) -> Floats:
        """Return the mean of x x^T, [in, in], float32. It is computed anew at each access."""
        assert self._products is not None
        found: Floats = self._products / np.float32(max(1, self.num_tokens))
        return found

    def divide(self, scales: Floats) -> None:
        """Become the sums over inputs that are divided by scales [in]."""
        self._absolute /= scales
        self._squares /= np.square(scales.astype(np.float64))
        self.max_abs = (self.max_abs / scales).astype(np.float32)
        if self._products is not None:
            self._products /= scales
            self._products /= scales[:, None]

    def is_finite(self) -> bool:
        """Return whether all inputs were finite."""
        return bool(np.isfinite(self._squares).all())


class Complete(Exception):
    """Ends a pass in which every input was received."""


class Observer:
    """Collects the inputs of matrices; `receive` is for an `nn.capture.Capture` of their names.

    After `begin`, it raises Complete when it has received all of them.
    """

    def __init__(self, keys: Iterable[MatrixKey], *, with_products: bool) -> None:
        self.names = {key.input_name: key for key in keys}
        self._with_products = with_products
        self._owner: dict[MatrixKey, MatrixKey] = {}  # the first matrix that reads the same input
        self._last: tuple[Floats, MatrixKey] | None = None
        self._missing: set[str] | None = None
        self.inputs: dict[MatrixKey, Inputs] = {}

    def begin(self) -> None:
        """Begin a pass, in which each input is received once."""
        self._missing = set(self.names)

    def receive(self, name: str, x: Any) -> None:
        """Add the inputs of one product."""
        key = self.names[name]
        same = self._last[1] if self._last is not None and self._last[0] is x else key
        owner = self._owner.setdefault(key, self._owner.get(same, same))
        self._last = x, owner
        found = self.inputs.get(owner)
        if found is None:
            found = self.inputs[owner] = Inputs(x.shape[-1], with_products=self._with_products)
        self.inputs.setdefault(key, found)
        if owner == key:
            found.add(x.reshape(-1, x.shape[-1]))
        if self._missing is not None:
            self._missing.discard(name)
            if not self._missing:
                raise Complete
