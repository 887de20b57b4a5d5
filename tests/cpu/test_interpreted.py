"""Run tests/interpreted in processes of their own, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from interpreted.runs import FILES, PARTS, run


@pytest.mark.slow
@pytest.mark.parametrize("files", PARTS, ids=lambda files: "+".join(path.stem[5:] for path in files))
def test_kernels_in_the_interpreter(files: list[Path]) -> None:
    run(files, interpret=True, marks="not nightly")


@pytest.mark.nightly
@pytest.mark.parametrize("path", [path for path in FILES if "nightly" in path.read_text()], ids=lambda path: path.stem)
def test_more_cases_of_kernels_in_the_interpreter(path: Path) -> None:
    run([path], interpret=True, marks="nightly")
