"""Read what is known of a model before its weights: config.json and generation_config.json, or a GGUF's metadata."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.archs import Family, family_of, quantization_of, spec_from_config
from ridgeline.archs.quantization import SIDE_FILES, Quantization
from ridgeline.errors import ConfigError
from ridgeline.load.gguf.model import GgufModel, open_gguf
from ridgeline.load.gguf.paths import is_gguf
from ridgeline.load.vectors import read_vectors
from ridgeline.spec import CanvasDiffusion, ModelSpec
from ridgeline.spec.diffusion import IN_ORDER
from ridgeline.spec.encoder import Vectors
from ridgeline.spec.folders import read_json
from ridgeline.spec.request import SAMPLING

# generation_config.json: fields that are applied as sampling parameters ...
SAMPLING_FIELDS = tuple(name for name, _, parameter in SAMPLING if parameter.recommended)
# ... fields that say nothing about which tokens to pick, or that the caller decides ...
_OTHER_FIELDS = frozenset(
    "eos_token_id bos_token_id pad_token_id decoder_start_token_id transformers_version _from_model_config do_sample "
    "max_length max_new_tokens min_length use_cache cache_implementation cache_config output_attentions output_scores "
    "output_logits output_hidden_states return_dict_in_generate num_return_sequences trust_remote_code "
    "assistant_confidence_threshold num_assistant_tokens num_assistant_tokens_schedule prompt_lookup_num_tokens "
    "is_assistant compile_config disable_compile chat_format max_window_size".split()
)
# Fields that have no effect when they are 1. All fields have no effect when they are null, false, 0 or empty. A note
# names all remaining fields, because they are not applied.
_NEUTRAL_AT_ONE = frozenset(
    "num_beams num_beam_groups length_penalty encoder_repetition_penalty repetition_penalty".split()
)


# generation_config.json: how DiffusionGemma fills a canvas, by our names.
_CANVAS_FIELDS = {
    "max_denoising_steps": "passes", "t_min": "t_min", "t_max": "t_max", "stability_threshold": "stable_passes",
    "confidence_threshold": "confident", "sampler_config": "",
}  # fmt: skip
ENTROPY_SAMPLER = "EntropyBoundSamplerConfig"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The facts about a model that are known before its weights are read.

    sampling_defaults: fields of generation_config.json that are sampling parameters (SAMPLING_FIELDS); temperature 0 if
    it disables sampling. notes: settings that are not applied, and parts of the model that are left out. quantization:
    how matrices are stored; None for plain ones. folder: the model's folder or its GGUF file. gguf: the description of
    the file; None for a folder. vectors: how texts become embeddings, if the folder says so.
    """

    folder: Path
    config: Mapping[str, Any]
    spec: ModelSpec
    family: Family
    eos_token_ids: tuple[int, ...]
    sampling_defaults: Mapping[str, float]
    notes: tuple[str, ...]
    quantization: Quantization | None = None
    gguf: GgufModel | None = None
    vectors: Vectors | None = None


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the config.json of a local folder, or what a GGUF file says instead. Raises CheckpointError."""
    if is_gguf(folder):
        return open_gguf(folder).config
    return _with_side_file(read_json(folder / "config.json"), folder)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the configs of a local folder, or the metadata of a GGUF file. Raises CheckpointError or ConfigError."""
    if is_gguf(folder):
        return _open_gguf(folder)
    config = read_config(folder)
    spec = spec_from_config(config)
    path = folder / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    if isinstance(spec.diffusion, CanvasDiffusion):
        spec = replace(spec, diffusion=_with_settings(spec.diffusion, generation))
        generation = {name: value for name, value in generation.items() if name not in _CANVAS_FIELDS}
    fields = tuple(name for name in SAMPLING_FIELDS if spec.diffusion is None or name not in IN_ORDER)
    family = family_of(config)
    language = config if family.within is None else {**config, **config[family.within]}
    scheme = quantization_of(config)
    return Checkpoint(
        folder, config, spec, family,
        eos_token_ids=_token_ids(generation, language, "eos_token_id", spec.vocab_size),
        sampling_defaults=_sampling_defaults(generation, fields),
        notes=(
            *((family.note,) if family.note else ()), *_unapplied(generation, fields), *(scheme.notes if scheme else ())
        ),
        quantization=scheme,
        vectors=read_vectors(folder, config, spec.hidden_size),
    )  # fmt: skip


def _with_settings(canvas: CanvasDiffusion, generation: Mapping[str, Any]) -> CanvasDiffusion:
    """Return how a canvas is filled, with the settings of generation_config.json. Raises ConfigError."""
    sampler = generation.get("sampler_config") or {}
    if not isinstance(sampler, Mapping) or sampler.get("_cls_name", ENTROPY_SAMPLER) != ENTROPY_SAMPLER:
        raise ConfigError(f"generation_config.json: sampler_config {sampler!r:.100} is not an {ENTROPY_SAMPLER}")
    given = {ours: generation.get(name) for name, ours in _CANVAS_FIELDS.items() if ours}
    given["entropy_bound"] = sampler.get("entropy_bound")
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        whole = isinstance(getattr(canvas, name), int)
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise ConfigError(f"generation_config.json: {name} is {value!r:.100}; it must be a number")
    try:
        return replace(canvas, **found)
    except ValueError as e:
        raise ConfigError(f"generation_config.json: {e}") from None


def _open_gguf(path: Path) -> Checkpoint:
    model = open_gguf(path)
    return Checkpoint(
        path, model.config, model.spec, replace(family_of(model.config), names=model.architecture.names),
        eos_token_ids=_token_ids({}, model.config, "eos_token_id", model.spec.vocab_size),
        sampling_defaults=model.sampling, notes=model.notes, gguf=model,
    )  # fmt: skip


def _with_side_file(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config with the quantization that some tools write into a file beside it, unless it has its own."""
    if config.get("quantization_config") is not None:
        return config
    for name, convert in SIDE_FILES.items():
        if (folder / name).exists():
            return {**config, "quantization_config": convert(read_json(folder / name))}
    return config


def _token_ids(generation: Mapping[str, Any], config: Mapping[str, Any], name: str, vocab: int) -> tuple[int, ...]:
    """Return one id or a list of them; generation_config.json has priority."""
    value = generation.get(name)
    if value is None:
        value = config.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"{name} is {value!r}; it must be a token id or a list of them")
    # Ids beyond the vocabulary are leftovers in some configs; the model cannot produce them.
    return tuple(i for i in ids if 0 <= i < vocab)


def _sampling_defaults(generation: Mapping[str, Any], fields: Sequence[str]) -> dict[str, float]:
    out: dict[str, float] = {}
    for name in fields:
        value = generation.get(name)
        if value is None:
            continue
        if type(value) not in ((int,) if name == "top_k" else (int, float)) or not abs(value) <= sys.float_info.max:
            kind = "a whole number" if name == "top_k" else "a finite number"
            raise ConfigError(f"generation_config.json: {name} is {value!r}; it must be {kind}")
        out[name] = value
    return {"temperature": 0.0} if generation.get("do_sample") is False else out


def _unapplied(generation: Mapping[str, Any], fields: Sequence[str]) -> tuple[str, ...]:
    """Return a note that names the fields with an effect that are not applied."""
    asked = sorted(
        name
        for name, value in generation.items()
        if name not in fields
        and name not in _OTHER_FIELDS
        and value not in (None, False, [], {}, "")
        and not (name in _NEUTRAL_AT_ONE and value == 1)
    )
    return (f"generation_config.json: these fields are not applied: {', '.join(asked)}",) if asked else ()
