"""The architectures of llama.cpp that can be loaded: the names of their tensors, and how their values differ from ours.

llama.cpp changes some tensors when it converts a model. Where it rotates neighboring pairs, the rows of q and k are
reordered. Norms of Gemma contain the added 1. Mamba's A is stored as -exp(A_log). Experts are stacked in one tensor, as
in our weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ridgeline.archs.names import Each, FusedRows, Names, Tensor


@dataclass(frozen=True, slots=True)
class Architecture:
    """The tensors of one `general.architecture`.

    names: our names on the left, those of the file on the right. pairs: whether the rows of q and k are in the order of
    neighboring pairs. norm_offset: number that the file's norms have more than ours.
    """

    names: Names
    pairs: bool = False
    norm_offset: float = 0.0

    def change(self, name: str) -> str | None:
        """Return how a tensor differs from ours: "pairs", "norm", "decay" or "conv"; None if it does not."""
        if self.pairs and re.fullmatch(r"blk\.\d+\.attn_[qk]\.(weight|bias)", name):
            return "pairs"
        if self.norm_offset and name.endswith("norm.weight"):
            return "norm"
        if re.fullmatch(r"blk\.\d+\.ssm_a", name):
            return "decay"
        return "conv" if re.fullmatch(r"blk\.\d+\.ssm_conv1d\.weight", name) else None


_ROPE_TENSORS = (r"^rope_freqs\.weight$", r"^rope_factors_(long|short)\.weight$")

LLAMA = Names(
    root={"embed": "token_embd", "norm": "output_norm", "head": "output"},
    layer="blk.{i}.",
    parts={
        "mixer_norm": "attn_norm",
        "mixer.q": "attn_q",
        "mixer.k": "attn_k",
        "mixer.v": "attn_v",
        "mixer.o": "attn_output",
        "mixer.q_norm": "attn_q_norm",
        "mixer.k_norm": "attn_k_norm",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up",
        "mlp.down": "ffn_down",
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.gate": "ffn_gate_exps",
        "mlp.experts.up": "ffn_up_exps",
        "mlp.experts.down": "ffn_down_exps",
        "mlp.shared.gate": "ffn_gate_shexp",
        "mlp.shared.up": "ffn_up_shexp",
        "mlp.shared.down": "ffn_down_shexp",
    },
    ignore=_ROPE_TENSORS,  # config.py reads them
)
# Files of early 2024 have one tensor for each expert.
_EXPERTS_APART = LLAMA.with_parts(parts={f"mlp.experts.{n}": Each(f"ffn_{n}." + "{e}") for n in ("gate", "up", "down")})
_BOTH_NORMS = LLAMA.with_parts(
    parts={"mixer_post_norm": "post_attention_norm", "mlp_post_norm": "post_ffw_norm"},
)
_QKV = ("mixer.q", "mixer.k", "mixer.v")
_FUSED_QKV = {name: FusedRows("attn_qkv", _QKV) for name in _QKV}
_GATE_UP = ("mlp.gate", "mlp.up")
_GPT2 = LLAMA.with_parts(
    root={**LLAMA.root, "position_embed": "position_embd"}, parts=dict(_FUSED_QKV),
)  # fmt: skip
_GPT_OSS = LLAMA.with_parts(
    parts={"mlp_norm": "post_attention_norm", "mixer.sinks": Tensor("attn_sinks.weight")},
)
_MAMBA = Names(
    root=LLAMA.root,
    layer=LLAMA.layer,
    parts={
        "mixer_norm": "attn_norm",
        "mixer.in": "ssm_in",
        "mixer.conv": "ssm_conv1d",
        "mixer.x": "ssm_x",
        "mixer.dt": "ssm_dt",
        "mixer.A_log": Tensor("ssm_a"),
        "mixer.D": Tensor("ssm_d"),
        "mixer.out": "ssm_out",
    },
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({
    "llama": Architecture(LLAMA.with_parts(others=(_EXPERTS_APART,)), pairs=True),
    "qwen2": Architecture(LLAMA),
    "qwen3": Architecture(LLAMA),
    "qwen3moe": Architecture(LLAMA),
    "smollm3": Architecture(LLAMA, pairs=True),
    "granite": Architecture(LLAMA, pairs=True),
    "granitemoe": Architecture(LLAMA, pairs=True),
    "phi3": Architecture(LLAMA.with_parts(parts={
        **_FUSED_QKV, **{name: FusedRows("ffn_up", _GATE_UP) for name in _GATE_UP},
    })),
    "gemma2": Architecture(_BOTH_NORMS, norm_offset=1.0),
    "gemma3": Architecture(_BOTH_NORMS, norm_offset=1.0),
    "olmo2": Architecture(_BOTH_NORMS),
    "glm4": Architecture(_BOTH_NORMS.with_parts(parts={name: FusedRows("ffn_up", _GATE_UP) for name in _GATE_UP})),
    "gpt-oss": Architecture(_GPT_OSS),
    "gpt2": Architecture(_GPT2),
    "mamba": Architecture(_MAMBA),
})  # fmt: skip
