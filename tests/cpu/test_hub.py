"""find_model: a local folder, a hub id through the hub's own cache, and a one-line error for anything else."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import ridgeline
from oracle.families import CASES
from ridgeline import LLM
from ridgeline.errors import CheckpointError, TokenizerError
from ridgeline.load.hub import CONFIG_FILES, find_model

SOURCE = Path(ridgeline.__file__).parents[1]
FIRST, SECOND = "a" * 40, "b" * 40  # commits of the cache that the test makes


def refusal(model: str) -> str:
    """Return the message with which a name is refused, which must be one line."""
    with pytest.raises(CheckpointError) as caught:
        find_model(model)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if the hub is called."""

    def asked(*args: Any, **kwargs: Any) -> None:
        pytest.fail(f"the hub was called with {args} {kwargs}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", asked)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Record the calls to the hub, which always returns a folder."""
    asked: list[dict[str, Any]] = []

    def answer(repo_id: str, **kwargs: Any) -> str:
        asked.append({"repo_id": repo_id, **kwargs})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    return asked


# Local folders -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_hub")
def test_a_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model(str(tmp_path)) == tmp_path
    assert find_model("org/name") == Path("org/name")  # a folder has priority over a hub id
    assert find_model("./org/name/") == Path("org/name")
    assert find_model("~/org") == tmp_path / "org"
    assert find_model(str(tmp_path), files=CONFIG_FILES) == tmp_path
    with pytest.raises(CheckpointError, match="--revision main, which is for hub ids"):
        find_model(str(tmp_path), revision="main")


@pytest.mark.usefixtures("no_hub")
def test_a_config_means_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_model(str(tmp_path / "config.json")) == tmp_path


@pytest.mark.usefixtures("no_hub")
def test_another_file_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"")
    message = refusal(str(path))
    assert str(path) in message
    assert "folder" in message


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize(
    "model",
    [
        "./absent",
        "../absent/model",
        "~/absent-folder",
        "a/b/c",
        "a b/c",
        "org/",
        "/",
        "org//name",
        "name?x",
        "a\0b",
    ],
)
def test_a_path_is_not_looked_up_on_the_hub(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if model == "/":
        model = str(tmp_path / "absent")
    message = refusal(model)
    assert "no such folder" in message
    assert model in message


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("model", ["word " * 2000, "x" * 5000, "~no-such-user-here/model", ""], ids=lambda m: m[:12])
def test_names_that_the_file_system_refuses(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt instead of a model, or an unset variable, still gives one short line."""
    monkeypatch.chdir(tmp_path)
    assert len(refusal(model)) < 300


# Calls to the hub --------------------------------------------------------------------------------------


def test_the_files_that_the_hub_is_asked_for(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    assert find_model("org/name", revision="v1.0") == tmp_path
    assert find_model("gpt2") == tmp_path
    assert find_model("org/name", files=CONFIG_FILES) == tmp_path
    pinned, plain, config = calls
    assert (pinned["repo_id"], pinned["revision"]) == ("org/name", "v1.0")
    assert (plain["repo_id"], plain["revision"]) == ("gpt2", None)
    assert config["allow_patterns"] == ["config.json"]
    for call in calls:
        # If no token is passed, HF_TOKEN or the stored login is used; False would forbid both.
        assert call.get("token") is None
        assert not call.get("force_download")


def wanted(call: dict[str, Any], name: str) -> bool:
    """Return whether the hub's filter accepts a file."""
    allowed = any(fnmatch.fnmatch(name, pattern) for pattern in call["allow_patterns"])
    return allowed and not any(fnmatch.fnmatch(name, pattern) for pattern in call.get("ignore_patterns") or ())


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "model.bin",
        "model.pt", "model.pth", "consolidated.00.pth", "optimizer.pt", "training_args.bin", "model.pkl",
        "model.ckpt", "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "modeling_custom.py", "model.py",
        "consolidated.safetensors", "adapter_model.safetensors", "onnx/model.onnx", "README.md",
    ],
)  # fmt: skip
def test_pickles_code_and_other_weights_are_never_fetched(name: str, calls: list[dict[str, Any]]) -> None:
    find_model("org/name")
    assert not wanted(calls[0], name)


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "generation_config.json", "model.safetensors", "model-00001-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
        "special_tokens_map.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/x.jinja",
    ],
)  # fmt: skip
def test_everything_that_is_read_is_fetched(name: str, calls: list[dict[str, Any]]) -> None:
    find_model("org/name")
    assert wanted(calls[0], name)


