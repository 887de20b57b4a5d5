"""Keep finished parts of a model on disk, so that an interrupted run continues where it stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import BadZipFile
from zlib import error as ZlibError

import numpy as np

from ridgeline.compress.awq import Columns
from ridgeline.compress.choose import Chosen
from ridgeline.compress.inputs import MatrixKey
from ridgeline.compress.layers import Part
from ridgeline.compress.outliers import Outliers
from ridgeline.errors import RequestError
from ridgeline.ops.arrays import ARRAYS, QuantizedMatrix
from ridgeline.spec.folders import write_whole
from ridgeline.spec.quant import format_of

_LOCK, _SETTINGS, _PARENTS = "lock", "settings.json", "parents"


class Partial:
    """A hidden folder beside the output folder, with a file for each part. One run at a time can use it.

    settings: everything that the codes depend on. Parts of other settings are removed. Folders above it that do not
    exist are created; a file counts them, so that `remove` can remove them after a run that continues another one.

    Raises RequestError if another run writes to the same output folder, and OSError.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self.folder = out.with_name(f".{out.name}.partial")
        created = sum(not parent.exists() for parent in self.folder.parents)
        self.folder.mkdir(parents=True, exist_ok=True)
        if created:
            (self.folder / _PARENTS).write_text(str(created))
        self._lock: int | None = self._locked(out)
        known, path = json.dumps(settings, sort_keys=True).encode(), self.folder / _SETTINGS
        if not path.is_file() or path.read_bytes() != known:
            for old in self.folder.iterdir():
                if old.is_dir():
                    shutil.rmtree(old)
                elif old.name not in (_LOCK, _PARENTS):
                    old.unlink()
            write_whole(path, known.decode())

    def _locked(self, out: Path) -> int:
        """Return a descriptor of the locked file that only one run has. The system unlocks it when the run ends."""
        from filelock import lock_descriptor

        path = self.folder / _LOCK
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_free = lock_descriptor(file, blocking=False)
        except OSError:  # a file system without locks
            return file
        # A run that ended meanwhile may have removed the folder, and with it the file that is locked now.
        if is_free and path.exists() and os.path.samestat(os.fstat(file), path.stat()):
            return file
        os.close(file)
        raise RequestError(f"another run is writing to {out} now; wait for it, or name another folder with --out")

    def close(self) -> None:
        """Let other runs use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Remove the folder, and those above it that were created for it and are empty."""
        path = self.folder / _PARENTS
        created = int(path.read_text()) if path.is_file() else 0
        if os.name == "nt":  # Windows does not remove a file that is open
            self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()
        with suppress(OSError):  # a folder that is not empty, such as that of the result
            for parent in self.folder.parents[:created]:
                parent.rmdir()

    def has(self, part: Part) -> bool:
        """Return whether a part is finished."""
        return self._path(part).is_file()

    def _path(self, part: Part) -> Path:
        return self.folder / f"{part.name}.npz"

    def save(self, part: Part, found: Chosen) -> None:
        """Write the result of a part, wholly or not at all."""
        arrays: dict[str, Any] = {f"changed/{name}": array for name, array in found.changed.items()}
        header: dict[str, Any] = {"matrices": []}
        for i, (key, matrix) in enumerate(found.codes.items()):
            header["matrices"].append(
                {
                    "key": key, "format": matrix.format.name, "lost": found.lost[key], "unseen": found.unseen.get(key),
                    "outliers": found.outliers.get(key),
                }
            )  # fmt: skip
            for name in ARRAYS:
                if (array := getattr(matrix, name)) is not None:
                    arrays[f"{i}/{name}"] = array
            if key in found.kept:
                arrays |= {f"{i}/kept/{name}": array for name, array in found.kept[key]._asdict().items()}
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        unfinished = self._path(part).with_suffix(".tmp")
        try:
            with unfinished.open("wb") as file:
                np.savez(file, **arrays)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(self._path(part))
        finally:
            unfinished.unlink(missing_ok=True)

    def load(self, part: Part) -> Chosen:
        """Return the result of a finished part. Raises RequestError for a damaged file."""
        try:
            return self._load(part)
        except (BadZipFile, EOFError, KeyError, ValueError, ZlibError) as e:
            raise RequestError(
                f"{self._path(part)}, which an interrupted run left, is damaged ({type(e).__name__}); repeat the "
                "command to start again"
            ) from None

    def _load(self, part: Part) -> Chosen:
        found = Chosen()
        with np.load(self._path(part), allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            for i, matrix in enumerate(header["matrices"]):
                key = MatrixKey(*matrix["key"])
                own = {n: arrays[f"{i}/{n}"] for n in ARRAYS if f"{i}/{n}" in arrays}
                found.codes[key] = QuantizedMatrix(format_of(matrix["format"]), **own)
                found.lost[key] = matrix["lost"]
                if f"{i}/kept/indices" in arrays:
                    found.kept[key] = Columns(*(arrays[f"{i}/kept/{name}"] for name in Columns._fields))
                if matrix["unseen"] is not None:
                    found.unseen[key] = matrix["unseen"]
                if matrix["outliers"] is not None:
                    columns, peaks, share = matrix["outliers"]
                    found.outliers[key] = Outliers(tuple(columns), tuple(peaks), share)
            prefix = "changed/"
            found.changed = {n.removeprefix(prefix): arrays[n] for n in arrays.files if n.startswith(prefix)}
        return found
