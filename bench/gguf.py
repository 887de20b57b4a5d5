"""Compare Ridgeline with llama.cpp on GGUF files: python bench/gguf.py [--shapes M,L] [--types Q4_K,Q6_K,Q8_0]

Each shape has random weights (peer_shapes.py). One file per type is written with the mixture that llama-quantize takes;
both programs read it. They are loaded, warmed up and run in turn, as in bench/peers.py. Ridgeline rounds activations to
int8, as llama.cpp does (`--activations int8`), and also runs with exact ones if --exact is given.

The gate: with exact activations, logits of the file are those of its dequantized matrices. `same_tokens` is the number
of leading tokens that both programs have in common.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import peer_shapes
from common import emit
from peer_envs import PeerError, ensure
from peer_run import Fleet, Limits, Prepared, rounds_of
from peer_table import CASES, OURS, Contender
from peers import figures, same

from ridgeline import LLM
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.gguf.write import choose_types, write_gguf
from ridgeline.load.packed import open_tensors
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.weights import StoredWeights
from ridgeline.nn import PassingModel
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.runtime.step import DenseStep

BAR = 1.2  # times llama.cpp's tokens per second
GATE, GATE_PROMPT = 1e-4, 12  # share of the largest logit; tokens


class FileOf(Prepared):
    """A program with a GGUF file. python: its interpreter. path: the file for us, its folder for llama.cpp."""

    def __init__(self, contender: Contender, shape: str, python: str, path: Path) -> None:
        self.contender, self.shape, self.python, self.folder = contender, shape, python, path

    def peak_estimate(self) -> float:
        return 3.0 * sum(f.stat().st_size for f in self.folder.parent.glob("*.gguf"))


def write(shape: str, kind: str, work: Path) -> Path:
    """Return the file of a shape in a type; write it if it is missing."""
    source, path = (
        peer_shapes.make_model(shape, work / "models" / shape / "hf"),
        work / "gguf" / shape / kind / "m.gguf",
    )
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = open_checkpoint(source)
        names, files = checkpoint.family.names, open_tensors(checkpoint)
        stored = StoredWeights(checkpoint.spec, names, files, NumpyMemory(), "float32", lambda done: None)
        write_gguf(path, checkpoint.config, Floats(stored), None, choose_types(checkpoint.config, kind)[0])
    return path


class Floats(dict[str, HostTensor]):
    """Weights as float32, each read when it is asked for."""

    def __init__(self, stored: StoredWeights) -> None:
        super().__init__()
        self._stored = stored

    def __missing__(self, name: str) -> HostTensor:
        return HostTensor(self._stored[name], "float32")  # type: ignore[arg-type]


def is_right(path: Path) -> bool:
    """Return whether logits of the codes, with exact activations, are those of the dequantized matrices."""
    ids = [list(range(7, 7 + GATE_PROMPT))]
    loaded = LLM(str(path), skip_tokenizer_init=True, max_model_len=256, device="cpu").loaded
    spec, table, names = loaded.spec, loaded.table, loaded.checkpoint.family.names
    wide = StoredWeights(
        spec, names, open_tensors(loaded.checkpoint), table.memory, None, lambda done: None, keeps=lambda format: False
    )
    step = DenseStep.build(ids, table.memory)
    own, wanted = (np.asarray(model(step)) for model in (loaded.model, PassingModel(spec, wide, table, 256)))
    return bool(np.abs(own - wanted).max() <= GATE * np.abs(wanted).max())


def measure(args: argparse.Namespace, shape: str, kind: str, theirs: str) -> None:
    path = write(shape, kind, args.work)
    gate = not args.gate or is_right(path)
    ways = ["auto/int8", *(["auto"] if args.exact else [])]
    ready: list[Prepared] = [
        *(FileOf(Contender(OURS, way, kind, "ridgeline"), shape, sys.executable, path) for way in ways),
        FileOf(Contender("llama.cpp", kind, kind, "llama_cpp"), shape, theirs, path.parent),
    ]
    for case in ("decode", "prefill"):
        fleet, limits = Fleet(args.threads), Limits(args.threads)
        replies: dict[str, list[dict[str, Any]]] = {}
        try:
            for _, prepared, reply in rounds_of(fleet, ready, shape, case, args.rounds, limits):
                if isinstance(reply, PeerError):
                    raise reply
                replies.setdefault(prepared.contender.name, []).append(reply)
        finally:
            fleet.stop()
        speeds = {
            name: round(median(figures(shape, case, reply)["tokens_per_s"] for reply in mine), 2)
            for name, mine in replies.items()
        }
        other = speeds[f"llama.cpp {kind}"]
        emit(
            f"gguf {case}", gate, shape=shape, type=kind, tokens_per_s=speeds,
            over_llama_cpp={n: round(s / other, 2) for n, s in speeds.items() if n.startswith(OURS)}, bar=BAR,
            same_tokens=same(*(replies[n][0] for n in (f"{OURS} auto/int8", f"llama.cpp {kind}"))),
            of_tokens=CASES[case].answer(shape), limits=limits.medians(), rounds=args.rounds,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="M,L", help="S, M or L, separated by commas; default: M,L")
    parser.add_argument("--types", default="Q4_K,Q6_K,Q8_0", help="types, separated by commas")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exact", action="store_true", help="also run with exact activations")
    parser.add_argument("--gate", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ridgeline-peers")
    parser.add_argument("--python", help="a Python with llama-cpp-python; default: one is installed under --work")
    args = parser.parse_args()
    args.work = args.work.resolve()
    theirs = args.python or ensure(args.work, "llama.cpp")
    for shape in args.shapes.split(","):
        for kind in args.types.split(","):
            measure(args, shape, kind, theirs)


if __name__ == "__main__":
    main()
