"""Measure a model of the chain beside the original: price, quality on held-out text, and associative recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.compress.cheaper.report import ORIGINAL
from ridgeline.compress.compare import compare
from ridgeline.compress.deliver import OnProgress
from ridgeline.compress.price import price
from ridgeline.evals import measure_recall, num_recall_tokens, recall_tokens
from ridgeline.evals.documents import Document
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.measure.rate import measure_rate
from ridgeline.plan.planner import Deployment, Load
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model


@dataclass(frozen=True, slots=True)
class Measure:
    """Measures models. original: the folder. documents: held-out sequences. load: the sequence that is timed."""

    original: Path
    documents: Sequence[Document]
    load: Load
    threads: int | None

    def figures(
        self, name: str, folder: Path, deployment: Deployment, with_recall: bool, on_progress: OnProgress
    ) -> dict[str, Any]:  # fmt: skip
        """Return the figures of a model by name, as plain values. deployment: for which speed is predicted."""
        on_progress("measuring the speed", 0, 1)
        rate = measure_rate(str(folder), self.load.prompt, self.load.output, self.threads)
        total, done = sum(d.num_scored for d in self.documents), 0

        def on_tokens(scored: int) -> None:
            nonlocal done
            done += scored
            on_progress("measuring on the held-out part", done, total)

        original = self._open(self.original)
        is_original = name == ORIGINAL
        other = original if is_original else self._open(folder)
        found = compare(original, {"other": other}, self.documents, on_tokens)
        quality = found.original if is_original else found.others["other"]
        return {
            **price(deployment, self.load, rate).to_json(), **quality.to_json(),
            **(self._recall(other, on_progress) if with_recall else {}),
            "timing": None if rate is None else asdict(rate),
        }  # fmt: skip

    def _open(self, folder: Path) -> LoadedModel:
        return pass_model(str(folder), LoadOptions(device="cpu", threads=self.threads))

    def _recall(self, loaded: LoadedModel, on_progress: OnProgress) -> dict[str, Any]:
        tokenizer, done = Tokenizer.from_folder(self.original), 0
        tokens, prefix = recall_tokens(tokenizer, loaded.spec.vocab_size), tokenizer.encode("")
        total = num_recall_tokens(loaded.max_model_len, len(prefix))

        def on_tokens(read: int) -> None:
            nonlocal done
            done += read
            on_progress("measuring recall", done, total)

        found = measure_recall(loaded, tokens, prefix, on_tokens=on_tokens)
        by_pairs = {
            str(pairs): float(np.mean([c.accuracy.value for c in found.measured if c.pairs == pairs and c.accuracy]))
            for pairs in dict.fromkeys(cell.pairs for cell in found.measured)
        }
        return {"recall": found.mean, "recall_by_pairs": by_pairs}
