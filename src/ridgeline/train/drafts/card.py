"""Write the model card (README.md) of a draft: the target, the data, the training and the acceptance by depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.train.card import Row, card_text, front_matter, table
from ridgeline.train.drafts.measure import DraftQuality
from ridgeline.train.drafts.options import DraftOptions
from ridgeline.train.optimizer import BETAS

NAMES = {"medusa": "Medusa heads", "eagle": "An EAGLE-1 head", "eagle3": "An EAGLE-3 head", "draft": "A draft model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFacts:
    """The facts of a draft's card. No text may contain a local path, because cards are published.

    Args:
        target: Name of the model that it drafts for.
        num_params: Its parameters, without those of the target that it uses.
        source: Description of the texts. license: their license.
        continuations: Number of continuations to train on. continuation_tokens: tokens that the target wrote in them.
        seconds: Time of all updates.
        curve: File name of a picture beside the card.
    """

    name: str
    target: str
    options: DraftOptions
    num_params: int
    source: str
    license: str
    continuations: int
    continuation_tokens: int
    steps: int
    seconds: float
    machine: str
    dtype: str
    quality: DraftQuality
    curve: str | None = None


def draft_card(facts: DraftFacts) -> str:
    """Return the card as Markdown with YAML front matter."""
    o = facts.options
    summary = (
        f"{NAMES[o.kind]} for {facts.target}, for speculative decoding in Ridgeline. It was trained on what "
        f"{facts.target} itself writes."
    )
    command = f"ridgeline serve -m {facts.target} --speculative {facts.name}"
    parts = [
        front_matter(
            None,
            ("speculative-decoding", o.kind),
            accepted_shares=facts.quality.acceptance.accepted_shares,
            rank_accuracies=facts.quality.accuracies,
        ),
        f"# {card_text(facts.name)}",
        card_text(summary),
        f"## Usage\n\n```\n{card_text(command)}\n```",
        table("Training", _training(facts)),
        f"![loss]({facts.curve})" if facts.curve else "",
        table("Acceptance on held-out text", _acceptance(facts.quality)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _training(facts: DraftFacts) -> Iterator[Row]:
    o = facts.options
    yield "Target", facts.target
    yield "Parameters", f"{facts.num_params:,}, without those of the target that it uses"
    yield "Weights stored as", facts.dtype
    yield "Texts of the prompts", f"{facts.source}; license {facts.license}"
    yield (
        "Continuations",
        (f"{facts.continuations:,} by the target, every second one greedy, with {facts.continuation_tokens:,} tokens"),
    )
    yield "Loss", _loss(o)
    yield (
        "Optimizer",
        (
            f"Muon for matrices of layers, AdamW with betas {BETAS[0]:g}, {BETAS[1]:g} for all else; peak rate "
            f"{o.learning_rate:g}, weight decay {o.weight_decay:g}, gradients clipped to a norm of {o.clip:g}"
        ),
    )
    yield "Updates", f"{facts.steps:,} of about {o.batch_tokens:,} tokens"
    yield "Seed", str(o.seed)
    yield "Time", f"{facts.seconds / 60:.1f} minutes; {facts.machine}"


def _loss(o: DraftOptions) -> str:
    if o.kind == "medusa":
        return "KL from the target's distribution to each head's, weights falling by 0.8 with the head"
    if o.kind == "eagle":
        return f"smooth L1 on features, and 0.1 of the KL, over {o.practised} draft steps in a row; noise on features"
    if o.kind == "eagle3":
        return f"KL over {o.practised} draft steps in a row (training-time test), weights falling by 0.8 with the step"
    return "KL from the target's distribution to the draft's"


def _acceptance(quality: DraftQuality) -> Iterator[Row]:
    for depth, share in enumerate(quality.shares, 1):
        what = "The first draft is right" if depth == 1 else f"The first {depth} drafts are right"
        yield what, f"at {100 * share:.1f} % of {quality.num_positions:,} positions"
    for number, shares in enumerate(quality.accuracies, 1):
        percent = ", ".join(f"{100 * share:.1f}" for share in shares)
        yield f"Head {number}: its tokens of rank 1 to {len(shares)} are right", f"at {percent} % of positions"
    found = quality.acceptance
    error = found.tokens_per_verification.standard_error
    spread = "" if error is None else f" ± {error:.2f} (standard error)"
    yield (
        f"Tokens a verification, {found.num_draft_tokens} drafts",
        f"{found.tokens_per_verification.value:.2f}{spread}",
    )
    yield "Measured on", f"{found.num_sequences:,} greedy continuations by the target of held-out prompts"
