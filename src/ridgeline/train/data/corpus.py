"""The texts that a model is trained on: files of the user, or the standard library of the running Python.

A document is a file, or a row of a .jsonl file. A corpus is held in memory, sorted by name, each text once.
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

from ridgeline.errors import DataError

EMPTY, BINARY, DUPLICATE = "empty", "not UTF-8 text", "the same text as another"
_JSONL = ".jsonl"
# Not of the library itself: what was installed beside it, and what the build or the distributor wrote for one machine.
_NOT_LIBRARY = ("site-packages", "dist-packages", "config-*", "_sysconfigdata*", "sitecustomize.py")
_LEAST_TESTS = 100  # files test/**/test_*.py of a library with tests; 3.11 has 560, Debian's without them one


@dataclass(frozen=True, slots=True)
class Document:
    """A text and its name, which no other document of the corpus has."""

    name: str
    text: str

    @property
    def is_python(self) -> bool:
        return self.name.endswith(".py")


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file or row that is not in the corpus, and why: EMPTY, BINARY or DUPLICATE."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents sorted by name, what they are and under which license, and what was left out."""

    source: str
    license: str
    documents: tuple[Document, ...]
    skipped: tuple[Skipped, ...] = ()

    @classmethod
    def from_paths(cls, paths: Iterable[str | Path], license: str = "not stated") -> Corpus:
        """The texts of files and, recursively, of folders; of .jsonl files the "text" of every row.

        A file is a text if it is UTF-8 without NUL. Names are paths below the nearest folder that holds everything
        given, so that they do not depend on where that folder lies; a row adds its line, as in a.jsonl:7. Hidden
        files of folders are left out; other files there that are empty or no text, rows with an empty text, and
        texts that were there before are skipped. Raises DataError for a path that cannot be read, a file that was
        given by its own name and is empty or no text, a row that is not an object with a "text", and where nothing
        is left.
        """
        given = [Path(p).resolve() for p in paths]
        base = _common_folder(given)
        skipped: list[Skipped] = []
        found: dict[str, Document] = {}
        for path in given:
            for file in _files(path):
                for document in _documents(file, file.relative_to(base).as_posix(), file == path, skipped):
                    found[document.name] = document  # a path that is given twice, or inside another, counts once
        return cls._of(f"files of {base.name}", license, found.values(), skipped)

    @classmethod
    def stdlib(cls, root: Path | None = None) -> Corpus:
        """The Python files of the running interpreter's standard library (or of `root`), tests included.

        Names are paths below the library. Files that are not UTF-8 (data of some tests) are skipped. Raises DataError
        for a library that ships without its tests.
        """
        root = root or Path(sysconfig.get_path("stdlib"))
        names = [file.relative_to(root).as_posix() for file in root.rglob("*.py") if _is_library(file, root)]
        tests = sum(n.startswith("test/") and n.rpartition("/")[2].startswith("test_") for n in names)
        version = platform.python_version()
        if tests < _LEAST_TESTS:
            short = version.rpartition(".")[0]
            raise DataError(
                f"the standard library in {root} ships without its tests, half of the corpus: install them (Debian and "
                f"Ubuntu: libpython{short}-testsuite; Fedora: python3-test) or run a Python that was built from source "
                "(python.org, pyenv); conda, uv and the Docker images leave them out"
            )
        skipped: list[Skipped] = []
        documents = [d for name in names for d in _documents(root / name, name, False, skipped)]
        return cls._of(f"standard library of Python {version}", "PSF-2.0", documents, skipped)

    @classmethod
    def _of(cls, source: str, license: str, documents: Iterable[Document], skipped: list[Skipped]) -> Corpus:
        """Sort, and keep the first document of each text."""
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
        """One line: how much there is, and how many of what were skipped."""
        size = sum(len(d.text.encode()) for d in self.documents)
        counts = Counter(s.reason for s in self.skipped)
        skipped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(counts.items())) or "none"
        return f"{self.source}: {len(self.documents):,} documents, {size / 1e6:,.1f} MB; skipped: {skipped}"


def _common_folder(paths: Sequence[Path]) -> Path:
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} does not exist; give files or folders of text")
    if not paths:
        raise DataError("no path was given; give files or folders of text")
    return Path(os.path.commonpath([p if p.is_dir() else p.parent for p in paths]))


def _files(path: Path) -> list[Path]:
    """`path` itself, or the files below it that are not hidden."""
    if not path.is_dir():
        return [path]
    below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
    return sorted(p for p in below if p.is_file())


def _is_library(file: Path, root: Path) -> bool:
    first = file.relative_to(root).parts[0]
    return not any(fnmatch(first, pattern) for pattern in _NOT_LIBRARY)


def _documents(file: Path, name: str, named: bool, skipped: list[Skipped]) -> Iterator[Document]:
    """The documents of a file; `named`: the user named it, so that it must hold some."""
    text = _read(file)
    reason = BINARY if text is None else EMPTY
    if text and text.strip():
        if file.suffix.lower() != _JSONL:
            yield Document(name, text)
            return
        for number, line in enumerate(text.split("\n"), 1):  # other line ends may stand inside a string
            if not line.strip():
                continue
            row = _row(line, f"{file}:{number}")
            if row.strip():
                yield Document(f"{name}:{number}", row)
            else:
                skipped.append(Skipped(f"{name}:{number}", EMPTY))
        return
    if named:
        raise DataError(f"{file} is {reason}; give a text file, or a folder, of which such files are skipped")
    skipped.append(Skipped(name, reason))


def _read(file: Path) -> str | None:
    """The text of a file, line ends as they are and a byte order mark removed; None if it is no text."""
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as e:
        raise DataError(f"{file} cannot be read ({e.strerror}); check its permissions, or leave it out") from None
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _row(line: str, place: str) -> str:
    """The "text" of a row of a .jsonl file."""
    try:
        row = json.loads(line)
        text = row["text"] if isinstance(row, dict) else None
        if isinstance(text, str):
            text.encode()  # JSON can spell half a character, which is no Unicode
            return text
    except (ValueError, KeyError, RecursionError):
        pass
    raise DataError(f'{place} is not an object with a "text", as in {{"text": "Once upon a time"}}')
