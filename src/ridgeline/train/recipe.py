"""Recipes: a corpus, its vocabulary and one or two models, as data, so that what ships can be made again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import DataError
from ridgeline.train.continuations import ContinuationOptions
from ridgeline.train.loop import TrainOptions

FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True, slots=True)
class DraftRecipe:
    """A model that is to guess what the target says: trained on the corpus, then on the target's continuations."""

    config: Mapping[str, Any]
    options: TrainOptions
    continuations: ContinuationOptions
    distilled: TrainOptions


@dataclass(frozen=True, slots=True)
class Recipe:
    """python: the version whose standard library is the corpus; corpus_hash: of its manifest."""

    name: str
    python: str
    corpus_hash: str
    held_out_share: float
    split_seed: int
    vocab_size: int
    config: Mapping[str, Any]
    options: TrainOptions
    draft: DraftRecipe

    @classmethod
    def read(cls, name: str) -> Recipe:
        """A recipe that ships with Ridgeline. Raises DataError, listing them, for one that does not."""
        known = sorted(path.stem for path in FOLDER.glob("*.json"))
        if name not in known:
            raise DataError(f"--recipe {name!r} is not known; known are {', '.join(known)}")
        data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        target, draft, corpus = data["target"], data["draft"], data["corpus"]
        return cls(
            name, corpus["python"], corpus["hash"], corpus["held_out_share"], corpus["split_seed"], data["vocab_size"],
            target["config"], TrainOptions(**target["options"]),
            DraftRecipe(
                draft["config"], TrainOptions(**draft["options"]), ContinuationOptions(**draft["continuations"]),
                TrainOptions(**draft["distilled"]),
            ),
        )  # fmt: skip
