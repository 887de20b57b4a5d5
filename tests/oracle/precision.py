"""Print the largest difference of any logit for prompts of 400 tokens: `python -m oracle.precision`, with tests/ on the
path.

It compares Ridgeline's float32 with transformers' float32, and transformers' float32 with its own float64.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from oracle.build import build, double, oracle_logits
from oracle.case import prompts
from oracle.families import CASES
from ridgeline import LLM
from ridgeline.spec import Attention, LatentAttention


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m oracle.precision", description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help="names of oracle cases; default all")
    parser.add_argument("--tokens", type=int, default=400, help="length of the prompt in tokens; default 400")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    worst = {True: (0.0, 0.0, ""), False: (0.0, 0.0, "")}
    print("| case | recurrent | Ridgeline to transformers | transformers to its float64 |\n|---|---|---|---|")
    for name in options.cases:
        case = CASES[name]
        room = {"n_positions": 512} if "n_positions" in case.kwargs else {"max_position_embeddings": 512}
        if "original_max_position_embeddings" in str(case.kwargs) or "dynamic" in name or "mamba" in case.model_type:
            room = {}  # the lengths determine its frequencies, or it has no positions
        if (
            case.kwargs.get("n_positions", case.kwargs.get("max_position_embeddings", 512)) < options.tokens
            and not room
        ):
            continue
        text = case.kwargs.get("text_config")
        kwargs = {**case.kwargs, "text_config": text | room} if isinstance(text, dict) else case.kwargs | room
        case = replace(case, kwargs=kwargs, lengths=(options.tokens,), max_model_len=512)
        with tempfile.TemporaryDirectory() as folder:
            model = build(case, Path(folder))
            llm, sequences = LLM(folder), prompts(case)
            theirs, ours = oracle_logits(model, sequences)[0], llm.logits(sequences)[0]
            exact = oracle_logits(double(model), sequences)[0]
            plain = all(isinstance(x.mixer, Attention | LatentAttention | None) for x in llm.loaded.spec.layers)
        found = float(np.abs(ours - theirs).max()), float(np.abs(theirs - exact).max())
        worst[plain] = max(worst[plain], (*found, name))
        print(f"| {name} | {'' if plain else 'yes'} | {found[0]:.1e} | {found[1]:.1e} |", flush=True)
    for plain, (error, noise, name) in worst.items():
        print(f"largest {'without' if plain else 'with'} recurrence: {error:.1e}, in {name}, beside {noise:.1e}")


if __name__ == "__main__":
    main()
