"""Checkpoints as attacks: endless files, and tokenizers that make endless text from little input."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from oracle.data import shared_data
from ridgeline.archs import spec_from_config
from ridgeline.errors import CheckpointError, RidgelineError, TokenizerError
from ridgeline.load import growth, tokenizer_files
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.gguf.header import read_header
from ridgeline.load.growth import MAX_GROWTH, check_growth
from ridgeline.load.hub import BUILT_IN
from ridgeline.load.safetensors import INDEX, SINGLE, TensorFiles
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.spec import folders

pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def config(folder: Path) -> object:
    return open_checkpoint(folder)


def tokenizer(folder: Path) -> object:
    return Tokenizer.from_folder(folder).chat_templates


def weights(folder: Path) -> object:
    return TensorFiles(folder)


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": config,
    "generation_config.json": config,
    "tokenizer.json": tokenizer,
    "tokenizer_config.json": tokenizer,
    "special_tokens_map.json": tokenizer,
    "added_tokens.json": tokenizer,
    "chat_template.json": tokenizer,
    "chat_template.jinja": tokenizer,
    "additional_chat_templates/tool_use.jinja": tokenizer,
    INDEX: weights,
    SINGLE: weights,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint in which a test replaces a file."""
    for path in BUILT_IN["pocket"].iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "tokenizer_config.json":
            shutil.copy(path, tmp_path / path.name)
    return tmp_path


def put(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    return path


@pipes
@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["a pipe", "a link to a pipe", "a device", "a folder"])
def test_only_regular_files_are_read(folder: Path, name: str, kind: str) -> None:
    path = put(folder, name)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link to a pipe":
        os.mkfifo(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    elif kind == "a device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(RidgelineError) as e:
        READERS[name](folder)
    assert str(e.value) == f"{path} is {kind.removeprefix('a link to ')}; it must be a regular file"


@pipes
def test_a_pipe_as_a_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="is a pipe; it must be a regular file"):
        read_header(tmp_path / "x.gguf")


