"""Describe heads for speculative decoding as data: Medusa (arXiv:2401.10774), EAGLE-1 and -2 (2401.15077, 2406.16858)
and EAGLE-3 (2503.01840).

A head belongs to one target, whose hidden states it reads. Ids of auxiliary layers follow vLLM: id i is the residual
stream that enters layer i, which is the output of layer i - 1 with its residual. 0 is the embedding; the number of
layers is the output of the last layer, before the last norm. Medusa and EAGLE-1 read the stream after the last norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ridgeline.spec.attention import Attention
from ridgeline.spec.mixer import require
from ridgeline.spec.mlp import GatedMLP
from ridgeline.spec.model import Layer, ModelSpec
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.regimes import Regimes, regimes_of
from ridgeline.spec.rope import Rope
from ridgeline.spec.weight import Weight, linear

NUM_AUX = 3  # streams that EAGLE-3 fuses, unless its config names others
LAYER = "layers.0"  # name of an EAGLE head's only layer


def default_aux(num_layers: int) -> tuple[int, ...]:
    """Return the auxiliary layer ids of a target if the head's config names none, as in vLLM and speculators."""
    return 2, num_layers // 2, num_layers - 3


def check_aux(ids: Sequence[int], num_layers: int) -> str | None:
    """Return why a target with `num_layers` layers has no streams with these ids; None if it has them."""
    if len(set(ids)) < len(ids) or not all(0 <= i <= num_layers for i in ids):
        return f"the auxiliary layers {list(ids)} are not different ids from 0 to {num_layers}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Base of all heads.

    Args:
        hidden_size: Hidden size of the head; that of its target unless the head says otherwise.
        vocab_size: Vocabulary of the target.
        draft_vocab_size: Tokens that the head can propose; fewer than `vocab_size` if it has a table of them.
        target_layers: Number of layers of the target, if it is known.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    target_layers: int | None = None

    kind: ClassVar[str]
    layers: ClassVar[tuple[Layer, ...]] = ()  # layers that keep state, for spec.groups.state_groups
    canvas: ClassVar[int] = 0
    tie_word_embeddings: ClassVar[bool] = False
    uses_target_head: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(min(self.hidden_size, self.vocab_size) > 0, "hidden_size and vocab_size must be positive")
        require(
            0 < self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size {self.draft_vocab_size} is not in 1..{self.vocab_size}, the target's vocabulary",
        )

    def weights(self) -> Iterator[Weight]:
        """Yield its parameters, without the target's."""
        raise NotImplementedError

    @property
    def target_hidden_size(self) -> int:
        """Return the hidden size of the target."""
        return self.hidden_size

    @property
    def has_table(self) -> bool:
        """Return whether it proposes only some tokens of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    def aux(self, num_layers: int) -> tuple[int, ...]:
        """Return the ids of the target's streams that it reads; none if it reads the one after the last norm."""
        return ()

    def products(self) -> Iterator[Weight]:
        """Yield the matrices that one draft step multiplies with, the target's head included if it uses it."""
        yield from (w for w in self.weights() if w.is_matrix and w.name != "embed.weight")
        if self.uses_target_head:
            yield from linear("head", self.hidden_size, self.vocab_size)

    def num_params(self) -> int:
        """Return the number of its parameters, without those of the target that it uses."""
        return sum(w.num_params for w in self.weights())

    def work(self, tokens: int, context: int) -> int:
        """Return the multiply-accumulates of the last `tokens` of `context` tokens."""
        own = sum(layer.mixer.work(tokens, context) for layer in self.layers if layer.mixer)
        return own + tokens * sum(w.num_params for w in self.products())

    def ropes(self) -> tuple[Rope, ...]:
        """Return the rotations in use."""
        return tuple(layer.mixer.rope for layer in self.layers if layer.mixer and layer.mixer.rope)

    def regimes(self, max_model_len: int) -> Regimes:
        """Return how rotations depend on the lengths of sequences of at most `max_model_len` tokens."""
        return regimes_of((rope.scaling for rope in self.ropes()), max_model_len)

    def misfit(self, target: ModelSpec) -> str | None:
        """Return why it cannot draft for a target; None if it can."""
        if self.target_hidden_size != target.hidden_size:
            return (
                f"the head is for a model of hidden size {self.target_hidden_size}, and {target.family} has "
                f"{target.hidden_size}"
            )
        if self.vocab_size != target.vocab_size:
            return f"the head is for a vocabulary of {self.vocab_size}, and {target.family} has {target.vocab_size}"
        layers = len(target.layers)
        if self.target_layers not in (None, layers):
            return f"the head is for a model of {self.target_layers} layers, and {target.family} has {layers}"
        return check_aux(self.aux(layers), layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec(Head):
    """Heads on the last hidden state, which propose the tokens at distances 2, 3, ... at once.

    Head k is matrix_k(x + silu(linear(x)) ...), with `num_blocks` residual blocks.

    Args:
        bias: Blocks have biases.
        shared_head: All heads have one output matrix, `heads.0`.
    """

    num_heads: int
    num_blocks: int = 1
    bias: bool = True
    shared_head: bool = False

    kind: ClassVar[str] = "medusa"

    def __post_init__(self) -> None:
        Head.__post_init__(self)
        require(self.num_heads > 0, f"a Medusa model needs at least one head, not {self.num_heads}")
        require(self.num_blocks >= 0, f"num_blocks must not be negative, not {self.num_blocks}")

    def weights(self) -> Iterator[Weight]:
        for h in range(self.num_heads):
            for b in range(self.num_blocks):
                yield from linear(f"blocks.{h}.{b}", self.hidden_size, self.hidden_size, bias=self.bias)
        for h in range(1 if self.shared_head else self.num_heads):
            yield from linear(f"heads.{h}", self.hidden_size, self.draft_vocab_size)

    def products(self) -> Iterator[Weight]:
        yield from Head.products(self)
        if self.shared_head:  # every head multiplies with it
            for _ in range(1, self.num_heads):
                yield from linear("heads.0", self.hidden_size, self.draft_vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleBase(Head):
    """Fields of all EAGLE heads: one decoder layer.

    Args:
        norm: Kind and epsilon of its norms.
        max_position_embeddings: Longest context in tokens.
        own_embedding: It has an embedding of its own; otherwise it reads the target's, without its scale.
    """

    attention: Attention
    mlp: GatedMLP
    norm: RMSNorm
    max_position_embeddings: int
    own_embedding: bool = True

    def __post_init__(self) -> None:
        Head.__post_init__(self)
        require(self.attention.rope is not None, "an EAGLE head's layer needs rotations")

    @property
    def layers(self) -> tuple[Layer, ...]:  # type: ignore[override]
        return (Layer(self.attention, self.mlp, self.norm),)

    def _embedding(self) -> Iterator[Weight]:
        if self.own_embedding:
            yield Weight("embed.weight", (self.vocab_size, self.hidden_size), "out")


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleSpec(EagleBase):
    """EAGLE-1 and EAGLE-2, which differ only in the tree: the target's features continued by one decoder layer.

    x = fc([embedding of the next token; feature]), then a layer without a norm before its attention. Its output is the
    next feature, and goes into the target's head without the target's norm.

    Args:
        fc_bias: fc has a bias.
    """

    fc_bias: bool = True

    kind: ClassVar[str] = "eagle"
    uses_target_head: ClassVar[bool] = True

    def weights(self) -> Iterator[Weight]:
        width = self.hidden_size
        yield from self._embedding()
        yield from linear("fc", 2 * width, width, bias=self.fc_bias, split=None)
        yield from (Weight(f"{LAYER}.mixer.{w.name}", w.shape, w.split) for w in self.attention.weights(width))
        yield from self.norm.weights(f"{LAYER}.mlp_norm", width)
        yield from (Weight(f"{LAYER}.mlp.{w.name}", w.shape, w.split) for w in self.mlp.weights(width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec(EagleBase):
    """EAGLE-3: three streams of the target fused to one feature, and a layer that reads it beside the embedding.

    feature = fc([stream a; stream b; stream c]) at first, later the head's own last output. The layer's q, k and v read
    [norm(embedding of the next token); norm(feature)]. The output goes through a norm into the head's own matrix.

    Args:
        aux_layers: Ids of the target's streams, by the convention of this module; None: `default_aux`.
        target_width: Hidden size of the target; None: `hidden_size`.
        norm_before_residual: The layer's residual is the normalized feature.
        norm_before_fc: A norm over the joined streams comes before fc.
        fc_norm: A norm over each stream comes before fc.
        norm_output: The next feature is the output after the last norm.
    """

    aux_layers: tuple[int, ...] | None = None
    target_width: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    kind: ClassVar[str] = "eagle3"

    def __post_init__(self) -> None:
        EagleBase.__post_init__(self)
        require(not (self.norm_before_fc and self.fc_norm), "norm_before_fc and fc_norm exclude each other")
        require(self.aux_layers is None or len(self.aux_layers) > 0, "aux_layers must not be empty")
        require(
            self.own_embedding or self.target_hidden_size == self.hidden_size,
            f"a head of hidden size {self.hidden_size} cannot read an embedding of {self.target_hidden_size}",
        )

    @property
    def target_hidden_size(self) -> int:
        return self.hidden_size if self.target_width is None else self.target_width

    @property
    def num_aux(self) -> int:
        """Return the number of streams that it reads."""
        return NUM_AUX if self.aux_layers is None else len(self.aux_layers)

    def aux(self, num_layers: int) -> tuple[int, ...]:
        return default_aux(num_layers) if self.aux_layers is None else self.aux_layers

    def weights(self) -> Iterator[Weight]:
        width, given = self.hidden_size, self.target_hidden_size
        yield from self._embedding()
        if self.norm_before_fc:
            yield from self.norm.weights("input_norm", self.num_aux * given)
        if self.fc_norm:
            for i in range(self.num_aux):
                yield from self.norm.weights(f"fc_norm.{i}", given)
        yield from linear("fc", self.num_aux * given, width, split=None)
        yield from self.norm.weights(f"{LAYER}.mixer_norm", width)
        yield from self.norm.weights(f"{LAYER}.hidden_norm", width)
        for w in self.attention.weights(width):
            is_input = w.name in ("q.weight", "k.weight", "v.weight", "out_gate.weight")
            shape = (w.shape[0], 2 * width) if is_input else w.shape
            yield Weight(f"{LAYER}.mixer.{w.name}", shape, w.split)
        yield from self.norm.weights(f"{LAYER}.mlp_norm", width)
        yield from (Weight(f"{LAYER}.mlp.{w.name}", w.shape, w.split) for w in self.mlp.weights(width))
        yield from self.norm.weights("norm", width)
        yield from linear("head", width, self.draft_vocab_size)


HeadSpec = MedusaSpec | EagleSpec | Eagle3Spec
