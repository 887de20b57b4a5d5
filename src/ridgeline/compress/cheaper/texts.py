"""Divide texts into those of the repair and those on which models are measured, which nothing else sees."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.spec.folders import write_whole
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.distill.data import sides

MEASURED_TOKENS = 16_384  # most held-out tokens on which a model is measured


@dataclass(frozen=True, slots=True)
class Texts:
    """Both parts of the texts. training: a .jsonl file. held_out: sequences."""

    training: Path
    held_out: Sequence[Document]


def key_of(corpus: Corpus) -> str:
    """Return a hash of all texts of a corpus."""
    found = hashlib.sha256()
    for document in corpus.documents:
        found.update(f"{document.name}\0{document.text}\0".encode())
    return found.hexdigest()[:16]


def divide(corpus: Corpus, folder: Path, tokenizer: Tokenizer, *, held_out: float, length: int, seed: int) -> Texts:
    """Write the texts of the repair into a folder, and return both parts. Whole documents are held out where there are
    enough of them.

    Raises RequestError if nothing is left to measure on.
    """
    train, rest, _ = sides(corpus.documents, held_out, seed)
    path = folder / "training.jsonl"
    if not path.is_file():
        write_whole(path, "".join(json.dumps({"text": text}) + "\n" for text in train if text.strip()))
    found: list[Document] = []
    left = MEASURED_TOKENS
    for text in rest:
        if left <= 0:
            break
        ids = tokenizer.encode(text)[:left]
        left -= len(ids)
        found += [Document(ids[at : at + length]) for at in range(0, len(ids), length)]
    found = [document for document in found if document.num_scored]
    if not found:
        raise RequestError(f"a share of {held_out:g} of the texts leaves nothing to measure on; raise --held-out")
    return Texts(path, found)
