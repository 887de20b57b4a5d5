"""Tokens per verification against real speculative runs, against a closed form, and edge cases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from oracle.data import shared_data
from ridgeline import LLM, SamplingParams
from ridgeline.errors import RequestError
from ridgeline.evals import Acceptance, Estimate, measure_acceptance
from ridgeline.evals.acceptance import Continuation, accepted_counts

Next = Callable[[tuple[int, ...]], int]  # a prefix -> the model's greedy token
TINY = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Return a model with random weights and a longest context of 64."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return LLM(str(folder), load_format="dummy", cache="off")


@pytest.fixture(scope="module")
def stories() -> LLM:
    return LLM(str(shared_data() / "models" / "stories260K"))


@pytest.fixture(scope="module")
def other() -> LLM:
    """Return another training of the same architecture, with the same tokenizer."""
    return LLM(str(shared_data() / "models" / "llama2xs"), cache="off")


def greedy(llm: LLM) -> Next:
    """Compute the whole history again for each token."""
    return cache(lambda prefix: int(llm.logits([prefix])[0][-1].argmax()))


def answers(llm: LLM, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Continuation]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    return [(p, o.outputs[0].token_ids) for p, o in zip(prompts, llm.generate(list(prompts), params), strict=True)]


def perturbed(sequences: Sequence[Continuation], vocabulary: int, share: float) -> list[Continuation]:
    """Replace some tokens of the continuations and some prompts."""
    rng = np.random.default_rng(1)
    return [
        (list(p), [int(rng.integers(3, vocabulary)) if rng.random() < share else t for t in c]) for p, c in sequences
    ]


def speculate(draft: Next, prompt: Sequence[int], continuation: Sequence[int], k: int) -> list[int]:
    """Run speculative decoding: return how many drafts each verification accepts, while k + 1 tokens are left."""
    found, at = [], 0
    while len(continuation) - at >= k + 1:
        proposed: list[int] = []
        for _ in range(k):
            proposed.append(draft((*prompt, *continuation[:at], *proposed)))
        truth = list(continuation[at : at + k])
        accepted = max(n for n in range(k + 1) if proposed[:n] == truth[:n])
        found.append(accepted)
        at += accepted + 1
    return found


def check(llm: LLM, draft: Next, sequences: Sequence[Continuation], k: int) -> Acceptance:
    """Check that the measured figures equal those of the simulation."""
    found = measure_acceptance(llm.loaded, sequences, k)
    each = [speculate(draft, prompt, continuation, k) for prompt, continuation in sequences]
    assert found == Acceptance.of(each, k)
    counts = np.concatenate(each)
    assert (found.num_verifications, found.num_tokens) == (len(counts), counts.sum() + len(counts))
    assert found.tokens_per_verification.value == pytest.approx(counts.mean() + 1)
    assert found.accepted_shares == tuple((counts >= i).mean() for i in range(1, k + 1))
    assert sum(found.accepted_shares) == pytest.approx(counts.mean())
    return found


# ---- against drafts that are rolled out -----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("share", [0.05, 0.3])
def test_drafts_that_are_rolled_out(k: int, share: float, tiny: LLM) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 40, n).tolist() for n in (1, 2, 7, 20)]
    sequences = perturbed(answers(tiny, prompts, 44), 40, share)
    found = check(tiny, greedy(tiny), sequences, k)
    assert 0.05 < found.accepted_shares[0] < 0.999  # some drafts are accepted, and some are not


@pytest.mark.parametrize("k", [1, 4, 7])
def test_drafts_of_a_trained_model(k: int, stories: LLM, other: LLM) -> None:
    """The draft continues its own stories with some tokens exchanged, and the stories of another training."""
    prompts = [stories.encode(text) for text in ("Once upon a time", "Tom and Sue", "The dog")]
    draft = greedy(stories)
    check(stories, draft, perturbed(answers(stories, prompts, 60), 512, 0.15), k)
    check(stories, draft, answers(other, prompts, 60), k)


@pytest.mark.parametrize("k", [1, 4, 7])
def test_a_model_drafts_for_itself(k: int, stories: LLM) -> None:
    """All drafts are accepted: each verification gives k + 1 tokens, and the rest at the end is too short to count."""
    lengths = (5 * (k + 1), 5 * (k + 1) + k, k + 1, k, 0)
    prompts = [stories.encode(text) for text in ("Once upon a time", "Tom", "She", "He", "They")]
    sequences = [
        (prompt, list(answers(stories, [prompt], 60)[0][1])[:n]) for prompt, n in zip(prompts, lengths, strict=True)
    ]
    found = measure_acceptance(stories.loaded, sequences, k)
    assert found == Acceptance(k, 3, 11, 11 * (k + 1), Estimate(k + 1, 0.0), (1.0,) * k)
    assert found.to_json()["tokens_per_verification"] == k + 1


def test_the_acceptance_of_another_training(stories: LLM, other: LLM) -> None:
    """The data's README says: about 1.5 of 4 drafts of llama2xs for stories260K."""
    prompts = [stories.encode(text) for text in ("Once upon a time", "Tom and Sue", "The dog", "One day", "Lily had")]
    found = measure_acceptance(other.loaded, answers(stories, prompts, 200))
    assert found.num_draft_tokens == 4
    assert found.num_sequences == 5
    assert 2.2 < found.tokens_per_verification.value < 2.8
    assert found.tokens_per_verification.standard_error
    assert list(found.accepted_shares) == sorted(found.accepted_shares, reverse=True)


