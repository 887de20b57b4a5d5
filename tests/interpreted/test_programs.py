"""A program for `cpu` runs on `cuda` without a change: `LLM`, and a client of `ridgeline serve`."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cpu import serving
from cpu.serving import Server
from cpu.test_llm import save_tokenizer
from interpreted.guarded import IS_INTERPRETED
from interpreted.tape import GpuMemory, taped
from oracle.build import make_model, redraw
from oracle.families import CASES
from ridgeline import LLM, SamplingParams
from ridgeline.ops import Device
from ridgeline.runtime import load

TESTS = Path(__file__).parents[1]
RECORDER = pytest.mark.skipif(not IS_INTERPRETED, reason="the recorder stands for a GPU in the interpreter")
# Children of this process get the recorder as device cuda; see recorder/sitecustomize.py.
RECORDED = {"PYTHONPATH": os.pathsep.join([str(TESTS / "interpreted/recorder"), str(TESTS)]), "TRITON_INTERPRET": "1"}


def program(folder: Path, device: str) -> tuple[list[list[int]], int]:
    """Return the tokens of greedy, drawn and scored answers, and how many steps are in flight."""
    llm = LLM(str(folder), device=device, max_model_len=64)
    ways = [
        SamplingParams(max_tokens=3, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=3, temperature=0, logprobs=2, ignore_eos=True),
    ]
    found = llm.generate(["abc", "a longer text", "x"], ways)
    assert llm.config is not None
    return [list(one.outputs[0].token_ids) for one in found], llm.config.steps_in_flight


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model that reads and writes bytes."""
    found = tmp_path_factory.mktemp("tiny")
    model = make_model(CASES["llama_gqa"], vocab_size=save_tokenizer(found), max_position_embeddings=64)
    redraw(model, 3)
    model.save_pretrained(found)
    (found / "generation_config.json").unlink(missing_ok=True)
    return found


@RECORDER
def test_a_program_runs_on_both_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are recorded give the tokens of the CPU."""
    (table, tape), devices = taped(memory=GpuMemory), import_module("ridgeline.ops.devices")
    monkeypatch.setattr(devices, "_gpus", lambda: [Device("cuda:0", "a recorder")])
    wanted, _ = program(folder, "cpu")
    monkeypatch.setattr(load, "open_table", lambda device, *args, **options: {"cuda:0": table}[device])
    assert program(folder, "cuda") == (wanted, 2)
    assert tape.launched


def asked(server: Server) -> list[Any]:
    """Return what a client gets: answers without their ids and times, a stream, and an error."""
    name = server.ask("GET", "/v1/models")[1]["data"][0]["id"]
    body = {"model": name, "prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    found = []
    for more in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"logprobs": 1}, {"max_tokens": 1000}):
        status, answer = server.post("/v1/completions", **{**body, **more})
        texts = [choice["text"] for choice in answer.get("choices", ())]
        found.append((status, sorted(answer), texts, answer.get("usage"), answer.get("error")))
    status, data, _ = server.raw("POST", "/v1/completions", {**body, "stream": True})
    events = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: {")]
    return [*found, status, "".join(json.loads(event)["choices"][0]["text"] for event in events)]


@pytest.mark.nightly
@RECORDER
def test_a_client_of_a_server_gets_the_same_from_both_devices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "START_SECONDS", 600.0)  # the interpreter is slow
    found = []
    for device in ("cpu", "cuda"):
        server = Server(str(folder), "--device", device, "--max-model-len", "64", env=RECORDED)
        try:
            found.append(asked(server))
        finally:
            server.stop()
    assert found[0] == found[1]
    assert [one[0] for one in found[0][:4]] == [200, 200, 200, 400] and found[0][-2] == 200
