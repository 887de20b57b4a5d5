"""Commands that load a model share their options: each has every setting of the engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

import ridgeline.cli
from ridgeline.cli.flags.groups import EngineFlags, LoadFlags, values_of
from ridgeline.cli.flags.serving import ServedFlags, ServerFlags, serve_options
from ridgeline.cli.main import app
from ridgeline.serve.options import ServeOptions
from ridgeline.settings import EngineOptions
from ridgeline.spec.parameters import Parameter

ENGINE = {f"--{field.name.replace('_', '-')}" for field in fields(EngineFlags)}


def commands(group: Any, prefix: str = "") -> dict[str, set[str]]:
    """Return the options of each command, by the command's name."""
    found = {}
    for name, one in group.commands.items():
        if hasattr(one, "commands"):
            found |= commands(one, f"{name} ")
        else:
            found[prefix + name] = {option for p in one.params for option in p.opts}
    return found


def test_commands_that_load_a_model_have_every_setting_of_the_engine() -> None:
    found = commands(typer.main.get_command(app))
    loads = {name for name, options in found.items() if "--swap-space-bytes" in options}
    assert loads == {
        "generate", "chat", "serve", "run-batch", "explain", "bench latency", "bench throughput", "bench replay",
    }  # fmt: skip
    for name in loads:
        assert found[name] >= ENGINE, name
    assert {field.name for field in fields(EngineFlags)} == {field.name for field in fields(EngineOptions)}


def test_no_command_collects_its_options_from_its_local_names() -> None:
    for file in Path(ridgeline.cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not (isinstance(node, ast.Name) and node.id == "locals"), f"{file.name}:{node.lineno}"


def test_the_flags_defaults_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """run-batch has no flags of a server, so it runs with their defaults."""
    monkeypatch.delenv("RIDGELINE_API_KEY", raising=False)
    assert serve_options(ServedFlags(), ServerFlags(), 0) == ServeOptions(names=("pocket",))


def test_values_of_groups() -> None:
    values = values_of(EngineFlags(block_size=8), model="m")
    assert values["block_size"] == 8 and values["model"] == "m" and values.keys() >= {"max_num_seqs"}


def test_declarations_have_no_methods_that_nobody_calls() -> None:
    """Writing such methods takes CPU time whenever a command starts."""
    groups = (EngineFlags, LoadFlags, ServedFlags, ServerFlags)
    for kind in (Parameter, *Parameter.__subclasses__(), *groups):
        assert not {"__eq__", "__repr__", "__slots__"} & vars(kind).keys(), kind.__name__


def test_a_command_starts_without_modules_that_only_one_needs() -> None:
    code = (
        "import sys, ridgeline.cli.main; print(sorted({'logging', 'numpy', 'statistics', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
