"""The command line: exact output, every source of prompts, and one line for each mistake of a user."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

import ridgeline
from oracle.build import make_model, redraw
from oracle.data import shared_data
from oracle.families import CASES
from ridgeline import LLM, SamplingParams
from ridgeline.archs import spec_from_config
from ridgeline.cli.main import main
from ridgeline.ops.api import PRIMITIVES, STAGES
from ridgeline.spec import from_json

CONTEXT = 64
SOURCE = Path(ridgeline.__file__).parents[1]
ANSI = re.compile(r"\x1b\[[0-9;]*m")
GREEDY = ("--temperature", "0", "--max-tokens", "8", "--ignore-eos")
OPS = {op.name for op in (*PRIMITIVES, *STAGES)}


Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process, because importing torch anew for each would take minutes."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*args: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "argv", ["ridgeline", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        status = caught.value.code
        assert isinstance(status, int | None)
        return Done(args, status or 0, ANSI.sub("", captured.out), ANSI.sub("", captured.err))

    return call


def process(*args: str, **options: Any) -> Done:
    """Run a command in its own process."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, *args]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model with one token for each byte."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(alphabet[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    model = make_model(CASES["llama_gqa"], vocab_size=len(alphabet), max_position_embeddings=CONTEXT)
    redraw(model, 3)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny))


def greedy_text(llm: LLM, prompt: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return llm.generate(prompt, params)[0].outputs[0].text


def test_the_words_of_a_real_model() -> None:
    folder = shared_data() / "models" / "stories260K"
    reference = json.loads((folder / "reference_greedy.json").read_text())
    count = str(len(reference["greedy_ids"]))
    found = process(
        "-m", "ridgeline", "generate", "-m", str(folder), reference["prompt"], "--temperature", "0",
        "--max-tokens", count,
    )  # fmt: skip
    assert found.returncode == 0
    assert reference["prompt"] + found.stdout == reference["text"] + "\n"
    assert found.stderr.startswith(f"5 prompt tokens, {count} new; ")
    assert len(found.stderr.splitlines()) == 1


def test_one_prompt_streams_its_text(run: Run, tiny: Path, llm: LLM) -> None:
    found = run("generate", "-m", str(tiny), "abc", *GREEDY)
    assert (found.returncode, found.stdout) == (0, greedy_text(llm, "abc") + "\n")
    assert re.fullmatch(
        r"3 prompt tokens, 8 new; first after \d+ ms, then [\d.]+ ms per token; [\d.]+ tokens/s\n", found.stderr
    )


def check_json(value: dict[str, Any], prompt_tokens: int, choices: int, tokens: int) -> None:
    """Check the schema: exactly these keys, with these types."""
    assert list(value) == ["choices", "usage", "timing"]
    assert [choice["index"] for choice in value["choices"]] == list(range(choices))
    for choice in value["choices"]:
        assert set(choice) - {"logprobs"} == {"index", "text", "token_ids", "finish_reason"}
        assert type(choice["text"]) is str
        assert len(choice["token_ids"]) == tokens
        assert all(type(token) is int for token in choice["token_ids"])
        assert choice["finish_reason"] in ("stop", "length")
    usage = {"prompt_tokens": prompt_tokens, "cached_tokens": 0, "completion_tokens": choices * tokens}
    assert value["usage"] == usage
    assert list(value["timing"]) == ["ttft_s", "tpot_s", "total_s", "tokens_per_s"]
    assert all(type(v) is float and v > 0 for v in value["timing"].values())


def test_json_of_one_prompt(run: Run, tiny: Path, llm: LLM) -> None:
    found = run("generate", "-m", str(tiny), "abc", "--json", *GREEDY)
    assert (found.returncode, found.stderr) == (0, "")
    value = json.loads(found.stdout)
    check_json(value, 3, 1, 8)
    assert value["choices"][0]["text"] == greedy_text(llm, "abc")
    assert "logprobs" not in value["choices"][0]


def test_json_with_logprobs_and_choices(run: Run, tiny: Path) -> None:
    found = run(
        "generate", "-m", str(tiny), "abc", "--json", "-n", "3", "--logprobs", "2", "--max-tokens", "5", "--ignore-eos"
    )
    value = json.loads(found.stdout)
    check_json(value, 3, 3, 5)
    assert len({tuple(choice["token_ids"]) for choice in value["choices"]}) == 3
    for choice in value["choices"]:
        assert [entry["token_id"] for entry in choice["logprobs"]] == choice["token_ids"]
        for entry in choice["logprobs"]:
            assert set(entry) == {"token_id", "logprob", "top_logprobs"}
            best, second = entry["top_logprobs"]
            assert set(best) == {"token_id", "logprob"}
            assert 0 >= best["logprob"] >= second["logprob"]
            assert best["logprob"] >= entry["logprob"]


def test_threads(run: Run, tiny: Path) -> None:
    pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
    done = run("generate", "-m", str(tiny), "a b", *GREEDY, "--device", "cpu", "--threads", "1", "-v")
    assert re.search(r"^threads +1 +as given +--threads$", done.stderr, re.MULTILINE)
    chosen = run("generate", "-m", str(tiny), "a b", *GREEDY, "--device", "cpu", "-v")
    assert re.search(r"^threads +\d+ +one per physical core", chosen.stderr, re.MULTILINE)
    assert done.stdout == chosen.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--device", "cpu", "--threads", "0"), "threads is 0; set --threads from 1 to"),
        (("--device", "cpu", "--threads", "9999"), "threads is 9999; set --threads from 1 to"),
        (("--device", "reference", "--threads", "1"), "do not set --threads"),
    ],
)
def test_threads_that_cannot_be(args: tuple[str, ...], words: str, run: Run, tiny: Path) -> None:
    pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
    done = run("generate", "-m", str(tiny), "a b", *args)
    assert done.returncode == 2
    assert words in done.stderr


