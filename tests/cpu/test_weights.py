"""Models whose matrices are quantized at load: their results, memory and accuracy cost, and the messages about it."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pytest

from oracle.build import build
from oracle.families import CASES
from oracle.ours import SPECS, random_weights
from ridgeline.errors import CheckpointError, RequestError
from ridgeline.evals import encode_texts, measure_divergence, price
from ridgeline.evals.documents import Text
from ridgeline.llm import LLM
from ridgeline.nn import Model, PassingModel, binding, model
from ridgeline.ops import OpsTable, open_table
from ridgeline.ops.host.backend import NumpyBackend
from ridgeline.quant import store
from ridgeline.runtime.load import LoadOptions, load_model, pass_model
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import ModelSpec
from ridgeline.spec.footprint import footprint
from ridgeline.spec.quant import (
    ACTIVATIONS,
    FORMATS,
    NUMBERS,
    PLAIN,
    Format,
    FormatTable,
    NumberType,
    Offsets,
    format_of,
)
from ridgeline.verify import verify
from shares import daily

SHARED = Path(__file__).parents[3] / "shared" / "data"
ROUNDED = {name: format for name, format in FORMATS.items() if format.is_lossy}
# Models with every kind of matrix: dense, experts (gated and not, shared ones), latents, every recurrent mixer.
FAMILIES = ["llama", "gpt2", "qwen3_moe", "nemotron_h_moe", "deepseek_v2", "mamba", "mamba2", "qwen3_next", "lfm2_moe"]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Return folders of tiny models of transformers, each built at its first use."""

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = path = tmp_path_factory.mktemp(name)
            build(CASES[name], path)
            return path

    return Folders()


class Defined:
    """Replaces `quant.store` by the definition of the products: in float64 between the roundings."""

    def __init__(self, rounds_tokens: bool) -> None:
        self.count, self._rounds = 0, rounds_tokens

    def __call__(self, weight: Any, bias: Any, table: OpsTable, format: Format, low_rank: None = None) -> Any:
        rounded = store(weight, bias, table, format)
        if format == PLAIN:
            return rounded
        self.count += 1
        rounded.prepare()
        matrix = np.asarray(rounded.dequantize(), np.float64)

        def apply(x: np.ndarray) -> np.ndarray:
            wide = x.astype(np.float64)
            if self._rounds and format.activations == "bf16":
                wide = x.astype(ml_dtypes.bfloat16).astype(np.float64)
            elif self._rounds:
                step = np.abs(wide).max(-1, keepdims=True) / 127
                wide = np.rint(wide / step) * step
            return (wide @ matrix.T + (0 if bias is None else bias)).astype(np.float32)

        return SimpleNamespace(apply=apply, prepare=lambda: None)


def logits(spec: ModelSpec, weights: Any, table: OpsTable, format: Format, kind: type[Model] = Model) -> np.ndarray:
    model = kind(spec, weights, table, 64, FormatTable(format))
    return table.memory.get(model(DenseStep.build(PROMPTS, table.memory)))


def replace_store(monkeypatch: pytest.MonkeyPatch, defined: Defined) -> None:
    """Replace `quant.store` where layers and heads are built."""
    for module in (binding, model):
        monkeypatch.setattr(module, "store", defined)


