"""Errors of a GPU as one line: torch's have several lines of advice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ridgeline.errors import DeviceError, DeviceMemoryError


@contextmanager
def said_in_one_line() -> Iterator[None]:
    """Turn torch's errors into a DeviceError, and those of memory into a DeviceMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        wanted = one_line(e).split(". ")[:2]  # the rest is how much other programs take, and advice
        raise DeviceMemoryError(f"the GPU has too little memory ({'; '.join(wanted)})") from None
    except RuntimeError as e:
        raise DeviceError(f"the GPU failed: {one_line(e)}; start Ridgeline again") from e


def one_line(error: BaseException) -> str:
    """Return the first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
