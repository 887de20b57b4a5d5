"""Cases of the oracle: linear attention, and models that combine it with softmax attention."""

from __future__ import annotations

from oracle.case import EPS, OWN, TIED, WIDER, WIN, Case, dims, family

CASES: dict[str, Case] = {}

_minimax = family(CASES, "minimax", "MiniMaxConfig")

_LINEAR = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
_FACTORS = {
    "full_attn_alpha_factor": 1.3, "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 0.7,
    "linear_attn_beta_factor": 1.6, "mlp_alpha_factor": 1.2, "mlp_beta_factor": 0.6,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3}

_minimax(
    "minimax",
    1,
    "one full layer in four; five experts, three per token; six factors; blocks of 32",
    dims(48, head_dim=20, block_size=32, **_LINEAR, **_FACTORS, **_EXPERTS, **OWN),
    EPS,
    *({name: 1.0} for name in _FACTORS),
    {"num_experts_per_tok": 1},
)
_minimax(
    "minimax_window",
    3,
    "every second layer full, as the class has it, through a window; gelu",
    dims(layers=3, block_size=256, hidden_act="gelu", **WIN, **_FACTORS),
    {"hidden_act": "silu"},
    WIDER,
)
_minimax("minimax_tied", 1, "tied; factors of one", dims(layers=2, block_size=64) | TIED, greedy_tokens=0)
