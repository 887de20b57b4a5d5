"""Load a model by its name: read its config, choose kernels, read its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple, cast, get_args

from ridgeline.errors import DeviceError, RequestError
from ridgeline.load.adapter import MAX_RANK
from ridgeline.load.checkpoint import Checkpoint, open_checkpoint
from ridgeline.load.hub import MODEL_FILES, SMALL_FILES, find_model
from ridgeline.load.packed import Files, open_tensors
from ridgeline.load.weights import RandomWeights, StoredWeights, float_type
from ridgeline.nn import Model, PassingModel
from ridgeline.nn.adapters import AdapterSlots
from ridgeline.nn.group import Group
from ridgeline.ops import OpsTable, api, open_table, resolve_device
from ridgeline.ops.devices import missing_kernels, served_by_definitions
from ridgeline.ops.table import COMPOSED
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import Blocks, MaskedDiffusion, ModelSpec, WholeSequence
from ridgeline.spec.diffusion import BlockCache
from ridgeline.spec.dtype import DTYPE_NAMES, DType, config_dtype
from ridgeline.spec.footprint import footprint
from ridgeline.spec.quant import AS_STORED, PLAIN, Format, FormatTable, activations_of, format_of
from ridgeline.spec.storage import EXACT, Storage
from ridgeline.spec.text import num_bytes

MOST_LORAS = 1024
LoadFormat = Literal["auto", "safetensors", "dummy"]
ProgressBar = Callable[[int], Callable[[int], None]]  # total bytes -> called with the bytes of each weight


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for loading a model; names as in vLLM.

    dtype: type of weight matrices; `auto` keeps the checkpoint's. max_model_len: longest context to serve, in tokens;
    None: the model's own. load_format: `dummy` draws random weights from `seed`. weights: format of the weight
    matrices: `auto` as they are stored; others (`int8`, `int4-128-asym`, see spec.quant.format_of) are rounded to
    nearest. activations: how inputs of products are taken, bf16 for all matrices; None: as the format says. threads:
    number of threads of the kernels of device cpu; None: the number of physical cores. diffusion_block: tokens of a
    block of a block diffusion model; None: as its config says. block_cache: which rows later passes over a block read
    as its first pass left them, in a diffusion model that sees whole sequences (spec.diffusion.BlockCache); None: as
    its config says, which is `none` for published models. max_loras: most adapters beside the weights at one time; 0:
    none. max_lora_rank: largest rank of their terms.
    """

    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    revision: str | None = None
    seed: int = 0
    ops: Mapping[str, str] | None = None
    weights: str = "auto"
    activations: str | None = None
    threads: int | None = None
    diffusion_block: int | None = None
    block_cache: str | None = None
    max_loras: int = 0
    max_lora_rank: int = 16


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run. notes: remarks for the user about how it was loaded.

    mapped_bytes: bytes of weights that are views of files, which become resident when they are used. weight_bytes:
    bytes of all weights. storage: how keys and values are stored. dtype: type of the matrices of floats. dtypes: types
    of those that have another one, by name. dequantized: formats of the matrices that were codes and became floats.
    """

    model: Model
    checkpoint: Checkpoint
    table: OpsTable
    max_model_len: int
    eos_token_ids: frozenset[int]
    mapped_bytes: int = 0
    weight_bytes: int = 0
    notes: tuple[str, ...] = ()
    storage: Storage = EXACT
    dtype: DType = "float32"
    dtypes: Mapping[str, DType] = field(default_factory=dict)
    dequantized: Mapping[str, Format] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """Return the type or the format that most matrices have in memory."""
        return self.model.formats.type_of_most(self.dtype)

    @property
    def stored_weights(self) -> str:
        """Return the type or the format of most matrices before a device without a kernel for it made them floats."""
        return self.model.formats.with_others(self.dequantized).type_of_most(self.dtype)

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def dense_step(
        self, sequences: Sequence[Sequence[int]], prompts: Sequence[int] | None = None,
        types: Sequence[Sequence[int]] | None = None,
    ) -> DenseStep:  # fmt: skip
        """Return a step over whole sequences without pages, whose keys and values are rounded as pages round them.

        types: the type of each token, for an encoder that has types. Raises RequestError for a part of a model.
        """
        if self.spec.ranks > 1:
            raise RequestError(
                f"this needs the whole model, and it is cut for {self.spec.ranks} ranks; leave out "
                "tensor_parallel_size (--tensor-parallel-size)"
            )
        memory = self.table.memory
        is_kept = self.storage.is_exact and memory.float_bytes == self.storage.element_bytes
        store = None if is_kept else self.table.primitive(api.STORE_ROWS, self.storage)
        return DenseStep.build(sequences, memory, store, prompts, types)


def no_progress(total: int) -> Callable[[int], None]:
    """Show no progress."""
    return lambda done: None


def load_model(
    name: str, options: LoadOptions, progress_bar: ProgressBar = no_progress, table: OpsTable | None = None,
    group: Group | None = None,
) -> LoadedModel:  # fmt: skip
    """Load a local folder, a GGUF file or a hub id.

    table: the kernels of a model beside which this one runs, with the same device; None: they are opened. group: the
    ranks that compute the model together; the part of its rank is loaded.
    Raises CheckpointError, ConfigError, DeviceError or RequestError, each with one clear line.
    """
    return _load(name, options, progress_bar, partial(Model, group=group), table, group, options.max_loras > 0)


def pass_model(name: str, options: LoadOptions, progress_bar: ProgressBar = no_progress) -> LoadedModel:
    """Load a model that keeps one layer in memory at a time, for a few forward passes. Raises as `load_model`."""
    return _load(name, options, progress_bar, PassingModel)


def _load(
    name: str, options: LoadOptions, progress_bar: ProgressBar, build: Callable[..., Model],
    table: OpsTable | None = None, group: Group | None = None, adapted: bool = False,
) -> LoadedModel:  # fmt: skip
    dtype, format = _check(options)
    is_dummy = options.load_format == "dummy"
    folder = find_model(name, revision=options.revision, files=SMALL_FILES if is_dummy else MODEL_FILES)
    checkpoint = _with_blocks(open_checkpoint(folder), options.diffusion_block)
    checkpoint = _with_block_cache(checkpoint, options.block_cache)
    files = None if is_dummy else open_tensors(checkpoint)
    whole, part = checkpoint.spec, None
    if group is not None:
        _check_cut(format)
        part = whole.part(group.rank, group.size)
        checkpoint = replace(checkpoint, spec=part)
    spec = checkpoint.spec
    max_model_len = spec.resolve_max_model_len(longest_of(checkpoint, options.max_model_len))
    if table is None:
        table = open_table(resolve_device(options.device), options.ops, options.threads, exact=True)
    _check_activations(options, format, files)
    weights: RandomWeights | StoredWeights
    if files is None:
        sizes = _sizes(checkpoint, None, table, FormatTable(format), dtype)
        shown = progress_bar(sizes.stored * spec.ranks)
        weights = RandomWeights(whole, table.memory, sizes.dtype, options.seed, shown, part)
        formats = FormatTable(format)
    else:
        weights = StoredWeights(
            whole, checkpoint.family.names, files, table.memory, dtype, progress_bar(files.num_bytes()),
            None if options.activations is None else activations_of(options.activations),
            lambda own: not format.is_lossy and _multiplies(table, own), part,
        )  # fmt: skip
        formats = FormatTable(format, weights.formats.by_name)
        sizes = _sizes(checkpoint, weights, table, formats, dtype)
    adapters = adapter_slots(spec, table, options) if adapted else None
    if build is not PassingModel:
        room = adapter_bytes(spec, options) if adapted else 0
        check_memory(sizes.total - sizes.mapped + spec.frequency_bytes(max_model_len) + room, table)
    scales = weights.kv_scales if isinstance(weights, StoredWeights) else {}
    more = {} if adapters is None else {"adapters": adapters}
    model = build(spec, weights, table, max_model_len, formats, kv_scales=scales, **more)
    if files is not None and table.driver is not None:  # the kernels have copies, and the system read neighbors too
        for tensor in files:
            files.release(tensor)
    missing = *missing_kernels(table.memory.device), *served_by_definitions(table)
    notes = (*checkpoint.notes, *missing, *_dequantized(weights, format, dtype))
    return LoadedModel(
        model, checkpoint, table, max_model_len, frozenset(checkpoint.eos_token_ids), sizes.mapped, sizes.total,
        notes=notes, dtype=sizes.dtype, dtypes=sizes.dtypes,
        dequantized=weights.dequantized if isinstance(weights, StoredWeights) and not format.is_lossy else {},
    )  # fmt: skip


def adapter_slots(spec: ModelSpec, table: OpsTable, options: LoadOptions) -> AdapterSlots:
    """Return room for the adapters that the options ask for. Raises RequestError where they cannot be served."""
    limits = {"max_loras (--max-loras)": (options.max_loras, MOST_LORAS)}
    limits["max_lora_rank (--max-lora-rank)"] = options.max_lora_rank, MAX_RANK
    for name, (value, most) in limits.items():
        if type(value) is not int or not 1 <= value <= most:
            raise RequestError(f"{name} is {value!r}; it must be a whole number from 1 to {most}")
    reasons = {
        "an encoder": spec.encoder is not None, "a diffusion model": spec.diffusion is not None,
        "a model that is cut for several ranks": spec.ranks > 1, "device cuda": not table.memory.on_host,
    }  # fmt: skip
    for what, is_so in reasons.items():
        if is_so:
            raise RequestError(f"adapters beside the weights are not served with {what} yet; use ridgeline merge")
    return AdapterSlots(table, options.max_loras, options.max_lora_rank)


def adapter_bytes(spec: ModelSpec, options: LoadOptions) -> int:
    """Return the bytes of the room for adapters beside the weights."""
    matrices = [w.shape for w in spec.weights() if w.name.startswith("layers.") and len(w.shape) == 2 and w.is_matrix]
    numbers = sum(options.max_lora_rank * (rows + columns) + 2 * rows for rows, columns in matrices)
    return 4 * options.max_loras * numbers


def longest_of(checkpoint: Checkpoint, wanted: int | None) -> int | None:
    """Return the longest text as the user wants it, or as the model's folder says; None if neither says one."""
    own = checkpoint.vectors
    if wanted is not None or own is None or own.max_tokens is None:
        return wanted
    return min(own.max_tokens, checkpoint.spec.max_position_embeddings)


