"""Tokenizers as GGUF metadata: the same after reading them back, also from llama.cpp's description alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from oracle.data import gguf_vocab
from ridgeline.load.gguf.header import read_header
from ridgeline.load.gguf.splits import SPLITS
from ridgeline.load.gguf.vocab import HUGGING_FACE, build_vocab
from ridgeline.load.gguf.vocab_write import vocab_fields
from ridgeline.load.hub import find_model
from ridgeline.load.tokenizer import Tokenizer, has_tokenizer

TEXTS = ("Hello world, it's 12345!\n\n  def f(x): return x", "Füße 中文 🦙 \t end ", "a", "")


def read_back(metadata: dict[str, Any]) -> Tokenizer:
    vocab = build_vocab(metadata)
    return Tokenizer(vocab.backend, special_tokens=vocab.special_tokens, templates=vocab.templates, around=vocab.around)


@pytest.mark.parametrize("name", ["gpt-2", "deepseek-coder", "llama-spm"])
def test_published_vocabularies(name: str, tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    path.write_bytes(gguf_vocab(name))
    original, published = Tokenizer.from_gguf(path), read_header(path).metadata
    size = len(published["tokenizer.ggml.tokens"])
    fields, notes = vocab_fields(original, size, {"eos_token_id": original.eos_token_id})
    assert not notes
    assert fields["tokenizer.ggml.model"] == published["tokenizer.ggml.model"]
    assert fields["tokenizer.ggml.eos_token_id"] == original.eos_token_id
    same = [i for i, t in enumerate(published["tokenizer.ggml.tokens"]) if t == fields["tokenizer.ggml.tokens"][i]]
    assert len(same) == size
    if name != "llama-spm":
        assert fields["tokenizer.ggml.merges"] == published["tokenizer.ggml.merges"]
    whole, for_llama_cpp = fields, {k: v for k, v in fields.items() if k != HUGGING_FACE}
    for metadata in (whole, for_llama_cpp):
        tokenizer = read_back(metadata)
        for text in TEXTS:
            assert tokenizer.encode(text) == original.encode(text)
            assert tokenizer.decode(tokenizer.encode(text)) == original.decode(original.encode(text))


def test_our_own_with_its_chat_template() -> None:
    original = Tokenizer.from_folder(find_model("pocket"))
    fields, _ = vocab_fields(original, 4096, {"bos_token_id": 0, "eos_token_id": [0, 7]})
    assert fields["tokenizer.ggml.eot_token_id"] == 7 and fields["tokenizer.ggml.bos_token_id"] == 0
    tokenizer = read_back(fields)
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.encode_chat(messages) == original.encode_chat(messages)
    assert tokenizer.special_tokens == original.special_tokens
    assert [tokenizer.encode(t) for t in TEXTS] == [original.encode(t) for t in TEXTS]


def test_a_larger_embedding_is_padded() -> None:
    original = Tokenizer.from_folder(find_model("pocket"))
    fields, _ = vocab_fields(original, 4100, {})
    assert fields["tokenizer.ggml.tokens"][4096:] == ["[PAD4096]", "[PAD4097]", "[PAD4098]", "[PAD4099]"]
    assert fields["tokenizer.ggml.token_type"][4096:] == [5] * 4


def test_without_a_tokenizer(tmp_path: Path) -> None:
    fields, notes = vocab_fields(None, 10, {"eos_token_id": 3})
    assert fields == {"tokenizer.ggml.model": "none", "tokenizer.ggml.eos_token_id": 3}
    assert notes == ("the file has no tokenizer",)
    (tmp_path / "v.gguf").write_bytes(gguf_vocab("llama-spm"))
    assert has_tokenizer(tmp_path / "v.gguf") and not has_tokenizer(tmp_path)


def test_a_kind_that_llama_cpp_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Tokenizer.from_folder(find_model("pocket"))
    monkeypatch.setattr("ridgeline.load.gguf.vocab_write.SPLITS", {"gpt-2": SPLITS["gpt-2"]})
    fields, notes = vocab_fields(original, 4096, {})
    assert fields["tokenizer.ggml.model"] == "none" and "tokenizer.ggml.tokens" not in fields
    assert notes == ("llama.cpp has no rule for this tokenizer, so that it can run the file with token ids only",)
    assert read_back(fields).encode("Hi there 12") == original.encode("Hi there 12")
