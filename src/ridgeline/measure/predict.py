"""What the planner expects of a model that is loaded, with the settings of its engine, on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.cost.calibration import REMEDY, this_machine
from ridgeline.cost.operations import Slice
from ridgeline.cost.precision import cpu_precision
from ridgeline.cost.process_memory import ProcessMemory, Run, process_memory
from ridgeline.ops.driver import Driver
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.runtime.load import LoadedModel
from ridgeline.settings import EngineConfig
from ridgeline.spec.hardware import HardwareSpec


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: tokens of its prompt, those of them that were there already, and tokens of its answer."""

    prompt: int
    new: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Predicted:
    """Of requests that are all there from the start. Seconds; ttft, tpot: of each request, in order, tpot None where an
    answer has one token: (time of the last - time of the first) / (tokens - 1), whatever else ran in between.
    roof_...: the same if each operation ran at the machine's peaks. step_s: of a decode, all at their mean context.
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
    """Of the model as it is stored, with the engine's settings."""
    format = loaded.model.format
    precision = cpu_precision(format.name if format.is_lossy else loaded.dtype, loaded.storage.dtype, machine)
    return Planner(
        Deployment(
            loaded.spec, machine, precision, page_tokens=config.block_size, chunk=config.max_num_batched_tokens,
        )
    )  # fmt: skip


def calibrated_machine(driver: Driver | None) -> tuple[HardwareSpec | None, str]:
    """Return this machine as it was calibrated with as many threads as `driver` has, and a line that says when.

    Where there is no such calibration, return None, and a line that says why and how to get one.
    """
    if driver is None:
        return None, "no prediction: only the kernels of device cpu can be calibrated"
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
    loaded: LoadedModel, config: EngineConfig, requests: Sequence[Asked], machine: HardwareSpec, note: str
) -> Predicted:
    """Predict the times of requests, none of them empty, on a machine; note: how far its times can be trusted."""
    planner = planner_of(loaded, config, machine)
    roof = planner_of(loaded, config, replace(machine, rates=None))
    found, least = _run(planner, config, requests), _run(roof, config, requests)
    count = min(len(requests), config.max_num_seqs)
    context = sum(r.prompt + r.new // 2 for r in requests) // len(requests)
    longest = max(requests, key=lambda r: r.prompt + r.new)
    return Predicted(
        *found, planner.decode(count, max(context, 1)).seconds, *least,
        memory_of(loaded, config, count, longest.prompt, longest.new).total, note,
    )  # fmt: skip


Times = tuple[float, tuple[float, ...], tuple[float | None, ...]]


def _run(planner: Planner, config: EngineConfig, requests: Sequence[Asked]) -> Times:
    now, first, last = 0.0, [0.0] * len(requests), [0.0] * len(requests)
    for batch, given in run_steps(requests, config.max_num_seqs, config.max_num_batched_tokens):
        now += planner.step(batch).seconds
        for i in given:
            first[i], last[i] = first[i] or now, now
    tpot = [(b - a) / (r.new - 1) if r.new > 1 else None for a, b, r in zip(first, last, requests, strict=True)]
    return now, tuple(first), tuple(tpot)


def run_steps(requests: Sequence[Asked], most: int, budget: int) -> Iterator[tuple[tuple[Slice, ...], list[int]]]:
    """The steps as the scheduler plans them while there are pages: first a token for each that decodes, then prompts in
    their order. With each, which requests it gives a token. Decodes are taken at their mean context.

    most: sequences at once. budget: tokens of a step.
    """
    done = [min(r.cached, r.prompt - 1) for r in requests]
    end = [r.prompt + r.new - 1 for r in requests]
    going: list[int] = []
    waiting = list(range(len(requests)))[::-1]
    while going or waiting:
        while waiting and len(going) < most:
            going.append(waiting.pop())
        decoding = [i for i in going if done[i] >= requests[i].prompt][:budget]
        batch, given, left = [], list(decoding), budget - len(decoding)
        if decoding:
            context = sum(done[i] for i in decoding) // len(decoding) + 1
            batch.append(Slice(len(decoding), 1, context))
        for i in decoding:
            done[i] += 1
        for i in going:
            if left and i not in decoding and done[i] < requests[i].prompt:
                chunk = min(left, requests[i].prompt - done[i])
                done[i], left = done[i] + chunk, left - chunk
                batch.append(Slice(1, chunk, done[i], int(done[i] == requests[i].prompt)))
                given += [i] if done[i] == requests[i].prompt else []
        going = [i for i in going if done[i] < end[i]]
        yield tuple(batch), given


def memory_of(loaded: LoadedModel, config: EngineConfig, sequences: int, prompt: int, new: int) -> ProcessMemory:
    """What is expected to be resident while so many such requests run; `config.workspace_bytes` is no less than its
    step: it is what the settings allow at most.
    """
    driver = loaded.table.driver
    run = Run(sequences, prompt, new, config.max_num_batched_tokens, driver.threads if driver else 1)
    found = process_memory(
        loaded.spec, loaded.weight_bytes, loaded.model.format, loaded.dtype, config.groups, config.num_pages, run
    )
    return found if driver else found._replace(ends=0.0, scratch=0.0)  # those are the kernels'
