"""`ridgeline quantize` and the disk: folders that cannot be written, full disks, damaged parts, two runs at once."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle.build import make_model, redraw
from oracle.families import CASES
from ridgeline.compress import Options, parse_scheme, quantize
from ridgeline.compress.data import Samples
from ridgeline.compress.partial import Partial
from ridgeline.compress.quantize import _settings, _source
from ridgeline.errors import RequestError
from ridgeline.runtime.load import LoadOptions, pass_model

FEW = Options(sequences=6, length=32, speed=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model of two layers without a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    made = make_model(CASES["llama_gqa"], num_hidden_layers=2)
    redraw(made, 3)
    made.save_pretrained(folder)
    return folder


def left(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("file/out", "out: Not a directory; name another folder with --out"),
        ("a" * 250, "File name too long; name another folder"),
        ("a" * 300, "File name too long; name another folder"),
        ("nowhere", "nowhere exists; name another folder"),
    ],
)
def test_an_output_folder_that_cannot_be_written(out: str, message: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    before = left(tmp_path)
    with pytest.raises(RequestError) as caught:
        quantize(str(model), "rtn-int4", out=tmp_path / out, options=FEW)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert left(tmp_path) == before


@pytest.fixture(params=["part", "checkpoint"])
def full_disk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let the second part, or the file of the weights, fail as on a full disk."""
    real, calls = np.savez, []

    def fail(*args: Any) -> None:
        calls.append(1)
        if request.param == "checkpoint" or len(calls) == 2:
            path = args[0] if isinstance(args[0], Path) else Path(args[0].name)
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    def save(file: Any, **arrays: Any) -> None:
        fail(file) if request.param == "part" and len(calls) == 1 else (calls.append(1), real(file, **arrays))

    monkeypatch.setattr(np, "savez", save)
    if request.param == "checkpoint":
        monkeypatch.setattr("ridgeline.load.packed.write.write_safetensors", lambda path, tensors: fail(path))
    yield request.param


def test_a_full_disk_keeps_only_finished_parts(model: Path, tmp_path: Path, full_disk: str) -> None:
    with pytest.raises(RequestError, match=r"out: No space left on device; free some space and repeat the command"):
        quantize(str(model), "rtn-int4", out=tmp_path / "out", options=FEW)
    parts = ["layers.0.mixer", "layers.0.mlp", "layers.1.mixer", "layers.1.mlp"]
    names = [f"{name}.npz" for name in (parts if full_disk == "checkpoint" else parts[:1])]
    assert sorted(p.name for p in (tmp_path / ".out.partial").iterdir()) == [*names, "lock", "settings.json"]


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_failure_leaves_no_empty_folders(
    is_continued: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders that a run created above its output go with it, also those of an interrupted run that is continued."""
    (tmp_path / "a").mkdir()
    out, errors = tmp_path / "a" / "b" / "c" / "out", [RequestError("broken")]
    if is_continued:
        errors.insert(0, KeyboardInterrupt())  # type: ignore[arg-type]

    def fail(*args: Any) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(import_module("ridgeline.compress.quantize"), "_report", fail)
    if is_continued:
        with pytest.raises(KeyboardInterrupt):
            quantize(str(model), "rtn-int4", out=out, options=FEW)
        assert "a/b/c/.out.partial/parents" in left(tmp_path)
    with pytest.raises(RequestError, match="broken"):
        quantize(str(model), "rtn-int4", out=out, options=FEW)
    assert left(tmp_path) == ["a"]


def test_a_group_that_no_matrix_fills(model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=r"group \(--group\) is 100000, but no matrix has more than 96 columns; take 0"
    ):
        quantize(str(model), "rtn-int4", out=tmp_path / "x" / "out", group=100_000, options=FEW)
    assert left(tmp_path) == []


def test_the_report_names_few_texts() -> None:
    samples = Samples([[1, 2]], [])
    assert _source(samples, ["a", "b", "c"], 0) == "1 sequences of a, b, c"
    many = _source(samples, [f"{i}.txt" for i in range(100)], 0)
    assert many == "1 sequences of 100 texts: 0.txt, 1.txt, 2.txt and 97 more"


def test_two_runs_do_not_share_a_folder(model: Path, tmp_path: Path) -> None:
    with closing(Partial(tmp_path / "out", {"scheme": "another"})) as first:
        (first.folder / "layers.0.mixer.npz").write_bytes(b"a part")
        before = left(tmp_path)
        with pytest.raises(RequestError, match=r"another run is writing to .*out now; wait for it, or name another"):
            quantize(str(model), "rtn-int4", out=tmp_path / "out", options=FEW)
        assert left(tmp_path) == before
    quantize(str(model), "rtn-int4", out=tmp_path / "out", options=FEW)
    assert "out/config.json" in left(tmp_path) and not (tmp_path / ".out.partial").exists()


def test_a_damaged_part_is_named(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(import_module("ridgeline.compress.quantize"), "_report", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize(str(model), "rtn-int4", out=tmp_path / "out", options=FEW)
    part = tmp_path / ".out.partial" / "layers.1.mlp.npz"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(RequestError, match=r"layers.1.mlp.npz.* is damaged .*; repeat the command to start again"):
        quantize(str(model), "rtn-int4", out=tmp_path / "out", options=FEW)
    assert left(tmp_path) == []


def test_other_tokens_do_not_continue_a_run(model: Path) -> None:
    """A text in a folder may change without a change of the folder's time."""
    original, scheme = pass_model(str(model), LoadOptions(device="cpu")), parse_scheme("gptq-int4")
    one, other = (Samples([[1, 2, last]], []) for last in (3, 4))
    known = _settings(original, scheme, one, None, FEW)
    assert known == _settings(original, scheme, one, None, FEW)
    assert known != _settings(original, scheme, other, None, FEW)
    assert known != _settings(original, scheme, one, "gptq", FEW)  # which says what --bits may choose among


@pytest.mark.parametrize("scheme", ["fp8", "rtn-fp8", "llm.int8"])
def test_bits_are_those_of_whole_numbers(scheme: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RequestError, match=rf"bits \(--bits\) chooses among whole numbers of 2 to 8 bits, not {scheme}"
    ):
        quantize(str(model), scheme, out=tmp_path / "out", data=["text"], options=Options(bits=3.5))
