"""Recurrences against their definitions in float64, and the same bits with any chunks, batches and pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from interpreted.guarded import guarded, interpreted, reference, serves
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Weights
from ridgeline.ops.reference.backend import ReferenceBackend, SdpaBackend
from ridgeline.ops.stages import RecurrentBlock
from ridgeline.ops.triton import recurrent
from ridgeline.ops.triton.backend import TritonBackend
from ridgeline.ops.triton.launch import Compiled
from ridgeline.quant import StoredLinear
from ridgeline.runtime.layout import Slices, build_segments
from ridgeline.spec import (
    S4,
    S4D,
    GatedConvolution,
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    RMSNorm,
    ShortConvolution,
    TaylorAttention,
)
from ridgeline.spec.quant import PLAIN
from ridgeline.spec.taylor import Features

TABLE, REFERENCE = interpreted(), reference()
NAN, WIDTH = float("nan"), 63


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Problem(NamedTuple):
    """An op along sequences: the sizes of its inputs, its weights, the shape of a state, and its arguments."""

    op: Any
    case: Any
    widths: tuple[int, ...]
    weights: tuple[torch.Tensor, ...]
    state: tuple[int, ...]
    arrange: Callable[..., tuple[Any, ...]]  # (inputs, weights, state, lengths) -> arguments


def mamba2(case: Mamba2) -> Problem:
    heads, shared = case.num_heads, case.num_groups * case.state_size
    weights = tuple(drawn(heads, seed=i) for i in range(3))
    return Problem(api.SSD, case, (case.inner_size, heads, shared, shared), weights,
                   (heads, case.head_dim, case.state_size),
                   lambda x, w, h, n: (x[0], x[1], w[0], w[1], x[2], x[3], w[2], h, n))  # fmt: skip


def lightning(heads: int, dim: int) -> Problem:
    case = LightningAttention(heads, dim, RMSNorm())
    return Problem(api.LIGHTNING_ATTENTION, case, (heads * dim,) * 3, (), (heads, dim, dim),
                   lambda x, w, h, n: (*(a.unflatten(-1, (heads, dim)) for a in x), h, n))  # fmt: skip


def delta(case: GatedDelta | KimiDelta) -> Problem:
    keys, heads = case.num_key_heads * case.key_dim, case.num_heads
    decays = heads if isinstance(case, GatedDelta) else keys
    weights = drawn(heads, seed=1), drawn(decays, seed=2)
    return Problem(api.DELTA_RULE, case, (keys, keys, heads * case.head_dim, decays, heads), weights,
                   (heads, case.key_dim, case.head_dim), lambda x, w, h, n: (*x, *w, h, n))  # fmt: skip


def state_space(case: S4 | S4D) -> Problem:
    """Decays and frequencies are as in trained layers: slow and fast ones."""
    channels, modes = case.channels, case.state_size // 2
    system = drawn(channels, seed=1) / 2 - 2, drawn(channels, modes, seed=2) / 2 - 1, drawn(channels, modes, seed=3) * 3
    more = [drawn(channels, 2, modes, seed=i) for i in ((4, 5, 6) if isinstance(case, S4) else (6,))]
    weights = *system, *more, drawn(channels, seed=7)
    return Problem(api.STATE_SPACE, case, (channels,), weights, (channels, 2, modes),
                   lambda x, w, h, n: (x[0], *w, h, n))  # fmt: skip


def based(heads: int, dim: int, features: int, kind: Features = "taylor") -> Problem:
    case = TaylorAttention(heads, dim, features, kind)
    return Problem(api.TAYLOR_ATTENTION, case, (heads * features, heads * features, heads * dim), (),
                   (heads, dim + 1, case.num_features), lambda x, w, h, n: (*x, h, n))  # fmt: skip


MAMBA = Mamba(inner_size=37, state_size=5, conv_size=4, dt_rank=2)
PROBLEMS = {
    "conv": Problem(api.SHORT_CONV, None, (37,), (drawn(37, 1, 4), drawn(37, seed=1)), (3, 37),
                    lambda x, w, h, n: (x[0], h, *w, n)),
    "mamba": Problem(api.SELECTIVE_SCAN, MAMBA, (37, 37, 5, 5), (drawn(37, 5), drawn(37, seed=1)), (37, 5),
                     lambda x, w, h, n: (x[0], x[1], w[0], x[2], x[3], w[1], h, n)),
    "mamba2": mamba2(Mamba2(4, 5, 16, 2, 4, RMSNorm(), dt_least=0.05, dt_most=2.0)),
    "lightning": lightning(2, 7),
    "delta": delta(GatedDelta(4, 2, 6, 5, 4, RMSNorm())), "kimi": delta(KimiDelta(2, 7, 4, 3, RMSNorm())),
    "s4": state_space(S4(37, 6)), "s4d": state_space(S4D(37, 10)), "based": based(2, 9, 4),
    "hedgehog": based(2, 9, 5, "hedgehog"),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", PROBLEMS)


def inputs(problem: Problem, lengths: list[int], value: float = NAN) -> list[torch.Tensor]:
    """Return inputs [n, m, width] that depend on the sequence alone. Padding has one value, and must not be read."""
    found = []
    for part, width in enumerate(problem.widths):
        x = torch.full((len(lengths), max(lengths), width), value)
        for i, length in enumerate(lengths):
            x[i, :length] = drawn(300, width, seed=10 * i + part)[:length]
        found.append(x)
    return found


def run(
    table: OpsTable, problem: Problem, x: list[torch.Tensor], h: Any, lengths: list[int]
) -> tuple[torch.Tensor, Any]:
    op = table.primitive(problem.op, problem.case)
    return op(*problem.arrange(x, problem.weights, h, torch.tensor(lengths)))


def begun(problem: Problem, sequences: int) -> torch.Tensor:
    """Return states that any sequence may have. Weights of BASED, the last row of a head, have a sum above 0."""
    h = drawn(sequences, *problem.state, seed=99)
    if problem.op is api.TAYLOR_ATTENTION:
        h[:, :, -1] = run(REFERENCE, problem, inputs(problem, [9] * sequences), 0 * h, [9] * sequences)[1][:, :, -1]
    return h


@EACH
@pytest.mark.parametrize("lengths", [[63, 1], [1, 1]], ids=str)
def test_they_are_the_definition_in_float64(name: str, lengths: list[int]) -> None:
    problem = PROBLEMS[name]
    assert serves(TABLE, problem.op, problem.case)
    h = begun(problem, len(lengths))
    y, left = run(TABLE, problem, inputs(problem, lengths), h, lengths)
    wide = problem._replace(weights=tuple(w.double() for w in problem.weights))
    wanted, kept = run(REFERENCE, wide, [x.double() for x in inputs(problem, lengths, 0.0)], h.double(), lengths)
    for i, length in enumerate(lengths):
        torch.testing.assert_close(y[i, :length].double(), wanted[i, :length], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left.double(), kept, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "numbers"), [*((n, recurrent.STATE_NUMBERS) for n in PROBLEMS), ("based", 128)])
def test_chunks_batches_and_pages_change_no_bit(name: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence is computed in one run beside another one, and alone in its page in chunks.

    numbers: how many of a state one program holds in chunks. Programs for parts of a head of BASED share a row.
    """
    problem, total = PROBLEMS[name], 100 if name == "conv" else 24
    x = inputs(problem, [total, 9])
    begin = torch.zeros(2, *problem.state)
    whole, left = run(TABLE, problem, x, begin, [total, 9])
    monkeypatch.setattr(recurrent, "STATE_NUMBERS", numbers)
    pages = torch.full((4, *problem.state), NAN)
    start, page = 0, 2
    for size, target in ((1, 2), (1, 2), (2, 3), (total - 5, 3), (1, 1)):
        chunk = [part[:1, start : start + size] for part in x]
        at = [torch.tensor([n]) for n in (page if start else 0, int(start == 0), target)]
        states = TABLE.primitive(api.READ_STATE)(pages, *at)
        before = pages.clone()
        y, after = run(TABLE, problem, chunk, states, [size])
        TABLE.primitive(api.WRITE_STATE)(pages, at[2], after)
        assert torch.equal(y[0], whole[0, start : start + size])
        others = [i for i in range(4) if i != target]
        assert torch.equal(before[others].nan_to_num(7.0), pages[others].nan_to_num(7.0))
        start, page = start + size, target
    assert torch.equal(pages[page], left[0])


