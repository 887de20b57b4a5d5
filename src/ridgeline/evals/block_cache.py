"""Measure what a block cache costs a diffusion model in accuracy, on a short sample text.

The sample is a prompt, a block of which some tokens are known, and masks. The distributions of the block's other tokens
are compared with those of a pass that computes all rows, as a later pass over the block does without a block cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ridgeline.errors import RequestError, RidgelineError
from ridgeline.evals.documents import encode_text
from ridgeline.evals.price import MAX_TOKENS, SAMPLE, Price, describe_price, price_path, read_price, write_price
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.nn.step import Stream
from ridgeline.runtime.kept import forward_with_kept_rows
from ridgeline.runtime.load import LoadedModel, LoadOptions
from ridgeline.sample.logits import Floats, log_softmax

BLOCK = 32  # tokens of a block of the sample, which is usual for LLaDA
BLOCKS = 4  # blocks of the sample that are measured


def describe_block_cache(
    model: str, options: LoadOptions, tokenizer: str | None, loaded: LoadedModel, on_start: Callable[[str], None]
) -> tuple[str, ...]:
    """Return a line about the accuracy cost of the model's block cache; () if it has none."""
    diffusion = loaded.spec.diffusion
    if diffusion is None or diffusion.block_cache == "none":
        return ()
    subject = f"block cache {diffusion.block_cache} is approximate"
    try:
        path, with_tokenizer = price_path(model, options, tokenizer, block_cache=diffusion.block_cache)
        if (price := read_price(path, Price)) is None:
            on_start(f"block cache {diffusion.block_cache} on {model}: measuring the accuracy cost on a sample, once")
            text = encode_text(SAMPLE.read_text(encoding="utf-8"), Tokenizer.from_folder(with_tokenizer), MAX_TOKENS)
            price = measure_block_cache(loaded, [i for i in text.token_ids if i != diffusion.mask_token])
            write_price(path, price)
    except RidgelineError as e:
        return (f"{subject}: the accuracy cost is not known: {e}",)
    return (f"{subject}: KL to no block cache is {describe_price(price)}",)


def measure_block_cache(loaded: LoadedModel, ids: Sequence[int], seed: int = 0) -> Price:
    """Return the cost of the model's block cache on `ids`, in blocks of BLOCK tokens or less.

    Raises RequestError if the sample is too short.
    """
    size, rng = min(BLOCK, len(ids) // (BLOCKS + 1)), np.random.default_rng(seed)
    if size < 4:
        raise RequestError(f"the sample text has {len(ids)} tokens, and needs {4 * (BLOCKS + 1)}")
    kl, same = list[float](), list[bool]()
    for i in range(BLOCKS):
        start = len(ids) * (i + 1) // (BLOCKS + 1)
        hidden = rng.permutation(size)[: size * (3 - i % 3) // 4].tolist()  # three quarters of the tokens, then fewer
        own, cached = _two_ways(loaded, ids, start, size, hidden)
        kl += (np.exp(own) * (own - cached)).sum(-1).tolist()
        same += (own.argmax(-1) == cached.argmax(-1)).tolist()
    return Price(max(0.0, float(np.mean(kl))), float(np.mean(same)), len(kl))


def _two_ways(
    loaded: LoadedModel, ids: Sequence[int], start: int, size: int, hidden: Sequence[int]
) -> tuple[Floats, Floats]:
    """Return log probabilities of the block's hidden tokens, [n, vocabulary]: without a block cache, and with it."""
    diffusion = loaded.spec.diffusion
    assert diffusion is not None
    mask, after = diffusion.mask_token, [diffusion.mask_token] * size
    first = [*ids[:start], *[mask] * size, *after]
    now = [*ids[: start + size], *after]
    for index in hidden:
        now[start + index] = mask
    begin = start - diffusion.predicts_next
    end = start + size if diffusion.block_cache == "dual" else len(now)
    rows = np.array([begin + index for index in hidden])
    memory = loaded.table.memory

    def read(stream: Stream) -> Floats:
        return log_softmax(memory.get(loaded.model.logits(stream, memory.integers(rows))).astype(np.float64))

    own = read(loaded.model.forward(loaded.dense_step([now])))
    return own, read(forward_with_kept_rows(loaded, [first], [now], [range(begin, end)]))
