"""LLaDA2.0 and 2.1 (arXiv:2512.15745, 2602.08676): block diffusion with many small experts, in Ling 2.0's layers."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, expert_groups, gated_mlp, rms_norm
from ridgeline.archs.names import LLAMA, Each, FusedRows, Tensor
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import Attention, Blocks, GatedMLP, Layer, MaskedDiffusion, ModelSpec, MoE, RMSNorm

# Defaults of the published code's `generate`: the published configs name neither.
BLOCK_SIZE, MASK_TOKEN = 32, 156_895


def _attention(c: Config, norm: RMSNorm) -> Attention:
    """Return attention with a norm on every query and key head, whose first part is rotated."""
    heads = Heads.read(c, null_kv=False, null_head_dim=True)
    return attention(
        heads,
        read_rope(c, heads.head_dim, Rotation(partial=0.5)),
        qkv_bias=c.get_bool("use_qkv_bias", False),
        out_bias=c.get_bool("use_bias", True),
        qk_norm=norm if c.get_bool("use_qk_norm", True) else None,
        sight=Blocks(c.get_size("block_size", BLOCK_SIZE)),
    )


def _experts(c: Config) -> MoE:
    """Return experts that are chosen by sigmoids and a bias, from the best groups; shared ones are one MLP."""
    c.expect("score_function", "sigmoid")
    c.expect("moe_router_enable_expert_bias", True)
    c.expect("norm_topk_prob", True)
    count, chosen = c.get_size("num_experts", 16), c.get_size("num_experts_per_tok", 2)
    size, activation = c.get_size("moe_intermediate_size"), c.get_activation("hidden_act", "silu")
    together = c.get_int("num_shared_experts", 0, 0)
    groups = ("n_group", c.get_size("n_group", 8)), ("topk_group", c.get_size("topk_group", 4))
    return MoE(
        count, chosen, size, activation,
        normalize=chosen > 1,
        scores="sigmoid",
        choice_bias=True,
        groups=expert_groups(c, ("num_experts", count), *groups, "best_two"),
        scale=c.get_float("routed_scaling_factor", 2.5),
        shared=GatedMLP(size * together, activation) if together else None,
    )  # fmt: skip


def llada2_moe(c: Config) -> ModelSpec:
    """LLaDA2: layers see blocks, logits are for the token at the same position; the first layers may be dense."""
    c.expect("norm_head", False)
    c.expect("norm_softmax", False)
    c.expect("use_rmsnorm", True)
    c.expect("using_split_qkv_in_self_attention", False)
    c.expect("use_sliding_window", False)
    norm = rms_norm(c, 1e-5)
    mixer, dense, moe, first = _attention(c, norm), gated_mlp(c), _experts(c), c.get_int("first_k_dense_replace", 0)
    layers = tuple(Layer(mixer, dense if i < first else moe, norm) for i in range(c.get_layer_count()))
    mask = MaskedDiffusion(c.get_int("mask_token_id", MASK_TOKEN), trained_blocks=(BLOCK_SIZE,), edits=True)
    return decoder(c, layers, norm, diffusion=mask)


_QKV = ("mixer.q", "mixer.k", "mixer.v")
NAMES = LLAMA.with_parts(
    root={"embed": "model.word_embeddings", "norm": "model.norm", "head": "lm_head"},
    parts={
        **{name: FusedRows("attention.query_key_value", _QKV) for name in _QKV},
        "mixer.q_norm": "attention.query_layernorm",
        "mixer.k_norm": "attention.key_layernorm",
        "mixer.o": "attention.dense",
        "mlp.router": "mlp.gate",
        "mlp.choice": Tensor("mlp.gate.expert_bias"),
        **{f"mlp.experts.{n}": Each("mlp.experts.{e}." + f"{n}_proj") for n in ("gate", "up", "down")},
        **{f"mlp.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
    },
)

# The published code computes the router in float32, derives the rotated part from partial_rotary_factor, and has no
# window; dropouts matter in training only.
FAMILIES = (
    Family(
        "llada2_moe", llada2_moe, NAMES,
        harmless=(
            "embedding_dropout", "output_dropout", "router_dtype", "rotary_dim", "sliding_window", "max_window_layers",
        ),
    ),
)  # fmt: skip