def test_opposite_queries_and_keys_have_a_mean() -> None:
    """The products of their features of Hedgehog are 0 in float32; all weights are equal."""
    q = 60 * torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(1, 9, 2)
    v = drawn(1, 9, 6, seed=1)
    attend = TABLE.primitive(api.TAYLOR_ATTENTION, TaylorAttention(2, 3, 4, "hedgehog"))
    y, _ = attend(q, -q, v, torch.zeros(1, 2, 4, 8), torch.tensor([9]))
    torch.testing.assert_close(y, v.cumsum(1) / torch.arange(1.0, 10.0)[:, None], rtol=1e-5, atol=1e-6)


def test_softplus_is_exact_for_small_and_large_numbers() -> None:
    case = Mamba(inner_size=7, state_size=1, conv_size=4, dt_rank=2)
    dt = torch.tensor([-80.0, -20.0, -3.0, 0.0, 19.9, 21.0, 1e4]).view(1, 1, 7)
    zero, one = torch.zeros(1, 1, 7), torch.ones(1, 1, 1)
    scan = TABLE.primitive(api.SELECTIVE_SCAN, case)
    y, _ = scan(zero + 1, dt, zero[0, 0, :, None], one, one, zero[0, 0], torch.zeros(1, 7, 1), torch.tensor([1]))
    torch.testing.assert_close(y.double(), torch.nn.functional.softplus(dt.double()), rtol=3e-7, atol=0)


