"""Conversations keep the ids that the model processed, and their text always equals the template's."""

from __future__ import annotations

import numpy as np
import pytest

from oracle.data import shared_data
from ridgeline.errors import RequestError
from ridgeline.load.conversation import Conversation
from ridgeline.load.tokenizer import Tokenizer

ANSWERS = ["Fine.", " two  spaces \n", "héllo 🦙 wörld", "", "a\n\nb", "<b>&amp;"]


@pytest.fixture(scope="module")
def qwen() -> Tokenizer:
    return Tokenizer.from_folder(shared_data() / "tokenizers/qwen2.5")


def spelled(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return ids of a text, one character at a time: a model may write them, but no tokenizer would."""
    return [i for character in text for i in tokenizer.encode(character, add_special_tokens=False)]


def test_a_conversation_continues_from_the_same_ids(qwen: Tokenizer) -> None:
    talk = Conversation(qwen, "Be brief.")
    seen: list[int] = []
    for i, answer in enumerate(ANSWERS):
        prompt = talk.ask(f"question {i}?")
        assert prompt[: len(seen)] == seen
        assert qwen.decode(prompt, skip_special_tokens=False) == qwen.render_chat(talk.messages)
        ended = i % 2 == 0  # an answer that did not end was cut, and the template closes its message
        said = [*spelled(qwen, answer), *([qwen.eos_token_id] if ended and qwen.eos_token_id else [])]
        talk.answered(said, answer)
        seen = [*prompt, *said]
    assert len(seen) > len(qwen.encode_chat(talk.messages))  # the ids differ from the tokenizer's


def test_a_history_that_the_template_rewrites_is_tokenized_anew(qwen: Tokenizer) -> None:
    source = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}[assistant] "
    trimming = Tokenizer(qwen._backend, templates={"default": source})
    talk = Conversation(trimming)
    talk.ask("hi")
    talk.answered(spelled(qwen, " yes "), " yes ")
    assert talk.ask("more") == trimming.encode_chat(talk.messages)
    assert trimming.decode(talk.ask("x")).count("[user]") == 3


def test_text_that_would_join_tokens_over_the_border(qwen: Tokenizer) -> None:
    """The template puts no special token after an answer, so the next ids are the end of the whole tokenized text."""
    bare = Tokenizer(qwen._backend, templates={"default": "{% for m in messages %}{{ m.content }}{% endfor %}"})
    for answer, question in (("hel", "lo wor"), ("new\n", "\nline"), ("a ", "b"), ("12", "34")):
        talk = Conversation(bare)
        first = talk.ask("say: ")
        said = spelled(qwen, answer)
        talk.answered(said, answer)
        found = talk.ask(question)
        assert bare.decode(found) == f"say: {answer}{question}"
        whole = bare.encode_chat(talk.messages)
        assert found == whole or found[: len(first) + len(said)] == [*first, *said]


def test_reset_and_withdraw(qwen: Tokenizer) -> None:
    talk = Conversation(qwen, "Be brief.")
    first = talk.ask("hi")
    talk.withdraw()
    assert talk.ask("hi") == first
    talk.answered([qwen.eos_token_id or 0], "")
    talk.ask("again")
    talk.withdraw()
    assert [m["role"] for m in talk.messages] == ["system", "user", "assistant"]
    talk.reset()
    assert talk.ask("hi") == first


def test_a_message_that_the_template_refuses_changes_nothing(qwen: Tokenizer) -> None:
    source = "{% if messages | length > 2 %}{{ raise_exception('no more') }}{% endif %}{{ messages[-1].content }}"
    talk = Conversation(Tokenizer(qwen._backend, templates={"default": source}))
    talk.ask("hi")
    talk.answered([5], "x")
    with pytest.raises(RequestError, match="no more"):
        talk.ask("again")
    assert len(talk.messages) == 2


def test_random_dialogues(qwen: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        talk = Conversation(qwen)
        for _ in range(4):
            prompt = talk.ask(qwen.decode(rng.integers(0, 5000, rng.integers(1, 12)).tolist()))
            said = [i for i in rng.integers(0, 5000, rng.integers(1, 12)).tolist() if i not in qwen.special_ids]
            text = qwen.decode(said)
            talk.answered(said, text)
            again = talk.ask("next")
            rendered = qwen.render_chat(talk.messages)
            assert qwen.decode(again, skip_special_tokens=False) == rendered
            if "\ufffd" not in text:
                assert again[: len(prompt) + len(said)] == [*prompt, *said]
            talk.withdraw()
