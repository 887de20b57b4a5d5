"""Check the options of an engine as a user gives them, before a model is loaded."""

from __future__ import annotations

from ridgeline.errors import RequestError
from ridgeline.propose import PROPOSERS, Proposer
from ridgeline.settings import EngineOptions, check_tree, with_drafts
from ridgeline.settings.given import with_speculative
from ridgeline.settings.speculative import AUTO, OFF
from ridgeline.spec import ModelSpec


def engine_options(
    engine: EngineOptions | None, speculative: str | None, proposer: Proposer | None, cache: str
) -> EngineOptions:
    """Return the options of the engine as they are given. Raises RequestError for some that contradict each other."""
    options = with_speculative(engine or EngineOptions(), speculative)
    _check_proposer(proposer, options, cache)
    return options


def _check_proposer(proposer: Proposer | None, options: EngineOptions, cache: str) -> None:
    """Raise RequestError for drafts that nobody proposes, and for a proposer whose drafts nobody verifies."""
    options = with_drafts(options)
    drafts, chosen = options.num_speculative_tokens or 0, options.speculative or AUTO
    chosen = OFF if chosen == AUTO else chosen  # an automatic choice gives way
    if chosen != OFF and (proposer is not None or cache == "off"):
        reason = "a proposer is given as well" if proposer is not None else "cache='off' verifies no drafts"
        raise RequestError(f"speculative (--speculative) is {chosen}, but {reason}; leave one of them out")
    if chosen in PROPOSERS:
        check_tree(options)
    if drafts > 0 and proposer is None and chosen == OFF:
        raise RequestError(
            f"num_speculative_tokens (--num-speculative-tokens) is {drafts}, but nothing proposes draft tokens; "
            "set --speculative ngram, pass LLM(proposer=...) in Python, or leave it at 0"
        )
    if proposer is not None and (drafts == 0 or cache == "off"):
        raise RequestError(
            "a proposer needs cache='on' and EngineOptions(num_speculative_tokens=...) of at least 1, the most draft "
            "tokens that a sequence verifies in a step"
        )


def check_batching(spec: ModelSpec, batching: str) -> None:
    """Raise RequestError if the blocks of a diffusion model are to be filled in static batches."""
    if spec.diffusion is not None and batching != "continuous":
        raise RequestError(f"batching is {batching!r}, but a diffusion model has continuous batches only; leave it out")
