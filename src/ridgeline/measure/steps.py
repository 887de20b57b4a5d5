"""Time steps of the engine one by one: prompts, and decodes at a given context."""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ridgeline.cost.operations import Slice
from ridgeline.engine import Engine, Session
from ridgeline.ops.host.memory import dtype_of
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec import ModelSpec, to_json
from ridgeline.spec.request import SamplingParams
from ridgeline.spec.storage import default_storage

CHUNK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A step's batch, as the planner describes it, and its seconds."""

    batch: tuple[Slice, ...]
    seconds: float

    @property
    def is_decode(self) -> bool:
        return all(s.tokens == 1 for s in self.batch)


def load_random(spec: ModelSpec, *, dtype: str = "float32", weights: str = "auto", device: str = "auto") -> LoadedModel:
    """Load a spec with random weights, and with the engine's default type of state. dtype, weights: see LoadOptions."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"model_type": "ridgeline", "spec": to_json(spec)}
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        options = LoadOptions(device=device, dtype=dtype, weights=weights, load_format="dummy")
        loaded = load_model(folder, options)
    return replace(loaded, storage=default_storage(loaded.stored_weights))


class Steps:
    """An engine for `sequences` sequences of up to `length` tokens that times its steps.

    Keys and values are stored in `loaded.storage`, which is a type of floats.
    """

    def __init__(self, loaded: LoadedModel, sequences: int, length: int, *, chunk: int = CHUNK_TOKENS) -> None:
        self._loaded, self._vocab, self._salt = loaded, loaded.spec.vocab_size, 0
        chunk, sequences = max(chunk, sequences), sequences + 1  # pages of one more: the scheduler keeps some free
        options = EngineOptions(max_num_seqs=sequences, max_num_batched_tokens=chunk, steps_in_flight=1)
        room = 4 * sequences * loaded.spec.state_elements(length) * 3 + (4 << 30)
        self.config = resolve(
            loaded.spec, length, options, free_bytes=room, fixed_len=True, fraction=1.0,
            float_bytes=loaded.table.memory.float_bytes, kv_cache_dtype=loaded.storage.dtype,
        )  # fmt: skip
        self._engine = Engine(loaded, self.config)
        self._session = Session(self._engine, None)

    def run(self, prompts: Sequence[int], new: int) -> list[TimedStep]:
        """Run random prompts of these lengths, which start together, with `new` greedy tokens for each."""
        self._add(prompts, new)
        return [self._timed() for _ in iter(lambda: len(self._session) > 0, False)]

    def decodes(self, sequences: int, context: int, steps: int) -> list[TimedStep]:
        """Run decode steps of sequences that hold `context` tokens.

        Their pages are filled with random numbers, so prompts are not computed.
        """
        self._add([context] * sequences, steps + 2)
        with self._loaded.model.without_layers():
            self._session.step()  # the last one before was of other sequences
            while not self._is_decoding(sequences):
                self._session.step()
                if not len(self._session):
                    raise RuntimeError(f"{sequences} sequences of {context} tokens never decoded together")
        self._fill()
        found = [self._timed() for _ in iter(lambda: len(self._session) > 0, False)]
        return [step for step in found if step.is_decode and sum(s.count for s in step.batch) == sequences]

    def _is_decoding(self, sequences: int) -> bool:
        shape = self._session.last_step()
        return len(shape) == sequences and all(sampled for _, _, sampled in shape)

    def _add(self, prompts: Sequence[int], new: int) -> None:
        self._salt += 1
        rng = np.random.default_rng(self._salt)
        params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        for i, length in enumerate(prompts):
            ids = rng.integers(0, self._vocab, length).tolist()
            request = GenerationRequest(ids, params, (NoiseKey(0, i),), cache_salt=f"timed {self._salt}")
            self._session.add(request, lambda chunk: None)

    def _timed(self) -> TimedStep:
        start = time.perf_counter()
        self._session.step()
        seconds = time.perf_counter() - start
        alike = Counter(self._session.last_step())
        batch = tuple(Slice(n, tokens, context, sampled) for (tokens, context, sampled), n in alike.items())
        return TimedStep(batch, seconds)

    def _fill(self) -> None:
        """Put random numbers into the pages that the sequences hold; other numbers would take as long."""
        rng = np.random.default_rng(0)
        pages = []
        for group in self.config.groups:
            kind = dtype_of(group.slots[0].parts[0].dtype)
            pages.append(rng.normal(0.0, 0.5, group.page_bytes // kind.itemsize).astype(kind).view(np.uint8))
        self._engine.overwrite(pages)
