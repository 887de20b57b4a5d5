"""Define channel mixers: MLPs, and mixtures of MLPs (MoE), one frozen dataclass for each kind.

    weights(width)              names, shapes and split axes         -> loader, modules, inspect
    part(size)                  the mixer of one of `size` ranks     -> engine
    active_params(width)        parameters that one token meets      -> inspect
    workspace(tokens, width)    memory of its ops at their peak      -> engine settings, planner
    num_experts, shared, ...    what routing needs; 0 without it     -> planner
    choices, visits             experts to choose from; those that a token visits, as a mean

A boolean that changes the algorithm is a new type; a bias or a norm may be a field.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from ridgeline.spec.activation import XIELU, Activation, check_activation
from ridgeline.spec.mixer import require, share
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import FLOAT, INT


class DenseMLP(ABC):
    """Base class of channel mixers that compute every token with the same weights."""

    __slots__ = ()

    num_experts: ClassVar[int] = 0
    num_experts_per_tok: ClassVar[int] = 0
    choices: ClassVar[int] = 0
    visits: ClassVar[float] = 0.0
    shared: ClassVar[None] = None
    gated_parts: ClassVar[tuple[str, ...]] = ()  # prefixes of a gate and an up matrix that kernels interleave

    @abstractmethod
    def weights(self, width: int) -> Iterator[Weight]:
        """Yield its parameters."""

    def active_params(self, width: int) -> int:
        """Return the number of parameters that one token is multiplied with: all of them."""
        return sum(w.num_params for w in self.weights(width))

    @abstractmethod
    def part(self, size: int) -> Self:
        """Return the mixer of one of `size` ranks: all ranks have equal ones. Raises ValueError if it cannot be cut."""

    @abstractmethod
    def workspace(self, tokens: int, width: int) -> int:
        """Return an upper bound in bytes on the memory that its reference ops hold for a step of `tokens` tokens.

        A narrow matrix gives its result twice: in blocks, and joined.
        """


@dataclass(frozen=True, slots=True)
class MLP(DenseMLP):
    """down(act(up(x))) (GPT-2, GPT-NeoX)."""

    intermediate_size: int
    activation: Activation | XIELU
    bias: bool = False

    def __post_init__(self) -> None:
        _check_mlp(self.intermediate_size, self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("up", width, self.intermediate_size, bias=self.bias)
        if isinstance(self.activation, XIELU):
            yield from (Weight(f"xielu.{name}", (1,)) for name in ("alpha_p", "alpha_n"))
        yield from linear("down", self.intermediate_size, width, bias=self.bias, split="in")

    def part(self, size: int) -> Self:
        return replace(self, intermediate_size=share("neurons", self.intermediate_size, size))

    def workspace(self, tokens: int, width: int) -> int:
        inner = FLOAT * tokens * self.intermediate_size
        return max((6 if isinstance(self.activation, XIELU) else 2) * inner, inner + 2 * FLOAT * tokens * width)


@dataclass(frozen=True, slots=True)
class GatedMLP(DenseMLP):
    """down(act(gate_scale * gate(x)) * up(x)) (arXiv:2002.05202). gate_scale: 1 but in Falcon-H1."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gate_scale: float = 1.0

    gated_parts: ClassVar[tuple[str, ...]] = ("",)

    def __post_init__(self) -> None:
        _check_mlp(self.intermediate_size, self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("gate", width, self.intermediate_size, bias=self.bias)
        yield from linear("up", width, self.intermediate_size, bias=self.bias)
        yield from linear("down", self.intermediate_size, width, bias=self.bias, split="in")

    def part(self, size: int) -> Self:
        return replace(self, intermediate_size=share("neurons", self.intermediate_size, size))

    def workspace(self, tokens: int, width: int) -> int:
        inner = FLOAT * tokens * self.intermediate_size
        return max(4 * inner, inner + 2 * FLOAT * tokens * width)


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1), gate clamped to at most `limit`, up to -limit..limit (GPT-OSS)."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        require(self.limit > 0, f"the limit of a clamped SwiGLU must be positive, not {self.limit}")


@dataclass(frozen=True, slots=True)
class Ungated:
    """act(up): experts are down(act(up(x))), as MLP is (Nemotron 3)."""

    activation: Activation

    def __post_init__(self) -> None:
        check_activation(self.activation)


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """Experts in `count` equal groups of neighbors; a token chooses only from experts in the best `chosen` groups.

    score: the score of a group is that of its best expert (DeepSeek-V2, arXiv:2405.04434, 2.2.2) or the sum of its two
    best (DeepSeek-V3, 2412.19437). If groups have equal scores, the lower one is chosen.
    """

    count: int
    chosen: int
    score: Literal["best", "best_two"]

    def __post_init__(self) -> None:
        require(0 < self.chosen <= self.count, f"{self.chosen} chosen groups of experts are not in 1..{self.count}")


