"""Count what one decode step starts on a GPU, on torch's meta device: reading a value there raises an error."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget

from compiled import launches as l
from compiled.building import AMPERE, HOPPER, Recorder, build
from interpreted.steps import Paged, llama
from ridgeline.cost import memory
from ridgeline.ops import api
from ridgeline.ops.draws import DRAW_WORDS
from ridgeline.spec import S4, S4D, Attention, GatedMLP, LatentAttention, Layer, RMSNorm, Weight
from ridgeline.spec.groups import state_groups
from ridgeline.spec.storage import HALVES, StateDType, Storage
from ridgeline.spec.workspace import StepSize

# Operations of torch that start nothing: they allocate memory or change how a tensor is seen.
FREE = (
    "empty", "view", "slice", "select", "unsqueeze", "expand", "unbind", "split", "detach", "alias", "as_strided",
    "transpose", "permute", "_reshape_alias", "lift_fresh", "t.default", "squeeze", "new_empty",
)  # fmt: skip


class Dispatched(TorchDispatchMode):
    """Counts the operations of torch that start a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if not name.startswith(FREE):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def weight(w: Weight, format: str) -> Any:
    if w.is_matrix and format != "plain" and w.name != "embed.weight":
        return l.matrix(format, *w.shape)
    return l.meta(*w.shape, dtype=torch.bfloat16 if w.is_matrix else torch.float32)


def step_of(
    layers: int, format: str = "plain", sequences: int = 8, storage: Storage = HALVES, qk_norm: RMSNorm | None = None
) -> tuple[Recorder, Counter[str]]:
    """Return what a decode step of some sequences starts in a model of the shapes of Llama 3 8B."""
    spec, recorder = llama(4096, layers, 32, 8, 128, 14336, 128256), Recorder()
    spec = replace(spec, layers=tuple(replace(x, mixer=replace(x.mixer, qk_norm=qk_norm)) for x in spec.layers))
    weights = {w.name: weight(w, format) for w in spec.weights()}
    paged = Paged(spec, weights, l.gpu(recorder), rows=sequences, tokens=512, storage=storage)
    step = paged.step([[1]] * sequences, [100] * sequences)
    draw, draws = paged.table.primitive(api.DRAW), l.meta(sequences * DRAW_WORDS, dtype=torch.int64)
    draw(paged.model.logits(paged.model.forward(step)), draws, None)  # the first step allocates counters
    recorder.launches.clear()
    with Dispatched() as dispatched:
        draw(paged.model.logits(paged.model.forward(step)), draws, None)
    return recorder, dispatched.counts


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (4, 4, 64), (16, 1, 100)])
@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (8, 8), (63, 63), (600, 600), (2000, 3), (257, 100)])
def test_the_plan_counts_the_scratch_of_attention(
    heads: int, kv_heads: int, head_dim: int, tokens: int, sequences: int
) -> None:
    """Sequences have up to 8,192 tokens."""
    (launched,) = l.attention(Attention(heads, kv_heads, head_dim, 1.0), tokens, sequences, torch.bfloat16)
    bytes_ = 4 * launched.arguments["parts"].numel()
    spec = llama(heads * head_dim, 1, heads, kv_heads, head_dim, 64, 100)
    counted = memory._partials(StepSize(tokens, sequences, 8192, memory.GPU_BLOCK, 0), spec)
    assert bytes_ <= counted


@pytest.mark.parametrize("heads", [5, 16, 128])
@pytest.mark.parametrize(("tokens", "sequences"), [(1, 1), (8, 8), (63, 63), (600, 600), (2000, 3), (257, 100)])
def test_the_plan_counts_the_scratch_of_latents(heads: int, tokens: int, sequences: int) -> None:
    case = LatentAttention(heads, 512, 128, 64, 128, 1.0, RMSNorm())
    _, attended, _ = launches = l.latents(case, tokens, sequences, torch.bfloat16)
    spec = replace(llama(64, 1, 2, 2, 64, 64, 100), layers=(Layer(case, GatedMLP(64), RMSNorm(), None, 1.0),))
    counted = memory._partials(StepSize(tokens, sequences, 8192, memory.GPU_BLOCK, 0), spec)
    assert 4 * attended.arguments["parts"].numel() <= counted
    results = sum(launched.arguments["out"].numel() for launched in launches[:2])
    assert results == tokens * memory._absorbed(spec)


