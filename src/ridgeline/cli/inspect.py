"""`ridgeline inspect`: describe a model from its config alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o

if TYPE_CHECKING:
    from ridgeline.cli.flags.known import StoredMatrices
    from ridgeline.cli.show.tables import Line, Table
    from ridgeline.spec import AnyLayer, ModelSpec
    from ridgeline.spec.dtype import DType
    from ridgeline.spec.quant import FormatTable
    from ridgeline.spec.storage import Storage


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            help="A published model's name (mistral-7b), a folder with a config.json, a GGUF file, or a hub id."
        ),
    ],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dtype: o.DType = "auto",
    weights: o.WeightFormat = "auto",
    kv_cache_dtype: o.KVCacheDType = "auto",
    max_model_len: o.MaxModelLen = None,
    revision: o.Revision = None,
) -> None:
    """Show a model's layers, weights and state, computed from config.json and the headers of quantized weights."""
    from ridgeline.archs import spec_from_config
    from ridgeline.cli.flags.known import StoredMatrices, quantized_checkpoint, stored_matrices
    from ridgeline.settings import choose_storage, storage_name
    from ridgeline.spec.dtype import DTYPE_NAMES
    from ridgeline.spec.quant import FormatTable, format_of

    kv_cache_dtype, format = storage_name(kv_cache_dtype), format_of(weights)
    checkpoint = quantized_checkpoint(model) if revision is None else None
    config = _config(model, revision) if checkpoint is None else dict(checkpoint.config)
    spec = spec_from_config(config) if checkpoint is None else checkpoint.spec
    stored = StoredMatrices(FormatTable(format))
    if checkpoint is not None:
        found = stored_matrices(checkpoint, DTYPE_NAMES.get(dtype))
        stored = found if not format.is_lossy else replace(found, formats=FormatTable(format), dequantized={})
    kind = weight_dtype(config, dtype)
    storage, _ = choose_storage(kv_cache_dtype, stored.formats.with_others(stored.dequantized).type_of_most(kind))
    report = describe(spec, kind, max_model_len, stored, storage)
    if (price := _price(model)) is not None:
        report["price"] = price
    if json_output:
        import json

        from ridgeline.spec import to_json

        print(json.dumps({**report, "spec": to_json(spec), **_names(config, spec)}, indent=2))
    else:
        _print(model, spec, report, storage)


def _price(model: str) -> dict[str, Any] | None:
    """Return the price report in a folder that `prune` or `convert` wrote; None for any other model."""
    from ridgeline.spec.folders import existing, read_json

    folder = existing(model)
    path = None if folder is None else folder / "price_report.json"
    return dict(read_json(path)) if path is not None and path.is_file() else None


def _config(model: str, revision: str | None) -> dict[str, Any]:
    """Return the parsed config.json of a folder, of a published model in `plan`'s catalog, or of a model on the hub."""
    from ridgeline.catalog.models import find_writer, published_config
    from ridgeline.load.checkpoint import read_config
    from ridgeline.load.hub import CONFIG_FILES, find_model
    from ridgeline.spec.folders import existing

    known = published_config(model) if revision is None and existing(model) is None else None
    if known is None:
        return dict(read_config(find_model(model, revision=revision, files=CONFIG_FILES)))
    find_writer(model)  # raises RequestError for a diffusion model
    return known


