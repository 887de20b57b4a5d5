"""Measure what blocks of a length cost a diffusion model that was not trained with them, on a short sample text.

The cost is the bound of -log p that training makes small (train/masked.py): of a block of m tokens, l are masked, and
their losses are multiplied by m / l. Each block is computed alone, after the tokens before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ridgeline.diffusion import block_notes
from ridgeline.errors import RequestError, RidgelineError
from ridgeline.evals.documents import encode_text
from ridgeline.evals.price import MAX_TOKENS, SAMPLE, price_path, read_price, write_price
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model
from ridgeline.sample.logits import log_softmax

MOST_BLOCKS = 64  # blocks of the sample that are measured
TOGETHER = 8  # blocks of a forward pass


@dataclass(frozen=True, slots=True)
class BlocksPrice:
    """Bounds on the sample, in nats per token: with the blocks of the model, and with blocks of a trained length."""

    own: float
    trained: float
    num_tokens: int


def describe_blocks(
    model: str, options: LoadOptions, tokenizer: str | None, loaded: LoadedModel, on_start: Callable[[str], None]
) -> tuple[str, ...]:
    """Return a remark on blocks with which the weights were not trained, with what they cost; () if they were."""
    spec = loaded.spec
    notes = block_notes(spec)
    if not notes:
        return ()
    assert spec.diffusion is not None
    nearest = min(spec.diffusion.trained_blocks, key=lambda size: max(size, spec.block) / min(size, spec.block))
    try:
        price = _price(model, options, tokenizer, loaded, nearest, on_start)
    except RidgelineError as e:
        return (f"{notes[0]}; the cost is not known: {e}",)
    return (
        f"{notes[0]}: at most {price.own:.3g} nats per token of a sample text, and {price.trained:.3g} with blocks of "
        f"{nearest}",
    )


def _price(
    model: str, options: LoadOptions, tokenizer: str | None, loaded: LoadedModel, nearest: int,
    on_start: Callable[[str], None],
) -> BlocksPrice:  # fmt: skip
    """Measure or look up the bounds. Raises RidgelineError if nothing can be measured."""
    path, with_tokenizer = price_path(model, options, tokenizer, blocks=f"{loaded.spec.block},{nearest}")
    if (known := read_price(path, BlocksPrice)) is not None:
        return known
    on_start(f"blocks of {loaded.spec.block} on {model}: measuring their cost on a sample text, once")
    ids = encode_text(SAMPLE.read_text(encoding="utf-8"), Tokenizer.from_folder(with_tokenizer), MAX_TOKENS).token_ids
    ids = [i for i in ids if loaded.spec.diffusion and i != loaded.spec.diffusion.mask_token]
    if len(ids) <= max(nearest, loaded.spec.block):
        raise RequestError(f"the sample text has {len(ids)} tokens, and a block is as long")
    trained = pass_model(model, replace(options, diffusion_block=nearest))
    price = BlocksPrice(bound_per_token(loaded, ids), bound_per_token(trained, ids), len(ids))
    write_price(path, price)
    return price


def bound_per_token(loaded: LoadedModel, ids: Sequence[int], seed: int = 0) -> float:
    """Return the bound of -log p, in nats per token, over MOST_BLOCKS blocks of `ids` at most."""
    size, rng = loaded.spec.block, np.random.default_rng(seed)
    starts = [at for at in range(0, len(ids), size) if max(at, 1) < min(at + size, len(ids))]
    chosen = [starts[i] for i in np.unique(np.linspace(0, len(starts) - 1, min(MOST_BLOCKS, len(starts))).astype(int))]
    sums = [_bounds(loaded, ids, chosen[at : at + TOGETHER], rng) for at in range(0, len(chosen), TOGETHER)]
    return sum(nats for nats, _ in sums) / sum(count for _, count in sums)


def _bounds(
    loaded: LoadedModel, ids: Sequence[int], starts: Sequence[int], rng: np.random.Generator
) -> tuple[float, int]:
    """Return the sum of the bounds of some blocks, and the number of their tokens."""
    spec = loaded.spec
    assert spec.diffusion is not None
    sequences: list[list[int]] = []
    rows: list[int] = []
    wanted: list[int] = []
    weights: list[float] = []
    count = offset = 0
    for start in starts:
        end, first = min(start + spec.block, len(ids)), max(start, 1)  # nothing predicts the first token of a text
        masked = rng.permutation(np.arange(first, end))[: int(rng.integers(1, end - first + 1))]
        tokens = list(ids[:end])
        for at in masked:
            tokens[at] = spec.diffusion.mask_token
        sequences.append(tokens)
        rows += [offset + int(at) - spec.diffusion.predicts_next for at in masked]
        wanted += [ids[at] for at in masked]
        weights += [(end - first) / len(masked)] * len(masked)
        count, offset = count + end - first, offset + end
    memory = loaded.table.memory
    stream = loaded.model.forward(loaded.dense_step(sequences))
    logprobs = log_softmax(memory.get(loaded.model.logits(stream, memory.integers(np.array(rows)))))
    return -float((logprobs[np.arange(len(rows)), wanted] * np.array(weights)).sum()), count
