"""Time steps of the engine that verify drafts, beside steps that do not."""

from __future__ import annotations

import time
from collections.abc import Sequence

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
    config = resolve(
        loaded.spec, length, options, free_bytes=4 << 30, fixed_len=True, float_bytes=loaded.table.memory.float_bytes,
        kv_cache_dtype=loaded.storage.dtype,
    )  # fmt: skip
    engine, rng = Engine(loaded, config), np.random.default_rng(0)
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