NORM = RMSNorm(1e-2, offset=0.5)
MIXERS = {
    "mamba": Mamba(inner_size=20, state_size=4, conv_size=4, dt_rank=3, inner_norm=RMSNorm()),
    "mamba2": Mamba2(4, 6, 5, 2, 4, NORM), "lightning": LightningAttention(2, 8, RMSNorm()),
    "delta": GatedDelta(4, 2, 6, 5, 4, NORM), "kimi": KimiDelta(2, 7, 4, 3, NORM),
    "short": ShortConvolution(24, 3), "gated": GatedConvolution(24, 3), "based": TaylorAttention(2, 5, 3),
    "s4": S4(WIDTH, 6), "s4d": S4D(WIDTH, 4, "silu"),
}  # fmt: skip


def weights_of(mixer: Any, table: OpsTable) -> Weights:
    linears: dict[str, Any] = {}
    arrays: dict[str, Any] = {"norm.weight": drawn(WIDTH, seed=50) / 8 + 1}
    given = {w.name: drawn(*w.shape, seed=seed) for seed, w in enumerate(mixer.weights(WIDTH))}
    for name, data in given.items():
        stem, kind = name.rsplit(".", 1) if "." in name else (name, "")
        if kind == "weight" and data.dim() == 2:
            bias = given.get(f"{stem}.bias")
            linears[stem] = StoredLinear((data / 8).bfloat16(), bias, table, PLAIN)
        elif not (kind == "bias" and f"{stem}.weight" in given and given[f"{stem}.weight"].dim() == 2):
            arrays[name] = data / 2
    return Weights(linears, arrays)


