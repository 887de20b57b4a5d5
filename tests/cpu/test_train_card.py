"""The picture of a run and the card of its model: their content, and that no incomplete file remains."""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import DataError
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, MoE, RMSNorm, Rope
from ridgeline.train import curve
from ridgeline.train.card import CardFacts, model_card
from ridgeline.train.curve import draw_curve, read_log
from ridgeline.train.data.manifest import Entry, Manifest
from ridgeline.train.data.vocabulary import save_tokenizer, train_bpe
from ridgeline.train.loop import Progress, TrainOptions

NORM = RMSNorm(1e-5)
MIXER = Attention(num_heads=12, num_kv_heads=3, head_dim=32, scale=32**-0.5, rope=Rope(32, 1e4))
SPEC = ModelSpec("llama", 4096, 384, 2048, (Layer(MIXER, GatedMLP(1056), NORM),) * 7, NORM, tie_word_embeddings=True)
MANIFEST = Manifest(
    "standard library of Python 3.11.7", "PSF-2.0", "3.11.7", 123, {"empty": 17},
    (Entry("a.py", 30_000_001, "0" * 64, "train"), Entry("b.py", 1_400_003, "1" * 64, "held-out")),
)  # fmt: skip
OPTIONS = TrainOptions(
    steps=3001, batch_tokens=16_384, micro_tokens=4096, context=512, learning_rate=4e-3, warmup_steps=151,
    decay_share=0.25, final_rate=0.05, weight_decay=0.13, clip=0.9, optimizer="muon", dropout=0.07, seed=41,
    precision="bfloat16",
)  # fmt: skip
LEAST = CardFacts(
    name="tiny-py", summary="A model that writes Python.", spec=SPEC, manifest=MANIFEST, train_tokens=8_765_432,
    options=OPTIONS, steps=2900, tokens_seen=47_513_600,
)  # fmt: skip
FULL = replace(
    LEAST, license="Apache-2.0", language="code", tags=("python", "ridgeline"), in_transformers=True, dtype="bfloat16",
    held_out_tokens=432_109, held_out_share=0.045, split_seed=5, start="the weights of base-model", kept_step=2700,
    flops=4.56e15, seconds=9000.0, machine="Xeon, 2 threads", peak_flops_per_s=1.234e11, utilization=0.412,
    training_rows=(("Made by", "ridgeline train"),), bits_per_byte=0.71234, bits_per_byte_error=0.00456,
    perplexity=5.4321, perplexity_error=0.0321, evaluated_tokens=430_000, eval_context=1024, eval_stride=256,
    evaluation_rows=(("Parses | compiles", "93 %"),), curve="loss.png", limits=("It knows only Python.", "Small."),
)  # fmt: skip


def log(steps: int, every: int = 10) -> list[Progress]:
    """Return losses that fall with noise from about 8, with held-out losses unless `every` is 0."""
    noise = np.random.default_rng(0).normal(0, 0.1, steps)
    falls = [1.5 + 6.5 * math.exp(-30 * i / steps) for i in range(steps)]
    measured = [every and (i + 1) % every == 0 for i in range(steps)]
    return [
        Progress(i + 1, falls[i] + noise[i], 1.0, 1e-3, 5e3, falls[i] + 0.1 if measured[i] else None)
        for i in range(steps)
    ]


def write_log(path: Path, steps: list[Progress], more: str = "") -> Path:
    path.write_text("".join(json.dumps(asdict(p)) + "\n" for p in steps) + more, encoding="utf-8")
    return path


def size_of_png(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[-8:-4] == b"IEND"
    assert len(data) > 20_000
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def drawn_axes(monkeypatch: pytest.MonkeyPatch, steps: list[Progress], per_token: float | None, path: Path) -> Any:
    """Draw, and return the figure as it was saved."""
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    save = Figure.savefig
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, *a, **k: (seen.append(self), save(self, *a, **k))[1])
        draw_curve(steps, 8192, per_token, "a run", path)
    return seen[0]


