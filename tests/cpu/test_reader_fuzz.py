"""Hostile quantized checkpoints: each is one clear line, or the numbers that were packed; and never much memory."""

from __future__ import annotations

import json
import re
import signal
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpu.test_torchao import KINDS as TORCHAO
from cpu.test_torchao import write as write_torchao
from oracle.packed import packed_folder
from oracle.packers import RECIPES
from ridgeline.errors import RidgelineError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.packed import open_tensors
from ridgeline.load.weights import StoredWeights
from ridgeline.ops.host.memory import NumpyMemory
from shares import daily

SMALL = {"num_hidden_layers": 1, "intermediate_size": 96}
MOST_BYTES = 24 << 20  # the models have 0.2 MB
MOST_SECONDS = 20
SOME, MANY = 50, 600  # attacks on a format that run each day, and each night


@dataclass
class Model:
    """A model's folder with the bytes of its weights and config, and its numbers."""

    folder: Path
    weights: bytes
    config: bytes
    right: dict[str, np.ndarray[Any, Any]]

    @property
    def header(self) -> dict[str, Any]:
        return dict(json.loads(self.weights[8 : self.first]))

    @property
    def first(self) -> int:
        """Where the first tensor begins."""
        return 8 + int.from_bytes(self.weights[:8], "little")

    def put(self, header: Any = None, weights: bytes | None = None, config: bytes | None = None) -> None:
        """Write the folder with some of it replaced."""
        if header is not None:
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            weights = struct.pack("<Q", len(text)) + text + self.weights[self.first :]
        (self.folder / "model.safetensors").write_bytes(self.weights if weights is None else weights)
        (self.folder / "config.json").write_bytes(self.config if config is None else config)