def _with_blocks(checkpoint: Checkpoint, size: int | None) -> Checkpoint:
    """Return the checkpoint of a model whose blocks have `size` tokens; None: as its config says."""
    spec = checkpoint.spec
    if size is None:
        return checkpoint
    if not isinstance(spec.sight, Blocks):
        raise RequestError(
            f"diffusion_block (--diffusion-block) is {size}, but {spec.family} fills no blocks; leave it out"
        )
    try:
        return replace(checkpoint, spec=spec.seeing(Blocks(size), spec.diffusion))
    except ValueError as e:
        raise RequestError(f"diffusion_block (--diffusion-block) is {size}: {e}") from None


def _with_block_cache(checkpoint: Checkpoint, kind: str | None) -> Checkpoint:
    """Return the checkpoint of a model with a block cache; None: as its config says."""
    spec, known = checkpoint.spec, get_args(BlockCache)
    if kind is None:
        return checkpoint
    if kind not in known:
        raise RequestError(f"block_cache (--block-cache) is {kind!r}; known are {', '.join(known)}")
    if not isinstance(spec.sight, WholeSequence) or not isinstance(spec.diffusion, MaskedDiffusion):
        why = "has no block cache: it computes one token after the other"
        if spec.diffusion is not None:
            why = "sees nothing after its block, so that its pages are an exact cache already"
        raise RequestError(f"block_cache (--block-cache) is {kind}, but {spec.family} {why}; leave it out")
    return replace(
        checkpoint, spec=replace(spec, diffusion=replace(spec.diffusion, block_cache=cast(BlockCache, kind)))
    )