def test_the_batch_changes_nothing(stories: LLM, other: LLM) -> None:
    sequences = answers(stories, [stories.encode(text) for text in ("Once", "Tom and Sue", "The dog")], 50)
    read: list[int] = []
    found = measure_acceptance(other.loaded, [*sequences, ([5], [6])], on_tokens=read.append)
    assert sum(read) == 150
    assert found == measure_acceptance(other.loaded, sequences, batch_tokens=1)


# ---- the mean -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("length", [9, 23])
def test_the_ends_of_continuations_do_not_bias_the_mean(k: int, length: int) -> None:
    """If each token is the draft's with probability p, a verification yields (1 - p^(k+1)) / (1 - p) tokens (Leviathan
    et al., equation 1), however short the continuations are.
    """
    rng, p = np.random.default_rng(k), 0.7
    found = Acceptance.of([accepted_counts((rng.random(length) < p).tolist(), k) for _ in range(20_000)], k)
    mean, error = found.tokens_per_verification.value, found.tokens_per_verification.standard_error
    assert error is not None
    assert abs(mean - (1 - p ** (k + 1)) / (1 - p)) < 4 * error
    assert error < 0.02
    for i, share in enumerate(found.accepted_shares, 1):
        assert abs(share - p**i) < 5 * math.sqrt(p**i * (1 - p**i) / found.num_verifications)


def test_counts_by_hand() -> None:
    y, n = True, False
    assert accepted_counts([], 4) == []
    assert accepted_counts([y, y, y, y], 4) == []  # a fifth token is needed
    assert accepted_counts([y, y, y, y, n], 4) == [4]  # the target's own token always counts, drafted or not
    assert accepted_counts([n, y, n, y, y, n, y], 2) == [0, 1, 2]
    assert accepted_counts([y] * 9, 1) == [1, 1, 1, 1]


# ---- edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sequences", "k", "words"),
    [
        ([([1], [1, 2, 3])], 0, "num_draft_tokens is 0"),
        ([], 4, "no verification can be counted: none of the 0 continuations"),
        ([([1], [])], 4, "no verification can be counted"),
        ([([1], []), ([1], [1, 2, 3, 4])], 4, "none of the 2 continuations has more than 4 tokens"),
        ([([1], [1] * 5), ([], [1] * 5)], 4, "sequence 2 of 2 has an empty prompt"),
        (
            [([1], [1] * 5), ([1, 2], [1] * 63)],
            4,
            "sequence 2 of 2 has 65 tokens, but the draft's longest context is 64",
        ),
        ([([1], [1, 2, 3, 4, 40])], 4, r"sequence 1 of 1: token id 40 is not in 0..39"),
        ([([-1], [1, 2, 3, 4, 5])], 4, r"token id -1 is not in 0..39"),
    ],
)
def test_measurements_that_are_refused(sequences: list[Continuation], k: int, words: str, tiny: LLM) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        measure_acceptance(tiny.loaded, sequences, k)
    assert "\n" not in str(caught.value)


def test_another_vocabulary(tiny: LLM, stories: LLM) -> None:
    """Tokens of a model with a vocabulary of 512 are invalid for a draft with 40."""
    sequences = answers(stories, [stories.encode("Once upon a time")], 20)
    with pytest.raises(RequestError, match="this model's vocabulary"):
        measure_acceptance(tiny.loaded, sequences)


def test_as_long_as_fits(tiny: LLM) -> None:
    """Prompt and continuation fill the draft's context; a single sequence has no standard error."""
    ((prompt, continuation),) = answers(tiny, [[3]], 63)
    found = measure_acceptance(tiny.loaded, [(prompt, continuation)], 8)
    assert found.num_verifications == 7
    assert found.tokens_per_verification == Estimate(9.0, None)
    assert found.to_json()["tokens_per_verification_standard_error"] is None
