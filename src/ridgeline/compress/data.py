"""Cut texts into calibration sequences and a held-out part, and check that they suit the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document, read_texts
from ridgeline.load.tokenizer import Tokenizer

UNKNOWN_NAMES = frozenset(("<unk>", "[UNK]", "<|unk|>", "<unk_token>"))
UNKNOWN_LIMIT = 0.05  # share of tokens above which the text does not look like one for this model
NAMED = 3  # files that the report names in one place
HELD_OUT_SHARE = 0.2  # most of the text that is held out


@dataclass(frozen=True, slots=True)
class Samples:
    """Sequences of equal length from a text, of which none is in both parts.

    training: every sequence that is not held out, those for calibration included. notes: remarks for the user about the
    text.
    """

    calibration: Sequence[Sequence[int]]
    held_out: Sequence[Document]
    notes: tuple[str, ...] = ()
    training: Sequence[Sequence[int]] = ()


def read_samples(
    paths: Iterable[str | Path], tokenizer: Tokenizer, *, length: int, count: int, held_out_tokens: int, seed: int,
    train_tokens: int = 0,
) -> Samples:  # fmt: skip
    """Read texts, one behind the other, and draw sequences of them.

    Args:
        length: tokens of a sequence. count: calibration sequences. held_out_tokens: most tokens of the held-out part,
            which is at most a fifth of the text. seed: random seed of the draw. train_tokens: tokens to train on, for
            which more of the text is read.

    Raises:
        RequestError: for a path without a text, and for a text that has not two sequences.
    """
    skipped: list[str] = []
    wanted = 2 * (max(count * length, train_tokens) + held_out_tokens)
    ids: list[int] = []
    for text in read_texts(paths, skipped.append):
        ids += tokenizer.encode(text.text)
        if len(ids) >= wanted:
            break
    num = len(ids) // length
    if num < 2:
        raise RequestError(
            f"the calibration text (--calibrate) has {len(ids):,} tokens; it needs two sequences of {length} tokens, "
            "one to calibrate and one to measure: give more text or a shorter --sequence-length"
        )
    sequences = [ids[i * length : (i + 1) * length] for i in range(num)]
    num_held = max(1, min(int(num * HELD_OUT_SHARE), held_out_tokens // length))
    drawn = np.random.default_rng(seed).permutation(num)
    held = [Document(sequences[i], name=f"sequence {i}") for i in sorted(drawn[:num_held])]
    chosen = [sequences[i] for i in sorted(drawn[num_held : num_held + count])]
    training = [sequences[i] for i in sorted(drawn[num_held:])] if train_tokens else []
    notes = [f"skipped {reason}" for reason in skipped[:NAMED]]
    if len(skipped) > NAMED:
        notes.append(f"skipped {len(skipped) - NAMED} more files")
    if len(chosen) < count:
        notes.append(f"the text has {len(chosen)} sequences of {length} tokens to calibrate, fewer than {count}")
    if (share := unknown_share(ids, tokenizer)) > UNKNOWN_LIMIT:
        notes.append(
            f"{share:.0%} of the calibration tokens are unknown to the model's vocabulary or single bytes: take a text "
            "like those that the model will read"
        )
    return Samples(chosen, held, tuple(notes), training)


def unknown_share(ids: Sequence[int], tokenizer: Tokenizer) -> float:
    """Return the share of tokens that stand for no whole character, or for one that the vocabulary lacks."""
    counts = Counter(ids)
    unknown = sum(n for token, n in counts.items() if _is_unknown(token, tokenizer))
    return unknown / max(1, len(ids))


def _is_unknown(token: int, tokenizer: Tokenizer) -> bool:
    if tokenizer.token_name(token) in UNKNOWN_NAMES:
        return True
    return "\ufffd" in tokenizer.decode([token], skip_special_tokens=False)
