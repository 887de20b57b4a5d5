"""Find the public data beside the repository; tests skip without it."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_SEPARATOR = "\n__ggml_vocab_test__\n"
_LOST = "\ufffd".encode()

# The copies of the GGUF vocabularies went through a UTF-8 decoder, which replaced each byte that is not UTF-8 by
# U+FFFD. All such bytes are in known numbers (an epsilon, a count, an id), listed here in order of appearance; if the
# token itself is U+FFFD it stays. The scores of llama-spm follow a rule: the rank, but -1e9 for pieces of spaces only.
# The digests are those of the files as llama.cpp publishes them.
_KEPT = _LOST
_SPACES = [259, 268, 308, 418, 462, 539, 632, 795, 965, 1669, 1678, 3986, 4706, 9651, 18884, 29871]
_ORIGINAL = {
    "gpt-2": [b"\xac", b"\xc5", b"\xc4", b"\x80", b"\xc4", b"\xc3", b"\x81", b"\xc4", b"\xc4"],
    "deepseek-coder": [b"\xc3", b"\xbd", b"\x86", b"\x80", b"\x80", b"\x80", b"\x81"],
    "llama-spm": [b"\xac", b"\xc5", b"\x80", _KEPT, _KEPT, _KEPT],
}
_DIGESTS = {
    "gpt-2": "cedc56ca6e2e89f63e781696d1fd76b4b1d49e6720dee86463e915f6e90016ac",
    "deepseek-coder": "91cb1379f2e33af1c4866b194622b7a0e12e8f0c9dba7ba2f10d55978730bec1",
    "llama-spm": "16c3724582d59aa8bf84711894e833f916ee46a31d80e21312759c48bf8d0e69",
}


def shared_data() -> Path:
    """Return the folder of public data beside the repository, or skip the test if there is none."""
    folder = _ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the public data folder (../shared/data, beside the repository) is absent")
    return folder


def vocab_cases(name: str) -> list[tuple[str, list[int]]]:
    """Return llama.cpp's tokenizer cases for the vocabulary `name`: texts with their ids."""
    folder = shared_data() / "tokenizers" / "gguf-vocab"
    whole = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode("utf-8").removesuffix(_SEPARATOR)
    texts = whole.split(_SEPARATOR)
    lines = (folder / f"ggml-vocab-{name}.gguf.out").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    assert len(texts) == len(lines)
    return [(text, [int(number) for number in line.split()]) for text, line in zip(texts, lines, strict=True)]


def gguf_vocab(name: str) -> bytes:
    """Return the vocabulary-only GGUF file `name` as published, restored if the copy here is damaged."""
    data = (shared_data() / "tokenizers" / "gguf-vocab" / f"ggml-vocab-{name}.gguf").read_bytes()
    if hashlib.sha256(data).hexdigest() != _DIGESTS[name]:
        data = _restored(name, data)
    if hashlib.sha256(data).hexdigest() != _DIGESTS[name]:
        pytest.skip(f"ggml-vocab-{name}.gguf is neither the published file nor the known damaged copy of it")
    return data


def _restored(name: str, data: bytes) -> bytes:
    scores = b""
    if name == "llama-spm":
        start = data.index(b"tokenizer.ggml.scores") + len(b"tokenizer.ggml.scores") + 4 + 4 + 8
        end = data.index(struct.pack("<Q", len("tokenizer.ggml.token_type")) + b"tokenizer.ggml.token_type")
        values = [0.0] * 259 + [-1e9 if index in _SPACES else 259.0 - index for index in range(259, 32000)]
        scores = struct.pack(f"<{len(values)}f", *values)
        head, tail = data[:start].split(_LOST), data[end:]
    else:
        head, tail = data.split(_LOST), b""
    if len(head) != len(_ORIGINAL[name]) + 1:
        return data
    pieces = [head[0]]
    for original, piece in zip(_ORIGINAL[name], head[1:], strict=True):
        pieces += [original, piece]
    return b"".join(pieces) + scores + tail
