"""Read the configs of Mamba-2 hybrids: the kind of each layer, the meaning of words, and errors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from ridgeline.archs import spec_from_config
from ridgeline.archs.falcon_h1 import NAMES
from ridgeline.errors import ConfigError
from ridgeline.spec import MLP, Attention, ExpertGroups, GatedMLP, Layer, Mamba2, ModelSpec, MoE, RMSNorm, Ungated

NORM = RMSNorm(1e-5)
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": 32, "hidden_size": 64, "hybrid_override_pattern": "M-*E", "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "mamba_num_heads": 8,
    "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 6, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "model_type": "granitemoehybrid", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 4, "rms_norm_eps": 1e-5,
    "intermediate_size": 24, "shared_intermediate_size": 40, "num_attention_heads": 4, "max_position_embeddings": 128,
    "mamba_n_heads": 8, "mamba_d_state": 8, "layer_types": ["mamba", "attention"] * 2,
}  # fmt: skip
BAMBA: dict[str, Any] = {
    "model_type": "bamba", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "attn_layer_indices": [2],
}  # fmt: skip
FALCON: dict[str, Any] = {
    "model_type": "falcon_h1", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "mamba_d_ssm": 96,
    "mamba_n_heads": 8, "mamba_d_state": 8,
}  # fmt: skip
LFM2: dict[str, Any] = {
    "model_type": "lfm2_moe", "vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"], "moe_intermediate_size": 24,
}  # fmt: skip


def read(config: dict[str, Any], **fields: Any) -> ModelSpec:
    return spec_from_config({**config, **fields})


def test_layers_of_nemotron() -> None:
    mamba, mlp, full, moe = read(NEMOTRON).layers
    assert mamba == Layer(Mamba2(8, 16, 8, 2, 4, NORM), None, NORM)
    assert mlp == Layer(None, MLP(48, "relu2"), NORM)
    assert full == Layer(Attention(4, 2, 16, 0.25), None, NORM)
    shared = MLP(40, "relu2")
    experts = MoE(6, 2, 24, Ungated("relu2"), scores="sigmoid", choice_bias=True, shared=shared)
    assert moe == Layer(None, experts, NORM)
    grouped = read(NEMOTRON, n_group=3, topk_group=2, moe_latent_size=12, norm_topk_prob=False).layers[3].mlp
    assert isinstance(grouped, MoE)
    assert (grouped.groups, grouped.latent_size) == (ExpertGroups(3, 2, "best_two"), 12)
    assert not grouped.normalize


def test_all_spellings_of_the_pattern_are_one() -> None:
    """The published files have letters; transformers 5 writes words, and wrote other words before."""
    letters, bare = read(NEMOTRON), {k: v for k, v in NEMOTRON.items() if k != "hybrid_override_pattern"}
    old, new = ["mamba", "mlp", "attention", "moe"], ["linear_attention", "mlp", "full_attention", "moe"]
    assert read(bare, layers_block_type=old) == read(bare, layer_types=new) == letters
    assert read(NEMOTRON, layers_block_type=new, num_hidden_layers=4) == letters


def test_only_time_step_limit_limits_steps() -> None:
    """`time_step_min` only affects how biases are initialized; the published models' own code does not limit steps by
    it.
    """
    mixer = read(NEMOTRON, time_step_min=0.001, time_step_limit=[0.0, {"__float__": "Infinity"}]).layers[0].mixer
    assert isinstance(mixer, Mamba2) and (mixer.dt_least, mixer.dt_most) == (0.0, None)
    mixer = read(GRANITE, time_step_limit=[0.01, 2]).layers[0].mixer
    assert isinstance(mixer, Mamba2) and (mixer.dt_least, mixer.dt_most) == (0.01, 2.0)


def test_layers_of_granite() -> None:
    spec = read(GRANITE, residual_multiplier=0.5, attention_multiplier=0.1, embedding_multiplier=12, logits_scaling=4)
    mamba, full = spec.layers[:2]
    shared = GatedMLP(40)
    assert mamba == Layer(Mamba2(8, 16, 8, 1, 4, NORM), MoE(8, 2, 24, shared=shared), NORM, residual_scale=0.5)
    assert full.mixer == Attention(4, 4, 16, 0.1)
    assert (spec.embedding_scale, spec.logit_scale, spec.ropes()) == (12.0, 0.25, ())
    assert read(GRANITE, num_local_experts=0).layers[0].mlp == shared
    assert len(read(GRANITE, position_embedding_type="rope").ropes()) == 1
    assert all(isinstance(layer.mixer, Mamba2) for layer in read(GRANITE, layer_types=None).layers)


def test_layers_of_bamba_and_lfm2_moe() -> None:
    kinds = [type(layer.mixer).__name__ for layer in read(BAMBA).layers]
    assert kinds == ["Mamba2", "Mamba2", "Attention", "Mamba2"]
    assert [rope.dim for rope in read(BAMBA).ropes()] == [8]
    dense, _, moe = (layer.mlp for layer in read(LFM2).layers)
    assert dense == GatedMLP(7168)
    assert moe == MoE(32, 4, 24, scores="sigmoid", choice_bias=True)
    assert read(LFM2, num_dense_layers=0, use_expert_bias=False).layers[0].mlp == MoE(32, 4, 24, scores="sigmoid")


def test_layers_of_falcon_h1() -> None:
    """One layer of the checkpoint is two of ours; the factor on attention's input is in its scale and its result."""
    factors = {"attention_in_multiplier": 2.0, "attention_out_multiplier": 0.5, "key_multiplier": 0.25}
    spec = read(FALCON, **factors, ssm_in_multiplier=2.0, ssm_out_multiplier=0.75, mlp_multipliers=[0.5, 3.0])
    mamba, beside = spec.layers[:2]
    own = Mamba2(8, 12, 8, 1, 4, None, out_bias=False, input_scales=(2.0,) * 5)
    assert mamba == Layer(own, None, NORM, residual_scale=0.75)
    full = Attention(4, 2, 16, 16**-0.5, spec.ropes()[0])
    mlp = GatedMLP(48, gate_scale=0.5)
    assert beside == Layer(full, mlp, NORM, residual_scale=1.0, mlp_scale=3.0, beside=True)
    assert spec.layers == (mamba, beside) * 2
    names = NAMES.reads(spec)
    assert names["layers.3.mixer.q.weight"].keys == ("model.layers.1.self_attn.q_proj.weight",)
    assert "layers.3.mixer_norm.weight" not in names and "layers.3.mlp_norm.weight" in names


