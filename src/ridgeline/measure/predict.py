"""Predict the times and the memory of a loaded model with the settings of its engine, on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.cost.calibration import REMEDY, this_machine
from ridgeline.cost.gpu_calibration import calibrated_gpu
from ridgeline.cost.operations import Slice
from ridgeline.cost.precision import Precision, cpu_precision, stored_as
from ridgeline.cost.process_memory import ProcessMemory, Run, idle_memory, process_memory
from ridgeline.ops.devices import gpu_facts
from ridgeline.ops.driver import Driver
from ridgeline.ops.table import CPU, REFERENCE
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.plan.speculation import NGRAM, Draft, Speculation, speculation_of
from ridgeline.runtime.load import LoadedModel
from ridgeline.settings import EngineConfig
from ridgeline.spec import ModelSpec
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.heads import HeadSpec

READ_AROUND = 1 << 16  # bytes of a mapped file that Linux provides at a touch


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: the tokens of its prompt and of its answer, and how many tokens of the prompt were in the cache."""

    prompt: int
    new: int
    cached: int = 0


class Times(NamedTuple):
    """Times of requests that all arrive at the start, in seconds.

    elapsed_s: until the last request is finished. ttft_s: time to first token of each request, in order. tpot_s:
    (time of the last token - time of the first) / (tokens - 1) of each request; None for an answer of one token.
    """

    elapsed_s: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Predicted times, as in `Times`, and memory of requests that all arrive at the start.

    step_s: seconds of one decode step with all sequences at their mean context. roof_...: the same times if each
    operation ran at the machine's peaks. memory_bytes: expected resident memory. note: how far the times can be
    trusted.
    """

    elapsed_s: float
    ttft_s: tuple[float, ...]
    tpot_s: tuple[float | None, ...]
    step_s: float
    roof_elapsed_s: float
    roof_ttft_s: tuple[float, ...]
    roof_tpot_s: tuple[float | None, ...]
    memory_bytes: float
    note: str


def planner_of(loaded: LoadedModel, config: EngineConfig, machine: HardwareSpec) -> Planner:
    """Return a planner of the model as it is stored, with the engine's settings."""
    return Planner(
        Deployment(
            loaded.spec, machine, _precision(loaded, machine), page_tokens=config.block_size,
            chunk=config.max_num_batched_tokens,
        )
    )  # fmt: skip


def speculation_of_engine(config: EngineConfig, draft: ModelSpec | HeadSpec | None) -> Speculation | None:
    """Return the drafts of an engine for the planner; None if nothing that the planner knows proposes any.

    draft: its draft model or head. The acceptance is assumed; what was measured replaces it (measure/served.py).
    """
    if draft is None and config.speculative != NGRAM:
        return None
    return speculation_of(Draft(config.speculative, draft), config.num_speculative_tokens)


def _precision(loaded: LoadedModel, machine: HardwareSpec) -> Precision:
    found = cpu_precision(loaded.weights, loaded.storage.dtype, machine)
    if not (loaded.model.formats.by_name or loaded.dtypes):
        return found
    return stored_as(found, loaded.spec, loaded.model.formats, loaded.dtype, loaded.dtypes)


def calibrated_machine(driver: Driver | None, device: str = CPU) -> tuple[HardwareSpec | None, str]:
    """Return this machine as it was calibrated with as many threads as `driver` has, and a line that says when. A GPU
    has no threads.

    Where there is no such calibration, return None, and a line that says why and how to get one.
    """
    if device not in (CPU, REFERENCE):
        return calibrated_gpu(gpu_facts(device))
    if driver is None or driver.threads is None:
        return None, "no prediction: only devices cpu and cuda can be calibrated"
    machine, note = this_machine()
    if machine.rates is None:
        return None, f"no prediction: this machine is not calibrated; {REMEDY}"
    if machine.rates.threads != driver.threads:
        return None, (
            f"no prediction: this machine was calibrated with {machine.rates.threads} threads, but this run has "
            f"{driver.threads}; leave out --threads"
        )
    return machine, note


