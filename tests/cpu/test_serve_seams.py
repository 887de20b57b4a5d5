"""Limits that several parts of the server share: texts, bodies, structures and chats."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, processors

from ridgeline.errors import HelpersBusy, RequestError
from ridgeline.load.chat import chat_data
from ridgeline.load.lengths import least_tokens
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.request import Frontend, Rendered
from ridgeline.serve.api import batch
from ridgeline.serve.helpers.packed import pack, unpack
from ridgeline.serve.helpers.parse import parse
from ridgeline.serve.http.errors import as_api_error
from ridgeline.spec.prompt import PromptOptions

LETTERS = {chr(97 + i): i for i in range(26)}
BOS, EOS = 26, 27


def tokenizer() -> Tokenizer:
    """A tokenizer whose tokens are letters. A text gets <s> before it and </s> after it."""
    backend = Backend(models.BPE({**LETTERS, "<s>": BOS, "</s>": EOS}, []))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return Tokenizer(backend, special_tokens={})


def frontend(context: int = 64) -> Frontend:
    spec: Any = SimpleNamespace(vocab_size=28, max_position_embeddings=context)
    return Frontend(spec, tokenizer(), "", context, 0)


def test_a_truncated_text_keeps_its_special_tokens_and_no_more() -> None:
    one = tokenizer()
    assert one.encode("abcdef", max_tokens=4) == [BOS, 4, 5, EOS]
    assert one.encode("abcdef", max_tokens=4, truncation_side="right") == [BOS, 0, 1, EOS]
    assert one.encode("<s>abc", max_tokens=5) == [BOS, 0, 1, 2, EOS]  # it already has a BOS, so nothing is dropped
    assert one.encode("abc", max_tokens=2) == [BOS, EOS]
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 1, but the model adds 2 tokens"):
        one.encode("abc", max_tokens=1)


@pytest.mark.parametrize(("special", "kept"), [(None, [BOS, 4, 5]), (True, [BOS, 5, EOS]), (False, [3, 4, 5])])
def test_a_truncated_chat_keeps_the_same_tokens_as_a_text(special: bool | None, kept: list[int]) -> None:
    chat = Rendered("abcdef", special, PromptOptions(truncate_prompt_tokens=3))
    assert frontend().encode(chat) == kept


def test_a_prompt_of_leading_tokens_alone_is_counted_at_once() -> None:
    began = time.process_time()
    assert least_tokens("<s>" * 3_000_000 + "abcd", 4, ["<s>", "<|b|>"]) == 1
    assert time.process_time() - began < 2  # token by token it takes 3 s


def test_a_chat_nested_deeply_is_an_error_of_the_request() -> None:
    value: Any = 1
    for _ in range(900):
        value = {"a": value}
    with pytest.raises(RequestError, match="nested too deeply"):
        chat_data([{"role": "user", "content": "x", "e": value}])


def test_only_utf_8_is_json() -> None:
    assert parse('\ufeff{"x": "\u2200"}'.encode()) == {"x": "\u2200"}
    with pytest.raises(ValueError):
        parse('{"x":"\u2200","y":[[],[]]}'.encode("utf-16-le"))


def test_lists_of_texts_are_sent_as_bytes() -> None:
    value = {
        "input": ["\u6f22" * 1000] * 3,
        "deep": [["x", "y" * 2000, ""], [], [1, "a"]],
        "\ud800": ["a" * 2000, "\ud800"],
    }
    rest, paths, *blobs = pack(value)
    assert unpack((rest, paths, *blobs)) == value
    assert sorted(kind for _, kind in paths) == ["texts"] * 3


def test_a_batch_waits_until_its_structures_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    error = as_api_error(HelpersBusy("32 wait"))
    assert error is not None and error.status == 429 and error.retry_after == 2
    tries = iter([HelpersBusy("32 wait"), error, {"id": "x"}])

    async def sent(service: Any, line: Any, ignored: list[str]) -> Any:
        found = next(tries)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(batch, "_sent", sent)
    monkeypatch.setattr(batch, "RETRY_SECONDS", 0.0)
    nothing: Any = None
    assert asyncio.run(batch._answer(nothing, nothing, [])) == {"id": "x"}
