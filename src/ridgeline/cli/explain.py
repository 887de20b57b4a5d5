"""`ridgeline explain`: show every engine setting for a model on this machine, without loading it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ridgeline.cli.flags.groups import EngineFlags, StorageFlags, grouped
from ridgeline.cli.simulate import DraftAcceptanceRate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ridgeline.cli.show.matrices import MatrixRow
    from ridgeline.plan.planner import Planner
    from ridgeline.settings import EngineConfig
    from ridgeline.spec import ModelSpec
    from ridgeline.spec.dtype import DType
    from ridgeline.spec.hardware import HardwareSpec
    from ridgeline.spec.quant import FormatTable

ONE_BY_ONE = "one by one"
SHOWN_PROMPT = 2048  # tokens of the prompts for which resident memory is shown


class ExplainedDevice(StrEnum):
    """The values of --device."""

    cpu = "cpu"
    cuda = "cuda"


ExplainedOn = Annotated[
    ExplainedDevice,
    typer.Option("--device", help="Device of the settings: cpu, which is this machine's, or cuda, a GPU."),
]
GpuName = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        help="GPU by its name in the catalog, such as h200, with --device cuda. Default: this machine's, or h100.",
    ),
]


@grouped
def explain(
    *,
    model: Annotated[str, typer.Argument(help="A published model by name, a folder, a GGUF file, or a config.json.")],
    storage: StorageFlags,
    engine: EngineFlags,
    draft_acceptance_rate: DraftAcceptanceRate = None,
    device: ExplainedOn = ExplainedDevice.cpu,
    hardware: GpuName = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every engine setting for a model on this machine's CPU or a GPU, with its reason and the flag for it.

    No weights are loaded, and no GPU is needed. Flags that are given here have the same effect as in `generate`.
    """
    _check_device(device, hardware, draft_acceptance_rate)
    if device is ExplainedDevice.cuda:
        from ridgeline.cli.explain_gpu import explain_gpu

        explain_gpu(model, storage, engine.options(), hardware, json_output=json_output)
        return
    from ridgeline.cli.show.depth import depth_table, expected_speedups
    from ridgeline.cost.calibration import this_machine
    from ridgeline.cost.gpu_calibration import calibrated_gpu
    from ridgeline.ops.devices import first_gpu

    known = _known(model, storage, engine)
    machine, note = this_machine()
    gpu = first_gpu()
    notes = (
        [note]
        if gpu is None
        else [note, f"the settings are those of the CPU, and --device cuda shows the GPU's; {calibrated_gpu(gpu)[1]}"]
    )
    drafts = _drafts(model, storage, known.config, machine, draft_acceptance_rate)
    if json_output:
        import json

        found = known.as_json() | {"machine": "; ".join(notes)}
        if drafts is not None:
            found["draft_depth"] = expected_speedups(drafts)
        print(json.dumps(found, indent=2))
        return
    from ridgeline.cli.flags.settings import huge_line, settings_tables
    from ridgeline.cli.show.matrices import matrix_table
    from ridgeline.cli.show.tables import Line, screen, show

    tables = settings_tables(
        known.name, known.config, known.weight_bytes, program_bytes=known.program_bytes, resident=known.resident
    )
    lines = [
        f"{ONE_BY_ONE}: prompts of {known.prompt:,} tokens that have nothing in common, one after another; memory that "
        "was used stays with the process, and later prompts use it again",
        huge_line(),
    ]
    first, last = ([Line(line, style="dim") for line in part] for part in (lines, (*known.arithmetic, *notes)))
    more = [matrix_table(known.matrices)] if known.matrices else []
    show(screen(), *tables, *first, *more, *(depth_table(drafts) if drafts is not None else ()), *last)


def _check_device(device: ExplainedDevice, hardware: str | None, acceptance: str | None) -> None:
    """Raise RequestError for a GPU with the settings of the CPU, and for predictions of drafts on a GPU."""
    from ridgeline.errors import RequestError

    if device is ExplainedDevice.cpu and hardware is not None:
        raise RequestError(f"hardware (--hardware) {hardware!r} needs --device cuda, since the CPU is this machine's")
    if device is ExplainedDevice.cuda and acceptance is not None:
        raise RequestError("--draft-acceptance-rate needs --device cpu: no speed-up is predicted for this GPU")


def _drafts(
    model: str, flags: StorageFlags, config: EngineConfig, machine: HardwareSpec, acceptance: str | None
) -> Planner | None:
    """Return a planner of the model with what proposes drafts; None if nothing does.

    Raises RequestError for an acceptance without drafts.
    """
    from ridgeline.cli.flags.known import find_draft, find_known_writer, precision_of
    from ridgeline.errors import RequestError
    from ridgeline.plan.planner import Deployment, Planner
    from ridgeline.plan.speculation import NGRAM, Draft, parse_acceptance, speculation_of
    from ridgeline.settings import EngineOptions, check_tree

    if config.speculative == "off":
        if acceptance is not None:
            raise RequestError("--draft-acceptance-rate needs --speculative with a draft model, a head, or ngram")
        return None
    draft = Draft(NGRAM, None) if config.speculative == NGRAM else find_draft(config.speculative)
    check_tree(EngineOptions(speculative=config.speculative, draft_tree=config.draft_tree), draft.spec)
    drafts = speculation_of(draft, config.num_speculative_tokens, parse_acceptance(acceptance) if acceptance else ())
    known = find_known_writer(model)
    weights = None if flags.weights == "auto" else flags.weights
    precision = precision_of(known, machine, weights=weights, state=config.kv_cache_dtype)
    return Planner(Deployment(known.spec, machine, precision, page_tokens=config.block_size, speculation=drafts))


