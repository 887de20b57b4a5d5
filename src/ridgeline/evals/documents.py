"""Read texts from files, and tokenize them for scoring.

A document is a file, or a row of a .jsonl file. Its tokens are those of `Tokenizer.encode`, with BOS (or what else the
tokenizer puts first), and with an end token only if the tokenizer adds one. All tokens are scored except the special
ones at the start and the first one, which nothing predicts. So with a BOS the whole text is scored, and without one all
of it but the first token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ridgeline.errors import RequestError
from ridgeline.load.tokenizer import Tokenizer

JSONL = ".jsonl"


class Text(NamedTuple):
    """A document's text and its source: a file, or a file and a line."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    """The token ids of a document. All tokens but the first `num_unscored` are scored.

    num_bytes: UTF-8 bytes of the text of the scored tokens; 0 if there is no text.
    """

    token_ids: Sequence[int]
    num_bytes: int = 0
    num_unscored: int = 1
    name: str = "document"

    def __post_init__(self) -> None:
        if self.num_unscored < 1:
            raise ValueError(f"num_unscored is {self.num_unscored}: nothing predicts the first token")

    @property
    def num_scored(self) -> int:
        return max(0, len(self.token_ids) - self.num_unscored)


def read_texts(paths: Iterable[str | Path], on_skip: Callable[[str], None] = lambda reason: None) -> Iterator[Text]:
    """Yield the documents of files and of the files below folders, in alphabetical order. Each file is read when it is
    needed.

    Hidden files in folders are ignored. Other files in folders that are empty or not UTF-8, and empty rows of a .jsonl
    file, are skipped and reported to on_skip. Raises RequestError for a path that cannot be read, for a file given by
    name that is empty or not UTF-8, for a folder without files, and for a row that is not an object with a "text".
    """
    for given in paths:
        path = Path(given)
        if not path.is_dir():
            yield from _documents(path, _read(path), on_skip)
            continue
        files = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
        if not files:
            raise RequestError(f"{path} contains no file; give a text file or a folder with some")
        for file in files:
            try:
                text = _read(file)
            except RequestError as e:
                on_skip(str(e))
            else:
                yield from _documents(file, text, on_skip)


def encode_texts(texts: Iterable[Text], tokenizer: Tokenizer, limit_tokens: int | None = None) -> list[Document]:
    """Tokenize texts, up to `limit_tokens` tokens in total; the last one is cut there. Documents without a token to
    score are left out.

    The byte counts are those of the texts. For a cut text they are the bytes that its tokens decode to. If the first
    token is text and not scored, the characters that it completes are not counted. Raises RequestError if nothing can
    be scored.
    """
    documents: list[Document] = []
    left = limit_tokens
    for name, text in texts:
        try:
            document = encode_text(text, tokenizer, left, name)
        except RequestError as e:
            raise RequestError(f"{name}: {e}") from None
        if document.num_scored:
            documents.append(document)
        if left is not None:
            left -= len(document.token_ids)
            if left <= 0:
                break
    if not documents:
        raise RequestError("there is nothing to score: no document has at least two tokens")
    return documents


def encode_text(text: str, tokenizer: Tokenizer, limit_tokens: int | None = None, name: str = "document") -> Document:
    """Tokenize one document, cut after `limit_tokens` tokens. Raises RequestError for a text that is not
    valid Unicode.
    """
    ids = tokenizer.encode(text)
    if limit_tokens is None or len(ids) <= limit_tokens:
        num_bytes = len(text.encode())
    else:
        ids = ids[:limit_tokens]
        num_bytes = _bytes_completed(ids, tokenizer)
    special = next((i for i, token in enumerate(ids) if token not in tokenizer.special_ids), len(ids))
    if not special:
        num_bytes -= _bytes_completed(ids[:1], tokenizer)
    return Document(ids, num_bytes, max(1, special), name)


def check_same_tokens(documents: Iterable[Document], one: Tokenizer, other: Tokenizer) -> None:
    """Raise RequestError if a token of the documents stands for different texts in two tokenizers."""
    for token in sorted({token for document in documents for token in document.token_ids}):
        first, second = (t.decode([token], skip_special_tokens=False) for t in (one, other))
        if first != second:
            raise RequestError(
                f"token {token} is {first!r} in one model's vocabulary and {second!r} in the other's, so their "
                "predictions cannot be compared"
            )


def _bytes_completed(ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Return the bytes of the characters that tokens complete at the start of a text."""
    stream = tokenizer.detokenizer()
    return sum(len(stream.push(token).encode()) for token in ids)


def _read(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise RequestError(f"cannot read {path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise RequestError(f"{path} is not a text: byte {e.start} is not UTF-8") from None
    if not text:
        raise RequestError(f"{path} is empty")
    return text


def _documents(path: Path, text: str, on_skip: Callable[[str], None]) -> Iterator[Text]:
    if path.suffix.lower() != JSONL:
        yield Text(str(path), text)
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): a string may contain other separators
        if not line.strip():
            continue
        name = f"{path}:{number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise RequestError(f"{name} is not valid JSON: {e}") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise RequestError(f'{name} is not an object with a "text", as in {{"text": "Once upon a time"}}')
        if row["text"]:
            yield Text(name, row["text"])
        else:
            on_skip(f"{name} has an empty text")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
