"""`ridgeline prune`: folders that transformers opens, the report, errors, full disks and interruptions."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from oracle.build import make_model, oracle_greedy, oracle_logits, redraw
from oracle.families import CASES
from oracle.ours import SPECS, write
from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import app
from ridgeline.compress.data import Samples
from ridgeline.compress.folder import open_original
from ridgeline.compress.prune import PruneOptions, parse_keep, prune
from ridgeline.compress.prune.aims import Aims, parse_params
from ridgeline.compress.prune.run import write_pruned
from ridgeline.errors import RequestError, RidgelineError
from ridgeline.evals.documents import Document

pytestmark = pytest.mark.usefixtures("short_rates")

SEQUENCES = [[(7 * i * i + 3 * j + i * j) % 90 + 3 for i in range(40)] for j in range(6)]
SAMPLES = Samples(SEQUENCES[:4], [Document(ids) for ids in SEQUENCES[4:]])
TEXT = "Once upon a time there was a small file. It had many words, and each of them was read twice. " * 60
BY_WEIGHTS = PruneOptions(importance="weights")


def folder_of(name: str, folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    model = make_model(CASES[name], **changes)
    redraw(model, 3)
    model.to(dtype).save_pretrained(folder)
    return folder


def pruned(source: Path, out: Path, keep: str, **options: Any) -> Any:
    chosen = PruneOptions(**options)
    original = open_original(str(source), None)
    return write_pruned("M", original, parse_keep(keep), None, SAMPLES, "texts", out, chosen)


@pytest.mark.parametrize(
    ("name", "keep", "kind"),
    [
        ("llama_gqa", "mlp=0.5,heads=0.666667,layers=3,width=0.75", "llama"),
        ("qwen3", "mlp=0.75,kv_heads=0.5,width=48", "qwen3"),
        ("gpt2", "mlp=0.5,layers=3", "gpt2"),
        ("qwen3_moe", "mlp=0.5,experts=4,layers=3", "qwen3_moe"),
        ("gemma2", "mlp=0.5,heads=0.5", "gemma2"),
        ("mamba2", "layers=2", "mamba2"),
        ("gpt_neox", "mlp=0.5,layers=3", "gpt_neox"),
    ],
)
def test_transformers_computes_the_logits_of_a_uniform_model(name: str, keep: str, kind: str, tmp_path: Path) -> None:
    source = folder_of(name, tmp_path / "source")
    report = pruned(source, tmp_path / "out", keep, format="family")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    ).eval()
    llm = LLM(str(tmp_path / "out"), skip_tokenizer_init=True)
    for own, other in zip(llm.logits(SEQUENCES[:2]), oracle_logits(theirs, SEQUENCES[:2]), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)
    assert sum(p.numel() for p in theirs.parameters()) == report.prices["pruned"].params
    if kind in ("llama", "qwen3"):
        ids, _ = oracle_greedy(theirs, SEQUENCES[0][:8], 64)
        params = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
        assert llm.generate([SEQUENCES[0][:8]], params)[0].outputs[0].token_ids == ids


def test_the_checkpoint_keeps_its_type_and_layers_may_differ(tmp_path: Path) -> None:
    source = folder_of("llama_gqa", tmp_path / "source", torch.bfloat16)
    report = pruned(source, tmp_path / "out", "mlp=0.5,kv_heads=0.5", sizes="by-layer")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    sizes = {layer.mlp.intermediate_size for layer in open_original(str(tmp_path / "out"), None).spec.layers}
    assert config["model_type"] == "ridgeline" and len(sizes) > 1
    assert any("a llama config cannot say it: layers[" in note for note in report.notes)
    assert open_original(str(tmp_path / "out"), None).dtype == "bfloat16"
    with pytest.raises(RequestError, match=r"--format.* family: a llama config cannot say it: layers\["):
        pruned(source, tmp_path / "other", "mlp=0.5", sizes="by-layer", format="family")


def test_models_of_our_own_format_stay_in_it(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write(SPECS["cla2"], tmp_path / "source")
    pruned(tmp_path / "source", tmp_path / "out", "mlp=0.5,heads=0.5,width=0.5")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "ridgeline"
    with pytest.raises(RequestError, match="layers that share keys and values cannot be pruned here"):
        pruned(tmp_path / "source", tmp_path / "other", "layers=3")
    with pytest.raises(RequestError, match="--keep kv_heads: layer 1 cannot have 1 of 2: SharedAttention has no part"):
        pruned(tmp_path / "source", tmp_path / "other", "kv_heads=1")


def test_mixers_whose_parts_have_no_names_are_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    write(SPECS["s4"], tmp_path / "source")
    with pytest.raises(RequestError, match="S4 has no projection before it"):
        pruned(tmp_path / "source", tmp_path / "out", "width=0.5")
    with pytest.raises(RequestError, match="no state whose parts are known by name; its mixers are"):
        pruned(tmp_path / "source", tmp_path / "out", "state=0.5")


# ---- the command --------------------------------------------------------------------------------------------


def run(*words: str) -> Any:
    return CliRunner().invoke(app, ["prune", *words])


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def test_the_command_prints_the_price(tmp_path: Path, text: str) -> None:
    words = ("--calibrate", text, "--calibrate-sequences", "2", "--sequence-length", "64", "--layer-sequences", "1")
    out = tmp_path / "a" / "out"
    result = run("pocket", "--keep", "mlp=0.5,layers=3", *words, "--out", str(out))
    assert result.exit_code == 0, result.output
    for words_ in (
        "3 of 4 layers, mlp 352 of 704",
        "4.00 M",
        "2,048",
        "1,536",
        "predicted",
        "measured",
        "perplexity",
        "read back",
    ):
        assert words_ in result.output
    report = json.loads((out / "price_report.json").read_text())
    models = report["models"]
    assert report["read_back_difference"] <= 1e-4 and len(report["kept_layers"]) == 3
    assert models["pruned"]["predicted_tokens_per_s"] > models["original"]["predicted_tokens_per_s"]
    assert all(model["measured_tokens_per_s"] > 0 for model in models.values())
    assert models["pruned"]["kl"] > 0 and models["original"]["perplexity"] > 1
    shown = CliRunner().invoke(app, ["inspect", str(out)])
    assert "3 of 4 layers, mlp 352 of 704" in shown.output and "4.00 M" in shown.output and "perplexity" in shown.output
    (out / "price_report.json").write_text("{}")
    assert "price_report.json is damaged" in str(CliRunner().invoke(app, ["inspect", str(out)]).exception)
    answer = LLM(str(out)).generate("import", SamplingParams(max_tokens=4, temperature=0))
    assert len(answer[0].outputs[0].token_ids) == 4


def test_parameters_need_no_sizes(tmp_path: Path) -> None:
    report = prune("pocket", Aims(), params=2_500_000, out=tmp_path / "out", options=BY_WEIGHTS)
    assert 2_300_000 < report.prices["pruned"].params <= 2_500_000
    assert report.comparison is None and report.source == ""


@pytest.mark.parametrize(
    ("keep", "words"),
    [
        ("mlp=1.5", "a share must be above 0 and at most 1"),
        ("mlp=0.0", "a share must be above 0"),
        ("mlp=0", "would leave 0; leave mlp out"),
        ("mlp=1", r"would leave 1; write mlp=1\.0"),
        ("mlp=nan", "a share must be"),
        ("mlp=half", "write mlp=0.5,heads=0.75"),
        ("mlp", "write mlp=0.5,heads=0.75"),
        ("mlp=0.5,mlp=0.5", "twice"),
        ("embed=0.5", "'embed' cannot be pruned; use mlp, heads"),
    ],
)
def test_what_to_keep_is_checked(keep: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_keep(keep)


def test_numbers_of_parameters() -> None:
    assert [parse_params(t) for t in ("2B", "850m", "1.5e6", "120000")] == [2 * 10**9, 850 * 10**6, 1_500_000, 120_000]
    for wrong in ("", "0", "-2B", "many", "nan", "inf"):
        with pytest.raises(RequestError, match="--params"):
            parse_params(wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "nothing is to be pruned"),
        (("--keep", "mlp=0.5"), "name some with --calibrate"),
        (("--keep", "mlp=0.5", "--importance", "beauty"), "importance (--importance) is 'beauty'; use activation"),
        (("--keep", "mlp=0.5", "--calibrate", "absent.txt"), "absent.txt"),
        (("--keep", "mlp=0.5", "--calibrate", "TEXT", "--sequence-length", "9999"), "it must be from 2 to 1024 tokens"),
        (("--keep", "mlp=0.5", "--calibrate", "SHORT"), "it needs two sequences of 512 tokens"),
    ],
)
def test_bad_input_gives_one_line_and_leaves_nothing(
    words: tuple[str, ...], message: str, tmp_path: Path, text: str
) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    given = [{"TEXT": text, "SHORT": str(tmp_path / "short.txt")}.get(word, word) for word in words]
    before = sorted(tmp_path.rglob("*"))
    result = run("pocket", *given, "--out", str(tmp_path / "new" / "out"))
    assert isinstance(result.exception, RidgelineError)
    assert message in str(result.exception) and "\n" not in str(result.exception)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    from ridgeline.compress import Options, quantize

    source = folder_of("llama_gqa", tmp_path / "source", num_hidden_layers=1)
    quantize(str(source), "rtn-int8", out=tmp_path / "int8", options=Options(speed=False))
    with pytest.raises(RequestError, match="is quantized; name the checkpoint"):
        prune(str(tmp_path / "int8"), parse_keep("mlp=0.5"), out=tmp_path / "out", options=BY_WEIGHTS)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_folder_is_whole_or_absent(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, tensors: Any) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr("ridgeline.compress.folder.write_safetensors", fail)
    kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RequestError
    with pytest.raises(kind) as caught:
        prune("pocket", parse_keep("mlp=0.5"), out=tmp_path / "new" / "out", options=BY_WEIGHTS)
    assert not list(tmp_path.iterdir())
    if kind is RequestError:
        assert "No space left on device; free some space" in str(caught.value)


@pytest.mark.parametrize(
    ("out", "message"), [("file/out", "name another folder"), ("file", "exists"), ("a" * 300, "File name too long")]
)
def test_an_output_that_cannot_be_written(out: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=message):
        prune("pocket", parse_keep("mlp=0.5"), out=tmp_path / out, options=BY_WEIGHTS)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_damaged_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ridgeline.compress import folder as writing

    real = writing.checkpoint_tensors

    def damaged(*args: Any) -> Any:
        found = real(*args)
        found["model.layers.0.mlp.up_proj.weight"].data[3] = 0
        return found

    monkeypatch.setattr(writing, "checkpoint_tensors", damaged)
    with pytest.raises(RequestError, match="what was written does not compute what was made"):
        prune("pocket", parse_keep("mlp=0.5"), out=tmp_path / "out", options=BY_WEIGHTS)
    assert not list(tmp_path.iterdir())