class _Known(NamedTuple):
    """All that is known of an engine without loading its model.

    program_bytes: memory of the process besides the engine's. resident: predicted resident memory by use, after loading
    and with requests one by one, whose prompts have `prompt` tokens.
    """

    name: str
    config: EngineConfig
    weight_bytes: int
    program_bytes: int
    prompt: int
    resident: Mapping[str, Mapping[str, int]]
    matrices: Sequence[MatrixRow]
    arithmetic: Sequence[str]

    def as_json(self) -> dict[str, Any]:
        from dataclasses import asdict

        from ridgeline.system import huge_pages

        return {
            "model": self.name, "settings": [asdict(s) for s in self.config.settings()],
            "memory": dict(self.config.memory(self.weight_bytes, program_bytes=self.program_bytes)),
            "resident": {column: dict(uses) for column, uses in self.resident.items()},
            "resident_prompt_tokens": self.prompt, "huge_pages": huge_pages()._asdict(),
            "matrices": [asdict(row) for row in self.matrices], "arithmetic": list(self.arithmetic),
        }  # fmt: skip


def _known(model: str, flags: StorageFlags, engine: EngineFlags) -> _Known:
    """Return what is known of an engine. Raises RequestError if the weights do not fit."""
    from dataclasses import replace

    from ridgeline.cli.flags.known import StoredMatrices, find_known_writer
    from ridgeline.cli.show.matrices import matrix_rows
    from ridgeline.errors import RequestError
    from ridgeline.ops.arithmetic import arithmetic_lines
    from ridgeline.ops.table import CPU
    from ridgeline.settings import choose_storage, resolve
    from ridgeline.settings.advice import machine_advice
    from ridgeline.spec.dtype import DTYPE_NAMES
    from ridgeline.spec.footprint import footprint
    from ridgeline.spec.quant import PLAIN, FormatTable, format_of
    from ridgeline.spec.text import num_bytes
    from ridgeline.system import free_bytes, num_cores

    known, format = find_known_writer(model), format_of(flags.weights, flags.activations)
    formats = FormatTable(format, None if format.is_lossy else known.formats.by_name)
    dtype = DTYPE_NAMES.get(flags.dtype if flags.dtype != "auto" else known.weights, "bfloat16")
    shown = (formats if format.is_lossy else formats.with_others(known.dequantized)).type_of_most(dtype)
    storage, _ = choose_storage(flags.kv_cache_dtype, shown)
    length = known.spec.resolve_max_model_len(flags.max_model_len)
    own = {} if format.is_lossy or flags.dtype != "auto" else known.dtypes
    foot = footprint(known.spec, formats, dtype, packs=True, dtypes=own)
    size = foot.total + known.spec.frequency_bytes(length)
    free = free_bytes() - size
    if free <= 0:
        raise RequestError(
            f"the weights of {known.name} need {num_bytes(size)}, but only {num_bytes(free + size)} are free; "
            "use --weights int8 or int4, or free some memory"
        )
    advice = machine_advice(known.spec, formats.type_of_most(dtype), storage.dtype)
    config = resolve(
        known.spec, length, engine.options(), kv_cache_dtype=flags.kv_cache_dtype,
        attention=flags.attention, weights=shown,
        free_bytes=free, fixed_len=flags.max_model_len is not None, fraction=0.5, advice=advice,
    )  # fmt: skip
    reasons = {"threads": f"one per physical core that this process may use; the machine has {num_cores()} CPUs"}
    more = {n: r for n, r in (advice.reasons if advice else {}).items() if n not in config.reasons}
    stored = StoredMatrices(formats, known.dequantized if not format.is_lossy else {}, own)
    is_shown = formats.formats != {PLAIN} or bool(known.dtypes)
    rows = tuple(matrix_rows(known.spec, stored, dtype)) if is_shown else ()
    config = replace(config, threads=_threads(), reasons={**config.reasons, **reasons, **more})
    prompt = min(SHOWN_PROMPT, config.max_model_len - 1)
    views = 0 if flags.dtype != "auto" or "embed.weight" in (formats.by_name or {}) else foot.rest
    resident = _resident(_Weights(known.spec, formats, dtype, size, views), config, prompt)
    return _Known(
        known.name, config, size, resident[ONE_BY_ONE]["program"], prompt, resident, rows,
        arithmetic_lines(formats.formats, CPU),
    )  # fmt: skip


class _Weights(NamedTuple):
    """The weights of a model. num_bytes: bytes of all. views: bytes of those that stay views of files."""

    spec: ModelSpec
    formats: FormatTable
    dtype: DType
    num_bytes: int
    views: int


def _resident(weights: _Weights, config: EngineConfig, prompt: int) -> Mapping[str, Mapping[str, int]]:
    """Return the predicted resident bytes by use after loading, and with prompts one by one."""
    from ridgeline.cost.process_memory import Run, idle_memory, process_memory

    spec, formats, dtype, size, views = weights
    run = Run(1, prompt, 1, config.max_num_batched_tokens, config.threads or 1, earlier=prompt)
    loaded = idle_memory(spec, size - views, formats, dtype, config.groups, config.num_pages)
    running = process_memory(spec, size, formats, dtype, config.groups, config.num_pages, run)
    return {"after loading": loaded.by_use(spec.vocab_size), ONE_BY_ONE: running.by_use(spec.vocab_size)}


def _threads() -> int | None:
    from importlib.util import find_spec

    if find_spec("ridgeline._kernels") is None:
        return None
    from ridgeline._kernels import usable_cores

    return usable_cores()
