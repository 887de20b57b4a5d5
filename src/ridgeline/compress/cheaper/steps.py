"""The folder of a chain's intermediate models, in which a run that was stopped goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.spec.folders import write_whole

SUFFIX = ".steps"
SHORT = "short"  # the folder of a candidate after its short repair
_FACTS, _LOCK, _MEASURED = "run.json", "lock", "measured"


class Steps:
    """A folder beside the output folder. One run at a time can use it.

    facts: everything that the intermediate models depend on.

    Raises RequestError if the folder belongs to a run with other facts, or if a run uses it now, and OSError.
    """

    def __init__(self, out: Path, facts: Mapping[str, Any]) -> None:
        self.folder = out.with_name(out.name + SUFFIX)
        self._created = [parent for parent in self.folder.parents if not parent.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = self._locked(out)
        path, known = self.folder / _FACTS, json.loads(json.dumps(facts))
        if path.is_file():
            before = json.loads(path.read_text(encoding="utf-8"))
            if other := [
                f"{k} was {before.get(k)!r:.60}, is {v!r:.60}" for k, v in known.items() if before.get(k) != v
            ]:
                self.close()
                raise RequestError(
                    f"{self.folder} belongs to another run: {'; '.join(other[:3])}; use the same options and texts, or "
                    "remove it"
                )
        else:
            write_whole(path, json.dumps(known, indent=1))
        for partial in self.folder.rglob(".*.partial"):  # of a run that was killed while it wrote
            shutil.rmtree(partial, ignore_errors=True)

    def _locked(self, out: Path) -> int:
        from filelock import lock_descriptor

        file = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):  # a file system without locks
            if not lock_descriptor(file, blocking=False):
                os.close(file)
                raise RequestError(f"another run is making {out} now; wait for it, or name another folder with --out")
        return file

    def close(self) -> None:
        """Let other runs use the folder."""
        os.close(self._file)

    def remove_unless_useful(self) -> None:
        """Remove the folder if there is nothing in it that a later run could use, and folders that were made for it."""
        if any(self.folder.rglob("checkpoints")) or any((self.folder / "candidates").glob(f"*/{SHORT}")):
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # something else is in them
            for parent in self._created:
                parent.rmdir()

    def candidate(self, words: str) -> Path:
        """Return the folder of everything that is made of a candidate."""
        return self.folder / "candidates" / _file_name(words)

    def measured(self, name: str, measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return what `measure` returned for a model, from disk if it was called before."""
        path = self.folder / _MEASURED / f"{_file_name(name)}.json"
        if path.is_file():
            return dict(json.loads(path.read_text(encoding="utf-8")))
        found = dict(measure())
        write_whole(path, json.dumps(found, indent=1, allow_nan=False))
        return found


def _file_name(words: str) -> str:
    return re.sub(r"[^\w.]+", "-", words)
