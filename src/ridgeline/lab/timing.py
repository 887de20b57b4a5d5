"""Load models for experiments, and time their steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ridgeline.llm import LLM
from ridgeline.measure.latency import check, random_prompts
from ridgeline.settings import EngineOptions
from ridgeline.spec.request import SamplingParams

SMALL = "HuggingFaceTB/SmolLM2-135M"  # its float32 weights have 538 MB, which no cache of a CPU holds


@contextmanager
def random_model(config: Mapping[str, Any], threads: int | None, seqs: int, length: int, **more: Any) -> Iterator[LLM]:
    """Yield a model of a config with random weights. seqs: most sequences of a step. length: longest sequence."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield model(folder, threads, seqs, length, load_format="dummy", **more)


def model(name: str, threads: int | None, seqs: int, length: int, **more: Any) -> LLM:
    """Return a model on the CPU without drafts. name: a folder or a built-in model. more: arguments of LLM."""
    options = EngineOptions(max_num_seqs=seqs, speculative="off")
    return LLM(
        name, device="cpu", threads=threads, engine=options, skip_tokenizer_init=True, max_model_len=length, **more
    )  # fmt: skip


def answers(llm: LLM, seed: Sequence[int], batch: int, prompt: int, tokens: int) -> list[Any]:
    """Return the outputs for random prompts of equal length, sampled greedily to a fixed length.

    Raises RequestError if one of them fails.
    """
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    found = llm.generate(random_prompts(seed, batch, prompt, llm.loaded.spec.vocab_size), params)
    check(found)
    return found


def token_s(llm: LLM, seed: Sequence[int], batch: int, prompt: int, tokens: int) -> float:
    """Return the seconds of a decode step, as the mean over the answers of a batch."""
    times: list[float] = [out.timing.tpot_s for out in answers(llm, seed, batch, prompt, tokens)]
    return sum(times) / len(times)


def middle(values: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Return the median of repetitions, and the smallest and the largest."""
    return median(values), (min(values), max(values))


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Return the exponent of the power law that fits points best: the slope of their logarithms by least squares."""
    x, y = [math.log(a) for a, _ in points], [math.log(b) for _, b in points]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    over = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return over / sum((a - mean_x) ** 2 for a in x)
