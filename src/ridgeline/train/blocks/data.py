"""Turn texts into token shards for a model that exists: a side to train on, and one held out with its bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ridgeline.errors import DataError
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.data.held_out import split
from ridgeline.train.data.shards import Shard, write_tokens
from ridgeline.train.distill.data import LEAST_DOCUMENTS, Encoder
from ridgeline.train.drafts.prompts import cut_texts
from ridgeline.train.ranks import Ranks


@dataclass(frozen=True, slots=True)
class BlocksData:
    """Token shards of both sides. key: hash of all that determines them."""

    train: Shard
    held_out: Shard
    key: str


def prepare_blocks(corpus: Corpus, folder: Path, encoder: Encoder, ranks: Ranks, held_out: float) -> BlocksData:
    """Encode the texts of a corpus, or read what an earlier run with these texts wrote into the folder.

    held_out: share of the documents that is held out, as `ridgeline train` does; of fewer than LEAST_DOCUMENTS, the
    share of each text at its end. Raises DataError if a side has no text.
    """
    if is_whole := len(corpus.documents) >= LEAST_DOCUMENTS:
        parts = split(corpus.documents, held_out)
        sides = [d.text for d in parts.train], [d.text for d in parts.held_out]
    else:
        sides = cut_texts(corpus.documents, held_out)
    key = hashlib.sha256(json.dumps([encoder.backend.to_str(), encoder.end, *sides]).encode()).hexdigest()[:32]
    paths = folder / f"{key}-train", folder / f"{key}-held-out"
    if ranks.is_first:
        for path, texts in zip(paths, sides, strict=True):
            if not path.exists():
                _write(path, texts, encoder, key, is_whole)
    ranks.wait()
    return BlocksData(Shard.open(paths[0]), Shard.open(paths[1]), key)


def unused_token(data: BlocksData, vocab_size: int, special: Sequence[int]) -> int:
    """Return the largest id that no text and no special token has. Raises DataError if there is none."""
    used = np.zeros(vocab_size, bool)
    used[list(special)] = True
    for shard in (data.train, data.held_out):
        used[np.unique(shard.tokens)] = True
    if used.all():
        raise DataError(
            f"the texts have all {vocab_size:,} tokens of the vocabulary, so none of them is free to be the mask; name "
            "a rare one with --mask-token"
        )
    return int(np.flatnonzero(~used)[-1])


def _write(path: Path, texts: Sequence[str], encoder: Encoder, key: str, is_whole: bool) -> None:
    num_bytes = sum(len(text.encode()) for text in texts)
    documents = (np.array(encoder.ids(text, is_whole=is_whole), np.int64) for text in texts)
    end = -1 if encoder.end is None else encoder.end
    write_tokens(path, (d for d in documents if len(d) > 1), encoder.backend, key, num_bytes, end)