def numbers(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return every weight of a model in float32."""
    checkpoint = open_checkpoint(path)
    weights = StoredWeights(
        checkpoint.spec, checkpoint.family.names, open_tensors(checkpoint), NumpyMemory(), "float32", lambda done: None,
        keeps=lambda format: False,
    )  # fmt: skip
    assert weights.kv_scales == {}
    return {name: np.array(value) for name, value in weights.items()}  # no views: the file is written again


@contextmanager
def bounded() -> Iterator[None]:
    """Raise an error for what takes too long or too much memory."""

    def stop(*args: Any) -> None:
        raise AssertionError(f"the file was read for more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MOST_SECONDS)
    tracemalloc.start()
    try:
        yield
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert peak < MOST_BYTES, f"reading the file took {peak >> 20} MiB"


def is_refused(model: Model) -> bool:
    """Return whether the folder is refused in one line. Raises AssertionError if it is read with other numbers."""
    with bounded():
        try:
            found = numbers(model.folder)
        except RidgelineError as e:
            assert "\n" not in str(e) and len(str(e)) < 2000, e
            return True
    assert list(found) == list(model.right)
    for name, right in model.right.items():
        np.testing.assert_array_equal(found[name], right, name)
    return False


FORMATS = [*RECIPES, *(f"torchao-{kind}" for kind in TORCHAO)]
# One format of each reader.
DAILY = {"awq", "gptq-order", "packed-4-asym", "int8", "nvfp4", "bnb-int8", "nf4-nested", "fp8-static", "fp8-blocks",
         "modelopt-nvfp4", "torchao-int4"}  # fmt: skip
_made: dict[str, Model] = {}


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a tiny llama in a format, which is written once."""
    name = request.param
    if name not in _made:
        folder = tmp_path_factory.mktemp(name)
        if name.startswith("torchao-"):
            write_torchao(name.removeprefix("torchao-"), "llama", folder / "packed", SMALL)
        else:
            packed_folder(name, folder, "llama", SMALL)
        found = folder / "packed"
        files = [(found / part).read_bytes() for part in ("model.safetensors", "config.json")]
        _made[name] = Model(found, *files, numbers(found))
    made = _made[name]
    made.put()
    return made


def flipped(data: bytes, rng: np.random.Generator, start: int, stop: int) -> bytes:
    out = bytearray(data)
    for _ in range(int(rng.integers(1, 3))):
        out[int(rng.integers(start, stop))] ^= 1 << int(rng.integers(8))
    return bytes(out)


def headers(model: Model) -> Iterator[dict[str, Any]]:
    """Yield headers that lie about one tensor."""
    entries = {name: entry for name, entry in model.header.items() if name != "__metadata__"}
    for name, entry in entries.items():
        others = {key: value for key, value in model.header.items() if key != name}
        for dtype in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I8", "U8", "BOOL", "X", 3):
            if {dtype, entry["dtype"]} != {"F16", "BF16"}:  # both may be scales, and no reader can see which
                yield {**others, name: {**entry, "dtype": dtype}}
        shape = entry["shape"]
        for other in (
            shape[::-1], [*shape, 1], shape[1:], [], [0, *shape], [1 << 40, *shape[1:]], [1 << 62, 4], [-1], ["x"],
            None, [2.5], [1] * 9 + shape, [int(np.prod(shape)) or 1],
        ):  # fmt: skip
            if other != shape:
                yield {**others, name: {**entry, "shape": other}}
        start, stop = entry["data_offsets"]
        for other in (
            [start, stop + 1],
            [start + 1, stop],
            [0, 1 << 60],
            [stop, start],
            [-1, stop],
            [start],
            "x",
            None,
        ):
            yield {**others, name: {**entry, "data_offsets": other}}
        yield others
        yield {**others, name + "x": entry}
        yield {**model.header, name + "x": entry}


def configs(config: Any) -> Iterator[Any]:
    """Yield copies of a config with one value replaced or removed, at any depth."""
    if isinstance(config, dict):
        for key, value in config.items():
            yield {k: v for k, v in config.items() if k != key}
            yield {**{k: v for k, v in config.items() if k != key}, key + "x": value}
            for other in configs(value):
                yield {**config, key: other}
    elif isinstance(config, list):
        for i, value in enumerate(config):
            for other in configs(value):
                yield [*config[:i], other, *config[i + 1 :]]
    for other in (None, True, -1, 0, 1, 5, 1 << 31, 1 << 70, 2.5, "x", [], {}, [3], {"x": 1}, float("inf")):
        yield other


# Fields without which, or with whose other values, a file means other numbers: no reader can see it.
MEANINGS = {"checkpoint_format"}


def attacks(model: Model) -> Iterator[Callable[[], None]]:
    """Yield functions that damage a folder: lies about tensors, wrong configs, bits, lengths and names."""
    for header in headers(model):
        yield lambda header=header: model.put(header)  # type: ignore[misc]
    config = json.loads(model.config)
    own = {k: v for k, v in config["quantization_config"].items() if k not in MEANINGS}
    kept = {k: v for k, v in config["quantization_config"].items() if k in MEANINGS}
    for other in configs(own):
        if isinstance(other, dict) and other:
            other = {**other, **kept}
        if other is not None:  # a checkpoint of codes without any description is tested below
            text = json.dumps({**config, "quantization_config": other}).encode()
            yield lambda text=text: model.put(config=text)  # type: ignore[misc]
    rng = np.random.default_rng(7)
    for _ in range(600):
        data = flipped(model.weights, rng, 0, model.first)
        yield lambda data=data: model.put(weights=data)  # type: ignore[misc]
    for _ in range(60):
        cut = int(rng.integers(len(model.weights)))
        yield lambda cut=cut: model.put(weights=model.weights[:cut])  # type: ignore[misc]
    text, name = model.weights[8 : model.first], sorted(model.right)
    for key in [k for k in model.header if k != "__metadata__"][: len(name)]:  # the header names a tensor twice
        again = json.dumps({key: model.header[key]})[1:-1].encode()
        yield lambda again=again: model.put(text.rstrip()[:-1] + b"," + again + b"}")  # type: ignore[misc]


def attacked(model: Model, count: int) -> int:
    """Run some attacks and return how many of them were refused."""
    every, refused = list(attacks(model)), 0
    for i in np.random.default_rng(1).choice(len(every), min(count, len(every)), replace=False):
        model.put()
        every[i]()
        refused += is_refused(model)
    return refused


@pytest.mark.parametrize("model", daily(FORMATS, DAILY, slow=False), indirect=True)
def test_some_attacks(model: Model, request: pytest.FixtureRequest) -> None:
    count = MANY if request.node.get_closest_marker("nightly") else SOME
    assert attacked(model, count) > count // 2


@pytest.mark.nightly
@pytest.mark.parametrize("model", sorted(DAILY), indirect=True)
def test_many_attacks(model: Model) -> None:
    assert attacked(model, MANY) > MANY // 2


@pytest.mark.parametrize("model", sorted({*DAILY, "nf4", "fbgemm"}), indirect=True)
@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_scales_that_are_none(model: Model, value: float) -> None:
    """One number of a scale is replaced, also of those of inputs that are not applied."""
    is_scale = re.compile(r"(scale|scales|SCB|absmax|scale_inv|scale_2|global_scale|scale_ub)$")
    seen = 0
    for name, entry in model.header.items():
        if name != "__metadata__" and is_scale.search(name) and entry["dtype"] in ("F32", "F16"):
            at = model.first + entry["data_offsets"][0]
            data = np.array([value], np.float32 if entry["dtype"] == "F32" else np.float16).tobytes()
            model.put(weights=model.weights[:at] + data + model.weights[at + len(data) :])
            seen += 1
            assert is_refused(model), name
    assert seen