class _Sizes(NamedTuple):
    """Bytes of weights: as they are stored, as they are kept in memory, and of those that stay views of files."""

    dtype: DType
    stored: int
    total: int
    mapped: int
    dtypes: Mapping[str, DType]


def _sizes(
    checkpoint: Checkpoint, weights: StoredWeights | None, table: OpsTable, formats: FormatTable, dtype: DType | None
) -> _Sizes:
    """Return the sizes of the weights. weights: None for random ones. dtype: the user's; None: the checkpoint's."""
    spec = checkpoint.spec
    own = dtype or config_dtype(checkpoint.config)
    found = {} if weights is None else weights.dtypes
    if weights is not None and dtype is None and weights.dequantized:
        own = "float32" if "float32" in map(float_type, weights.dequantized.values()) else own
    dtypes = {name: kind for name, kind in found.items() if kind != own}
    packs = _packs(table, formats.default)
    stored = footprint(spec, AS_STORED, own, packs=False).total
    kept = footprint(spec, formats, own, packs=packs, dtypes=dtypes)
    is_mapped = weights is not None and dtype is None and table.memory.on_host
    if packs or formats.is_lossy:
        looked_up = weights is not None and "embed.weight" not in {**(formats.by_name or {}), **weights.dequantized}
        return _Sizes(own, stored, kept.total, kept.rest if is_mapped and looked_up else 0, dtypes)
    if weights is None or dtype is not None or spec.ranks > 1:
        return _Sizes(own, stored, kept.total, 0, dtypes)
    return _Sizes(own, stored, weights.num_bytes, weights.mapped_bytes if is_mapped else 0, dtypes)


