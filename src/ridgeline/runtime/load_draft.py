"""Load a draft model or a head beside its target, and check that the two fit together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ridgeline.errors import CheckpointError, RequestError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.heads import is_head
from ridgeline.load.hub import HEAD_FILES, SMALL_FILES, find_model
from ridgeline.load.tokenizer import Tokenizer, has_tokenizer
from ridgeline.runtime.heads import LoadedHead, load_head
from ridgeline.runtime.load import LoadedModel, LoadOptions, ProgressBar, load_model, no_progress
from ridgeline.spec import ModelSpec


def load_draft(
    name: str, target: LoadedModel, tokenizer: Tokenizer | None, options: LoadOptions,
    progress_bar: ProgressBar = no_progress,
) -> LoadedModel | LoadedHead:  # fmt: skip
    """Return a draft model or a head on the device of its target, with the target's kernels and options.

    name: a folder, a GGUF file, a built-in model or a hub id. tokenizer: the target's; None: only the sizes of the
    vocabularies are compared. Raises RequestError for a draft model that does not fit; CheckpointError, ConfigError and
    DeviceError as `load_model` and `load_head` do.
    """
    try:
        folder = find_model(name, files=(*SMALL_FILES, *HEAD_FILES))
    except CheckpointError as e:
        raise RequestError(
            f"speculative (--speculative) is {name!r}: {e}; it must be auto, off, ngram, or a draft model's or "
            "head's folder or hub id"
        ) from None
    if folder.is_dir() and is_head(folder):
        return load_head(folder, target, options.weights)
    spec = open_checkpoint(folder).spec
    _check_state(name, spec)
    _check_vocabulary(name, folder, spec, target, tokenizer)
    length = min(target.max_model_len, spec.max_position_embeddings)
    options = replace(options, max_model_len=length, revision=None, max_loras=0)
    draft = load_model(name, options, progress_bar, target.table)
    return replace(draft, storage=target.storage)


def _check_state(name: str, spec: ModelSpec) -> None:
    """Raise RequestError for recurrent layers: their state cannot go back to the last accepted token."""
    for number, layer in enumerate(spec.layers):
        if layer.mixer is not None and layer.mixer.state().snapshot:
            raise RequestError(
                f"the draft model {name} has a recurrent layer (layer {number}); its state cannot be taken back when a "
                "draft is rejected; use a draft model with attention only"
            )


def _check_vocabulary(
    name: str, folder: Path, spec: ModelSpec, target: LoadedModel, tokenizer: Tokenizer | None
) -> None:
    """Raise RequestError for the first token that stands for another text in the draft's vocabulary."""
    if tokenizer is not None and has_tokenizer(folder):
        other = Tokenizer.from_folder(folder)
        ours, theirs = ([one.token_name(i) for i in range(one.vocab_size)] for one in (tokenizer, other))
        for token, (one, two) in enumerate(zip(ours, theirs, strict=False)):
            if one != two:
                raise RequestError(
                    f"the draft model {name} has another vocabulary: token {token} is {two!r} there and {one!r} in the "
                    "model; use a draft model with the same tokenizer"
                )
        if len(ours) == len(theirs):
            return  # models of one tokenizer may have different numbers of unused tokens
        sizes = len(theirs), len(ours)
    else:
        sizes = spec.vocab_size, target.spec.vocab_size
    if sizes[0] != sizes[1]:
        raise RequestError(
            f"the draft model {name} has {sizes[0]} tokens and the model {sizes[1]}; use a draft model with the same "
            "tokenizer"
        )
