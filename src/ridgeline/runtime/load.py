"""From a model's name to a Model on a device: configs, weights, kernels, in that order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ridgeline.errors import RequestError
from ridgeline.load.checkpoint import Checkpoint, open_checkpoint
from ridgeline.load.hub import MODEL_FILES, SMALL_FILES, find_model
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.weights import load_weights, random_weights
from ridgeline.nn import Model
from ridgeline.ops import OpsTable, open_table, resolve_device
from ridgeline.ops.api import DType
from ridgeline.spec import ModelSpec

LoadFormat = Literal["auto", "safetensors", "dummy"]
# `half` and `float` are vLLM's other names for the same types.
DTYPES: Mapping[str, DType | None] = {
    "auto": None,
    "float32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
}
ProgressBar = Callable[[int], Callable[[int], None]]  # total bytes -> called with the bytes of each weight


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load a model; names as in vLLM.

    dtype: the type of weight matrices, `auto` keeps the checkpoint's. max_model_len: the longest context to serve,
    in tokens; None is the model's own. load_format: `dummy` draws random weights from `seed`.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    revision: str | None = None
    seed: int = 0
    ops: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run."""

    model: Model
    checkpoint: Checkpoint
    table: OpsTable
    max_model_len: int

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
    if options.dtype not in DTYPES:
        raise RequestError(f"--dtype {options.dtype}: known are {', '.join(DTYPES)}")
    if options.load_format not in get_args(LoadFormat):
        raise RequestError(f"--load-format {options.load_format}: known are {', '.join(get_args(LoadFormat))}")
    if type(options.seed) is not int or not 0 <= options.seed < 2**63:
        raise RequestError(f"--seed {options.seed}: it must be a whole number from 0 to 2**63 - 1")
    dummy = options.load_format == "dummy"
    checkpoint = open_checkpoint(
        find_model(name, revision=options.revision, files=SMALL_FILES if dummy else MODEL_FILES)
    )
    spec = checkpoint.spec
    max_model_len = resolve_max_model_len(spec, options.max_model_len)
    table = open_table(resolve_device(options.device), options.ops)
    dtype = DTYPES[options.dtype]
    if dummy:
        weights = random_weights(spec, table.memory, dtype or "float32", options.seed, progress_bar(spec.num_params()))
    else:
        files = TensorFiles(checkpoint.folder)
        progress = progress_bar(files.num_bytes())
        weights = load_weights(spec, checkpoint.family.names, files, table.memory, dtype, progress)
    return LoadedModel(Model(spec, weights, table, max_model_len), checkpoint, table, max_model_len)


def resolve_max_model_len(spec: ModelSpec, wanted: int | None) -> int:
    """The longest context to serve. Raises RequestError if the model cannot serve what is wanted."""
    limit = spec.max_position_embeddings
    if wanted is None:
        return limit
    if type(wanted) is not int or not 1 <= wanted <= limit:
        raise RequestError(f"--max-model-len {wanted} is not in 1..{limit}, what {spec.family}'s positions allow")
    return wanted
