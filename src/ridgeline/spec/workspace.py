"""Describe how much memory a step may use: its size, the keys that it gathers, and the peaks of a layer.

A mixer counts its own memory from these (`workspace` in mixer.py); cost/memory.py adds up a whole step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

FLOAT: Final = 4  # bytes of a float32, the type that all of this is counted in
INT: Final = 8  # bytes of an index
# Sizes of the pieces in which ops/reference and ops/host compute recurrent layers; all but SCAN_BLOCK are in tokens.
SCAN_CHUNK: Final = 16  # a chunk of a selective scan: the chunks of a block are computed at once
SCAN_BLOCK: Final = 2**22  # numbers [tokens, D, S] in each array of a scan at most; longer inputs take several blocks
SSD_CHUNK: Final = 64  # the longest chunk whose products are one matrix: a power of two
S4_BLOCK: Final = 64  # the longest block of a state space: a power of two
DELTA_CHUNK: Final = 64  # the longest chunk whose corrections are one triangular system: a power of two


KEPT_FEATURES: Final = 64  # positions of a sequence, besides its drafts, whose features a head's drafter keeps


def feature_rows(rows: int, drafts: int, tokens: int) -> int:
    """Return how many features the drafter of a head holds (runtime/features.py).

    rows: lines of the page tables, with the one that no sequence has. drafts: draft tokens of a sequence in a step.
    tokens: tokens of a step that are kept as well.
    """
    return rows * (KEPT_FEATURES + 2 * (drafts + 1)) + 1 + tokens


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step that settings allow.

    Args:
        tokens: Tokens in one step.
        rows: Sequences that have a line in the page tables.
        length: Tokens of the longest sequence.
        block: Largest number of scores, and of numbers of keys, that attention holds at once.
        drafts: Draft tokens of a sequence in one step.
    """

    tokens: int
    rows: int
    length: int
    block: int
    drafts: int

    @property
    def seqs(self) -> int:
        """Return the number of sequences that can be in one step."""
        return min(self.tokens, self.rows)

    @property
    def replays(self) -> int:
        """Return how many tokens recurrent layers compute again, because they were draft tokens before."""
        return self.seqs * self.drafts

    @property
    def queries(self) -> int:
        """Return the number of tokens after padding, which at most doubles that of sequences of different lengths."""
        return self.tokens if self.seqs == 1 else 2 * self.tokens


class KeysRead(NamedTuple):
    """Keys that attention gathers from pages in one step.

    one: tokens of one sequence at most, in whole pages. every: tokens of all sequences, padding included. is_narrow:
    whether rows are stored in another type than float32, so that they are widened after they are gathered.
    """

    one: int
    every: int
    is_narrow: bool


class Phases(NamedTuple):
    """Bytes that a token mixer holds, besides the residual stream and norms.

    before: the peak while its inputs (queries, keys, values) are computed. during: the peak while it attends.
    held: bytes that stay allocated until the layer ends. A recurrent mixer reports its whole peak as `before`.
    """

    before: int
    during: int = 0
    held: int = 0


def in_chunks(tokens: int, padded: int, seqs: int) -> tuple[int, int]:
    """Return how many tokens and how many chunks of SSD_CHUNK tokens `seqs` sequences become when they are padded.

    padded: tokens along the sequences, padding to equal lengths included. A sequence that is shorter than a chunk is in
    a chunk that `padded` has counted already.
    """
    ends = min(seqs, max(1, tokens // SSD_CHUNK))
    return padded + SSD_CHUNK * ends, padded // SSD_CHUNK + seqs
