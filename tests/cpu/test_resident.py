"""The resident memory of a process against the prediction: after loading, after many different prompts, and after
prompts that came back in turn, for which more pages are kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MIB = 2**20
CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 8000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
PROMPT, TURNS, SLACK = 257, 6, 4 * MIB
SCRIPT = """
import json, sys, threading
import numpy as np
from ridgeline import LLM, SamplingParams
from ridgeline.measure.predict import memory_of
from ridgeline.settings import EngineOptions
from ridgeline.system import resident_bytes

folder, length, turns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
base = resident_bytes()
llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, engine=EngineOptions(max_num_seqs=8))
numbers, rng = iter(range(1, 1000)), np.random.default_rng(0)
params = SamplingParams(max_tokens=1, temperature=0)

def note(name, sequences, earlier=0):
    for thread in threading.enumerate():
        if "_populate" in thread.name:
            thread.join()
    kept = [group.kept_pages for group in llm.stats().groups]
    found = memory_of(llm.loaded, llm.config, sequences, length, 1, earlier=earlier, kept=kept)
    state = llm.config.bytes_of(llm.stats().resident_pages)
    print(json.dumps({"name": name, "resident": resident_bytes() - base, "predicted": found.total,
                      "pages": found.pages, "state": state, "kept": kept[0], "hits": llm.stats().hit_tokens}))

def ask(first):
    llm.generate([[first, *range(1, length)]], params)

note("loaded", 0)
for i in range(8):
    ask(100 + i)
note("different", 1, earlier=7)
for i in [*range(turns), *range(turns), *range(turns, turns + 4)]:
    ask(1000 + i)
note("in turn", 1, earlier=11 + 2 * turns)
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", SCRIPT, str(folder), str(PROMPT), str(TURNS)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    assert run.returncode == 0, run.stderr
    return {line["name"]: line for line in map(json.loads, run.stdout.splitlines())}


@pytest.mark.skipif(sys.platform != "linux", reason="memory is touched ahead on Linux only")
@pytest.mark.parametrize("name", ["loaded", "different", "in turn"])
def test_a_process_has_the_memory_that_was_predicted(name: str, found: dict[str, dict[str, Any]]) -> None:
    at = found[name]
    assert 0.85 * at["predicted"] - SLACK <= at["resident"] <= at["predicted"] + SLACK, at
    assert 0.8 * at["pages"] <= at["state"] <= at["pages"], at


def test_memory_grows_only_for_what_prompts_look_for(found: dict[str, dict[str, Any]]) -> None:
    loaded, different, in_turn = (found[name] for name in ("loaded", "different", "in turn"))
    assert loaded["kept"] == different["kept"] == 1024 // 16 < in_turn["kept"]
    assert loaded["state"] < different["state"] < in_turn["state"]
    assert different["hits"] == 0 < in_turn["hits"]
