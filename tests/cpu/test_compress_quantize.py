"""`ridgeline quantize` from the command to the folder: reports, resuming, mixed bits, and inputs that are refused."""

from __future__ import annotations

import importlib
import json
import shutil
from copy import copy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner

from oracle.build import make_model, redraw
from oracle.families import CASES
from ridgeline import LLM
from ridgeline.cli.main import app
from ridgeline.compress import Options, quantize
from ridgeline.compress.calibrate import Quantizer
from ridgeline.compress.data import read_samples, unknown_share
from ridgeline.compress.mixed import Choice, spend
from ridgeline.compress.rtn import round_to_nearest
from ridgeline.compress.scheme import parse_scheme
from ridgeline.compress.tensors import matrices, plain, stacked
from ridgeline.compress.write import WRITERS, Writer
from ridgeline.errors import DeviceError, RequestError, RidgelineError
from ridgeline.evals import measure_perplexity
from ridgeline.load.stored import dequantized
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.spec.quant import format_of

FEW = Options(sequences=6, length=32, speed=False)
TRAINED = Options(sequences=6, length=32, train_tokens=24 * 1024, speed=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model with one token for each byte."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(alphabet[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = make_model(CASES["llama_gqa"], vocab_size=len(alphabet), num_hidden_layers=2, intermediate_size=96)
    redraw(made, 3)
    made.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"line {i}: {i * i} steps and {i % 7} more." for i in range(60)), encoding="utf-8")
    return path


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name != "text.txt")


def test_a_quantized_model_opens_and_the_report_is_kept(model: Path, text: Path, tmp_path: Path) -> None:
    steps: list[str] = []
    report = quantize(
        str(model), "gptq-int4", out=tmp_path / "out", data=[text], options=Options(sequences=6, length=32),
        on_progress=lambda what, done, total: steps.append(what),
    )  # fmt: skip
    assert leftovers(tmp_path) == ["out"]
    kept = json.loads((tmp_path / "out" / "quantization_report.json").read_text())
    assert kept == json.loads(json.dumps(report.to_json()))
    assert kept["scheme"] == "gptq-int4" and kept["format"] == "int4-asym-exact"
    assert kept["models"]["gptq-int4"]["kl"] < kept["models"]["rtn"]["kl"]
    assert kept["as_stored"]["perplexity"] > 0 and kept["held_out_tokens"] % 31 == 0
    change = kept["models"]["gptq-int4"]["perplexity"] / kept["as_stored"]["perplexity"] - 1
    assert kept["models"]["gptq-int4"]["perplexity_change"] == pytest.approx(change)
    assert set(kept["speed"]) == {"as stored", "gptq-int4"}
    assert all(speed["measured_tokens_per_s"] > 0 for speed in kept["speed"].values())
    assert all(speed["predicted_tokens_per_s"] is None for speed in kept["speed"].values())
    assert "not calibrated; run `ridgeline calibrate`" in kept["speed_notes"][0]
    assert len(kept["output_power_lost"]) == 14 and 0 < max(kept["output_power_lost"].values()) < 0.1
    # 4 bits, and 16 + 4 for each group of 32 columns.
    assert 4.625 <= kept["bits"]["gptq-int4"] < 4.8
    assert {s for s in steps if s.startswith("quantizing")} == {
        f"quantizing layers.{i}.{part}" for i in range(2) for part in ("mixer", "mlp")
    }
    llm = LLM(str(tmp_path / "out"))
    assert llm.generate("line 7")[0].outputs[0].token_ids


def test_rounding_to_nearest_needs_no_text(model: Path, tmp_path: Path) -> None:
    report = quantize(str(model), "rtn-int8", out=tmp_path / "out")
    assert report.comparison is None and not report.unseen
    assert report.num_bytes["rtn-int8"] < 0.6 * report.num_bytes["as stored"]


