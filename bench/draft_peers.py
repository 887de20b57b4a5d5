"""Compare decoding with drafts with other programs: python bench/draft_peers.py [--python llama.cpp=PYTHON ...]

The built-in pair, whose weights have 16 bits, one sequence, greedy. Ridgeline, llama.cpp and OpenVINO keep 16 bits
for each weight; all compute in float32. Each program decodes the same prompts without drafts, with drafts
that it looks up, and with the draft model. All are loaded at once and run in turn; the first round is not counted.

`tokens_per_s` counts from the first token. `factor` is the program's own gain over its decoding without drafts. The
gate: each of our runs gives the tokens without drafts. The bars: our best is at least 1.3 times the best of the others,
and our factor is no smaller than theirs. `same_tokens` is the number of leading tokens that a program has in common
with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import emit
from peer_envs import PeerError, ensure
from peer_envs import run as call
from peer_run import DRIVERS
from peers import same

import ridgeline
from ridgeline import LLM
from ridgeline.compress import quantize
from ridgeline.load.hub import BUILT_IN

TOOLS = {
    "ridgeline": "ridgeline", "llama.cpp": "llama_cpp", "openvino": "openvino", "transformers": "transformers",
}  # fmt: skip
DRAFTS = ("off", "lookup", "model")
MAX_TOKENS = 512


class Program:
    """A program that has loaded the pair. Raises PeerError."""

    def __init__(self, tool: str, python: str, target: Path, draft: Path, drafts: str, depth: int) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [python, str(DRIVERS / "drive_drafts.py"), tool], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, env=env,
        )  # fmt: skip
        format = json.dumps({"drafts": drafts, "draft": str(draft), "depth": depth})
        self.ask(do="load", path=str(target), format=format, threads=2, max_seqs=1, max_tokens=MAX_TOKENS)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = json.loads(self._process.stdout.readline() or '{"error": "its process ended"}')
        if "error" in reply:
            raise PeerError(reply["error"])
        return dict(reply)

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="prompts; the first one is not counted")
    parser.add_argument("--tokens", type=int, default=129, help="tokens of each answer")
    parser.add_argument("--depth", type=int, default=4, help="drafts of a verification")
    parser.add_argument("--python", nargs="*", default=[], metavar="PROGRAM=PYTHON")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ridgeline-peers")
    args = parser.parse_args()
    pythons = {"ridgeline": sys.executable, **dict(given.split("=", 1) for given in args.python)}
    prompts = read_prompts(args.rounds)
    programs: dict[tuple[str, str], Program] = {}
    for name, tool in TOOLS.items():
        try:
            python = pythons.get(name) or ensure(args.work, name)
            pair = files(args.work, name)
            for drafts in DRAFTS:
                programs[name, drafts] = Program(tool, python, *pair, drafts, args.depth)
        except PeerError as e:
            print(f"{name}: left out: {e}", file=sys.stderr)
    try:
        report(run(programs, prompts, args.tokens), args)
    finally:
        for program in programs.values():
            program.stop()


def files(work: Path, name: str) -> tuple[Path, Path]:
    """Return the built-in pair in the format of a program; all hold its bfloat16 numbers exactly. Raises PeerError."""
    if name not in ("llama.cpp", "openvino"):
        return BUILT_IN["pocket"], BUILT_IN["pocket-draft"]
    found = []
    for model in ("pocket", "pocket-draft"):
        out = work / "drafts" / name / model
        if name == "llama.cpp":
            if not out.exists():
                quantize(model, "bf16", out=str(out))
            out /= "model.gguf"
        elif not out.exists():
            part = out.with_name(f"{model}.part")
            script = DRIVERS / "convert_openvino.py"
            python = ensure(work, "openvino-convert")
            call([python, str(script), str(BUILT_IN[model]), str(part), "float32"], f"converting {model}")
            part.rename(out)
        found.append(out)
    return found[0], found[1]


def read_prompts(count: int) -> list[list[int]]:
    """Return tokens of paragraphs of code."""
    tokenizer = LLM("pocket", cache="off").tokenizer
    assert tokenizer is not None
    text = (Path(ridgeline.__file__).parent / "llm.py").read_text(encoding="utf-8")
    parts = [part[-300:] for part in text.split("\n\n") if len(part) > 60]
    return [tokenizer.encode(part) for part in parts[:count]]


def run(
    programs: dict[tuple[str, str], Program], prompts: list[list[int]], tokens: int
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the answers of each program to all prompts, in turn."""
    replies: dict[tuple[str, str], list[dict[str, Any]]] = {key: [] for key in programs}
    for prompt in prompts:
        for key, program in programs.items():
            replies[key].append(program.ask(do="run", prompts=[prompt], tokens=tokens))
    return replies


def report(replies: dict[tuple[str, str], list[dict[str, Any]]], args: argparse.Namespace) -> None:
    speeds = {key: median(reply["tokens_per_s"] for reply in mine[1:]) for key, mine in replies.items()}
    ours = [reply["tokens"] for reply in replies["ridgeline", "off"]]
    gate = all(
        [reply["tokens"] for reply in mine] == ours for (name, _), mine in replies.items() if name == "ridgeline"
    )
    for name in dict.fromkeys(name for name, _ in replies):
        own = {drafts: speeds[name, drafts] for drafts in DRAFTS}
        first = replies[name, "off"][0]
        emit(
            f"draft peers: {name}", gate, tokens_per_s={d: round(s) for d, s in own.items()},
            factor={d: round(s / own["off"], 2) for d, s in own.items()},
            same_tokens=same(replies["ridgeline", "off"][0], first), of_tokens=args.tokens, depth=args.depth,
        )  # fmt: skip
    others = [speed for (name, _), speed in speeds.items() if name != "ridgeline"]
    if others:
        best = max(speed for (name, _), speed in speeds.items() if name == "ridgeline")
        emit(
            "draft peers: our best over theirs", best >= 1.3 * max(others), ratio=round(best / max(others), 2), bar=1.3
        )


if __name__ == "__main__":
    main()
