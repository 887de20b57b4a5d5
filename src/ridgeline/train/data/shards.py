"""Store documents as token ids in a folder, to be read through a memory map.

tokens.bin   the ids of all documents in sequence: little-endian uint16, or uint32 for a vocabulary over 65,536
offsets.npy  int64 [num_documents + 1]: where each document begins in tokens.bin, and where the last one ends
shard.json   counts, and hashes of the tokenizer and the corpus

A document is <|endoftext|>, the ids of its text, <|endoftext|>. This one token serves as BOS and EOS, so the model
learns it both as the end of a text and as the beginning. If a text itself contains these characters, they are encoded
as ordinary text.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ridgeline.errors import DataError
from ridgeline.train.data.corpus import Document
from ridgeline.train.data.vocabulary import END_OF_TEXT, tokenizer_hash

Ints = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]
_TOKENS, _OFFSETS, _INFO = "tokens.bin", "offsets.npy", "shard.json"
_TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_ENCODED_TOGETHER = 1 << 20  # characters; encoding takes about 100 bytes per token


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The content of shard.json. dtype: uint16 or uint32. num_bytes: size of the texts in UTF-8, for losses in bits per
    byte.
    """

    num_documents: int
    num_tokens: int
    num_bytes: int
    vocab_size: int
    dtype: str
    end_of_text_id: int
    tokenizer_hash: str
    corpus_hash: str


@dataclass(frozen=True, slots=True)
class Shard:
    """Token ids of documents. tokens: uint16 or uint32 [num_tokens], memory-mapped. offsets: int64
    [num_documents + 1].
    """

    tokens: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any]
    info: ShardInfo

    @classmethod
    def open(cls, folder: Path) -> Shard:
        """Map the tokens of a shard and read the rest. Raises DataError for a missing, damaged or truncated file."""
        try:
            info = ShardInfo(**json.loads((folder / _INFO).read_text(encoding="utf-8")))
            offsets = np.load(folder / _OFFSETS, allow_pickle=False)
            tokens = np.memmap(folder / _TOKENS, _TYPES[info.dtype], mode="r").view(np.ndarray)
        except (OSError, ValueError, TypeError, KeyError, EOFError) as e:
            raise DataError(f"{folder} is not a complete token shard ({e}); write it again") from None
        fit = offsets.shape == (info.num_documents + 1,) and offsets.dtype == np.int64
        if not (
            fit and offsets[0] == 0 and np.all(np.diff(offsets) > 0) and offsets[-1] == len(tokens) == info.num_tokens
        ):
            raise DataError(
                f"{folder} is damaged: it has {len(tokens)} tokens and {offsets.size} offsets, but shard.json says "
                f"{info.num_tokens} tokens and {info.num_documents} documents; write it again"
            )
        return cls(tokens, offsets, info)

    def document(self, index: int) -> np.ndarray[Any, Any]:
        """Return the token ids of a document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def check_made_of(self, made_of: str) -> Shard:
        """Return this shard. Raises DataError if it was made from other texts or with other options."""
        if self.info.corpus_hash != made_of:
            raise DataError(
                "the shard of an earlier run was made from other texts or with other options; remove its folder"
            )
        return self

    def check_tokenizer(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raise DataError unless the ids were made with this tokenizer."""
        if (given := tokenizer_hash(tokenizer)) != self.info.tokenizer_hash:
            raise DataError(
                f"the shard was written with another tokenizer ({self.info.tokenizer_hash[:12]}..., not "
                f"{given[:12]}...); write it again, or use that tokenizer"
            )


def write_shard(
    folder: Path,
    documents: Sequence[Document],
    tokenizer: tokenizers.Tokenizer,
    corpus_hash: str,
    progress: Progress = lambda done, total: None,
) -> Shard:
    """Encode documents in their order into a new folder, and open it.

    progress: called from time to time with the number of encoded documents and the total. Raises as `write_tokens`
    does.
    """
    num_bytes = sum(len(d.text.encode()) for d in documents)
    return write_tokens(folder, encode(documents, tokenizer, progress), tokenizer, corpus_hash, num_bytes)


def write_tokens(
    folder: Path,
    documents: Iterable[np.ndarray[Any, Any]],
    tokenizer: tokenizers.Tokenizer,
    corpus_hash: str,
    num_bytes: int,
    end: int | None = None,
) -> Shard:
    """Write documents that are already token ids, with what separates them, into a new folder, and open it.

    num_bytes: size of their text. end: id of the token that ends a document; None: that of <|endoftext|>. The files are
    written to a temporary folder beside it, which is removed after an error. Raises DataError if the folder exists,
    there is no document, or the tokenizer has no <|endoftext|>.
    """
    end = _end_of(tokenizer) if end is None else end
    if folder.exists():
        raise DataError(f"{folder} exists already; remove it, or give another folder")
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        lengths = [0]
        with (draft / _TOKENS).open("wb") as file:
            for tokens in documents:
                file.write(tokens.astype(_TYPES[dtype]).tobytes())
                lengths.append(len(tokens))
        if len(lengths) == 1:
            raise DataError("there is no document to write")
        np.save(draft / _OFFSETS, np.cumsum(lengths, dtype=np.int64))
        info = ShardInfo(
            num_documents=len(lengths) - 1,
            num_tokens=sum(lengths),
            num_bytes=num_bytes,
            vocab_size=vocab_size,
            dtype=dtype,
            end_of_text_id=end,
            tokenizer_hash=tokenizer_hash(tokenizer),
            corpus_hash=corpus_hash,
        )
        (draft / _INFO).write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
        draft.chmod(0o755)  # mkdtemp creates private folders
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Shard.open(folder)


def _end_of(tokenizer: tokenizers.Tokenizer) -> int:
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise DataError(f"the tokenizer has no {END_OF_TEXT}, which separates documents; train one that has it")
    return int(end)


def encode(
    documents: Sequence[Document], tokenizer: tokenizers.Tokenizer, progress: Progress = lambda done, total: None
) -> Iterator[np.ndarray[Any, Any]]:
    """Yield each document's tokens, with <|endoftext|> on both sides."""
    end = _end_of(tokenizer)
    plain = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    plain.encode_special_tokens = True  # <|endoftext|> inside a text is encoded as ordinary text
    done = 0
    for texts in _together(documents):
        for encoding in plain.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array([end, *encoding.ids, end], np.int64)
        done += len(texts)
        progress(done, len(documents))


def _together(documents: Sequence[Document]) -> Iterator[list[str]]:
    """Yield groups of texts that are large enough to be encoded in parallel."""
    texts: list[str] = []
    size = 0
    for document in documents:
        texts.append(document.text)
        size += len(document.text)
        if size >= _ENCODED_TOGETHER:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts
