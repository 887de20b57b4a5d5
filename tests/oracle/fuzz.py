"""Compare with transformers while every field of every family is altered: `python -m oracle.fuzz`, with tests/ on the
path.

Both programs make a model from each altered config, with equal weights, and run one sequence. The outcome must be equal
logits, or an error of both, or an error of ours that names the field and has its reason in `oracle.unserved`.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from oracle.build import PLAIN, class_for, double, make_model, oracle_logits, redraw
from oracle.case import Case, prompts
from oracle.families import CASES
from oracle.flips import Flip, flips
from oracle.unserved import reason
from ridgeline.archs import family_of
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.weights import load_weights
from ridgeline.nn import Model
from ridgeline.ops import open_table
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import ModelSpec

TOLERANCE = 1e-4
EQUAL, BOTH, UNSERVED, LENIENT = "equal", "both refuse", "we refuse", "only we accept"
DIFFERENT, CRASH, UNEXPLAINED = "NOT EQUAL", "CRASH", "NO REASON"
# Families with windows: in the layers of one kind, and in all layers.
BY_KIND = (
    "afmoe", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "dots1", "exaone4", "exaone_moe", "flint",
    "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "gpt_oss", "granite_swa", "granitemoe_swa",
    "kolibri1", "lara_mini", "mellum", "ministral", "olmo3", "qwen2", "qwen2_moe", "qwen3", "smollm3", "vaultgemma",
)  # fmt: skip
WINDOWED = ("minimax", "ministral3", "mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")
BAD = (DIFFERENT, CRASH, UNEXPLAINED)


@dataclass(frozen=True)
class Verdict:
    """The result of one flip."""

    outcome: str
    detail: str = ""


class Subject:
    """The base of one case: its config as transformers writes it, its sequence, and earlier results."""

    def __init__(self, case: Case) -> None:
        self.case = case
        text = make_model(case).config.to_json_string()
        self.config: dict[str, Any] = json.loads(text, object_hook=_infinity)
        self.tokens = prompts(case)[-1]
        self._table = open_table("reference")
        self._theirs: dict[str, tuple[nn.Module | None, np.ndarray | str]] = {}

    def judge(self, flip: Flip) -> Verdict:
        """Compare both programs on one altered config."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(flip.config))
            try:
                spec, refusal = open_checkpoint(Path(folder)).spec, ""
            except ConfigError as e:
                spec, refusal = None, str(e)
            except Exception as e:
                return Verdict(CRASH, _told(e))
            model, theirs = self.run_theirs(flip.config, Path(folder) if spec else None)
            if spec is None:
                return self.refused(flip, refusal, theirs)
            if isinstance(theirs, str):
                return _explained(LENIENT, flip, theirs)
            try:
                ours = self._run_ours(spec, flip.config, Path(folder))
            except RidgelineError as e:
                return _explained(UNSERVED, flip, str(e))
            except Exception as e:
                return Verdict(CRASH, _told(e))
        return self.compared(flip, spec, model, theirs, ours)

    def refused(self, flip: Flip, refusal: str, theirs: np.ndarray | str) -> Verdict:
        named = {*flip.path.split("."), *_names(flip.config)}
        if not any(name in refusal for name in named):
            return Verdict(UNEXPLAINED, f"no field in: {refusal}")
        if isinstance(theirs, str):
            return Verdict(BOTH, f"{refusal} | {theirs}")
        return _explained(UNSERVED, flip, refusal)

    def run_theirs(self, config: Mapping[str, Any], folder: Path | None) -> tuple[Any, np.ndarray | str]:
        """Return transformers' model and its logits, or why there are none. The model is saved if a folder is given."""
        try:
            parsed = transformers.CONFIG_MAPPING[str(config["model_type"])].from_dict(deepcopy(dict(config)))
            model = class_for(parsed.model_type).from_config(parsed, **PLAIN).to(torch.float32).eval()
            _as_published(model)
            redraw(model, self.case.seed)
            logits = oracle_logits(model, [self._tokens(config)])[0]
        except Exception as e:
            return None, _told(e)
        if not np.isfinite(logits).all():
            return None, "its logits are not finite"
        if folder is not None:
            try:
                model.save_pretrained(folder)
            except Exception as e:
                return None, f"it cannot be saved: {_told(e)}"
        return model, logits

    def _tokens(self, config: Mapping[str, Any]) -> list[int]:
        """Return the sequence, limited to the vocabulary, and to the positions of XGLM, whose class grows its table."""
        inner = config.get(family_of(config).within or "", config)
        size, positions = inner.get("vocab_size"), inner.get("max_position_embeddings")
        kept = self.tokens
        if inner.get("model_type") == "xglm" and type(positions) is int and positions > 0:
            kept = kept[:positions]
        return [t % size for t in kept] if type(size) is int and size > 0 else kept

    def _run_ours(self, spec: Any, config: Mapping[str, Any], folder: Path) -> np.ndarray:
        memory = self._table.memory
        names = family_of(config).names
        weights = load_weights(spec, names, TensorFiles(folder), memory, "float32", lambda done: None)
        tokens = self._tokens(config)
        return memory.get(Model(spec, weights, self._table, len(tokens))(DenseStep.build([tokens], memory)))

    def compared(self, flip: Flip, spec: ModelSpec, model: Any, theirs: np.ndarray, ours: np.ndarray) -> Verdict:
        windows = [own.window for own in spec.attentions(shared=True)]
        if windows != (wanted := _windows(model.config.get_text_config(), len(windows))):
            return Verdict(DIFFERENT, f"windows {windows} for {wanted}")
        if theirs.shape != ours.shape:
            return Verdict(DIFFERENT, f"logits {ours.shape} for {theirs.shape}")
        error = float(np.abs(ours - theirs).max())
        if error <= TOLERANCE:
            return Verdict(EQUAL, f"{error:.1e}")
        noise = float(np.abs(oracle_logits(double(model), [self._tokens(flip.config)])[0] - theirs).max())
        outcome = EQUAL if error <= 10 * noise else DIFFERENT
        return Verdict(outcome, f"{error:.1e}, transformers from float64 {noise:.1e}")


