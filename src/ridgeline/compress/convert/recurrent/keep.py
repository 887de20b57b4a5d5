"""Choose the layers that keep their attention, by the predictions and the associative recall lost otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.compress.changed import ChangedWeights
from ridgeline.compress.compare import compare
from ridgeline.compress.convert.options import ConvertOptions
from ridgeline.compress.data import Samples
from ridgeline.compress.deliver import OnProgress
from ridgeline.compress.folder import changed_model
from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.evals.recall import measure_recall, recall_tokens
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel

Without = Callable[[Collection[int]], ChangedWeights]  # the model in which these layers keep their attention
PAIRS, DISTANCES = (8,), (0, 64)  # of the test of recall


@dataclass(frozen=True, slots=True)
class _Judge:
    """Measures what a model lost: KL in nats per token, and the share of associative recall.

    seen: losses by the kept layers.
    """

    original: LoadedModel
    samples: Samples
    tokens: Sequence[int]
    recall: float
    seen: dict[frozenset[int], float]

    @classmethod
    def of(cls, original: LoadedModel, samples: Samples) -> _Judge:
        """Return a judge. Associative recall does not count where the vocabulary or the context is too small for it."""
        tokenizer = Tokenizer.from_folder(original.checkpoint.folder)
        tokens = recall_tokens(tokenizer, original.spec.vocab_size)
        try:
            return cls(original, samples, tokens, _recall(original, tokens), {})
        except RequestError:
            return cls(original, samples, (), 0.0, {})

    def loss(self, without: Without, kept: Collection[int]) -> float:
        """Return the KL, and the associative recall that is lost, in one sum."""
        key = frozenset(kept)
        if key not in self.seen:
            made = changed_model(self.original, without(kept))
            documents = [Document(ids) for ids in self.samples.calibration]
            quality = compare(self.original, {"one": made}, documents).others["one"]
            assert quality.kl is not None
            lost = self.recall - _recall(made, self.tokens) if self.tokens else 0.0
            self.seen[key] = quality.kl.value + max(0.0, lost)
        return self.seen[key]


def _recall(model: LoadedModel, tokens: Sequence[int]) -> float:
    return measure_recall(model, tokens, pairs=PAIRS, distances=DISTANCES).mean


def kept_layers(
    original: LoadedModel, layers: Sequence[int], many: int | None, without: Without, samples: Samples,
    options: ConvertOptions, on_progress: OnProgress,
) -> tuple[int, ...]:  # fmt: skip
    """Return the attention layers that keep their attention, in order: one of each many + 1; None: none.

    search: the layers that lose most when they alone become recurrent, or a regular pattern if that loses less.
    pattern: the last of each group, as `plan` has it. A list names the layers. Raises RequestError for a list that does
    not fit.
    """
    count = 0 if many is None else len(layers) // (many + 1)
    if options.keep not in ("search", "pattern"):
        return _named(options.keep, layers, many, count)
    if many is None or not count:
        return ()
    regular = patterns(layers, many + 1, count)
    if options.keep == "pattern":
        return regular[-1]
    judge = _Judge.of(original, samples)
    single: Mapping[int, float] = {}
    for done, i in enumerate(layers):
        on_progress("giving each layer a recurrence", done, len(layers))
        single = {**single, i: judge.loss(without, [j for j in layers if j != i])}
    most = sorted(layers, key=lambda i: -single[i])[:count]
    sets = list(dict.fromkeys([tuple(sorted(most)), *regular]))
    losses: list[Any] = []
    for done, kept in enumerate(sets):
        on_progress("comparing choices of layers", done, len(sets))
        losses.append(judge.loss(without, kept))
    return sets[losses.index(min(losses))]


def patterns(layers: Sequence[int], period: int, count: int) -> list[tuple[int, ...]]:
    """Return the regular choices of `count` layers: every `period`-th one from each of the first ones; that of `plan`,
    the last layers of groups of `period`, is the last choice.
    """
    return [tuple(layers[start + period * j] for j in range(count)) for start in range(period)]


def _named(text: str, layers: Sequence[int], many: int | None, count: int) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 6 for part in parts):
        raise RequestError(f"--keep is {text!r:.60}; use search, pattern, or layers such as 1,3")
    found = tuple(sorted({int(part) for part in parts}))
    if wrong := [i for i in found if i not in layers]:
        raise RequestError(f"--keep: layer {wrong[0]} has no attention; layers with it are {_listed(layers)}")
    if len(found) == len(layers):
        raise RequestError("--keep names all layers with attention, so that nothing is converted; name fewer")
    if many is not None and len(found) != count:
        raise RequestError(
            f"--keep names {len(found)} layers, and :{many} keeps attention in {count}; name {count}, or drop :{many}"
        )
    return found


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers[:20])) + (" ..." if len(layers) > 20 else "")
