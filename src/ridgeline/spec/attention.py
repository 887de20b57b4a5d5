"""Define softmax attention over heads of keys and values, and attention that shares those of an earlier layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from ridgeline.spec.mixer import AnyMixer, Cut, Mixer, Traffic, require, share
from ridgeline.spec.norm import Norm
from ridgeline.spec.pattern import Pattern, capped
from ridgeline.spec.rope import Rope
from ridgeline.spec.sight import CAUSAL, Causal, Sight, WholeSequence
from ridgeline.spec.state import ALL, State
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import FLOAT, INT, KeysRead, Phases, StepSize


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position p: they are multiplied by 1 + beta * log(1 + floor((p + ahead) / every)).

    Llama 4 and Ministral 3 keep scores of long contexts apart with it (arXiv:2501.19399). by: "power" multiplies them
    by (1 + (p + ahead) / every) ** beta instead (Beam).
    """

    beta: float
    every: int
    ahead: int = 0
    by: Literal["log", "power"] = "log"

    def __post_init__(self) -> None:
        require(self.every > 0, f"the tokens after which queries grow must be positive, not {self.every}")
        require(self.ahead >= 0, f"ahead must not be negative, not {self.ahead}")


@dataclass(frozen=True, slots=True)
class Attention(Mixer):
    """Softmax attention with grouped keys and values: MHA, GQA and MQA by `num_kv_heads` (arXiv:2305.13245).

    Args:
        scale: Factor on q @ k.
        window: Number of keys that a token sees, its own included. None: all of them.
        softcap: Scores become softcap * tanh(scores / softcap).
        qk_norm: Norm of queries and of keys, with one norm for each head or one over all heads (`qk_norm_over`).
        sinks: Each head has a learned logit that takes part in its softmax and has no value (GPT-OSS). softcap does not
            apply to it.
        pattern: Which keys a token sees instead of, or in addition to, those of the window.
        out_gate: Results are multiplied by gate_act(out_gate(x)), number by number (arXiv:2505.06708).
        gate_over: Whether the gate has a number for each number of the results, or for each head.
        gate_act: Its activation.
        gate_bias: A learned number of each head is added to the gate before its activation (Beam).
        sight: How far ahead a token sees. Only causal attention can have a window.
        values_are_keys: There is no matrix for values: they are the keys before their norm and rotation (Gemma 4).
        value_eps: Values of each head are divided by the root of their mean square and this number; None: they are not.
        alibi: A score loses the head's slope for each token between the query and the key (arXiv:2108.12409). The
            slopes fall from 2^(-alibi / heads) to 2^-alibi, in equal ratios. None: no slopes.
        norms_rotated: Queries and keys are rotated before their norm, not after it (Hunyuan).
        growth: How queries grow with their position; None: they do not.
        clip: Queries, keys and values are limited to -clip..clip before all else; None: they are not (OLMo, DBRX).
    """

    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v")

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
    sight: Sight = CAUSAL
    values_are_keys: bool = False
    value_eps: float | None = None
    alibi: float | None = None
    norms_rotated: bool = False
    growth: QueryGrowth | None = None
    clip: float | None = None
    gate_over: Literal["number", "head"] = "number"
    gate_act: Literal["sigmoid", "softplus"] = "sigmoid"
    gate_bias: bool = False

    def __post_init__(self) -> None:
        heads, kv = self.num_heads, self.num_kv_heads
        require(min(heads, kv, self.head_dim) > 0, "num_heads, num_kv_heads and head_dim must be positive")
        require(heads % kv == 0, f"num_heads {heads} is not a multiple of num_kv_heads {kv}")
        require(self.window is None or self.window > 0, f"window must be positive, not {self.window}")
        require(self.pattern is None or self.window is not None, "a pattern of keys needs a window")
        ahead = not isinstance(self.sight, Causal)
        require(self.window is None or not ahead, "only causal attention can have a window")
        require(self.scale > 0, f"the attention scale must be positive, not {self.scale}")
        require(self.softcap is None or self.softcap > 0, f"softcap must be positive, not {self.softcap}")
        require(self.value_eps is None or self.value_eps >= 0, f"value_eps must not be negative, not {self.value_eps}")
        require(self.clip is None or self.clip > 0, f"clip must be positive, not {self.clip}")
        require(self.alibi is None or self.alibi > 0, f"alibi must be positive, not {self.alibi}")
        require(self.alibi is None or not ahead, "only causal attention can have slopes (alibi)")
        require(
            self.out_gate or self.has_usual_gate, "gate_over, gate_act and gate_bias are of a gate: they need out_gate"
        )
        one_norm = self.qk_norm_over == "all_heads"
        require(not (self.norms_rotated and one_norm), "norms_rotated needs a norm for each head, not one over all")
        if self.rope:
            require(self.rope.dim <= self.head_dim, f"rope dim {self.rope.dim} exceeds head_dim {self.head_dim}")

    @property
    def query_group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def value_size(self) -> int:
        return self.head_dim

    @property
    def has_usual_gate(self) -> bool:
        """Return whether a gate, if there is one, is a sigmoid of a number for each number of the results, and has no
        bias of heads.
        """
        return self.gate_over == "number" and self.gate_act == "sigmoid" and not self.gate_bias

    @property
    def slopes(self) -> tuple[float, ...]:
        """Return what the score of each head loses for each token of distance; none without `alibi`.

        If the number of heads is not a power of two, they are those of the next lower power, and then every second one
        of those of the next higher power (the paper's own code).
        """
        if self.alibi is None:
            return ()
        most = 1 << (self.num_heads - 1).bit_length()
        every = [2.0 ** (-self.alibi * (i + 1) / most) for i in range(most)]
        ordered = every if most == self.num_heads else every[1::2] + every[::2]
        return tuple(ordered[: self.num_heads])

    def weights(self, width: int) -> Iterator[Weight]:
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        yield from linear("q", width, q, bias=self.qkv_bias)
        yield from linear("k", width, kv, bias=self.qkv_bias)
        if not self.values_are_keys:
            yield from linear("v", width, kv, bias=self.qkv_bias)
        if self.out_gate:
            gates = self.num_heads if self.gate_over == "head" else q
            yield from linear("out_gate", width, gates, bias=self.qkv_bias and not self.gate_bias)
        if self.gate_bias:
            yield Weight("gate_bias", (self.num_heads,), "out")
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
            return State((part, part), block=self.sight.block)
        if self.pattern is None:
            return State((part, part), self.window - 1)
        return State((part, part), self.pattern.lookback(self.window), first_tokens=self.pattern.first_tokens)

    def attended(self, tokens: int, context: int) -> int:
        """Return the number of pairs of a query and a key that it sees, for the last `tokens` of `context` tokens."""
        if self.window is None:
            return self.sight.attended(tokens, context)
        return self._attended(context, self.window) - self._attended(context - tokens, self.window)

    def _attended(self, count: int, window: int) -> int:
        return self.pattern.attended(count, window) if self.pattern else capped(count, window)

    def work(self, tokens: int, context: int) -> int:
        return 2 * self.attended(tokens, context) * self.num_heads * self.head_dim

    def traffic(self, tokens: int, context: int) -> Traffic:
        state = self.state()
        kept = state.elements_at(context - tokens) + state.elements * tokens  # before the step, and in it
        read = min(kept, state.elements * self.attended(tokens, context))
        return Traffic(read, 2 * tokens * self.num_heads * self.head_dim)

    def cut(self) -> Cut:
        return Cut(self.num_heads, self.num_kv_heads)

    def part(self, size: int) -> Self:
        """Return a part of the heads. Ranks have copies of KV heads where there are fewer than ranks."""
        is_local = self.qk_norm is None or self.qk_norm_over == "head"
        require(is_local, "the norm over the queries of all heads would need the numbers of all ranks")
        require(self.alibi is None, "the slopes of heads (alibi) follow from the number of all heads")
        heads = share("heads", self.num_heads, size)
        return replace(self, num_heads=heads, num_kv_heads=share("KV heads", self.num_kv_heads, size, copies=True))

    def over_canvas(self, canvas: int) -> Self:
        """Return the attention of a pass over a canvas, whose tokens all see the same keys.

        With a window, a query counts as the last token of the canvas, and a window that is longer by the canvas gives
        it the keys that the first token sees, and the canvas. Without one, it sees the whole sequence.
        """
        if self.window is None:
            return replace(self, sight=WholeSequence())
        return replace(self, window=self.window - 1 + canvas)

    def seeing(self, sight: Sight) -> Self:
        return replace(self, sight=sight)

    def workspace(self, step: StepSize, width: int, keys: KeysRead) -> Phases:
        q = FLOAT * step.tokens * self.num_heads * self.head_dim
        kv = FLOAT * step.tokens * self.num_kv_heads * self.head_dim
        gate = q if self.out_gate else 0
        # q, k and v have up to two copies each while they are normalized and rotated. The gate has its sigmoid.
        during = gate + q + 2 * kv + self._paged_bytes(step, keys)
        return Phases(max(3 * q, gate + q + 3 * kv), during, 2 * q + 2 * kv + 3 * gate)

    def _paged_bytes(self, step: StepSize, keys: KeysRead) -> int:
        """Return the bytes of attention over pages: gathered keys and values, a block of scores, queries, results."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        # Keys and values; with more than one sequence, a product copies them once more into one array [n, K, D, S].
        key = FLOAT * kv_heads * self.head_dim
        several = min(keys.every, step.block // (kv_heads * self.head_dim))
        narrow = key if keys.is_narrow else 0  # rows as they are stored, before they are widened
        gathered = max(
            keys.one * (2 * key + narrow + 32), several * (3 * key + narrow + 32) if step.seqs > 1 else 0
        )  # fmt: skip
        # Scores, masked scores and their softmax; masks of a byte, and one more for each query head of a KV head.
        pairs = min(step.queries * keys.one, max(step.block // heads, keys.one))
        measured = self.alibi is not None or (self.pattern and self.pattern.measures_distances)
        distances = (2 * INT if measured else 0) + (FLOAT * (heads + 1) if self.alibi is not None else 0)
        scores = pairs * (3 * FLOAT * heads + heads // kv_heads + 6 + distances)
        return gathered + scores + 4 * FLOAT * step.queries * heads * self.head_dim

    def resident_numbers(self, width: int, *, several: bool) -> int:
        return 2 * (self.num_heads + self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class SharedAttention(Mixer):
    """Attention with its own queries over the keys and values of an earlier layer (CLA, arXiv:2405.12981).

    Args:
        source: Index of the layer whose keys and values it reads.
        attention: How it attends. Its heads of keys and values, their size and their rotation must be those of layer
            `source`, and its window must not see more than that layer keeps.

    It has neither weights for keys and values nor state. `ModelSpec` checks that the two layers fit.
    """

    source: int
    attention: Attention

    def __post_init__(self) -> None:
        require(self.source >= 0, f"source must be a layer's number, not {self.source}")

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

    @property
    def query_group(self) -> int:
        return self.attention.query_group

    @property
    def value_size(self) -> int:
        return self.attention.head_dim

    def weights(self, width: int) -> Iterator[Weight]:
        owned = ("k", "v", "k_norm")
        yield from (w for w in self.attention.weights(width) if w.name.split(".")[0] not in owned)

    def state(self) -> State:
        return State(())

    def reads(self) -> State:
        return self.attention.state()

    def state_layer(self, index: int) -> int:
        return self.source

    def work(self, tokens: int, context: int) -> int:
        return self.attention.work(tokens, context)

    def traffic(self, tokens: int, context: int) -> Traffic:
        return self.attention.traffic(tokens, context)

    def cut(self) -> Cut:
        return self.attention.cut()

    def part(self, size: int) -> Self:
        return replace(self, attention=self.attention.part(size))

    def workspace(self, step: StepSize, width: int, keys: KeysRead) -> Phases:
        return self.attention.workspace(step, width, keys)

    def resident_numbers(self, width: int, *, several: bool) -> int:
        return self.attention.resident_numbers(width, several=several)

    def cost_key(self) -> Self:
        return replace(self, source=0)

    def seeing(self, sight: Sight) -> Self:
        return replace(self, attention=self.attention.seeing(sight))

    def replaced_by(self, other: AnyMixer) -> Self:
        if not isinstance(other, Attention):
            raise ValueError("its layers share keys and values; such layers do not become another kind of mixer")
        return replace(self, attention=other)

    def misfit(self, owner: Attention) -> str | None:
        """Return why this layer cannot read the keys and values of `owner`; None if it can."""
        own = self.attention
        for name in ("num_kv_heads", "head_dim"):
            if (a := getattr(own, name)) != (b := getattr(owner, name)):
                return f"{name} is {a} here and {b} there"
        if own.rope != owner.rope:
            return "its queries must be rotated as the keys are"
        if own.sight != owner.sight:
            return "it must see as far ahead as that layer"
        reads, kept = own.state(), owner.state()
        if reads.lookback > kept.lookback:
            seen = "all tokens" if reads.lookback == ALL else f"{reads.lookback} tokens"
            return f"it looks back at {seen}, and {kept.lookback} are kept there"
        if reads.first_tokens > kept.first_tokens and kept.lookback != ALL:
            return (
                f"it sees the first {reads.first_tokens} tokens at any distance, and {kept.first_tokens} are kept there"
            )
        return None
