"""Engines over tiny models on the kernels, in recorded and unrecorded steps, and over the definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from interpreted.tape import Tape, taped
from oracle.ours import write
from ridgeline.engine import Engine
from ridgeline.ops.reference.backend import ReferenceBackend, TorchMemory
from ridgeline.ops.table import OpsTable
from ridgeline.propose import Drafts
from ridgeline.runtime.generator import Event, GenerationRequest
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec import ModelSpec
from ridgeline.spec.request import Params, SamplingParams
from ridgeline.spec.storage import STORAGES


def load(spec: ModelSpec, table: OpsTable, length: int, weights: str = "auto", pages: str = "bfloat16") -> LoadedModel:
    """Return a model of random matrices in bfloat16, or in a format. length: tokens of its context."""
    with TemporaryDirectory() as folder:
        write(spec, folder)
        options = LoadOptions(dtype="bfloat16", max_model_len=length, weights=weights)
        return replace(load_model(folder, options, table=table), storage=STORAGES[pages])


def on_tape(spec: ModelSpec, length: int, **options: str) -> tuple[LoadedModel, Tape]:
    """Return a model on the kernels, and the tape that records its steps; options as for `load`."""
    table, tape = taped()
    return load(spec, table, length, **options), tape


def defined(spec: ModelSpec, length: int, **options: str) -> LoadedModel:
    """Return a model whose operations are the definitions in float64; options as for `load`."""
    backend = ReferenceBackend(torch.float64)
    return load(spec, OpsTable(TorchMemory("reference", torch.float64), (backend,)), length, **options)


def engine(model: LoadedModel, *, recorded: bool = True, tight: bool = False, **options: Any) -> Engine:
    """Return an engine with pages of 4 tokens and steps of 16, unless `options` say otherwise.

    tight: it has few more pages than the longest request needs alone, so that others are preempted.
    """
    given = EngineOptions(**{"block_size": 4, "max_num_batched_tokens": 16, **options})
    chosen = resolve(
        model.spec, model.max_model_len, given, free_bytes=1 << 30, fixed_len=True,
        kv_cache_dtype=model.storage.dtype, float_bytes=model.table.memory.float_bytes,
    )  # fmt: skip
    if tight:
        chosen = replace(chosen, num_pages=tuple(g.most_pages(20) + 1 for g in chosen.groups))
    found = Engine(model, chosen)
    if not recorded:
        unrecorded(found)
    return found


def unrecorded(running: Engine) -> Engine:
    """Return the engine, which records no step from now on."""
    running._runner.graphs._passes.refusal = "not in this test"
    return running


def on_host(running: Engine) -> Engine:
    """Return the engine, whose host samples all tokens from now on."""
    running._runner._sampled = None
    return running


def request(length: int, params: Params, vocabulary: int = 200) -> GenerationRequest:
    """Return a request with a random prompt of `length` tokens."""
    prompt = np.random.default_rng(length).integers(3, vocabulary, length).tolist()
    keys = params.n if isinstance(params, SamplingParams) else 0
    return GenerationRequest(prompt, params, tuple(NoiseKey(7, choice) for choice in range(keys)))


Answers = dict[tuple[int, int], list[int]]
Drafter = Callable[[tuple[int, int], int], Drafts]  # returns drafts for an answer that has some tokens


def events(
    running: Engine, requests: list[GenerationRequest], every: int, drafts: Drafter | None = None
) -> list[Event]:
    """Add a request every few steps; return all events."""
    found: list[Event] = []
    step, left = 0, list(enumerate(requests))
    while left or len(running):
        if left and step % every == 0:
            running.add(*left.pop(0))
        for event in running.step():
            assert event.error is None
            found.append(event)
        running.check()
        for answer, tokens in answers(found).items() if drafts else ():
            running.propose(*answer, drafts(answer, len(tokens)))
        step += 1
    return found


def answers(found: list[Event]) -> Answers:
    """Return the tokens of all answers."""
    said: Answers = {}
    for event in found:
        said.setdefault((event.request, event.choice), []).extend(event.tokens)
    return said


def serve(running: Engine, requests: list[GenerationRequest], every: int = 2, drafts: Drafter | None = None) -> Answers:
    """Add a request every few steps; return the tokens of all answers."""
    return answers(events(running, requests, every, drafts))
