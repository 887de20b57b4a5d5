"""The objective of diffusion language models: predict masked tokens, and weight them so that a likelihood is bounded.

For a block of m tokens, a number l from 1 to m is drawn, and l of its tokens become masks. The loss of the block is
m / l times the sum of their -log p. Its mean over l and over the choice of tokens is an upper bound of the block's
-log p. LLaDA (arXiv:2502.09992, eq. 14) evaluates with it: it has the mean of the masked loss with the weight 1/t, and
a lower variance. With blocks of one token, it is the cross-entropy of an autoregressive model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.errors import RequestError
from ridgeline.nn import Model
from ridgeline.spec import Blocks, MaskedDiffusion, ModelSpec, WholeSequence
from ridgeline.spec.diffusion import CanvasDiffusion
from ridgeline.spec.sight import BEYOND
from ridgeline.train.module import LanguageModel, sum_in_blocks
from ridgeline.train.objectives import Objective
from ridgeline.train.two_copies import open_two_copies


class Noisy(NamedTuple):
    """A batch with masks. token_ids, positions, lengths: rows of a step. rows [k]: those with the logits of the masked
    tokens; wanted [k]: these tokens; shares [k]: their weights m / l.
    """

    token_ids: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    rows: Tensor
    wanted: Tensor
    shares: Tensor


class BlockDenoising(Objective):
    """The bound of -log p of the targets, in nats. The length of the blocks is drawn from the spec's for each batch.

    Noise is drawn from torch's generator in training, and from one that depends on the batch alone otherwise, so that
    all evaluations of a run have equal noise.
    """

    def __init__(self, student: LanguageModel) -> None:
        super().__init__(student)
        spec = student.spec
        assert isinstance(spec.diffusion, MaskedDiffusion), "check_trains refuses others"
        self._diffusion = spec.diffusion
        self.sizes = lengths_of(spec)
        self._models: dict[int, Model] = {}
        for size in self.sizes:
            whole = size >= BEYOND
            seeing = spec.seeing(WholeSequence() if whole else Blocks(size), self._diffusion)
            table = student.table if whole else open_two_copies(student.table.memory.device)
            self._models[size] = student.variant(seeing, table)

    def forward(self, token_ids: Tensor, positions: Tensor, lengths: tuple[int, ...], targets: Tensor) -> Tensor:
        generator = None
        if not self.student.training:
            generator = torch.Generator().manual_seed(int(token_ids.sum()))
        size = self.sizes[int(torch.randint(len(self.sizes), (), generator=generator))]
        return self.bound(size, token_ids, lengths, targets, generator)

    def bound(
        self, size: int, token_ids: Tensor, lengths: tuple[int, ...], targets: Tensor, generator: torch.Generator | None
    ) -> Tensor:  # fmt: skip
        """Return the sum of the bound over targets [T] (negative: none) with blocks of `size` tokens."""
        device = token_ids.device
        sequences = continued(token_ids.cpu(), lengths, targets.cpu())
        noisy = add_noise(sequences, size, self._diffusion, generator)
        step = self.student.step(noisy.token_ids.to(device), noisy.positions.to(device), noisy.lengths)
        model = self._models[size]
        stream = model.forward(step)
        rows, wanted, shares = (x.to(device) for x in noisy[3:])

        def weighted(some: Tensor) -> Tensor:
            given: Any = rows[some]
            logits: Any = model.logits(stream, given)
            return (F.cross_entropy(logits.float(), wanted[some], reduction="none") * shares[some]).sum()

        return sum_in_blocks(weighted, torch.arange(len(rows), device=device), self.student.spec.vocab_size)


def objective_of(model: LanguageModel) -> Objective:
    """Return what training a model makes small: the bound of a diffusion model, and the cross-entropy of another."""
    return BlockDenoising(model) if model.spec.diffusion else Objective(model)


def lengths_of(spec: ModelSpec) -> tuple[int, ...]:
    """Return the lengths of blocks with which a diffusion model is trained; BEYOND: whole sequences."""
    known = spec.diffusion.trained_blocks if spec.diffusion else ()
    return known if known and spec.block < BEYOND else (spec.block,)


def copies(spec: ModelSpec) -> int:
    """Return how many rows training computes for a token."""
    return 2 if spec.diffusion and spec.block < BEYOND else 1


def check_trains(spec: ModelSpec, context: int) -> None:
    """Raise RequestError for a diffusion model without an objective, and for training rows that are too long for it."""
    if isinstance(spec.diffusion, CanvasDiffusion):
        raise RequestError(
            f"{spec.family} fills canvases, for which there is no objective; train a model with blocks or whole "
            "sequences"
        )
    if spec.diffusion and context >= spec.max_position_embeddings:
        raise RequestError(
            f"context (--context) is {context}; it must be below the model's {spec.max_position_embeddings} positions, "
            "because a row of a diffusion model also has the token after it"
        )


def continued(token_ids: Tensor, lengths: Sequence[int], targets: Tensor) -> list[Tensor]:
    """Return the sequences of a batch with the token after their last one, if it is a target."""
    ends = torch.tensor(lengths).cumsum(0) - 1
    found = torch.split(token_ids, list(lengths))
    return [
        torch.cat((ids, after[None])) if after >= 0 else ids for ids, after in zip(found, targets[ends], strict=True)
    ]


def add_noise(
    sequences: Sequence[Tensor], size: int, diffusion: MaskedDiffusion, generator: torch.Generator | None
) -> Noisy:
    """Mask tokens of sequences, whose first token is always known.

    With blocks, each sequence becomes two copies, clean and noisy. If logits are for the next token, those of a block's
    first token come from the clean copy: it is the last token of a finished block.
    """
    ids: list[Tensor] = []
    rows: list[Tensor] = []
    wanted: list[Tensor] = []
    shares: list[Tensor] = []
    start, whole = 0, size >= BEYOND
    for sequence in sequences:
        n = len(sequence)
        masked, share = draw_masks(n, min(size, n), generator)
        noisy = torch.where(masked, diffusion.mask_token, sequence)
        ids += [noisy] if whole else [sequence, noisy]
        at = masked.nonzero().squeeze(1)
        before = at - 1 if diffusion.predicts_next else at
        clean = torch.full_like(at, whole, dtype=torch.bool)
        if diffusion.predicts_next and not whole:
            clean |= at % size == 0
        rows.append(start + before + torch.where(clean, 0, n))
        wanted.append(sequence[at])
        shares.append(share[at])
        start += n if whole else 2 * n
    counts = [len(s) for s in sequences]
    copies = 1 if whole else 2
    positions = torch.cat([torch.arange(n).repeat(copies) for n in counts])
    return Noisy(
        torch.cat(ids), positions, tuple(copies * n for n in counts), torch.cat(rows), torch.cat(wanted),
        torch.cat(shares),
    )  # fmt: skip


def draw_masks(n: int, size: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return which of n tokens are masked, and the weight m / l of each token's block: [n] both.

    The first token is never masked, and every block with another token has at least one mask.
    """
    blocks = -(-n // size)
    may = torch.zeros(blocks * size, dtype=torch.bool)
    may[1:n] = True
    may = may.view(blocks, size)
    m = may.sum(1, keepdim=True)
    count = (torch.rand(blocks, 1, generator=generator) * m).floor().long().clamp(max=m - 1) + 1
    order = torch.rand(blocks, size, generator=generator).masked_fill(~may, 2.0)
    rank = order.argsort(1).argsort(1)
    masked = may & (rank < count)
    share = (m / count.clamp(min=1)).expand(blocks, size)
    return masked.flatten()[:n], share.flatten()[:n]
