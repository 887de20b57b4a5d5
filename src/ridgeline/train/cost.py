"""Compute the cost of training: counted operations, and the machine's measured peak."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ridgeline.spec import ModelSpec
from ridgeline.spec.per_layer import TABLE
from ridgeline.system import cpu_name
from ridgeline.train.loop import Precision, Progress

SQUARE = 2048
PEAK_BUDGET_S = 0.5


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """The cost of a run. tokens: number of tokens trained on, repetitions included. flops: operations, counted by
    `flops_per_token`. seconds: time of the steps alone.

    machine: description of all machines that took part. peak_flops_per_s: measured rate of a large product in the run's
    precision; None if other machines ran some of the steps.
    """

    tokens: int
    flops: float
    seconds: float
    peak_flops_per_s: float | None
    machine: str

    @property
    def utilization(self) -> float | None:
        """Return the counted operations divided by what the peak allows in the same time (MFU, arXiv:2204.02311)."""
        return self.flops / (self.seconds * self.peak_flops_per_s) if self.peak_flops_per_s else None


def cost_of(log: list[Progress], batch_tokens: int, per_token: float, peak: float, machine: str) -> TrainingCost:
    """Return the cost of all steps in a log, earlier parts of the run included. peak, machine: for the current part."""
    tokens = batch_tokens * len(log)
    machines = list(dict.fromkeys(p.machine for p in log))
    seconds = sum(batch_tokens / p.tokens_per_s for p in log)
    known = "; ".join(name or "an unrecorded machine" for name in machines)
    return TrainingCost(tokens, tokens * per_token, seconds, peak if machines == [machine] else None, known)


def flops_per_token(spec: ModelSpec, context: int) -> float:
    """Return the operations to train on one token, for rows of `context` tokens with one document each.

    A multiplication and an addition are two operations. The backward pass counts twice the forward pass. Recomputation
    by activation checkpointing is not counted.
    """
    multiplied = spec.num_active_params()
    if not spec.tie_word_embeddings:  # a tied matrix is multiplied once, as the head; an untied embedding is only read
        multiplied -= spec.vocab_size * spec.hidden_size
    multiplied -= sum(w.num_params for w in spec.weights() if w.name in (TABLE, "position_embed.weight"))
    attention = sum(layer.mixer.work(context, context) for layer in spec.layers if layer.mixer) / context
    return 6.0 * (multiplied + attention)


def measure_peak(device: torch.device, precision: Precision) -> float:
    """Return operations per second: the best of several large products within about half a second."""
    x = torch.ones((SQUARE, SQUARE), device=device, dtype=getattr(torch, precision))
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < PEAK_BUDGET_S or best == float("inf"):
        start = time.perf_counter()
        y = x @ x
        y[0, 0].item()  # a device computes asynchronously; reading a value waits for it
        best = min(best, time.perf_counter() - start)
    return 2 * SQUARE**3 / best


def machine_name(device: torch.device) -> str:
    """Describe the device: the GPU's name, or the processor's name and the number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads != 1 else ''}"
