"""Answers of diffusion models from their definition: every pass computes the whole sequence again in float64.

It judges the engine, and shares no code with it. Each rule is written from its paper; there is no cache and no batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from oracle.definition import Weights, define
from ridgeline.spec import ModelSpec, WholeSequence


@dataclass
class Denoised:
    """An answer. margin: the least distance between a choice and the next one; a smaller error changes nothing.

    passes: number of forward passes.
    """

    tokens: list[int]
    margin: float = math.inf
    passes: int = 0

    def near(self, values: list[float], threshold: float | None = None) -> None:
        """Note how close values are to each other, or to a threshold."""
        ranked = sorted(values, reverse=True)
        gaps = [a - b for a, b in pairwise(ranked)] if threshold is None else []
        gaps += [] if threshold is None else [abs(value - threshold) for value in values]
        self.margin = min([self.margin, *gaps])


def surety(kind: str, p: Tensor, token: int) -> float:
    if kind == "low_confidence":
        return float(p[token])
    if kind == "top_margin":
        best = p.topk(2).values
        return float(best[0] - best[1])
    assert kind == "entropy"
    return float((p[p > 0] * p[p > 0].log()).sum())


def look(spec: ModelSpec, weights: Weights, x: list[int], prompt: int, rest: list[int], cfg: float) -> Tensor:
    """Return the logits of a pass. rest: tokens after x that a whole sequence has."""
    whole = [*x, *rest]
    logits = define(spec, weights, whole)
    if not cfg:
        return logits
    assert spec.diffusion is not None
    mask = spec.diffusion.mask_token
    hidden = [token if i >= prompt and i < len(x) else mask for i, token in enumerate(whole)]
    without = define(spec, weights, hidden)
    return without + (cfg + 1) * (logits - without)


def kept_by_time(masks: int, steps: int) -> list[int]:
    """Return how many tokens each step of Dream's published loop keeps, with its numbers in float32."""
    times, found = torch.linspace(1, 1e-3, steps + 1), []
    for i in range(steps):
        left = torch.tensor(float(masks - sum(found)))
        found.append(int(left * (1 - times[i + 1] / times[i])) if i < steps - 1 else int(left))
    return [count for count in found if count]


def denoise(
    spec: ModelSpec, weights: Weights, prompt: list[int], count: int, size: int, *, remasking: str = "low_confidence",
    passes: int | None = None, threshold: float | None = None, factor: float | None = None,
    bound: float | None = None, edits: float | None = None, ends: tuple[int, ...] = (),
    edit: Callable[[Tensor, int], None] = lambda scores, index: None, cfg: float = 0.0, suffix: tuple[int, ...] = (),
) -> Denoised:  # fmt: skip
    """Return a greedy answer of `count` tokens. size: tokens of a block. edit: changes scores of an answer's token."""
    assert spec.diffusion is not None
    mask, shift = spec.diffusion.mask_token, spec.diffusion.predicts_next
    x, out, is_whole = list(prompt), Denoised([]), isinstance(spec.layers[0].mixer.sight, WholeSequence)
    total = len(prompt) + count
    while len(x) < total:
        first, end = len(x), (len(x) // size + 1) * size
        if is_whole:
            end = min(first + size, total)
        rest = [mask] * (total - end) + list(suffix) if is_whole else []
        x += [mask] * (end - first)
        given, number, without, is_open = passes or end - first, 0, 0, True
        while is_open:
            logits = look(spec, weights, x, len(prompt), rest, cfg)
            out.passes += 1
            open_ones = [i for i in range(first, end) if x[i] == mask]
            before, others = list(x), [] if edits is None else [i for i in range(first, end) if x[i] != mask]
            found: dict[int, int] = {}
            sure: dict[int, float] = {}
            p_of: dict[int, float] = {}
            unsure: dict[int, float] = {}
            for i in [*open_ones, *others]:
                scores = logits[i - shift].clone()
                edit(scores, i - len(prompt))
                scores[mask] = -math.inf
                best = scores.topk(2)
                out.margin = min(out.margin, float(best.values[0] - best.values[1]))
                found[i] = int(best.indices[0])
                p = torch.softmax(scores, 0)
                sure[i], p_of[i] = surety(remasking, p, found[i]), float(p[found[i]])
                unsure[i] = -surety("entropy", p, found[i])
            if edits is not None:
                changing = [i for i in others if found[i] != x[i]]
                out.near([p_of[i] for i in changing], edits)
                for i in changing:
                    x[i] = found[i] if p_of[i] > edits else x[i]
            if not open_ones:
                kept = []
            elif threshold is not None:
                out.near([p_of[i] for i in open_ones], threshold)
                kept = [i for i in open_ones if p_of[i] >= threshold] or [max(open_ones, key=lambda i: p_of[i])]
            elif factor is not None:
                order = sorted(open_ones, key=lambda i: -p_of[i])
                kept = order[:1]
                for n in range(1, len(order) + 1):
                    if (n + 1) * (1 - p_of[order[n - 1]]) < factor:
                        kept = order[:n]
            elif bound is not None:
                order = sorted(open_ones, key=lambda i: unsure[i])
                out.near([unsure[i] for i in open_ones])
                sums = [sum(unsure[i] for i in order[:n]) for n in range(len(order))]
                out.near(sums[1:], bound)
                kept = [i for n, i in enumerate(order) if sums[n] <= bound]
            else:
                masks, steps = end - first, min(given, end - first)
                share = masks // steps + (1 if number < masks % steps else 0)
                if passes and spec.diffusion.schedule == "time":
                    share = kept_by_time(masks, passes)[number]
                if share < len(open_ones):
                    out.near([sure[i] for i in open_ones])
                kept = sorted(open_ones, key=lambda i: -sure[i])[:share]
            for i in kept:
                x[i] = found[i]
            number += 1
            without += not open_ones
            is_open = mask in x[first:]
            if edits is not None:  # one more pass over all tokens, until none changes
                is_open = bool(open_ones) or (x != before and without < 16)
    answer = x[len(prompt) : len(prompt) + count]
    stop = next((i for i, token in enumerate(answer) if token in ends), None)
    out.tokens = answer if stop is None else answer[: stop + 1]
    return out
