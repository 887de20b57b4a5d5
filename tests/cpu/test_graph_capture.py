"""`GraphCapture` over a stand-in for torch's CUDA graphs: the order of its calls, and what it does with errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.ops.triton.record import GraphCapture, NotCaptured


class Calls(list[str]):
    """Notes the calls of torch.cuda. Ending a capture that has failed is an error, as on a GPU."""

    failed = False

    def graph(self) -> Any:
        calls = self

        class Graph:
            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                calls.append(f"begin in {pool}, {capture_error_mode}")

            def capture_end(self) -> None:
                calls.append("end")
                if calls.failed:
                    raise RuntimeError("the capture has failed")

            def replay(self) -> None:
                calls.append("replay")

        return Graph()

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.append("in the stream")
        yield
        self.append("out of it")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    replaced = {
        "graph_pool_handle": lambda: "pool", "Stream": lambda device: "stream", "stream": found.stream,
        "synchronize": lambda device: found.append("wait"), "empty_cache": lambda: found.append("give back"),
        "CUDAGraph": found.graph, "mem_get_info": lambda device: (3 << 20, 5 << 30),
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return found


def capture() -> GraphCapture:
    return GraphCapture(torch.device("cpu"))


def test_work_runs_once_before_it_is_captured(calls: Calls) -> None:
    """The first run loads kernels and allocates counters, and gives its memory back before the second one."""

    def work() -> Sequence[torch.Tensor]:
        calls.append("work")
        return [torch.ones(1)]

    results, replay = capture()(work)
    replay()
    assert torch.equal(results[0], torch.ones(1))
    assert calls == [
        "wait", "in the stream", "work", "out of it", "wait", "give back", "in the stream",
        "begin in pool, thread_local", "work", "end", "out of it", "replay",
    ]  # fmt: skip


@pytest.mark.parametrize("run", [1, 2])
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.cuda.OutOfMemoryError("no room"), NotCaptured, "too little memory for a recording: 3 of 5120 MiB"),
        (RuntimeError("operation not permitted\nwhen capturing"), None, "cannot hold .*operation not permitted"),
        (ValueError("a mistake of ours"), ValueError, "a mistake of ours"),
    ],
)  # fmt: skip
def test_errors_end_the_capture_and_have_a_reason(
    error: Exception, kind: type[Exception] | None, said: str, run: int, calls: Calls
) -> None:
    """An error of torch within the capture is a step that cannot be recorded. Before it, it is an error of the step."""
    runs = 0

    def work() -> Sequence[torch.Tensor]:
        nonlocal runs
        runs += 1
        if runs == run:
            calls.failed = run == 2
            raise error
        return []

    expected = kind or (NotCaptured if run == 2 else RuntimeError)
    with pytest.raises(expected, match=said if run == 2 or kind else "operation not permitted"):
        capture()(work)
    assert runs == run and ("end" in calls) == (run == 2)
