"""The lower bound of a text's number of tokens never exceeds the number, whatever the tokenizer's steps."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from oracle.data import shared_data
from ridgeline.errors import RequestError
from ridgeline.load.lengths import characters_per_token
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.request import Frontend

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
# Characters that normalizers treat in special ways: accents, compatibility forms, white space, control characters.
ALPHABET = [
    *"ab Zé\u0301\u0345\u1f82\ufb01\u2126\uac01\u1100\u1161\t\n\r\u200b\ufeff\U0001f600",
    "  ",
    "aaaa",
    "<s>",
    "\0",
]


def bpe(**options: Any) -> tokenizers.Tokenizer:
    pieces = ["a", "b", "ab", " ", "▁", "aa", "aaaa", "<unk>", *"é"]
    vocab = {**BYTES, **{piece: 256 + i for i, piece in enumerate(pieces)}}
    merges = [("a", "b"), ("a", "a"), ("aa", "aa")]
    return tokenizers.Tokenizer(models.BPE(vocab, merges, **options))


def byte_level() -> tokenizers.Tokenizer:
    vocab = {entry: i for i, entry in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE({**vocab, "aa": 256, "Ġa": 257}, [("a", "a"), ("Ġ", "a")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def with_(backend: tokenizers.Tokenizer, **parts: Any) -> tokenizers.Tokenizer:
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def small_spec() -> Any:
    return SimpleNamespace(max_position_embeddings=100, vocab_size=300)


def known(backend: tokenizers.Tokenizer) -> int | None:
    return characters_per_token(backend, max(map(len, backend.get_vocab())))


SAFE = {
    "byte level": byte_level(),
    "NFC": with_(byte_level(), normalizer=normalizers.NFC()),
    "NFKC": with_(byte_level(), normalizer=normalizers.NFKC()),
    "NFKD": with_(byte_level(), normalizer=normalizers.NFKD()),
    "lowercase": with_(byte_level(), normalizer=normalizers.Lowercase()),
    "byte fallback": bpe(byte_fallback=True, fuse_unk=True, unk_token="<unk>"),
    "unknown": bpe(unk_token="<unk>"),
    "Llama": with_(
        bpe(byte_fallback=True, unk_token="<unk>", fuse_unk=True),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    ),
    "shorter": with_(byte_level(), normalizer=normalizers.Replace("aaaa", "b")),
    "metaspace": with_(bpe(byte_fallback=True, unk_token="<unk>"), pre_tokenizer=pre_tokenizers.Metaspace()),
}
DELETING = {
    "strip": with_(byte_level(), normalizer=normalizers.Strip()),
    "accents": with_(byte_level(), normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "to nothing": with_(byte_level(), normalizer=normalizers.Replace("a", "")),
    "by pattern": with_(byte_level(), normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")),
    "BERT": with_(byte_level(), normalizer=normalizers.BertNormalizer()),
    "white space": with_(byte_level(), pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
    "removed": with_(byte_level(), pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
    "unknown fused": bpe(unk_token="<unk>", fuse_unk=True),
    "unknown dropped": bpe(),
    "a byte is missing": with_(bpe(), pre_tokenizer=pre_tokenizers.ByteLevel()),
    "unigram": tokenizers.Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)),
    "words": tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
}


@pytest.mark.parametrize("name", SAFE)
def test_a_text_has_no_fewer_tokens(name: str) -> None:
    backend, chance = SAFE[name], random.Random(name)
    backend.add_special_tokens([AddedToken("<s>", normalized=False)])
    tokenizer = Tokenizer(backend, around=([backend.token_to_id("<s>")], []), special_tokens={"bos_token": "<s>"})
    assert tokenizer.characters_per_token is not None
    texts = ["a" * 4000, "\u03b1\u0313\u0300\u0345" * 500, "<s>" * 1000, "<s>" * 9 + "a" * 99, " " * 1000, "aaaa" * 999]
    texts += ["".join(chance.choices(ALPHABET, k=chance.randrange(60))) for _ in range(300)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.least_tokens(text) <= len(ids), text
        assert ids == tokenizer._with_prefix(backend.encode(text, add_special_tokens=False).ids)
    assert tokenizer.least_tokens("a" * 100_000) > 100_000 // 40


@pytest.mark.parametrize("name", DELETING)
def test_no_bound_where_characters_may_be_deleted(name: str) -> None:
    assert known(DELETING[name]) is None


def test_added_tokens_that_take_spaces_along() -> None:
    backend = byte_level()
    assert known(backend) == 2
    backend.add_tokens([AddedToken("<x>", rstrip=True)])
    assert known(backend) is None


@pytest.mark.parametrize(("name", "characters"), [("qwen2.5", 128 * 4), ("gpt2", 128)])
def test_published_ones(name: str, characters: int) -> None:
    backend = tokenizers.Tokenizer.from_file(str(shared_data() / "tokenizers" / name / "tokenizer.json"))
    assert known(backend) == characters


def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level(), templates={"default": "{{ messages[0].content }}"})
    frontend = Frontend(small_spec(), tokenizer, "", 100, 0)
    monkeypatch.setattr(Tokenizer, "_encode", lambda *_: pytest.fail("the text was tokenized"))
    text = "a" * 1_000_000
    for prompt in (text, {"messages": [{"role": "user", "content": text}]}):
        with pytest.raises(
            RequestError, match=r"1000000 characters, which are at least 500000 tokens .* is 100 tokens"
        ):
            frontend.encode(prompt)  # type: ignore[arg-type]


def test_other_threads_run_meanwhile() -> None:
    """Tokenizing a long text does not block other threads of the interpreter."""
    tokenizer = Tokenizer(byte_level())
    text, ids = "ab" * 1_000_000, list[int]()
    thread = threading.Thread(target=lambda: ids.extend(tokenizer.encode(text)[:1]))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20 and ids
