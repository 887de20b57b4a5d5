"""Measure decoding with drafts beside decoding without: python bench/drafts.py MODEL DRAFTS ... [--batches 1,4,16]

DRAFTS: values of --speculative: ngram, a draft model, a folder of a head. Each batch of prompts is answered by each of
them in turn, with chosen and with fixed depth, after a first round that is not counted.

`over_plain` is the median of tokens a second over that of decoding without drafts, prompts included. `tokens` is the
mean of tokens a verification. `own` is the gain that the engine's rule has measured, over the one that it expected from
the times and the acceptance that it had measured before. The gate: all answers are equal.

--predict also compares the planner (`ridgeline plan --compare speculate=...`) with fixed depths, on this machine as it
was calibrated (`ridgeline calibrate`): `planned` is its factor for the acceptance by depth that was counted here, and
`measured` the factor of tokens a second after the first ones.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from common import emit

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.plan.planner import Load, Planner
from ridgeline.sched.stats import DraftCounts, DraftSpeed
from ridgeline.serve.engine.machine import deployment_of
from ridgeline.settings import EngineOptions

PLAIN = "off"
FIXED = " fixed"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("drafts", nargs="+")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=4, help="rounds, the first of which is not counted")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--text", help="text whose parts are the prompts; default: a file of Ridgeline")
    parser.add_argument("--predict", action="store_true", help="compare the planner with the fixed depths")
    parser.add_argument("--no-chosen", action="store_true", help="measure fixed depths only")
    args = parser.parse_args()
    kinds = (FIXED,) if args.no_chosen else ("", FIXED)
    names = [PLAIN, *(f"{draft}{kind}" for draft in args.drafts for kind in kinds)]
    llms = {name: open_llm(args.model, name, args.num_speculative_tokens) for name in names}
    prompts = read_prompts(Path(args.text or Path(ridgeline.__file__).parent / "llm.py"))
    for batch in map(int, args.batches.split(",")):
        measure(llms, prompts, batch, args)


def open_llm(model: str, name: str, most: int) -> LLM:
    if name == PLAIN:
        return LLM(model, speculative=PLAIN)
    depth = "fixed" if name.endswith(FIXED) else "chosen"
    options = EngineOptions(draft_depth=depth, num_speculative_tokens=most)
    return LLM(model, speculative=name.removesuffix(FIXED), engine=options)


def read_prompts(path: Path) -> list[str]:
    """Return the ends of the paragraphs of a text."""
    return [part[-300:] for part in path.read_text(encoding="utf-8").split("\n\n") if len(part) > 60]


class Speed(NamedTuple):
    """Speeds of one run, in tokens a second: with its prompts, and after the first tokens."""

    whole: float
    decode: float


def measure(llms: dict[str, LLM], prompts: list[str], batch: int, args: argparse.Namespace) -> None:
    """Answer a batch of prompts in each way, in turn, and print the results."""
    speeds: dict[str, list[Speed]] = {name: [] for name in llms}
    before, equal, length = {name: llm.stats().drafts.copy() for name, llm in llms.items()}, True, 0
    for number in range(args.rounds):
        some = [prompts[(number * batch + i) % len(prompts)] for i in range(batch)]
        params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, ignore_eos=True, seed=number)
        answers = []
        for name, llm in llms.items():
            begin = time.perf_counter()
            found = llm.generate(some, params)
            took = time.perf_counter() - begin
            first = max(x.timing.ttft_s for x in found)
            speeds[name].append(Speed(batch * args.tokens / took, batch * (args.tokens - 1) / (took - first)))
            answers.append([x.outputs[0].token_ids for x in found])
            length = sum(len(x.prompt_token_ids) for x in found) // batch
        equal &= all(answer == answers[0] for answer in answers)
    medians = {
        name: Speed(*(median(column) for column in zip(*found[1:], strict=True))) for name, found in speeds.items()
    }
    counts = {name: llm.stats().drafts.plus(before[name], -1) for name, llm in llms.items() if name != PLAIN}
    emit(
        f"drafts: batch {batch}, temperature {args.temperature:g}", equal,
        tokens_per_s={name: round(x.whole) for name, x in medians.items()},
        over_plain={name: round(x.whole / medians[PLAIN].whole, 2) for name, x in medians.items() if name != PLAIN},
        tokens={name: round(x.tokens, 2) if x.verifications else None for name, x in counts.items()},
        own={name: own for name, llm in llms.items() if (own := own_factor(llm.stats().draft_speed))},
    )  # fmt: skip
    for name in filter(lambda name: args.predict and name.endswith(FIXED), llms):
        measured = medians[name].decode / medians[PLAIN].decode
        planned = planned_factor(llms[PLAIN], llms[name], counts[name], Load(batch, length, args.tokens), args.rounds)
        emit(
            f"drafts: planner, {Path(name).name}, batch {batch}", equal, measured=round(measured, 3),
            planned=round(planned, 3), planned_over_measured=round(planned / measured, 3),
        )  # fmt: skip


def own_factor(speed: DraftSpeed | None) -> dict[str, float] | None:
    """Return the gain that the engine has measured and expected so far."""
    if speed is None or speed.factor is None or speed.expected_factor is None:
        return None
    return {"measured": round(speed.factor, 3), "expected": round(speed.expected_factor, 3)}


def planned_factor(plain: LLM, llm: LLM, counts: DraftCounts, load: Load, rounds: int) -> float:
    """Return the planner's gain with the acceptance that was counted.

    Steps in which a sequence had no drafts, because nothing was found, are plain steps.
    """
    acceptance = tuple(a / t if t else 0.0 for a, t in zip(counts.accepted_at, counts.tried_at, strict=True))
    without, drafts = deployment_of(plain), deployment_of(llm).speculation
    assert drafts is not None
    if without.hardware.rates is None:
        raise SystemExit("--predict: this machine is not calibrated; run: ridgeline calibrate")
    depth = max(1, round(counts.run / counts.verifications))
    drafts = replace(drafts, acceptance=acceptance, depth=depth)
    planner, at = Planner(replace(without, speculation=drafts)), (load.batch, load.prompt + load.output // 2)
    steps = rounds * load.batch * (load.output - 1) - counts.accepted
    share, step = counts.verifications / steps, planner.decode(*at).seconds
    drafted = planner.verification_s(*at) + planner.drafting_s(*at)
    return (1 + counts.accepted / steps) * step / (share * drafted + (1 - share) * step)


if __name__ == "__main__":
    main()
