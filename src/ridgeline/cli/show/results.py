"""The output file of `ridgeline generate -o`: one JSON line per prompt, written when it is complete. A later run
continues it.

    {"index": 3, "fingerprint": "5d1c22f0-9be11a07-c2d0e9aa", "choices": [..], "usage": {..}, "timing": {..}}

A run that is killed at any time leaves whole lines and at most one incomplete line, the last. The fingerprint has three
parts of 32 bits: the model, the sampling parameters and the prompt. A run continues a file only if every line has the
fingerprint that this run would write.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ridgeline.errors import RequestError

if TYPE_CHECKING:
    from ridgeline.runtime.request import Prompt
    from ridgeline.spec.request import Params, RequestOutput

START = b'{"index": '  # the first bytes of every line
OTHER_FILE = "give another -o, or remove the file"
# The parts of a fingerprint, as messages name them.
PARTS = (
    "another model (or --dtype, --weights, --kv-cache-dtype, --max-model-len, --load-format, --tokenizer)",
    "other sampling parameters (or another --seed)",
    "another prompt",
)


class Results:
    """The open output file. It keeps the lines that answer this run's prompts, except for failed answers.

    done: indices of the prompts that have answers. fingerprints, names: one of each per prompt; names are for messages.
    Raises RequestError, without changing the file, if it cannot be written, is in use by another run, or holds anything
    but answers to these prompts.
    """

    def __init__(self, path: str, fingerprints: Sequence[str], names: Sequence[str]) -> None:
        self._path, self._fingerprints, self._names = Path(path).expanduser().resolve(), fingerprints, names
        self.done: set[int] = set()
        with _file_errors(self._path):
            self._file = self._open()
            try:
                self._take_over()
            except BaseException:
                with suppress(OSError):  # _replace may have closed it
                    os.close(self._file)
                raise

    def add(self, index: int, output: RequestOutput) -> None:
        """Write the result of a prompt. Raises RequestError if that fails, for example because the disk is full."""
        line = {"index": index, "fingerprint": self._fingerprints[index], **output.to_json()}
        data = memoryview(json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        with _file_errors(self._path):
            end = os.fstat(self._file).st_size
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError:
                os.ftruncate(self._file, end)  # remove the incomplete line
                raise
        if not _failed(line):
            self.done.add(index)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def _take_over(self) -> None:
        """Read the lines of the file, and remove failed, repeated and incomplete ones."""
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise RequestError(f"{self._path} is not a regular file, so no later run could continue it; {OTHER_FILE}")
        self._lock(self._file)
        again, end = set(), 0
        os.lseek(self._file, 0, os.SEEK_SET)
        with open(self._file, "rb", closefd=False) as lines:  # on Windows only the locking handle may read
            for number, line in enumerate(lines):
                where = f"{self._path}:{number + 1}"
                if not line.endswith(b"\n"):
                    if not (line.startswith(START) or START.startswith(line)):
                        raise RequestError(f"{where} is not an answer that this command wrote; {OTHER_FILE}")
                    break
                end += len(line)
                index, answered = self._read(line, where)
                if answered and index not in self.done:
                    self.done.add(index)
                else:
                    again.add(number)
        if again:
            self._rewrite(again)
        else:
            os.ftruncate(self._file, end)

    def _read(self, line: bytes, where: str) -> tuple[int, bool]:
        """Return the index of the prompt that a line answers, and whether the answer succeeded. Raises RequestError for
        a line of another run.
        """
        try:
            value = json.loads(line)
            index, found, answered = value["index"], value["fingerprint"].split("-"), not _failed(value)
            ours = line.startswith(START) and type(index) is int and index >= 0 and len(found) == len(PARTS)
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
            ours = False
        if not ours:
            raise RequestError(f"{where} is not an answer that this command wrote; {OTHER_FILE}")
        if index >= len(self._fingerprints):
            raise RequestError(
                f"{where} answers the prompt of index {index}, but there are only {len(self._fingerprints)}; "
                f"{OTHER_FILE}"
            )
        for part, old, new in zip(PARTS, found, self._fingerprints[index].split("-"), strict=True):
            if old != new:
                raise RequestError(f"{where} comes from {part} than {self._names[index]} now; {OTHER_FILE}")
        return index, answered

    def _rewrite(self, without: set[int]) -> None:
        """Write the file again without these lines and without an incomplete one. At any moment either the whole old
        file or the whole new one exists.
        """
        file, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
        try:
            self._lock(file)
            shutil.copymode(self._path, name)
            with open(self._file, "rb", closefd=False) as lines, open(file, "wb", closefd=False) as kept:
                lines.seek(0)
                kept.writelines(x for i, x in enumerate(lines) if i not in without and x.endswith(b"\n"))
            os.fsync(file)
            self._replace(file, name)
        except BaseException:
            with suppress(OSError):  # _replace may have closed it
                os.close(file)
            Path(name).unlink(missing_ok=True)
            raise

    def _replace(self, file: int, name: str) -> None:
        """Replace the output file by the locked file `name`, which is open as `file`, and use it from now on."""
        if os.name != "nt":
            Path(name).replace(self._path)
            os.close(self._file)
            self._file = file
            return
        os.close(file)  # Windows cannot replace an open file, so the lock is released for a moment
        os.close(self._file)
        Path(name).replace(self._path)
        self._file = self._open()
        self._lock(self._file)

    def _open(self) -> int:
        binary = getattr(os, "O_BINARY", 0)  # Windows would write "\r\n" for "\n"
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | binary, 0o666)

    def _lock(self, file: int) -> None:
        from filelock import lock_descriptor

        try:
            free = lock_descriptor(file, blocking=False)
        except OSError:  # a file system without locks
            return
        if not free:
            raise RequestError(f"another run is writing to {self._path} now; wait for it, or give another -o")


def prompt_fingerprint(prompt: Prompt, params: Params, seed: int) -> str:
    """Return the fingerprint of the sampling parameters and the prompt. seed: the model's, for requests without their
    own.
    """
    from ridgeline.spec.request import SamplingParams

    default = SamplingParams(max_tokens=None)
    given = {
        f.name: value for f in fields(params) if (value := getattr(params, f.name)) != getattr(default, f.name, None)
    }
    return f"{_hash({'seed': seed} | given)}-{_hash(prompt)}"


def _hash(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()


def _failed(line: Mapping[str, Any]) -> bool:
    return any(choice["finish_reason"] == "error" for choice in line["choices"])


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a RequestError that names the file."""
    try:
        yield
    except OSError as e:
        raise RequestError(f"cannot write to {path}: {e.strerror}") from None
