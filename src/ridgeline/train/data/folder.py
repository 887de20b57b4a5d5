"""Prepare a folder with everything that a run reads: a manifest, a tokenizer, and token shards for both sides.

manifest.json: documents of the corpus. tokenizer.json: learned from the training side, or given. train/: shard of the
training side. held-out/: shard of the held-out side, absent if nothing is held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from ridgeline.errors import DataError, RequestError
from ridgeline.train.data.corpus import Corpus, Document
from ridgeline.train.data.held_out import Split, split
from ridgeline.train.data.manifest import Manifest
from ridgeline.train.data.shards import Shard, write_shard
from ridgeline.train.data.vocabulary import save_tokenizer, tokenizer_hash, train_bpe
from ridgeline.train.ranks import Ranks

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
TRAIN, HELD_OUT = "train", "held-out"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainingData:
    """The prepared data of a run. folder: where it is, tokenizer files included. documents: texts of the training side,
    whose shard is `train`.

    held_out: shard of the held-out side; None if nothing is held out.
    """

    folder: Path
    held_out_share: float
    split_seed: int
    manifest: Manifest
    documents: Sequence[Document]
    tokenizer: tokenizers.Tokenizer
    train: Shard
    held_out: Shard | None


def prepare(
    corpus: Corpus, folder: Path, vocab_size: int, *, ranks: Ranks, held_out_share: float, seed: int = 0,
    tokenizer: tokenizers.Tokenizer | None = None, pinned: str | None = None, say: Say = lambda line: None,
) -> TrainingData:  # fmt: skip
    """Split the corpus, learn a vocabulary (or use the given one), and encode. Complete files of an earlier run are
    reused.

    The first rank writes the files, and the others read them. pinned: hash that the manifest must have. Raises
    DataError, which lists the differences, if the corpus is not that of the folder or not the pinned one, and
    RequestError for a vocabulary that is too small for all bytes or larger than vocab_size.
    """
    parts = split(corpus.documents, held_out_share, seed)
    manifest = Manifest.build(corpus, parts)
    if pinned:
        manifest.verify(pinned)
    path = folder / MANIFEST
    if path.exists():
        manifest.verify(Manifest.from_json(path.read_text(encoding="utf-8")))
    totals = manifest.totals()
    say(corpus.report())
    say(
        "; ".join(f"{side}: {t['documents']:,} documents, {t['bytes'] / 1e6:,.1f} MB" for side, t in totals.items())
        + f"; manifest {manifest.hash[:12]}"
    )
    if ranks.is_first:
        _write(parts, manifest, folder, vocab_size, tokenizer, say)
    ranks.wait()
    known = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    shards = {name: Shard.open(folder / name) for name in (TRAIN, HELD_OUT) if (folder / name).exists()}
    for shard in shards.values():
        shard.check_tokenizer(known)
    return TrainingData(folder, held_out_share, seed, manifest, parts.train, known, shards[TRAIN], shards.get(HELD_OUT))


def _write(
    parts: Split, manifest: Manifest, folder: Path, vocab_size: int, tokenizer: tokenizers.Tokenizer | None, say: Say
) -> None:
    """Write the files that are missing. The manifest comes first, so that data of another corpus is never mixed in."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{MANIFEST}.partial"
    partial.write_text(manifest.to_json(), encoding="utf-8")
    partial.replace(folder / MANIFEST)
    path = folder / TOKENIZER
    known = tokenizers.Tokenizer.from_file(str(path)) if path.exists() else None
    if known is not None and tokenizer is not None and tokenizer_hash(known) != tokenizer_hash(tokenizer):
        raise DataError(f"{folder} was made with another tokenizer than the given one; use that one, or another --out")
    if known is None:
        known = tokenizer
        if known is None:
            say(f"learning a vocabulary of {vocab_size:,} tokens")
            known = train_bpe([d.text for d in parts.train], vocab_size)
        _check_size(known, vocab_size)
        save_tokenizer(known, folder)
    _check_size(known, vocab_size)
    if (size := known.get_vocab_size()) < vocab_size:
        say(f"the vocabulary has {size:,} tokens; {vocab_size - size:,} of the model's {vocab_size:,} stay unused")
    for name, documents in ((TRAIN, parts.train), (HELD_OUT, parts.held_out)):
        if documents and not (folder / name).exists():
            say(f"encoding {len(documents):,} documents ({name})")
            write_shard(folder / name, documents, known, manifest.hash)


def _check_size(tokenizer: tokenizers.Tokenizer, vocab_size: int) -> None:
    if (size := max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1) > vocab_size:
        raise RequestError(
            f"the tokenizer has {size} tokens, but the model's vocabulary has only {vocab_size}; raise vocab_size"
        )


def check_room(train: Shard, batch_tokens: int) -> None:
    """Raise DataError if there is less text than one batch."""
    if train.info.num_tokens < batch_tokens:
        raise DataError(
            f"there are {train.info.num_tokens:,} tokens to train on, less than one batch of {batch_tokens:,}; "
            "give more text, or a smaller --batch-tokens"
        )
