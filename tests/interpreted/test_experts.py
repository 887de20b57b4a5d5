"""Mixtures of experts against their definitions: choices to the bit, results in float64, rounded tokens to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from interpreted.guarded import guarded, interpreted, nightly, reference, serves
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Weights
from ridgeline.ops.stages import MLPBlock
from ridgeline.ops.triton import experts, products, routing
from ridgeline.ops.triton.launch import CountingLaunch
from ridgeline.ops.triton.stages import Begin, Mlp
from ridgeline.quant import StoredLinear
from ridgeline.spec import MLP, ClampedSwiGLU, ExpertGroups, GatedMLP, LayerNorm, MoE, Norm, RMSNorm, Ungated
from ridgeline.spec.quant import PLAIN, Format, format_of

TABLE, REFERENCE = interpreted(), reference()
WIDTH = 63


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


ROUTES = [
    MoE(1, 1, 8), MoE(60, 4, 8), MoE(100, 3, 8, normalize=False), MoE(5, 5, 8),
    MoE(16, 4, 8, scores="sigmoid", choice_bias=True, scale=2.5),
    MoE(20, 4, 8, normalize=False, groups=ExpertGroups(4, 2, "best")),
    MoE(18, 4, 8, scores="sigmoid", choice_bias=True, groups=ExpertGroups(6, 2, "best_two")),
]  # fmt: skip


@pytest.mark.parametrize("case", ROUTES, ids=str)
def test_choices_are_those_of_the_definition(case: MoE) -> None:
    """Among 30 tokens, some have experts with equal scores, NaN and infinities."""
    assert serves(TABLE, api.ROUTE, case)
    logits = drawn(30, case.num_experts)
    logits[:20] = logits[:20].round()
    logits[20, 0], logits[21, -1], logits[22] = float("nan"), float("inf"), float("-inf")
    bias = drawn(case.num_experts, seed=1) if case.choice_bias else None
    (ids, weights), (same, wanted) = (t.primitive(api.ROUTE, case)(logits, bias) for t in (TABLE, REFERENCE))
    assert torch.equal(ids, same)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    (alone, one), wider = TABLE.primitive(api.ROUTE, case)(logits[29:], bias), torch.cat((logits, logits), 1)
    assert torch.equal(alone[0], ids[29])
    assert torch.equal(one[0], weights[29])
    assert torch.equal(TABLE.primitive(api.ROUTE, case)(wider[:, : case.num_experts], bias)[0], ids)


def matrices(case: MoE, table: OpsTable, format: Format, width: int = WIDTH) -> dict[str, list[StoredLinear]]:
    """Return the matrices of all experts; those of the last one are NaN, because no token chooses it."""
    found, inner = {}, case.intermediate_size
    shapes = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
    for seed, name in enumerate(shapes if case.gated else ("up", "down")):
        data = (drawn(case.num_experts, *shapes[name], seed=seed) / 8).bfloat16()
        bias = drawn(case.num_experts, shapes[name][0], seed=seed + 9) if case.bias else None
        if not format.is_lossy and case.num_experts > case.num_experts_per_tok:
            data[-1] = float("nan")
        rows = [None] * case.num_experts if bias is None else list(bias)
        found[name] = [StoredLinear(m, b, table, format) for m, b in zip(data, rows, strict=True)]
    return found


def choices(case: MoE, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, the experts of each, in any order, and their weights. The last expert is idle."""
    count = max(case.num_experts_per_tok, case.num_experts - 1)
    ids = drawn(tokens, count, seed=7).argsort(-1)[:, : case.num_experts_per_tok]
    return drawn(tokens, WIDTH, seed=5), ids, drawn(*ids.shape, seed=6)


