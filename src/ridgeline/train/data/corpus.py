"""Load the texts that a model is trained on: the user's files, or the standard library of the running Python.

A document is a file, or a row of a .jsonl file. A corpus is held in memory, sorted by name, without repeated texts.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ridgeline.errors import DataError, RequestError

EMPTY, BINARY, DUPLICATE = "empty", "not UTF-8 text", "the same text as another"
STDLIB, NOT_STATED = "stdlib", "not stated"
_JSONL = ".jsonl"
# Files that do not belong to the library: installed packages, and files that a build or a distributor adds.
_NOT_LIBRARY = ("site-packages", "dist-packages", "config-*", "_sysconfigdata*", "sitecustomize.py")
_LEAST_TESTS = 100  # files test/**/test_*.py of a library with tests; 3.11 has 560, Debian's without tests has one


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name that is unique in the corpus."""

    name: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.name.endswith(".py")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or row that was left out of the corpus, with the reason: EMPTY, BINARY or DUPLICATE."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents sorted by name, with their source and license, and the files that were left out."""

    source: str
    license: str
    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def from_paths(cls, paths: Iterable[str | Path], license: str = NOT_STATED) -> Corpus:
        """Read the texts of files, of folders (recursively), and of .jsonl files (the "text" of every row).

        A file is a text if it is UTF-8 without NUL. Names are paths below the nearest common folder, so they do not
        depend on where that folder is; a row adds its line number, as in a.jsonl:7. Hidden files in folders are
        ignored. Files in folders that are empty or not text, rows with an empty text, and repeated texts are skipped.
        Raises DataError for a path that cannot be read, for a file given by name that is empty or not text, for a row
        that is not an object with a "text", and if no text is left.
        """
        given = [Path(p).resolve() for p in paths]
        base = _common_folder(given)
        skipped: list[Skipped] = []
        found: dict[str, Document] = {}
        for path in given:
            for file in _files(path):
                for document in _documents(file, file.relative_to(base).as_posix(), file == path, skipped):
                    found[document.name] = document  # a path that is given twice or inside another counts once
        return cls._of(f"files of {base.name}", license, found.values(), skipped)

    @classmethod
    def stdlib(cls, root: Path | None = None) -> Corpus:
        """Read the Python files of the running interpreter's standard library (or of `root`), tests included.

        Names are paths below the library. Files that are not UTF-8 (data of some tests) are skipped. Raises DataError
        if the library is installed without its tests.
        """
        root = root or Path(sysconfig.get_path("stdlib"))
        names = [file.relative_to(root).as_posix() for file in root.rglob("*.py") if _is_library(file, root)]
        tests = sum(n.startswith("test/") and n.rpartition("/")[2].startswith("test_") for n in names)
        version = platform.python_version()
        if tests < _LEAST_TESTS:
            short = version.rpartition(".")[0]
            raise DataError(
                f"the standard library in {root} is installed without its tests, half of the corpus: install "
                f"them (Debian and Ubuntu: libpython{short}-testsuite; Fedora: python3-test), or build Python from "
                "source (python.org, pyenv); conda, uv and the Docker images leave the tests out"
            )
        skipped: list[Skipped] = []
        documents = [d for name in names for d in _documents(root / name, name, False, skipped)]
        return cls._of(f"standard library of Python {version}", "PSF-2.0", documents, skipped)

    @classmethod
    def _of(cls, source: str, license: str, documents: Iterable[Document], skipped: list[Skipped]) -> Corpus:
        """Sort the documents, and keep the first one of each text."""
        texts: set[bytes] = set()
        kept = []
        for document in sorted(documents, key=lambda d: d.name):
            key = hashlib.sha256(document.text.encode()).digest()
            if key in texts:
                skipped.append(Skipped(document.name, DUPLICATE))
            else:
                texts.add(key)
                kept.append(document)
        corpus = cls(source, license, tuple(kept), tuple(sorted(set(skipped), key=lambda s: s.name)))
        if not kept:
            raise DataError(f"there is no text to train on: {corpus.report()}")
        return corpus

    def report(self) -> str:
        """Summarize in one line: number of documents, size, and skipped files by reason."""
        size = sum(len(d.text.encode()) for d in self.documents)
        counts = Counter(s.reason for s in self.skipped)
        skipped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.items())) or "none"
        return f"{self.source}: {len(self.documents):,} documents, {size / 1e6:,.1f} MB; skipped: {skipped}"


def read_corpus(data: Sequence[str], license: str | None = None) -> Corpus:
    """Read texts as commands name them: paths, or `stdlib` alone. license: license of the texts, if it is known.

    Raises DataError for texts that cannot be read, and RequestError for `stdlib` with other texts.
    """
    if list(data) == [STDLIB]:
        return Corpus.stdlib()
    if STDLIB in data:
        raise RequestError("--data stdlib cannot be combined with other data; write ./stdlib for a folder of that name")
    return Corpus.from_paths(data, license or NOT_STATED)


def _common_folder(paths: Sequence[Path]) -> Path:
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist; give files or folders of text")
    if not paths:
        raise DataError("no path was given; give files or folders of text")
    return Path(os.path.commonpath([p if p.is_dir() else p.parent for p in paths]))


def _files(path: Path) -> list[Path]:
    """Return `path` itself, or the files below it that are not hidden."""
    if not path.is_dir():
        return [path]
    below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    return sorted(p for p in below if p.is_file())


def _is_library(file: Path, root: Path) -> bool:
    first = file.relative_to(root).parts[0]
    return not any(fnmatch(first, pattern) for pattern in _NOT_LIBRARY)


def _documents(file: Path, name: str, named: bool, skipped: list[Skipped]) -> Iterator[Document]:
    """Yield the documents of a file. named: whether the user named this file; if so, it must contain text."""
    text = _read(file)
    reason = BINARY if text is None else EMPTY
    if text and text.strip():
        if file.suffix.lower() != _JSONL:
            yield Document(name, text)
            return
        for number, line in enumerate(text.split("\n"), 1):  # a JSON string may contain other line separators
            if not line.strip():
                continue
            row = _row(line, f"{file}:{number}")
            if row.strip():
                yield Document(f"{name}:{number}", row)
            else:
                skipped.append(Skipped(f"{name}:{number}", EMPTY))
        return
    if named:
        raise DataError(f"{file} is {reason}; give a text file, or a folder, in which such files are skipped")
    skipped.append(Skipped(name, reason))


def _read(file: Path) -> str | None:
    """Return the text of a file, with its line ends and without a byte order mark; None if it is not text."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise DataError(f"{file} cannot be read ({e.strerror}); check its permissions, or leave it out") from None
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _row(line: str, where: str) -> str:
    """Return the "text" of a row of a .jsonl file. Raises DataError for a row without one."""
    try:
        row = json.loads(line)
        text = row["text"] if isinstance(row, dict) else None
        if isinstance(text, str):
            text.encode()  # raises for a lone surrogate, which JSON can contain
            return text
    except (ValueError, KeyError, RecursionError):
        pass
    raise DataError(f'{where} is not an object with a "text", as in {{"text": "Once upon a time"}}')
