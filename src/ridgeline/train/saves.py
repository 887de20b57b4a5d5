"""Checkpoints of a run: written completely or not at all, without pickle, and readable only by the same run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.errors import DataError
from ridgeline.load.export import write_safetensors
from ridgeline.load.safetensors import SINGLE, HostTensor, TensorFiles

STATE = "state.json"
KEEP = 2  # number of the newest checkpoints that are kept beside the best


class Saves:
    """The checkpoints in a folder. run: facts that must be unchanged for a run to resume (spec, corpus, options), as
    JSON.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any]) -> None:
        self._folder, self._run = folder, json.loads(json.dumps(run))

    def write(self, step: int, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any], best: int) -> None:
        """Save a step. best: step whose checkpoint is kept besides the newest ones.

        Raises DataError if it cannot be written; earlier checkpoints stay.
        """
        final = self._path(step)
        partial = self._folder / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            hosts = {k: HostTensor(_numpy(v), "float32") for k, v in tensors.items()}
            write_safetensors(partial / SINGLE, hosts)
            _write_json(partial / STATE, {"step": step, "run": self._run, **facts})
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            _sync(self._folder)
        except OSError as e:
            kept = f"the newest is of step {steps[-1]}" if (steps := self.steps()) else "there is none yet"
            raise DataError(f"the checkpoint of step {step} cannot be written to {self._folder}: {e}; {kept}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        for old in self.steps()[:-KEEP]:
            if old != best:
                shutil.rmtree(self._path(old))

    def steps(self) -> list[int]:
        """Return the saved steps in ascending order."""
        found = self._folder.glob("step-*/" + STATE)
        return sorted(int(path.parent.name.removeprefix("step-")) for path in found)

    def read(self, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the tensors and facts of a step. Raises DataError, which lists the differences, if it belongs to
        another run.
        """
        path = self._path(step)
        facts = json.loads((path / STATE).read_text(encoding="utf-8"))
        if differences := _differences(facts["run"], self._run):
            raise DataError(
                f"{path} belongs to another run: {'; '.join(differences[:5])}; "
                "use the same options and texts, or another --out folder for a new run"
            )
        files = TensorFiles(path)
        return {name: torch.from_numpy(np.array(files.read(name).data)) for name in files}, facts

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:07d}"


def _numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.detach().to("cpu", torch.float32).numpy()


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders, and writes their entries at once
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _differences(old: Any, new: Any, at: str = "") -> list[str]:
    """List where two JSON values differ, as "path was old, is new"."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(k for k in new if k not in old)]
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{at}.{k}" if at else k)]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [d for i, (a, b) in enumerate(zip(old, new, strict=True)) for d in _differences(a, b, f"{at}[{i}]")]
    return [] if old == new else [f"{at} was {old!r:.60}, is {new!r:.60}"]
