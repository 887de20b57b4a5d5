"""A description that a user gives (`--spec FILE`): a model's layers, and the names of its weights in a checkpoint."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
import typer
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

from oracle.build import build
from oracle.case import greedy_prompt, prompts
from oracle.families import CASES
from ridgeline import LLM, SamplingParams
from ridgeline.archs import family_of, spec_from_config
from ridgeline.archs.table import check_table, table_from_json, table_to_json
from ridgeline.cli.main import app
from ridgeline.errors import ConfigError, RidgelineError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.described import described
from ridgeline.load.hub import BUILT_IN
from ridgeline.spec import to_json

WEIGHTS = "model.safetensors"
# Each layout of tensors at least once: plain names, rows of fused matrices, [in, out], parts of heads, groups of rows,
# a tensor for each expert, parts of a tensor with all experts, experts below each other, other axes, several kinds.
LAYOUTS = ("llama_gqa", "phi3", "gpt2", "gpt_neox", "qwen3_next", "qwen3_moe", "gpt_oss", "granitemoe", "jamba", "dbrx")


def own_description(folder: Path) -> dict[str, Any]:
    """Return the description of a checkpoint of a known family, in the words of a user."""
    checkpoint = open_checkpoint(folder)
    names = checkpoint.family.names.fitting(checkpoint.spec, set(load_file(folder / WEIGHTS)))
    return {"spec": to_json(checkpoint.spec), "names": table_to_json(names, checkpoint.spec)}


def make_unknown(folder: Path) -> None:
    """Give a checkpoint a config.json that no family reads."""
    path = folder / "config.json"
    kept = {name: value for name, value in json.loads(path.read_text()).items() if name.endswith("_token_id")}
    path.write_text(json.dumps({"model_type": "unheard-of", "layers_of_it": 4, **kept}))


def written(description: dict[str, Any], path: Path) -> str:
    path.write_text(json.dumps(description))
    return str(path)


def answers(llm: LLM, name: str) -> tuple[list[np.ndarray], list[int]]:
    """Return the logits of a case's sequences, and 16 greedy tokens."""
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    (output,) = llm.generate([greedy_prompt(CASES[name])], params)
    return llm.logits(prompts(CASES[name])), list(output.outputs[0].token_ids)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_description_gives_the_bits_of_the_built_in_family(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build(CASES[name], folder)
    logits, tokens = answers(LLM(str(folder), max_model_len=256), name)
    file = written(own_description(folder), tmp_path / "spec.json")
    make_unknown(folder)
    with pytest.raises(ConfigError, match="unheard-of"):
        LLM(str(folder))
    llm = LLM(str(folder), spec=file, max_model_len=256)
    assert llm.loaded.eos_token_ids == {2}  # from the checkpoint's own config.json
    own_logits, own_tokens = answers(llm, name)
    assert tokens == own_tokens
    assert all(np.array_equal(a, b) for a, b in zip(logits, own_logits, strict=True))


def test_the_tables_of_all_families_are_read_as_they_are_written() -> None:
    """Nothing of `archs/names.py` is lost in JSON, and each family's table passes the checks of a user's."""
    for name in {case.model_type: name for name, case in CASES.items()}.values():
        case = CASES[name]
        kwargs = copy.deepcopy(case.kwargs)
        config = json.loads(getattr(transformers, case.config_class)(**kwargs).to_json_string(use_diff=False))
        spec = spec_from_config(config)
        for names in (family_of(config).names, *family_of(config).names.others):
            table = table_from_json(json.loads(json.dumps(table_to_json(names, spec))))
            check_table(table, spec)
            assert table.reads(spec) == names.reads(spec), name


# ---- one small checkpoint ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("described") / "llama"
    build(CASES["llama_gqa"], folder)
    return folder


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    """Return a copy of a small checkpoint whose architecture nobody knows."""
    folder = tmp_path / "unknown"
    folder.mkdir()
    for name in ("config.json", WEIGHTS):
        (folder / name).write_bytes((llama / name).read_bytes())
    make_unknown(folder)
    return folder


@pytest.fixture
def description(llama: Path) -> dict[str, Any]:
    return own_description(llama)


def rename(folder: Path, to: Callable[[str], str]) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({to(name): array for name, array in tensors.items()}, folder / WEIGHTS)


def test_some_layers_have_names_of_their_own(
    llama: Path, model: Path, description: dict[str, Any], tmp_path: Path
) -> None:
    def to(name: str) -> str:
        name = name.replace("model.layers.0.", "first.").replace("model.layers.2.self_attn.q_proj", "blocks.2.wq")
        return name.replace("model.layers.2.", "blocks.2.")

    rename(model, to)
    description["names"]["some_layers"] = [
        {"layers": [0], "parts": {
            part: {"type": "Elsewhere", "name": f"first.{name}.weight"}
            for part, name in description["names"]["parts"].items()
        }},
        {"layers": [2], "layer": "blocks.{i}.", "parts": {"mixer.q": "wq"}},
    ]  # fmt: skip
    llm = LLM(str(model), spec=written(description, tmp_path / "spec.json"), max_model_len=256)
    for a, b in zip(llm.logits([[5, 6, 7]]), LLM(str(llama), max_model_len=256).logits([[5, 6, 7]]), strict=True):
        assert np.array_equal(a, b)


def test_tensors_that_a_model_does_not_use_are_listed(model: Path, description: dict[str, Any], tmp_path: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    save_file({**tensors, "vision.tower.weight": np.ones((2, 2), np.float32)}, model / WEIGHTS)
    file = written(description, tmp_path / "spec.json")
    with pytest.raises(RidgelineError, match=r"has vision\.tower\.weight, .*list it under ignore"):
        LLM(str(model), spec=file)
    description["names"]["ignore"] = ["vision.*"]
    LLM(str(model), spec=written(description, tmp_path / "spec.json"))


def test_a_description_may_be_the_folders_own_config(model: Path, description: dict[str, Any]) -> None:
    """So a described model can be a draft model or a student, and needs no option."""
    (model / "config.json").write_text(json.dumps({"model_type": "ridgeline", **description}))
    assert LLM(str(model), max_model_len=64).logits([[3]])[0].shape == (1, CASES["llama_gqa"].kwargs["vocab_size"])


def test_the_same_description_is_the_same_folder(model: Path, description: dict[str, Any], tmp_path: Path) -> None:
    file = written(description, tmp_path / "spec.json")
    first = described(str(model), file)
    assert described(str(model), file) == first and first.name == "unknown"
    assert (first / WEIGHTS).samefile(model / WEIGHTS)
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    assert (described(str(model), file) / "generation_config.json").exists()


# ---- commands ----------------------------------------------------------------------------------------


def test_every_command_that_takes_a_model_takes_a_description() -> None:
    """bench serve measures a server, lab has models of its own, train and distill make models."""
    without = {"bench serve", "lab", "train", "distill", "calibrate", "doctor", "man", "bench"}
    found = {}

    def visit(group: Any, prefix: str = "") -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                visit(command, f"{name} ")
            else:
                found[prefix + name] = {option for p in command.params for option in p.opts}

    visit(typer.main.get_command(app))
    assert {name for name, options in found.items() if "--spec" not in options} <= without
    assert len([name for name, options in found.items() if "--spec" in options and name not in without]) >= 19


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_commands_read_a_description(model: Path, description: dict[str, Any], tmp_path: Path) -> None:
    file, out = written(description, tmp_path / "spec.json"), tmp_path / "quantized"
    report = json.loads(run("inspect", str(model), "--spec", file, "--json").stdout)
    assert report["names"] == description["names"] and report["spec"] == description["spec"]
    run("quantize", str(model), "--spec", file, "--scheme", "rtn-int8", "--out", str(out))
    assert LLM(str(out), max_model_len=64).logits([[3, 4]])[0].shape[0] == 2  # it carries its description
    refused = run("plan", str(model), "--spec", str(tmp_path / "absent.json")).exception
    assert isinstance(refused, RidgelineError) and "--spec" in str(refused)


# ---- bad descriptions --------------------------------------------------------------------------------


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of the field at a path whose parts are separated by spaces."""

    def change(description: dict[str, Any]) -> None:
        *parents, last = path.split()
        for name in parents:
            description = description[name]
        description[last] = value

    return change


def drop(path: str) -> Callable[[dict[str, Any]], None]:
    def change(description: dict[str, Any]) -> None:
        *parents, last = path.split()
        for name in parents:
            description = description[name]
        del description[last]

    return change


Q = "names parts mixer.q"
FUSED = {"type": "FusedRows", "module": "self_attn.q_proj", "names": ["mixer.q"]}
BAD: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no spec": (drop("spec"), 'a model spec is an object with "layers"'),
    "an unknown field": (put("nmaes", {}), "nmaes"),
    "an unknown field of names": (put("names rot", {}), "names has the unknown field 'rot'; it may have root, layer"),
    "an unknown field of the spec": (put("spec colour", 1), "spec: ModelSpec has no field colour"),
    "names that are a list": (put("names", []), r"names is \[\]; it must be an object with root"),
    "parts that are a text": (put("names parts", "x"), "names.parts is 'x'; it must be an object from our names"),
    "a weight without a name": (drop(Q), r"no name for layers.0.mixer.q.weight of shape .*; add 'mixer.q' to"),
    "a name of no weight": (put("names parts mixer.qq", "x"), "names.parts.mixer.qq: the spec has no such weight; did"),
    "an unknown root": (put("names root hed", "x"), "names.root.hed: the spec has no such weight; did you mean head?"),
    "a number": (put(Q, 7), "names.parts.mixer.q: 7 is not str"),
    "a kind that is not there": (put(Q, {"type": "Rows"}), "names.parts.mixer.q: type 'Rows' is none of FusedRows, "),
    "a kind without a field": (put(Q, {"type": "Each"}), "names.parts.mixer.q: Each needs module"),
    "rows without themselves": (put(Q, {**FUSED, "names": ["mixer.k"]}), "names must contain 'mixer.q' itself"),
    "rows that are not there": (put(Q, {**FUSED, "names": ["mixer.q", "mixer.z"]}), "weight layers.0.mixer.z.weight"),
    "a part of no head": (
        put(Q, {"type": "HeadPart", "module": "x", "index": 3, "count": 3}), "index 3 must be at least 0 and less than",
    ),
    "heads of an mlp": (
        put("names parts mlp.up", {"type": "HeadPart", "module": "x", "index": 0, "count": 1}), "only attention has",
    ),
    "no groups": (put(Q, {"type": "Groups", "module": "x", "names": ["mixer.q"], "count": 0}), "count is 0; it must"),
    "odd groups": (
        put(Q, {"type": "Groups", "module": "x", "names": ["mixer.q"], "count": 7}), "cannot be cut into 7 equal",
    ),
    "one matrix of experts": (put(Q, {"type": "ExpertRows", "name": "w"}), "no axis of experts"),
    "experts of a norm": (put("names parts mlp_norm", {"type": "Each", "module": "x.{e}"}), "no axis of experts"),
    "one tensor for two": (put(Q, "self_attn.k_proj"), "is given to both layers.0.mixer.q.weight and layers.0.mixer.k"),
    "braces": (put(Q, "a.{e.__class__}"), "braces are not allowed here"),
    "a wide number": (put("names layer", "model.{i}.{i:999999999}"), r"only \{i\} may be in braces"),
    "a prefix without a number": (put("names layer", "model."), r"must contain \{i\}"),
    "no prefix": (drop("names layer"), "names.layer is missing; give the prefix"),
    "a long name": (put(Q, "x" * 401), "it must be a text of at most 400 characters"),
    "many axes": (put(Q, {"type": "Tensor", "name": "x", "axes": [9, 0]}), "each number must be from 0 to 4"),
    "three axes": (put(Q, {"type": "Tensor", "name": "x", "axes": [0, 0, 0]}), r"axes: \[0, 0, 0\] is not tuple"),
    "transposed of nothing": (put("names transposed", ["nobody"]), "names.transposed: no entry reads 'nobody'"),
    "ignore that is a text": (put("names ignore", "x"), "names.ignore is 'x'; it must be a list of texts"),
    "layers that are not there": (put("names some_layers", [{"layers": [99], "parts": {}}]), "99 is no layer; the"),
    "layers without a change": (put("names some_layers", [{"layers": [1], "parts": {}}]), "changes nothing in layer 1"),
    "negative layers": (put("names some_layers", [{"layers": [-1]}]), "must be a list of numbers of layers, from 0"),
    "too many layers": (
        lambda d: d["spec"]["layers"].extend([{**d["spec"]["layers"][0], "count": 9999}] * 3), "more than 10000 layers",
    ),
    "another size": (put("spec hidden_size", 128), "has shape .* correct the sizes in spec, or names"),
    "a name that the checkpoint lacks": (
        put(Q, "self_attn.query"), r"lacks model.layers.0.self_attn.query.weight.*correct the name of layers.0.mixer.q",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_description_is_one_line(name: str, model: Path, description: dict[str, Any], tmp_path: Path) -> None:
    change, message = BAD[name]
    change(description)
    with pytest.raises(RidgelineError, match=message) as caught:
        LLM(str(model), spec=written(description, tmp_path / "spec.json"), max_model_len=64)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600
    if isinstance(caught.value, ConfigError):
        assert text.startswith("spec.json: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000 + "]" * 100_000, "is unreadable"),
        ('{"a":' * 50_000 + "1" + "}" * 50_000, "is unreadable"),
        ("[]", "holds no JSON object"),
        ('{"spec": ' + "9" * 5000 + "}", "is unreadable"),
        ('{"spec": "' + "x" * (4 << 20) + '"}', "the limit for such a file is"),
        ("\x00", "is unreadable"),
    ],
)
def test_a_hostile_file_is_one_line(text: str, message: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(text)
    with pytest.raises(RidgelineError, match=message) as caught:
        described(str(model), tmp_path / "spec.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_read(model: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "spec.json")
    with pytest.raises(RidgelineError, match="is a pipe"):
        described(str(model), tmp_path / "spec.json")


def test_a_gguf_file_describes_itself(description: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(RidgelineError, match=r"leave out spec \(--spec\)"):
        described(str(tmp_path / "model.gguf"), written(description, tmp_path / "spec.json"))


def test_a_cache_that_cannot_be_written_is_named(
    description: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(RidgelineError, match="set XDG_CACHE_HOME to a folder that can"):
        described(str(BUILT_IN["pocket"]), written(description, tmp_path / "spec.json"))
