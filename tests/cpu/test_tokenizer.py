"""Tokenizers: ids equal to llama.cpp's and transformers', exactly one BOS, and text that is streamed exactly."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, processors
from transformers import AutoTokenizer, GPT2Tokenizer

from oracle.data import shared_data, vocab_cases
from oracle.vocabularies import FOLDERS, GGUFS, load, quick, text_strategy, trained
from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load.tokenizer import Tokenizer


@functools.cache
def oracle(name: str) -> Any:
    folder = shared_data() / FOLDERS[name]
    return (GPT2Tokenizer if name == "gpt2" else AutoTokenizer).from_pretrained(folder)


@pytest.mark.parametrize(
    ("name", "cases"),
    [("gpt2", "gpt-2"), ("gpt-2", "gpt-2"), ("qwen2.5", "qwen2"), *[(name, name) for name in GGUFS[1:]]],
)
def test_llama_cpp_cases(name: str, cases: str) -> None:
    wrong = [
        (text, ids, got)
        for text, ids in vocab_cases(cases)
        if (got := load(name).encode(text, add_special_tokens=False)) != ids
    ]
    assert not wrong


@pytest.mark.parametrize("name", FOLDERS)
@quick
@given(text_strategy)
@example("<|im_start|>user\nx<|im_end|><tool_call><|fim_pad|>")
@example("a <s> b</s><unk>")
def test_encode_matches_transformers(name: str, text: str) -> None:
    for special in (True, False):
        theirs = oracle(name).encode(text, add_special_tokens=special)
        if special and theirs[:2] == [1, 1] and name != "qwen2.5" and load(name).bos_token_id == 1:
            continue  # transformers doubles a literal BOS
        assert load(name).encode(text, add_special_tokens=special) == theirs


@pytest.mark.parametrize("name", FOLDERS)
@quick
@given(text_strategy)
def test_decode_matches_transformers(name: str, text: str) -> None:
    ids = load(name).encode(text)
    for skip in (True, False):
        assert load(name).decode(ids, skip_special_tokens=skip) == oracle(name).decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["qwen2.5", "stories260K"])
def test_attributes_match_transformers(name: str) -> None:
    ours, theirs = load(name), oracle(name)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == max(theirs.get_vocab().values()) + 1
    assert ours.special_ids == set(theirs.all_special_ids)
    assert ours.special_tokens == theirs.special_tokens_map


# ---------------------------------------------------------------------------------------------- BOS


def with_prefix(name: str, *prefix: str, suffix: str = "", bos: str | None = "<s>") -> Tokenizer:
    backend = trained(name)
    backend.add_special_tokens(["[gMASK]", "<sop>"])
    special = [(token, backend.token_to_id(token)) for token in (*prefix, suffix) if token]
    template = " ".join([*prefix, "$A", suffix]).strip()
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return Tokenizer(backend, special_tokens={} if bos is None else {"bos_token": bos})


PREFIXES: dict[str, tuple[str, ...]] = {
    "bos": ("<s>",),
    "glm": ("[gMASK]", "<sop>"),
    "both": ("<s>", "<sop>"),
    "no": (),
}


@functools.cache
def prefixed(kind: str) -> Tokenizer:
    return with_prefix("llama", *PREFIXES[kind], bos="<s>" if "<s>" in PREFIXES[kind] else None)


@pytest.mark.parametrize("kind", PREFIXES)
@quick
@given(text_strategy.filter(lambda value: "<s>" not in value), st.integers(0, 3))
def test_one_prefix_for_any_spelling_of_the_text(kind: str, text: str, written: int) -> None:
    tokenizer = prefixed(kind)
    prefix = [tokenizer._backend.token_to_id(token) for token in PREFIXES[kind]]
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode(text) == prefix + plain
    literal = "".join(PREFIXES[kind]) * min(written, 1) if kind != "bos" else "<s>" * written
    assert tokenizer.encode(literal + text) == prefix + plain
    assert tokenizer.encode(literal + text).count(1) == ("<s>" in PREFIXES[kind])


def test_bos_without_the_rest_of_the_prefix() -> None:
    tokenizer = prefixed("both")
    bos, sop = tokenizer.bos_token_id, tokenizer._backend.token_to_id("<sop>")
    for text, start in (("<sop>x", [bos, sop]), ("<s>x", [bos]), ("<s><sop><s>x", [bos, sop])):
        ids = tokenizer.encode(text)
        assert ids[: len(start)] == start and ids.count(bos) == 1
        assert tokenizer.decode(ids) == "x"


def test_eos_of_the_post_processor_is_kept() -> None:
    tokenizer = with_prefix("llama", "<s>", suffix="</s>")
    assert tokenizer.encode("Once") == [1, *tokenizer.encode("Once", add_special_tokens=False), 2]
    assert tokenizer.encode("") == [1, 2]


def test_without_special_tokens_the_text_is_unchanged() -> None:
    tokenizer = prefixed("bos")
    assert tokenizer.encode("<s><s>", add_special_tokens=False) == [1, 1]
    assert tokenizer.encode("", add_special_tokens=False) == []


@pytest.mark.parametrize("processor", [True, False])
@pytest.mark.parametrize("flag", [True, False, None])
def test_bos_flags_in_the_config_mean_what_they_do_in_transformers(
    tmp_path: Path, processor: bool, flag: bool | None
) -> None:
    """With a tokenizer.json, the post-processor alone decides."""
    folder = copy_of(tmp_path, "models/stories260K")
    edit(folder / "tokenizer.json", **({} if processor else {"post_processor": None}))
    edit(folder / "tokenizer_config.json", add_bos_token=flag, add_eos_token=flag, tokenizer_class="LlamaTokenizer")
    ids = Tokenizer.from_folder(folder).encode("Once upon a time")
    assert ids == AutoTokenizer.from_pretrained(folder).encode("Once upon a time")
    assert (ids[0] == 1) == processor


# -------------------------------------------------------------------------------------------- files


def copy_of(tmp_path: Path, name: str) -> Path:
    for path in (shared_data() / name).glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**value, **changes}), encoding="utf-8")


def made(tmp_path: Path, name: str = "llama") -> Path:
    trained(name).save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(made(tmp_path))
    assert tokenizer.bos_token_id is None and tokenizer.eos_token_id is None and tokenizer.chat_template is None
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(tokenizer.encode("Once upon")) == "Once upon"


def test_truncation_and_padding_are_switched_off(tmp_path: Path) -> None:
    backend = trained("llama")
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert 5 < len(Tokenizer.from_folder(tmp_path).encode("upon Once time a was")) < 50


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"", "damaged"),
        ("tokenizer.json", b"{}", "damaged"),
        ("tokenizer.json", b'{"model": {"type": "New"}}', "damaged"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "not an object"),
        ("tokenizer_config.json", b'{"bos_token": 3}', "bos_token is 3"),
        ("tokenizer_config.json", b'{"extra_special_tokens": "x"}', "must be a list"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": []}', "must be an object"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "y"}}}', "not valid"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"9999": {"content": "new"}}}',
            "declares 'new' as id 9999",
        ),
        ("special_tokens_map.json", b"nope", "not valid JSON"),
        ("chat_template.json", b"nope", "not valid JSON"),
        ("chat_template.jinja", b"{% if %}", "line 1"),
        ("chat_template.jinja", b"\xff", "not UTF-8"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    folder = made(tmp_path)
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        _ = Tokenizer.from_folder(folder).chat_templates  # templates are compiled at their first use
    assert "\n" not in str(caught.value)


def test_a_panic_of_the_library_is_an_error_too(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    }
    edit(made(tmp_path) / "tokenizer.json", post_processor={**template, "pair": [], "special_tokens": {}})
    with pytest.raises(TokenizerError, match="damaged or too new"):
        Tokenizer.from_folder(tmp_path)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="is not a folder"):
        Tokenizer.from_folder(tmp_path / "none")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json; download"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"has tokenizer\.model but no tokenizer\.json; convert it once"):
        Tokenizer.from_folder(tmp_path)


def test_tokens_declared_in_the_config_are_added(tmp_path: Path) -> None:
    folder = made(tmp_path)
    size = Tokenizer.from_folder(folder).vocab_size
    declared = {str(size): {"content": "<a>", "special": True}, str(size + 1): {"content": "<b>", "special": False}}
    edit(folder / "tokenizer_config.json", added_tokens_decoder=declared, eos_token={"content": "<a>"})
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("<a><b>") == [size, size + 1]
    assert tokenizer.eos_token_id == size and size in tokenizer.special_ids and size + 1 not in tokenizer.special_ids
    assert tokenizer.decode([size, size + 1]) == "<b>"
    assert tokenizer.vocab_size == size + 2


def test_special_tokens_map_is_read_when_the_config_is_of_old(tmp_path: Path) -> None:
    folder = made(tmp_path)
    size = Tokenizer.from_folder(folder).vocab_size
    edit(folder / "tokenizer_config.json", eos_token="<unk>")
    edit(folder / "special_tokens_map.json", eos_token={"content": "</s>"}, bos_token="<s>", pad_token="<pad>")
    edit(folder / "added_tokens.json", **{"<pad>": size})
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert size in tokenizer.special_ids
    edit(folder / "tokenizer_config.json", added_tokens_decoder={})
    assert Tokenizer.from_folder(folder).eos_token_id == 0


def test_named_tokens_that_the_vocabulary_lacks_are_left_out(tmp_path: Path) -> None:
    edit(made(tmp_path) / "tokenizer_config.json", bos_token="<none>", pad_token="[PAD]", eos_token="</s>")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {"eos_token": "</s>"} and tokenizer.bos_token_id is None


def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path) -> None:
    backend = trained("llama")
    for decoder in (decoders.CTC(), decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")])):
        backend.decoder = decoder
        backend.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(TokenizerError, match=r"decoder step .* is not supported"):
            Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("bad", ["a\ud800b", b"bytes", None])
def test_text_that_cannot_be_encoded(bad: Any) -> None:
    with pytest.raises(RequestError, match=r"valid Unicode|must be a string"):
        load("llama").encode(bad)
