"""TensorFiles reads files of the safetensors library, bit for bit and without a copy, and refuses everything else."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from ridgeline.errors import CheckpointError
from ridgeline.load.safetensors import INDEX, SINGLE, TensorFiles

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "empty": (0,),
    "no rows": (0, 7),
    "no columns": (5, 0),
    "one": (1,),
    "odd.weight": (3, 5),
    "experts": (2, 3, 7),
    "vector": (257,),
    "ünïcode.重み.🦙": (4, 1),
    'quo"te\\back\nslash': (2,),
}
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HOST_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
TAGS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random bits, with NaN payloads, infinities, subnormals and negative zeros among them."""
    rng = np.random.default_rng(seed)
    integer = torch.int32 if dtype.itemsize == 4 else torch.int16
    numpy_type = np.int32 if dtype.itemsize == 4 else np.int16
    info = np.iinfo(numpy_type)
    bits = np.asarray(rng.integers(info.min, info.max, size=shape, dtype=numpy_type, endpoint=True))
    return torch.from_numpy(bits).to(integer).view(dtype)


def tensors() -> dict[str, torch.Tensor]:
    """Return every shape in every type."""
    return {
        f"{dtype}/{name}": random_bits(shape, TYPES[dtype], seed)
        for seed, (name, shape) in enumerate(SHAPES.items())
        for dtype in TYPES
    }


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16).numpy().tobytes()


def same_bits(host: np.ndarray, tensor: torch.Tensor) -> bool:
    return host.shape == tuple(tensor.shape) and host.tobytes() == bits(tensor)


def header_of(data: bytes) -> dict[str, Any]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length])


def assemble(header: Mapping[str, Any] | bytes, body: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file with a header that the library would not write."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def refusal(folder: Path) -> str:
    """Return the message with which a folder is refused, which must be one line."""
    with pytest.raises(CheckpointError) as caught:
        TensorFiles(folder)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def write_index(folder: Path, weight_map: Mapping[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": dict(weight_map)}))


def test_every_bit_of_every_type_and_shape(tmp_path: Path) -> None:
    written = tensors()
    save_file(written, tmp_path / SINGLE, metadata={"format": "pt"})
    files = TensorFiles(tmp_path)
    assert set(files) == set(written)  # without __metadata__
    assert files.files == [tmp_path / SINGLE]
    for name, tensor in written.items():
        dtype = name.split("/")[0]
        host = files.read(name)
        assert host.dtype == dtype
        assert host.data.dtype == HOST_TYPES[dtype]
        assert same_bits(host.data, tensor), name
        assert name in files
        assert files.info(name).dtype == TAGS[dtype]
        assert files.info(name).shape == tuple(tensor.shape)
    assert "float32/nothing" not in files
    assert files.num_bytes() == sum(t.numel() * t.element_size() for t in written.values())


def test_a_tensor_is_a_view_of_the_mapped_file(tmp_path: Path) -> None:
    save_file(
        {"a": random_bits((64, 3), torch.bfloat16, 0), "b": random_bits((5,), torch.float32, 1)}, tmp_path / SINGLE
    )
    files = TensorFiles(tmp_path)
    first, again, other = (files.read(name).data for name in ("a", "a", "b"))
    assert np.shares_memory(first, again)
    assert not np.shares_memory(first, other)
    base: Any = first
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap)
    assert Path(base.filename) == tmp_path / SINGLE


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"a": torch.ones(8)}, tmp_path / SINGLE)
    before = (tmp_path / SINGLE).read_bytes()
    files = TensorFiles(tmp_path)
    view = files.read("a").data
    torch.from_numpy(view).fill_(5.0)  # for read-only memory this would warn, which is an error here
    assert (view == 5.0).all()
    del view, files
    assert (tmp_path / SINGLE).read_bytes() == before


def test_data_that_is_not_aligned(tmp_path: Path) -> None:
    """The library pads the header to a multiple of 8 bytes; other writers may not."""
    value = random_bits((3, 5), torch.float32, 7)
    data = save({"a": value})
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip(b" ")
    for spaces in range(4):
        (tmp_path / SINGLE).write_bytes(assemble(text + b" " * spaces, data[8 + length :]))
        found = TensorFiles(tmp_path).read("a").data
        assert same_bits(found, value)
        assert found.flags.aligned  # kernels may need it


