"""Vocabularies from GGUF metadata: their encodings, and every way in which they can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from ridgeline.errors import CheckpointError, TokenizerError
from ridgeline.load.gguf.vocab import build_vocab
from ridgeline.load.tokenizer import Tokenizer


def llama_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b", "ab", "▁a", "<tool>"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 1, 1, 4]
    base = {"model": "llama", "tokens": tokens, "token_type": types, "scores": [-float(i) for i in range(len(tokens))]}
    return {f"tokenizer.ggml.{key}": value for key, value in {**base, **changes}.items() if value is not None}


def bpe_metadata(**changes: Any) -> dict[str, Any]:
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "ab", "Ġab", "<|end|>"]
    tokens = sorted(tokens[:256]) + tokens[256:]
    base = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["a b", "Ġ ab"], "eos_token_id": 258}
    base["token_type"] = [1] * 258 + [3]
    return {f"tokenizer.ggml.{key}": value for key, value in {**base, **changes}.items() if value is not None}


def from_metadata(metadata: dict[str, Any]) -> Tokenizer:
    vocab = build_vocab(metadata)
    return Tokenizer(vocab.backend, special_tokens=vocab.special_tokens, templates=vocab.templates, around=vocab.around)


def test_gguf_sentencepiece() -> None:
    tokenizer = from_metadata(llama_metadata())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("aab") == [1, 263, 262]  # the result with ▁a first would be wrong: ab has the better score
    assert tokenizer.encode("<s>é<tool>") == [1, 259, 3 + 0xC3, 3 + 0xA9, 264]
    assert tokenizer.decode(tokenizer.encode("é ab<tool>")) == "é ab<tool>"
    bare = from_metadata(llama_metadata(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert bare.encode("a") == [260, 2]


def test_gguf_byte_level() -> None:
    tokenizer = from_metadata(bpe_metadata())
    assert tokenizer.encode("ab ab<|end|>") == [256, 257, 258]
    assert tokenizer.decode([256, 257, 258]) == "ab ab" and tokenizer.eos_token_id == 258
    metadata = bpe_metadata(pre="llama-bpe", bos_token_id=258)
    assert from_metadata(metadata).encode("<|end|>ab") == from_metadata(metadata).encode("ab") == [258, 256]
    assert from_metadata(bpe_metadata(pre="qwen2")).encode("e\u0301") == from_metadata(bpe_metadata()).encode("é")


def test_gguf_chat_templates() -> None:
    metadata = llama_metadata()
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{{ messages[0].content }}"
    metadata["tokenizer.chat_template.rag"] = "ab"
    tokenizer = from_metadata(metadata)
    assert tokenizer.encode_chat([{"role": "user", "content": "a"}]) == [1, 263]
    assert tokenizer.encode_chat([{"role": "user"}], template="rag") == tokenizer.encode("ab")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "model is missing"),
        (llama_metadata(model="bert"), "'bert'; supported: 'gpt2' and 'llama'"),
        (llama_metadata(model=3), "model is a int"),
        (llama_metadata(tokens=None), "tokens is missing"),
        (llama_metadata(tokens=[1]), "tokens contains a int"),
        (llama_metadata(tokens=["a", "a"]), "contains 'a' twice"),
        (llama_metadata(scores=[1.0]), "scores has 1 elements"),
        (llama_metadata(token_type=[1]), "token_type has 1 elements"),
        (llama_metadata(bos_token_id=10**6), "bos_token_id is 1000000"),
        (llama_metadata(add_bos_token=1), "add_bos_token is a int"),
        (bpe_metadata(pre=None), "pre is missing"),
        (bpe_metadata(pre="new-bpe"), "'new-bpe', which is not supported; supported: .*llama-bpe"),
        (bpe_metadata(merges=None), "merges is missing"),
        (bpe_metadata(merges=["ab"]), "merges contains 'ab'"),
        (bpe_metadata(merges=["a zz"]), "merges does not fit"),
    ],
)
def test_gguf_errors(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message) as caught:
        build_vocab(metadata)
    assert "\n" not in str(caught.value)


def test_gguf_damage(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"x\.gguf"):
        Tokenizer.from_gguf(tmp_path / "x.gguf")
