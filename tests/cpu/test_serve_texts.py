"""The text of a token is the text that it adds at its position: the joined texts are the answer's text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.vocabularies import REAL, TRAINED, load
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.serve.api.logprobs import of_chat, of_completion
from ridgeline.serve.api.token_texts import TokenTexts
from ridgeline.spec.request import TokenLogprobs

DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
STORIES = DATA / "models" / "stories260K"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason="../shared/data/models/stories260K is absent")


@pytest.fixture(scope="module")
def stories() -> Tokenizer:
    return Tokenizer.from_folder(STORIES)


def entries(ids: Sequence[int], top: Sequence[tuple[int, float]] = ()) -> list[TokenLogprobs]:
    return [TokenLogprobs(token, -0.5, ((token, -0.5), *top)) for token in ids]


@pytest.mark.parametrize("name", [*REAL, *TRAINED])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_texts_joined_are_the_decoded_text(name: str, data: st.DataObject) -> None:
    """Texts, bytes and offsets agree with the library for any prompt and answer, even with invalid UTF-8."""
    tokenizer = load(name)
    single = st.integers(0, min(tokenizer.vocab_size, 300) - 1) | st.integers(0, tokenizer.vocab_size - 1)
    prompt, answer = (data.draw(st.lists(single, min_size=low, max_size=8)) for low in (0, 1))
    texts = TokenTexts(tokenizer)
    found = of_completion(texts.after(prompt), entries(answer), answer[0], over=True)
    stream = tokenizer.detokenizer(True, prompt)
    whole = "".join([*map(stream.push, answer), stream.flush()])
    plain = [t for t, token in zip(found["tokens"], answer, strict=True) if token not in tokenizer.special_ids]
    last_is_special = answer[-1] in tokenizer.special_ids  # its name comes before the incomplete character
    assert "".join(plain) == whole or (last_is_special and whole.startswith("".join(plain)))
    ends = [*found["text_offset"][1:], len(whole)]
    for text, begin, end, token in zip(found["tokens"], found["text_offset"], ends, answer, strict=True):
        if token not in tokenizer.special_ids:
            assert whole[begin:end] == text
    for top, text in zip(found["top_logprobs"], found["tokens"], strict=True):
        assert top == {text: -0.5}
    chat = of_chat(texts.after(prompt), entries(answer))["content"]
    kept = [c for c, token in zip(chat, answer, strict=True) if token not in tokenizer.special_ids]
    if "\ufffd" not in whole and "\ufffd" not in tokenizer.decode(prompt):
        assert b"".join(bytes(c["bytes"]) for c in kept).decode() == whole
    if "\ufffd" not in tokenizer.decode(answer):
        plain = [t for t, token in zip(texts.all_of(answer), answer, strict=True) if token not in tokenizer.special_ids]
        assert "".join(plain) == tokenizer._backend.decode(answer, skip_special_tokens=True)


@needs_stories
def test_a_word_and_its_continuation_are_two_keys(stories: Tokenizer) -> None:
    """SentencePiece's "a" and "▁a" differ by a space unless they begin the text."""
    there, here = stories._backend.token_to_id("▁a"), stories._backend.token_to_id("a")
    position = TokenTexts(stories).after(stories.encode("Once"))
    found = of_completion(position, entries([there], [(here, -2.0)]), there, over=True)
    assert found["tokens"] == [" a"] and found["top_logprobs"] == [{" a": -0.5, "a": -2.0}]
    chat = of_chat(TokenTexts(stories).after(stories.encode("Once")), entries([there], [(here, -2.0)]))
    assert [(t["token"], t["bytes"]) for t in chat["content"][0]["top_logprobs"]] == [(" a", [32, 97]), ("a", [97])]


@needs_stories
def test_two_candidates_with_the_same_text_are_both_listed(stories: Tokenizer) -> None:
    """At the start of a text the decoder removes the space, so the second candidate is named by its id."""
    there, here = stories._backend.token_to_id("▁a"), stories._backend.token_to_id("a")
    found = of_completion(TokenTexts(stories).after(()), entries([there], [(here, -2.0)]), there, over=True)
    assert found["tokens"] == ["a"] and found["top_logprobs"] == [{"a": -0.5, f"token_id:{here}": -2.0}]


@needs_stories
def test_offsets_count_special_tokens_that_are_shown(stories: Tokenizer) -> None:
    ids = stories.encode("Once upon")
    for skip in (True, False):
        position = TokenTexts(stories, skip_special_tokens=skip).after(())
        found = of_completion(position, entries(ids), ids[0], over=True)
        text = stories.decode(ids, skip_special_tokens=skip)
        assert found["tokens"][0].strip() == "<s>"
        joined = zip(found["tokens"][1:], found["text_offset"][1:], strict=True)
        assert all(text[offset:].startswith(token) for token, offset in joined)
        assert text.endswith("".join(found["tokens"][1:]))


@needs_stories
def test_an_emoji_is_the_text_of_its_last_byte(stories: Tokenizer) -> None:
    ids = stories.encode("a 🙂", add_special_tokens=False)
    texts = TokenTexts(stories).all_of(ids)
    assert texts[-4:] == ["", "", "", "🙂"] and "".join(texts) == "a 🙂"
    assert TokenTexts(stories).all_of(ids[:-1])[-1] == "\ufffd" * 3


@needs_stories
def test_tokens_by_their_ids(stories: Tokenizer) -> None:
    ids = stories.encode("Once upon")
    texts = TokenTexts(stories, as_ids=True)
    found = of_completion(texts.after(()), entries(ids, [(5, -1.0)]), ids[0], over=True)
    assert found["tokens"] == [f"token_id:{i}" for i in ids]
    assert all(f"token_id:{i}" in top for i, top in zip(ids, found["top_logprobs"], strict=True))
    assert (
        found["text_offset"] == of_completion(TokenTexts(stories).after(()), entries(ids), ids[0], True)["text_offset"]
    )
