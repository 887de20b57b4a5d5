"""Streamed text: the joined pieces of any ids are the decoded text, and no piece contains an incomplete character."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

from oracle.vocabularies import REAL, TRAINED, load, quick, text_strategy
from ridgeline.load.detokenize import Detokenizer
from ridgeline.load.tokenizer import Tokenizer

# DeepSeek-Coder adds these characters as tokens; `tokenizers` (and so Hugging Face) reads their names as bytes.
QUIRKS = set("õ÷ÁýÀÿøúþüùöûñòóô")


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] = [], skip: bool = True) -> list[str]:  # noqa: B006
    detokenizer = tokenizer.detokenizer(skip, prompt)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def expected_text(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """Decode as `tokenizers` does, but as SentencePiece does if byte-fallback tokens are partly invalid."""
    backend = tokenizer._backend
    kept = [index for index in ids if not (skip and index in tokenizer.special_ids)]
    tokens = [token for index in kept if (token := backend.id_to_token(index)) is not None]
    whole = backend.decode(kept, skip_special_tokens=False)
    assert whole == backend.decode(ids, skip_special_tokens=skip)
    if "ByteFallback" not in str(backend.decoder) or "\ufffd" not in whole:
        return whole
    result, run = "", b""
    for token in [*tokens, ""]:
        if match := re.fullmatch("<0x([0-9A-F]{2})>", token):
            run += bytes([int(match[1], 16)])
            continue
        while run:
            size = next((n for n in range(1, 5) if valid(run[:n])), 0)
            result += run[:size].decode() if size else "\ufffd"
            run = run[size or 1 :]
        result += token.replace("▁", " ")
    return result[1:] if "Strip" in str(backend.decoder) and result.startswith(" ") else result


def valid(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


@pytest.mark.parametrize("name", [*REAL, *TRAINED])
@quick
@given(st.data())
def test_pieces_are_the_decoded_text(name: str, data: st.DataObject) -> None:
    """For any ids, the joined pieces are the text of the library; after any prompt they continue it."""
    tokenizer = load(name)
    single = st.integers(0, min(tokenizer.vocab_size, 300))  # the ids of single bytes
    ids = data.draw(st.lists(single | st.integers(0, tokenizer.vocab_size + 50), max_size=30))
    skip = data.draw(st.booleans())
    expected = expected_text(tokenizer, ids, skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected
    assert "".join(stream(tokenizer, ids, skip=skip)) == expected
    cut = data.draw(st.integers(0, len(ids)))
    before = tokenizer.detokenizer(skip)
    start = "".join(map(before.push, ids[:cut]))
    rest = "".join(stream(tokenizer, ids[cut:], ids[:cut], skip))
    assert start + rest == expected
    if not before.flush():
        assert tokenizer.decode(ids[:cut], skip_special_tokens=skip) + rest == expected


@pytest.mark.parametrize("name", [*REAL, *TRAINED[:3]])
@quick
@given(text_strategy)
def test_valid_text_streams_without_a_broken_character(name: str, text: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    whole = tokenizer._backend.decode(ids)
    assert "".join(pieces) == whole
    assert "".join(pieces).count("\ufffd") == sum(piece.count("\ufffd") for piece in pieces)
    if "\ufffd" not in text and not (name == "deepseek-coder" and QUIRKS.intersection(text)):
        assert "\ufffd" not in whole
    if not any(tokenizer._backend.id_to_token(index) in text for index in tokenizer.special_ids):
        lossy = name in ("babyllama105", "qwen2.5") or "▁" in text  # no bytes; NFC; SentencePiece's own space
        assert whole == text or lossy or (name == "deepseek-coder" and QUIRKS.intersection(text))


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return the ids that spell `data` byte by byte."""
    backend = tokenizer._backend
    level = "ByteLevel" in str(backend.decoder)
    spelled = bytes_to_unicode() if level else {byte: f"<0x{byte:02X}>" for byte in range(256)}
    return [backend.token_to_id(spelled[byte]) for byte in data]


@pytest.mark.parametrize("name", ["gpt2", "qwen2.5", "byte-level", "llama", "gemma", "stories260K", "llama-spm"])
@quick
@given(st.binary(max_size=12) | text_strategy.map(lambda value: value.encode()))
@example("👨‍👩‍👧‍👦".encode())
@example(b"\xe4\xbd\xa0\xff\xe4\xbd")
@example(b"\xed\xa0\x80\xf5\xf0\x80")
@example(b"\xf0\x9f\xa6")
def test_byte_streams(name: str, data: bytes) -> None:
    """A character is returned with its last byte, and an invalid sequence as soon as it is known to be invalid."""
    tokenizer = load(name)
    detokenizer = tokenizer.detokenizer(prompt=tokenizer.encode("x"))
    got = ""
    for index, token in enumerate(byte_ids(tokenizer, data)):
        got += detokenizer.push(token)
        assert len(detokenizer._pending) < 4
        held = detokenizer._pending
        assert data[: index + 1].endswith(held)
        done = data[: index + 1 - len(held)]
        assert got.replace("\ufffd", "") == done.decode("utf-8", "replace").replace("\ufffd", "")
    got += detokenizer.flush()
    if "ByteLevel" in str(tokenizer._backend.decoder):
        assert got == data.decode("utf-8", "replace")
    else:
        assert len(got) >= len(data.decode("utf-8", "replace"))
    if valid_text(data):
        assert got == data.decode()


def valid_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_partly_invalid_byte_run_keeps_its_valid_characters() -> None:
    tokenizer = load("llama")
    ids = byte_ids(tokenizer, b"\xe4\xbd\xa0\xff\xe4\xbd")
    assert tokenizer.decode(ids) == "你\ufffd\ufffd\ufffd"
    assert stream(tokenizer, ids)[2] == "你"


def test_special_ids_do_not_break_a_character() -> None:
    tokenizer = load("llama")
    a, b, c = byte_ids(tokenizer, "你".encode())
    assert tokenizer.decode([a, 2, b, c]) == "你"
    assert tokenizer.decode([a, 2, b, c], skip_special_tokens=False) == "\ufffd</s>\ufffd\ufffd"


@pytest.mark.parametrize("name", TRAINED)
def test_ids_outside_the_vocabulary_add_nothing(name: str) -> None:
    tokenizer = load(name)
    ids = tokenizer.encode("Once upon")
    odd = [-1, tokenizer.vocab_size, 2**31, 2**70]
    assert tokenizer.decode(odd) == ""
    assert tokenizer.decode([*odd, *ids[:1], *odd, *ids[1:], *odd]) == tokenizer.decode(ids)


def test_a_long_prompt_costs_no_more_than_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load("llama")
    ids = tokenizer.encode("Once upon a time, there was a café. " * 500) + byte_ids(tokenizer, "🦙".encode()[:3])
    calls = []
    push = Detokenizer.push
    monkeypatch.setattr(Detokenizer, "push", lambda self, index: calls.append(index) or push(self, index))
    detokenizer = tokenizer.detokenizer(prompt=ids)
    assert len(ids) > 2000 and len(calls) < 20
    assert detokenizer.push(byte_ids(tokenizer, "🦙".encode())[3]) == "🦙"