def test_a_log_is_restored(tmp_path: Path) -> None:
    steps = log(25)
    assert read_log(write_log(tmp_path / "log.jsonl", steps)) == steps
    assert read_log(write_log(tmp_path / "log.jsonl", [])) == []
    assert (
        read_log(write_log(tmp_path / "log.jsonl", [Progress(1, 2.0, 1.0, 0.1, 5.0, math.inf)]))[0].held_out == math.inf
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"step": 4, "loss": 2.', "not a training step"),
        ('{"step": 4, "loss": 2.0}', "not a training step"),
        (json.dumps({**asdict(Progress(4, 2.0, 1.0, 0.1, 5.0)), "color": "red"}), "color"),
        ("[1, 2]", "not a training step"),
        ("", "not a training step"),
        (json.dumps(asdict(Progress(4, 2.0, 1.0, 0.1, 5.0)) | {"loss": "2"}), "loss is '2'"),
        (json.dumps(asdict(Progress(4, 2.0, 1.0, 0.1, 5.0)) | {"loss": None}), "loss is None"),
        (json.dumps(asdict(Progress(4, 2.0, 1.0, 0.1, 5.0)) | {"step": 4.5}), "step is 4.5"),
        (json.dumps(asdict(Progress(4, 2.0, 1.0, 0.1, 5.0)) | {"step": True}), "step is True"),
        (json.dumps(asdict(Progress(4, 2.0, 1.0, 0.1, 5.0)) | {"machine": 1}), "machine is 1"),
    ],
)
def test_a_bad_line_is_named(line: str, says: str, tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl", log(3), line + "\n")
    with pytest.raises(DataError, match=rf"log\.jsonl, line 4.*{re.escape(says)}") as error:
        read_log(path)
    assert "\n" not in str(error.value)


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_log(tmp_path / "log.jsonl")


@pytest.mark.parametrize(
    ("steps", "every", "per_token"), [(1, 0, None), (1, 1, 3.4), (2, 0, 3.4), (300, 10, 3.4), (300, 0, None)]
)
def test_a_run_of_any_length_is_drawn(steps: int, every: int, per_token: float | None, tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    draw_curve(log(steps, every), 8192, per_token, "runs for $5 and _more_ of \\it", path)
    assert size_of_png(path)[0] == 1500
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def test_the_picture_shows_the_figures_of_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = log(400)
    steps[299] = replace(steps[299], held_out=1.2345)
    figure = drawn_axes(monkeypatch, steps, 3.0, tmp_path / "loss.png")
    losses, rates = figure.axes
    lines = {line.get_label(): line for line in losses.get_lines()}
    raw, held_out = lines["training, each step"], lines["held-out"]
    assert raw.get_ydata().tolist() == [p.loss for p in steps]
    assert raw.get_xdata()[-1] == pytest.approx(400 * 8192 / 1e6)
    assert list(held_out.get_ydata()) == [p.held_out for p in steps if p.held_out is not None]
    bits = 1.2345 / math.log(2) / 3.0
    (best,) = (line for label, line in lines.items() if label.startswith("best"))
    assert best.get_label() == f"best held-out, after step 300:\n1.2345 nats per token, {bits:.4f} bits per byte"
    assert best.get_xydata()[0].tolist() == pytest.approx([300 * 8192 / 1e6, 1.2345])
    (right,) = (c for c in losses.child_axes)
    assert right.get_ylim() == pytest.approx([y / math.log(2) / 3.0 for y in losses.get_ylim()])
    assert list(rates.get_lines()[0].get_ydata()) == [p.learning_rate for p in steps]
    top = losses.get_ylim()[1]
    outside = sum(p.loss > top for p in steps)
    assert 0 < outside < 30  # the first steps do not set the scale, and a note mentions them
    assert max(p.loss for p in steps[30:]) < top < 5
    assert any(f"{outside} of 400 steps" in text.get_text() for text in losses.texts)
    assert losses.get_ylim()[0] < min(p.loss for p in steps)


def test_smoothing_has_no_bias_at_the_ends() -> None:
    assert curve._means(np.full(50, 3.0), 7) == pytest.approx(np.full(50, 3.0))
    values = np.random.default_rng(0).normal(size=30)
    expected = [values[max(0, i - 2) : i + 3].mean() for i in range(30)]
    assert curve._means(values, 5) == pytest.approx(expected)


def test_losses_that_are_not_finite_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = log(100)
    steps[49] = replace(steps[49], held_out=math.inf)
    steps[60] = replace(steps[60], loss=math.nan)
    losses = drawn_axes(monkeypatch, steps, None, tmp_path / "loss.png").axes[0]
    lines = {line.get_label(): line for line in losses.get_lines()}
    assert len(lines["training, each step"].get_ydata()) == 99
    assert len(lines["held-out"].get_ydata()) == 9
    for nothing in ([], [replace(steps[0], loss=math.nan)]):
        with pytest.raises(DataError, match="no step"):
            draw_curve(nothing, 8192, None, "nothing", tmp_path / "nothing.png")


def test_drawing_that_fails_leaves_the_old_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    path = tmp_path / "loss.png"
    path.write_bytes(b"old")

    def torn(self: Figure, target: Path, **options: Any) -> None:
        Path(target).write_bytes(b"\x89PN")
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", torn)
    with pytest.raises(OSError, match="no space"):
        draw_curve(log(20), 8192, None, "a run", path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [m for m in sys.modules if m.partition(".")[0] == "matplotlib"] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DataError, match=r"pip install ridgeline\[plot\]$") as error:
        draw_curve(log(20), 8192, None, "a run", tmp_path / "loss.png")
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_drawing_touches_nothing_global(tmp_path: Path) -> None:
    draw_curve(log(20), 8192, None, "a run", tmp_path / "loss.png")
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


# ---- the card ------------------------------------------------------------------------------------------


def front_matter(card: str) -> dict[str, Any]:
    """Read the front matter with the hub's client and with YAML, which must agree."""
    data = ModelCard(card).data.to_dict()
    _, text, _ = card.split("---\n", 2)
    assert yaml.safe_load(text) == data
    return data


def rows(card: str) -> dict[str, str]:
    found = re.findall(r"^\| ((?:\\\||[^|])+) \| ((?:\\\||[^|])+) \|$", card, re.M)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_the_hub_reads_the_front_matter() -> None:
    assert front_matter(model_card(FULL)) == {
        "license": "apache-2.0", "language": "code", "library_name": "transformers", "pipeline_tag": "text-generation",
        "tags": ["ridgeline", "python"],
    }  # fmt: skip
    assert front_matter(model_card(LEAST)) == {
        "library_name": "ridgeline", "pipeline_tag": "text-generation", "tags": ["ridgeline"],
    }  # fmt: skip
    other = front_matter(model_card(replace(LEAST, license='PSF 2.0: "as is"')))
    assert (other["license"], other["license_name"]) == ("other", "psf-2.0-as-is")


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_text_breaks_the_front_matter(tag: str, language: str) -> None:
    card = model_card(replace(LEAST, tags=(tag,), language=language or None, license=tag or None))
    data = yaml.safe_load(card.split("---\n", 2)[1])
    printable = "".join(c for c in " ".join(tag.split()) if c.isprintable())
    assert data["tags"] == list(dict.fromkeys(["ridgeline", printable]))


@pytest.mark.parametrize(
    "said",
    [
        "# tiny-py", "A model that writes Python.", f"{SPEC.num_params():,}", "| Layers | 7 |", "| Hidden size | 384 |",
        "12 / 3 of 32", "1,056", "4,096 tokens, one matrix", "2,048 tokens", "bfloat16",
        "standard library of Python 3.11.7",
        "PSF-2.0", "1 document, 30,000,001 bytes, 8,765,432 tokens", "1 document, 1,400,003 bytes, 432,109 tokens",
        "4.5 %", "seed 5", "123 functions that also occur", "17 (empty)", MANIFEST.hash, "the weights of base-model",
        "Muon",
        "0.9, 0.95", "decay 0.13", "norm of 0.9", "peak 0.004", "over 151 steps",
        "falls linearly to 0.0002 over the last 751 of 3,001 steps",
        "16,384 tokens in rows of 512", "2,900 of 3,001 planned", "step 2,700, the best on held-out",
        "47,513,600, 5.42 epochs",
        "bfloat16 products", "| Dropout | 0.07 |", "| Seed | 41 |", "4.56e+15", "| Hours | 2.5 |", "Xeon, 2 threads",
        "41.2 % of 123.4 GFLOP/s", "| Made by | ridgeline train |", "0.7123 ± 0.0046 (standard error)",
        "5.432 ± 0.032 (standard error)", "430,000 held-out tokens",
        "windows of 1,024 tokens, each 256 after the one before",
        r"| Parses \| compiles | 93 % |", "![loss](loss.png)", "- It knows only Python.\n- Small.",
    ],
)  # fmt: skip
def test_every_fact_is_said(said: str) -> None:
    assert said in model_card(FULL)


def test_unknown_facts_have_no_row() -> None:
    least, full = model_card(LEAST), model_card(FULL)
    gone = {
        "Weights stored as", "Start", "FLOPs", "Hours", "Machine", "Model FLOPs utilization", "Made by",
        "Bits per byte",        "Perplexity per token", "Scored", "Context and stride", r"Parses \| compiles",
    }  # fmt: skip
    assert rows(full).keys() - rows(least).keys() == gone
    for word in ("None", "## Evaluation", "## Limits", "loss.png", "transformers", "±", "nan"):
        assert word not in least
    assert "None" not in full
    alone = replace(LEAST, manifest=replace(MANIFEST, entries=MANIFEST.entries[:1], skipped={}, num_cut=0))
    assert not rows(model_card(alone)).keys() & {"Held-out texts", "Split", "Left out"}
    once = replace(FULL, bits_per_byte_error=None, perplexity_error=None)
    assert rows(model_card(once))["Bits per byte"] == "0.71234"


def test_a_table_is_a_table() -> None:
    """A value with line breaks and bars stays in its cell, and a summary stays before the first heading."""
    odd = replace(FULL, machine="a\n| b | c |\n## d", limits=("one\n# two",), summary="x\n---\ny")
    card = model_card(odd)
    assert r"| Machine | a \| b \| c \| ## d |" in card
    assert re.findall(r"^#+ .*", card, re.M) == [
        "# tiny-py", "## Usage", "## Architecture", "## Data", "## Training", "## Evaluation", "## Limits",
    ]  # fmt: skip


def test_no_paths_of_this_machine() -> None:
    assert not re.search(r"(?<![\w./:-])/\w", model_card(FULL))


def test_layers_that_differ_are_all_named() -> None:
    other = replace(MIXER, num_heads=6, num_kv_heads=6)
    layers = (*SPEC.layers[:2], Layer(other, MoE(8, 2, 700), NORM))
    card = rows(model_card(replace(LEAST, spec=replace(SPEC, layers=layers))))
    assert card["Query heads / KV heads"] == "12 / 3 of 32; 6 / 6 of 32"
    assert card["MLP size"] == "1,056; 700 in each of 8 experts, 2 used per token"
    assert card["Parameters used per token"] != card["Parameters"]


def test_the_usage_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the examples of the card: both programs continue the prompt with the same text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = train_bpe(["def f(x):\n    return x\n" * 4], 280)
    config = LlamaConfig(
        vocab_size=280, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)  # other weights may end the text at once
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tiny-py")
    save_tokenizer(tokenizer, tmp_path / "tiny-py")
    monkeypatch.chdir(tmp_path)
    ours, theirs = re.findall(r"```python\n(.*?)```", model_card(FULL), re.S)
    capsys.readouterr()
    exec(ours, {})
    continued = capsys.readouterr().out
    exec(theirs, {})
    assert continued.strip()
    assert capsys.readouterr().out == "def " + continued