CASES = [
    MoE(7, 2, 100), MoE(64, 8, 5, ClampedSwiGLU(1.3, 0.8), bias=True), MoE(7, 2, 20, Ungated("relu2"), bias=True),
    MoE(1, 1, 257, "gelu_tanh"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        (CASES[0], 100), (CASES[1], 1), (CASES[2], 100), (CASES[3], 1),
        *nightly((CASES[0], 1), (CASES[1], 100), (CASES[2], 1), (CASES[3], 100)),
    ],
)  # fmt: skip
def test_experts_are_the_definition(case: MoE, tokens: int) -> None:
    assert serves(TABLE, api.EXPERT_BLOCK, case)
    x, ids, scores = choices(case, tokens)
    got = TABLE.stage(api.EXPERT_BLOCK, case, Weights({}, {}, matrices(case, TABLE, PLAIN)))(x, ids, scores)
    wide = reference()
    linears = matrices(case, wide, PLAIN)
    for linear in [one for several in linears.values() for one in several]:
        linear.data = linear.data.double()
        linear.bias = None if linear.bias is None else linear.bias.double()
    wanted = wide.stage(api.EXPERT_BLOCK, case, Weights({}, {}, linears))(x.double(), ids, scores.double())
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["int8", "int4-32", "int4-asym", "fp8", "int4-exact"])
def test_codes_of_experts(name: str) -> None:
    """Rounded tokens have the bits of the definition, where the activation has no exponential."""
    case, format = MoE(5, 2, 100, Ungated("relu")), format_of(name)
    x, ids, scores = choices(case, 20)
    got, wanted = (
        table.stage(api.EXPERT_BLOCK, case, Weights({}, {}, matrices(case, table, format)))(x, ids, scores)
        for table in (TABLE, REFERENCE)
    )
    if format.activations == "int8":
        assert torch.equal(got, wanted)
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("name", "tokens"), [("auto", 257), ("int8", 100), ("int4", 63)])
def test_a_token_is_the_same_alone_and_in_a_batch(name: str, tokens: int) -> None:
    """Blocks have 16, 32 and 64 visits; all tokens of a batch may choose one expert."""
    case = MoE(4, 2, 63)
    stage = TABLE.stage(
        api.EXPERT_BLOCK, case, Weights({}, {}, matrices(case, TABLE, PLAIN if name == "auto" else format_of(name)))
    )
    x, ids, scores = choices(case, tokens)
    whole = stage(x, ids, scores)
    for some in (slice(0, 1), slice(40, 63)):
        assert torch.equal(whole[some], stage(x[some], ids[some], scores[some]))
    ids[1:] = torch.tensor([2, 0])
    assert torch.equal(stage(x, ids, scores)[0], whole[0])
    assert stage(x[:0], ids[:0], scores[:0]).shape == (0, WIDTH)


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        (MoE(5, 2, 20), 1),
        (MoE(5, 2, 20), 63),
        (MoE(60, 4, 20), 9),
        *nightly((MoE(60, 4, 20), 100), (MoE(1, 1, 20), 257)),
    ],
)
def test_visits_are_sorted_beside_the_choice(case: MoE, tokens: int) -> None:
    """One program writes what programs of all experts write, so no step depends on where its visits were sorted."""
    launch = CountingLaunch(guarded)
    block = experts.Experts(case, Weights({}, {}, matrices(case, TABLE, PLAIN)), launch)
    logits, visits = drawn(tokens, case.num_experts), block.unsorted(tokens, torch.device("cpu"))
    logits[: tokens // 3] = 0.0  # these tokens share their experts, which so have several blocks
    choose = routing.route(case, launch)
    alone, _ = choose(logits)
    wanted = block._sorted(alone)
    for _ in range(2):  # the counter begins with zero again
        visits.order.fill_(-1)
        ids, _ = choose(logits, None, visits)
        count = int(visits.num_blocks)
        assert torch.equal(ids, alone)
        assert torch.equal(visits.order, wanted.order)
        assert count == int(wanted.num_blocks) > 0
        assert torch.equal(visits.table[:, :count], wanted.table[:, :count])


BLOCKS = [
    MoE(6, 2, 20), MoE(6, 3, 20, router_bias=True, shared=GatedMLP(40), shared_gate=True),
    MoE(6, 2, 20, Ungated("relu2"), scores="sigmoid", choice_bias=True, shared=MLP(30, "relu2"), latent_size=24),
    MoE(6, 2, 20, shared=GatedMLP(40), shared_gate=True, latent_size=24),
]  # fmt: skip


def block_weights(case: MoE, table: OpsTable) -> Weights:
    linears: dict[str, Any] = {}
    arrays: dict[str, Any] = {"norm.weight": drawn(WIDTH, seed=3) / 8 + 1}
    for seed, w in enumerate(case.weights(WIDTH)):
        if w.name == "choice.bias":
            arrays[w.name] = drawn(*w.shape, seed=seed) / 8
        elif not w.name.startswith("experts.") and w.is_matrix:
            bias = drawn(w.shape[0], seed=90) if w.name == "router.weight" and case.router_bias else None
            data = (drawn(*w.shape, seed=seed) / 8).bfloat16()
            linears[w.name.removesuffix(".weight")] = StoredLinear(data, bias, table, PLAIN)
    return Weights(linears, arrays, matrices(replace(case, num_experts=6), table, PLAIN, case.latent_size or WIDTH))


@pytest.mark.parametrize("case", BLOCKS, ids=str)
def test_a_block_is_its_composition(case: MoE) -> None:
    block = MLPBlock(case, RMSNorm(), 0.7)
    assert serves(TABLE, api.MLP_BLOCK, block)
    weights = [block_weights(case, table) for table in (TABLE, REFERENCE)]
    for given in weights:  # the last expert may be chosen here
        for linears in given.experts.values():
            linears[-1].data = linears[0].data
    stage, same = (t.stage(api.MLP_BLOCK, block, w) for t, w in zip((TABLE, REFERENCE), weights, strict=True))
    residual, delta = drawn(63, WIDTH, seed=20), drawn(63, WIDTH, seed=21)
    got, wanted = stage(residual, delta), same(residual, delta)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=3e-4, atol=3e-4)
    for a, b in zip(stage(residual[62:], delta[62:]), got, strict=True):
        assert torch.equal(a[0], b[62])


