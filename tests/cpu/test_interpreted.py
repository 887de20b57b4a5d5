"""Run tests/interpreted in processes of their own, one for each file, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from interpreted.runs import FILES, run


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(path: Path) -> None:
    run(path, interpret=True)