@pytest.mark.parametrize(
    ("scheme", "name"),
    # Numbers of bf16 are close to a boundary more often; in a recurrent layer one that moves reaches all later tokens.
    [*product(["int8", "int4"], FAMILIES), *product(["bf16"], ["llama", "gpt2", "qwen3_moe", "deepseek_v2"])],
)
def test_it_is_the_model_with_rounded_matrices_and_tokens(
    scheme: str, name: str, folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with the model in which every matrix is replaced by its quantized values and every token is quantized by
    definition. With the scheme bf16, tokens alone are rounded, to bfloat16.

    The remaining difference is float32's own rounding. If that moves a number across a rounding boundary, one element
    changes by one step of 127, or by 2^-8 of itself. So most logits are as close as in float32, and the largest
    difference is a few such steps. Compared with tokens that are not quantized, each product differs by sqrt(1/12) of a
    step per element, and logits by that times the root of the number of matrices in sequence, times a few, because
    recurrent layers carry an error forward.
    """
    loaded = load_model(str(folders[name]), LoadOptions(device="cpu"))
    format = format_of("auto", "bf16") if scheme == "bf16" else FORMATS[scheme]
    spec, weights = loaded.spec, loaded.model.weights
    numpy = OpsTable(loaded.table.memory, (NumpyBackend(),))
    found = [logits(spec, weights, table, format) for table in (loaded.table, numpy)]
    exact, rounded = Defined(rounds_tokens=False), Defined(rounds_tokens=True)
    replace_store(monkeypatch, rounded)
    wanted = logits(spec, weights, numpy, format)
    replace_store(monkeypatch, exact)
    without = logits(spec, weights, numpy, format)
    assert rounded.count == exact.count > 2 * len(spec.layers)
    size = float(np.std(wanted))
    for got in found:
        away = np.abs(got - wanted) / size
        assert np.median(away) < 1e-5
        assert away.max() < 0.1
        assert 0 < float(np.std(got - without)) < 0.2 * size


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "mamba"])
@pytest.mark.parametrize("scheme", FORMATS)
def test_a_pass_that_keeps_no_layer_is_the_same(name: str, scheme: str, folders: Mapping[str, Path]) -> None:
    loaded = load_model(str(folders[name]), LoadOptions(device="cpu"))
    args = loaded.spec, loaded.model.weights, loaded.table, FORMATS[scheme]
    assert np.array_equal(logits(*args), logits(*args, PassingModel))


# ---- the promise of exactness ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ROUNDED)
def test_a_token_has_the_same_bits_in_any_batch(scheme: str, folders: Mapping[str, Path]) -> None:
    """The token has equal bits in a whole prompt, in a batch of two, and alone."""
    loaded = load_model(str(folders["llama"]), LoadOptions(device="cpu", weights=scheme))
    memory = loaded.table.memory
    together = memory.get(loaded.model(DenseStep.build(PROMPTS, memory)))
    alone = [memory.get(loaded.model(DenseStep.build([ids], memory))) for ids in PROMPTS]
    assert np.array_equal(together, np.concatenate(alone))
    first = memory.get(loaded.model(DenseStep.build([PROMPTS[0][:5]], memory)))
    assert np.array_equal(together[:5], first)


@pytest.mark.parametrize(
    ("name", "scheme"),
    daily(product(("llama", "qwen3_moe", "mamba2"), ("int8", "int4")), {("qwen3_moe", "int8"), ("llama", "int4")}),
)
def test_the_whole_matrix_of_exactness_is_equal(name: str, scheme: str, folders: Mapping[str, Path]) -> None:
    llm = LLM(str(folders[name]), cache="off", device="cpu", weights=scheme, skip_tokenizer_init=True)
    report = verify(llm.loaded, None, seed=0)
    assert report.equal and report.complete, [d.describe() for r in report.results for d in r.differences]
    assert {r.verdict for r in report.results} <= {"equal", "not run"}


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FAMILIES, "gemma2"])
@pytest.mark.parametrize("scheme", FORMATS)
def test_bytes_are_counted_as_kernels_allocate_them(
    name: str, scheme: str, folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
    from ridgeline.ops.cpu import coded, matrices

    made = []

    def record(*args: Any, **options: Any) -> Any:
        made.append(kernels.Matrix(*args, **options))
        return made[-1]

    for module in (coded, matrices):
        monkeypatch.setattr(module, "Matrix", record)
    loaded = load_model(str(folders[name]), LoadOptions(device="cpu", weights=scheme))
    memory = loaded.table.memory
    loaded.model(DenseStep.build(PROMPTS, memory))  # some matrices of latent attention are made at their first use
    counted = footprint(loaded.spec, FormatTable(FORMATS[scheme]), "float32", packs=True)
    assert counted.products == sum(matrix.nbytes for matrix in made)
    assert counted.total == loaded.weight_bytes
    without = open_table("reference")
    held = footprint(loaded.spec, FormatTable(FORMATS[scheme]), "float32", packs=False)
    plain = sum(w.num_params * 4 for w in loaded.spec.weights())
    assert held.total == plain if scheme == "auto" else held.total < plain or name != "llama"
    assert without.memory.on_host


def test_nothing_is_held_twice(folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the kernels' copies, no drawn matrix is kept; at most those of one layer exist at a time."""
    from ridgeline.ops.host.memory import NumpyMemory

    alive: dict[int, tuple[int, ...]] = {}
    most, draw = 0, NumpyMemory.random

    def follow(*args: Any) -> Any:
        nonlocal most
        array = draw(*args)
        owner = array if array.base is None else array.base  # views of it keep it alive
        alive[id(owner)] = args[1]
        weakref.finalize(owner, alive.pop, id(owner))
        most = max(most, sum(4 * math.prod(shape) for shape in alive.values()))
        return array

    monkeypatch.setattr(NumpyMemory, "random", follow)
    loaded = load_model(str(folders["llama"]), LoadOptions(device="cpu", load_format="dummy", weights="int8"))
    embed, *_ = (w for w in loaded.spec.weights() if w.name == "embed.weight")
    layer = sum(w.num_params for w in loaded.spec.layers[0].weights(loaded.spec.hidden_size) if w.is_matrix)
    assert list(alive.values()) == [embed.shape]
    assert most <= 4 * (embed.num_params + max(2 * layer, embed.num_params))


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="this system does not report resident memory")
@pytest.mark.parametrize("scheme", ["auto", "int8"])
def test_packed_matrices_free_their_pages_of_the_file(scheme: str) -> None:
    pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
    loaded = load_model("pocket", LoadOptions(device="cpu", weights=scheme))
    file = str(loaded.checkpoint.folder / "model.safetensors")
    found = Path("/proc/self/smaps").read_text().split(file)[1].splitlines()
    size, resident = (int(next(x for x in found if x.startswith(f"{key}:")).split()[1]) for key in ("Size", "Rss"))
    assert size > 6000 and resident < size / 10


