"""Options of `ridgeline train --draft-for`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from ridgeline.cli.option import option

if TYPE_CHECKING:
    from ridgeline.train.drafts import DraftOptions


def _draft_option(*names: str, help: str, least: int | None = None) -> Any:
    return option(*names, help=help, min=least, panel="Drafts for speculative decoding")


_DraftFor = Annotated[
    str | None,
    _draft_option(
        "--draft-for",
        help="Train a draft for this model, a folder or a hub id, on what the model says after prompts from --data. "
        "Default: none.",
    ),
]
_Kind = Annotated[
    str | None,
    _draft_option(
        "--kind",
        help="Kind of the draft: medusa, eagle or eagle3 (heads on the model's hidden states), or draft (a small "
        "model). Default: none; required with --draft-for.",
    ),
]
_TrainTokens = Annotated[
    int | None,
    _draft_option(
        "--train-tokens",
        least=1,
        help="Tokens that a draft is trained on, repetitions included. More accept more and take more time. Default: "
        "2000000.",
    ),
]
_ContinuationTokens = Annotated[
    int | None,
    _draft_option(
        "--continuation-tokens",
        least=1,
        help="Tokens that the model writes to train its drafts on, once for all kinds. Default: 1000000.",
    ),
]
_OutputLen = Annotated[
    int | None, _draft_option("--output-len", least=2, help="Longest continuation in tokens. Default: 256.")
]
_Depth = Annotated[
    int | None,
    _draft_option(
        "--depth",
        least=1,
        help="Draft tokens of a verification in the final measurement, and number of Medusa's heads. Default: 4.",
    ),
]
_DraftSteps = Annotated[
    int | None,
    _draft_option(
        "--draft-steps",
        least=1,
        help="Draft steps in a row that an EAGLE head practises. More accept more at depth and take more time. "
        "Default: 4 for eagle3, 1 for eagle.",
    ),
]
_DraftVocab = Annotated[
    int | None,
    _draft_option(
        "--draft-vocab",
        least=1,
        help="Number of tokens that an EAGLE-3 head can propose, the most frequent ones. Default: the whole "
        "vocabulary, at most 32000.",
    ),
]
_SharedHead = Annotated[
    bool, _draft_option("--shared-head", help="Give all Medusa heads one output matrix, to save memory.")
]


@dataclass(eq=False, repr=False)
class DraftFlags:
    """The draft to train; the names are those of DraftOptions, except for draft_for."""

    draft_for: _DraftFor = None
    kind: _Kind = None
    train_tokens: _TrainTokens = None
    continuation_tokens: _ContinuationTokens = None
    output_len: _OutputLen = None
    depth: _Depth = None
    draft_steps: _DraftSteps = None
    draft_vocab: _DraftVocab = None
    shared_head: _SharedHead = False


# Options of other groups that apply to drafts too.
RUN = ("batch_tokens", "learning_rate", "warmup_steps", "decay_share", "weight_decay", "clip", "save_every", "seed")
MODEL = ("spec", "data", "out", "held_out", "license", "dtype")


def check_draft_flags(draft: DraftFlags, model: Any, run: Any) -> bool:
    """Return whether a draft is to be trained. model, run: the other groups of `ridgeline train`.

    Raises RequestError for options that do not apply, and for missing ones.
    """
    from ridgeline.errors import RequestError

    if draft.draft_for is None:
        if given := first_given(draft, ()):
            raise RequestError(f"{given} is for drafts; add --draft-for MODEL, or leave it out")
        return False
    if given := first_given(model, MODEL) or first_given(run, RUN):
        raise RequestError(f"{given} does not apply to --draft-for; leave it out")
    if model.spec is not None and draft.kind != "draft":
        raise RequestError(f"the SPEC {model.spec} describes a draft model; leave it out, or take --kind draft")
    for name, value in (("kind", draft.kind), ("data", model.data), ("out", model.out)):
        if not value:
            raise RequestError(f"{name} is missing: give --{name}")
    if model.dtype not in ("bfloat16", "float32"):
        raise RequestError(f"--dtype is {model.dtype}; use bfloat16 or float32")
    return True


def draft_options(draft: DraftFlags, model: Any, run: Any) -> DraftOptions:
    """Return the options of the training. Options that were not given have the defaults of DraftOptions."""
    from ridgeline.train.drafts import DraftOptions

    own = {f.name: getattr(draft, f.name) for f in fields(draft) if f.name != "draft_for"}
    more = {name: getattr(run, name) for name in RUN} | {"held_out": model.held_out}
    return DraftOptions(**{name: value for name, value in {**own, **more}.items() if value is not None})


def first_given(group: Any, but: tuple[str, ...]) -> str | None:
    """Return the first option of a group that has another value than its default, besides those in `but`."""
    names = (f.name for f in fields(group) if f.name not in but and getattr(group, f.name) != f.default)
    found = next(names, None)
    return None if found is None else f"--{found.replace('_', '-')}"