class Block:
    """A recurrent block over pages of states, which are NaN at first."""

    def __init__(self, mixer: Any, table: OpsTable) -> None:
        self.table, self.case = table, RecurrentBlock(mixer, RMSNorm(), 0.7)
        self.stage = table.stage(api.RECURRENT_BLOCK, self.case, weights_of(mixer, table))
        self.pages = [torch.full((4, *shape), NAN) for shape in mixer.state().parts]
        self.seen = [0, 0, 0]

    def step(self, counts: dict[int, int]) -> list[torch.Tensor]:
        """Return the results of the next tokens of some sequences; the state of sequence i is in page i + 1."""
        rows = np.array(list(counts))
        starts = np.array([self.seen[row] for row in rows])
        lengths = np.array(list(counts.values()))
        segments = build_segments(Slices.plain(rows, starts, lengths), self.table.memory)
        at = [torch.from_numpy(x) for x in (np.where(starts == 0, 0, rows + 1), (starts == 0).astype(int), rows + 1)]
        states = [self.table.primitive(api.READ_STATE)(pages, *at) for pages in self.pages]
        drawn_rows = [
            drawn(20, WIDTH, seed=200 + int(row))[s : s + n] for row, s, n in zip(rows, starts, lengths, strict=True)
        ]
        residual = torch.cat(drawn_rows)
        total, out, left, _ = self.stage(residual, residual / 2, states, (), segments)
        for pages, state in zip(self.pages, left, strict=True):
            self.table.primitive(api.WRITE_STATE)(pages, at[2], state)
        for row, n in counts.items():
            self.seen[row] += n
        return [
            torch.cat(pair, 1) for pair in zip(total.split(lengths.tolist()), out.split(lengths.tolist()), strict=True)
        ]


@pytest.mark.parametrize("name", MIXERS)
def test_blocks_are_their_compositions_in_any_steps(name: str) -> None:
    mixer = MIXERS[name]
    assert serves(TABLE, api.RECURRENT_BLOCK, RecurrentBlock(mixer, RMSNorm(), 0.7))
    ours, parts, same = Block(mixer, TABLE), Block(mixer, TABLE), Block(mixer, REFERENCE)
    (whole,), (wanted,) = ours.step({0: 9}), same.step({0: 9})
    torch.testing.assert_close(whole, wanted, rtol=1e-3, atol=1e-3)
    chunks = [*parts.step({0: 4, 1: 2})[:1], *parts.step({1: 1, 0: 4})[1:], *parts.step({0: 1, 1: 1})[:1]]
    assert torch.equal(torch.cat(chunks), whole)
    for a, b, c in zip(parts.pages, ours.pages, same.pages, strict=True):
        assert torch.equal(a[1], b[1])
        torch.testing.assert_close(b[1], c[1], rtol=1e-3, atol=1e-3)
        assert a[0].isnan().all()


ONE_TOKEN = {
    "mamba": ["selective_scan"], "mamba2": ["ssd_step"], "lightning": ["lightning_step"],
    "delta": ["delta_step"], "kimi": ["delta_step"], "short": ["convolution_step"], "gated": ["convolution_step"],
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_TOKEN)
def test_one_token_takes_few_launches_between_the_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens one by one have the bits of a chunk, from the first one on. Several programs share a head."""
    monkeypatch.setattr(recurrent, "STATE_NUMBERS", 16)
    names: list[str] = []

    def launch(kernel: Any, grid: tuple[int, ...], compiled: Compiled, **arguments: Any) -> None:
        names.append(kernel.fn.__name__)
        guarded(kernel, grid, compiled, **arguments)

    table = OpsTable(TABLE.memory, (TritonBackend(launch), SdpaBackend(), ReferenceBackend()))
    whole, each = Block(MIXERS[name], TABLE), Block(MIXERS[name], table)
    steps = [each.step({0: 1, 2: 1, 1: 1}) for _ in range(3)]
    for own, parts in zip(whole.step({0: 3, 2: 3, 1: 3}), zip(*steps, strict=True), strict=True):
        assert torch.equal(torch.cat(parts), own)
    for a, b in zip(each.pages, whole.pages, strict=True):
        assert torch.equal(a[1:], b[1:]) and a[0].isnan().all()
    between = [n for n in names if n not in ("normalize", "dense_product")]
    assert between == ONE_TOKEN[name] * 3


def test_large_states_are_refused_with_a_reason() -> None:
    choice = TABLE.choose(api.SSD, Mamba2(2, 8, 512, 1, 4, RMSNorm()))
    assert dict(choice.refusals)["triton"] == "sums are over 512 numbers of a state; kernels take 256 at most"
    case = RecurrentBlock(TaylorAttention(2, 8, 45), RMSNorm(), 1.0)
    reason = "sums are over 2071 numbers of a state; kernels take 2048 at most"
    assert dict(TABLE.choose(api.RECURRENT_BLOCK, case).refusals)["triton"] == reason