@dataclass(frozen=True, slots=True)
class SparseMixer:
    """Experts are chosen one after the other, each by a softmax of its own (arXiv:2409.12136, Phi-3.5-MoE).

    The weight of the best expert is its softmax among those whose logits are near: (best - logit) / max(|logit|, best)
    is at most 2 * tolerance. The next one is chosen in the same way, without those before it.
    """

    tolerance: float

    def __post_init__(self) -> None:
        require(self.tolerance >= 0, f"the tolerance of a sparse mixer must not be negative, not {self.tolerance}")


@dataclass(frozen=True, slots=True)
class IdentityExperts:
    """`count` more experts without parameters: the result of each is share * x (zero-computation experts,
    arXiv:2410.07348, 2509.01322).

    Their ids follow those of the experts with parameters. share: 1, and 1/n on each of n ranks, whose sum is x.
    """

    count: int
    share: float = 1.0

    def __post_init__(self) -> None:
        require(self.count > 0, f"the number of identity experts must be positive, not {self.count}")


@dataclass(frozen=True, slots=True)
class MoE:
    """A router sends each token to its `num_experts_per_tok` best MLPs (arXiv:1701.06538, 2401.04088).

    If experts have equal scores, the one with the lower index is chosen.

    Args:
        activation: Activation of the experts; Ungated: experts are down(act(up(x))).
        normalize: Whether the scores of the chosen experts are made to sum to one.
        router_bias, bias: Whether the router has a bias; whether all matrices of experts have one.
        scores: Router scores are a softmax over all experts, a sigmoid of each, or those of a SparseMixer.
        choice_bias: A number per expert is added to the scores that decide the choice, not to those that weigh the
            results (arXiv:2408.15664).
        groups: Limit the choice to groups of experts.
        scale: Factor on the scores of the chosen experts, after normalization.
        shared: An MLP that every token visits in addition (arXiv:2401.06066).
        shared_gate: Multiply the result of `shared` by the sigmoid of a number computed from the token (Qwen2-MoE).
        latent_size: Experts read and write vectors of this size; one matrix projects a token to it, another one back
            (Nemotron 3 Super).
        expert_scale: The weight of each expert that was chosen is multiplied by a learned number of the expert, after
            all else (Gemma 4).
        rates_logits: With `choice_bias`, the numbers are added to the router's logits, not to the scores (Kolibri).
        shared_scale: Factor on the result of `shared`.
        identity: More experts, whose result is their input (LongCat-Flash).
        weighs_inputs: The score of an expert is a factor of what the expert reads, not of its result (Llama 4).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    activation: Activation | ClampedSwiGLU | Ungated = "silu"
    normalize: bool = True
    router_bias: bool = False
    bias: bool = False
    scores: Literal["softmax", "sigmoid"] | SparseMixer = "softmax"
    choice_bias: bool = False
    groups: ExpertGroups | None = None
    scale: float = 1.0
    shared: GatedMLP | MLP | None = None
    shared_gate: bool = False
    latent_size: int | None = None
    expert_scale: bool = False
    rates_logits: bool = False
    shared_scale: float = 1.0
    identity: IdentityExperts | None = None
    weighs_inputs: bool = False

    def __post_init__(self) -> None:
        _check_mlp(self.intermediate_size, self.activation)
        require(
            0 < self.num_experts_per_tok <= self.choices,
            f"num_experts_per_tok {self.num_experts_per_tok} is not in 1..num_experts {self.choices}",
        )
        require(self.shared is not None or not self.shared_gate, "shared_gate needs a shared MLP to be the gate of")
        mixes = isinstance(self.scores, SparseMixer)
        require(not (mixes and (self.groups or self.choice_bias)), "a sparse mixer has neither groups nor a bias")
        if self.groups:
            size, rest = divmod(self.num_experts, self.groups.count)
            require(not rest, f"{self.num_experts} experts do not make {self.groups.count} equal groups")
            room = size * self.groups.chosen
            require(
                self.num_experts_per_tok <= room,
                f"num_experts_per_tok {self.num_experts_per_tok} is more than the {room} experts of the chosen groups",
            )
            require(size > 1 or self.groups.score == "best", "groups of one expert have no two best")
        plain = self.groups is None and self.latent_size is None and not self.expert_scale
        require(plain or self.identity is None, "identity experts have no groups, latent space or learned factors")
        latent = self.latent_size
        require(latent is None or latent > 0, f"latent_size must be positive, not {latent}")

    @property
    def choices(self) -> int:
        """Return the number of experts that a token chooses from, those without parameters included."""
        return self.num_experts + (self.identity.count if self.identity else 0)

    @property
    def visits(self) -> float:
        """Return how many experts with parameters a token visits, as a mean if all are equally likely."""
        return self.num_experts_per_tok * self.num_experts / self.choices

    @property
    def gated(self) -> bool:
        """Return whether experts have a gate matrix."""
        return not isinstance(self.activation, Ungated)

    @property
    def gated_parts(self) -> tuple[str, ...]:
        """Return the prefixes of a gate and an up matrix that kernels interleave."""
        shared = self.shared.gated_parts if self.shared else ()
        return (("experts.",) if self.gated else ()) + tuple(f"shared.{part}" for part in shared)

    def weights(self, width: int) -> Iterator[Weight]:
        experts, inner, outer = self.num_experts, self.intermediate_size, self.latent_size or width
        parts = ("gate", "up") if self.gated else ("up",)
        yield Weight("router.weight", (self.choices, width))
        if self.router_bias:
            yield Weight("router.bias", (self.choices,))
        if self.choice_bias:
            yield Weight("choice.bias", (self.choices,))
        if self.expert_scale:
            yield Weight("expert_scale.weight", (experts,))
        yield from (Weight(f"experts.{n}.weight", (experts, inner, outer), "out") for n in parts)
        yield Weight("experts.down.weight", (experts, outer, inner), "in")
        if self.bias:
            yield from (Weight(f"experts.{n}.bias", (experts, inner), "out") for n in parts)
            yield Weight("experts.down.bias", (experts, outer))
        if self.latent_size:
            yield from linear("latent_in", width, outer, split=None)
            yield from linear("latent_out", outer, width, split=None)
        if self.shared:
            yield from (replace(w, name=f"shared.{w.name}") for w in self.shared.weights(width))
        if self.shared_gate:
            yield Weight("shared_gate.weight", (1, width))

    def part(self, size: int) -> Self:
        """Return a part of each expert's neurons; routers and projections to a latent space are copied."""
        shared = self.shared.part(size) if self.shared else None
        same = replace(self.identity, share=self.identity.share / size) if self.identity else None
        inner = share("neurons", self.intermediate_size, size)
        return replace(self, intermediate_size=inner, shared=shared, identity=same)

    def active_params(self, width: int) -> int:
        """Return the number of parameters that one token is multiplied with: the largest one with identity experts."""
        weights = list(self.weights(width))
        routed = sum(w.num_params for w in weights if w.name.startswith("experts."))
        everyone = sum(w.num_params for w in weights) - routed
        return everyone + routed // self.num_experts * min(self.num_experts_per_tok, self.num_experts)

    def workspace(self, tokens: int, width: int) -> int:
        """Return an upper bound in bytes on the memory of the reference ops: all tokens may choose the same expert."""
        stream, inner = FLOAT * tokens * width, FLOAT * tokens * self.intermediate_size
        chosen = self.num_experts_per_tok
        routing = tokens * (28 * self.choices + 6 * INT * chosen)
        parts = 5 if isinstance(self.activation, ClampedSwiGLU) else 4
        read = FLOAT * tokens * self.latent_size if self.latent_size else stream  # by an expert, and written
        # The results of every choice are held three times while they are put in order.
        routed = routing + max((chosen + 1) * read + parts * inner, (3 * chosen + 1) * read)
        if self.latent_size:
            routed += stream + 2 * read
        return max(routed, 2 * stream + self.shared.workspace(tokens, width)) if self.shared else routed