def test_shards_of_an_index(tmp_path: Path) -> None:
    written = tensors()
    shards = [dict(list(written.items())[i::3]) for i in range(3)]
    names = [f"model-0000{i + 1}-of-00003.safetensors" for i in range(3)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, tmp_path / name)
    write_index(tmp_path, {key: name for name, shard in zip(names, shards, strict=True) for key in shard})
    save_file({"stray": torch.ones(1)}, tmp_path / SINGLE)  # the index has priority
    files = TensorFiles(tmp_path)
    assert [f.name for f in files.files] == names
    assert set(files) == set(written)
    assert all(same_bits(files.read(key).data, value) for key, value in written.items())
    assert files.num_bytes() == sum(t.numel() * t.element_size() for t in written.values())


_SMALL = {
    "a": random_bits((3, 2), torch.float32, 1),
    "b": random_bits((5,), torch.bfloat16, 2),
    "c": random_bits((), torch.float16, 3),
}
_FILE = save(_SMALL, metadata={"format": "pt"})
_WHOLE = {name: bits(value) for name, value in _SMALL.items()}


def outcome(folder: Path, data: bytes) -> dict[str, bytes] | None:
    """Return the tensors of a file, or None if it is refused."""
    (folder / SINGLE).write_bytes(data)
    try:
        files = TensorFiles(folder)
        return {name: files.read(name).data.tobytes() for name in files}
    except CheckpointError as e:
        assert "\n" not in str(e)
        return None


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    assert outcome(tmp_path, _FILE) == _WHOLE
    for size in range(len(_FILE)):
        assert outcome(tmp_path, _FILE[:size]) is None, size
    assert SINGLE in refusal(tmp_path)


def test_a_file_with_a_tail_is_refused(tmp_path: Path) -> None:
    for tail in (b"\0", b" " * 8, _FILE):
        assert outcome(tmp_path, _FILE + tail) is None


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(at=st.integers(0, len(_FILE) - 1), value=st.integers(0, 255), cut=st.booleans())
def test_a_damaged_header_never_reads_past_the_file(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: bool
) -> None:
    """With one byte changed, the file is refused, or every tensor that it still describes lies inside the file."""
    folder = tmp_path_factory.mktemp("damaged")
    data = bytearray(_FILE)
    data[at] = value
    if cut:
        del data[at + 1 :]
    found = outcome(folder, bytes(data))
    start = 8 + int.from_bytes(_FILE[:8], "little")
    if len(data) < len(_FILE):
        assert found is None
    elif at >= start:  # data is not checked: only that byte may differ
        assert found is not None
        assert b"".join(found[name] for name in _in_file_order()) == bytes(data[start:])
    elif found is not None:
        assert sum(map(len, found.values())) == len(_FILE) - start
    shutil.rmtree(folder)


def _in_file_order() -> list[str]:
    entries = {name: fields for name, fields in header_of(_FILE).items() if name != "__metadata__"}
    return sorted(entries, key=lambda name: entries[name]["data_offsets"])


