"""A head for speculative decoding in host memory, and what a format must offer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ridgeline.errors import CheckpointError
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.spec.heads import HeadSpec

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class HeadFile:
    """A head: its spec, its weights by our names, and the target's token of each draft token.

    Args:
        vocabulary: [draft_vocab_size]; None if the head proposes the whole vocabulary.
        format: Name of the format that it was read from.
        target: Name or path of the target, if the folder names it.
        depth: Number of draft tokens that its config recommends; None without.
        accuracies: For each head of a Medusa model how often its token of each rank is right; () if the card does not
            say.
    """

    spec: HeadSpec
    weights: Mapping[str, HostTensor]
    vocabulary: Ids | None = None
    format: str = ""
    target: str | None = None
    depth: int | None = None
    accuracies: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if (problem := vocabulary_problem(self.spec, self.vocabulary)) is not None:
            raise CheckpointError(problem)


class HeadFormat(Protocol):
    """A format of folders: config.json and a file of tensors."""

    name: str
    file: str  # name of the file of tensors that it writes

    def matches(self, config: Mapping[str, Any], keys: frozenset[str]) -> bool:
        """Return whether a folder has this format. keys: names of its tensors."""
        ...

    def read(self, config: Mapping[str, Any], files: TensorFiles) -> HeadFile:
        """Read a head. Raises ConfigError and CheckpointError."""
        ...

    def write(self, head: HeadFile) -> tuple[dict[str, Any], dict[str, HostTensor]]:
        """Return config.json and the tensors of a head. Raises RequestError for one that the format cannot hold."""
        ...


def vocabulary_problem(spec: HeadSpec, vocabulary: Ids | None) -> str | None:
    """Return why a table of draft tokens does not fit a head; None if it fits."""
    if vocabulary is None:
        if not spec.has_table:
            return None
        return (
            f"the head proposes {spec.draft_vocab_size} of {spec.vocab_size} tokens, and its table of them is missing"
        )
    if vocabulary.shape != (spec.draft_vocab_size,):
        return f"the table of draft tokens has shape {list(vocabulary.shape)}, not [{spec.draft_vocab_size}]"
    if not spec.has_table:
        return "the head proposes the whole vocabulary, and has a table of draft tokens that changes their order"
    if vocabulary.size and not 0 <= int(vocabulary.min()) <= int(vocabulary.max()) < spec.vocab_size:
        wrong = next(int(t) for t in vocabulary if not 0 <= t < spec.vocab_size)
        return f"the table of draft tokens has token {wrong}; the vocabulary has {spec.vocab_size}"
    if len(np.unique(vocabulary)) < len(vocabulary):
        return "the table of draft tokens names a token twice"
    return None
