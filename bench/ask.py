"""Answer the questions of docs/plan.md again, and print their table: python bench/ask.py [--json FILE]

Each question is a `ridgeline plan --users` with a TTFT of 2 s at most. For TTFT and TPOT, the table has p99 of the
requests at the median times, and at the times that are kept with a probability of 90 %. tests/pure/test_ask.py checks
the requests that one replica serves, its batch and its step by hand arithmetic, for the same questions. It takes a few
minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

# Model, machine, devices that share it in the hand arithmetic, users, tokens per second, mean prompt and answer.
QUESTIONS = [
    ("llama-3.1-8b", "h100", 1, 500, 20, 2000, 400), ("llama-3.1-8b", "l40s", 1, 50, 15, 1000, 300),
    ("llama-3.1-70b", "h100", 4, 500, 20, 2000, 400), ("llama-3.1-70b", "h200", 2, 200, 25, 1000, 500),
    ("llama-3.1-405b", "b200", 8, 100, 15, 1000, 500), ("qwen2.5-14b", "a100", 1, 100, 20, 1500, 300),
    ("qwen2.5-72b", "mi300x", 1, 100, 15, 500, 500), ("qwen3-32b", "h100", 2, 300, 30, 500, 500),
    ("qwen3-8b", "rtx4090", 1, 10, 20, 1000, 300), ("mistral-large", "h200", 4, 200, 15, 2000, 300),
    ("codellama-34b-hf", "a100", 2, 100, 20, 3000, 200), ("llama-3.2-3b", "l4", 1, 20, 15, 500, 200),
]  # fmt: skip
HEAD = (
    "model, machine", "users at tokens/s", "prompt / answer", "requests/s", "layout", "devices", "TTFT p99, median",
    "TTFT p99, kept with 90 %", "TPOT p99, median", "TPOT p99, kept with 90 %", "$/h", "$ per 1M", "fewer devices with",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="file for the answers in full; default: none")
    args = parser.parse_args()
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    answers = []
    for model, machine, _, users, speed, prompt, output in QUESTIONS:
        found = answer(model, machine, users, speed, prompt, output)
        answers.append(found)
        print("| " + " | ".join([f"{model}, {machine}", *row(found)]) + " |", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(answers, indent=1), encoding="utf-8")


def answer(model: str, machine: str, users: int, speed: int, prompt: int, output: int) -> dict[str, Any]:
    """Return the command's answer to one question."""
    words = [
        "plan", model, "--hardware", machine, "--users", users, "--tokens-per-second", speed, "--input-len", prompt,
        "--output-len", output, "--ttft", "2s", "--json",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", *map(str, words)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(found: dict[str, Any]) -> list[str]:
    """Return the cells of an answer after its model and machine."""
    q, a, expected = found["question"], found["answer"], found["expected"]["p50"]
    layout = f"{a['replicas']}" + (f" x tp {a['tp']}" if a["tp"] > 1 else "")
    if a["prefill_engines"]:
        layout = f"{a['prefill_engines']} prefill + {a['decode_engines']} decode, tp {a['tp']}"
    fewer = [o for o in found["others"] if o["changed"] and o["kept"] and o["devices"] < a["devices"]]
    priced = a["dollars_per_hour"] is not None
    return [
        f"{q['users']} at {q['tokens_per_s']:g}", f"{q['prompt']:,} / {q['output']}", f"{q['requests_per_s']:.3g}",
        layout, f"{a['devices']}", f"{expected['ttft_p99_s'] * 1e3:,.0f} ms", f"{a['ttft_p99_s'] * 1e3:,.0f} ms",
        f"{expected['tpot_p99_s'] * 1e3:.1f} ms", f"{a['tpot_p99_s'] * 1e3:.1f} ms",
        f"{a['dollars_per_hour']:.2f}" if priced else "no price",
        f"{a['dollars_per_million_tokens']:.2f}" if priced else "-",
        f"{fewer[0]['changed']}: {fewer[0]['devices']}" if fewer else "-",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
