"""Train a denoiser of word embeddings (Diffusion-LM, arXiv:2205.14217), and draw texts from it.

A text is the embeddings of its words. Noise is added in STEPS steps, x_t = sqrt(kept) x_0 + sqrt(1 - kept) noise, and
a transformer that sees the whole text is trained to tell x_0 from x_t. Drawing begins with noise alone, and goes back
step by step. Clamping replaces each embedding that the denoiser tells by the nearest one of a word. A classifier of
noisy texts can guide a draw: each step moves along the gradient of the log probability that it gives to the aim.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ridgeline.train.small import Ints, one_thread

STEPS, START = 200, 1e-4  # steps of noise; the square-root schedule keeps 1 - sqrt(t / STEPS + START) of a text
SIZE, WIDTH, LAYERS, HEADS = 16, 64, 2, 4  # numbers of an embedding; of the transformer
ROWS, UPDATES = 128, 2000
RATE = 4e-3  # peak of AdamW: the best of the sweep in docs/log/training.md, which had another seed
GUIDANCE = 4.0  # factor of the classifier's gradient
CHOICES = {
    "steps": STEPS, "size": SIZE, "width": WIDTH, "layers": LAYERS, "rows": ROWS, "rate": RATE, "updates": UPDATES,
    "guidance": GUIDANCE,
}  # fmt: skip


def kept(step: int | Tensor) -> Tensor:
    """Return the share of a text's variance that is left after a step of noise."""
    return 1 - torch.clamp(torch.as_tensor(step) / STEPS + START, max=1.0).sqrt()


class Reader(nn.Module):
    """A transformer that sees a whole noisy text, and how noisy it is. outputs: numbers that it returns of a word."""

    def __init__(self, length: int, outputs: int) -> None:
        super().__init__()
        self.read, self.out = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, outputs)
        self.places = nn.Parameter(torch.randn(length, WIDTH) * 0.02)
        self.level = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        level = self.level(kept(step).sqrt().reshape(-1, 1, 1))
        found: Tensor = self.out(self.layers(self.read(x) + self.places + level))
        return found


class EmbeddingDiffusion:
    """A denoiser, its embeddings, and a classifier of noisy texts, trained on texts that a function draws.

    texts: returns texts [rows, length] of word ids below `vocab`. aim: returns whether each text has the property that
    a guided draw should have. Only the arguments decide the result.
    """

    def __init__(
        self, texts: Callable[[np.random.Generator, int], Ints], aim: Callable[[Ints], np.ndarray[Any, Any]],
        vocab: int, length: int, seed: int, updates: int = UPDATES, rate: float = RATE,
    ) -> None:  # fmt: skip
        rng = np.random.default_rng((seed, 0))
        with one_thread(), torch.random.fork_rng():
            torch.manual_seed(seed)
            self._length = length
            self._words = nn.Parameter(F.normalize(torch.randn(vocab, SIZE), dim=1) * sqrt(SIZE))
            self._denoiser, self._classifier = Reader(length, SIZE), Reader(length, 1)
            parameters = [self._words, *self._denoiser.parameters(), *self._classifier.parameters()]
            optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(updates, 1))
            for _ in range(updates):
                ids = texts(rng, ROWS)
                optimizer.zero_grad()
                torch.autograd.backward(self._loss(torch.from_numpy(ids), torch.from_numpy(aim(ids)).float()))
                optimizer.step()
                schedule.step()

    def _loss(self, ids: Tensor, has_aim: Tensor) -> Tensor:
        """Return the error of x_0, that of words read from x_0, and that of the classifier."""
        words = F.normalize(self._words, dim=1) * sqrt(SIZE)  # of one length, so that noise means the same for all
        start = words[ids]
        start = start + torch.randn_like(start) * sqrt(float(1 - kept(0)))
        steps = torch.randint(1, STEPS + 1, (len(ids),))
        share = kept(steps).reshape(-1, 1, 1)
        noisy = share.sqrt() * start + (1 - share).sqrt() * torch.randn_like(start)
        found = self._denoiser(noisy, steps)
        reading = F.cross_entropy((start @ words.T).flatten(0, 1), ids.flatten())
        judged = self._classifier(noisy.detach(), steps).mean((1, 2))
        error = F.mse_loss(found, start) + F.mse_loss(found[steps == 1], words[ids[steps == 1]], reduction="sum") / SIZE
        return error + reading + F.binary_cross_entropy_with_logits(judged, has_aim)

    @torch.no_grad()
    def draw(self, rows: int, seed: int, *, clamped: bool, guided: bool) -> Ints:
        """Return texts [rows, length]. clamped, guided: see the module. Both runs of a seed have the same noise."""
        generator = torch.Generator().manual_seed(seed)
        words = F.normalize(self._words, dim=1) * sqrt(SIZE)
        x = torch.randn((rows, self._length, SIZE), generator=generator)
        for step in range(STEPS, 0, -1):
            found = self._denoiser(x, torch.full((rows,), step))
            if clamped:
                found = words[(found @ words.T).argmax(2)]
            share = kept(step - 1)
            x = share.sqrt() * found + (1 - share).sqrt() * torch.randn(x.shape, generator=generator)
            if guided and step > 1:
                x = x + GUIDANCE * (1 - share) * self._slope(x, step - 1)
        ids: Ints = (found @ words.T).argmax(2).numpy()
        return ids

    @torch.enable_grad()
    def _slope(self, x: Tensor, step: int) -> Tensor:
        """Return the gradient of the log probability of the aim."""
        x = x.detach().requires_grad_()
        judged = self._classifier(x, torch.full((len(x),), step)).mean((1, 2))
        (slope,) = torch.autograd.grad(F.logsigmoid(judged).sum(), x)
        return slope