# ---- the price -------------------------------------------------------------------------------------------------------


def models() -> list[str]:
    found = [str(SHARED / "models" / name) for name in ("stories260K", "babyllama105")]
    return ["pocket", *(path for path in found if Path(path).exists())]


@pytest.mark.parametrize("model", models(), ids=lambda path: Path(path).name)
def test_the_price_falls_with_bits_and_with_smaller_groups(model: str) -> None:
    """The whole sample text is measured with both models in memory."""
    llms = {name: LLM(model, device="cpu", weights=name, max_model_len=256) for name in ("auto", *ROUNDED)}
    text = price.SAMPLE.read_text()
    plain = llms["auto"]
    assert plain.tokenizer is not None
    documents = encode_texts([Text("sample", text)], plain.tokenizer)
    found = {name: measure_divergence(plain.loaded, llms[name].loaded, documents) for name in ROUNDED}
    kl = {name: d.kl.value for name, d in found.items()}
    assert 0 < kl["int8"] < kl["int4"] < kl["int4-128"] < 0.5
    assert found["int8"].top1_agreement.value > found["int4"].top1_agreement.value > 0.6
    assert abs(found["int8"].nll_difference.value) < 0.02
    for name in ROUNDED:
        (note,) = (n for n in llms[name].loaded.notes if "KL" in n)
        assert note.startswith(f"weights in {name}: KL to the stored model is ")


@pytest.mark.parametrize(("options", "kind"), [({"weights": "int8"}, "int8"), ({"activations": "bf16"}, "bf16")])
def test_the_price_equals_a_measurement_side_by_side(options: dict[str, Any], kind: str) -> None:
    """The price of weights and activations is measured with state in float32."""
    said: list[str] = []
    exact: dict[str, Any] = {"device": "cpu", "max_model_len": 512, "kv_cache_dtype": "float32"}
    llm, plain = LLM("pocket", **options, on_wait=said.append, **exact), LLM("pocket", **exact)
    assert llm.tokenizer is not None
    documents = encode_texts([Text("sample", price.SAMPLE.read_text())], llm.tokenizer, price.MAX_TOKENS)
    wanted = measure_divergence(plain.loaded, llm.loaded, documents)
    (note,) = (n for n in llm.loaded.notes if "KL" in n)
    assert note.startswith(f"{next(iter(options))} in {kind}: ")
    assert f"{wanted.kl.value:.2g} nats per token" in note
    assert f"{wanted.top1_agreement.value:.1%} of 256 tokens" in note
    assert said == [f"{kind} on pocket: measuring the accuracy cost on a sample text, once"]


def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said: list[str] = []

    def note(**options: Any) -> str:
        llm = LLM("pocket-draft", device="cpu", max_model_len=512, on_wait=said.append, **options)
        return llm.loaded.notes[-1]

    first = note(weights="int8")
    (kept,) = (tmp_path / "ridgeline" / "prices").iterdir()
    assert note(weights="int8") == first and len(said) == 1
    assert note(weights="int4") != first and len(said) == 2
    for damage in ("", "{}", '{"kl": 1}', "[1]"):
        kept.write_text(damage)
        assert note(weights="int8") == first
    assert len(said) == 6
    assert json.loads(kept.read_text())["num_tokens"] == 256
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")  # no folder can be created there
    assert note(weights="int8") == first and note(weights="int8") == first
    assert len(said) == 8


