"""Change the measured model in memory, and measure how far the results are from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.compress.changed import ChangedWeights, SameWeights
from ridgeline.compress.compare import INTERVAL, Comparison, compare
from ridgeline.compress.convert.heads import PooledWeights, with_kv_heads
from ridgeline.compress.convert.windows import with_measured_windows
from ridgeline.compress.data import Samples, read_samples
from ridgeline.compress.folder import changed_model, open_original, stored_types
from ridgeline.compress.grid import Floats
from ridgeline.compress.prune import Aims, PruneOptions
from ridgeline.compress.prune.cut import CutWeights
from ridgeline.compress.prune.run import make_cut
from ridgeline.lab.experiment import Setup
from ridgeline.lab.texts import texts
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec

HELD_OUT = 4096  # most tokens on which models are compared
Loss = tuple[float, float]  # KL from the original in nats a token, and half of its 95 % interval


@dataclass(frozen=True, slots=True)
class Changer:
    """The measured model, open layer by layer, with sequences of text."""

    original: LoadedModel
    samples: Samples
    seed: int

    @classmethod
    def open(cls, setup: Setup, *, sequences: int, length: int) -> Changer:
        """Open the model of a setup. sequences, length: number and tokens of the sequences that choices are made on.

        Raises RidgelineError for a model that is quantized or has no tokenizer.
        """
        original = open_original(setup.model, setup.threads)
        samples = read_samples(
            texts(setup.quick), Tokenizer.from_folder(original.checkpoint.folder),
            length=min(length, original.max_model_len), count=sequences, held_out_tokens=HELD_OUT, seed=setup.seed,
        )  # fmt: skip
        return cls(original, samples, setup.seed)

    def _made(self, weights: ChangedWeights) -> LoadedModel:
        return changed_model(self.original, weights)

    def _same(self, spec: ModelSpec) -> SameWeights:
        return SameWeights(spec, self.original.model.weights, stored_types(self.original), self._widen)

    def _widen(self, array: Any) -> Floats:
        found: Floats = self.original.table.memory.get(array)
        return found

    def pruned(self, aims: Aims, options: PruneOptions) -> LoadedModel:
        """Return the model with some parts only; as `ridgeline prune` makes it."""
        cut = make_cut(self.original, aims, None, self.samples, options)
        return self._made(CutWeights(cut, self.original.model.weights, stored_types(self.original), self._widen))

    def with_heads(self, count: int) -> LoadedModel:
        """Return the model with fewer KV heads, each the mean of a group; as `ridgeline convert` makes it."""
        spec = with_kv_heads(self.original.spec, count)
        given = self.original.model.weights, stored_types(self.original), self._widen
        return self._made(PooledWeights(self.original.spec, spec, *given, "mean", self.seed))

    def with_windows(self, window: int, local: int | None) -> LoadedModel:
        """Return the model with windows; as `ridgeline convert` makes it. local: windowed layers for each whole one."""
        spec = with_measured_windows(self.original, window, local, self.samples, lambda what, done, total: None)
        return self._made(self._same(spec))

    def losses(self, others: Mapping[str, LoadedModel]) -> dict[str, Loss]:
        """Measure how far models are from the original, on text that is held out."""
        return losses(compare(self.original, others, self.samples.held_out))


def losses(found: Comparison) -> dict[str, Loss]:
    """Return the losses of a comparison."""
    kl = {name: quality.kl for name, quality in found.others.items()}
    return {name: (k.value, INTERVAL * (k.standard_error or 0.0)) for name, k in kl.items() if k is not None}
