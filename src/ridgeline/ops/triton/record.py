"""Record steps on a GPU, to start all their kernels by one call, and move numbers without waiting for the GPU.

The inputs of all recorded steps are views into one block on the GPU. The host writes them into a block of its own,
which is copied as a whole before each run: from pinned memory, so that nobody waits. Results are copied back in the
same way, and are awaited when they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ridgeline.errors import DeviceError
from ridgeline.ops.driver import GPU_SIZES, Fetched, Recorded
from ridgeline.ops.noise import Ints
from ridgeline.ops.reference.failures import one_line, said_in_one_line
from ridgeline.ops.triton.launch import Compiled, CountingLaunch
from ridgeline.ops.triton.steps import write_entries

BLOCK_BYTES = 2**20  # inputs of one recorder
ALIGNED = 16  # bytes: kernels are compiled for inputs at such addresses
UPLOADS = 4  # blocks of pinned memory: more than steps in flight, so that the host seldom waits for a copy
CHANGES_BLOCK = 256  # numbers of a mirror that one program writes

Work = Callable[[], Sequence[Any]]


class Capture(Protocol):
    """Runs work once or more, and returns its results and a function that repeats it. Tests replace it."""

    def __call__(self, work: Work) -> tuple[Sequence[Tensor], Callable[[], None]]: ...


class NotCaptured(Exception):
    """Work cannot be captured. The message is the reason, without the name of what is run unrecorded."""


class GraphCapture:
    """Captures work as CUDA graphs, whose memory comes from one pool."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Work) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Run work, which loads its kernels and allocates their counters, and then capture it.

        Raises NotCaptured if the GPU has too little memory, or if the work does what a graph cannot do.
        """
        try:
            torch.cuda.synchronize(self._device)
            with torch.cuda.stream(self._stream):
                work()
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # nothing that is kept for reuse can be given back while work is captured
            with torch.cuda.stream(self._stream):
                return self._captured(work)
        except torch.cuda.OutOfMemoryError:
            free, total = (x >> 20 for x in torch.cuda.mem_get_info(self._device))
            raise NotCaptured(
                f"the GPU has too little memory for a recording: {free} of {total} MiB are free; take a smaller "
                "--max-num-seqs or a smaller --kv-cache-memory-bytes"
            ) from None

    def _captured(self, work: Work) -> tuple[Sequence[Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            results = work()
        except BaseException as e:
            with suppress(RuntimeError):  # the capture has failed, and ending it says so again
                graph.capture_end()
            if isinstance(e, torch.cuda.OutOfMemoryError) or not isinstance(e, RuntimeError):
                raise
            raise NotCaptured(f"a step does what a CUDA graph cannot hold ({one_line(e)})") from None
        graph.capture_end()
        return results, graph.replay


class Uploads:
    """Copies bytes of the host to the device without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._rooms: list[Tensor] = [torch.empty(0, dtype=torch.uint8)] * UPLOADS
        self._copied: list[Any] = [None] * UPLOADS
        self._next = 0

    def __call__(self, source: np.ndarray[Any, Any], target: Tensor) -> None:
        """Copy an array to a tensor of the same number of bytes."""
        given, i = source.reshape(-1).view(np.uint8), self._next
        self._next = (i + 1) % UPLOADS
        if self._copied[i] is not None:
            self._copied[i].synchronize()
        if self._rooms[i].numel() < given.size:
            self._rooms[i] = torch.empty(given.size, dtype=torch.uint8, pin_memory=self._on_gpu)
        room = self._rooms[i][: given.size]
        room.numpy()[:] = given
        target.view(torch.uint8).copy_(room, non_blocking=True)
        if self._on_gpu:
            self._copied[i] = torch.cuda.Event()
            self._copied[i].record()