def test_an_interrupted_run_continues(model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished parts are not computed again, and the result is that of one run."""
    whole = quantize(str(model), "gptq-int3", out=tmp_path / "whole", data=[text], options=FEW)
    real, done = Quantizer.quantize, []

    def limited(self: Quantizer, part: Any, stored: Any) -> Any:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(part.name)
        return real(self, part, stored)

    monkeypatch.setattr(Quantizer, "quantize", limited)
    with pytest.raises(KeyboardInterrupt):
        quantize(str(model), "gptq-int3", out=tmp_path / "out", data=[text], options=FEW)
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").is_dir()
    done.clear()
    monkeypatch.setattr(Quantizer, "quantize", lambda s, part, w: (done.append(part.name), real(s, part, w))[1])
    report = quantize(str(model), "gptq-int3", out=tmp_path / "out", data=[text], options=FEW)
    assert done == ["layers.1.mixer", "layers.1.mlp"]
    assert report.lost == pytest.approx(whole.lost)
    tensors = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert tensors[0] == tensors[1] and leftovers(tmp_path) == ["out", "whole"]


def test_other_settings_do_not_continue_a_run(model: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "settings.json").write_text("{}")
    (tmp_path / ".out.partial" / "layers.0.mixer.npz").write_text("not an array")
    quantize(str(model), "rtn-int4", out=tmp_path / "out", data=[text], options=FEW)
    assert leftovers(tmp_path) == ["out"]


def test_what_is_written_is_read_back(model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that swaps two matrices is found out before the folder gets its name."""
    right = WRITERS["floats"]

    def swapped(folder: Path, quantized: Any) -> tuple[str, ...]:
        other = copy(quantized)  # the one that is compared stays right
        names = {
            "layers.0.mixer.k.weight": "layers.0.mixer.v.weight",
            "layers.0.mixer.v.weight": "layers.0.mixer.k.weight",
        }
        other.floats = lambda name: quantized.floats(names.get(name, name))
        return right.write(folder, other)

    monkeypatch.setattr("ridgeline.compress.write.WRITERS", {"floats": Writer(right.refuses, swapped)})
    with pytest.raises(RequestError, match="does not compute what was quantized"):
        quantize(str(model), "rtn-int4", out=tmp_path / "out", data=[text], options=FEW)
    assert leftovers(tmp_path) == []


def test_bits_on_average_go_where_they_help(model: Path, text: Path, tmp_path: Path) -> None:
    options = Options(sequences=6, length=32, bits=3.5, speed=False)
    report = quantize(str(model), "rtn-int4", out=tmp_path / "out", data=[text], options=options)
    assert 3 < report.bits["rtn-int4"] <= 3.5 + 0.75  # scales and zero points, short groups
    with pytest.raises(RequestError, match="bits"):
        quantize(str(model), "rtn-int4", out=tmp_path / "b", data=[text], options=Options(6, 32, bits=1.5))
    assert leftovers(tmp_path) == ["out"]


def test_spending_is_the_best_up_to_one_step() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        choices = {
            name: [Choice(b, 10.0 * b, float(rng.random()) * 4.0 ** (2 - b)) for b in (2, 3, 4, 8)] for name in "abcd"
        }
        found = spend(choices, 140)
        size, cost = sum(c.num_bytes for c in found.values()), sum(c.cost for c in found.values())
        assert size <= 140
        longest = 40  # bytes of the longest step
        least = min(
            sum(c.cost for c in some) for some in product(*choices.values())
            if sum(c.num_bytes for c in some) <= 140 - longest
        )  # fmt: skip
        assert cost <= least * 1.0001 + 1e-12
    with pytest.raises(ValueError, match="too small"):
        spend(choices, 70)


def test_samples_are_drawn_without_overlap(model: Path, text: Path) -> None:
    tokenizer = Tokenizer.from_folder(model)
    one, other = (
        read_samples([text], tokenizer, length=32, count=20, held_out_tokens=160, seed=seed) for seed in (0, 1)
    )
    ids = tokenizer.encode(text.read_text())
    every = {tuple(ids[i : i + 32]) for i in range(0, len(ids) - 31, 32)}
    for samples in (one, other):
        chosen, held = {tuple(s) for s in samples.calibration}, {tuple(d.token_ids) for d in samples.held_out}
        assert len(chosen) == 20 and len(held) == 5 and not chosen & held and chosen | held <= every
    assert one.calibration != other.calibration
    again = read_samples([text], tokenizer, length=32, count=20, held_out_tokens=160, seed=0)
    assert again == one


def test_a_text_of_another_language_is_noted(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "greek.txt"
    path.write_text("μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος " * 20, encoding="utf-8")
    tokenizer = Tokenizer.from_folder(model)
    samples = read_samples([path], tokenizer, length=32, count=4, held_out_tokens=64, seed=0)
    assert any("unknown" in note for note in samples.notes)
    assert unknown_share(tokenizer.encode("plain words"), tokenizer) == 0


def command(*args: str) -> Any:
    return CliRunner().invoke(app, ["quantize", *args])


def test_the_command_prints_a_table_of_80_columns(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = command(
        str(model), "--scheme", "awq-int4", "--calibrate", str(text), "--out", str(tmp_path / "out"),
        "--sequences", "6", "--sequence-length", "32",
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    for word in ("as stored", "RTN", "awq-int4", "perplexity", "tok/s", "lost", "run `ridgeline calibrate`"):
        assert word in " ".join(found.output.split())


def test_codes_are_trained_and_stored_like_any_other(model: Path, text: Path, tmp_path: Path) -> None:
    """The report has GPTQ with the same data beside, and a run that is interrupted in training continues there."""
    out, seen = tmp_path / "out", list[tuple[str, int]]()

    def stop(what: str, done: int, total: int) -> None:
        if what.startswith("training") and done == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(str(model), "qat-int3", out=out, data=[text], options=TRAINED, on_progress=stop)
    assert leftovers(tmp_path) == [".out.partial"]
    report = quantize(
        str(model), "qat-int3", out=out, data=[text], options=TRAINED,
        on_progress=lambda what, done, total: seen.append((what, done)),
    )  # fmt: skip
    assert [done for what, done in seen if what.startswith("training")] == list(range(15, 25))
    assert leftovers(tmp_path) == ["out"]
    kept = json.loads((out / "quantization_report.json").read_text())
    assert list(kept["models"]) == ["rtn", "gptq-int3", "qat-int3"]
    # A random model learns nothing that holds for other text from 1,500 tokens; test_qat.py tests what training does.
    assert kept["models"]["qat-int3"]["kl"] < 1.1 * kept["models"]["gptq-int3"]["kl"]
    assert kept["calibration"].endswith("trained on 24,576 tokens") and len(kept["output_power_lost"]) == 14
    samples = read_samples(
        [text], Tokenizer.from_folder(out), length=32, count=6, held_out_tokens=32_768, seed=0, train_tokens=24_576
    )
    held, trained = ({tuple(s) for s in some} for some in ([d.token_ids for d in samples.held_out], samples.training))
    assert not held & trained and {tuple(s) for s in samples.calibration} <= trained
    found = measure_perplexity(LLM(str(out)).loaded, samples.held_out, context=32)
    assert report.comparison is not None
    assert found.perplexity.value == pytest.approx(report.comparison.others["qat-int3"].perplexity.value, rel=2e-3)
    whole = quantize(str(model), "qat-int3", out=tmp_path / "whole", data=[text], options=TRAINED)
    assert whole.to_json() == report.to_json()
    tensors = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert tensors[0] == tensors[1]


@pytest.mark.parametrize(
    ("scheme", "given", "format"),
    [
        ("qat-int4", {"format": "gptq"}, "int4-asym-exact"), ("qat-int2", {"symmetric": True}, "int2-exact"),
        ("qat-int8", {"activations": "int8"}, "int8"), ("qat-fp8", {"group": 16, "format": "floats"}, "fp8-16"),
    ],
)  # fmt: skip
def test_every_format_is_trained(
    scheme: str, given: dict[str, Any], format: str, model: Path, text: Path, tmp_path: Path
) -> None:
    few = Options(sequences=6, length=32, train_tokens=4096, speed=False)
    report = quantize(str(model), scheme, out=tmp_path / "out", data=[text], options=few, **given)
    assert report.format == format and report.comparison is not None
    assert list(report.comparison.others) == ["rtn", scheme.replace("qat", "gptq"), scheme]
    kl = [quality.kl.value for quality in report.comparison.others.values() if quality.kl is not None]
    assert 0 < kl[2] < 2 * kl[1]  # four updates show that codes are right, not that training helps


def test_training_needs_torch(model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("ridgeline.ops.devices"), "has_torch", lambda: False)
    with pytest.raises(
        DeviceError, match=r"^scheme \(--scheme\) qat-int3 needs torch: pip install 'ridgeline\[torch\]'$"
    ):
        quantize(str(model), "qat-int3", out=tmp_path / "out", data=[text], options=TRAINED)
    assert leftovers(tmp_path) == []


BAD = [
    (["--scheme", "awq-int9"], "scheme (--scheme) 'awq-int9' is not known"),
    (["--scheme", "nonsense"], "is not known"),
    (["--scheme", "gptq-int4"], "name texts with --calibrate"),
    (["--scheme", "rtn-int4", "--bits", "3"], "name texts with --calibrate"),
    (["--scheme", "qat-int4"], "name texts with --calibrate"),
    (["--scheme", "rtn-int4", "--train-tokens", "5"], "rtn-int4 does not"),
    (["--scheme", "qat-int4", "--calibrate", "TEXT", "--train-tokens", "0"], "it must be at least 1"),
    (["--scheme", "gptq-int4", "--calibrate", "EMPTY"], "is empty"),
    (["--scheme", "gptq-int4", "--calibrate", "SHORT"], "two sequences of 64 tokens"),
    (["--scheme", "gptq-int4", "--calibrate", "ABSENT"], "cannot read"),
    (["--scheme", "gptq-int4", "--calibrate", "BINARY"], "not UTF-8"),
    (["--scheme", "rtn-int4", "--format", "tape"], "format (--format) 'tape' is not known"),
    (["--scheme", "rtn-int4", "--group", "-1"], "group (--group) is -1"),
    (["--scheme", "fp8", "--asymmetric"], "no zero points"),
    (["--scheme", "keep-int4", "--calibrate", "TEXT"], "take --format floats"),
    (["--scheme", "keep-int4", "--calibrate", "TEXT", "--activations", "int8"], "exact activations"),
    (["--scheme", "fp8-tensor", "--group", "32"], "one scale for each matrix; leave out --group"),
    (["--scheme", "fp8-block", "--group", "0"], "fp8-block needs a size of blocks, such as 128"),
    (["--scheme", "fp8", "--activations", "int8"], "whole numbers"),
    (["--scheme", "rtn-int4", "--activations", "int5"], "is not known"),
    (["--scheme", "rtn-int4", "--activations", "bf16"], "open the model with --activations bf16"),
    (["--scheme", "gptq-int4", "--calibrate", "TEXT", "--sequence-length", "99999"], "it must be from 2 to"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_line_and_leaves_nothing(
    args: list[str], message: str, model: Path, text: Path, tmp_path: Path
) -> None:
    files = {"TEXT": text, "ABSENT": tmp_path / "absent.txt"}
    for name, data in (("EMPTY", b""), ("SHORT", b"only a few words"), ("BINARY", b"\xff\xfe\x00words")):
        files[name] = tmp_path / f"{name}.bin"
        files[name].write_bytes(data)
    before = sorted(tmp_path.iterdir())
    own = [str(files.get(a, a)) for a in args]
    length = () if "--sequence-length" in own else ("--sequence-length", "64")
    scheme = own[own.index("--scheme") + 1]
    options = dict(zip(own[::2], own[1::2], strict=False))
    with pytest.raises(RidgelineError) as caught:
        quantize(
            str(model), scheme, out=tmp_path / "out",
            data=[options["--calibrate"]] if "--calibrate" in options else (),
            group=int(options["--group"]) if "--group" in options else None,
            symmetric=False if "--asymmetric" in own else None, activations=options.get("--activations"),
            format=options.get("--format"),
            options=Options(
                length=int(options.get("--sequence-length", 64)),
                bits=float(options["--bits"]) if "--bits" in options else None,
                train_tokens=int(options["--train-tokens"]) if "--train-tokens" in options else None,
            ),
        )  # fmt: skip
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    assert command(str(model), "--out", str(tmp_path / "out"), *own, *length).exit_code


@pytest.mark.parametrize(
    ("name", "keep", "message"), [("rtn-int4", 0.01, "keep-TYPE"), ("keep-int4", 0.2, "at most 0.1")]
)
def test_shares_of_columns_are_checked(name: str, keep: float, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        parse_scheme(name, keep=keep)


@pytest.mark.parametrize("format", ["fp8-tensor", "fp8-16x16"])
def test_rows_of_one_tensor_that_do_not_fill_blocks_are_refused(format: str) -> None:
    """A block ends within the first of two matrices that a checkpoint stores as one."""
    several = [round_to_nearest(np.ones((24, 32), np.float32), format_of(format))] * 2
    with pytest.raises(RequestError, match="do not fill blocks"):
        stacked("qkv_proj.weight", several)


def test_a_folder_that_exists_is_kept(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="exists; name another folder"):
        quantize(str(model), "rtn-int4", out=tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_model_that_is_quantized_already_is_refused(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RidgelineError):
        quantize(str(folder), "rtn-int4", out=tmp_path / "out")
    assert leftovers(tmp_path) == ["quantized"]


def test_damaged_weights_are_refused(model: Path, text: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file as load
    from safetensors.torch import save_file

    folder = tmp_path / "damaged"
    shutil.copytree(model, folder)
    tensors = load(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for scheme in ("gptq-int4", "rtn-int4"):
        with pytest.raises(RidgelineError, match="finite"):
            quantize(str(folder), scheme, out=tmp_path / "out", data=[text], options=FEW)
    assert leftovers(tmp_path) == ["damaged"]


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("awq-int4", "int4-asym-exact"), ("gptq-int3", "int3-asym-exact"), ("llm.int8", "int8-outliers"),
        ("fp8", "fp8"), ("rtn-int8", "int8-exact"), ("smooth-int8", "int8"), ("clip-int2", "int2-asym-exact"),
        ("fp8-block", "fp8-128x128"), ("fp8-tensor", "fp8-tensor"), ("keep-int3", "int3-asym-exact"),
        ("qat-int3", "int3-asym-exact"),
    ],
)  # fmt: skip
def test_names_of_schemes(name: str, format: str) -> None:
    assert parse_scheme(name).format.name == format


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3_moe", "phi3", "gpt2"])
def test_tensors_have_the_names_of_the_family(name: str, tmp_path: Path) -> None:
    """Codes and plain tensors by the checkpoint's names give the floats that the family's own layout has."""
    folder = tmp_path / name
    made = make_model(CASES[name])
    redraw(made, 1)
    made.save_pretrained(folder)
    caught: dict[str, Any] = {}
    right = WRITERS["floats"]

    def kept(target: Path, quantized: Any) -> tuple[str, ...]:
        notes = right.write(target, quantized)
        caught["written"] = load_file(target / "model.safetensors")
        if name != "gpt2":
            caught["plain"], caught["matrices"] = plain(quantized), matrices(quantized)
        else:
            with pytest.raises(RequestError, match="transposed"):
                matrices(quantized)
        return notes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ridgeline.compress.write.WRITERS", {"floats": Writer(right.refuses, kept)})
        quantize(str(folder), "rtn-int4", out=tmp_path / "out")
    if name != "gpt2":
        own = {key: tensor.data for key, tensor in caught["plain"].items()}
        own |= {key: dequantized(matrix) for key, matrix in caught["matrices"].items()}
        assert set(own) == set(caught["written"])
        for key, value in caught["written"].items():
            np.testing.assert_allclose(own[key], value, atol=1e-6)


@pytest.mark.parametrize(
    ("scheme", "format", "method"),
    [
        ("gptq-int4", None, "compressed-tensors"), ("gptq-int4", "gptq", "gptq"),
        ("gptq-int3", "gptq_v2", "gptq"), ("awq-int4", "awq", "awq"),
        ("llm.int8", None, "bitsandbytes"), ("smooth-int8", None, "compressed-tensors"),
        ("fp8", None, "compressed-tensors"), ("fp8-block", None, "compressed-tensors"),
        ("fp8-tensor", None, "compressed-tensors"), ("clip-int2", "floats", None),
    ],
)  # fmt: skip
def test_formats_open_without_a_flag(
    scheme: str, format: str | None, method: str | None, model: Path, text: Path, tmp_path: Path
) -> None:
    """The folder has the method that loaders read, and its loss is that of the report."""
    out = tmp_path / "out"
    report = quantize(str(model), scheme, out=out, data=[text], format=format, options=FEW)
    config = json.loads((out / "config.json").read_text())
    assert config.get("quantization_config", {}).get("quant_method") == method
    assert report.comparison is not None
    samples = read_samples([text], Tokenizer.from_folder(out), length=32, count=6, held_out_tokens=32_768, seed=0)
    found = measure_perplexity(LLM(str(out)).loaded, samples.held_out, context=32)
    own = report.comparison.others[scheme].perplexity.value
    # Where activations are rounded, the last bit of a scale may move a tie.
    rounds = report.format.endswith("outliers") or report.format == "int8"
    assert found.perplexity.value == pytest.approx(own, rel=1e-2 if rounds else 2e-3)


def test_columns_with_large_inputs_stay_in_16_bits(model: Path, text: Path, tmp_path: Path) -> None:
    """Every other number is that of rounding to nearest; bits count the columns as well."""
    found = {
        name: quantize(str(model), name, out=tmp_path / name, data=[text], format="floats", options=FEW, keep=keep)
        for name, keep in (("keep-int4", 0.05), ("rtn-int4", None))
    }
    kept, rounded, original = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "keep-int4", tmp_path / "rtn-int4", model)
    )
    for name in (n for n in original if "_proj." in n):
        columns = np.flatnonzero((kept[name] != rounded[name]).any(0))
        assert len(columns) == round(0.05 * original[name].shape[1]), name
        np.testing.assert_array_equal(kept[name][:, columns], original[name][:, columns].astype(np.float16))
    assert found["keep-int4"].bits["keep-int4"] == pytest.approx(found["rtn-int4"].bits["rtn-int4"] + 0.8, abs=0.05)
    qualities = found["keep-int4"].comparison.others  # type: ignore[union-attr]
    assert qualities["keep-int4"].kl.value < qualities["rtn"].kl.value  # type: ignore[union-attr]


def test_a_format_that_cannot_hold_a_scheme_says_which_can(model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"awq cannot hold .* can$"):
        quantize(str(model), "gptq-int3", out=tmp_path / "out", data=[text], format="awq")
    assert leftovers(tmp_path) == []
