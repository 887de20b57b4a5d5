"""Define encoders: models whose passes give hidden states, from which vectors or scores of labels follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ridgeline.spec.activation import Activation
from ridgeline.spec.norm import Norm
from ridgeline.spec.weight import Weight

Pool = Literal["cls", "mean", "last"]  # which hidden states of a text become its vector
TYPE_TABLE = "type_embed.weight"
LABEL_MATRICES = ("labels.dense.weight", "labels.out.weight")


@dataclass(frozen=True, slots=True)
class LabelHead:
    """Scores of labels: out(norm(activation(dense(x)))), where x is the first hidden state or the mean of all.

    Args:
        labels: Number of scores of a text or of a pair of texts.
        activation: The function after the dense matrix.
        pool: Which hidden states it reads.
        dense_bias: Whether a number is added to each result of the dense matrix. The scores always have one.
        norm: The norm after the activation; None: there is none.
        scores: How the score of a single label follows from the logit: by a sigmoid, or it is the logit.
    """

    labels: int
    activation: Activation | Literal["tanh"] = "tanh"
    pool: Literal["cls", "mean"] = "cls"
    dense_bias: bool = True
    norm: Norm | None = None
    scores: Literal["sigmoid", "logits"] = "sigmoid"

    def __post_init__(self) -> None:
        if self.labels < 1:
            raise ValueError(f"labels must be positive, not {self.labels}")

    def weights(self, width: int) -> Iterator[Weight]:
        yield Weight("labels.dense.weight", (width, width))
        if self.dense_bias:
            yield Weight("labels.dense.bias", (width,))
        if self.norm:
            yield from self.norm.weights("labels.norm", width)
        yield Weight("labels.out.weight", (self.labels, width))
        yield Weight("labels.out.bias", (self.labels,))


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model that gives hidden states instead of logits: it has no output head, and keeps no state between passes.

    Args:
        num_token_types: Rows of a table from which each token gets a vector by its type: 0 in the first text of a pair,
            1 in the second (BERT). 0: the model has no such table.
        head: The head that gives scores of labels; None: the model has none.
    """

    num_token_types: int = 0
    head: LabelHead | None = None

    def __post_init__(self) -> None:
        if self.num_token_types < 0:
            raise ValueError(f"num_token_types must not be negative, not {self.num_token_types}")

    def weights(self, width: int) -> Iterator[Weight]:
        if self.num_token_types:
            yield Weight(TYPE_TABLE, (self.num_token_types, width))
        if self.head:
            yield from self.head.weights(width)


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A matrix after the pooling: activation(x @ weight.T + bias). folder: where its weights are, in the model's."""

    folder: str
    size_in: int
    size_out: int
    bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, slots=True)
class Vectors:
    """How a model's folder says that hidden states become a vector, and how texts are to be prepared.

    Args:
        pool: Which hidden states are read; None: the folder does not say.
        dense: Matrices that follow.
        normalize: Whether the vector is divided by its length.
        prompts: Texts by name that are put before a text, if a request names one.
        max_tokens: Most tokens of a text; None: as many as the model has positions.
        dimensions: Lengths to which a vector may be cut, ascending (Matryoshka, arXiv:2205.13147); () if none.
        any_dimension: Whether a vector may be cut to any length.
        similarity: How two vectors are compared: by the cosine of their angle, or by their dot product.
    """

    pool: Pool | None = None
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = False
    prompts: tuple[tuple[str, str], ...] = ()
    max_tokens: int | None = None
    dimensions: tuple[int, ...] = ()
    any_dimension: bool = False
    similarity: Literal["cosine", "dot"] = "cosine"

    def size(self, width: int) -> int:
        """Return the numbers of a vector. width: the model's hidden size."""
        return self.dense[-1].size_out if self.dense else width
