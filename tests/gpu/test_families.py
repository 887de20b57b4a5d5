"""The families' comparison on a GPU: the same cases as tests/cpu, on a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oracle.compare import compare
from oracle.families import CASES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    c = compare(CASES[name], tmp_path, device="cuda")
    assert c.error < 1e-4
    assert c.greedy_equal is not False