@pytest.mark.parametrize(
    ("case", "name", "tokens"),
    [
        (MoE(6, 2, 20, shared=GatedMLP(150), shared_gate=True), "auto", 3),
        (MoE(6, 2, 300, shared=MLP(20, "relu2")), "auto", 40),
        (MoE(6, 2, 40, shared=GatedMLP(60, "relu")), "int8", 3), (MoE(6, 2, 40, shared=GatedMLP(60)), "int4-32", 8),
    ],
)  # fmt: skip
def test_a_shared_expert_beside_the_others_has_the_same_bits(
    case: MoE, name: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its matrices are multiplied in the launches of the others, also where their columns are divided into splits."""
    monkeypatch.setattr(products, "SPLIT_TILES", 1)
    format, launch = PLAIN if name == "auto" else format_of(name), CountingLaunch(guarded)
    inner = case.shared.intermediate_size
    shapes = {"gate": (inner, WIDTH), "up": (inner, WIDTH), "down": (WIDTH, inner)}
    linears = {
        n: StoredLinear((drawn(*shape, seed=i) / 8).bfloat16(), drawn(shape[0], seed=i), TABLE, format)
        for i, (n, shape) in enumerate(shapes.items())
        if n != "gate" or isinstance(case.shared, GatedMLP)
    }
    own = matrices(case, TABLE, format)
    for several in own.values():
        several[-1].data = several[0].data  # the last expert may be chosen here
    given = block_weights(case, TABLE)
    weights = Weights(given.linears, given.arrays, own)
    routed, mlp = experts._Routed(case, weights, launch), Mlp(case.shared, Weights(linears, {}), launch)
    begin = Begin(MLPBlock(case, RMSNorm(), 1.0), weights, launch)
    _, x, choice = routing.Router(case, begin, weights, routed.unsorted, launch)(drawn(tokens, WIDTH, seed=20), None)
    assert routed._experts.takes(mlp, tokens)
    got = [routed(x, choice, mlp) for _ in range(2)]  # counters begin with zero again
    monkeypatch.setattr(experts.Experts, "takes", lambda *_: False)
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], routed(x, choice, mlp))


@pytest.mark.parametrize(("case", "norm"), [(BLOCKS[0], RMSNorm()), (BLOCKS[1], LayerNorm()), (BLOCKS[2], RMSNorm())])
def test_one_launch_of_a_router_is_its_parts(case: MoE, norm: Norm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum, norm, choice and order have the bits of kernels of their own, with splits of columns, too."""
    monkeypatch.setattr(products, "SPLIT_TILES", 1)
    monkeypatch.setattr(f"{__name__}.WIDTH", 300)
    weights, launch = block_weights(case, TABLE), CountingLaunch(guarded)
    weights.arrays["norm.bias"] = drawn(WIDTH, seed=4)
    routed = experts._Routed(case, weights, launch)
    begin = Begin(MLPBlock(case, norm, 0.7), weights, launch)
    router = routing.Router(case, begin, weights, routed.unsorted, launch)
    assert router._product.dense and router._product.dense._splits == 4
    residual, delta = drawn(5, WIDTH, seed=20), drawn(5, WIDTH, seed=21)
    for given in (delta, delta, None):  # counters begin with zero again
        total, x, choice = router(residual, given)
        with monkeypatch.context() as patch:
            patch.setattr(routing, "APART_TOKENS", 0)
            same, y, wanted = router(residual, given)
        found, expected = (
            [c.ids, c.weights, c.visits.order, c.visits.num_blocks, c.visits.table[:, : int(c.visits.num_blocks)]]
            for c in (choice, wanted) if c.visits
        )  # fmt: skip
        assert all(map(torch.equal, [total, x, *found], [same, y, *expected]))
        assert choice.gate is None or torch.equal(choice.gate, wanted.gate)


def test_other_cases_are_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    case = MoE(2, 1, 20)
    mixed = matrices(case, TABLE, PLAIN)
    mixed["up"] = matrices(case, TABLE, format_of("int8"))["up"]
    assert experts.refuses_experts(mixed) == "among matrices of experts, formats differ"
    wide = matrices(case, TABLE, PLAIN)
    wide["down"][1].data = wide["down"][1].data.float()
    assert experts.refuses_experts(wide) == "among matrices of experts, types differ"
    choice = TABLE.choose(api.ROUTE, MoE(2000, 1, 20))
    assert dict(choice.refusals)["triton"] == "there are 2000 experts; kernels take 1023 at most"
