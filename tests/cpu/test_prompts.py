"""Prompts are read as by transformers' tokenizers: special tokens and truncation."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from oracle.data import shared_data
from ridgeline.errors import RequestError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.request import Frontend
from ridgeline.spec.request import SamplingParams

TEXT = "Once upon a time, there was a little girl called Lily."


@pytest.fixture(scope="module")
def frontend() -> Frontend:
    class Spec:
        vocab_size, max_position_embeddings, block, diffusion = 512, 512, 1, None

        def require_logits(self, purpose: str) -> None:
            pass

    spec: Any = Spec()
    return Frontend(spec, Tokenizer.from_folder(shared_data() / "models" / "stories260K"), "", 64, 0)


@pytest.fixture(scope="module")
def theirs() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(shared_data() / "models" / "stories260K")  # type: ignore[no-any-return]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_truncated_as_by_transformers(
    frontend: Frontend, theirs: Any, special: bool, side: str, count: int
) -> None:  # fmt: skip
    theirs.truncation_side = side
    wanted = theirs(TEXT, add_special_tokens=special, truncation=True, max_length=count)["input_ids"]
    params = SamplingParams(max_tokens=4)
    count = min(count, 60)
    prompt = {"prompt": TEXT, "add_special_tokens": special, "truncate_prompt_tokens": count, "truncation_side": side}
    assert list(frontend.request(prompt, params).prompt_token_ids) == wanted


def test_ids_are_cut_as_they_are(frontend: Frontend) -> None:
    for side, wanted in (("left", [7, 8, 9]), ("right", [1, 7, 8])):
        prompt = {"prompt_token_ids": [1, 7, 8, 9], "truncate_prompt_tokens": 3, "truncation_side": side}
        assert frontend.encode(prompt) == wanted


def test_minus_one_truncates_to_the_context_without_the_answer(frontend: Frontend) -> None:
    prompt = {"prompt_token_ids": list(range(3, 103)), "truncate_prompt_tokens": -1}
    for longest, room in ((10, 54), (None, 63)):
        ids = frontend.request(prompt, SamplingParams(max_tokens=longest)).prompt_token_ids
        assert list(ids) == list(range(103 - room, 103))
    with pytest.raises(RequestError, match="only 54 tokens leave room"):
        frontend.request({**prompt, "truncate_prompt_tokens": 55}, SamplingParams(max_tokens=10))
    for count in (-1, 5):
        with pytest.raises(RequestError, match="max_tokens leaves no room"):
            frontend.request({**prompt, "truncate_prompt_tokens": count}, SamplingParams(max_tokens=80))


@pytest.mark.parametrize(
    "more",
    [
        {"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": True},
        {"truncate_prompt_tokens": "5"}, {"truncation_side": "middle"}, {"add_special_tokens": 1},
    ],
)  # fmt: skip
def test_unknown_options_are_refused(frontend: Frontend, more: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(more))} is "):
        frontend.encode({"prompt": TEXT, **more})
