"""ModelSpec: its JSON form, invalid values, and the closed forms of its weights, state and work."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import ConfigError
from ridgeline.spec import (
    ALL,
    MLP,
    Attention,
    Blocks,
    Causal,
    Chunked,
    ClampedSwiGLU,
    Dilated,
    DynamicNTKScaling,
    ExpertGroups,
    FirstTokens,
    GatedMLP,
    LatentAttention,
    Layer,
    LayerNorm,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    MaskedDiffusion,
    ModelSpec,
    MoE,
    ParallelLayer,
    RMSNorm,
    Rope,
    RopeScaling,
    SharedAttention,
    Sight,
    State,
    Strided,
    Ungated,
    Weight,
    WholeSequence,
    YarnScaling,
    from_json,
    to_json,
)
from ridgeline.spec.groups import state_groups
from ridgeline.spec.regimes import NEVER, Regimes, regimes_of
from ridgeline.spec.text import describe, index_ranges, num_bytes

# ---- random specs over every part ---------------------------------------------------------------------------

SIZE = st.integers(1, 1 << 20)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
ACTIVATION = st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "relu2"])
NORM = st.builds(RMSNorm, NUMBER, NUMBER) | st.builds(LayerNorm, NUMBER)
GATED = st.builds(GatedMLP, SIZE, ACTIVATION, st.booleans())
PLAIN = st.builds(MLP, SIZE, ACTIVATION, st.booleans())
CLAMPED = st.builds(ClampedSwiGLU, NUMBER, POSITIVE)
UNGATED = st.builds(Ungated, ACTIVATION)
SCORES = st.sampled_from(["softmax", "sigmoid"])


@st.composite
def moes(draw: st.DrawFn) -> MoE:
    count, size = draw(st.integers(1, 8)), draw(st.integers(2, 8))
    chosen = draw(st.integers(1, count))
    groups = draw(st.none() | st.builds(ExpertGroups, st.just(count), st.just(chosen), st.sampled_from(KINDS)))
    shared = draw(st.none() | GATED | PLAIN)
    return MoE(
        count * size, draw(st.integers(1, size * (chosen if groups else count))), draw(SIZE),
        draw(ACTIVATION | CLAMPED | UNGATED), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()),
        draw(SCORES), draw(st.booleans()), groups, draw(NUMBER), shared,
        bool(shared) and draw(st.booleans()), draw(st.none() | SIZE),
    )  # fmt: skip


KINDS = ["best", "best_two"]
MLPS = PLAIN | GATED | moes()


@st.composite
def ropes(draw: st.DrawFn, head_dim: int) -> Rope:
    half = draw(st.integers(1, head_dim // 2))
    factors = st.lists(NUMBER, min_size=half, max_size=half).map(tuple)
    scaling = draw(
        st.none()
        | st.builds(LinearScaling, NUMBER)
        | st.builds(DynamicNTKScaling, NUMBER, SIZE)
        | st.builds(Llama3Scaling, NUMBER, NUMBER, NUMBER, SIZE)
        | st.builds(YarnScaling, NUMBER, SIZE, NUMBER, NUMBER, NUMBER, st.booleans())
        | st.builds(LongRopeScaling, factors, factors, SIZE, NUMBER)
    )
    return Rope(2 * half, draw(POSITIVE), draw(st.booleans()), scaling)


PATTERN = st.builds(FirstTokens, SIZE) | st.builds(Dilated, SIZE) | st.builds(Strided, SIZE) | st.builds(Chunked)


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    kv, head_dim = draw(st.integers(1, 16)), draw(st.integers(2, 64))
    window = draw(st.none() | SIZE)
    return Attention(
        kv * draw(st.integers(1, 8)), kv, head_dim, draw(POSITIVE), draw(st.none() | ropes(head_dim)),
        window, draw(st.none() | POSITIVE), draw(st.booleans()), draw(st.booleans()),
        draw(st.none() | NORM), draw(st.sampled_from(["head", "all_heads"])), draw(st.booleans()),
        draw(st.none() | PATTERN) if window else None, draw(st.booleans()),
    )  # fmt: skip


@st.composite
def latent_attentions(draw: st.DrawFn) -> LatentAttention:
    rope = draw(st.none() | ropes(32))
    rotated = rope.dim if rope else draw(st.integers(1, 64))
    return LatentAttention(
        draw(st.integers(1, 64)), draw(st.integers(1, 512)), draw(st.integers(1, 128)), rotated,
        draw(st.integers(1, 128)), draw(POSITIVE), draw(NORM), draw(st.none() | st.integers(1, 512)), rope,
        draw(st.booleans()), draw(st.booleans()),
    )  # fmt: skip


MIXER_KINDS = attentions() | latent_attentions()
LAYER = st.builds(Layer, MIXER_KINDS, MLPS, st.none() | NORM, st.none() | NORM, NUMBER) | st.builds(
    ParallelLayer, MIXER_KINDS, MLPS, NORM
)


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    pool = draw(st.lists(LAYER, min_size=1, max_size=3))
    # Layers may repeat; equal neighbors are written once.
    layers = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=6))
    for i in range(1, len(layers)):
        owners = [j for j in range(i) if isinstance(layers[j].mixer, Attention)]
        if owners and draw(st.booleans()):
            source = draw(st.sampled_from(owners))
            layers[i] = replace(layers[i], mixer=SharedAttention(source, layers[source].mixer))
    return ModelSpec(
        draw(st.text()), draw(SIZE), draw(SIZE), draw(SIZE), tuple(layers), draw(NORM), draw(st.booleans()),
        draw(st.integers(0, 99)), draw(NUMBER), draw(NUMBER), draw(st.none() | NUMBER),
    )  # fmt: skip


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(specs())
def test_json_round_trip(spec: ModelSpec) -> None:
    text = json.dumps(to_json(spec), allow_nan=False)
    again = from_json(json.loads(text))
    assert again == spec
    assert json.dumps(to_json(again)) == text


# ---- the JSON form ------------------------------------------------------------------------------------------

ROPE = Rope(8, 500.0, scaling=LinearScaling(4.0))
MIXER = Attention(4, 2, 8, 0.25, ROPE)
SMALL = ModelSpec(
    "small", 32, 16, 64,
    (Layer(MIXER, GatedMLP(24), RMSNorm()),) * 3 + (ParallelLayer(MIXER, MoE(4, 2, 8), LayerNorm()),),
    RMSNorm(1e-5),
)  # fmt: skip


MLP_ALONE = Layer(None, MLP(24, "relu2"), RMSNorm())


def test_json_is_what_it_says() -> None:
    """Defaults are left out, and equal neighbors are one entry with a count."""
    mixer = {
        "type": "Attention", "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.25,
        "rope": {"type": "Rope", "dim": 8, "theta": 500.0, "scaling": {"type": "LinearScaling", "factor": 4.0}},
    }  # fmt: skip
    gated = {"type": "GatedMLP", "intermediate_size": 24}
    moe = {"type": "MoE", "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 8}
    assert to_json(SMALL) == {
        "type": "ModelSpec", "family": "small", "vocab_size": 32, "hidden_size": 16, "max_position_embeddings": 64,
        "layers": [
            {"count": 3, "layer": {"type": "Layer", "mixer": mixer, "mlp": gated, "pre_norm": {"type": "RMSNorm"}}},
            {
                "count": 1,
                "layer": {"type": "ParallelLayer", "mixer": mixer, "mlp": moe, "pre_norm": {"type": "LayerNorm"}},
            },
        ],
        "norm": {"type": "RMSNorm", "eps": 1e-05},
    }  # fmt: skip


def test_a_none_without_default_is_written() -> None:
    spec = replace(SMALL, layers=(Layer(MIXER, MLP(8, "relu"), None, RMSNorm()),))
    assert to_json(spec)["layers"][0]["layer"]["pre_norm"] is None
    assert from_json(to_json(spec)) == spec


def test_whole_numbers_count_as_floats() -> None:
    """JSON writers of other languages drop the point."""
    value = to_json(SMALL)
    value["embedding_scale"] = 2
    scale = from_json(value).embedding_scale
    assert type(scale) is float and scale == 2.0


LAYER_0, LAYER_3 = "spec.layers[0]", "spec.layers[3]"
ONE_LAYER = {"count": 1, "layer": to_json(SMALL)["layers"][0]["layer"]}
# (path to an object, field, new value or `del`, what the message must say)
DEL = ...  # stands for the removal of a field
DAMAGE: list[tuple[str, str, Any, str]] = [
    ("", "vocab", 1, "spec: ModelSpec has no field vocab"),
    ("", "vocab_size", DEL, "spec: ModelSpec needs vocab_size"),
    ("", "vocab_size", "32", "spec.vocab_size: '32' is not int"),
    ("", "vocab_size", 32.0, "spec.vocab_size: 32.0 is not int"),
    ("", "vocab_size", True, "spec.vocab_size: True is not int"),
    ("", "vocab_size", 0, "spec: vocab_size must be positive, not 0"),
    ("", "tie_word_embeddings", 1, "spec.tie_word_embeddings: 1 is not bool"),
    ("", "family", None, "spec.family: None is not str"),
    ("", "type", "Model", 'spec: expected an object with "type": "ModelSpec"'),
    ("", "type", DEL, 'spec: expected an object with "type": "ModelSpec"'),
    ("", "norm", {"type": "Norm"}, "spec.norm: type 'Norm' is none of RMSNorm, LayerNorm"),
    ("", "norm", {"eps": 1e-5}, "spec.norm: type None is none of RMSNorm, LayerNorm"),
    ("", "norm", "RMSNorm", "spec.norm: 'RMSNorm' is not an object"),
    ("", "norm", None, "spec.norm: None is not an object"),
    ("", "logit_softcap", "3", "spec.logit_softcap: '3' is not float"),
    ("", "embedding_scale", True, "spec.embedding_scale: True is not float"),
    ("", "embedding_scale", math.nan, "spec.embedding_scale: nan is not"),
    ("", "logit_softcap", math.inf, "spec.logit_softcap: inf is not"),
    ("", "logit_scale", 10**400, "spec.logit_scale: 1000"),
    ("norm", "eps", math.nan, "spec.norm.eps: nan is not"),
    ("norm", "epsilon", 1e-5, "spec.norm: RMSNorm has no field epsilon"),
    ("layers.0.layer", "type", "Mamba", f"{LAYER_0}: type 'Mamba' is none of Layer, ParallelLayer"),
    ("layers.0.layer", "pre_norm", DEL, f"{LAYER_0}: Layer needs pre_norm"),
    ("layers.0.layer", "mlp", {"type": "MLP", "intermediate_size": 3}, f"{LAYER_0}.mlp: MLP needs activation"),
    ("layers.0.layer.mlp", "activation", "swish", f"{LAYER_0}.mlp.activation: 'swish' is not"),
    ("layers.0.layer.mlp", "activation", ["silu"], f"{LAYER_0}.mlp.activation: ['silu'] is not"),
    ("layers.0.layer.mixer", "num_heads", 3, f"{LAYER_0}.mixer: num_heads 3 is not a multiple of num_kv_heads 2"),
    ("layers.0.layer.mixer", "window", 2.5, f"{LAYER_0}.mixer.window: 2.5 is not int"),
    ("layers.0.layer.mixer", "scale", math.nan, f"{LAYER_0}.mixer"),
    ("layers.0.layer.mixer", "type", "Hyena", f"{LAYER_0}.mixer: type 'Hyena' is none of Attention, SharedAttention"),
    (
        "layers.1.layer", "mixer",
        {"type": "LatentAttention", "num_heads": 2, "kv_lora_rank": 0, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
         "v_head_dim": 4, "scale": 1, "latent_norm": {"type": "RMSNorm"}},
        f"{LAYER_3}.mixer: kv_lora_rank must be positive, not 0",
    ),
    (
        "layers.1.layer.mlp", "groups", {"type": "ExpertGroups", "count": 3, "chosen": 1, "score": "best"},
        f"{LAYER_3}.mlp: 4 experts do not make 3 equal groups",
    ),
    ("layers.0.layer.mixer", "qk_norm_over", "heads", f"{LAYER_0}.mixer.qk_norm_over: 'heads' is not"),
    ("layers.1.layer.mixer", "rope", {"type": "Rope", "dim": 7}, f"{LAYER_3}.mixer.rope: rope dim must be even"),
    ("layers.1.layer.mixer", "rope", 8, f"{LAYER_3}.mixer.rope: 8 is not an object"),
    ("layers.1.layer.mixer.rope", "scaling", {"type": "Yarn"}, f"{LAYER_3}.mixer.rope.scaling: type 'Yarn' is none of"),
    ("layers.1.layer.mixer.rope.scaling", "factor", None, f"{LAYER_3}.mixer.rope.scaling.factor: None is not float"),
    (
        "layers.1.layer.mixer.rope", "scaling",
        {"type": "LongRopeScaling", "short_factor": [1, "2"], "long_factor": [], "attention_factor": 1,
         "original_max_position_embeddings": 8},
        f"{LAYER_3}.mixer.rope.scaling.short_factor[1]: '2' is not float",
    ),
    ("layers.0", "count", 1.0, "layers[0]: expected"),
    ("layers.0", "count", True, "layers[0]: expected"),
    ("layers.0", "count", 0, "layers[0]"),  # else a model with fewer layers than its file shows
    ("layers.0", "count", -1, "layers[0]"),
    ("layers.1", "counts", 1, "layers[1]: expected"),
    ("layers.1", "layer", DEL, "layers[1]: expected"),
    ("", "layers", [], "spec: a model needs at least one layer"),
    ("", "layers", [3], "layers[0]: expected"),
    ("", "layers", {"0": ONE_LAYER}, 'a model spec is an object with "layers"'),
    ("", "layers", DEL, 'a model spec is an object with "layers"'),
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "value", "message"), DAMAGE, ids=lambda v: repr(v)[:40])
def test_damage_is_named(path: str, field: str, value: Any, message: str) -> None:
    whole = copy.deepcopy(to_json(SMALL))
    part = whole
    for key in filter(None, path.split(".")):
        part = part[int(key)] if isinstance(part, list) else part[key]
    if value is DEL:
        del part[field]
    else:
        part[field] = value
    with pytest.raises(ConfigError) as caught:
        from_json(whole)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, [], "spec", 3, {}])
def test_other_json_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="a model spec is an object"):
        from_json(value)


# ---- invalid parts ------------------------------------------------------------------------------------------


MASKED = MaskedDiffusion(15)


def seeing(*sights: Sight, diffusion: MaskedDiffusion | None = MASKED) -> ModelSpec:
    """Return a model with a layer for each way to see ahead."""
    layers = tuple(Layer(Attention(4, 2, 8, 1.0, sight=sight), None, RMSNorm()) for sight in sights)
    return ModelSpec("x", 16, 16, 4096, layers, RMSNorm(), diffusion=diffusion)


@pytest.mark.parametrize("sight", [Causal(), Blocks(1), Blocks(20), WholeSequence()], ids=str)
def test_a_diffusion_model_round_trips_and_its_pages_hold_whole_blocks(sight: Sight) -> None:
    spec = seeing(sight, sight)
    assert from_json(json.loads(json.dumps(to_json(spec)))) == spec
    (group,) = state_groups(spec, page_tokens=16)
    assert group.block == sight.block
    assert group.page_tokens == (20 if sight == Blocks(20) else 16)


LATENT = LatentAttention(3, 12, 5, 4, 7, 0.3, RMSNorm(), 6, Rope(4))
LONG = LongRopeScaling((1.0, 2.0), (1.0, 2.0, 3.0), 8, 1.0)
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Attention(0, 1, 8, 1.0), "num_heads, num_kv_heads and head_dim must be positive"),
    (lambda: Attention(4, 0, 8, 1.0), "num_heads, num_kv_heads and head_dim must be positive"),
    (lambda: Attention(4, 2, -8, 1.0), "num_heads, num_kv_heads and head_dim must be positive"),
    (lambda: Attention(6, 4, 8, 1.0), "num_heads 6 is not a multiple of num_kv_heads 4"),
    (lambda: Attention(2, 4, 8, 1.0), "num_heads 2 is not a multiple of num_kv_heads 4"),
    (lambda: Attention(4, 2, 8, 1.0, window=0), "window must be positive, not 0"),
    (lambda: Attention(4, 2, 8, 1.0, pattern=Strided(4)), "a pattern of keys needs a window"),
    (lambda: Attention(4, 2, 8, 1.0, window=3, sight=Blocks(4)), "only causal attention can have a window"),
    (lambda: Blocks(0), "the size of a block must be at least 1, not 0"),
    (lambda: MaskedDiffusion(-1), "mask_token must be a token id, not -1"),
    (lambda: seeing(Blocks(4), diffusion=None), "a model whose tokens see those after them needs `diffusion`"),
    (lambda: seeing(Blocks(4), Blocks(8)), "all layers must see equally far ahead"),
    (lambda: seeing(Blocks(4), diffusion=MaskedDiffusion(16)), "mask_token 16 is not below vocab_size 16"),
    (lambda: FirstTokens(0), "the first tokens that stay visible must be at least 1, not 0"),
    (lambda: Dilated(0), "the step of a dilated window must be at least 1, not 0"),
    (lambda: Strided(-2), "the stride of a pattern must be at least 1, not -2"),
    (lambda: Attention(4, 2, 8, 0.0), "the attention scale must be positive, not 0.0"),
    (lambda: Attention(4, 2, 8, math.nan), "the attention scale must be positive, not nan"),
    (lambda: Attention(4, 2, 8, 1.0, softcap=0.0), "softcap must be positive, not 0.0"),
    (lambda: Attention(4, 2, 8, 1.0, Rope(10)), "rope dim 10 exceeds head_dim 8"),
    (lambda: SharedAttention(-1, MIXER), "source must be a layer's number, not -1"),
    (lambda: Rope(0), "rope dim must be even and at least 2, not 0"),
    (lambda: Rope(5), "rope dim must be even and at least 2, not 5"),
    (lambda: Rope(4, 0.0), "rope theta must be positive, not 0.0"),
    (lambda: Rope(4, math.nan), "rope theta must be positive, not nan"),
    (lambda: Rope(4, math.inf), "rope theta must be positive, not inf"),
    (lambda: Rope(4, scaling=LONG), "rope long_factor must have 2 entries, not 3"),
    (lambda: Rope(6, scaling=LONG), "rope short_factor must have 3 entries, not 2"),
    (lambda: MLP(0, "relu"), "intermediate_size must be positive, not 0"),
    (lambda: GatedMLP(8, "swish"), "activation 'swish' is none of"),  # type: ignore[arg-type]
    (lambda: MoE(4, 0, 8), "num_experts_per_tok 0 is not in 1..num_experts 4"),
    (lambda: MoE(4, 5, 8), "num_experts_per_tok 5 is not in 1..num_experts 4"),
    (lambda: ClampedSwiGLU(1.0, 0.0), "the limit of a clamped SwiGLU must be positive, not 0.0"),
    (lambda: Ungated("swish"), "activation 'swish' is none of"),  # type: ignore[arg-type]
    (lambda: MoE(4, 2, 8, latent_size=0), "latent_size must be positive, not 0"),
    (lambda: MoE(12, 3, 8, groups=ExpertGroups(5, 2, "best")), "12 experts do not make 5 equal groups"),
    (lambda: MoE(12, 5, 8, groups=ExpertGroups(6, 2, "best")), "num_experts_per_tok 5 is more than the 4 experts of"),
    (lambda: MoE(4, 2, 8, groups=ExpertGroups(4, 2, "best_two")), "groups of one expert have no two best"),
    (lambda: ExpertGroups(4, 5, "best"), "5 chosen groups of experts are not in 1..4"),
    (lambda: replace(LATENT, num_heads=0), "num_heads must be positive, not 0"),
    (lambda: replace(LATENT, v_head_dim=-1), "v_head_dim must be positive, not -1"),
    (lambda: replace(LATENT, q_lora_rank=0), "q_lora_rank must be positive, not 0"),
    (lambda: replace(LATENT, scale=0.0), "the attention scale must be positive, not 0.0"),
    (lambda: replace(LATENT, rope=Rope(6)), "rope dim 6 is not qk_rope_head_dim 4"),
    (lambda: replace(SMALL, hidden_size=0), "hidden_size must be positive, not 0"),
    (lambda: replace(SMALL, max_position_embeddings=-1), "max_position_embeddings must be positive, not -1"),
    (lambda: replace(SMALL, layers=()), "a model needs at least one layer"),
    (lambda: Layer(None, None, RMSNorm()), "a layer needs a mixer or an mlp"),
    (lambda: replace(SMALL, layers=(MLP_ALONE,)), "a model needs at least one layer with a token mixer"),
    (
        lambda: replace(SMALL, layers=(MLP_ALONE, Layer(SharedAttention(0, MIXER), None, RMSNorm()))),
        "layers[1].mixer: it shares the keys and values of layer 0, which has none: it is no token mixer",
    ),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_parts_refuse(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        build()
    assert str(caught.value).startswith(message)


# ---- closed forms -------------------------------------------------------------------------------------------


def model(mixer: Attention, mlp: Any, layers: int, width: int, vocab: int = 32000) -> ModelSpec:
    return ModelSpec("x", vocab, width, 4096, (Layer(mixer, mlp, RMSNorm()),) * layers, RMSNorm())


LLAMA_2_7B = model(Attention(32, 32, 128, 128**-0.5, Rope(128)), GatedMLP(11008), 32, 4096)
MISTRAL_7B = model(Attention(32, 8, 128, 128**-0.5, Rope(128), window=4096), GatedMLP(14336), 32, 4096)
MIXTRAL_8X7B = model(Attention(32, 8, 128, 128**-0.5, Rope(128)), MoE(8, 2, 14336), 32, 4096)


def test_state_of_published_models() -> None:
    """The figures are bytes, with two bytes per number."""
    assert LLAMA_2_7B.state_elements(1) * 2 == 524_288
    assert LLAMA_2_7B.state_elements(2048) * 2 == 1 << 30
    assert MISTRAL_7B.state_elements(1) * 2 == 131_072
    full = model(replace(MISTRAL_7B.layers[0].mixer, window=None), GatedMLP(14336), 32, 4096)
    assert 4 * full.state_elements(4096) * 2 == 2 << 30
    # The next token reads itself and the 4095 tokens before it, so no more are kept, however long the sequence.
    for tokens, kept in ((4094, 4094), (4095, 4095), (4096, 4095), (131_072, 4095)):
        assert MISTRAL_7B.state_elements(tokens) * 2 == 131_072 * kept


def test_state_of_parts() -> None:
    assert Attention(6, 2, 24, 1.0).state() == State(((2, 24), (2, 24)), ALL, snapshot=False)
    assert Attention(6, 2, 24, 1.0, window=24).state() == State(((2, 24), (2, 24)), 23)
    assert Attention(6, 2, 24, 1.0).state().elements == 96
    # Exactly the latent and the rotated part of the key, however many heads; DeepSeek-V3: 576 numbers.
    assert LATENT.state() == State(((1, 16),), ALL)
    assert replace(LATENT, num_heads=99, v_head_dim=99).state().elements_at(1000) == 16_000
    assert Attention(6, 2, 24, 1.0, window=1).state().elements_at(100) == 0  # a token attends only to itself
    summary = State(((4, 16), (32,)), 1, snapshot=True)
    assert summary.elements_at(1) == summary.elements_at(10**6) == summary.elements == 96


def test_mixed_layers_add_up() -> None:
    local, wide = (Attention(4, 2, 8, 1.0, window=w) for w in (16, None))
    spec = replace(SMALL, layers=tuple(Layer(m, GatedMLP(8), RMSNorm()) for m in (local, wide, local)))
    assert spec.state_elements(10) == 3 * 32 * 10
    assert spec.state_elements(1000) == 32 * 1000 + 2 * 32 * 15


def test_work() -> None:
    """Multiply-accumulates of q @ k and of weights @ v are pairs x heads x head_dim each; a query has no later keys."""
    mixer = LLAMA_2_7B.layers[0].mixer
    assert mixer.work(1, 1) == 2 * 4096
    assert mixer.work(7, 1000) == 2 * sum(range(994, 1001)) * 32 * 128
    windowed = MISTRAL_7B.layers[0].mixer
    assert windowed.work(3, 100) == 2 * (98 + 99 + 100) * 4096
    assert windowed.work(3, 100_000) == 2 * 3 * 4096 * 4096


def test_params_of_published_models() -> None:
    assert LLAMA_2_7B.num_params() == LLAMA_2_7B.num_active_params() == 6_738_415_616
    assert MISTRAL_7B.num_params() == MISTRAL_7B.num_active_params() == 7_241_732_096
    assert MIXTRAL_8X7B.num_params() == 46_702_792_704
    assert MIXTRAL_8X7B.num_active_params() == 12_879_925_248
    tied = replace(LLAMA_2_7B, tie_word_embeddings=True)
    assert LLAMA_2_7B.num_params() - tied.num_params() == 32000 * 4096


def test_weights_of_a_layer() -> None:
    norm = LayerNorm()
    mixer = Attention(4, 2, 8, 1.0, qkv_bias=True, out_bias=True, qk_norm=RMSNorm())
    layer = Layer(mixer, MLP(24, "gelu", bias=True), norm, RMSNorm())
    assert list(layer.weights(16)) == [
        Weight("mixer_norm.weight", (16,)), Weight("mixer_norm.bias", (16,)),
        Weight("mixer.q.weight", (32, 16), "out"), Weight("mixer.q.bias", (32,), "out"),
        Weight("mixer.k.weight", (16, 16), "out"), Weight("mixer.k.bias", (16,), "out"),
        Weight("mixer.v.weight", (16, 16), "out"), Weight("mixer.v.bias", (16,), "out"),
        Weight("mixer.o.weight", (16, 32), "in"), Weight("mixer.o.bias", (16,), None),
        Weight("mixer.q_norm.weight", (8,)), Weight("mixer.k_norm.weight", (8,)),
        Weight("mixer_post_norm.weight", (16,)),
        Weight("mlp_norm.weight", (16,)), Weight("mlp_norm.bias", (16,)),
        Weight("mlp.up.weight", (24, 16), "out"), Weight("mlp.up.bias", (24,), "out"),
        Weight("mlp.down.weight", (16, 24), "in"), Weight("mlp.down.bias", (16,), None),
        Weight("mlp_post_norm.weight", (16,)),
    ]  # fmt: skip
    over_all = replace(mixer, qkv_bias=False, out_bias=False, qk_norm_over="all_heads")
    assert {w.name: w.shape for w in over_all.weights(16)} == {
        "q.weight": (32, 16), "k.weight": (16, 16), "v.weight": (16, 16), "o.weight": (16, 32),
        "q_norm.weight": (32,), "k_norm.weight": (16,),
    }  # fmt: skip


def test_weights_of_latent_attention() -> None:
    assert list(replace(LATENT, latent_bias=True, out_bias=True).weights(16)) == [
        Weight("q_a.weight", (6, 16)), Weight("q_a.bias", (6,)), Weight("q_a_norm.weight", (6,)),
        Weight("q_b.weight", (27, 6), "out"),
        Weight("kv_a.weight", (16, 16)), Weight("kv_a.bias", (16,)), Weight("kv_a_norm.weight", (12,)),
        Weight("kv_b.weight", (3, 12, 12), "head"),
        Weight("o.weight", (16, 21), "in"), Weight("o.bias", (16,), None),
    ]  # fmt: skip
    assert [w.name for w in replace(LATENT, q_lora_rank=None).weights(16)] == [
        "q.weight", "kv_a.weight", "kv_a_norm.weight", "kv_b.weight", "o.weight",
    ]  # fmt: skip


def test_weights_of_experts() -> None:
    moe = MoE(4, 2, 8, choice_bias=True, shared=GatedMLP(24, bias=True))
    assert {w.name: w.shape for w in moe.weights(16)} == {
        "router.weight": (4, 16), "choice.bias": (4,), "experts.gate.weight": (4, 8, 16),
        "experts.up.weight": (4, 8, 16), "experts.down.weight": (4, 16, 8), "shared.gate.weight": (24, 16),
        "shared.gate.bias": (24,), "shared.up.weight": (24, 16), "shared.up.bias": (24,),
        "shared.down.weight": (16, 24), "shared.down.bias": (16,),
    }  # fmt: skip
    # Two of the four experts are active, and all other weights.
    assert moe.active_params(16) == sum(w.num_params for w in moe.weights(16)) - 2 * 3 * 8 * 16


def test_weights_of_experts_without_gates() -> None:
    moe = MoE(4, 2, 8, Ungated("relu2"), bias=True, shared=MLP(24, "relu2"), latent_size=6)
    assert {w.name: w.shape for w in moe.weights(16)} == {
        "router.weight": (4, 16), "experts.up.weight": (4, 8, 6), "experts.down.weight": (4, 6, 8),
        "experts.up.bias": (4, 8), "experts.down.bias": (4, 6), "latent_in.weight": (6, 16),
        "latent_out.weight": (16, 6), "shared.up.weight": (24, 16), "shared.down.weight": (16, 24),
    }  # fmt: skip
    assert moe.active_params(16) == sum(w.num_params for w in moe.weights(16)) - 2 * (2 * 8 * 6 + 8 + 6)


def test_a_layer_of_an_mlp_alone() -> None:
    """It has one norm, no state and no group, and the state of other layers keeps its offsets."""
    alone = replace(SMALL, layers=(MLP_ALONE, *SMALL.layers, MLP_ALONE))
    assert [w.name for w in MLP_ALONE.weights(16)] == ["mlp_norm.weight", "mlp.up.weight", "mlp.down.weight"]
    assert alone.num_params() == SMALL.num_params() + 2 * (16 + 2 * 16 * 24)
    assert alone.state_elements(100) == SMALL.state_elements(100)
    (group,), (other,) = (state_groups(s, page_tokens=16) for s in (alone, SMALL))
    assert group.page_bytes == other.page_bytes
    assert [s.layer - 1 for s in group.slots] == [s.layer for s in other.slots]
    assert from_json(json.loads(json.dumps(to_json(alone)))) == alone


def test_weights_of_a_model() -> None:
    spec = replace(SMALL, num_position_embeddings=64, layers=(ParallelLayer(MIXER, MoE(4, 2, 8), RMSNorm()),))
    shapes = {w.name: w.shape for w in spec.weights()}
    assert shapes == {
        "embed.weight": (32, 16), "position_embed.weight": (64, 16), "layers.0.mixer_norm.weight": (16,),
        "layers.0.mixer.q.weight": (32, 16), "layers.0.mixer.k.weight": (16, 16), "layers.0.mixer.v.weight": (16, 16),
        "layers.0.mixer.o.weight": (16, 32), "layers.0.mlp_norm.weight": (16,), "layers.0.mlp.router.weight": (4, 16),
        "layers.0.mlp.experts.gate.weight": (4, 8, 16), "layers.0.mlp.experts.up.weight": (4, 8, 16),
        "layers.0.mlp.experts.down.weight": (4, 16, 8), "norm.weight": (16,), "head.weight": (32, 16),
    }  # fmt: skip
    assert spec.num_params() == sum(math.prod(shape) for shape in shapes.values())
    assert spec.num_params() - spec.num_active_params() == 2 * 3 * 8 * 16  # two of four experts
    assert {w.name for w in replace(spec, tie_word_embeddings=True).weights()} == set(shapes) - {"head.weight"}
    assert all(w.is_matrix == (len(w.shape) > 1) for w in spec.weights())


def test_weights_of_experts_with_biases() -> None:
    """A stack of biases is no matrix, so it stays in float32."""
    moe = MoE(4, 2, 8, ClampedSwiGLU(1.7, 7.0), router_bias=True, bias=True)
    found = {w.name: w.shape for w in moe.weights(16)}
    assert found.items() - {w.name: w.shape for w in MoE(4, 2, 8).weights(16)}.items() == {
        ("router.bias", (4,)), ("experts.gate.bias", (4, 8)), ("experts.up.bias", (4, 8)),
        ("experts.down.bias", (4, 16)),
    }  # fmt: skip
    assert all(w.is_matrix == w.name.endswith("weight") for w in moe.weights(16))
    assert moe.active_params(16) == 16 * 4 + 4 + 2 * (3 * 16 * 8 + 2 * 8 + 16)


def test_weights_and_state_of_a_sharing_layer() -> None:
    own = replace(MIXER, qkv_bias=True, qk_norm=RMSNorm(), sinks=True)
    mixer = SharedAttention(0, own)
    missing = {w.name for w in own.weights(16)} - {w.name for w in mixer.weights(16)}
    assert missing == {"k.weight", "k.bias", "v.weight", "v.bias", "k_norm.weight"}
    assert [w for w in mixer.weights(16) if w.name == "sinks"] == [Weight("sinks", (4,), "out")]
    assert mixer.state() == State(())
    assert mixer.work(3, 50) == own.work(3, 50)


def test_ropes_are_the_distinct_ones_in_order() -> None:
    other = Rope(4)
    layers = tuple(Layer(replace(MIXER, rope=r), GatedMLP(8), RMSNorm()) for r in (None, other, ROPE, other, None))
    assert replace(SMALL, layers=layers).ropes() == (other, ROPE)


def test_a_part_described_in_one_line() -> None:
    """Fields with default values are left out, and long lists are cut."""
    rope = Rope(8, 500_000.0, scaling=LongRopeScaling((1.0, 2.0, 3.0, 4.0), (1.0,) * 4, 64, 1.5))
    assert describe(Attention(4, 2, 8, 0.1, Rope(8), window=16)) == (
        "Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.1, rope=Rope(dim=8), window=16)"
    )
    assert describe(rope) == (
        "Rope(dim=8, theta=500000, scaling=LongRopeScaling(short_factor=[1 .. 4], long_factor=[1 .. 1], "
        "original_max_position_embeddings=64, attention_factor=1.5))"
    )
    assert index_ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7"
    assert index_ranges([]) == ""
    assert [num_bytes(n) for n in (0, 1023, 1024, 13.5e9, 2**41)] == ["0 B", "1023 B", "1 KiB", "12.57 GiB", "2 TiB"]


def test_scalings_that_follow_a_length() -> None:
    assert DynamicNTKScaling(4.0, 64).theta(1e4, 16, 64) == 1e4
    assert DynamicNTKScaling(4.0, 64).theta(1e4, 16, 10) == 1e4
    assert DynamicNTKScaling(4.0, 64).theta(1e4, 16, 128) == pytest.approx(1e4 * 5 ** (16 / 14))
    scaling = LongRopeScaling((1.0,), (2.0,), 64, 1.0)
    assert (scaling.divisors(64), scaling.divisors(65)) == ((1.0,), (2.0,))


def test_regimes() -> None:
    """LongRoPE restarts a sequence that exceeds the trained length; dynamic NTK chooses the frequencies of a prompt as
    a whole.
    """
    long, grown = LongRopeScaling((1.0,), (2.0,), 64, 1.0), DynamicNTKScaling(4.0, 32)
    found = regimes_of([None, long, long], 65)
    assert found == Regimes((64,), (64,)) and found.contexts() == [1, 65]
    assert (
        [found.floor(n, n) for n in (1, 64, 65, 99)] == [0, 0, 65, 65] == [found.floor(1, n) for n in (1, 64, 65, 99)]
    )
    assert [found.end(n) for n in (1, 64, 65)] == [64, 64, NEVER]
    found = regimes_of([grown], 100)
    assert found == Regimes(range(32, 100), (), 32) and len(found.contexts()) == 69
    assert [found.floor(n, 99) for n in (1, 32, 33, 99)] == [0, 0, 33, 99] and found.end(1) == NEVER
    both = regimes_of([long, grown, replace(long, original_max_position_embeddings=16)], 100)
    assert both == Regimes((16, *range(32, 100)), (16, 64), 32) and both.floor(40, 65) == 65
    assert regimes_of([long], 64) == regimes_of([grown], 32) == regimes_of([None], 1 << 20) == Regimes()


def test_bytes_of_frequencies_are_those_of_the_tables() -> None:
    def model(scaling: RopeScaling | None) -> ModelSpec:
        layer = Layer(Attention(2, 2, 8, 0.5, Rope(8, scaling=scaling)), GatedMLP(8), RMSNorm())
        return ModelSpec("test", 16, 16, 1 << 18, (layer,), RMSNorm())

    assert model(None).frequency_bytes(1 << 18) == 0
    assert model(LongRopeScaling((1.0,) * 4, (2.0,) * 4, 64, 1.0)).frequency_bytes(1 << 18) == 8 + 2 * 4 * 4
    assert (
        model(DynamicNTKScaling(4.0, 1 << 16)).frequency_bytes(1 << 18) == (3 << 16) * 8 + (3 * (1 << 16) + 1) * 4 * 4
    )
