"""Machines, links and models by name: every figure has a source, and an unknown name gets the nearest ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from published import PUBLISHED
from typer.testing import CliRunner

from ridgeline.archs import spec_from_config
from ridgeline.catalog.machines import hardware, link, machines
from ridgeline.catalog.models import find_model, published
from ridgeline.cli.main import app
from ridgeline.errors import CheckpointError, ConfigError, RequestError, RidgelineError
from ridgeline.spec import to_json
from ridgeline.spec.hardware import HardwareSpec, Link


@pytest.mark.parametrize("machine", machines(), ids=lambda m: m.name)
def test_every_figure_has_a_source(machine: HardwareSpec) -> None:
    wanted = {"memory", "bandwidth", "operations"} | ({"link"} if machine.link else set())
    assert set(machine.sources) == wanted
    assert all(len(text) > 5 for text in machine.sources.values())
    assert hardware(machine.name.upper()) is machine


def test_machines_have_the_ridges_that_others_state() -> None:
    """CS336 and "How to Scale Your Model": 295 for the H100, 240 for the v5e in bfloat16; int8 doubles the latter."""
    assert round(hardware("h100").ridge("bfloat16")) == 295
    assert round(hardware("v5e").ridge("bfloat16")) == pytest.approx(240, abs=1)
    assert hardware("v5e").ridge("int8") == pytest.approx(2 * hardware("v5e").ridge("bfloat16"), rel=0.01)


def test_a_type_without_a_unit_is_computed_in_the_next_wider() -> None:
    a100 = hardware("a100")
    assert (a100.unit("fp8"), a100.unit("int4"), a100.unit("mxfp4")) == ("bfloat16", "int8", "bfloat16")
    assert hardware("m3-max").peak("int8") == hardware("m3-max").peak("bfloat16")
    assert hardware("cpu-server").unit("bfloat16") == "float32"


def test_unknown_names_have_the_nearest_as_remedy() -> None:
    with pytest.raises(RequestError, match=r"unknown hardware 'h10'; did you mean .*h100"):
        hardware("h10")
    with pytest.raises(RequestError, match=r"unknown link 'nvlink'; did you mean nvlink"):
        link("nvlink")
    for wrong in ("mistal-7b", "nosuchmodel", "zzzzzz"):
        with pytest.raises(RequestError, match=rf"unknown model '{wrong}'") as caught:
            find_model(wrong)
        (names,) = re.findall(r"did you mean (.*)\?", str(caught.value))
        five = re.split(", | or ", names)
        assert len({find_model(name).name for name in five}) == len(five) == 5  # five different models
        assert wrong != "mistal-7b" or five[0] == "mistral-7b"
    with pytest.raises(RequestError, match="did you mean"):
        hardware("zzzzzz")


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-has-this-name/x", "a\0b"])
@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_a_name_that_no_file_can_have(command: str, name: str) -> None:
    """The system raised an error for it, and the command ended with a traceback."""
    result = CliRunner().invoke(app, [command, name])
    assert isinstance(result.exception, RidgelineError | SystemExit)
    assert len(str(result.exception)) < 600


@pytest.mark.parametrize("build", [
    lambda: HardwareSpec("x", 0, 1.0, {"float32": 1.0}), lambda: HardwareSpec("x", 1, float("nan"), {"float32": 1.0}),
    lambda: HardwareSpec("x", 1, 1.0, {}), lambda: HardwareSpec("x", 1, 1.0, {"float32": -1.0}),
    lambda: HardwareSpec("x", 1, 1.0, {"float32": 1.0}, op_overhead_s=-1.0), lambda: Link("x", 0.0, 1.0),
    lambda: Link("x", 1.0, -1.0),
])  # fmt: skip
def test_machines_refuse_invalid_values(build: object) -> None:
    with pytest.raises(ValueError, match="x: "):
        build()  # type: ignore[operator]


@pytest.mark.parametrize(("name", "wanted"), [
    ("mistral-7b", "mistralai/Mistral-7B-v0.1"), ("MISTRALAI/mistral-7b-V0.1", "mistralai/Mistral-7B-v0.1"),
    ("meta-llama/Llama-2-13b", "meta-llama/Llama-2-13b-hf"), ("Llama-2-13b", "meta-llama/Llama-2-13b-hf"),
    ("deepseek-v3", "deepseek-ai/DeepSeek-V3"), ("gpt2", "openai-community/gpt2"), ("jamba", "ai21labs/Jamba-v0.1"),
])  # fmt: skip
def test_models_by_name(name: str, wanted: str) -> None:
    found = find_model(name)
    assert found.name == wanted
    assert found.spec == spec_from_config(PUBLISHED[wanted][0])


def test_names_do_not_collide() -> None:
    """A short name may not belong to two models."""
    seen: dict[str, str] = {}
    for name, entry in published().items():
        for alias in {name, name.split("/")[-1], *entry["aliases"]}:
            assert seen.setdefault(alias.lower(), name) == name
            assert entry["source"]


def test_types_are_those_of_the_checkpoint() -> None:
    assert (find_model("deepseek-v3").weights, find_model("deepseek-v3").experts) == ("fp8", "fp8")
    assert (find_model("gpt-oss-20b").weights, find_model("gpt-oss-20b").experts) == ("bfloat16", "mxfp4")
    assert find_model("llama-2-7b").weights == "float16"


def test_models_from_files(tmp_path: Path) -> None:
    name = "HuggingFaceTB/SmolLM2-135M"
    config = PUBLISHED[name][0]
    spec = spec_from_config(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "spec.json").write_text(json.dumps(to_json(spec)))
    (tmp_path / "torn.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "other.json").write_text('{"model_type": "resnet"}')
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "spec.json"):
        assert find_model(str(path)).spec == spec
    assert find_model("pocket").spec.num_params() > 3_000_000
    for bad in ("torn.json", "list.json"):
        with pytest.raises(CheckpointError, match=bad):
            find_model(str(tmp_path / bad))
    with pytest.raises(ConfigError, match="resnet"):
        find_model(str(tmp_path / "other.json"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        find_model(str(tmp_path / "empty"))
