"""Cut prompts out of texts: one part of each text is for training, the rest for the final measurement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ridgeline.errors import DataError
from ridgeline.train.data.corpus import Document

LEAST_CHARS, MOST_CHARS = 8, 512  # characters of a prompt


def cut_texts(documents: Sequence[Document], held_out: float) -> tuple[list[str], list[str]]:
    """Return the texts for training, and the held-out ones: the last share of each document's characters.

    Raises DataError if one of the two has no text.
    """
    ends = [max(1, round(len(d.text) * (1.0 - held_out))) for d in documents]
    train = [d.text[:end] for d, end in zip(documents, ends, strict=True)]
    rest = [d.text[end:] for d, end in zip(documents, ends, strict=True)]
    for side, texts in (("train on", train), ("hold out", rest)):
        if not any(text.strip() for text in texts):
            raise DataError(
                f"there is no text to {side}: {sum(len(d.text) for d in documents):,} characters, of which a share of "
                f"{held_out:g} is held out; give more text, or another --held-out"
            )
    return train, rest


def draw_prompts(texts: Sequence[str], count: int, seed: int) -> list[str]:
    """Return pieces of texts that begin at the beginning of a line if one is near. The seed determines them."""
    rng = np.random.default_rng(seed)
    texts = [text for text in texts if text.strip()]
    sizes = np.array([len(text) for text in texts], np.float64)
    found = []
    for number in rng.choice(len(texts), count, p=sizes / sizes.sum()).tolist():
        text = texts[number]
        size = min(int(rng.integers(LEAST_CHARS, MOST_CHARS + 1)), len(text))
        start = int(rng.integers(0, len(text) - size + 1))
        least = max(0, start - size)
        line = text.rfind("\n", least, start) + 1
        start = line if line or least == 0 else start
        piece = text[start : start + size]
        found.append(piece if piece.strip() else text.lstrip()[:size])
    return found
