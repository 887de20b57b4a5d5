"""A vocabulary that Ridgeline learned is a Hugging Face tokenizer: transformers reads it as Ridgeline does."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from oracle.vocabularies import quick, text_strategy
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.train.data.vocabulary import END_OF_TEXT, save_tokenizer, tokenizer_hash, train_bpe

CODE = "def f(x):\n        return x + 2024  # it's 'x'\n\n\n\tpass"


@functools.cache
def trained() -> tokenizers.Tokenizer:
    return train_bpe([CODE, "return the  text of it", "naïve café"] * 3, 330)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "new"
    save_tokenizer(trained(), folder)
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path) -> object:
    return AutoTokenizer.from_pretrained(folder)


@quick
@given(text_strategy | st.just(CODE) | st.just(f"a{END_OF_TEXT} b"))
def test_ids_are_those_of_transformers(folder: Path, theirs, text: str) -> None:
    ours = Tokenizer.from_folder(folder)
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.encode(text)[0] == ours.bos_token_id == 0
    assert ours.encode(text)[1:] == ours.encode(text, add_special_tokens=False)


def test_one_token_begins_and_ends(folder: Path, theirs) -> None:
    ours = Tokenizer.from_folder(folder)
    assert ours.special_tokens == {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    assert (theirs.bos_token, theirs.eos_token) == (END_OF_TEXT, END_OF_TEXT)
    assert ours.vocab_size == len(theirs) == trained().get_vocab_size()
    assert ours.encode(END_OF_TEXT + "a") == [0, *ours.encode("a", add_special_tokens=False)]
    assert tokenizer_hash(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))) == tokenizer_hash(trained())
