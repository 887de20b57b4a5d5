"""Compare models, vocabularies, optimizers and rates at equal cost: python bench/train.py [--seconds 420] [--case NAME]

Each case trains on the standard library of the running Python, in one thread, until it has used --seconds of processor
time; the rate falls over the last 40 % of them. Then the held-out loss is measured on 96 rows. Several cases can run at
the same time, because processor time hardly changes. Data is prepared once, in --work.

Each case prints a line: bits per byte, steps and tokens that the budget allowed, parameters. The gate: the first loss
is that of guessing, ln(vocabulary), and the last loss is lower.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from common import emit

from ridgeline.ops import open_table
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope
from ridgeline.train import Batch, Batches, Corpus
from ridgeline.train.data.folder import TrainingData, prepare
from ridgeline.train.module import LanguageModel
from ridgeline.train.optimizer import Optimizer, OptimizerName
from ridgeline.train.ranks import Ranks
from ridgeline.train.run import bytes_per_target

CONTEXT, BATCH, HELD_OUT_ROWS, WARMUP, DECAY = 1024, 4096, 96, 30, 0.4


@dataclass(frozen=True)
class Case:
    """A model like Qwen3 with heads of 64. width, layers, heads, kv_heads, inner: its sizes."""

    name: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    optimizer: OptimizerName = "muon"
    rate: float = 4e-3

    def spec(self) -> ModelSpec:
        norm = RMSNorm(1e-6)
        mixer = Attention(self.heads, self.kv_heads, 64, 64**-0.5, Rope(64), qk_norm=norm)
        layers = (Layer(mixer, GatedMLP(self.inner), norm),) * self.layers
        return ModelSpec(self.name, self.vocab, self.width, CONTEXT, layers, norm, tie_word_embeddings=True)


CASES = (
    Case("192x6", 4096, 192, 6, 3, 1, 512),
    Case("192x6 AdamW", 4096, 192, 6, 3, 1, 512, "adamw"),
    Case("256x4", 4096, 256, 4, 4, 2, 704),
    Case("256x8", 4096, 256, 8, 4, 2, 704),
    Case("192x6, vocabulary 8192", 8192, 192, 6, 3, 1, 512),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="processor time for each case, in seconds; default: 420"
    )
    parser.add_argument("--work", type=Path, default=Path("train-bench"), help="folder for the prepared data")
    parser.add_argument(
        "--case",
        action="append",
        choices=[c.name for c in CASES],
        help="a case to run; may be given several times; default: all",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in CASES:
        if options.case is None or case.name in options.case:
            run(case, options)


def run(case: Case, options: argparse.Namespace) -> None:
    folder = options.work / str(case.vocab)
    data = prepare(Corpus.stdlib(), folder, case.vocab, ranks=Ranks("reference"), held_out_share=0.05, say=say)
    model = LanguageModel(case.spec(), open_table("reference"), CONTEXT)
    optimizer = Optimizer(model.weights(), case.optimizer, 0.1)
    batches, losses, spent = Batches(data.train, CONTEXT, BATCH), list[float](), 0.0
    while spent < options.seconds:
        begin = time.process_time()
        left = 1 - spent / options.seconds
        batch = batches.batch(len(losses))
        loss = loss_of(model, batch) / int((batch.targets >= 0).sum())
        loss.backward()
        optimizer.step(case.rate * min(1.0, (len(losses) + 1) / WARMUP) * min(1.0, left / DECAY), 1.0)
        losses.append(loss.item())
        spent += time.process_time() - begin
        if len(losses) % 20 == 0:
            say(f"{case.name}: {spent:.0f} of {options.seconds:.0f} s, loss {losses[-1]:.3f}")
    bits = held_out_bits(model, data)
    emit(
        case.name, abs(losses[0] / math.log(case.vocab) - 1) < 0.05 and losses[-1] < losses[0],
        bits_per_byte=round(bits, 4), rate=case.rate, steps=len(losses), tokens=len(losses) * BATCH,
        parameters=case.spec().num_params(), processor_s=round(spent, 1),
    )  # fmt: skip


def held_out_bits(model: LanguageModel, data: TrainingData) -> float:
    assert data.held_out is not None
    rows = Batches(data.held_out, CONTEXT, CONTEXT, 1)
    batches = [rows.batch(i) for i in range(HELD_OUT_ROWS)]
    with torch.no_grad():
        total = sum(float(loss_of(model, batch)) for batch in batches)
    nats = total / sum(int((batch.targets >= 0).sum()) for batch in batches)
    return nats / math.log(2) / bytes_per_target(data.held_out)


def loss_of(model: LanguageModel, batch: Batch) -> torch.Tensor:
    ids, positions, targets = map(torch.from_numpy, (batch.token_ids, batch.positions, batch.targets))
    with torch.autocast("cpu", torch.bfloat16):
        return model(ids, positions, batch.lengths, targets)


def say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