def test_dummy_weights_and_other_tokenizers_fetch_no_weights(calls: list[dict[str, Any]], tmp_path: Path) -> None:
    kwargs = CASES["llama"].kwargs
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **kwargs}))
    llm = LLM("org/name", revision="v2", load_format="dummy")
    assert len(llm.logits([[5, 6]])[0]) == 2
    with pytest.raises(TokenizerError):  # the folder from the hub contains no tokenizer
        LLM("org/name", load_format="dummy", tokenizer="org/other")
    assert [(call["repo_id"], call["revision"]) for call in calls] == [
        ("org/name", "v2"), ("org/name", None), ("org/other", None),
    ]  # fmt: skip
    for call in calls:
        assert wanted(call, "tokenizer.json")
        assert not wanted(call, "model.safetensors")
        assert not wanted(call, "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (LocalEntryNotFoundError("no\nnetwork"), "cannot be reached"),
        (OSError("disk full\nsecond line"), "disk full"),
        (OSError(""), "OSError"),
        (ConnectionError("refused"), "refused"),
    ],
)
def test_an_error_of_the_hub_is_one_line(error: Exception, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = refusal("org/name")
    assert "org/name" in message
    assert part in message
    assert "second line" not in message


# Offline, with the hub's own code ----------------------------------------------------------------------

ASK = """
import json, socket, sys

def blocked(*args, **kwargs):
    raise SystemExit("the network was used")

socket.socket.connect = socket.getaddrinfo = blocked
from ridgeline.errors import CheckpointError
from ridgeline.load.hub import find_model

out = []
for model, options in json.loads(sys.argv[1]):
    try:
        out.append(str(find_model(model, **options)))
    except CheckpointError as e:
        out.append(f"error: {e}")
print(json.dumps(out))
"""


def ask_offline(home: Path, *questions: tuple[str, dict[str, Any]]) -> list[str]:
    """Return the output of find_model in an offline process, because the hub reads these variables at import."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", ASK, json.dumps(questions)]
    run = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    return json.loads(run.stdout)


def cache(home: Path) -> Path:
    """Make a cache in the hub's layout: two commits of org/name; `main` is the first, `next` the second."""
    repo = home / "hub" / "models--org--name"
    for commit in (FIRST, SECOND):
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text(json.dumps({"commit": commit}))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(FIRST)
    (repo / "refs" / "next").write_text(SECOND)
    return repo / "snapshots"


def test_the_cache_is_found_offline(tmp_path: Path) -> None:
    snapshots = cache(tmp_path)
    answers = ask_offline(
        tmp_path,
        ("org/name", {}),
        ("org/name", {"files": CONFIG_FILES}),
        ("org/name", {"revision": "main"}),
        ("org/name", {"revision": "next"}),
        ("org/name", {"revision": SECOND}),
        ("org/name", {"revision": "absent"}),
        ("org/other", {}),
        ("gpt2", {}),
    )
    first, second = str(snapshots / FIRST), str(snapshots / SECOND)
    assert answers[:5] == [first, first, first, second, second]
    for answer, name in zip(answers[5:], ("org/name", "org/other", "gpt2"), strict=True):
        assert answer.startswith("error: ")
        assert name in answer
        assert "\n" not in answer


def test_the_command_line_without_a_network(tmp_path: Path) -> None:
    """A hub id that cannot be downloaded gives exit status 2 and one line in the shell."""
    cache(tmp_path)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE_"))}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-m", "ridgeline", "inspect", "org/other"]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stdout == ""
    assert len(run.stderr.splitlines()) == 1
    assert "org/other" in run.stderr
