"""Recipes as data: a corpus, its vocabulary and two models, so that the models that ship can be trained again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ridgeline.errors import DataError
from ridgeline.train.loop import TrainOptions
from ridgeline.train.pocket.continuations import ContinuationOptions
from ridgeline.train.pocket.functions import FunctionOptions

FOLDER = Path(__file__).parent / "recipes"
StageData = Literal["corpus", "functions", "headers", "code", "continuations"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a run, with a new optimizer; it starts from the weights of the stage before.

    data: "corpus": the training side. "functions", "headers", "code": the training side plus functions, in a form of
    `write_functions`. "continuations": texts that the target writes.
    """

    data: StageData
    options: TrainOptions


@dataclass(frozen=True, slots=True)
class KeptParts:
    """The parts of the target that a draft begins with (compress/prune/given.py). layers: indices of layers. kv_heads:
    indices of the kept KV heads of every layer, with their query heads. tokens: number of tokens for computing the
    stream's components.
    """

    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    tokens: int = 16_384


@dataclass(frozen=True, slots=True)
class ModelRecipe:
    """One model of a recipe. config: its config.json. sampling: fields of its generation_config.json. prune: the parts
    of the target that it starts from; None: random weights.
    """

    config: Mapping[str, Any]
    sampling: Mapping[str, Any]
    stages: tuple[Stage, ...]
    prune: KeptParts | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe. python: version whose standard library is the corpus. corpus_hash: hash of its manifest."""

    name: str
    python: str
    corpus_hash: str
    held_out_share: float
    split_seed: int
    vocab_size: int
    functions: FunctionOptions
    continuations: ContinuationOptions
    target: ModelRecipe
    draft: ModelRecipe

    @classmethod
    def read(cls, name: str) -> Recipe:
        """Return a recipe that ships with Ridgeline. Raises DataError, which lists them, for an unknown name."""
        known = sorted(path.stem for path in FOLDER.glob("*.json"))
        if name not in known:
            raise DataError(f"unknown --recipe {name!r}; use {', '.join(known)}")
        data = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
        corpus = data["corpus"]
        return cls(
            name, corpus["python"], corpus["hash"], corpus["held_out_share"], corpus["split_seed"], data["vocab_size"],
            FunctionOptions(**data["functions"]), ContinuationOptions(**data["continuations"]),
            _model(data["target"]), _model(data["draft"]),
        )  # fmt: skip


def _model(data: Mapping[str, Any]) -> ModelRecipe:
    stages = [(stage["data"], TrainOptions(**stage["options"])) for stage in data["stages"]]
    assert all(kind in get_args(StageData) for kind, _ in stages)
    prune = None
    if kept := data.get("prune"):
        prune = KeptParts(tuple(kept["layers"]), tuple(kept["kv_heads"]), kept["tokens"])
    return ModelRecipe(data["config"], data["sampling"], tuple(Stage(*stage) for stage in stages), prune)
