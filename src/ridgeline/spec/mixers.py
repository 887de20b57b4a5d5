"""Token mixers and channel mixers: what a layer is made of. One frozen dataclass per kind.

Each answers questions, and every other part derives its facts from the answers:
    weights(width)          names, shapes, split axes             -> loader, modules, inspect
    state()                 what it remembers of a sequence       -> page pools, inspect (token mixers)
    work(tokens, context)   multiply-accumulates besides weights  -> planner (token mixers)
    active_params(width)    weights that one token meets          -> inspect (channel mixers)
A boolean that changes the algorithm is a new type; a bias or a norm may be a field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.latent import LatentAttention
from ridgeline.spec.norm import Norm
from ridgeline.spec.pattern import FirstTokens, Pattern
from ridgeline.spec.recurrent import RecurrentMixer
from ridgeline.spec.rope import Rope
from ridgeline.spec.state import ALL, State
from ridgeline.spec.weight import Weight, linear


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


# ---- token mixers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal softmax attention with grouped keys and values: MHA, GQA and MQA by `num_kv_heads` (arXiv:2305.13245).

    scale: factor on q @ k. window: keys seen, the token itself included; None is all of them.
    softcap: scores become softcap * tanh(scores / softcap). qk_norm_over: one norm per head, or over all heads.
    sinks: each head has a learned logit that takes part in its softmax and has no value (GPT-OSS): no cap is on it.
    out_gate: what a head attended to is multiplied by sigmoid(out_gate(x)), number by number (arXiv:2505.06708).
    pattern: which keys are seen instead of, or beside, those of the window.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None
    softcap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Norm | None = None
    qk_norm_over: Literal["head", "all_heads"] = "head"
    sinks: bool = False
    pattern: Pattern | None = None
    out_gate: bool = False

    def __post_init__(self) -> None:
        heads, kv = self.num_heads, self.num_kv_heads
        _require(min(heads, kv, self.head_dim) > 0, "num_heads, num_kv_heads and head_dim must be positive")
        _require(heads % kv == 0, f"num_heads {heads} is not a multiple of num_kv_heads {kv}")
        _require(self.window is None or self.window > 0, f"window must be positive, not {self.window}")
        _require(self.pattern is None or self.window is not None, "a pattern of keys needs a window")
        _require(self.scale > 0, f"the attention scale must be positive, not {self.scale}")
        _require(self.softcap is None or self.softcap > 0, f"softcap must be positive, not {self.softcap}")
        if self.rope:
            _require(self.rope.dim <= self.head_dim, f"rope dim {self.rope.dim} exceeds head_dim {self.head_dim}")

    def weights(self, width: int) -> Iterator[Weight]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield from linear("q", width, q, bias=self.qkv_bias)
        yield from linear("k", width, kv, bias=self.qkv_bias)
        yield from linear("v", width, kv, bias=self.qkv_bias)
        if self.out_gate:
            yield from linear("out_gate", width, q, bias=self.qkv_bias)
        yield from linear("o", q, width, bias=self.out_bias, split="in")
        if self.qk_norm:
            per_head = self.qk_norm_over == "head"
            yield from self.qk_norm.weights("q_norm", self.head_dim if per_head else q)
            yield from self.qk_norm.weights("k_norm", self.head_dim if per_head else kv)
        if self.sinks:
            yield Weight("sinks", (self.num_heads,), "out")

    def state(self) -> State:
        part = (self.num_kv_heads, self.head_dim)
        if self.window is None:
            return State((part, part))
        if self.pattern is None:
            return State((part, part), self.window - 1)
        first = self.pattern.count if isinstance(self.pattern, FirstTokens) else 0
        return State((part, part), self.pattern.lookback(self.window), first_tokens=first)

    def work(self, tokens: int, context: int) -> int:
        seen = min(context, self.window or context)
        if self.pattern is not None and self.window is not None:
            seen = self.pattern.seen(context, self.window)
        return 2 * tokens * seen * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention with queries of its own over the keys and values of an earlier layer (CLA, arXiv:2405.12981).

    source: the layer whose keys and values they are. attention: how it attends, as in that layer; what it says of keys
    and values (their heads, size, rotation) is what they are there, and its window sees no more than that layer keeps.
    It has neither weights for keys and values nor state: the model checks that the two layers fit.
    """

    source: int
    attention: Attention

    def __post_init__(self) -> None:
        _require(self.source >= 0, f"source must be a layer's number, not {self.source}")

    @property
    def num_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    def weights(self, width: int) -> Iterator[Weight]:
        owned = ("k", "v", "k_norm")
        yield from (w for w in self.attention.weights(width) if w.name.split(".")[0] not in owned)

    def state(self) -> State:
        return State(())

    def work(self, tokens: int, context: int) -> int:
        return self.attention.work(tokens, context)

    def misfit(self, owner: Attention) -> str | None:
        """Why the keys and values of `owner` cannot be these; None if they can."""
        own = self.attention
        for name in ("num_kv_heads", "head_dim"):
            if (a := getattr(own, name)) != (b := getattr(owner, name)):
                return f"{name} is {a} here and {b} there"
        if own.rope != owner.rope:
            return "its queries must be rotated as the keys are"
        reads, kept = own.state(), owner.state()
        if reads.lookback > kept.lookback:
            seen = "all tokens" if reads.lookback == ALL else f"{reads.lookback} tokens"
            return f"it looks back at {seen}, and {kept.lookback} are kept there"
        if reads.first_tokens > kept.first_tokens and kept.lookback != ALL:
            return f"it sees the first {reads.first_tokens} tokens for ever, and {kept.first_tokens} are kept there"
        return None


