"""How many tokens a verification yields when a draft model proposes and its target verifies, both greedily.

One verification: the draft proposes k tokens after a verified prefix; the target accepts them up to the first one that
it would not have chosen itself, and adds its own next token, which its pass gives for nothing (Leviathan et al.,
arXiv:2211.17192, with greedy choice on both sides). So it yields from 1 to k + 1 tokens.

No rollout is needed where the target's greedy continuation is known. A proposal after the first rejected one counts
for nothing, and all before it equal the continuation; so the draft proposed each of those that count after a prefix of
the continuation itself. The number accepted is the run of tokens in a row that are the draft's own choice when it reads
the continuation, k at most: one pass of the draft over each sequence finds them all.
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
    """What verifications of `num_draft_tokens` drafts each yield, over the counted ones (see `accepted_counts`).

    num_sequences: those with a counted verification. num_tokens: that the verifications yielded.
    tokens_per_verification: accepted drafts and the target's own token, from 1 to num_draft_tokens + 1; its error takes
    the verifications of a sequence to depend on each other. accepted_shares [num_draft_tokens]: of verifications, those
    with at least 1, 2, ... accepted drafts; their sum is tokens_per_verification - 1.
    """

    num_draft_tokens: int
    num_sequences: int
    num_verifications: int
    num_tokens: int
    tokens_per_verification: Estimate
    accepted_shares: tuple[float, ...]

    @classmethod
    def of(cls, accepted: Sequence[Sequence[int]], num_draft_tokens: int) -> Acceptance:
        """From how many drafts each verification of each sequence accepted; at least one verification."""
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
        """Plain numbers; None for what is not known."""
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
    """Replay speculative decoding over a target's greedy continuations, the first verification right after each prompt.

    sequences: prompt and continuation, in token ids that mean the same to the draft (see `check_same_tokens`). That the
    continuations are greedy is the caller's word. batch_tokens: of one forward pass. on_tokens: called with the number
    of continuation tokens that were read since the last call. A continuation of num_draft_tokens tokens or fewer adds
    nothing, and is not read. Raises RequestError for no draft token, an empty prompt, a sequence that is too long for
    the draft or holds a token that it does not have, and where no verification counts.
    """
    if num_draft_tokens < 1:
        raise RequestError(f"num_draft_tokens is {num_draft_tokens}; a draft proposes at least one token")
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
    """How many drafts each verification of a continuation accepts; hits: which of its tokens are the draft's choice.

    A verification counts if at least num_draft_tokens + 1 tokens of the continuation are still before it, so that any
    outcome would fit. Where fewer are left nobody knows what it would have yielded: counted as what is left it would
    pull the mean down, and counted only when its first rejection is seen, as well. Whether one counts depends on the
    ones before it alone and never on its own outcome, so the mean is not biased by where continuations end (Wald's
    identity: the expected sum is the expected count times the mean).
    """
    found, at = [], 0
    while at + num_draft_tokens < len(hits):
        accepted = next((i for i in range(num_draft_tokens) if not hits[at + i]), num_draft_tokens)
        found.append(accepted)
        at += accepted + 1
    return found


def _documents(draft: LoadedModel, sequences: Sequence[Continuation], num_draft_tokens: int) -> list[Document]:
    """What the draft must read: the sequences with a verification that counts, checked."""
    documents = []
    for number, (prompt, continuation) in enumerate(sequences, 1):
        name = f"sequence {number} of {len(sequences)}"
        if not prompt:
            raise RequestError(f"{name} has an empty prompt: a draft needs a token to begin from")
        if len(continuation) <= num_draft_tokens:
            continue
        length = len(prompt) + len(continuation)
        if length > draft.max_model_len:
            raise RequestError(f"{name} has {length:,} tokens; the draft's longest context is {draft.max_model_len:,}")
        documents.append(Document([*prompt, *continuation], num_unscored=len(prompt), name=name))
    if not documents:
        raise RequestError(
            f"there is no verification to count: none of {len(sequences)} continuations has more than "
            f"{num_draft_tokens} tokens, the drafts of one"
        )
    check_documents(documents, draft.spec.vocab_size)
    return documents
