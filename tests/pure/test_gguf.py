"""The GGUF header reader: every value type, both versions, and every kind of damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.data import gguf_vocab
from ridgeline.errors import CheckpointError
from ridgeline.load.gguf.header import read_header

SCALARS = [
    (0, "B", 255),
    (1, "b", -128),
    (2, "H", 65535),
    (3, "h", -32768),
    (4, "I", 2**32 - 1),
    (5, "i", -(2**31)),
    (6, "f", 0.5),
    (7, "?", True),
    (10, "Q", 2**64 - 1),
    (11, "q", -(2**63)),
    (12, "d", 0.1),
]


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, *items: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def gguf(*pairs: bytes, version: int = 3, tensors: int = 0, count: int | None = None, magic: bytes = b"GGUF") -> bytes:
    count = len(pairs) if count is None else count
    return magic + struct.pack("<IQQ", version, tensors, count) + b"".join(pairs)


def full() -> bytes:
    scalars = [pair(f"s.{kind}", kind, struct.pack("<" + code, value)) for kind, code, value in SCALARS]
    arrays = [pair(f"a.{kind}", 9, array(kind, *[struct.pack("<" + code, value)] * 3)) for kind, code, value in SCALARS]
    nested = pair("nested", 9, array(9, array(4, struct.pack("<I", 1)), array(8, string("x"))))
    texts = pair("texts", 9, array(8, string("a"), string(""), string("é🦙")))
    return gguf(*scalars, *arrays, nested, texts, pair("text", 8, string("🦙")))


def read(tmp_path: Path, data: bytes) -> Any:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_header(path)


@pytest.mark.parametrize("version", [2, 3])
def test_all_types(tmp_path: Path, version: int) -> None:
    header = read(tmp_path, full().replace(b"GGUF\x03", b"GGUF" + bytes([version]), 1))
    assert header.version == version and header.tensor_count == 0
    assert header.tensor_info_offset == len(full())
    for kind, _, value in SCALARS:
        single, several = header.metadata[f"s.{kind}"], header.metadata[f"a.{kind}"]
        assert single == value and type(single) is type(value)
        assert several == [value] * 3 and type(several[0]) is type(value)
    assert header.metadata["nested"] == [[1], ["x"]]
    assert header.metadata["texts"] == ["a", "", "é🦙"]
    assert header.metadata["text"] == "🦙"


def test_tensors_are_counted_and_located(tmp_path: Path) -> None:
    head = gguf(pair("k", 4, bytes(4)), tensors=1)
    header = read(tmp_path, head + bytes(64))
    assert header.tensor_count == 1 and header.tensor_info_offset == len(head)


HUGE = struct.pack("<Q", 2**62)
BAD = {
    "empty": (b"", "is empty"),
    "magic": (gguf(magic=b"GGML"), "not a GGUF file"),
    "short magic": (b"GG", "not a GGUF file"),
    "version 1": (gguf(version=1), "version 1"),
    "version 4": (gguf(version=4), "version 4"),
    "big-endian": (gguf(version=3 << 24), "big-endian"),
    "pairs": (gguf(count=2**60), "key-value pairs"),
    "tensors": (gguf(tensors=2**60), "tensors"),
    "string length": (gguf(pair("k", 8, HUGE)), "truncated"),
    "key length": (gguf(HUGE + bytes(32)), "truncated"),
    "array length": (gguf(pair("k", 9, struct.pack("<I", 4) + HUGE)), "elements of 'k'"),
    "strings in array": (gguf(pair("k", 9, struct.pack("<I", 8) + HUGE)), "elements of 'k'"),
    "type": (gguf(pair("k", 13, bytes(8))), "unknown type 13"),
    "type in array": (gguf(pair("k", 9, array(99, bytes(64)))), "unknown type 99"),
    "bool": (gguf(pair("k", 7, b"\x02")), "boolean"),
    "bool in array": (gguf(pair("k", 9, array(7, b"\x01", b"\x07"))), "boolean"),
    "utf-8": (gguf(pair("k", 8, string(b"\xff"))), "invalid UTF-8"),
    "utf-8 key": (gguf(pair(b"\xff", 4, bytes(4))), "invalid UTF-8"),
    "empty key": (gguf(pair("", 4, bytes(4))), "key of 0 bytes"),
    "long key": (gguf(pair("k" * 65536, 4, bytes(4))), "key of 65536 bytes"),
    "twice": (gguf(*[pair("k", 4, bytes(4))] * 2), "twice"),
    "deep": (gguf(pair("k", 9, array(9, array(9, array(9, array(9, array(4, bytes(4)))))))), "deep"),
}


@pytest.mark.parametrize("name", BAD)
def test_damage_is_one_line(tmp_path: Path, name: str) -> None:
    data, text = BAD[name]
    with pytest.raises(CheckpointError, match=text) as caught:
        read(tmp_path, data)
    assert "\n" not in str(caught.value) and "model.gguf" in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path, text in ((tmp_path / "none.gguf", "cannot be read"), (tmp_path, "is a folder")):
        with pytest.raises(CheckpointError, match=text):
            read_header(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    data = full()
    for size in range(len(data)):
        with pytest.raises(CheckpointError):
            read(tmp_path, data[:size])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(full()) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_garbage_never_escapes(tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]]) -> None:
    data = bytearray(full())
    for at, byte in edits:
        data[at] = byte
    try:
        read(tmp_path_factory.getbasetemp(), bytes(data))
    except CheckpointError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("name", ["gpt-2", "deepseek-coder", "llama-spm"])
def test_real_vocabularies(tmp_path: Path, name: str) -> None:
    data = gguf_vocab(name)
    header = read(tmp_path, data)
    assert header.metadata["general.name"] == name
    assert header.tensor_info_offset == len(data)
    tokens = header.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == {"gpt-2": 50257, "deepseek-coder": 32256, "llama-spm": 32000}[name]


@pytest.mark.parametrize("name", ["gpt-2", "deepseek-coder", "llama-spm"])
def test_a_file_that_went_through_a_text_decoder_is_refused(tmp_path: Path, name: str) -> None:
    """This is a common accident with a binary file, and one that leaves most of it readable."""
    damaged = gguf_vocab(name).decode("utf-8", "replace").encode()
    with pytest.raises(CheckpointError):
        read(tmp_path, damaged)
