"""Write what a draft model learns from its target: greedy continuations of prompts from the training side.

This is sequence-level distillation (Kim and Rush, arXiv:1606.07947): a draft only needs to predict the target's most
likely token, in texts that the target itself writes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.llm import LLM
from ridgeline.load.safetensors import SINGLE
from ridgeline.spec.request import SamplingParams
from ridgeline.train.data.folder import TrainingData
from ridgeline.train.data.shards import Shard, write_tokens
from ridgeline.train.pocket.produce import Output

Ids = list[int]


@dataclass(frozen=True, slots=True)
class ContinuationOptions:
    """Options for the prompts. num_prompts: number of prompts, from random positions, with min_ to max_prompt_tokens
    tokens each after an <|endoftext|>. new_tokens: longest continuation.
    """

    num_prompts: int
    min_prompt_tokens: int = 4
    max_prompt_tokens: int = 128
    new_tokens: int = 128
    seed: int = 0


def write_continuations(
    target: Output, data: TrainingData, folder: Path, options: ContinuationOptions, on_done: Callable[[int], None]
) -> Shard:
    """Write a shard of prompts with the target's continuations into a new folder; a complete one of an earlier run is
    reused.

    on_done: called with the number of new tokens of each completed prompt. Raises DataError for a shard that was made
    with another target or other options.
    """
    key = {"target": hash_of(target), **asdict(options)}
    made_of = hashlib.sha256(json.dumps([data.manifest.hash, key]).encode()).hexdigest()
    if folder.exists():
        return Shard.open(folder).check_made_of(made_of)
    llm = LLM(str(target.folder), device=target.ranks.device, skip_tokenizer_init=True)
    prompts = list(draw_prompts(data.train, options))
    params = SamplingParams(temperature=0.0, max_tokens=options.new_tokens)
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts], params,
        on_done=lambda index, found: on_done(len(found.outputs[0].token_ids)),
    )  # fmt: skip
    documents = [[*ids, *found.outputs[0].token_ids] for ids, found in zip(prompts, outputs, strict=True)]
    num_bytes = sum(len(text.encode()) for text in data.tokenizer.decode_batch(documents))
    return write_tokens(folder, map(np.array, documents), data.tokenizer, made_of, num_bytes)


def hash_of(target: Output) -> str:
    """Return the SHA-256 of the target's weights."""
    return hashlib.sha256((target.folder / SINGLE).read_bytes()).hexdigest()


def draw_prompts(shard: Shard, options: ContinuationOptions) -> Iterator[Ids]:
    """Yield pieces of documents, each after an <|endoftext|>. The seed determines their positions and lengths."""
    rng = np.random.default_rng(options.seed)
    lengths: np.ndarray[Any, Any] = np.diff(shard.offsets)
    for document in rng.choice(len(lengths), options.num_prompts, p=lengths / lengths.sum()):
        tokens = shard.document(int(document))[1:-1]
        size = min(int(rng.integers(options.min_prompt_tokens, options.max_prompt_tokens + 1)), len(tokens))
        start = int(rng.integers(0, len(tokens) - size + 1))
        yield [shard.info.end_of_text_id, *tokens[start : start + size].tolist()]