# ---- channel mixers ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(up(x))) (GPT-2, GPT-NeoX)."""

    intermediate_size: int
    activation: Activation
    bias: bool = False

    def __post_init__(self) -> None:
        _check_mlp(self.intermediate_size, self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("up", width, self.intermediate_size, bias=self.bias)
        yield from linear("down", self.intermediate_size, width, bias=self.bias, split="in")

    def active_params(self, width: int) -> int:
        return sum(w.num_params for w in self.weights(width))


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(act(gate(x)) * up(x)) (arXiv:2002.05202)."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False

    def __post_init__(self) -> None:
        _check_mlp(self.intermediate_size, self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("gate", width, self.intermediate_size, bias=self.bias)
        yield from linear("up", width, self.intermediate_size, bias=self.bias)
        yield from linear("down", self.intermediate_size, width, bias=self.bias, split="in")

    def active_params(self, width: int) -> int:
        return sum(w.num_params for w in self.weights(width))


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), gate clamped to at most `limit`, up to -limit..limit (GPT-OSS)."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        _require(self.limit > 0, f"the limit of a clamped SwiGLU must be positive, not {self.limit}")


@dataclass(frozen=True, slots=True)
class Ungated:
    """act(up): experts are down(act(up(x))), as MLP is (Nemotron 3)."""

    activation: Activation

    def __post_init__(self) -> None:
        check_activation(self.activation)


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in `count` equal groups of neighbors, of which a token may choose from the best `chosen` only.

    score: of a group, its best expert's (DeepSeek-V2, arXiv:2405.04434, 2.2.2) or the sum of its two best
    (DeepSeek-V3, 2412.19437). Equal scores go to the lower group.
    """

    count: int
    chosen: int
    score: Literal["best", "best_two"]

    def __post_init__(self) -> None:
        _require(0 < self.chosen <= self.count, f"{self.chosen} chosen groups of experts are not in 1..{self.count}")


@dataclass(frozen=True, slots=True)
class MoE:
    """A router sends each token to its `num_experts_per_tok` best MLPs (arXiv:1701.06538, 2401.04088).

    Router scores are a softmax over all experts, or a sigmoid of each; `normalize` makes the chosen ones sum to one (of
    a softmax, that is one over the chosen); `scale` multiplies them then. choice_bias: a number per expert is added to
    the scores that decide the choice, not to those that weigh the results (arXiv:2408.15664). Equal scores go to the
    lower expert index. router_bias, bias: of the router, of all matrices of experts. shared: an MLP that every token
    visits besides (arXiv:2401.06066); shared_gate: what it gives is multiplied by the sigmoid of a number made of the
    token (Qwen2-MoE). latent_size: experts read and write a vector of this size, which one matrix makes of a token and
    another takes back (Nemotron 3 Super).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    activation: Activation | ClampedSwiGLU | Ungated = "silu"
    normalize: bool = True
    router_bias: bool = False
    bias: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    choice_bias: bool = False
    groups: ExpertGroups | None = None
    scale: float = 1.0
    shared: GatedMLP | MLP | None = None
    shared_gate: bool = False
    latent_size: int | None = None

    def __post_init__(self) -> None:
        _check_mlp(self.intermediate_size, self.activation)
        _require(
            0 < self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok {self.num_experts_per_tok} is not in 1..num_experts {self.num_experts}",
        )
        _require(self.shared is not None or not self.shared_gate, "shared_gate needs a shared MLP to be the gate of")
        if self.groups:
            size, rest = divmod(self.num_experts, self.groups.count)
            _require(not rest, f"{self.num_experts} experts do not make {self.groups.count} equal groups")
            room = size * self.groups.chosen
            _require(
                self.num_experts_per_tok <= room,
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the {room} experts of the chosen groups",
            )
            _require(size > 1 or self.groups.score == "best", "groups of one expert have no two best")
        latent = self.latent_size
        _require(latent is None or latent > 0, f"latent_size must be positive, not {latent}")

    @property
    def gated(self) -> bool:
        return not isinstance(self.activation, Ungated)

    def weights(self, width: int) -> Iterator[Weight]:
        experts, inner, outer = self.num_experts, self.intermediate_size, self.latent_size or width
        parts = ("gate", "up") if self.gated else ("up",)
        yield Weight("router.weight", (experts, width))
        if self.router_bias:
            yield Weight("router.bias", (experts,))
        if self.choice_bias:
            yield Weight("choice.bias", (experts,))
        yield from (Weight(f"experts.{n}.weight", (experts, inner, outer), "out") for n in parts)
        yield Weight("experts.down.weight", (experts, outer, inner), "in")
        if self.bias:
            yield from (Weight(f"experts.{n}.bias", (experts, inner), "out") for n in parts)
            yield Weight("experts.down.bias", (experts, outer))
        if self.latent_size:
            yield from linear("latent_in", width, outer, split=None)
            yield from linear("latent_out", outer, width, split=None)
        if self.shared:
            yield from (Weight(f"shared.{w.name}", w.shape, w.split) for w in self.shared.weights(width))
        if self.shared_gate:
            yield Weight("shared_gate.weight", (1, width))

    def active_params(self, width: int) -> int:
        weights = list(self.weights(width))
        routed = sum(w.num_params for w in weights if w.name.startswith("experts."))
        everyone = sum(w.num_params for w in weights) - routed
        return everyone + routed // self.num_experts * self.num_experts_per_tok


def _check_mlp(intermediate_size: int, activation: str | ClampedSwiGLU | Ungated) -> None:
    _require(intermediate_size > 0, f"intermediate_size must be positive, not {intermediate_size}")
    if isinstance(activation, str):
        check_activation(activation)


TokenMixer = Attention | SharedAttention | LatentAttention | RecurrentMixer
ChannelMixer = MLP | GatedMLP | MoE
