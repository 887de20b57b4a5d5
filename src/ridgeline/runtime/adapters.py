"""The adapters that a loaded model has beside its weights: loaded and dropped by name, each in a slot of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.errors import CheckpointError, RequestError
from ridgeline.load.adapter import Adapter, Term, find_adapter, read_adapter
from ridgeline.nn.adapters import AdaptedLinear, AdapterSlots, SlotTerm
from ridgeline.runtime.load import LoadedModel

NO_ADAPTER = -1
MAX_NAME = 200  # characters


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in a slot. key: a text that no other adapter of this process has, for the prefix cache."""

    name: str
    folder: Path
    slot: int
    rank: int
    key: str


class Adapters:
    """Loads adapters into the slots of a model.

    A model without slots has none, and every name is refused.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded, self._slots = loaded, loaded.model.adapters
        self._by_name: dict[str, LoadedAdapter] = {}
        self._numbers = count()

    def __iter__(self) -> Iterator[LoadedAdapter]:
        """Iterate over the adapters that are loaded, in the order in which they came."""
        return iter(self._by_name.values())

    def load(self, name: str, source: str) -> LoadedAdapter:
        """Load an adapter. source: its folder or hub id. Call it between steps.

        Raises RequestError for a name that is taken or bad, and where no slot is free; CheckpointError for a bad
        adapter. Nothing changes then.
        """
        slots = self._checked_slots(name)
        used = {adapter.slot for adapter in self}
        free = next((slot for slot in range(slots.count) if slot not in used), None)
        if free is None:
            raise RequestError(
                f"{slots.count} adapters are loaded, and max_loras (--max-loras) is {slots.count}; unload one, or give "
                "a larger limit"
            )
        spec, names = self._loaded.spec, self._loaded.checkpoint.family.names
        adapter = read_adapter(find_adapter(source), spec, names, slots.max_rank)
        slots.put(free, _slot_terms(adapter, slots))
        found = LoadedAdapter(name, adapter.folder, free, adapter.rank, f"{name} {next(self._numbers)}")
        self._by_name[name] = found
        return found

    def unload(self, name: str, is_used: Callable[[int], bool]) -> None:
        """Drop an adapter. is_used: whether a request uses a slot. Raises RequestError for an unknown name, and while
        requests use it.
        """
        if is_used(self.get(name).slot):
            raise RequestError(f"requests that run use the adapter {name!r}; unload it when they have ended")
        del self._by_name[name]

    def get(self, name: str) -> LoadedAdapter:
        """Return an adapter by name. Raises RequestError for an unknown one."""
        if name not in self._by_name:
            known = ", ".join(self._by_name) or "none"
            raise RequestError(f"no adapter {name!r:.100} is loaded; loaded are {known}")
        return self._by_name[name]

    def _checked_slots(self, name: str) -> AdapterSlots:
        if self._slots is None:
            raise RequestError("the model was loaded without room for adapters; give max_loras (--max-loras)")
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise RequestError(f"an adapter's name is {name!r:.100}; it must have 1 to {MAX_NAME} printable characters")
        if name in self._by_name:
            raise RequestError(f"an adapter {name!r} is loaded already; unload it first, or give another name")
        return self._slots


def slot_of(adapters: Adapters | None, name: str) -> tuple[int, str]:
    """Return the slot of an adapter, and its key in the prefix cache. An empty name is the model itself.

    Raises RequestError for an unknown name.
    """
    if not name:
        return NO_ADAPTER, ""
    if adapters is None:
        raise RequestError(f"no adapter {name!r:.100} is loaded; this engine has none")
    found = adapters.get(name)
    return found.slot, found.key


def _slot_terms(adapter: Adapter, slots: AdapterSlots) -> dict[str, SlotTerm]:
    """Return an adapter's terms as slots keep them. Raises CheckpointError for changes that only a merge can make."""
    biases = {bias_of(name): name for name in slots.matrices}
    for name in (*adapter.terms, *adapter.replaced):
        if name not in slots.matrices and name not in biases:
            raise CheckpointError(
                f"{adapter.folder.name} changes {name}, which an adapter beside the weights cannot; use ridgeline merge"
            )
    changed = {*adapter.terms, *(biases[name] for name in adapter.replaced)}
    return {
        name: _slot_term(slots.matrices[name], adapter.terms.get(name), adapter.replaced.get(bias_of(name)))
        for name in changed
    }


def bias_of(name: str) -> str:
    """Return the name of the bias beside a matrix."""
    return f"{name.removesuffix('weight')}bias"


def _slot_term(matrix: AdaptedLinear, term: Term | None, bias: Any) -> SlotTerm:
    """Return a term as a slot keeps it: the gain of DoRA applies to the product without its bias."""
    rows, columns = matrix.shape
    gain, add = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    down, up = np.zeros((0, columns), np.float32), np.zeros((rows, 0), np.float32)
    if term is not None:
        down, up = term.down, term.up
        if term.magnitude is not None:
            found = term.gain(np.asarray(matrix.apply.dequantize(), np.float32))
            assert found is not None
            gain, up = found, up * found[:, None]
        if term.add is not None:
            add = add + term.add
    own = np.zeros(rows, np.float32) if matrix.bias is None else np.asarray(matrix.bias, np.float32)
    add = add + (own if bias is None else bias) - gain * own
    return SlotTerm(down, up, gain, add)
