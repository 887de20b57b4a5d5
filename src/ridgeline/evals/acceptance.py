"""Measure how many tokens a verification yields when a draft model proposes and its target verifies, both greedily.

In one verification, the draft proposes k tokens after a verified prefix. The target accepts them up to the first one
that it would not have chosen itself, and adds its own next token, which its forward pass gives at no extra cost
(Leviathan et al., arXiv:2211.17192, with greedy choice on both sides). So a verification yields 1 to k + 1 tokens.

No speculative run is needed if the target's greedy continuation is known. Only the proposals before the first rejected
one count, and they equal the continuation; so the draft proposed each of them after a prefix of the continuation
itself. The number of accepted tokens is therefore the number of successive tokens, at most k, that the draft itself
chooses when it reads the continuation. One pass of the draft over each sequence finds them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.evals.estimates import Estimate, block_mean
from ridgeline.evals.perplexity import estimate_json
from ridgeline.evals.scores import check_documents, logprob_blocks
from ridgeline.evals.windows import BATCH_TOKENS, SlidingContext, batches
from ridgeline.runtime.load import LoadedModel

Continuation = tuple[Sequence[int], Sequence[int]]  # token ids: a prompt, and the target's greedy answer to it


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The yield of verifications with `num_draft_tokens` drafts each, over those that count (see `accepted_counts`).

    num_sequences: number of sequences with a verification that counts. num_tokens: total yield.
    tokens_per_verification: accepted drafts plus the target's own token, from 1 to num_draft_tokens + 1; its standard
    error assumes that verifications of one sequence depend on each other. accepted_shares [num_draft_tokens]: shares of
    verifications with at least 1, 2, ... accepted drafts; their sum is tokens_per_verification - 1.
    """

    num_draft_tokens: int
    num_sequences: int
    num_verifications: int
    num_tokens: int
    tokens_per_verification: Estimate
    accepted_shares: tuple[float, ...]

    @classmethod
    def of(cls, accepted: Sequence[Sequence[int]], num_draft_tokens: int) -> Acceptance:
        """Compute the yield from the numbers of accepted drafts, per sequence and verification. At least one
        verification is needed.
        """
        lengths = [len(counts) for counts in accepted if counts]
        each = np.concatenate([np.asarray(counts, np.int64) for counts in accepted if counts])
        return cls(
            num_draft_tokens,
            len(lengths),
            len(each),
            int(each.sum()) + len(each),
            block_mean(each + 1.0, lengths),
            tuple(float((each >= i).mean()) for i in range(1, num_draft_tokens + 1)),
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, None for unknown ones."""
        return {
            "num_draft_tokens": self.num_draft_tokens,
            "num_sequences": self.num_sequences,
            "num_verifications": self.num_verifications,
            "num_tokens": self.num_tokens,
            **estimate_json("tokens_per_verification", self.tokens_per_verification),
            "accepted_shares": list(self.accepted_shares),
        }


def measure_acceptance(
    draft: LoadedModel, sequences: Sequence[Continuation], num_draft_tokens: int = 4, *,
    batch_tokens: int = BATCH_TOKENS, on_tokens: Callable[[int], None] = lambda read: None,
) -> Acceptance:  # fmt: skip
    """Replay speculative decoding over a target's greedy continuations. The first verification follows each prompt
    directly.

    sequences: prompts and continuations, in token ids that mean the same to the draft (see `check_same_tokens`). The
    caller guarantees that the continuations are greedy. batch_tokens: tokens of one forward pass. on_tokens: called
    with the number of continuation tokens read since the last call. Continuations of at most num_draft_tokens tokens
    are ignored. Raises RequestError if there is no draft token, for an empty prompt, for a sequence that is too long
    for the draft or has a token outside its vocabulary, and if no verification counts.
    """
    if num_draft_tokens < 1:
        raise RequestError(f"num_draft_tokens is {num_draft_tokens}; it must be at least 1")
    documents = _documents(draft, sequences, num_draft_tokens)
    hits = []
    sliding = SlidingContext(draft.max_model_len, draft.max_model_len - 1)  # every sequence fits into one window
    for batch in batches(documents, sliding, batch_tokens):
        at = 0
        for logprobs in logprob_blocks(draft, batch):
            hits.append(logprobs.argmax(axis=1) == batch.targets[at : at + len(logprobs)])
            at += len(logprobs)
            on_tokens(len(logprobs))
    ends = np.cumsum([d.num_scored for d in documents])
    each = np.split(np.concatenate(hits), ends[:-1])
    return Acceptance.of([accepted_counts(h.tolist(), num_draft_tokens) for h in each], num_draft_tokens)


def accepted_counts(hits: Sequence[bool], num_draft_tokens: int) -> list[int]:
    """Return how many drafts each verification of a continuation accepts. hits: for each of its tokens, whether the
    draft chooses it.

    A verification counts if at least num_draft_tokens + 1 tokens of the continuation remain, so that every outcome
    fits. With fewer tokens the yield is unknown, and counting only the visible part, or only verifications whose
    rejection is visible, would bias the mean. Earlier verifications alone decide if one counts, not its own outcome, so
    the ends of continuations do not bias the mean (Wald's identity: the expected sum is the expected count times the
    mean).
    """
    found, at = [], 0
    while at + num_draft_tokens < len(hits):
        accepted = next((i for i in range(num_draft_tokens) if not hits[at + i]), num_draft_tokens)
        found.append(accepted)
        at += accepted + 1
    return found


def _documents(draft: LoadedModel, sequences: Sequence[Continuation], num_draft_tokens: int) -> list[Document]:
    """Return the sequences that the draft must read: checked, and with at least one verification that counts."""
    documents = []
    for number, (prompt, continuation) in enumerate(sequences, 1):
        name = f"sequence {number} of {len(sequences)}"
        if not prompt:
            raise RequestError(f"{name} has an empty prompt; the draft needs at least one token")
        if len(continuation) <= num_draft_tokens:
            continue
        length = len(prompt) + len(continuation)
        if length > draft.max_model_len:
            raise RequestError(
                f"{name} has {length:,} tokens, but the draft's longest context is {draft.max_model_len:,}; shorten it"
            )
        documents.append(Document([*prompt, *continuation], num_unscored=len(prompt), name=name))
    if not documents:
        raise RequestError(
            f"no verification can be counted: none of the {len(sequences)} continuations has more than "
            f"{num_draft_tokens} tokens, the number of drafts"
        )
    check_documents(documents, draft.spec.vocab_size)
    return documents