class GpuRecorder:
    """Records work on one device. Its inputs are views into one block, which is copied there before each run."""

    def __init__(self, device: torch.device, capture: Capture, uploads: Uploads) -> None:
        self._device, self._capture, self._upload = device, capture, uploads
        self._host = np.zeros(BLOCK_BYTES, np.uint8)
        self._block = torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=device)
        self._used = 0

    def input(self, n: int) -> Tensor:
        return self._take(n, torch.int32)

    def words(self, n: int) -> Tensor:
        return self._take(n, torch.int64)

    def _take(self, n: int, dtype: torch.dtype) -> Tensor:
        begin, end = self._used, self._used + n * dtype.itemsize
        if end > BLOCK_BYTES:
            raise DeviceError(
                f"the inputs of recorded steps take more than {BLOCK_BYTES} bytes; take a smaller --max-num-seqs or "
                "fewer draft tokens"
            )
        self._used = -(-end // ALIGNED) * ALIGNED
        return self._block[begin:end].view(dtype)

    def first(self, array: Any, n: int) -> Tensor:
        found: Tensor = array[:n]
        return found

    def matrix(self, array: Any, columns: int) -> Tensor:
        found: Tensor = array.view(-1, columns)
        return found

    def assign(self, array: Any, values: Sequence[int] | Ints) -> None:
        begin = array.storage_offset() * array.dtype.itemsize
        kind = np.int32 if array.dtype == torch.int32 else np.int64
        self._host[begin : begin + array.numel() * array.dtype.itemsize].view(kind)[:] = values

    def record(self, work: Work, known: Sequence[Any]) -> Recorded | str:
        with on(self._device):
            self._send()
            try:
                results, repeat = self._capture(work)
            except NotCaptured as e:
                return str(e)

        def run() -> None:
            with on(self._device):
                self._send()
                repeat()

        run()
        return Recorded(results, run)

    def _send(self) -> None:
        self._upload(self._host[: self._used], self._block[: self._used])


class GpuMirrors:
    """Copies of page tables on the device, int32, one behind the other in one array."""

    def __init__(self, arrays: Sequence[Ints], device: torch.device, launch: Any, uploads: Uploads) -> None:
        self._device, self._launch, self._upload = device, launch, uploads
        sizes = [array.size for array in arrays]
        self._begins = [sum(sizes[:i]) for i in range(len(sizes))]
        if sum(sizes) >= 2**31:
            raise DeviceError(
                f"page tables of {sum(sizes)} entries are beyond the limit of 2**31; take a smaller --max-model-len or "
                "a smaller --max-num-seqs"
            )
        self._whole = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        for array, begin in zip(arrays, self._begins, strict=True):
            self._whole[begin : begin + array.size] = torch.from_numpy(array.reshape(-1)).to(device)
        self.arrays = [
            self._whole[begin : begin + array.size].view(array.shape)
            for array, begin in zip(arrays, self._begins, strict=True)
        ]

    def write(self, changes: Sequence[tuple[int, int, int, Sequence[int]]]) -> None:
        """Take over numbers by one copy and one kernel."""
        where, numbers = list[int](), list[int]()
        for index, row, first, values in changes:
            begin = self._begins[index] + row * self.arrays[index].shape[1] + first
            where += range(begin, begin + len(values))
            numbers += values
        if not where:
            return
        with on(self._device):
            sent = torch.empty(2 * len(where), dtype=torch.int32, device=self._device)
            self._upload(np.array([where, numbers], np.int32), sent)
            self._launch(
                write_entries, (-(-len(where) // CHANGES_BLOCK),), Compiled(4),
                table=self._whole, changes=sent, count=len(where), BLOCK=CHANGES_BLOCK,
            )  # fmt: skip


class GpuDriver:
    """Records steps on one GPU.

    launch: starts kernels. capture: returns a new Capture for each recorder; None: CUDA graphs. Tests replace both.
    """

    threads = None
    sizes, runs_ahead = GPU_SIZES, True

    def __init__(
        self, device: torch.device, launch: CountingLaunch, capture: Callable[[], Capture] | None = None
    ) -> None:
        self._device, self._launch, self._capture = device, launch, capture
        self._uploads = Uploads(device)

    def kernel_seconds(self) -> float:
        return 0.0

    def rounded_refusal(self) -> str:
        return "the kernels for GPUs do not round it"

    def round_attention(self, *, rounds: bool) -> None:
        if rounds:
            raise DeviceError(self.rounded_refusal())

    def recorder(self) -> GpuRecorder:
        with on(self._device):
            capture = GraphCapture(self._device) if self._capture is None else self._capture()
            return GpuRecorder(self._device, capture, self._uploads)

    def fetch(self, arrays: Sequence[Any]) -> Fetched:
        if self._device.type != "cuda":
            kept = [array.numpy().copy() for array in arrays]
            return lambda: kept
        with on(self._device):
            copies = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in arrays]
            for copy, array in zip(copies, arrays, strict=True):
                copy.copy_(array, non_blocking=True)
            done = torch.cuda.Event()
            done.record()

        def wait() -> list[np.ndarray[Any, Any]]:
            with said_in_one_line():
                done.synchronize()
            return [copy.numpy() for copy in copies]

        return wait

    def mirrors(self, arrays: Sequence[Ints]) -> GpuMirrors:
        return GpuMirrors(arrays, self._device, self._launch, self._uploads)

    def reset(self) -> None:
        """Wait for the GPU, and set the counters of divided work to zero, which a failed launch may have left."""
        with said_in_one_line():
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._launch.reset()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which torch works on a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
