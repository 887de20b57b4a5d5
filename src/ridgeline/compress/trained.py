"""Train the codes of a quantized model (QAT), and keep them as the codes of any other scheme are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ridgeline.compress.choose import Chosen, lost_power, matrix_of
from ridgeline.compress.layers import Part, keys_of, parts
from ridgeline.compress.partial import Partial
from ridgeline.compress.result import Quantized
from ridgeline.load.stored import dequantized
from ridgeline.ops.devices import training_device

if TYPE_CHECKING:
    from ridgeline.train.qat import Codes


def train_codes(
    start: Quantized, facts: Chosen, sequences: Sequence[Sequence[int]], partial: Partial, *, tokens: int, seed: int,
    threads: int | None, on_progress: Callable[[str, int, int], None],
) -> tuple[Quantized, Chosen]:  # fmt: skip
    """Return the model with trained codes, and what is known about its matrices.

    An interrupted run continues from its newest checkpoint, which is in the folder of `partial`.

    Args:
        start: the model whose codes the training begins with. facts: the remarks about its matrices.
        sequences: token ids to train on, all of one length. tokens: how many of them, repetitions included.
        seed: seed of the order of the sequences. threads: threads of torch on a CPU; None: torch's own number.
    """
    device = training_device("auto")  # checks for torch, which the next import needs
    from ridgeline.train.qat import Distillation, Original, distill

    original, every = start.original, list(parts(start.original.spec))
    kept = Partial(partial.folder / "trained", {})
    kept.close()  # the folder around it is locked
    if not all(kept.has(part) for part in every):

        def on_step(done: int, steps: int, kl: float) -> None:
            on_progress(f"training the codes: KL {kl:.4f}", done, steps)

        codes = distill(
            Original(original.spec, original.model.weights, original.max_model_len),
            {name: start.codes(name) for name in start.formats}, sequences, Distillation(tokens, seed=seed), device,
            partial.folder / "training", threads=threads, on_step=on_step,
        )  # fmt: skip
        for part in every:
            kept.save(part, _chosen(start, part, codes, facts))
    found = Chosen()
    for part in every:
        found.tell(kept.load(part))
    return Quantized(original, every, kept, start.formats, start.types), found


def _chosen(start: Quantized, part: Part, codes: Codes, facts: Chosen) -> Chosen:
    """Return the result of a part. Columns count equally in the lost power, since inputs were not observed.

    Matrices that saw too few tokens are named only if training left their codes as they were.
    """
    before = start.part(part.weights[0].name).codes
    found = Chosen()
    for w in part.matrices:
        stored = {w.name: np.asarray(start.original.model.weights[w.name], np.float32)}
        for key, matrix in zip(keys_of(w), codes[w.name], strict=True):
            found.codes[key] = matrix
            found.lost[key] = lost_power(matrix_of(stored, key), dequantized(matrix), None)
            if key in facts.unseen and np.array_equal(np.asarray(matrix.codes), np.asarray(before[key].codes)):
                found.unseen[key] = facts.unseen[key]
            if key in facts.outliers:
                found.outliers[key] = facts.outliers[key]
    return found