def predict(
    loaded: LoadedModel, config: EngineConfig, requests: Sequence[Asked], machine: HardwareSpec, note: str,
    kept: Sequence[int] = (),
) -> Predicted:  # fmt: skip
    """Predict the times of requests, at least one, on a machine, and the memory that they take.

    note: how far its times can be trusted. kept: as in `memory_of`.
    """
    planner = planner_of(loaded, config, machine)
    found = _engine_times(planner, config, requests)
    roofline = roofline_times(loaded, config, requests, machine)
    count = min(len(requests), config.max_num_seqs)
    context = sum(r.prompt + r.new // 2 for r in requests) // len(requests)
    longest = max(requests, key=lambda r: r.prompt + r.new)
    return Predicted(
        *found, planner.decode(count, max(context, 1)).seconds, *roofline,
        memory_of(
            loaded, config, count, longest.prompt, longest.new, earlier=len(requests) - count, kept=kept
        ).total, note,
    )  # fmt: skip


def run_times(planner: Planner, requests: Sequence[Asked], *, max_num_seqs: int, max_num_batched_tokens: int) -> Times:
    """Return the times of requests that all arrive at the start, with the steps that the scheduler plans."""
    now, first, last = 0.0, [0.0] * len(requests), [0.0] * len(requests)
    for batch, sampled in run_steps(requests, max_num_seqs, max_num_batched_tokens):
        now += planner.step(batch).seconds
        for i in sampled:
            first[i], last[i] = first[i] or now, now
    tpot = [(b - a) / (r.new - 1) if r.new > 1 else None for a, b, r in zip(first, last, requests, strict=True)]
    return Times(now, tuple(first), tuple(tpot))


def roofline_times(
    loaded: LoadedModel, config: EngineConfig | None, requests: Sequence[Asked], machine: HardwareSpec
) -> Times:
    """Return the times of requests if each operation ran at the peaks of `machine` (cost/roofline.py).

    config: settings of the engine. None: naive sampling; then all prompts are one step, and all sequences decode
    together.
    """
    machine = machine.roof()
    if config is None:
        planner = Planner(Deployment(loaded.spec, machine, _precision(loaded, machine)))
        tokens = sum(r.prompt for r in requests)
        return run_times(planner, requests, max_num_seqs=len(requests), max_num_batched_tokens=tokens)
    return _engine_times(planner_of(loaded, config, machine), config, requests)


def _engine_times(planner: Planner, config: EngineConfig, requests: Sequence[Asked]) -> Times:
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    return run_times(planner, requests, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def run_steps(requests: Sequence[Asked], most: int, budget: int) -> Iterator[tuple[tuple[Slice, ...], list[int]]]:
    """Yield the batches that the scheduler plans while pages last, and which requests get a token from each of them.

    A step first has one token of each sequence that decodes, then prompts in their order. Decodes of a step count as if
    all had their mean context.

    Args:
        most: Largest number of sequences at once.
        budget: Largest number of tokens in a step.
    """
    done = [min(r.cached, r.prompt - 1) for r in requests]
    end = [r.prompt + r.new - 1 for r in requests]
    running: list[int] = []
    waiting = list(range(len(requests)))[::-1]
    while running or waiting:
        while waiting and len(running) < most:
            running.append(waiting.pop())
        decoding = [i for i in running if done[i] >= requests[i].prompt][:budget]
        batch, sampled, left = [], list(decoding), budget - len(decoding)
        if decoding:
            context = sum(done[i] for i in decoding) // len(decoding) + 1
            batch.append(Slice(len(decoding), 1, context))
        for i in decoding:
            done[i] += 1
        for i in running:
            if left and i not in decoding and done[i] < requests[i].prompt:
                chunk = min(left, requests[i].prompt - done[i])
                done[i], left = done[i] + chunk, left - chunk
                batch.append(Slice(1, chunk, done[i], int(done[i] == requests[i].prompt)))
                sampled += [i] if done[i] == requests[i].prompt else []
        running = [i for i in running if done[i] < end[i]]
        yield tuple(batch), sampled


def memory_of(
    loaded: LoadedModel, config: EngineConfig, sequences: int, prompt: int, new: int, *, earlier: int = 0,
    kept: Sequence[int] = (),
) -> ProcessMemory:  # fmt: skip
    """Predict the resident memory while `sequences` requests of this size run at once; 0: before the first request.

    `config.workspace_bytes` is at least its `step`, because it is the bound for everything that the settings allow.

    Args:
        earlier: Requests of this size that were answered before.
        kept: Pages that stay in the prefix cache, if they are not those of the beginning; see `process_memory`.
    """
    driver, formats, pages = loaded.table.driver, loaded.model.formats, config.num_pages
    threads = driver.threads if driver else None  # None: not device cpu, or without its kernels
    # Rows of a table that is a view of its file become resident when they are looked up.
    views = min(loaded.mapped_bytes, (sequences + earlier) * (prompt + new) * READ_AROUND) if threads else 0
    in_memory = loaded.weight_bytes - (loaded.mapped_bytes if threads else 0) + views
    if sequences:
        run = Run(sequences, prompt, new, config.max_num_batched_tokens, threads or 1, earlier)
        found = process_memory(loaded.spec, in_memory, formats, loaded.dtype, config.groups, pages, run, kept)
    else:
        found = idle_memory(loaded.spec, in_memory, formats, loaded.dtype, config.groups, pages)
    return found if threads else found._replace(ends=0.0, scratch=0.0)  # only the kernels of device cpu have these
