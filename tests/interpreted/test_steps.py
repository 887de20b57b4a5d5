"""Page tables, the pages and slots of tokens, and known tokens, against the definitions, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from interpreted.guarded import reference
from interpreted.tape import taped
from ridgeline.ops import api
from ridgeline.ops.triton.launch import Compiled, CountingLaunch
from ridgeline.ops.triton.rows import best_of_rows

TABLE, _ = taped()
REFERENCE = reference()


@pytest.mark.parametrize("size", [1, 63, 100, 257])
def test_places_of_tokens(size: int) -> None:
    """Sequences of several tokens each, in a table wider than one program copies, as in the definition."""
    assert TABLE.choose(api.DECODE_LAYOUT).backend == "triton"
    rng, page, columns = np.random.default_rng(size), 16, 1030
    table = torch.from_numpy(rng.integers(1, 9999, (size + 1, columns))).int()
    lengths = rng.integers(1, 4, size)
    starts = rng.integers(0, columns * page - 4, size)
    starts[0] = columns * page - lengths[0]  # the last page of all
    rows = torch.from_numpy(np.repeat(rng.permutation(size), lengths)).int()
    positions = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    last = torch.from_numpy(np.cumsum(lengths) - 1).int()
    given = table, rows, torch.from_numpy(positions).int(), last, page
    pages, slots, tables = TABLE.primitive(api.DECODE_LAYOUT)(*given)
    wanted = REFERENCE.primitive(api.DECODE_LAYOUT)(*given)
    assert torch.equal(pages, wanted[0]) and torch.equal(slots, wanted[1])
    for i, end in enumerate(starts + lengths):
        held = -(-int(end) // page)
        assert torch.equal(tables[i, :held], wanted[2][i, :held])


@pytest.mark.parametrize("size", [1, 63, 100, 257, 1030])
def test_known_tokens(size: int) -> None:
    rng = np.random.default_rng(size)
    tokens = torch.from_numpy(np.where(rng.random(size) < 0.5, -1, rng.integers(0, 2**17, size))).int()
    sampled = torch.from_numpy(rng.integers(0, 2**17, size + 1))
    rows = torch.from_numpy(rng.permutation(size)).int()
    found = TABLE.primitive(api.KNOWN_TOKENS)(tokens, sampled, rows)
    assert TABLE.choose(api.KNOWN_TOKENS).backend == "triton"
    assert torch.equal(found, REFERENCE.primitive(api.KNOWN_TOKENS)(tokens, sampled, rows))


@pytest.mark.parametrize("size", [1, 63, 100, 257])
def test_kept_tokens(size: int) -> None:
    rng = np.random.default_rng(size)
    rows, ids = torch.from_numpy(rng.permutation(2 * size)[:size]).int(), torch.from_numpy(rng.integers(0, 99, size))
    found, wanted = torch.zeros(2 * size, dtype=torch.int64), torch.zeros(2 * size, dtype=torch.int64)
    TABLE.primitive(api.KEEP_TOKENS)(found, rows, ids)
    REFERENCE.primitive(api.KEEP_TOKENS)(wanted, rows, ids)
    assert TABLE.choose(api.KEEP_TOKENS).backend == "triton"
    assert torch.equal(found, wanted)


def test_mirrors_follow_the_host() -> None:
    rng = np.random.default_rng(0)
    host = [rng.integers(0, 99, (5, 7)), rng.integers(0, 99, (5, 300))]
    assert TABLE.driver is not None
    mirrors = TABLE.driver.mirrors(host)
    for _ in range(9):  # more often than there are blocks for copies
        changes = []
        for _ in range(4):
            group, row = int(rng.integers(2)), int(rng.integers(5))
            first = int(rng.integers(host[group].shape[1]))
            numbers = tuple(rng.integers(0, 99, rng.integers(0, host[group].shape[1] - first + 1)).tolist())
            host[group][row, first : first + len(numbers)] = numbers
            changes = [change for change in changes if change[:2] != (group, row)]  # order is not defined
            changes.append((group, row, 0, tuple(host[group][row].tolist())))
        mirrors.write(changes)
        assert all((np.asarray(mirror) == array).all() for mirror, array in zip(mirrors.arrays, host, strict=True))
    mirrors.write([])


def test_reset_sets_the_counters_of_divided_work_to_zero() -> None:
    """A launch that fails leaves its counters as they are."""
    launch = CountingLaunch(lambda kernel, grid, compiled, **arguments: arguments["arrived"].fill_(3))
    counters = torch.zeros(4, dtype=torch.int32)
    launch(best_of_rows, (1,), Compiled(4), arrived=counters)
    assert counters.tolist() == [3] * 4
    launch.reset()
    assert counters.tolist() == [0] * 4