def _check_mlp(intermediate_size: int, activation: str | ClampedSwiGLU | Ungated | XIELU) -> None:
    require(intermediate_size > 0, f"intermediate_size must be positive, not {intermediate_size}")
    if isinstance(activation, str):
        check_activation(activation)


@dataclass(frozen=True, slots=True)
class DenseWithExperts:
    """A dense MLP and a mixture of experts: the base of the channel mixers that combine both.

    Args:
        dense: The MLP that every token visits.
        moe: The experts and their router.
    """

    dense: GatedMLP
    moe: MoE

    shared: ClassVar[None] = None

    @property
    def num_experts(self) -> int:
        return self.moe.num_experts

    @property
    def num_experts_per_tok(self) -> int:
        return self.moe.num_experts_per_tok

    @property
    def choices(self) -> int:
        return self.moe.choices

    @property
    def visits(self) -> float:
        return self.moe.visits

    @property
    def intermediate_size(self) -> int:
        """Return the larger size of the two."""
        return max(self.dense.intermediate_size, self.moe.intermediate_size)

    @property
    def gated_parts(self) -> tuple[str, ...]:
        """Return the prefixes of a gate and an up matrix that kernels interleave."""
        return ("dense.", *self.moe.gated_parts)

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield the weights; a class that has norms besides adds them."""
        yield from (replace(w, name=f"dense.{w.name}") for w in self.dense.weights(width))
        yield from self.moe.weights(width)

    def active_params(self, width: int) -> int:
        """Return the largest number of parameters that one token is multiplied with."""
        whole = sum(w.num_params for w in self.weights(width))
        return whole - sum(w.num_params for w in self.moe.weights(width)) + self.moe.active_params(width)
