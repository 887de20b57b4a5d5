"""Operations and bytes of a step, compared with closed forms and with sums that are computed differently."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import PUBLISHED
from test_spec import specs

from ridgeline.archs import spec_from_config
from ridgeline.catalog.models import find_model
from ridgeline.cost.footprint import held_weights
from ridgeline.cost.operations import Forward, Operation, Slice, operations, visited_experts
from ridgeline.cost.precision import Precision
from ridgeline.spec import (
    ALL,
    Attention,
    Blocks,
    Chunked,
    Dilated,
    FirstTokens,
    GatedMLP,
    LatentAttention,
    Layer,
    ModelSpec,
    MoE,
    RMSNorm,
    ShortcutMLP,
    Strided,
    Weight,
    WholeSequence,
)
from ridgeline.spec.mixers import TokenMixer

BF16 = Precision()
NORM = RMSNorm()


def dense(mixer: TokenMixer, width: int = 4096, inner: int = 16384) -> ModelSpec:
    return ModelSpec("x", 32000, width, 1 << 20, (Layer(mixer, GatedMLP(inner), NORM),) * 2, NORM)


def heads(num_heads: int = 32, kv: int = 32, **more: object) -> Attention:
    return Attention(num_heads, kv, 128, 128**-0.5, **more)  # type: ignore[arg-type]


def sees(attention: Attention, query: int, key: int) -> bool:
    """Return whether a query sees a key, by the definitions in the papers."""
    distance, window = query - key, attention.window
    if isinstance(attention.sight, Blocks):
        return key // attention.sight.size <= query // attention.sight.size
    if key > query:
        return isinstance(attention.sight, WholeSequence)
    if window is None:
        return True
    match attention.pattern:
        case FirstTokens(count):
            return distance < window or key < count
        case Dilated(step):
            return distance % step == 0 and distance < step * window
        case Strided(stride):
            return distance < window or distance % stride == 0
        case Chunked():
            return key // window == query // window
    return distance < window


def named(ops: tuple[Operation, ...], name: str) -> Operation:
    return next(op for op in ops if op.name == name)


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (8, 1), (1, 512), (4, 63)])
def test_mlp_intensity_is_its_tokens(batch: int, tokens: int) -> None:
    """6 B T D F operations over 4 B T D + 4 B T F + 6 D F bytes: about B T if B T is small beside D and F ("How to
    Scale Your Model", transformers). Activations are counted as they are read here: gate and up once together, down
    once.
    """
    ops = operations(dense(heads()), [Slice(batch, tokens, tokens)], BF16)
    up, down = named(ops, "gate+up"), named(ops, "down")
    n, width, inner = batch * tokens, 4096, 16384
    assert up.flops + down.flops == 6 * n * width * inner
    assert up.bytes + down.bytes == 6 * width * inner + 2 * n * (2 * width + 3 * inner)
    few = (up.flops + down.flops) / (up.weight_bytes + down.weight_bytes)
    assert few == n
    assert up.intensity == pytest.approx(n, rel=n * (1 / width + 1 / inner))


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize(("kv", "group"), [(32, 1), (8, 4), (1, 32)])
def test_decode_attention_intensity(batch: int, kv: int, group: int) -> None:
    """S T / (S + T) with T = 1 for MHA, at any batch; N / K for grouped heads if S is long (scaling book)."""
    context = 8192
    core = named(operations(dense(heads(kv=kv)), [Slice(batch, 1, context)], BF16), "Attention")
    exact = context * group / (context + group)  # reads S rows of K heads, queries and results of N = group K
    assert core.intensity == pytest.approx(exact)
    assert core.intensity == pytest.approx(group, rel=0.01)


@pytest.mark.parametrize("tokens", [1, 63, 2048])
def test_prefill_attention_intensity(tokens: int) -> None:
    """S T / (S + T) with half the pairs, because attention is causal: (S + 1) / 2 for S = T, halved."""
    core = named(operations(dense(heads()), [Slice(3, tokens, tokens)], BF16), "Attention")
    assert core.intensity == pytest.approx((tokens + 1) / 2 / 2)
    assert core.flops == 3 * 4 * 32 * 128 * tokens * (tokens + 1) // 2


def test_absorbed_latents_reach_the_ridge() -> None:
    """128 heads over 576 numbers of 16 bits: 2 x 128 x (576 + 512) operations for 1,152 bytes of a key, 242
    per byte.
    """
    mixer = LatentAttention(128, 512, 128, 64, 128, 192**-0.5, NORM, q_lora_rank=1536)
    core = named(operations(dense(mixer, 5120), [Slice(1, 1, 1 << 19)], BF16), "LatentAttention")
    assert core.flops / core.state_bytes == pytest.approx(128 * 2 * (576 + 512) / (576 * 2))
    assert round(core.flops / core.state_bytes) == 242


def test_a_long_prompt_rebuilds_keys_of_latents() -> None:
    """2 T^2/2 x heads x (192 + 128), and every key once through kv_b, which counts as a product with weights."""
    mixer = LatentAttention(128, 512, 128, 64, 128, 192**-0.5, NORM, q_lora_rank=1536)
    core = named(operations(dense(mixer, 5120), [Slice(1, 4096, 4096)], BF16), "LatentAttention")
    assert core.flops == 2 * 128 * (192 + 128) * 4096 * 4097 // 2


def test_experts_are_read_as_often_as_they_are_visited() -> None:
    moe = MoE(8, 2, 14336)
    assert visited_experts(moe, 1) == pytest.approx(2)
    assert visited_experts(moe, 10_000) == pytest.approx(8)
    # Two tokens: 8 (1 - (6/8)^2).
    assert visited_experts(moe, 2) == pytest.approx(3.5)
    spec = replace(dense(heads()), layers=(Layer(heads(), moe, NORM),))
    one = named(operations(spec, [Slice(1, 1, 8)], BF16), "experts.down")
    assert one.flops == 2 * 2 * 14336 * 4096
    assert one.weight_bytes == pytest.approx(2 * 14336 * 4096 * 2)


@pytest.mark.parametrize("attention", [
    heads(), heads(window=5), heads(window=1), heads(window=6, pattern=FirstTokens(3)),
    heads(window=4, pattern=Dilated(3)), heads(window=5, pattern=Strided(4)), heads(window=7, pattern=Strided(7)),
    heads(window=5, pattern=Chunked()), heads(window=1, pattern=Chunked()),
    heads(sight=Blocks(1)), heads(sight=Blocks(5)), heads(sight=Blocks(64)), heads(sight=WholeSequence()),
])  # fmt: skip
@pytest.mark.parametrize("context", [1, 4, 5, 6, 63, 100])
def test_pairs_are_those_that_each_query_sees(attention: Attention, context: int) -> None:
    """The count is compared with one that tests every pair of a query and a key by itself."""
    for tokens in {1, context // 2 or 1, context}:
        queries = range(context - tokens, context)
        pairs = sum(sees(attention, i, j) for i in queries for j in range(context))
        assert attention.attended(tokens, context) == pairs
        assert attention.work(tokens, context) == 2 * pairs * attention.num_heads * attention.head_dim


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
VARIANTS = {
    "dense": CONFIG, "tied": CONFIG | {"tie_word_embeddings": True},
    "mixture": CONFIG | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "window": CONFIG | {"model_type": "mistral", "sliding_window": 10},
}  # fmt: skip


def counted(spec: ModelSpec, there: int, new: int, batch: int) -> tuple[float, float, float]:
    """Count bytes of weights, bytes of state, and operations: weight by weight, query by query, in 16 bits."""
    tokens, weights, flops = batch * new, 0.0, 0.0
    for weight in spec.weights():
        if weight.is_matrix:
            name = weight.name
            is_head = name.startswith("head") or (name == "embed.weight" and spec.tie_word_embeddings)
            chosen = 2 / 8 if "experts" in name else 1.0
            if name != "embed.weight" or is_head:
                weights += 2 * prod(weight.shape) * (1 - (1 - chosen) ** tokens if chosen < 1 else 1)
                flops += 2 * chosen * prod(weight.shape) * (batch if is_head else tokens)
    state = 0.0
    for a in (spec.attention(i) for i in range(len(spec.layers))):
        assert a is not None
        pairs = [(i, j) for i in range(there, there + new) for j in range(i + 1) if sees(a, i, j)]
        flops += batch * 4 * a.num_heads * a.head_dim * len(pairs)
        state += batch * 2 * 2 * a.num_kv_heads * a.head_dim * len({j for _, j in pairs})
    return weights, state, flops


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(("there", "new", "batch"), [(0, 20, 3), (33, 1, 5), (16, 4, 1)])
def test_a_step_counts_every_weight_and_every_token(name: str, there: int, new: int, batch: int) -> None:
    spec = spec_from_config(VARIANTS[name])
    ops = operations(spec, [Slice(batch, new, there + new)], BF16)
    found = [sum(o.layers * getattr(o, part) for o in ops) for part in ("weight_bytes", "state_bytes", "flops")]
    assert found == pytest.approx(counted(spec, there, new, batch))


@given(specs(), st.integers(1, 40), st.integers(0, 100), st.integers(1, 5))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_a_step_adds_up(spec: ModelSpec, tokens: int, past: int, batch: int) -> None:
    """The weights of all operations are the spec's; two halves of a batch add up to the batch; nothing is negative."""
    context = tokens + past
    precision = Precision("float32", "float32", "float32")
    forward = Forward(spec, precision)
    whole = forward.operations([Slice(2 * batch, tokens, context)])
    halves = forward.operations([Slice(batch, tokens, context)] * 2)
    assert [(o.name, o.layers) for o in whole] == [(o.name, o.layers) for o in halves]
    for a, b in zip(whole, halves, strict=True):
        assert a.flops == pytest.approx(b.flops)
        assert a.bytes == pytest.approx(b.bytes)
        assert min(a.flops, a.weight_bytes, a.state_bytes, a.activation_bytes) >= 0
        assert 0 <= a.whole_bytes <= a.activation_bytes + 1e-9
    many = forward.operations([Slice(10**6, 1, context)])  # every expert is used
    matrices = sum(w.num_params * 4 for w in spec.weights() if w.is_matrix)
    rows = 4 * spec.hidden_size * (spec.num_position_embeddings + (0 if spec.tie_word_embeddings else spec.vocab_size))
    assert sum(o.weight_bytes * o.layers for o in many) == pytest.approx(matrices - rows)


@given(specs(), st.integers(2, 60), st.data())
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_chunks_do_the_work_of_the_whole_prompt(spec: ModelSpec, prompt: int, data: st.DataObject) -> None:
    """A prompt in two chunks takes the same number of operations, except for latents, whose
    keys may be rebuilt again.
    """
    cut = data.draw(st.integers(1, prompt - 1))
    forward = Forward(spec, BF16)

    def flops(*steps: Slice) -> float:
        found = [o for s in steps for o in forward.operations([s])]
        return sum(o.flops * o.layers for o in found if o.name != "LatentAttention")

    assert flops(Slice(1, cut, cut, 0), Slice(1, prompt - cut, prompt)) == pytest.approx(
        flops(Slice(1, prompt, prompt))
    )


@pytest.mark.parametrize("name", [n for n in PUBLISHED if "MoE" not in n][::4])
def test_a_token_takes_two_operations_per_weight(name: str) -> None:
    """2 N operations, where N counts the weights that a token is multiplied with, so not an untied embedding.

    Where some experts have no weights, N is a mean.
    """
    spec = spec_from_config(PUBLISHED[name][0])
    ops = operations(spec, [Slice(1, 1, 1)], BF16)
    done = sum(o.flops * o.layers for o in ops if o.kind == "weights")
    vectors = sum(w.num_params for w in spec.weights() if not w.is_matrix and ".experts." not in w.name)
    looked_up = spec.hidden_size * (spec.num_position_embeddings + (0 if spec.tie_word_embeddings else spec.vocab_size))
    unused = sum(  # experts without weights are chosen instead
        (moe.num_experts_per_tok - moe.visits) * 3 * moe.intermediate_size * spec.hidden_size
        for moe in (layer.mlp.moe for layer in spec.layers if isinstance(layer.mlp, ShortcutMLP))
    )
    assert done / 2 == pytest.approx(spec.num_active_params() - unused - vectors - looked_up, rel=1e-3)


def test_equal_layers_are_one_operation() -> None:
    """MiniMax's 70 lightning layers differ only in their slopes; counting takes milliseconds for any model."""
    ops = Forward(find_model("minimax-text-01").spec, BF16).operations([Slice(1, 1, 10)])
    assert named(ops, "LightningAttention").layers == 70
    assert len(ops) < 20


def test_windows_stop_growing() -> None:
    spec = dense(heads(window=1024))
    far = named(operations(spec, [Slice(1, 1, 100_000)], BF16), "Attention")
    near = named(operations(spec, [Slice(1, 1, 1024)], BF16), "Attention")
    assert far == near
    assert heads(window=None).state().lookback == ALL


@pytest.mark.parametrize("build", [
    lambda: Slice(0, 1, 1), lambda: Slice(1, 0, 1), lambda: Slice(1, 2, 1), lambda: Slice(1, 1, 1, -1),
])  # fmt: skip
def test_slices_refuse_invalid_values(build: object) -> None:
    with pytest.raises(ValueError):
        build()  # type: ignore[operator]


def test_narrow_weights_carry_their_scales() -> None:
    """4 bits in groups of 128 with 16-bit scales: 4.125 bits per weight (AWQ: 4.16 with zero points)."""
    spec = dense(heads())
    wide, narrow = (named(operations(spec, [Slice(1, 1, 9)], Precision(t)), "down") for t in ("bfloat16", "int4-128"))
    assert narrow.weight_bytes / wide.weight_bytes == pytest.approx(4.125 / 16)
    assert narrow.flops == wide.flops


def test_matrices_that_are_not_rounded_keep_their_type() -> None:
    """Embeddings, routers, filters and matrices per head keep their type, as in the engine; a tied head is quantized
    separately.
    """
    int4 = Precision("int4-128")
    for name, wide in (("embed.weight", True), ("layers.0.mlp.router.weight", True), ("head.weight", False)):
        assert int4.weight_bytes(Weight(name, (256, 128))) == (256 * 128 * 2 if wide else 256 * (64 + 2))
    assert int4.weight_bytes(Weight("kv_b.weight", (2, 8, 128))) == 2 * 8 * 128 * 2
    assert int4.weight_bytes(Weight("experts.up.weight", (2, 8, 128))) == 16 * 66
    tied = find_model("smollm2-135m").spec
    held = [w.name for w in held_weights(tied, int4)]
    assert held.count("head.weight") == 1
    assert "head.weight" not in [w.name for w in held_weights(tied, BF16)]