@pytest.mark.parametrize("name", [name for name in READERS if name != SINGLE])
def test_every_kind_of_file_has_a_size_limit(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is sparse: it needs no space on the disk and exceeds every limit."""
    with put(folder, name).open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(RidgelineError, match=rf"{name} has {1 << 30} bytes; the limit for such a file is \d+"):
        READERS[name](folder)


def test_links_to_regular_files_are_read(folder: Path) -> None:
    """The hub's cache consists of such links."""
    (folder / "config.json").rename(folder / "blob")
    (folder / "config.json").symlink_to("blob")
    assert open_checkpoint(folder).spec.vocab_size


def test_a_file_that_becomes_a_pipe_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("needs named pipes")
    path = tmp_path / "config.json"
    os.mkfifo(path)
    monkeypatch.setattr(folders, "check_regular", lambda _: None)
    with pytest.raises(CheckpointError, match="is a pipe"):
        folders.read_json(path)


def backend(**parts: Any) -> Backend:
    """Return a tokenizer with some parts, which loads at once."""
    made = Backend(models.BPE({"a": 0, "b": 1, "normalizer": 2}, []))
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def state(made: Backend) -> str:
    return str(made.to_str())


def charsmap(longest: int) -> str:
    trie = bytes(1024)
    table = len(trie).to_bytes(4, "little") + trie + b"x" * longest + b"\0"
    return base64.b64encode(table).decode()


def raw(normalizer: Any, spelled: str = "normalizer") -> str:
    text = state(backend())
    assert '"normalizer":null' in text.replace(": ", ":")
    return text.replace('"normalizer":null', f'"{spelled}":{json.dumps(normalizer)}')


DOUBLE = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BOMBS = {
    "doubled": raw({"type": "Sequence", "normalizers": [DOUBLE] * 40}),
    "nested": raw({"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [DOUBLE] * 8}] * 8}),
    "by pattern": raw({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y" * 9999}),
    "empty pattern": raw({"type": "Replace", "pattern": {"String": ""}, "content": "y" * 9999}),
    "prepended": raw({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "a" * 99}] * 3}),
    "table": raw({"type": "Precompiled", "precompiled_charsmap": charsmap(9999)}),
    "spelled with escapes": raw({"type": "Sequence", "normalizers": [DOUBLE] * 40}, "normali\\u007aer"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_normalizers_that_make_much_of_little(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(BOMBS[name], encoding="utf-8")
    with pytest.raises(
        TokenizerError, match=rf"tokenizer.json: the normalizer can expand .* the limit is {MAX_GROWTH}"
    ):
        Tokenizer.from_folder(tmp_path)


def test_added_tokens_that_make_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MAX_ADDED", 1 << 20)
    made = backend()
    made.add_tokens([AddedToken("a" * 9000, normalized=True)])
    text = state(made).replace('"normalizer":null', f'"normalizer":{json.dumps({**DOUBLE, "content": "a" * 4000})}')
    with pytest.raises(TokenizerError, match="expand the added tokens"):
        check_growth(text, "tokenizer.json")


def test_a_post_processor_that_adds_much() -> None:
    part = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "x", "type_id": 0}}] * 1000,
        "pair": [],
        "special_tokens": {"x": {"id": "x", "ids": [0] * 1000, "tokens": ["a"] * 1000}},
    }
    text = state(backend()).replace('"post_processor":null', f'"post_processor":{json.dumps(part)}')
    with pytest.raises(TokenizerError, match="puts 1000000 ids around a text; the limit is 65536"):
        check_growth(text, "tokenizer.json")


def test_a_decoder_that_makes_much() -> None:
    steps = [decoders.Replace("a", "aa") for _ in range(40)]
    with pytest.raises(TokenizerError, match=r"decoder of tokenizer.json can expand one character to 1.1e\+12"):
        Tokenizer(backend(decoder=decoders.Sequence(steps)))


@pytest.mark.parametrize(
    "part",
    [
        None,
        normalizers.NFKC(),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        normalizers.Sequence([
            normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]),
        normalizers.BertNormalizer(),
    ],
    ids=["none", "NFKC", "Llama", "ALBERT", "BERT"],
)  # fmt: skip
def test_published_normalizers_pass(part: Any) -> None:
    made = backend(normalizer=part)
    made.add_tokens([AddedToken(f"<extra {i}>", normalized=True) for i in range(100)])
    check_growth(state(made), "tokenizer.json")


def test_growth_is_never_underestimated() -> None:
    """Compare with the library, over characters that its normalizers treat in special ways."""
    parts = [
        normalizers.NFC(), normalizers.NFD(), normalizers.NFKC(), normalizers.NFKD(), normalizers.Lowercase(),
        normalizers.ByteLevel(), normalizers.BertNormalizer(), normalizers.Replace("a", "bcd"),
        normalizers.Replace(Regex("x*"), "yz"), normalizers.Prepend("▁▁"), normalizers.Replace("", "q"),
    ]  # fmt: skip
    characters = [chr(i) for i in range(0, sys.maxunicode + 1, 97) if not 0xD800 <= i <= 0xDFFF]
    characters += [c for i in range(0x110000) if len(unicodedata.normalize("NFKD", c := chr(i))) > 3]
    for part in parts:
        most = growth.growth(json.loads(part.__getstate__()))
        some = characters if not isinstance(part, normalizers.Replace) else [*"axyz"]
        assert all(len(part.normalize_str(c)) <= most for c in some)


def test_published_tokenizers_pass() -> None:
    for name in ("qwen2.5", "gpt2"):
        path = shared_data() / "tokenizers" / name / "tokenizer.json"
        check_growth(path.read_text(encoding="utf-8"), name)


def test_many_declared_tokens_are_added_at_once(tmp_path: Path) -> None:
    """The library rebuilds its table at each call, so adding tokens one by one takes quadratic time."""
    (tmp_path / "tokenizer.json").write_text(state(backend()), encoding="utf-8")
    declared = {str(3 + i): {"content": f"<{i}>", "normalized": False} for i in range(4000)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}), encoding="utf-8")
    files = tokenizer_files.read_folder(tmp_path)
    assert files.backend.token_to_id("<3999>") == 4002


def test_a_tensor_of_many_axes(tmp_path: Path) -> None:
    """The file is valid for its library, and numpy raised a ValueError when the weight was read."""
    entry = {"dtype": "F32", "shape": [1] * 100 + [4], "data_offsets": [0, 16]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(CheckpointError, match="has 101 axes; a weight has at most 8"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 10**4000}, {"hidden_act": "x" * 5000}, {"model_type": "y" * 5000},
        {"num_hidden_layers": -(10**4000)},
        {"rope_scaling": {"rope_type": "w" * 5000}}, {f"unknown_{i}": 1 for i in range(5000)},
        {"quantization_config": {"quant_method": "q" * 5000}}, {"layer_types": ["l" * 5000]},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_a_long_value_makes_no_long_error(fields: dict[str, Any]) -> None:
    """Some errors repeated the whole value, of up to the size of the file."""
    llama = {
        "model_type": "llama", "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    with pytest.raises(RidgelineError) as caught:
        spec_from_config(llama | fields)
    assert len(str(caught.value)) < 1000
