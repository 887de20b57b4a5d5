"""Measure associative recall: how often a model finds the value of a key that it has read (MQAR, arXiv:2312.04927).

A sequence has pairs of a key and a value, then `distance` other tokens, then all keys again in another order, each with
its value behind it. The model must predict each value after its key. Keys, values and the tokens between them are drawn
at random from the model's vocabulary, all different within a sequence except for the tokens between. So nothing but the
sequence itself tells the values. Averages over text hide the loss of this ability.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.evals.estimates import Estimate, block_mean
from ridgeline.evals.perplexity import estimate_json
from ridgeline.evals.scores import logit_blocks
from ridgeline.evals.windows import BATCH_TOKENS, Batch
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.logits import Ints

PAIRS = (4, 8, 16, 32)
DISTANCES = (0, 64, 256, 512)
QUERIES, LEAST_SEQUENCES = 256, 8  # of a cell


@dataclass(frozen=True, slots=True)
class Cell:
    """Associative recall for one number of pairs and one distance.

    accuracy: share of queries for which the right value is the most likely one of all values of the sequence. exact:
    share for which it is the most likely token of the whole vocabulary. Both are None if the sequence is longer than
    the model's context.
    """

    pairs: int
    distance: int
    accuracy: Estimate | None
    exact: Estimate | None
    num_queries: int

    @property
    def chance(self) -> float:
        """Return the accuracy of a model that knows nothing."""
        return 1.0 / self.pairs


@dataclass(frozen=True, slots=True)
class Recall:
    """Associative recall for all numbers of pairs and distances."""

    cells: tuple[Cell, ...]

    @property
    def measured(self) -> tuple[Cell, ...]:
        """Return the cells whose sequences fit the model's context."""
        return tuple(cell for cell in self.cells if cell.accuracy)

    @property
    def mean(self) -> float:
        """Return the mean accuracy of the cells that were measured."""
        return float(np.mean([cell.accuracy.value for cell in self.measured if cell.accuracy]))

    @property
    def mean_exact(self) -> float:
        """Return the mean share of values that are the most likely token of the whole vocabulary."""
        return float(np.mean([cell.exact.value for cell in self.measured if cell.exact]))

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, None for unknown ones."""
        cells = [
            {
                "pairs": cell.pairs, "distance": cell.distance, "num_queries": cell.num_queries, "chance": cell.chance,
                **estimate_json("accuracy", cell.accuracy), **estimate_json("exact", cell.exact),
            }
            for cell in self.cells
        ]  # fmt: skip
        return {"recall": self.mean, "recall_exact": self.mean_exact, "cells": cells}


def measure_recall(
    loaded: LoadedModel, tokens: Sequence[int], prefix: Sequence[int] = (), *, pairs: Sequence[int] = PAIRS,
    distances: Sequence[int] = DISTANCES, seed: int = 0, batch_tokens: int = BATCH_TOKENS,
    on_tokens: Callable[[int], None] = lambda read: None,
) -> Recall:  # fmt: skip
    """Measure associative recall.

    Args:
        tokens: Ids from which keys, values and all other tokens are drawn; see `recall_tokens`.
        prefix: Ids before each sequence, such as a BOS.
        batch_tokens: Tokens of one forward pass.
        on_tokens: Called with the number of tokens read since the last call; `num_recall_tokens` in total.

    Raises:
        RequestError: if there are too few tokens for the pairs, and if no sequence fits the model's context.
    """
    need, usable = 2 * max(pairs) + 2, sorted(set(tokens) - set(prefix))
    if len(usable) < need:
        raise RequestError(f"recall of {max(pairs)} pairs needs {need} different tokens, and there are {len(usable)}")
    cells = []
    for n in pairs:
        for distance in distances:
            length = len(prefix) + 4 * n + distance
            if length > loaded.max_model_len:
                cells.append(Cell(n, distance, None, None, 0))
                continue
            rng = np.random.default_rng([seed, n, distance])
            drawn = [draw_sequence(usable, n, distance, rng) for _ in range(num_sequences(n))]
            parts = [_hits(loaded, some, prefix, n, on_tokens) for some in _groups(drawn, batch_tokens)]
            among, exact = (block_mean(hits, [n] * len(drawn)) for hits in np.concatenate(parts, axis=1))
            cells.append(Cell(n, distance, among, exact, n * len(drawn)))
    found = Recall(tuple(cells))
    if not found.measured:
        raise RequestError(f"no sequence of the recall test fits the model's context of {loaded.max_model_len} tokens")
    return found


def num_sequences(pairs: int) -> int:
    """Return the number of sequences of a cell."""
    return max(LEAST_SEQUENCES, QUERIES // pairs)


def num_recall_tokens(
    max_model_len: int, prefix: int = 0, pairs: Sequence[int] = PAIRS, distances: Sequence[int] = DISTANCES
) -> int:
    """Return the number of tokens that a model reads in `measure_recall`. prefix: tokens before each sequence."""
    lengths = ((prefix + 4 * n + distance, num_sequences(n)) for n in pairs for distance in distances)
    return sum(length * count for length, count in lengths if length <= max_model_len)


def draw_sequence(tokens: Sequence[int], pairs: int, distance: int, rng: np.random.Generator) -> Ints:
    """Return the ids [4 * pairs + distance] of one sequence. tokens: all different."""
    drawn = rng.permutation(np.asarray(tokens, np.int64))
    both, others = drawn[: 2 * pairs].reshape(pairs, 2), drawn[2 * pairs :]
    between = others[rng.integers(0, len(others), distance)]
    return np.concatenate([both.ravel(), between, both[rng.permutation(pairs)].ravel()])


def recall_tokens(tokenizer: Tokenizer, vocab_size: int, least: int = 2 * max(PAIRS) + 64) -> list[int]:
    """Return the tokens of a vocabulary that are words: letters alone, at least two, perhaps after a space.

    With fewer than `least` of them, all tokens are returned that are not special.
    """
    known = [i for i in range(min(vocab_size, tokenizer.vocab_size)) if i not in tokenizer.special_ids]
    texts = {i: tokenizer.decode([i], skip_special_tokens=False) for i in known}
    words = [i for i, text in texts.items() if len(word := text.removeprefix(" ")) > 1 and word.isalpha()]
    return words if len(words) >= least else known


def _groups(sequences: Sequence[Ints], batch_tokens: int) -> Iterator[Sequence[Ints]]:
    count = max(1, batch_tokens // len(sequences[0]))
    return (sequences[start : start + count] for start in range(0, len(sequences), count))


def _hits(
    loaded: LoadedModel, sequences: Sequence[Ints], prefix: Sequence[int], pairs: int, on_tokens: Callable[[int], None]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return [2, sequences * pairs]: 1 for a query whose value is the most likely one of all values, and of all tokens,
    otherwise 0.
    """
    inputs = [[*prefix, *ids[:-1].tolist()] for ids in sequences]
    length = len(inputs[0])
    queries = np.arange(length - 2 * pairs + 1, length, 2)  # rows of the keys that are asked for
    rows = np.concatenate([queries + i * length for i in range(len(inputs))])
    values = np.stack([ids[-2 * pairs :][1::2] for ids in sequences])  # in the order of the queries
    targets, candidates = values.ravel(), values.repeat(pairs, 0)
    found, at = [], 0
    for logits in logit_blocks(loaded, Batch(inputs, rows, targets)):
        wanted, some = targets[at : at + len(logits)], candidates[at : at + len(logits)]
        among = np.take_along_axis(logits, some, 1).argmax(axis=1)
        found.append(np.stack([some[np.arange(len(some)), among] == wanted, logits.argmax(axis=1) == wanted]))
        at += len(logits)
    on_tokens(len(inputs) * (length + 1))
    return np.concatenate(found, axis=1).astype(np.float64)