@pytest.mark.parametrize("case", [S4(1024, 64), S4D(1024, 64)], ids=["S4", "S4D"])
def test_the_plan_counts_the_coefficients_of_state_spaces(case: S4 | S4D) -> None:
    launches = l.recurrent(case, 1024, 8, 1)
    (scan,) = (x for x in launches if x.kernel.fn.__name__ == "state_space_scan")
    assert scan.arguments["terms"].numel() == case.derived_numbers()
    specs = [replace(llama(1024, 1, 2, 2, 64, 64, 100), layers=(Layer(case, None, RMSNorm()),) * n) for n in (1, 3)]
    one, three = (
        memory.Workspace(spec, state_groups(spec, page_tokens=16), on_cpu=False).bytes(8, 8, 64) for spec in specs
    )
    assert three - one >= 2 * 4 * case.derived_numbers()


def test_a_decode_step_reads_nothing_and_starts_few_kernels() -> None:
    """A layer is a norm, a product that rotates and writes pages, attention and a product; then a norm, a product with
    the activation, and a product. Beside the layers are a norm, a product and a draw. The bars are 7 and 5.
    """
    two, three = step_of(2), step_of(3)
    added = Counter(three[0].names) - Counter(two[0].names)
    assert added == {"normalize": 2, "dense_product": 4, "attend": 1}
    assert three[1] == two[1], "torch starts operations for each layer"
    rest = Counter(two[0].names) - Counter({name: 2 * n for name, n in added.items()})
    assert rest == {"normalize": 1, "dense_product": 1, "best_of_parts": 1, "cut_rows": 1, "draw_of_parts": 1}
    assert sum(added.values()) <= 7 and sum(rest.values()) <= 5
    assert sum(two[1].values()) <= 12, two[1]  # the embedding, and the angles of rotation


@pytest.mark.parametrize("format", ["plain", "fp8", "int4-exact"])
def test_one_or_two_sequences_start_five_kernels_a_layer(format: str) -> None:
    """Products normalize their tokens. In a bar of 7, that leaves room for what other mixers add."""
    for sequences in (1, 2):
        one, two = (step_of(n, format, sequences=sequences)[0].names for n in (1, 2))
        assert Counter(two) - Counter(one) == {"dense_product": 4, "attend": 1}
    one, two = (step_of(n, format, sequences=1, qk_norm=RMSNorm())[0].names for n in (1, 2))
    assert Counter(two) - Counter(one) == {"normalize": 1, "dense_product": 4, "attend": 1}


@pytest.mark.parametrize("dtype", ["float16", "int8", "fp8"])
@pytest.mark.parametrize("qk_norm", [None, RMSNorm()])
def test_norms_of_heads_and_narrow_pages_start_no_kernel(dtype: StateDType, qk_norm: RMSNorm | None) -> None:
    one, two = (step_of(n, storage=Storage(dtype), qk_norm=qk_norm)[0].names for n in (1, 2))
    assert Counter(two) - Counter(one) == {"normalize": 2, "dense_product": 4, "attend": 1}


@pytest.mark.parametrize("format", ["int8", "int4-128"])
def test_a_layer_of_codes_starts_seven_kernels(format: str) -> None:
    """Norms round tokens. Products round what attention and the activation compute, up to 8 tokens."""
    one, two = step_of(1, format), step_of(2, format)
    added = Counter(two[0].names) - Counter(one[0].names)
    assert added == {"normalize": 2, "whole_product": 4, "attend": 1}
    assert one[0].names[-5:] == ["normalize", "whole_product", "best_of_parts", "cut_rows", "draw_of_parts"]
    one, two = step_of(1, format, sequences=9), step_of(2, format, sequences=9)
    assert (Counter(two[0].names) - Counter(one[0].names)) == {**added, "round_tokens": 2}


@pytest.mark.slow
@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
def test_kernels_that_prepare_a_step_compile_without_a_stack(target: GPUTarget) -> None:
    launches = l.preparing()
    assert [x.kernel.fn.__name__ for x in launches] == ["place_tokens", "known_tokens", "keep_tokens"]
    assert all(build(launched, target).stack == 0 for launched in launches)