def _check_cut(format: Format) -> None:
    """Raise RequestError for a format to which the matrices of a part would be rounded."""
    if format.is_lossy:
        raise RequestError(
            f"weights (--weights) {format.name}: scales belong to whole matrices, and a rank reads parts of them; take "
            "a checkpoint in this format (ridgeline quantize makes one), or one rank (--tensor-parallel-size 1)"
        )


def _multiplies(table: OpsTable, format: Format) -> bool:
    """Return whether codes of a format are multiplied by a kernel, or the device has no kernels at all."""
    return _packs(table, format) or not _packs(table, PLAIN)


def _packs(table: OpsTable, format: Format) -> bool:
    """Return whether a kernel packs matrices of a format."""
    return table.choose(api.PRODUCT, format).backend != COMPOSED


def _check_activations(options: LoadOptions, format: Format, files: Files | None) -> None:
    """Raise RequestError for activations that need codes where no matrix is quantized."""
    is_coded = format.is_lossy or (files is not None and files.stored)
    if options.activations not in (None, "bf16") and not is_coded:
        raise RequestError(
            f"activations (--activations) {options.activations}: the weights are not quantized; take bf16, add "
            "--weights int8 or int4, or leave it out"
        )


def _dequantized(weights: RandomWeights | StoredWeights, format: Format, dtype: DType | None) -> tuple[str, ...]:
    """Return notes on the matrices of codes that became floats. format: to which they are rounded then."""
    found = weights.dequantized if isinstance(weights, StoredWeights) else {}
    by_type = Counter((own, dtype or float_type(own)) for own in found.values())
    why = (
        f"and rounded again to {format.name}" if format.is_lossy else "because no kernel here multiplies with the codes"
    )
    return tuple(
        f"{count} matrices in {own.name} are dequantized to {kind}, {why}{_lost_activations(own, format)}"
        for (own, kind), count in sorted(by_type.items(), key=lambda item: (item[0][0].name, item[0][1]))
    )


def _lost_activations(own: Format, format: Format) -> str:
    """Return the end of a note: activations that matrices of codes round, and floats do not."""
    if format.is_lossy or own.activations in ("exact", format.activations):
        return ""
    return f"; activations are exact, which {own.name} rounds ({own.activations})"


def _check(options: LoadOptions) -> tuple[DType | None, Format]:
    """Return the type that matrices are read in (None: the checkpoint's) and their format.

    Raises RequestError for an option out of range.
    """
    if options.dtype != "auto" and options.dtype not in DTYPE_NAMES:
        raise RequestError(f"dtype (--dtype) {options.dtype!r} is not known; known are auto, {', '.join(DTYPE_NAMES)}")
    if options.load_format not in get_args(LoadFormat):
        raise RequestError(
            f"load_format (--load-format) {options.load_format!r} is not known; known are {get_args(LoadFormat)}"
        )
    if type(options.seed) is not int or not 0 <= options.seed < 2**63:
        raise RequestError(f"seed is {options.seed!r}; it must be a whole number from 0 to 2**63 - 1")
    dtype = None if options.dtype == "auto" else DTYPE_NAMES[options.dtype]
    return dtype, format_of(options.weights, options.activations)


def check_memory(need: int, table: OpsTable) -> None:
    """Raise DeviceError if weights that must be copied do not fit, before anything is allocated."""
    free = table.memory.free_bytes()
    if free is not None and need > free:
        raise DeviceError(
            f"the weights take {num_bytes(need)}, {table.memory.device} has {num_bytes(free)} free; "
            "take --weights int8 or int4, a narrower dtype, a smaller model or another device"
        )
