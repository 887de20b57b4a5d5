"""Turn texts into token shards with the tokenizer of a model: one side to train on, and one held out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ridgeline.errors import DataError
from ridgeline.load.checkpoint import Checkpoint
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.load.tokenizer_files import read_folder
from ridgeline.train.data.corpus import Corpus, Document
from ridgeline.train.data.shards import Shard, write_tokens
from ridgeline.train.drafts.prompts import cut_texts
from ridgeline.train.ranks import Ranks

LEAST_DOCUMENTS = 100  # a corpus of fewer documents is cut inside each of them
LEAST_HELD_OUT, MOST_HELD_OUT = 4096, 65_536  # tokens; between them, the held-out side has HELD_OUT_SHARE of the run's
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class DistillData:
    """Token shards of both sides. key: hash of all that determines them."""

    train: Shard
    held_out: Shard
    key: str


@dataclass(frozen=True, slots=True)
class Encoder:
    """A model's tokenizer. end: id of the token after a whole document; None: there is none."""

    tokenizer: Tokenizer
    backend: tokenizers.Tokenizer
    end: int | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Encoder:
        """Return the tokenizer of a model's folder. Raises TokenizerError if it has none."""
        tokenizer = Tokenizer.from_folder(checkpoint.folder)
        end = min(checkpoint.eos_token_ids, default=tokenizer.eos_token_id)
        return cls(tokenizer, read_folder(checkpoint.folder).backend, end)

    def ids(self, text: str, *, is_whole: bool) -> list[int]:
        """Return the ids of a document, with those that the model expects before it, and after a whole one."""
        found = self.tokenizer.encode(text)
        return [*found, self.end] if is_whole and self.end is not None and found[-1:] != [self.end] else found


def prepare_data(
    corpus: Corpus, folder: Path, encoder: Encoder, ranks: Ranks, *, tokens: int, held_out: float, repeat: int,
    seed: int,
) -> DistillData:  # fmt: skip
    """Encode the texts of a corpus, or read what an earlier run with these texts wrote into the folder.

    tokens: number of tokens to train on. held_out: share of the texts that is held out; of these, a number of tokens is
    kept that suits the run. Raises DataError if the texts have too few tokens.
    """
    train, rest, is_whole = sides(corpus.documents, held_out, seed)
    limit = round(min(MOST_HELD_OUT, max(LEAST_HELD_OUT, HELD_OUT_SHARE * tokens)))
    facts = [encoder.backend.to_str(), encoder.end, limit, train, rest]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    paths = folder / f"{key}-train", folder / f"{key}-held-out"
    if ranks.is_first:
        for path, texts, most in zip(paths, (train, rest), (None, limit), strict=True):
            if not path.exists():
                _write(path, texts, encoder, key, is_whole, most)
    ranks.wait()
    found = DistillData(Shard.open(paths[0]), Shard.open(paths[1]), key)
    if (given := found.train.info.num_tokens * repeat) < tokens:
        times = f", read {repeat:,} times," if repeat > 1 else ""
        need = -(-tokens // found.train.info.num_tokens)
        raise DataError(
            f"the texts have {found.train.info.num_tokens:,} tokens to train on, which{times} are fewer than the "
            f"{tokens:,} of --tokens; give more text, --tokens {given} or --repeat {need}"
        )
    return found


def sides(documents: Sequence[Document], held_out: float, seed: int) -> tuple[list[str], list[str], bool]:
    """Return the texts to train on, those held out, and whether they are whole documents."""
    if len(documents) >= LEAST_DOCUMENTS:
        order = sorted(documents, key=lambda d: hashlib.sha256(f"{seed}:{d.name}".encode()).digest())
        count = max(1, round(held_out * len(order)))
        return [d.text for d in order[count:]], [d.text for d in order[:count]], True
    return *cut_texts(documents, held_out), False


def _write(path: Path, texts: Sequence[str], encoder: Encoder, key: str, is_whole: bool, most: int | None) -> None:
    """Write a shard. most: number of tokens after which it ends; None: no limit."""

    def documents() -> Iterator[Any]:
        left = most
        for text in texts:
            if ids := encoder.ids(text, is_whole=is_whole)[:left]:
                yield np.array(ids, np.int64)
            if left is not None and (left := left - len(ids)) <= 0:
                return

    write_tokens(path, documents(), encoder.backend, key, 0, -1 if encoder.end is None else encoder.end)
