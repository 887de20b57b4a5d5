"""Define per-layer embeddings: each layer gets numbers of its own for every token (Gemma 3n and 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.mixer import require_positive
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import FLOAT

TABLE = "layer_embed.weight"  # the table whose rows are looked up
EMBEDDED_NORM = "layer_embed_norm.weight"  # the weights of the norm, which all layers share


@dataclass(frozen=True, slots=True)
class LayerEmbeddings:
    """e[layer] = (norm(x project[layer] / sqrt(width)) + sqrt(size) table[token, layer]) / sqrt(2).

    x is the stream before the first layer. All layers have the same norm.

    Args:
        size: Numbers of a token for one layer.
        vocab_size: Rows of the table.
        norm: The norm of what is computed from the stream.
    """

    size: int
    vocab_size: int
    norm: RMSNorm

    def __post_init__(self) -> None:
        require_positive(size=self.size, vocab_size=self.vocab_size)

    def weights(self, width: int, layers: int) -> Iterator[Weight]:
        """Yield its parameters. layers: the number of layers."""
        yield Weight(TABLE, (self.vocab_size, layers * self.size))
        yield from linear("layer_embed_project", width, layers * self.size, split=None)
        yield from self.norm.weights(EMBEDDED_NORM.removesuffix(".weight"), self.size)

    def workspace(self, tokens: int, layers: int) -> int:
        """Return the bytes that a step of `tokens` tokens holds: rows of the table, and what the stream gives."""
        return 3 * FLOAT * tokens * layers * self.size


@dataclass(frozen=True, slots=True)
class EmbeddingBranch:
    """out(act(gate(x)) * e): the branch of a layer that reads the layer's embeddings e of the tokens.

    Args:
        size: Numbers of a token's embedding.
        activation: The activation of the gate.
    """

    size: int
    activation: Activation

    def __post_init__(self) -> None:
        require_positive(size=self.size)
        check_activation(self.activation)

    def weights(self, width: int) -> Iterator[Weight]:
        """Yield its parameters."""
        yield from linear("gate", width, self.size, split=None)
        yield from linear("out", self.size, width, split=None)
