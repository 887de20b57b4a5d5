"""A recorder for CPU tensors: it repeats the launches of our kernels, in the interpreter, and torch's operations.

It behaves as CUDA graphs do. Everything that a step starts is repeated with the same tensors, at the same addresses.
A step that reads a value on the host cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interpreted.guarded import guarded
from ridgeline.ops.reference.backend import ReferenceBackend, SdpaBackend, TorchMemory
from ridgeline.ops.table import OpsTable
from ridgeline.ops.triton.backend import TritonBackend
from ridgeline.ops.triton.launch import Compiled, CountingLaunch, Launch
from ridgeline.ops.triton.record import GpuDriver, NotCaptured

# Operations whose results depend on values that the host must read.
READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "unique", "masked_select", "bincount")
FREE = ("empty", "new_empty", "empty_like")  # their contents are undefined


class Tape(TorchDispatchMode):
    """Captures work, and counts what it starts. refusal: why nothing is captured, for tests."""

    def __init__(self, start: Launch) -> None:
        super().__init__()
        self._start, self._steps, self._is_on = start, list[Callable[[], None]](), False
        self.launched: list[str] = []
        self.refusal: str | None = None

    def launch(self, kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None:
        """Start a kernel, and record it while work is captured."""
        was_on, self._is_on = self._is_on, False  # the interpreter works with torch itself
        try:
            self._start(kernel, grid, compiled, **arguments)
        finally:
            self._is_on = was_on
        if was_on:
            self.launched.append(kernel.fn.__name__)
            self._steps.append(lambda: self._start(kernel, grid, compiled, **arguments))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave torch's compiler alone: it takes three seconds to import."""
        return False

    def __call__(self, work: Callable[[], Sequence[Any]]) -> tuple[Sequence[Tensor], Callable[[], None]]:
        if self.refusal is not None:
            raise NotCaptured(self.refusal)
        self._steps, self.launched, self._is_on = [], [], True
        try:
            with self:
                results = work()
        finally:
            self._is_on = False
        steps = self._steps

        def repeat() -> None:
            for step in steps:
                step()

        for result in results:  # as after a capture, nothing was computed
            result.fill_(float("nan") if result.is_floating_point() else -7)
        return results, repeat

    def check(self) -> None:
        """Raise NotCaptured while work is captured: the host would wait for the device."""
        if self._is_on:
            raise NotCaptured("a step copies numbers from the host")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        name = str(func).removeprefix("aten.").split(".")[0]
        if not self._is_on:
            return found
        if name in READS:
            raise NotCaptured(f"a step reads a value on the host ({name})")
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        is_view = all(x.untyped_storage().data_ptr() in given for x in made) and not func._schema.is_mutable
        if name in FREE or is_view:
            return found

        def step() -> None:
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for old, new in zip(made, again, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self._steps.append(step)
        return found


class Memory(TorchMemory):
    """CPU tensors as if they were on a GPU: nothing is copied there while work is captured."""

    def __init__(self, tape: Tape) -> None:
        super().__init__("reference")
        self._tape = tape

    def integers(self, values: np.ndarray) -> Tensor:
        self._tape.check()
        return super().integers(values).clone()

    def get(self, array: Tensor) -> np.ndarray:
        self._tape.check()
        return super().get(array).copy()


class GpuMemory(Memory):
    """CPU tensors as `Memory` has them, with the settings of a GPU that has 1 GiB."""

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape)
        self.on_host = False

    def free_bytes(self) -> int:
        return 1 << 30


def taped(start: Launch = guarded, memory: type[Memory] = Memory) -> tuple[OpsTable, Tape]:
    """Return the table of device cuda over CPU tensors, which records steps, and the tape."""
    tape = Tape(start)
    launch = CountingLaunch(tape.launch)
    backends = TritonBackend(launch), SdpaBackend(), ReferenceBackend()
    driver = GpuDriver(torch.device("cpu"), launch, lambda: tape)
    return OpsTable(memory(tape), backends, driver=driver), tape
