"""From a model's name to a Model on a device: configs, weights, kernels, in that order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ridgeline.errors import DeviceError, RequestError
from ridgeline.load.checkpoint import Checkpoint, open_checkpoint
from ridgeline.load.hub import MODEL_FILES, SMALL_FILES, find_model
from ridgeline.load.packed import open_tensors
from ridgeline.load.weights import load_weights, random_weights
from ridgeline.nn import Model
from ridgeline.ops import OpsTable, open_table, resolve_device
from ridgeline.spec import ModelSpec
from ridgeline.spec.dtype import DTYPE_BYTES, DTYPE_NAMES, DType, config_dtype
from ridgeline.spec.text import num_bytes

LoadFormat = Literal["auto", "safetensors", "dummy"]
ProgressBar = Callable[[int], Callable[[int], None]]  # total bytes -> called with the bytes of each weight


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model; names as in vLLM.

    dtype: the type of weight matrices, `auto` keeps the checkpoint's. max_model_len: the longest context to serve,
    in tokens; None is the model's own. load_format: `dummy` draws random weights from `seed`. threads: of the kernels
    of device cpu; None for one on each physical core.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    revision: str | None = None
    seed: int = 0
    ops: Mapping[str, str] | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run. notes: what a user should know of how it was loaded."""

    model: Model
    checkpoint: Checkpoint
    table: OpsTable
    max_model_len: int
    eos_token_ids: frozenset[int]
    mapped_bytes: int = 0  # of weights that are views of files, and become resident as they are used
    notes: tuple[str, ...] = ()

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec


def no_progress(total: int) -> Callable[[int], None]:
    """No bar."""
    return lambda done: None


def load_model(name: str, options: LoadOptions, progress_bar: ProgressBar = no_progress) -> LoadedModel:
    """Load a local folder or a hub id.

    Raises CheckpointError, ConfigError, DeviceError or RequestError, each with one clear line.
    """
    dtype = _check(options)
    dummy, mapped = options.load_format == "dummy", 0
    folder = find_model(name, revision=options.revision, files=SMALL_FILES if dummy else MODEL_FILES)
    checkpoint = open_checkpoint(folder)
    spec = checkpoint.spec
    max_model_len = spec.resolve_max_model_len(options.max_model_len)
    table = open_table(resolve_device(options.device), options.ops, options.threads)
    if dummy:
        drawn = dtype or config_dtype(checkpoint.config)
        total = sum(w.num_params * (DTYPE_BYTES[drawn] if w.is_matrix else 4) for w in spec.weights())
        _check_memory(total, table)
        weights = random_weights(spec, table.memory, drawn, options.seed, progress_bar(total))
    else:
        files = open_tensors(checkpoint)
        if dtype is not None or not table.memory.on_host:  # else most weights stay views of the files
            size = DTYPE_BYTES[dtype] if dtype else 0
            _check_memory(spec.num_params() * size if size else files.num_bytes(), table)
        else:
            mapped = files.mapped_bytes()
            _check_memory(files.num_bytes() - mapped, table)
        progress = progress_bar(files.num_bytes())
        weights = load_weights(spec, checkpoint.family.names, files, table.memory, dtype, progress)
    notes = (*spec.notes(max_model_len), *checkpoint.notes)
    model = Model(spec, weights, table, max_model_len)
    return LoadedModel(model, checkpoint, table, max_model_len, frozenset(checkpoint.eos_token_ids), mapped, notes)


def _check(options: LoadOptions) -> DType | None:
    """The type of the matrices, None for the checkpoint's. Raises RequestError for an option out of range."""
    if options.dtype != "auto" and options.dtype not in DTYPE_NAMES:
        raise RequestError(f"dtype (--dtype) {options.dtype!r} is not known; known are auto, {', '.join(DTYPE_NAMES)}")
    if options.load_format not in get_args(LoadFormat):
        raise RequestError(
            f"load_format (--load-format) {options.load_format!r} is not known; known are {get_args(LoadFormat)}"
        )
    if type(options.seed) is not int or not 0 <= options.seed < 2**63:
        raise RequestError(f"seed is {options.seed!r}; it must be a whole number from 0 to 2**63 - 1")
    return None if options.dtype == "auto" else DTYPE_NAMES[options.dtype]


def _check_memory(need: int, table: OpsTable) -> None:
    """Raise DeviceError if weights that must be copied do not fit, before anything is allocated."""
    free = table.memory.free_bytes()
    if free is not None and need > free:
        raise DeviceError(
            f"the weights take {num_bytes(need)}, {table.memory.device} has {num_bytes(free)} free; "
            "take a narrower dtype, a smaller model or another device"
        )