def test_where_there_is_no_price_it_says_why(folders: Mapping[str, Path]) -> None:
    folder = str(folders["llama"])
    note = LLM(folder, device="cpu", weights="int8", skip_tokenizer_init=True).loaded.notes[-1]
    assert note == "weights in int8: the accuracy cost is not known: there is no tokenizer for the sample text"
    note = LLM(folder, device="cpu", weights="int4", load_format="dummy", skip_tokenizer_init=True).loaded.notes[-1]
    assert note == "weights in int4: the accuracy cost is not known: the weights are random"
    assert LLM(folder, device="cpu", skip_tokenizer_init=True).loaded.notes == ()


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int9", "", "INT8", "int4-64-64", "int4-0", "q8_0", "int4-asym-min"])
def test_an_unknown_scheme_is_one_clear_error(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        LLM("pocket", device="cpu", weights=name)
    assert str(caught.value) == (
        f"weights (--weights) {name!r} is not known; known are {', '.join(FORMATS)}, each with -GROUP, -asym or "
        "-exact behind it, such as int4-128-asym"
    )


@pytest.mark.parametrize("name", ["fp8-asym", "fp8-int8", "nf4-outliers"])
def test_parts_of_a_format_that_exclude_each_other_are_refused(name: str) -> None:
    with pytest.raises(RequestError, match=r"leave out -asym|take exact activations"):
        format_of(name)


@pytest.mark.parametrize("group", [0, 16, 32, 128])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_every_format_has_one_name(numbers: NumberType, group: int) -> None:
    """A format is written into JSON as its name, and read from it."""
    for rows, offsets, activations in itertools.product((0, 1, 64), get_args(Offsets), ACTIVATIONS):
        format = Format(numbers, group, rows, offsets, activations)
        levels = bool(NUMBERS[numbers].levels)
        if (rows == 0 and group) or (rows > 1 and not group) or (levels and offsets == "zero_points"):
            continue
        if not (levels and activations in ("int8", "outliers")):
            assert format_of(format.name) == format
            table = FormatTable(format, {"layers.0.mixer.q.weight": PLAIN, "head.weight": format})
            assert FormatTable.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_plain_matrices_take_activations_in_bf16_or_exactly() -> None:
    """Other ways are for the codes that a checkpoint may have. The name is read from JSON, and is none of --weights."""
    brain = format_of("auto", "bf16")
    assert (brain.name, brain.is_lossy, format_of("auto", "int8"), PLAIN.name) == ("plain-bf16", False, PLAIN, "plain")
    table = FormatTable(brain, {"head.weight": PLAIN, "layers.0.mlp.up.weight": format_of("int4", "bf16")})
    assert FormatTable.from_json(json.loads(json.dumps(table.to_json()))) == table
    with pytest.raises(RequestError, match="'plain-bf16' is not known"):
        format_of("plain-bf16")


def test_activations_that_need_codes_are_refused_without_them(folders: Mapping[str, Path]) -> None:
    options = LoadOptions(device="cpu", activations="int8")
    with pytest.raises(RequestError, match=r"activations .* int8: the weights are not quantized; take bf16"):
        load_model(str(folders["llama"]), options)
    loaded = load_model(str(folders["llama"]), replace(options, activations="bf16"))
    assert loaded.model.formats.default == format_of("auto", "bf16")


def test_the_command_line_says_so_in_one_line() -> None:
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "ridgeline", *args], capture_output=True, text=True, check=False)

    found = run("generate", "x", "--weights", "int9")
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    assert "known are auto, int8, int4, int4-128, int4-asym" in found.stderr
    report = json.loads(run("inspect", "pocket", "--weights", "int4", "--json").stdout)
    loaded = load_model("pocket", LoadOptions(device="cpu", weights="int4"))
    assert (report["weight_format"], report["weight_bytes"]) == ("int4", loaded.weight_bytes)


def test_a_matrix_that_cannot_be_rounded_is_named() -> None:
    name = next(iter(SPECS))
    spec, weights = SPECS[name], random_weights(SPECS[name])
    matrix = next(w for w in spec.weights() if w.name.startswith("layers.1.") and len(w.shape) == 2)
    assert matrix.may_be_rounded
    weights[matrix.name][0, 0] = np.inf
    with pytest.raises(CheckpointError, match=r"^layer 1: a weight is not finite, or too large for int8$"):
        Model(spec, weights, open_table("cpu"), 64, FormatTable(FORMATS["int8"]))


def test_other_devices_compute_it_too(folders: Mapping[str, Path]) -> None:
    found = [
        LLM(str(folders["llama"]), device=device, weights="int8", skip_tokenizer_init=True).logits(PROMPTS)
        for device in ("cpu", "reference")
    ]
    for one, other in zip(*found, strict=True):
        assert float(np.std(one - other)) < 0.05 * float(np.std(other))


def test_a_passing_model_is_not_refused_for_its_size(
    folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ridgeline.ops.host.memory import NumpyMemory

    monkeypatch.setattr(NumpyMemory, "free_bytes", lambda self: 1000)
    options = LoadOptions(device="cpu")
    assert pass_model(str(folders["llama"]), options).spec
    with pytest.raises(Exception, match="--weights int8 or int4"):
        load_model(str(folders["llama"]), replace(options, weights="int8"))
