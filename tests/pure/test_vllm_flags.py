"""`ridgeline serve` accepts vLLM's flags: it replaces them, prints a note, or refuses them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from ridgeline.cli import main, serve
from ridgeline.cli.flags import vllm_flags
from ridgeline.cli.flags.serve_flags import Line, Option
from ridgeline.cli.flags.serving import ServedFlags, ServerFlags
from ridgeline.errors import RequestError

ROOT = Path(__file__).parents[2]
OPTIONS = {
    name: Option(name, takes_value, repeats)
    for names, takes_value, repeats in (
        (("--model", "-m"), True, False), (("--port",), True, False), (("--quiet", "-q"), False, False),
        (("--served-model-name",), True, True), (("--allowed-origins",), True, True),
        (("--swap-space-bytes",), True, False), (("--steps-in-flight",), True, False),
        (("--log-requests",), False, False), (("--max-model-len",), True, False),
    )
    for name in names
}  # fmt: skip


def rewritten(*args: str) -> tuple[list[str], list[str]]:
    """Return the rewritten arguments and the notes for the user."""
    line = Line(OPTIONS)
    return list(line.rewrite(line.with_config(args))), line.notes


@pytest.mark.parametrize(("given", "expected", "told"), [
    ("m --port 1 -q", "m --port 1 -q", 0),
    ("-m m --port=1 --max_model_len 5", "-m m --port 1 --max-model-len 5", 0),
    ("m --gpu-memory-utilization 0.9 --enforce-eager --port 1", "m --port 1", 2),
    ("m -pp 1 --trust_remote_code --tensor-parallel-size=2", "m --tensor-parallel-size=2", 2),
    ("m --swap-space 4 --async-scheduling", "m --swap-space-bytes 4294967296 --steps-in-flight 2", 2),
    ("m --data_parallel_size 2 --quantization awq", "m --replicas 2", 2),
    ("m --swap-space 0.5", "m --swap-space-bytes 536870912", 1),
    ("m --served-model-name a b --port 1", "m --served-model-name a --served-model-name b --port 1", 0),
    ("--served-model-name a m", "--served-model-name a m", 0),
    ("m --enable-log-requests -O3", "m --log-requests", 2),
    ("m --unheard-of 3", "m --unheard-of 3", 0),  # click reports it
])  # fmt: skip
def test_flags_are_replaced(given: str, expected: str, told: int) -> None:
    args, notes = rewritten(*given.split())
    assert args == expected.split()
    assert len(notes) == told and all(": " in note and "\n" not in note for note in notes)


@pytest.mark.parametrize(("given", "expected"), [
    ({"method": "ngram", "num_speculative_tokens": 5}, "--speculative ngram --num-speculative-tokens 5"),
    ({"model": "pocket-draft"}, "--speculative pocket-draft"),
    ({"method": "draft_model", "model": "./d", "draft_tensor_parallel_size": 1}, "--speculative ./d"),
])  # fmt: skip
def test_the_speculative_config_is_translated(given: dict[str, Any], expected: str) -> None:
    args, notes = rewritten("m", "--speculative-config", json.dumps(given))
    assert args == ["m", *expected.split()]
    assert len(notes) == 1


@pytest.mark.parametrize(("given", "words"), [
    ("{", "must be a JSON object"), ("[1]", "must be a JSON object"), ("[" * 9999, "must be a JSON object"),
    ('{"method": "ngram", "prompt_lookup_max": 4}', "no 'prompt_lookup_max'"),
    ('{"method": "suffix"}', "method is 'suffix'; it must be ngram, draft_model, medusa, eagle or eagle3"),
    ('{"method": "draft_model"}', "model is None; it must name the draft model"),
    ('{"model": "x", "num_speculative_tokens": 0}', "num_speculative_tokens is 0"),
    ('{"model": "x", "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size is 2; it must be 1"),
])  # fmt: skip
def test_a_speculative_config_that_cannot_be_honored_gives_one_line(given: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        rewritten("m", "--speculative-config", given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_lists_of_origins() -> None:
    args, _ = rewritten("m", "--allowed-origins", '["http://a", "http://b"]')
    assert args == ["m", "--allowed-origins", "http://a", "--allowed-origins", "http://b"]


@pytest.mark.parametrize("given", [
    "--pipeline-parallel-size 2", "-pp=2", "--gpu-memory-utilization 0", "--gpu-memory-utilization x",
    "--swap-space -1", "--quantization bitsandbytes", "--no-enable-prefix-caching",
    "--max-logprobs 50", "--cpu-offload-gb 4", "--download-dir /tmp", "--pipeline-parallel-size", "--config",
    "--enforce-eager=false",
])  # fmt: skip
def test_flags_that_cannot_be_honored_give_one_line(given: str) -> None:
    with pytest.raises(RequestError) as caught:
        rewritten("m", *given.split())
    message = str(caught.value)
    assert message.startswith(re.split("[= ]", given)[0]) and "\n" not in message
    assert len(message) > len(given) + 10, message


FILE: dict[str, Any] = {"model": "m", "port": 9, "served_model_name": ["a", "b"], "pipeline-parallel-size": 1,
                        "enforce-eager": True, "quiet": False, "swap_space": 1}  # fmt: skip
FORMATS = {
    "yaml": "model: m\nport: 9\nserved_model_name: [a, b]\npipeline-parallel-size: 1\nenforce-eager: true\n"
            "quiet: false\nswap_space: 1\n",
    "toml": 'model = "m"\nport = 9\nserved_model_name = ["a", "b"]\npipeline-parallel-size = 1\nenforce-eager = true\n'
            "quiet = false\nswap_space = 1\n",
    "json": json.dumps(FILE),
}  # fmt: skip


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_config_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"c.{suffix}"
    path.write_text(FORMATS[suffix])
    args, notes = rewritten("--config", str(path))
    names = "--served-model-name a --served-model-name b"
    assert args == f"--model m --port 9 {names} --swap-space-bytes 1073741824".split()
    assert len(notes) == 3
    args, _ = rewritten("other", f"--config={path}", "--port", "7", "--served-model-name", "c")
    assert args == ["--swap-space-bytes", "1073741824", "other", "--port", "7", "--served-model-name", "c"]


@pytest.mark.parametrize(("name", "text", "message"), [
    ("c.yaml", "prot: 9", "prot is not an option of `ridgeline serve`; did you mean --port"),
    ("c.txt", "", "must end in"), ("c.yaml", "port:", "port has no value"), ("c.yaml", "- port", "must contain option"),
    ("c.yaml", "a: [", "is not valid YAML"), ("c.toml", "a = [", r"c\.toml: "), ("c.json", "{", r"c\.json: "),
    ("c.yaml", "config: x", "config is not an option"),
])  # fmt: skip
def test_invalid_config_files(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=message):
        rewritten("m", "--config", str(tmp_path / name))
    with pytest.raises(RequestError, match="No such file"):
        rewritten("m", "--config", str(tmp_path / "missing.yaml"))


def test_each_flag_is_listed_once_with_a_remedy() -> None:
    names = [name for flag in vllm_flags.FLAGS for name in flag.names]
    assert len(names) == len(set(names)) == len(vllm_flags.KNOWN) > 30
    command: Any = typer.main.get_command(main.app)
    ours = {name for p in command.commands["serve"].params for name in p.opts}
    assert not ours & set(names)  # a flag of ours is no longer in the table
    for flag in vllm_flags.FLAGS:
        assert flag.says or flag.refuses
        assert not (flag.accepts is not None or flag.between) or flag.refuses
        assert all(name in ours for name in flag.becomes if name.startswith("--")), flag


def test_the_page_lists_every_flag() -> None:
    page = (ROOT / "docs" / "serve.md").read_text(encoding="utf-8")
    listed = page.split("## Flags of vLLM")[1].split("\n## ")[0]
    for flag in vllm_flags.FLAGS:
        assert f"`{flag.names[0]}`" in listed, flag.names


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ServedFlags]:
    """Return the models that the command would serve; the server is not started."""
    found: list[ServedFlags] = []

    def stop(served: ServedFlags, server: ServerFlags, seed: int) -> None:
        found.append(served)
        raise typer.Exit

    monkeypatch.setattr(serve, "serve_options", stop)
    return found


def test_the_command_takes_the_model_in_three_ways(started: list[ServedFlags]) -> None:
    for args in (["m"], ["--model", "m"], ["-m", "m"], ["--model=m", "-pp", "1"], ["m", "--model", "m"], []):
        result = CliRunner().invoke(main.app, ["serve", *args, "--served-model-name", "a"])
        assert result.exit_code == 0, result.output
    assert [served.model for served in started] == ["m"] * 5 + ["pocket"]
    assert all(served.served_model_name == ["a"] for served in started)
    with pytest.raises(RequestError, match="MODEL is a and --model is b; give only one of them"):
        _ = ServedFlags("a", "b").model
    for given in ((None, ""), ("", None)):  # an unset variable of a shell is no wish for the built-in model
        assert ServedFlags(*given).model == ""
    assert CliRunner().invoke(main.app, ["serve", "m", "--no-such-flag"]).exit_code == 2


def test_short_help_short_version_and_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for args in (["-h"], ["serve", "-h"], ["bench", "latency", "-h"]):
        assert "Usage: " in CliRunner().invoke(main.app, args).output
    assert CliRunner().invoke(main.app, ["-V"]).output.startswith("ridgeline ")
    assert "--install-completion" in CliRunner().invoke(main.app, ["--help"]).output
    env = {"_RIDGELINE_COMPLETE": "complete_bash", "COMP_WORDS": "ridgeline insp", "COMP_CWORD": "1"}
    completed = CliRunner().invoke(main.app, [], env=env, prog_name="ridgeline")
    assert completed.output.split() == ["inspect"]