def test_several_choices_as_text(run: Run, tiny: Path) -> None:
    found = run("generate", "-m", str(tiny), "abc", "-n", "2", "--seed", "4", "--max-tokens", "8", "--ignore-eos")
    params = SamplingParams(n=2, max_tokens=8, ignore_eos=True)
    first, second = (choice.text for choice in LLM(str(tiny), seed=4).generate("abc", params)[0].outputs)
    assert found.stdout == f">>> abc\n[0] {first}\n\n[1] {second}\n\n"


OBJECTS = b'{"prompt": "abc"}\n\n"xyz"\r\n{"prompt_token_ids": [5, 6, 7]}\n'
LINES = "abc\n\nx y\u2028z\r\n  \né".encode()  # U+2028 is part of a prompt, not the end of a line


@pytest.mark.parametrize("source", ["file", "stdin", "dash"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_prompts_from_files_and_stdin(kind: str, source: str, run: Run, tiny: Path, llm: LLM, tmp_path: Path) -> None:
    data = OBJECTS if kind == "jsonl" else LINES
    path = tmp_path / f"prompts.{kind}"
    path.write_bytes(data)
    where = {"file": [str(path)], "stdin": [], "dash": ["-"]}[source]
    found = run("generate", "-m", str(tiny), *where, "--json", *GREEDY, stdin=b"" if source == "file" else data)
    assert (found.returncode, found.stderr) == (0, "")
    values = [json.loads(line) for line in found.stdout.splitlines() if line]
    prompts = ["abc", "xyz", [5, 6, 7]] if kind == "jsonl" else ["abc", "x y\u2028z", "é"]
    assert len(values) == len(prompts)
    for value, prompt in zip(values, prompts, strict=True):
        ids = llm.encode(prompt)
        check_json(value, len(ids), 1, 8)
        assert value["choices"][0]["text"] == greedy_text(llm, {"prompt_token_ids": ids})  # type: ignore[arg-type]


def test_answers_to_a_file_as_text(run: Run, tiny: Path, llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("abc\nxyz\n")
    found = run("generate", "-m", str(tiny), str(tmp_path / "p.txt"), *GREEDY)
    assert found.stdout == "".join(f">>> {p}\n{greedy_text(llm, p)}\n\n" for p in ("abc", "xyz"))


def test_an_empty_answer_is_empty(run: Run, tiny: Path, tmp_path: Path) -> None:
    """An answer of only special tokens has an empty text, which differs from having no tokenizer."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"].zero_()  # all tokens equal: the lowest id, <pad>, wins
    save_file(tensors, tmp_path / "model.safetensors")
    found = run("generate", "-m", str(tmp_path), *GREEDY, stdin=b"abc\n")
    assert found.stdout == ">>> abc\n\n\n"


def test_the_default_length_fills_a_short_context(run: Run, tiny: Path) -> None:
    for options, length in (((), CONTEXT), (("--max-model-len", "20"), 20)):
        found = run("generate", "-m", str(tiny), "abc", "--json", "--temperature", "0", "--ignore-eos", *options)
        assert json.loads(found.stdout)["usage"]["completion_tokens"] == length - 3


def test_seeds_and_recommended_parameters(run: Run, tiny: Path, tmp_path: Path) -> None:
    def ids(folder: Path, *args: str) -> list[int]:
        found = run("generate", "-m", str(folder), "abc", "--json", "--max-tokens", "8", "--ignore-eos", *args)
        return json.loads(found.stdout)["choices"][0]["token_ids"]

    assert ids(tiny, "--seed", "1") == ids(tiny, "--seed", "1") != ids(tiny, "--seed", "2")
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"temperature": 1.0, "top_k": 1}')
    assert ids(tmp_path) == ids(tiny, "--temperature", "0") != ids(tmp_path, "--top-k", "0")


def test_dummy_weights_take_prompt_ids(run: Run, tiny: Path, tmp_path: Path) -> None:
    shutil.copy(tiny / "config.json", tmp_path)
    args = ("generate", "-m", str(tmp_path), "--load-format", "dummy", *GREEDY)
    found = run(*args, stdin=b'{"prompt_token_ids": [5, 6]}')
    assert found.returncode == 0
    first, answer, *_ = found.stdout.splitlines()
    assert first == '>>> {"prompt_token_ids": [5, 6]}'
    assert len(list(map(int, answer.split()))) == 8
    assert run(*args, "--seed", "1", stdin=b'{"prompt_token_ids": [5, 6]}').stdout != found.stdout


@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_a_reader_that_went_away_is_no_error(command: str, tiny: Path) -> None:
    """With `| head`, the pipe's reader is gone before the first byte."""
    reader, writer = os.pipe()
    os.close(reader)
    model = [str(tiny)] if command == "inspect" else ["-m", str(tiny), "abc", "--max-tokens", "40", "--ignore-eos"]
    run = subprocess.run(
        [sys.executable, "-m", "ridgeline", command, *model], env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    os.close(writer)
    assert run.stderr == b""
    assert run.returncode in (0, 1)


def test_ctrl_c_is_no_traceback(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "answer", interrupted)
    found = run("generate", "-m", str(tiny), "abc")
    assert found.returncode == 130
    assert "Traceback" not in found.stderr
    assert len(found.stderr.splitlines()) <= 1


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout == f"ridgeline {ridgeline.__version__}\n"
    commands: dict[tuple[str, ...], tuple[str, ...]] = {
        (): ("generate", "inspect", "doctor", "--version"),
        ("generate",): ("--max-model-len", "--load-format", "--temperature", "--logprobs", "--json", "--cache"),
        ("inspect",): ("--json", "--dtype"),
        ("doctor",): ("--json", "--ops"),
    }
    for command, parts in commands.items():
        found = run(*command, "--help")
        assert found.returncode == 0
        assert "Usage: " in found.stdout
        assert all(part in found.stdout for part in parts), command


@pytest.fixture
def config_only(tiny: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "config [bold]only"  # the library that prints reads brackets as markup
    folder.mkdir()
    shutil.copy(tiny / "config.json", folder)
    return folder


@pytest.mark.parametrize("source", ["", "config.json"])
def test_inspect_as_json(source: str, run: Run, config_only: Path) -> None:
    found = run("inspect", str(config_only / source), "--json")
    assert (found.returncode, found.stderr) == (0, "")
    report = json.loads(found.stdout)
    config = json.loads((config_only / "config.json").read_text())
    spec = spec_from_config(config)
    assert from_json(report.pop("spec")) == spec
    params = sum(math.prod(w.shape) for w in spec.weights())
    vectors = sum(math.prod(w.shape) for w in spec.weights() if not w.is_matrix)
    state = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head_dim, bytes
    expected = {
        "family": "llama", "layers": 4, "hidden_size": 96, "vocab_size": 259, "max_model_len": CONTEXT,
        "tie_word_embeddings": False, "num_params": params, "num_active_params": params, "weight_dtype": "float32",
        "weight_bytes": 4 * params, "state_bytes_per_token": state, "state_bytes_at_max_len": CONTEXT * state,
    }  # fmt: skip
    assert {key: report[key] for key in expected} == expected
    half = json.loads(run("inspect", str(config_only), "--json", "--dtype", "bfloat16").stdout)
    assert half["weight_bytes"] == 2 * params + 2 * vectors  # vectors stay float32


def test_inspect_as_text(run: Run, config_only: Path) -> None:
    found = run("inspect", str(config_only))
    assert (found.returncode, found.stderr) == (0, "")
    assert str(config_only) in found.stdout
    parts = ("llama", "4 layers", "0-3", "Attention(", "num_heads=6", "GatedMLP", "RMSNorm", "259", f"{CONTEXT} tokens")
    assert all(part in found.stdout for part in parts), found.stdout


def test_inspect_does_without_torch(config_only: Path) -> None:
    code = (
        "import sys; sys.argv = ['ridgeline', 'inspect', sys.argv[1]]\n"
        "from ridgeline.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        "assert 'torch' not in sys.modules and 'ridgeline.spec' in sys.modules"
    )
    found = process("-c", code, str(config_only))
    assert found.returncode == 0, found.stderr
    assert "llama" in found.stdout


def test_doctor_as_json(run: Run) -> None:
    found = run("doctor", "--json", "--device", "reference", "--ops", "attention=reference")
    assert (found.returncode, found.stderr) == (0, "")
    report = json.loads(found.stdout)
    assert list(report) == ["machine", "kernels", "devices", "versions", "schemes", "ops"]
    assert "extension" in report["kernels"]
    assert {"cpu", "reference"} <= set(report["devices"])
    assert list(report["ops"]) == ["reference"]
    rows = report["ops"]["reference"]
    assert report["versions"]["ridgeline"]
    assert report["versions"]["torch"] == torch.__version__
    assert {row["op"] for row in rows} == OPS
    for row in rows:
        assert set(row) == {"op", "level", "case", "backend", "refusals"}
        assert row["backend"] != "none"
        if row["op"] == "attention":
            assert row["backend"] == "reference"
            assert "overridden" in row["refusals"]["sdpa"]


def test_doctor_as_text(run: Run) -> None:
    found = run("doctor")
    assert (found.returncode, found.stderr) == (0, "")
    words = set(found.stdout.split())
    assert words >= OPS
    assert {"sdpa", "reference", "numpy", "composed", "torch", "cpu"} <= words
    assert all(f"ops on {device}\n" in found.stdout for device in ("cpu", "reference"))
    assert "cannot cap" in " ".join(found.stdout.split())  # the reason why sdpa cannot serve the softcap


def edited(tiny: Path, folder: Path, **config: object) -> str:
    """Return a copy of the model with some fields of its config.json changed."""
    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | config))
    return str(folder)


def truncated(tiny: Path, folder: Path) -> str:
    model = edited(tiny, folder)
    os.truncate(folder / "model.safetensors", 100_000)
    return model


def pickled(tiny: Path, folder: Path) -> str:
    model = edited(tiny, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return model


def with_text(tiny: Path, folder: Path, name: str, text: str) -> str:
    model = edited(tiny, folder)
    (folder / name).write_text(text)
    return model


MODELS: dict[str, tuple[Callable[[Path, Path], str], tuple[str, ...]]] = {
    "missing folder": (lambda tiny, folder: str(folder / "absent"), ("no such folder", "absent")),
    "a line break": (lambda tiny, folder: "./no\nsuch", ("no such folder: ./no such",)),
    "a file": (lambda tiny, folder: str(tiny / "model.safetensors"), ("is a file",)),
    "an empty folder": (lambda tiny, folder: str(folder), ("config.json",)),
    "unknown architecture": (
        lambda t, f: edited(t, f, model_type="mamba9"),
        ("mamba9", "similar: mamba,", "docs/models.md"),
    ),
    "unknown field": (lambda t, f: edited(t, f, warp_factor=9), ("warp_factor",)),
    "garbage config": (lambda t, f: with_text(t, f, "config.json", "{"), ("config.json",)),
    "truncated": (truncated, ("model.safetensors", "truncated")),
    "mis-shaped": (lambda t, f: edited(t, f, intermediate_size=90), ("88", "90", "config.json")),
    "one layer more": (lambda t, f: edited(t, f, num_hidden_layers=5), ("model.layers.4",)),
    "vocabulary": (lambda t, f: edited(t, f, vocab_size=300), ("259", "300")),
    "pickles": (pickled, ("pickle",)),
    "tokenizer": (lambda t, f: with_text(t, f, "tokenizer.json", "{"), ("tokenizer.json",)),
    "generation config": (lambda t, f: with_text(t, f, "generation_config.json", "["), ("generation_config.json",)),
}

GENERATE: dict[str, tuple[tuple[str, ...], bytes, tuple[str, ...]]] = {
    "too long": (("x" * 99,), b"", ("99 tokens", str(CONTEXT))),
    "no room": (("abc", "--max-tokens", "62"), b"", ("3 tokens", "62", str(CONTEXT))),
    "empty prompt": (("",), b"", ("empty",)),
    "negative temperature": (("a", "--temperature", "-1"), b"", ("temperature", "-1")),
    "nan temperature": (("a", "--temperature", "nan"), b"", ("temperature", "nan")),
    "infinite temperature": (("a", "--temperature", "inf"), b"", ("temperature", "inf")),
    "top_p": (("a", "--top-p", "1.5"), b"", ("top_p", "1.5")),
    "nan top_p": (("a", "--top-p", "nan"), b"", ("top_p", "nan")),
    "top_k": (("a", "--top-k", "-2"), b"", ("top_k", "-2")),
    "min_p": (("a", "--min-p", "-0.1"), b"", ("min_p", "-0.1")),
    "penalty": (("a", "--repetition-penalty", "0"), b"", ("repetition_penalty",)),
    "max_tokens": (("a", "--max-tokens", "0"), b"", ("max_tokens", "0")),
    "n": (("a", "-n", "0"), b"", ("n is 0",)),
    "seed": (("a", "--seed", "-1"), b"", ("seed", "-1")),
    "logprobs": (("a", "--logprobs", "21"), b"", ("logprobs", "20")),
    "stop token": (("a", "--stop-token-ids", "-1"), b"", ("stop_token_ids", "-1")),
    "context": (("a", "--max-model-len", "65"), b"", ("max-model-len", "1..64")),
    "no context": (("a", "--max-model-len", "0"), b"", ("max-model-len", "1..64")),
    "ops without =": (("a", "--ops", "attention"), b"", ("--ops attention", "OP=BACKEND")),
    "unknown op": (("a", "--ops", "warp=reference"), b"", ("warp", "attention")),
    "unknown backend": (("a", "--ops", "attention=warp"), b"", ("warp", "numpy")),
    "refusing backend": (
        ("a", "--device", "reference", "--ops", "linear=sdpa"), b"", ("linear=sdpa", "attention only"),
    ),
    "dtype": (("a", "--dtype", "int3"), b"", ("int3", "bfloat16")),
    "device": (("a", "--device", "tpu"), b"", ("tpu", "cpu")),
    "load format": (("a", "--load-format", "pt"), b"", ("pt", "dummy")),
    "tokenizer": (("a", "--tokenizer", "./absent"), b"", ("absent",)),
    "skipped tokenizer": (("a", "--skip-tokenizer-init"), b"", ("tokenizer",)),
    "absent prompts": (("absent.txt",), b"", ("absent.txt", "No such file")),
    "a folder of prompts": (("folder.jsonl",), b"", ("folder.jsonl", "directory")),
    "empty stdin": (("-",), b" \n\n", ("stdin", "no prompt")),
    "no UTF-8": (("-",), b"abc\n\xff\xfe\n", ("stdin", "UTF-8", "byte 4", "0xff")),
    "no UTF-8 in a file": (("latin.txt",), b"", ("latin.txt", "UTF-8", "byte 3")),
    "bad line": (("-",), b'{"prompt": "a"}\n{"prompt": \n', ("stdin:2", "JSON")),
    "bad line in a file": (("bad.jsonl",), b"", ("bad.jsonl:3", "JSON")),
    "wrong key": (("-",), b'{"prompt": "a"}\n{"text": "a"}\n', ("stdin:2", "prompt_token_ids")),
    "a number": (("-",), b'{"prompt": "a"}\n5\n', ("stdin:2",)),
    "bad value": (("-",), b'{"prompt": 5}\n', ("prompt", "5")),
    "bad ids": (("-",), b'{"prompt_token_ids": [5, 259]}\n', ("259", "0..258")),
    "deeply nested": (("deep.jsonl",), b"", ("deep.jsonl:1", "JSON")),
    "deeply nested on stdin": (("-",), b"[" * 100_000, (str(CONTEXT),)),  # these are no objects: a text, and a long one
    "chat": (("-",), b'{"messages": [{"role": "user", "content": "a"}]}\n', ("template",)),
}  # fmt: skip


def check_error(found: Done, parts: tuple[str, ...]) -> None:
    assert found.returncode == 2
    assert found.stdout == ""
    assert "Traceback" not in found.stderr
    assert found.stderr.startswith("ridgeline: ")
    assert found.stderr.count("\n") == 1
    assert found.stderr.endswith("\n")
    assert all(part in found.stderr for part in parts), found.stderr


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_loaded(name: str, run: Run, tiny: Path, tmp_path: Path) -> None:
    make, parts = MODELS[name]
    check_error(run("generate", "-m", make(tiny, tmp_path), "abc"), parts)


@pytest.mark.parametrize("name", GENERATE)
def test_requests_that_cannot_be_served(
    name: str, run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "latin.txt").write_bytes("abcé".encode("latin-1"))
    (tmp_path / "bad.jsonl").write_text('"a"\n\nabc\n')
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    args, stdin, parts = GENERATE[name]
    check_error(run("generate", "-m", str(tiny), *args, stdin=stdin), parts)


def test_errors_of_the_other_commands(run: Run, tiny: Path, tmp_path: Path) -> None:
    check_error(run("inspect", str(tmp_path)), ("config.json",))
    check_error(run("inspect", edited(tiny, tmp_path, model_type="mamba9")), ("mamba9", "mamba2"))
    check_error(run("inspect", str(tiny), "--dtype", "int3"), ("int3", "bfloat16"))
    check_error(run("doctor", "--device", "tpu"), ("tpu", "cpu"))
    check_error(run("doctor", "--ops", "warp=reference"), ("warp", "attention"))


MISUSE = [("chat",), ("warp",), ("generate", "-m", "x", "a", "--warp"), ("generate", "-m", "x", "-n", "y")]


@pytest.mark.parametrize("args", MISUSE, ids=" ".join)
def test_misused_options_exit_with_2_too(args: tuple[str, ...], run: Run) -> None:
    found = run(*args)
    assert (found.returncode, found.stdout) == (2, "")
    assert "Usage: " in found.stderr
    assert "Traceback" not in found.stderr


def test_an_error_as_the_shell_sees_it(tiny: Path, tmp_path: Path) -> None:
    model = truncated(tiny, tmp_path)
    check_error(process("-m", "ridgeline", "generate", "-m", model, "abc"), ("model.safetensors",))
