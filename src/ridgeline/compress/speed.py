"""Predict and measure how fast a model decodes one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from ridgeline.errors import DeviceError
from ridgeline.llm import LLM
from ridgeline.measure.latency import check, random_prompts
from ridgeline.measure.predict import Asked, calibrated_machine, predict
from ridgeline.settings import EngineOptions
from ridgeline.spec.request import SamplingParams

PROMPT, ANSWER = 32, 32  # tokens, or less for a model with shorter contexts
TIMES = 3  # measured answers, of which the median counts


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of decode with one sequence.

    predicted: by the planner, for this machine as it was calibrated; None without a calibration. measured: the median
    of `TIMES` answers.
    """

    predicted: float | None
    measured: float

    def to_json(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return {"predicted_tokens_per_s": self.predicted, "measured_tokens_per_s": self.measured}


@dataclass(frozen=True, slots=True)
class Speeds:
    """The speeds of models by name, without those that do not fit into memory.

    notes: how far predictions can be trusted, or why there are none; and why a model was not measured.
    """

    by_name: Mapping[str, Speed]
    notes: tuple[str, ...]


def measure_speeds(models: Mapping[str, str], threads: int | None) -> Speeds:
    """Load models, one after the other, and decode with each of them.

    models: folders or hub ids by name. threads: threads of the kernels.
    """
    found: dict[str, Speed] = {}
    notes: list[str] = []
    for name, model in models.items():
        try:
            found[name], note = _measure(model, threads)
        except DeviceError as e:  # a model is quantized layer by layer, and may be larger than the memory
            note = f"the speed of {name} is not measured: {e}"
        notes.append(note)
    return Speeds(found, tuple(dict.fromkeys(notes)))


def _measure(model: str, threads: int | None) -> tuple[Speed, str]:
    options = EngineOptions(max_num_seqs=1, speculative="off")
    llm = LLM(model, device="cpu", threads=threads, engine=options, skip_tokenizer_init=True)
    answer = min(ANSWER, llm.max_model_len // 2)
    prompt = min(PROMPT, llm.max_model_len - answer)
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    seconds = []
    for i in range(TIMES + 1):  # the first answer warms up
        outputs = llm.generate(random_prompts((i,), 1, prompt, llm.loaded.spec.vocab_size), params)
        check(outputs)
        seconds.append(outputs[0].timing.tpot_s or outputs[0].timing.total_s)
    machine, note = calibrated_machine(llm.loaded.table.driver)
    predicted = None
    if machine is not None and llm.config is not None:
        expected = predict(llm.loaded, llm.config, [Asked(prompt, answer)], machine, note).tpot_s[0]
        predicted = None if expected is None else 1 / expected
        note = f"predictions: {note}"
    return Speed(predicted, 1 / median(seconds[1:])), note
