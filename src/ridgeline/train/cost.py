"""What training costs: operations by count, the machine's peak by measurement."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ridgeline.spec import ModelSpec
from ridgeline.system import cpu_name
from ridgeline.train.loop import Precision, Progress

SQUARE = 2048
PEAK_BUDGET_S = 0.5


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """tokens: trained on, repetitions included. flops: counted, see `flops_per_token`. seconds: of the steps alone.

    machine: in words, all there were. peak_flops_per_s: of a large product in the run's precision, measured; None where
    some steps were made elsewhere.
    """

    tokens: int
    flops: float
    seconds: float
    peak_flops_per_s: float | None
    machine: str

    @property
    def utilization(self) -> float | None:
        """Counted operations over what the peak could have done in that time (MFU, arXiv:2204.02311)."""
        return self.flops / (self.seconds * self.peak_flops_per_s) if self.peak_flops_per_s else None


def cost_of(log: list[Progress], batch_tokens: int, per_token: float, peak: float, machine: str) -> TrainingCost:
    """Of all steps in a log, those of earlier parts of the run included. peak, machine: of this part."""
    tokens = batch_tokens * len(log)
    machines = list(dict.fromkeys(p.machine for p in log))
    seconds = sum(batch_tokens / p.tokens_per_s for p in log)
    known = "; ".join(name or "one that was not recorded" for name in machines)
    return TrainingCost(tokens, tokens * per_token, seconds, peak if machines == [machine] else None, known)


def flops_per_token(spec: ModelSpec, context: int) -> float:
    """Operations to train on one token, where rows of `context` tokens hold one document each.

    A product and its sum are two; the backward pass is twice the forward one; what activation checkpointing computes
    again does not count.
    """
    multiplied = spec.num_active_params()
    if not spec.tie_word_embeddings:  # a tied table is multiplied once, as the head; another one is only looked up
        multiplied -= spec.vocab_size * spec.hidden_size
    multiplied -= spec.num_position_embeddings * spec.hidden_size
    attention = sum(layer.mixer.work(context, context) for layer in spec.layers if layer.mixer) / context
    return 6.0 * (multiplied + attention)


def measure_peak(device: torch.device, precision: Precision) -> float:
    """Operations per second of the best of several large products, in half a second or a little more."""
    x = torch.ones((SQUARE, SQUARE), device=device, dtype=getattr(torch, precision))
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < PEAK_BUDGET_S or best == float("inf"):
        start = time.perf_counter()
        y = x @ x
        y[0, 0].item()  # a device works behind the host's back until something is asked of it
        best = min(best, time.perf_counter() - start)
    return 2 * SQUARE**3 / best


def machine_name(device: torch.device) -> str:
    """The device in words: a GPU's name, or the processor's and how many threads are used."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads != 1 else ''}"