def _names(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return the table of names that a description of this model has; nothing for a model with our own names."""
    from ridgeline.archs import OUR_MODEL_TYPE, family_of
    from ridgeline.archs.table import table_to_json

    if config["model_type"] == OUR_MODEL_TYPE:
        return {"names": config["names"]} if config.get("names") is not None else {}
    return {"names": table_to_json(family_of(config).names, spec)}


def weight_dtype(config: dict[str, Any], wanted: str) -> DType:
    """Return the type of the weight matrices: the requested one, or for "auto" the checkpoint's."""
    from ridgeline.errors import RequestError
    from ridgeline.spec.dtype import DTYPE_NAMES, config_dtype

    if wanted == "auto":
        return config_dtype(config)
    if wanted not in DTYPE_NAMES:
        raise RequestError(f"--dtype is {wanted}; use auto, {', '.join(DTYPE_NAMES)}")
    return DTYPE_NAMES[wanted]


def describe(
    spec: ModelSpec, dtype: DType, max_model_len: int | None, stored: StoredMatrices, storage: Storage
) -> dict[str, Any]:
    """Return a model's figures for contexts of up to `max_model_len` tokens (None: the model's longest). Sizes are in
    bytes.

    stored: how matrices are stored, with the checkpoint's scales of keys and values in fp8. storage: how attention's
    keys and values are stored. Quantized weights are counted as the kernels pack them, plus the embedding in its own
    type, because its rows are looked up.
    """
    from dataclasses import asdict

    from ridgeline.cli.show.matrices import matrix_rows
    from ridgeline.spec.footprint import footprint
    from ridgeline.spec.storage import num_row_layers
    from ridgeline.spec.storage import state_bytes as bytes_of

    formats, context = stored.formats, spec.resolve_max_model_len(max_model_len)
    is_coded = formats.is_lossy or bool(stored.dtypes)
    rows = tuple(matrix_rows(spec, stored, dtype)) if is_coded else ()
    states = [layer.mixer.state() for layer in spec.layers if layer.mixer and not spec.encoder]

    def state_bytes(tokens: int) -> int:
        return sum(bytes_of(state, storage, tokens) for state in states)

    return {
        "family": spec.family,
        "layers": len(spec.layers),
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
        "max_model_len": context,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "num_params": spec.num_params(),
        "num_active_params": spec.num_active_params(),
        "weight_dtype": dtype,
        "weight_format": formats.main.name,
        "weight_bytes": footprint(spec, formats, dtype, packs=is_coded, dtypes=stored.dtypes).total,
        "formats": _by_format(spec, formats, dtype),
        "matrices": [asdict(row) for row in rows],
        "compute_dtype": "float32",
        "state_dtype": storage.dtype,
        "state_bytes_per_token": state_bytes(1) - state_bytes(0),
        "state_bytes_per_token_at_max_len": state_bytes(context) - state_bytes(context - 1),
        "state_bytes_at_max_len": state_bytes(context),
        "recurrent_state_bytes": state_bytes(0),
        "row_layers": num_row_layers(spec),
        "kv_scales": dict(stored.kv_scales),
        "diffusion": _diffusion(spec),
        **_encoder(spec),
    }


def _encoder(spec: ModelSpec) -> dict[str, Any]:
    """Return what an encoder has in place of an output head; nothing for other models."""
    if spec.encoder is None:
        return {}
    head = spec.encoder.head
    return {"encoder": {"token_types": spec.encoder.num_token_types, "labels": head.labels if head else 0}}


def _diffusion(spec: ModelSpec) -> dict[str, Any] | None:
    """Return how a diffusion model fills an answer; None for an autoregressive model.

    block: number of tokens that are filled together; None for the whole sequence.
    """
    from ridgeline.spec import CanvasDiffusion, WholeSequence

    if spec.diffusion is None:
        return None
    if isinstance(spec.diffusion, CanvasDiffusion):
        return {"sight": "Canvas", "block": spec.canvas, "mask_token": None, "passes": spec.diffusion.passes}
    return {
        "sight": type(spec.sight).__name__,
        "block": None if isinstance(spec.sight, WholeSequence) else spec.block,
        "mask_token": spec.diffusion.mask_token,
        "predicts_next": spec.diffusion.predicts_next,
    }


def _by_format(spec: ModelSpec, formats: FormatTable, dtype: DType) -> dict[str, dict[str, float]]:
    """Return for each format the number of its matrices and numbers, and the bits of a number with its scale."""
    found: dict[str, dict[str, float]] = {}
    for weight in spec.weights():
        if (format := formats.stored(weight)) is not None:
            row = found.setdefault(format.name, {"matrices": 0, "numbers": 0, "bits": 8 * format.number_bytes(dtype)})
            row["matrices"] += weight.shape[0] if len(weight.shape) == 3 else 1
            row["numbers"] += weight.num_params
    return found


def _print(model: str, spec: ModelSpec, r: dict[str, Any], storage: Storage) -> None:
    from rich.text import Text

    from ridgeline.cli.show.tables import Column, Line, Table, screen, show
    from ridgeline.spec import State
    from ridgeline.spec.storage import storage_of
    from ridgeline.spec.text import describe, index_ranges, num_bytes

    about = f"  {spec.family}, {len(spec.layers)} layers, hidden size {spec.hidden_size}"
    parts: list[Line | Table] = [Line(Text.assemble((model, "bold"), about))]
    for layer, indices in _kinds(spec).items():
        params = sum(w.num_params for w in layer.weights(spec.hidden_size))
        kept = layer.mixer.state() if layer.mixer and not spec.encoder else State(())
        per = "sequence" if kept.snapshot else "token"
        state = f"{num_bytes(sum(storage_of(kept, storage).part_bytes(p) for p in kept.parts))} of state per {per}"
        many = f"layers {index_ranges(indices)}" if len(indices) > 1 else f"layer {indices[0]}"
        parts.append(Line(Text.assemble((many, "bold"), f"  {params:,} parameters and {state} each")))
        mixer, mlp = (describe(part) if part else "none" for part in (layer.mixer, layer.mlp))
        for name, text in (("mixer", mixer), ("mlp", mlp), ("norms", norms(layer))):
            parts.append(Line(f"  {name:<6} {text}", indent=9))
    if "price" in r:
        parts += _made(r["price"])
    facts = Table("", (Column("", right=False), Column("value", right=False, wraps=True)), has_header=False)
    for name, value in _facts(r):
        facts.add_row(name, value)
    parts.append(facts)
    if r["matrices"]:
        from ridgeline.cli.show.matrices import MatrixRow, matrix_table

        parts.append(matrix_table([MatrixRow(**row) for row in r["matrices"]]))
    show(screen(), *parts)


def _made(price: dict[str, Any]) -> list[Line | Table]:
    """Return from what a model was made, and what that cost. Raises ConfigError for a damaged report."""
    from rich.text import Text

    from ridgeline.cli.show.price import parts
    from ridgeline.cli.show.tables import Line, Table
    from ridgeline.errors import ConfigError

    try:
        title, *rest = parts(price)
        found = [Line(Text.assemble(("made by", "bold"), f"  {title}"))]
        return [*found, *(part if isinstance(part, Line | Table) else Line(part) for part in rest)]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ConfigError("price_report.json is damaged; remove it to inspect the model") from None


def _facts(r: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of the table below the layers."""
    from ridgeline.spec.text import num_bytes as size

    head = f"the output head is {'tied to the embedding' if r['tie_word_embeddings'] else 'its own matrix'}"
    if own := r.get("encoder"):
        labels = own["labels"]
        head = f"{labels} scores of labels" if labels else "there is no output head"
    active = r["num_active_params"]
    used = f", {active:,} of them used per token" if active != r["num_params"] else ""
    per, late = r["state_bytes_per_token"], r["state_bytes_per_token_at_max_len"]
    windowed = f", {size(late)} once the windows are full" if late != per else ""
    whole = size(r["state_bytes_at_max_len"])
    recurrent = f" and {size(r['recurrent_state_bytes'])} per sequence in float32" if r["recurrent_state_bytes"] else ""
    return [
        ("parameters", f"{r['num_params']:,}{used}"),
        ("weights", f"{size(r['weight_bytes'])} ({_stored(r)}, float32 vectors)"),
        *_format_rows(r),
        ("compute", _computed(r)),
        ("vocabulary", f"{r['vocab_size']:,} tokens; {head}"),
        ("context", f"{r['max_model_len']:,} tokens"),
        ("state", f"{size(per)} per token in {r['state_dtype']}{windowed}{recurrent}; {whole} at full context"),
        *_scale_rows(r),
        *_diffusion_rows(r["diffusion"]),
    ]


def _diffusion_rows(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the rows about the passes of a diffusion model; none for an autoregressive model."""
    if found is None:
        return []
    block = found["block"]
    if found["mask_token"] is None:
        return [
            ("diffusion", f"a canvas of {block} random tokens; logits are for the token at the same position"),
            ("a token sees", "all tokens before it; in a pass over its canvas also the whole canvas"),
            ("passes", f"at most {found['passes']} for a canvas; --denoising-passes sets it"),
        ]
    sees = f"its own block of {block}, and all blocks before it"
    passes = f"at most {block} for a block, with one token each; --confidence-threshold makes fewer"
    if block is None:
        sees = "all tokens of its sequence"
        passes = (
            "over the whole sequence each; at most one for each token of the answer; --block-length fills it in blocks"
        )
    elif block == 1:
        sees, passes = "itself and all tokens before it", "one for each token"
    logits = "for the token after a position" if found["predicts_next"] else "for the token at the same position"
    return [
        ("diffusion", f"mask token {found['mask_token']:,}; logits are {logits}"),
        ("a token sees", sees),
        ("passes", passes),
    ]


def _scale_rows(r: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row for the scales of a KV cache in fp8 that a checkpoint has, and that such a cache uses."""
    from ridgeline.load.kv_scales import describe_scales

    if not r["kv_scales"]:
        return []
    used = "" if r["state_dtype"] == "fp8" else "; used with --kv-cache-dtype fp8"
    return [("fp8 KV cache", describe_scales(r["kv_scales"], r["row_layers"]) + used)]


def _format_rows(r: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a row for each format of a model whose matrices have several, or codes."""
    if set(r["formats"]) <= {"plain"}:
        return []
    return [
        (name if name != "plain" else "as stored",
         f"{row['matrices']:,} matrices, {row['numbers']:,} numbers of {row['bits']:.4g} bits, scales included")
        for name, row in r["formats"].items()
    ]  # fmt: skip


def _stored(r: dict[str, Any]) -> str:
    """Describe the types of the matrices."""
    dtype, format = r["weight_dtype"], r["weight_format"]
    if format == "plain":
        return f"{dtype} matrices"
    return f"{format} matrices, {dtype} tables and small matrices"


def _computed(r: dict[str, Any]) -> str:
    from ridgeline.spec.quant import format_of

    if r["weight_format"] == "plain":
        return f"{r['compute_dtype']} activations; matrices are converted to float32 as they are used"
    if format_of(r["weight_format"]).activations == "exact":
        return f"{r['compute_dtype']} activations, exact in products with quantized matrices"
    return f"{r['compute_dtype']} activations, quantized to 8 bits for products with quantized matrices"


def _kinds(spec: ModelSpec) -> dict[AnyLayer, list[int]]:
    """Return the distinct layers, each with the indices where it occurs."""
    kinds: dict[AnyLayer, list[int]] = {}
    for i, layer in enumerate(spec.layers):
        kinds.setdefault(layer, []).append(i)
    return kinds


def norms(layer: AnyLayer) -> str:
    """Describe the normalization of a layer."""
    from ridgeline.spec import DeepNormLayer, ParallelLayer
    from ridgeline.spec.text import describe

    if isinstance(layer, DeepNormLayer):
        mixer = f"{layer.mixer_alpha:.6g} x + {layer.mixer_beta:.6g} mixer(x)"
        mlp = f"{layer.mlp_alpha:.6g} x + {layer.mlp_beta:.6g} mlp(x)"
        return f"pre, of the residual stream, which becomes {mixer}, then {mlp}: {describe(layer.pre_norm)}"
    if isinstance(layer, ParallelLayer):
        count = "one norm" if layer.one_norm else "branches"
        return f"pre, {count} in parallel: {describe(layer.pre_norm)}"
    kinds = [name for name, norm in (("pre", layer.pre_norm), ("post", layer.post_norm)) if norm]
    norm = layer.pre_norm or layer.post_norm
    own = f", before the MLP {describe(layer.mlp_pre_norm)}" if layer.mlp_pre_norm else ""
    return (f"{' and '.join(kinds)}: {describe(norm)}" if norm else "none") + own