def entry(dtype: str = "F32", shape: tuple[int, ...] = (2,), offsets: tuple[int, int] = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"\1" * 7,
    "a length beyond the file": assemble({"a": entry()}, b"\0" * 8, length=1 << 20),
    "the largest length": assemble({"a": entry()}, b"\0" * 8, length=2**64 - 1),
    "no JSON": assemble(b"{this is no JSON", b"\0" * 8),
    "no UTF-8": assemble(b'{"\xff": 1}', b"\0" * 8),
    "a list": assemble(b"[]"),
    "a number for a tensor": assemble({"a": 3}),
    "overlapping": assemble({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12),
    "a hole": assemble({"a": entry(), "b": entry(offsets=(12, 20))}, b"\0" * 20),
    "beyond the end": assemble({"a": entry(shape=(4,), offsets=(0, 16))}, b"\0" * 8),
    "backwards": assemble({"a": entry(offsets=(8, 0))}, b"\0" * 8),
    "negative": assemble({"a": entry(offsets=(-8, 0))}, b"\0" * 8),
    "another size than the shape's": assemble({"a": entry(shape=(3,))}, b"\0" * 8),
    "a shape whose size overflows": assemble({"a": entry(shape=(2**62, 4), offsets=(0, 0))}),
    "a pickle under this name": b"PK\3\4" + b"\0" * 60,
    "the page of a large-file store": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
    "a deep tensor": assemble(b'{"a":' + b"[" * 10_000 + b"]" * 10_000 + b"}"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(MALFORMED[name])
    assert SINGLE in refusal(tmp_path)


def test_the_malformed_ones_would_be_read_were_they_not_malformed(tmp_path: Path) -> None:
    """`assemble` and `entry` make valid files, so the test above refuses them only for their flaw."""
    header = {"a": entry(), "b": entry(offsets=(8, 16))}
    (tmp_path / SINGLE).write_bytes(assemble(header, np.arange(4, dtype=np.float32).tobytes()))
    files = TensorFiles(tmp_path)
    assert files.read("b").data.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("dtype", "tag"),
    [(torch.int8, "I8"), (torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL")],
)
def test_other_element_types_are_refused_when_read(dtype: torch.dtype, tag: str, tmp_path: Path) -> None:
    """Earlier would be too strict: a tensor that nobody reads (a mask, a position table) may have any type."""
    save_file({"fine": torch.ones(3), "odd.one": torch.zeros(4).to(dtype)}, tmp_path / SINGLE)
    files = TensorFiles(tmp_path)
    assert files.info("odd.one").dtype == tag
    assert files.read("fine").data.tolist() == [1.0] * 3
    with pytest.raises(CheckpointError) as caught:
        files.read("odd.one")
    message = str(caught.value)
    assert all(part in message for part in ("odd.one", SINGLE, tag, "F32, F16, BF16"))
    assert "\n" not in message


def two_shards(folder: Path) -> None:
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    save_file({"b": torch.ones(3)}, folder / "two.safetensors")
    write_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    message = refusal(tmp_path)
    assert "two.safetensors" in message
    assert "one.safetensors" not in message


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    path = tmp_path / "two.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    message = refusal(tmp_path)
    assert "two.safetensors" in message
    assert "one.safetensors" not in message


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"a": torch.zeros(2), "b": torch.ones(3)}, tmp_path / "two.safetensors")
    message = refusal(tmp_path)
    assert all(part in message for part in ("a is in both", "one.safetensors", "two.safetensors"))


@pytest.mark.parametrize("outside", ["../secret.safetensors", "sub/one.safetensors", "", ".", ".."])
def test_an_index_stays_inside_its_folder(outside: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for target in (tmp_path / "secret.safetensors", folder / "sub" / "one.safetensors"):
        save_file({"a": torch.ones(2)}, target)
    save_file({"b": torch.ones(2)}, folder / "one.safetensors")
    write_index(folder, {"a": outside, "b": "one.safetensors"})
    message = refusal(folder)
    assert "/" not in outside or "outside" in message


def test_an_index_with_an_absolute_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "secret.safetensors")
    write_index(tmp_path / "model", {"a": str(tmp_path / "secret.safetensors")})
    assert "outside" in refusal(tmp_path / "model")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": ["a"]}', "null", '{"weight_map": null}', "[" * 100_000],
    ids=lambda text: text[:20] or "empty",
)
def test_an_unreadable_index_is_refused(text: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(text)
    assert INDEX in refusal(tmp_path)


def test_an_index_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(b'{"weight_map": {"\xff": "a"}}')
    assert INDEX in refusal(tmp_path)


def test_an_index_names_a_pickle(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    write_index(tmp_path, {"a": "pytorch_model.bin"})
    assert "pytorch_model.bin" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "pytorch_model-00001-of-2.bin"]
)
def test_pickles_are_refused_as_such(name: str, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / name)
    message = refusal(tmp_path)
    assert "pickle" in message
    assert "safetensors" in message  # the remedy


def test_pickles_beside_safetensors_are_ignored(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / SINGLE)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    assert list(TensorFiles(tmp_path)) == ["a"]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: (path / "notes.txt").write_text("x")])
def test_a_folder_without_weights(make: Callable[[Path], object], tmp_path: Path) -> None:
    make(tmp_path)
    message = refusal(tmp_path)
    assert SINGLE in message
    assert "pickle" not in message
    assert "dummy" in message  # the remedy


def test_a_folder_instead_of_a_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).mkdir()
    assert SINGLE in refusal(tmp_path)


def test_the_header_equals_that_of_the_library(tmp_path: Path) -> None:
    """Compare `info` with the header as it is in the file."""
    save_file(_SMALL, tmp_path / SINGLE)
    data = (tmp_path / SINGLE).read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    files = TensorFiles(tmp_path)
    for name, fields in header_of(data).items():
        info = files.info(name)
        assert [info.start - start, info.stop - start] == fields["data_offsets"]
        assert info.file == tmp_path / SINGLE
