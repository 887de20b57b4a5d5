"""Serving without torch: every family and every command, in processes where `import torch` fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ridgeline
from oracle.build import build, oracle_greedy, oracle_logits
from oracle.case import greedy_prompt, prompts
from oracle.families import CASES
from oracle.ours import SPECS, write
from ridgeline import LLM, SamplingParams

SOURCE = Path(ridgeline.__file__).parents[1]
# This makes `import torch` and importlib.util.find_spec fail as if torch were not installed.
ABSENT = "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
COMMAND = f"{ABSENT}from ridgeline.cli.main import main\nmain()"
# For each folder, it computes logits and greedy tokens with both generators.
SERVE = f"""{ABSENT}
import json
import numpy as np
from ridgeline import LLM, SamplingParams
from ridgeline.settings import EngineOptions
for folder, length, sequences, prompt, tokens in json.load(sys.stdin):
    greedy = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    llm = LLM(folder, max_model_len=length, engine=EngineOptions(block_size=4, max_num_batched_tokens=16))
    np.savez(folder + "/logits.npz", *llm.logits(sequences))
    print(json.dumps(llm.generate([prompt], greedy)[0].outputs[0].token_ids))
"""
TOKENS = 12
FIRST_OF_A_FAMILY = list({case.model_type: name for name, case in reversed(CASES.items())}.values())


def process(code: str, *args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, env=env, input=stdin, capture_output=True, text=True, check=False)


def test_every_family(tmp_path: Path) -> None:
    """Logits and greedy tokens equal those of transformers; for specs of our own, those of the reference device."""
    jobs, wanted = [], []
    for name in FIRST_OF_A_FAMILY:
        case, folder = CASES[name], tmp_path / name
        model, prompt = build(case, folder), greedy_prompt(case)
        jobs.append((str(folder), case.max_model_len, prompts(case), prompt, TOKENS))
        wanted.append((oracle_logits(model, prompts(case)), oracle_greedy(model, prompt, TOKENS)[0]))
    sequences = [np.random.default_rng(n).integers(3, 250, n).tolist() for n in (1, 7, 33, 100)]
    for name, spec in SPECS.items():
        folder = tmp_path / name
        folder.mkdir()
        write(spec, str(folder))
        llm = LLM(str(folder), device="reference", cache="off")
        jobs.append((str(folder), llm.max_model_len, sequences, sequences[2], TOKENS))
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
        wanted.append((llm.logits(sequences), llm.generate([sequences[2]], params)[0].outputs[0].token_ids))
    found = process(SERVE, stdin=json.dumps(jobs))
    assert found.returncode == 0, found.stderr
    for job, (logits, tokens), line in zip(jobs, wanted, found.stdout.splitlines(), strict=True):
        with np.load(f"{job[0]}/logits.npz") as got:
            error = max(float(np.abs(got[f"arr_{i}"] - w).max()) for i, w in enumerate(logits))
        assert error < 1e-4, job[0]
        assert json.loads(line) == tokens, job[0]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    shutil.copytree(SOURCE / "ridgeline/models/pocket", folder / "talks")
    (folder / "talks/chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    (folder / "a.py").write_text("def add(a, b):\n    return a + b\n" * 5)
    (folder / "p.jsonl").write_text('{"prompt": "import os"}\n{"prompt": "class A:"}\n')
    (folder / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 96,
                "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
            }
        )
    )  # fmt: skip
    return folder


COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "generate": (("generate", "def add(a, b):", "--max-tokens", "4"), "new"),
    "naive sampling": (("generate", "def add(a, b):", "--max-tokens", "4", "--cache", "off"), "new"),
    "beams": (("generate", "def add(a, b):", "--max-tokens", "4", "--beam-width", "2"), "new"),
    "chat": (("chat", "--model", "talks", "--max-tokens", "4"), ""),
    "a file": (("generate", "p.jsonl", "-o", "out.jsonl", "--max-tokens", "4"), "tokens"),
    "bfloat16": (("generate", "def add(a, b):", "--max-tokens", "4", "--dtype", "bfloat16"), "new"),
    "float16": (("generate", "def add(a, b):", "--max-tokens", "4", "--dtype", "float16"), "new"),
    "evaluate": (("evaluate", "pocket", "--text", "a.py"), "bits per byte"),
    "inspect": (("inspect", "."), "llama"),
    "verify": (("verify", ".", "--quick", "--load-format", "dummy"), "equal"),
    "bench": (
        ("bench", "latency", "-m", ".", "--load-format", "dummy", "--input-len", "8", "--output-len", "4",
         "--batch-size", "2", "--num-iters", "1", "--num-iters-warmup", "0"), "roof",
    ),
    "doctor": (("doctor",), "pip install 'ridgeline[torch]'"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command(name: str, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(texts)
    args, part = COMMANDS[name]
    found = process(COMMAND, *args, stdin="import os\n/quit\n")
    assert found.returncode == 0, found.stderr
    assert part in " ".join((found.stdout + found.stderr).split())


NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "reference": (("generate", "a", "--device", "reference"), "device 'reference'"),
    "cuda": (("generate", "a", "--device", "cuda"), "device 'cuda'"),
    "cuda:1": (("generate", "a", "--device", "cuda:1"), "device 'cuda:1'"),
    "train": (("train", "config.json", "--data", "a.py", "--out", "out"), "training"),
    "train --recipe": (("train", "--recipe", "pocket", "--out", "out"), "training"),
}


@pytest.mark.parametrize("name", NEEDS)
def test_commands_that_need_torch_say_so(name: str, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(texts)
    args, what = NEEDS[name]
    found = process(COMMAND, *args)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == f"ridgeline: {what} needs torch: pip install 'ridgeline[torch]'\n"


def test_the_cpu_device_leaves_torch_alone() -> None:
    """Without a GPU, an installed torch is not imported, because that would take longer than the whole run."""
    code = (
        "import sys\nfrom ridgeline.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        "heavy = {'torch', 'jinja2', 'rich', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    found = process(code, "generate", "def add(a, b):", "--max-tokens", "2", "--device", "cpu")
    assert found.returncode == 0, found.stderr
