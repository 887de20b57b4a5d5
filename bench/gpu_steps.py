"""Whole models of bench/gpu.py: steps of the engine and their gaps, throughput, and commands that check answers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_kernels import Gate
from gpu_machine import ROOT, Machine, idle_share

from ridgeline import LLM
from ridgeline.engine import Engine, Session
from ridgeline.measure import Roof, measure_throughput
from ridgeline.measure.predict import planner_of
from ridgeline.measure.steps import Steps
from ridgeline.ops import OpsTable, open_table
from ridgeline.ops.reference.backend import ReferenceBackend, SdpaBackend, TorchMemory
from ridgeline.ops.triton.backend import TritonBackend
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec import Attention, GatedMLP, Layer, Mamba2, ModelSpec, RMSNorm, Rope, to_json
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.request import SamplingParams
from ridgeline.spec.storage import default_storage

CHECKED_LAYERS = 2  # layers of the shape that are compared with float64
ALLOWED = 0.05  # how far a chosen token's logit may be below the best one, in standard deviations of all logits


class Sizes(NamedTuple):
    """How much is computed. prompts: lengths of the prompts that are compared with float64, with `new` tokens after
    each. profiled: decode steps in which the device's idle time is measured.
    """

    prompts: Sequence[int]
    new: int
    profiled: int


SIZES, SMALL_SIZES = Sizes((1, 20, 7), 6, 6), Sizes((1, 5), 2, 1)


class Model(NamedTuple):
    """A shape. The small one has the same kinds of layers, and is used where kernels are interpreted."""

    spec: ModelSpec
    small: ModelSpec


def decoder(width: int, layers: int, heads: int, kv_heads: int, size: int, inner: int, vocabulary: int) -> ModelSpec:
    mixer = Attention(heads, kv_heads, size, size**-0.5, rope=Rope(size))
    layer = Layer(mixer, GatedMLP(inner), RMSNorm(), None, 1.0)
    return ModelSpec("bench", vocabulary, width, 1 << 17, (layer,) * layers, RMSNorm())


def recurrent(width: int, layers: int, heads: int, size: int, state: int, vocabulary: int) -> ModelSpec:
    layer = Layer(Mamba2(heads, size, state, 1, 4, RMSNorm()), None, RMSNorm(), None, 1.0)
    return ModelSpec("bench", vocabulary, width, 1 << 17, (layer,) * layers, RMSNorm())


MODELS: Mapping[str, Model] = {
    "llama 8B": Model(decoder(4096, 32, 32, 8, 128, 14336, 128256), decoder(32, 1, 2, 1, 16, 48, 63)),
    "mamba2 2.7B": Model(recurrent(2560, 64, 80, 64, 128, 50280), recurrent(32, 1, 2, 32, 16, 63)),
}


@dataclass
class Bench:
    """The parts that cases of one call share: the machine, its ceilings, and the model that was loaded last."""

    machine: Machine
    ceilings: Mapping[str, float]
    kept: dict[str, LoadedModel] = field(default_factory=dict)
    gates: dict[str, Gate] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes:
        return SMALL_SIZES if self.machine.is_small else SIZES

    def spec(self, name: str) -> ModelSpec:
        return MODELS[name].small if self.machine.is_small else MODELS[name].spec

    def table(self) -> OpsTable:
        """Return the kernels of the engine."""
        if not self.machine.is_small:
            return open_table(self.machine.engine_device)
        return OpsTable(TorchMemory("reference"), (TritonBackend(), SdpaBackend(), ReferenceBackend()))

    def load(self, spec: ModelSpec, weights: str, table: OpsTable) -> LoadedModel:
        """Load random weights in bfloat16, rounded to a format."""
        with tempfile.TemporaryDirectory() as folder:
            config = {"model_type": "ridgeline", "spec": to_json(spec)}
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            options = LoadOptions(self.machine.engine_device, "bfloat16", load_format="dummy", weights=weights)
            loaded = load_model(folder, options, table=table)
        return replace(loaded, storage=default_storage(loaded.stored_weights))

    def loaded(self, name: str, weights: str) -> LoadedModel:
        """Return a model, and drop the one before it."""
        key = f"{name}, {weights}"
        if key not in self.kept:
            self.drop()
            self.kept[key] = self.load(self.spec(name), weights, self.table())
        return self.kept[key]

    def drop(self) -> None:
        """Free the memory of the model that was loaded last."""
        self.kept.clear()
        self.machine.free()

    def hardware(self) -> HardwareSpec:
        """Return the device with its measured ceilings."""
        peaks = {unit: value for unit, value in self.ceilings.items() if unit != "copy"}
        return HardwareSpec(self.machine.name, 1 << 37, self.ceilings["copy"], peaks)


class Measured(NamedTuple):
    """Seconds of a step or of a run, in samples; what it moves and computes; and more figures of its line."""

    seconds: Sequence[float]
    num_bytes: float
    flops: float
    more: Mapping[str, Any]


def greedy(loaded: LoadedModel, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    """Return the tokens that the engine chooses after prompts that it serves together."""
    options = EngineOptions(max_num_seqs=len(prompts) + 1, max_num_batched_tokens=64)
    config = resolve(
        loaded.spec, 64, options, free_bytes=1 << 30, fixed_len=True, fraction=1.0,
        float_bytes=loaded.table.memory.float_bytes, kv_cache_dtype=loaded.storage.dtype,
    )  # fmt: skip
    session, found = Session(Engine(loaded, config), None), {}
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    for i, ids in enumerate(prompts):

        def sink(chunk: Any, i: int = i) -> None:
            if chunk.output is not None:
                found[i] = list(chunk.output.outputs[0].token_ids)

        session.add(GenerationRequest(list(ids), params, (NoiseKey(0, i),)), sink)
    while len(session):
        session.step()
    return [found[i] for i in range(len(prompts))]


def gate_of_steps(bench: Bench, name: str, weights: str) -> Gate:
    """Compare the engine's tokens with the definitions in float64, over two layers of the shape.

    Each token must be the best one of float64, or nearly; and a sequence must have the same tokens alone.
    """
    key, sizes, spec = f"{name}, {weights}", bench.sizes, bench.spec(name)
    if key in bench.gates:
        return bench.gates[key]
    bench.drop()
    spec = replace(spec, layers=spec.layers[:CHECKED_LAYERS])
    loaded = bench.load(spec, weights, bench.table())
    memory = TorchMemory(bench.machine.engine_device, torch.float64)
    exact = bench.load(spec, weights, OpsTable(memory, (ReferenceBackend(torch.float64),)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, spec.vocab_size, n).tolist() for n in sizes.prompts]
    together = greedy(loaded, prompts, sizes.new)
    same = together == [greedy(loaded, [ids], sizes.new)[0] for ids in prompts]
    error = 0.0
    for ids, new in zip(prompts, together, strict=True):
        step = exact.dense_step([[*ids, *new[:-1]]])
        logits = exact.table.memory.get(exact.model.logits(exact.model.forward(step)))[len(ids) - 1 :]
        behind = logits.max(1) - logits[np.arange(len(new)), new]
        error = max(error, float((behind / logits.std(1)).max()))
    found = Gate(same and error <= ALLOWED, error if math.isfinite(error) else math.nan, ALLOWED, same)
    bench.gates[key] = found
    return found


def decode(bench: Bench, name: str, weights: str, batch: int, context: int, steps: int) -> Measured:
    """Measure decode steps of the engine, and how long the device is idle in them."""
    loaded = bench.loaded(name, weights)
    timer = Steps(loaded, batch, context + steps + 8)
    timer.decodes(batch, context, 2)  # kernels are compiled and graphs are recorded
    timed = timer.decodes(batch, context, steps)
    planner = planner_of(loaded, timer.config, bench.hardware())
    cost = planner.step(timed[-1].batch)
    seconds = [step.seconds for step in timed]
    more = {
        "tokens_per_s": batch / float(np.median(seconds)), "idle": _idle(bench, timer, batch, context),
        "roofline_s": cost.seconds,
    }  # fmt: skip
    return Measured(seconds, cost.bytes, cost.flops, more)


def _idle(bench: Bench, timer: Steps, batch: int, context: int) -> float:
    """Return the share of decode steps in which the device does nothing, by torch's profiler."""
    with torch.profiler.profile(activities=[bench.machine.profiled()]) as profile:
        timer.decodes(batch, context, bench.sizes.profiled)
        bench.machine.finish()
    wanted = torch.autograd.DeviceType.CPU if bench.machine.is_small else torch.autograd.DeviceType.CUDA
    events = [(e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type == wanted]
    return idle_share(events[len(events) // 2 :])  # prompts come first


def throughput(bench: Bench, name: str, weights: str, requests: int, prompt: int, new: int) -> Measured:
    """Measure requests that all arrive at the start."""
    bench.drop()
    spec = bench.spec(name)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"model_type": "ridgeline", "spec": to_json(spec)}))
        llm = LLM(
            folder, device=bench.machine.engine_device, dtype="bfloat16", load_format="dummy", weights=weights,
            skip_tokenizer_init=True, max_model_len=prompt + new + 1,
        )  # fmt: skip
        ready = time.perf_counter() - began
        rng, params = np.random.default_rng(0), SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        asked = [
            GenerationRequest(rng.integers(0, spec.vocab_size, prompt).tolist(), params, (NoiseKey(0, i),))
            for i in range(requests)
        ]
        found = measure_throughput(llm, Roof(bench.ceilings["copy"], bench.ceilings["bfloat16"]), asked)
    more = {
        "tokens_per_s": found.output_tokens_per_s, "roofline_s": found.roofline_s, "ready_s": ready,
        "preemptions": 0 if found.pages is None else found.pages.preemptions,
    }  # fmt: skip
    return Measured([found.elapsed_s], 0.0, 0.0, more)


def command(bench: Bench, words: Sequence[str], limit_s: float) -> tuple[Gate, float, str]:
    """Run a program of the checkout. Return whether it ended well, its seconds, and its last line."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    device = bench.machine.engine_device
    line = [sys.executable, "-m", *(word.format(device=device) for word in words)]
    began = time.perf_counter()
    try:
        done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)
        ok, text = done.returncode == 0, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        ok, text = False, f"it ran longer than {limit_s:.0f} s"
    last = next((one.strip() for one in reversed(text.splitlines()) if one.strip()), "")
    return Gate(ok, 0.0 if ok else math.nan, 0.0), time.perf_counter() - began, last[:300]