def test_mixers_in_parallel_need_a_recurrent_one_before() -> None:
    spec = read(FALCON)
    mamba, beside = spec.layers[:2]
    for layers, problem in (
        ((beside,), "layers[0]: it runs beside the layer before, which must have a recurrent mixer"),
        ((beside, beside), "layers[0]: it runs"),
        ((mamba, beside, beside), "layers[2]: it runs beside the layer before, which must have a recurrent mixer"),
        ((replace(mamba, mlp=beside.mlp), beside), "which must have a mixer alone"),
        ((replace(mamba, pre_norm=RMSNorm(0.5)), beside), "share a norm"),
    ):
        with pytest.raises(ValueError, match=re.escape(problem)):
            replace(spec, layers=layers)
    with pytest.raises(ValueError, match="a layer beside another needs a mixer"):
        replace(beside, mixer=None)
    with pytest.raises(ValueError, match="mlp_scale is the factor of an mlp"):
        replace(beside, mlp=None)


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (NEMOTRON, {"hybrid_override_pattern": "M-X"}, "hybrid_override_pattern must have one entry per layer"),
        (NEMOTRON, {"layers_block_type": ["mamba", "conv"]}, "layers_block_type must have one entry per layer"),
        (NEMOTRON, {"num_hidden_layers": 5}, "num_hidden_layers is 5, but 4 layers are described"),
        (NEMOTRON, {"hybrid_override_pattern": "--E"}, "must have a layer of mamba or attention"),
        (NEMOTRON, {"n_shared_experts": 2}, "n_shared_experts is 2"),
        (NEMOTRON, {"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, which is not supported"),
        (NEMOTRON, {"moe_latent_size": 12, "mlp_bias": True}, "mlp_bias is True"),
        (NEMOTRON, {"sliding_window": 128}, "sliding_window is 128"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        (GRANITE, {"layer_types": ["mamba", "conv"] * 2}, "layer_types must hold 4 entries"),
        (GRANITE, {"mamba_d_head": 24}, "mamba_expand gives 128 channels, but mamba_n_heads x mamba_d_head is 192"),
        (GRANITE, {"mamba_d_head": "many"}, "mamba_d_head is 'many', not int"),
        (GRANITE, {"shared_intermediate_size": 0, "num_local_experts": 0}, "intermediate_size must be positive"),
        (BAMBA, {"attn_rotary_emb": 4}, "attn_rotary_emb is 4"),
        (LFM2, {"layer_types": None}, "layer_types is null"),
        (FALCON, {"attention_bias": True, "attention_in_multiplier": 2.0}, "attention_in_multiplier is 2.0"),
        (FALCON, {"mamba_proj_bias": True, "ssm_in_multiplier": 2.0}, "ssm_in_multiplier is 2.0"),
        (FALCON, {"mamba_rms_norm": True}, "mamba_norm_before_gate is true"),
        (FALCON, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is [1.0, 1.0, 1.0, 1.0]; it must be a list of 5"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(config, **fields)
    assert message in str(caught.value)