def _windows(config: Any, count: int) -> list[int | None]:
    """Return the window of each attention layer, which a short sequence does not show."""
    if config.model_type == "gpt_neo":
        return [config.window_size if kind == "local" else None for kind in config.attention_layers]
    window = getattr(config, "sliding_window", None)
    kinds = [kind for kind in getattr(config, "layer_types", None) or [] if kind != "linear_attention"]
    if config.model_type == "llama4_text":
        return [config.attention_chunk_size if kind == "chunked_attention" else None for kind in kinds]
    if "sliding_attention" in kinds or config.model_type in BY_KIND:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    return [window if config.model_type in WINDOWED else None] * count


def _infinity(value: dict[str, Any]) -> Any:
    """Return an infinity that the classes write but cannot read."""
    return math.inf if value == {"__float__": "Infinity"} else value


def _as_published(model: nn.Module) -> None:
    """Make a model compute like the program that published the family's models.

    Nemotron-H: transformers limits steps by `time_step_min`, which in NVIDIA's code only initializes biases, and not by
    `time_step_limit`, which limits them in NVIDIA's code. Phi-3.5-MoE: transformers takes the short divisors at every
    length, and the published code the long ones beyond the trained length.
    """
    if model.config.model_type == "nemotron_h":
        for module in model.modules():
            if hasattr(module, "time_step_limit"):
                module.time_step_limit = tuple(model.config.time_step_limit)
    if model.config.model_type == "phimoe":
        rotary = model.model.rotary_emb
        chosen, forward = rotary.rope_init_fn, rotary.forward

        def by_length(x: Any, position_ids: Any) -> Any:
            length = int(position_ids.max()) + 1
            rotary.rope_init_fn = lambda config: chosen(config, seq_len=length)
            return forward(x, position_ids)

        rotary.forward = by_length


def _names(config: Mapping[str, Any]) -> Iterator[str]:
    """Return the fields of a config, including those of nested objects."""
    for name, value in config.items():
        yield name
        if isinstance(value, Mapping):
            yield from _names(value)


def _explained(outcome: str, flip: Flip, detail: str) -> Verdict:
    harmless = frozenset(family_of(flip.config).harmless)
    why = reason(outcome == UNSERVED, flip.path.rsplit(".", 1)[-1], detail, harmless)
    return Verdict(outcome, f"{why} | {detail}") if why else Verdict(UNEXPLAINED, f"{outcome}: {detail}")


def _told(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(lines)[:300]} ({Path(where.filename).name}:{where.lineno})"


def run(name: str, chosen: Callable[[Flip], bool] = lambda flip: True) -> Iterator[tuple[Flip, Verdict]]:
    """Yield the verdicts on a case's flips."""
    subject = Subject(CASES[name])
    for flip in flips(subject.config, scalings=True):
        if chosen(flip):
            yield flip, subject.judge(flip)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m oracle.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help="names of oracle cases; default all")
    parser.add_argument("--only", default="", help="run the flips whose label contains this text; default all")
    parser.add_argument("--all", action="store_true", help="print every verdict, not only those that fail")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    total: Counter[str] = Counter()
    for name in options.cases:
        started, count = time.process_time(), Counter[str]()
        for flip, verdict in run(name, lambda flip: options.only in flip.label):
            count[verdict.outcome] += 1
            if options.all or verdict.outcome in BAD:
                print(f"{name}: {verdict.outcome}: {flip.label}: {verdict.detail}", flush=True)
        total += count
        print(f"{name}: {dict(count)}, {time.process_time() - started:.0f} s of CPU", flush=True)
    print(f"all: {dict(total)}, {time.process_time():.0f} s of CPU")
    return sum(total[outcome] for outcome in BAD)


if __name__ == "__main__":
    raise SystemExit(bool(main()))
