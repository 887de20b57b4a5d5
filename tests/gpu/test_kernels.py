"""The tests of all kernels on a GPU: the cases of tests/interpreted, without the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from interpreted.runs import FILES, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("path", [f for f in FILES if f.stem != "test_interpreter"], ids=lambda path: path.stem)
def test_kernels_on_a_gpu(path: Path) -> None:
    run([path], interpret=False, marks="")
