"""Time steps of the engine: those that verify drafts, and those with a part of a prompt in them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from ridgeline.engine import Engine
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.load import LoadedModel
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec.request import SamplingParams

WARM = 6  # steps of each kind before any is timed: the first ones are recorded


def verification_s(loaded: LoadedModel, context: int, drafts: int, rounds: int) -> tuple[Sequence[float], ...]:
    """Return the seconds of `rounds` steps of one token, and of as many that verify drafts; they take turns.

    context: tokens of the prompt before them.
    """
    length = context + (WARM + rounds) * (2 + drafts) + 2
    options = EngineOptions(max_num_seqs=2, num_speculative_tokens=drafts, draft_depth="fixed")
    engine, rng = _engine(loaded, length, options), np.random.default_rng(0)
    ids = rng.integers(0, loaded.spec.vocab_size, context).tolist()
    params = SamplingParams(max_tokens=length - context, temperature=0, ignore_eos=True)
    engine.add(0, GenerationRequest(ids, params, (NoiseKey(0, 0),)))
    while not engine.step():
        pass
    found: dict[int, list[float]] = {0: [], drafts: []}
    for count in range(WARM + rounds):
        for depth, seconds in found.items():
            if depth:
                engine.propose(0, 0, rng.integers(0, loaded.spec.vocab_size, depth).tolist())
            start = time.perf_counter()
            engine.step()
            if count >= WARM:
                seconds.append(time.perf_counter() - start)
    return tuple(found.values())


def gaps_s(loaded: LoadedModel, prompt: int, most: int, decodes: int, seed: int) -> tuple[list[float], float]:
    """Return the seconds of each step from the arrival of a prompt to its first token, and of steps without it.

    Other sequences decode meanwhile, so each of these times is a gap between two of their tokens. prompt: its tokens.
    most: most tokens of a step; of a longer prompt each step computes a chunk. decodes: number of the other sequences.
    """
    length, short = loaded.max_model_len, 8
    options = EngineOptions(max_num_seqs=decodes + 1, max_num_batched_tokens=most, speculative="off")
    engine, rng = _engine(loaded, length, options), np.random.default_rng(seed)
    params = SamplingParams(max_tokens=length - short, temperature=0, ignore_eos=True)
    for i in range(decodes):
        ids = rng.integers(0, loaded.spec.vocab_size, short).tolist()
        engine.add(i, GenerationRequest(ids, params, (NoiseKey(seed, i),)))
    alone = [_step_s(engine)[0] for _ in range(decodes + 2 * WARM)][-WARM:]
    last = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for number in (decodes, decodes + 1):  # the first prompt lets the engine see steps of every size
        ids = rng.integers(0, loaded.spec.vocab_size, prompt).tolist()
        engine.add(number, GenerationRequest(ids, last, (NoiseKey(seed, number),)))
        gaps, answered = [], set[int]()
        while number not in answered:
            seconds, answered = _step_s(engine)
            gaps.append(seconds)
    return gaps, median(alone)


def _step_s(engine: Engine) -> tuple[float, set[int]]:
    """Return the seconds of a step, and the requests that got a token."""
    start = time.perf_counter()
    events = engine.step()
    return time.perf_counter() - start, {event.request for event in events}


def _engine(loaded: LoadedModel, length: int, options: EngineOptions) -> Engine:
    config = resolve(
        loaded.spec, length, options, free_bytes=4 << 30, fixed_len=True, float_bytes=loaded.table.memory.float_bytes,
        kv_cache_dtype=loaded.storage.dtype,
    )  # fmt: skip
    return Engine(loaded, config)
