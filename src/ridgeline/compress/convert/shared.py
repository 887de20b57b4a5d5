"""Neighbors that share keys and values (CLA, arXiv:2405.12981): the first layer of a group keeps those of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ridgeline.compress.changed import SameWeights
from ridgeline.compress.deliver import OnProgress
from ridgeline.compress.grid import Floats
from ridgeline.errors import RequestError
from ridgeline.nn import Capture, Model
from ridgeline.nn.capture import INPUT
from ridgeline.plan import rewrite
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec
from ridgeline.spec.dtype import DType

BATCH_TOKENS = 2048  # tokens of a forward pass
DAMPING = 1e-9  # share of the mean square of an input that is added to each, for inputs that the text hardly has
_OWNED = ("k.weight", "k.bias", "v.weight", "v.bias", "k_norm.weight", "k_norm.bias")


def with_shared_keys(spec: ModelSpec, factor: int) -> ModelSpec:
    """Return the model in which `factor` neighbors share keys and values. Raises RequestError where none can."""
    if factor < 2:
        raise RequestError(
            f"--to cla={factor} is the number of layers that share keys and values; it must be at least 2"
        )
    try:
        return rewrite.with_shared_keys(spec, factor)
    except RequestError as e:
        raise RequestError(f"--to cla={factor}: {e}") from None


def groups_of(before: ModelSpec, after: ModelSpec) -> dict[int, list[int]]:
    """Return the layers that share keys and values now and did not before, by the layer that owns them, in order."""
    found: dict[int, list[int]] = {}
    for i in range(len(after.layers)):
        if before.state_layer(i) == i != (owner := after.state_layer(i)):
            found.setdefault(owner, [owner]).append(i)
    return found


class TiedWeights(SameWeights):
    """The weights of a model whose layers share keys and values.

    The keys and values of a group are the mean of those of its members: of their matrices, each with the weights of the
    norm before it over those of the first one, or of what the matrices give on a text, if `inputs` are known.

    Args:
        spec: the new model, with the layers of `original`.
        inputs: sums over the inputs of the members, by layer; None to take matrices as they are.
    """

    def __init__(
        self, original: ModelSpec, spec: ModelSpec, weights: Mapping[str, Any], types: Mapping[str, DType],
        widen: Callable[[Any], Floats], inputs: Mapping[int, Floats] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec, weights, types, widen)
        self._groups, self._inputs = groups_of(original, spec), inputs
        self._original = original

    def computed(self, name: str) -> Floats:
        layer, _, part = name.removeprefix("layers.").partition(".mixer.")
        if part not in _OWNED or int(layer) not in self._groups:
            return super().computed(name)
        members = self._groups[int(layer)]
        found = [self._member(m, members[0], part) for m in members]
        mean: Floats = np.stack(found).mean(axis=0).astype(np.float32)
        return mean

    def _member(self, member: int, owner: int, part: str) -> Floats:
        """Return a weight of one member as the owner would have it, which reads its own stream through its own norm."""
        x = super().computed(f"layers.{member}.mixer.{part}")
        if x.ndim < 2 or member == owner:
            return x
        if self._inputs is not None:  # rows of inputs [width, width]: the owner's inputs, times what maps them
            found: Floats = x @ self._inputs[member]
            return found
        own, other = (self._gain(i) for i in (owner, member))
        if own is None or other is None:
            return x
        return x * (other / np.where(np.abs(own) < 1e-6, 1.0, own))

    def _gain(self, layer: int) -> Floats | None:
        name = f"layers.{layer}.mixer_norm.weight"
        if name not in self._weights:
            return None
        return super().computed(name) + np.float32(getattr(self._original.layers[layer].pre_norm, "offset", 0.0))


@dataclass(slots=True)
class _Sums:
    """Sums over tokens of the products of an owner's inputs with themselves and with those of a member."""

    own: Floats
    across: dict[int, Floats] = field(default_factory=dict)


def fitted_inputs(
    original: LoadedModel, spec: ModelSpec, sequences: Sequence[Sequence[int]], on_progress: OnProgress
) -> dict[int, Floats]:
    """Return for each layer that shares another's keys the matrix M [width, width] with which M x comes closest, over a
    text, to its own input, where x is the input of the owner (least squares).
    """
    groups, width = groups_of(original.spec, spec), original.spec.hidden_size
    owner_of = {m: owner for owner, members in groups.items() for m in members}
    sums, seen = {owner: _Sums(np.zeros((width, width))) for owner in groups}, dict[int, Floats]()

    def receive(name: str, x: Any) -> None:
        layer = int(name.split(".")[1])
        found = original.table.memory.get(x).astype(np.float64)
        own = sums[owner_of[layer]]
        if layer == owner_of[layer]:
            seen[layer] = found
            own.own += found.T @ found
        else:
            own.across[layer] = own.across.get(layer, 0.0) + found.T @ seen[owner_of[layer]]

    capture = Capture(original.spec, [f"layers.{i}.mixer.k{INPUT}" for i in owner_of], receive)
    model = Model(original.spec, original.model.weights, original.table, original.max_model_len, capture=capture)
    per_batch = max(1, BATCH_TOKENS // max(map(len, sequences)))
    for i in range(0, len(sequences), per_batch):
        on_progress("reading keys and values", i, len(sequences))
        model.forward(original.dense_step(sequences[i : i + per_batch]), capture)
    found = {}
    for own in sums.values():
        damped = own.own + np.eye(width) * DAMPING * np.trace(own.own) / width
        for member, across in own.across.items():
            found[member] = np.linalg.solve(damped, across.T).T.astype(np.float32)
    return found
