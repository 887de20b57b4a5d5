"""Measure a block diffusion model beside the one it was made from: python bench/diffusion.py MODEL [--original pocket]

    quality  the share of function headers that are completed (`ridgeline.evals.judge`, as bench/pocket.py does), at
             temperature 0.2, by decoder, block length and tokens a pass. Headers are of held-out documents. The gate:
             no answer has an error or the mask token.
    speed    tokens per second on device cpu by batch, in turns with the original, and the batch from which on the
             original is faster, measured and predicted with the tokens a pass that were measured. The gate: two runs
             give equal tokens.
    passes   the time of a pass over a block of 16, in steps of one token, for the shape of SmolLM2-135M in int8 with
             random weights. The gate: the answer has the passes that were asked for.

--figure FILE.svg draws tokens a pass against quality.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import emit
from peer_shapes import CONFIGS
from pocket import HELD_OUT, SEED, TEMPERATURE

from ridgeline import LLM, SamplingParams
from ridgeline.archs import OUR_MODEL_TYPE, spec_from_config
from ridgeline.diffusion import as_blocks
from ridgeline.evals import Proportion, function_headers, judge
from ridgeline.lab.experiment import Figure, Series
from ridgeline.lab.figures import svg
from ridgeline.measure.latency import random_prompts
from ridgeline.plan.blocks import BlockPasses
from ridgeline.plan.planner import Planner
from ridgeline.serve.engine.machine import deployment_of
from ridgeline.settings import EngineOptions
from ridgeline.spec import ModelSpec, to_json
from ridgeline.train import Corpus, split

ANSWER = 96  # tokens of a completion, whole blocks of each length
MASK = 1  # any token serves with random weights
SPEED: Mapping[str, Any] = {"confidence_threshold": 0.9}
PROMPT, BLOCK = 64, 16  # cases speed and passes


def decoders(size: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the parameters of each decoder, from few tokens a pass to many."""
    for remasking in ("low_confidence", "top_margin", "entropy", "random"):
        for kept in (1, 2, 4, 8):
            if kept <= size:
                yield remasking, {"remasking": remasking, "denoising_passes": size // kept}
    for threshold in (0.95, 0.9, 0.7, 0.5):
        yield "confidence_threshold", {"confidence_threshold": threshold}
    for factor in (0.1, 0.5, 1.0, 2.0):
        yield "confidence_factor", {"confidence_factor": factor}
    for bound in (0.05, 0.1, 0.5, 1.0):
        yield "entropy_bound", {"entropy_bound": bound}


def quality(args: argparse.Namespace) -> None:
    """Print a line for the original, and one for each block length and decoder."""
    held_out = split(Corpus.stdlib().documents, HELD_OUT, SEED).held_out
    known = sorted({h for d in held_out if d.name.endswith(".py") for h in function_headers(d.text)})
    headers = random.Random(SEED).sample(known, min(args.headers, len(known)))
    found = [("original", 1, 1.0, _completed(LLM(args.original, device="cpu"), headers, {}, "quality: original"))]
    for size in map(int, args.blocks.split(",")):
        llm = LLM(args.model, device="cpu", diffusion_block=size)
        for name, params in decoders(size):
            value = next(iter(v for k, v in params.items() if k != "remasking"))
            case = f"quality: blocks of {size}, {name} {value:g}"
            share, kept = _completed(llm, headers, params, case)
            found.append((f"{name}, {size}", size, kept, (share, kept)))
    if args.figure:
        _draw(args.figure, found)


def _completed(llm: LLM, headers: Sequence[str], own: Mapping[str, Any], case: str) -> tuple[float, float]:
    """Return the share of headers that a model completes, and its tokens a pass."""
    params = SamplingParams(max_tokens=ANSWER, temperature=TEMPERATURE, **own)
    outputs = llm.generate(list(headers), params)
    answers = [output.outputs[0] for output in outputs]
    passed = sum(judge(h, a.text).passed for h, a in zip(headers, answers, strict=True))
    share, tokens = Proportion.of(passed, len(headers)), sum(len(a.token_ids) for a in answers)
    passes = sum(output.num_passes for output in outputs) or tokens
    mask = llm.loaded.spec.diffusion.mask_token if llm.loaded.spec.diffusion else -1
    emit(
        case, all(a.error is None and mask not in a.token_ids for a in answers), value=round(share.value, 4),
        interval_95=[round(share.low, 4), round(share.high, 4)], headers=len(headers), tokens=tokens, passes=passes,
        tokens_per_pass=round(tokens / passes, 3),
    )  # fmt: skip
    return share.value, tokens / passes


def _draw(path: Path, found: Sequence[tuple[str, int, float, tuple[float, float]]]) -> None:
    """Draw tokens a pass against the share of completed headers, a line for each decoder and block length."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, _, kept, (share, _) in found:
        lines.setdefault(name, []).append((kept, share))
    series = tuple(Series(name, tuple(sorted(points)), True) for name, points in lines.items())
    path.write_text(svg(Figure("passes and quality", "tokens a pass", "share of headers completed", series, log=False)))


def speed(args: argparse.Namespace) -> None:
    """Print the speed of both models by batch, and the batch from which on the original is faster."""
    engine = EngineOptions(max_num_seqs=max(args.batches), speculative="off")
    own = LLM(args.model, device="cpu", diffusion_block=BLOCK, engine=engine)
    llms = {"original": LLM(args.original, device="cpu", engine=engine), "blocks": own}
    prompts, gains, kept = _prompts(own, max(args.batches)), dict[int, float](), list[float]()
    for batch in args.batches:
        runs = {name: [_run(llm, prompts[:batch], name) for _ in range(args.rounds)] for name, llm in llms.items()}
        medians = {name: median(run.tokens_per_s for run in some) for name, some in runs.items()}
        gains[batch] = medians["blocks"] / medians["original"]
        kept.append(runs["blocks"][0].tokens_per_pass)
        equal = all(run.tokens == some[0].tokens for some in runs.values() for run in some)
        emit(
            f"speed: batch {batch}", equal, tokens_per_s={name: round(x) for name, x in medians.items()},
            over_original=round(gains[batch], 3), tokens_per_pass=round(kept[-1], 2),
        )  # fmt: skip
    tokens = max(1.0, median(kept))
    planned = Planner(replace(deployment_of(own), diffusion=BlockPasses(BLOCK, tokens)))
    emit(
        "speed: crossing", True, tokens_per_pass=round(tokens, 2), measured=_crossing(gains),
        predicted=planned.diffusion_pays_below(PROMPT + ANSWER // 2),
    )  # fmt: skip


class _Run(NamedTuple):
    """One run of a batch. tokens: the answers."""

    tokens_per_s: float
    tokens_per_pass: float
    tokens: list[tuple[int, ...]]


def _run(llm: LLM, prompts: Sequence[Mapping[str, Any]], name: str) -> _Run:
    params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True, **(SPEED if name == "blocks" else {}))
    began = time.perf_counter()
    outputs = llm.generate([dict(p) for p in prompts], params)
    took = time.perf_counter() - began
    tokens = [tuple(o.outputs[0].token_ids) for o in outputs]
    passes = sum(o.num_passes for o in outputs) or sum(map(len, tokens))
    return _Run(len(tokens) * ANSWER / took, sum(map(len, tokens)) / passes, tokens)


def _prompts(llm: LLM, count: int) -> list[dict[str, Any]]:
    """Return the beginnings of held-out documents, without the mask token."""
    assert llm.tokenizer is not None and llm.loaded.spec.diffusion is not None
    ids = [
        llm.tokenizer.encode(d.text[:2000])[:PROMPT] for d in split(Corpus.stdlib().documents, HELD_OUT, SEED).held_out
    ]
    some = [i for i in ids if len(i) == PROMPT and llm.loaded.spec.diffusion.mask_token not in i]
    return [{"prompt_token_ids": i} for i in some[:count]]


def _crossing(gains: Mapping[int, float]) -> float | None:
    """Return the batch at which the gain passes 1, between two measured ones on a line; None if it never does."""
    some = sorted(gains.items())
    for (a, x), (b, y) in pairwise(some):
        if x >= 1 > y:
            return round(a + (b - a) * (x - 1) / (x - y), 1)
    return 1.0 if some[0][1] < 1 else None


def passes(args: argparse.Namespace) -> None:
    """Print the time of a pass over a block of random weights, in steps of one token."""
    spec = spec_from_config(CONFIGS["S"])
    for taken in ("exact", "int8"):
        with tempfile.TemporaryDirectory() as folder:
            times = {
                size: _pass_seconds(Path(folder) / str(size), spec, size, args.rounds, taken) for size in (1, BLOCK)
            }
        emit(
            f"passes: SmolLM2-135M, int8, {taken} activations, a block of {BLOCK}", True,
            milliseconds={size: round(s * 1e3, 3) for size, s in times.items()},
            steps=round(times[BLOCK] / times[1], 3), batch=1,
        )  # fmt: skip


def _pass_seconds(folder: Path, spec: ModelSpec, size: int, rounds: int, activations: str) -> float:
    """Return the median time of a pass over blocks of `size` tokens, one token kept in each; 1: the plain model."""
    folder.mkdir()
    config: dict[str, Any] = {**CONFIGS["S"]}
    if size > 1:
        config = {"model_type": OUR_MODEL_TYPE, "spec": to_json(as_blocks(spec, size, MASK)), "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(folder), device="cpu", load_format="dummy", weights="int8", activations=activations,
        skip_tokenizer_init=True, engine=EngineOptions(max_num_seqs=1, speculative="off"), max_model_len=1024,
    )  # fmt: skip
    found = []
    for number in range(rounds):
        params = SamplingParams(max_tokens=2 * BLOCK, temperature=0, ignore_eos=True)
        (output,) = llm.generate(random_prompts((number,), 1, PROMPT, spec.vocab_size), params)
        assert output.num_passes == (2 * BLOCK if size > 1 else 0), output.num_passes
        answered = output.timing.total_s - (output.timing.ttft_s if size == 1 else 0.0)
        found.append(answered / (2 * BLOCK - (size == 1)))
    return median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a block diffusion model, such as `train --diffusion-from` writes")
    parser.add_argument("--original", default="pocket", help="the model that it was made from")
    parser.add_argument("--cases", default="quality,speed,passes")
    parser.add_argument("--headers", type=int, default=100)
    parser.add_argument("--blocks", default="4,16", help="block lengths of the quality")
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    for name in args.cases.split(","):
        {"quality": quality, "speed": speed, "passes": passes}[name](args)


if __name__ == "__main__":
    main()
