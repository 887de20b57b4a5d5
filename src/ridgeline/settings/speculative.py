"""Choose what proposes drafts, where the user leaves that to the engine (`speculative` is "auto", the default).

An automatic choice must never refuse or slow down what works without drafts. So each condition below is one under which
n-gram drafts cost nearly nothing while they do not pay, and everything else has none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ridgeline.settings.advice import Advice
from ridgeline.settings.config import EngineOptions
from ridgeline.settings.fit import Problem
from ridgeline.spec.text import num_bytes

AUTO, OFF, NGRAM = "auto", "off", "ngram"
LEAST_STEP_S = 0.002  # predicted; a shorter step is slowed down by more than 2 % (docs/speculation.md#the-default)
WORKSPACE_SHARE = 20  # drafts may take this part of the memory for pages and workspace
REMEDY = "run `ridgeline calibrate`"


class Choice(NamedTuple):
    """Options in which `speculative` is not "auto", and the reason for it."""

    options: EngineOptions
    reason: str


def choose_speculative(options: EngineOptions, advice: Advice | None, undrafted: str | None) -> Choice:
    """Choose `speculative` if it is "auto" or not given.

    advice: choices of the cost model; None if this machine is not calibrated. undrafted: why the caller wants no
    drafts; None if it may have some.
    """
    if options.speculative not in (None, AUTO):
        return Choice(options, "as given")
    reason = undrafted or _misfit(options)
    if reason is None and advice is None:
        reason = f"chosen, because this machine is not calibrated: {REMEDY}"
    if reason is None and advice is not None and advice.step_s < LEAST_STEP_S:
        reason = (
            f"chosen, because a step is predicted to take {1e3 * advice.step_s:.2g} ms: below "
            f"{1e3 * LEAST_STEP_S:g} ms, looking drafts up costs too much of it"
        )
    if reason is not None or advice is None:
        return Choice(replace(options, speculative=OFF), reason or "")
    why = (
        f"chosen, because this machine is calibrated and a step is predicted to take {1e3 * advice.step_s:.2g} ms: "
        "looking drafts up costs little of it, and they are verified only while they pay"
    )
    return Choice(replace(options, speculative=NGRAM), why)


def afforded(problem: Problem, left_open: EngineOptions, reason: str) -> tuple[Problem, str]:
    """Return a problem without drafts if they were chosen but would change other settings or take much memory.

    left_open: the options before the choice. reason: why they were chosen. Otherwise both are returned as they are.
    """
    if left_open.speculative not in (None, AUTO) or problem.options.speculative == OFF:
        return problem, reason
    without = replace(problem, options=replace(left_open, speculative=OFF))
    plain, drafted = without.solve(), problem.solve()
    if plain is None:  # it does not fit in any way
        return without, reason
    if drafted is None or (drafted.tokens, drafted.seqs, drafted.length) != (plain.tokens, plain.seqs, plain.length):
        return without, "chosen, because a shorter context or smaller batches would fit beside drafts"
    more = drafted.workspace() - plain.workspace()
    if more * WORKSPACE_SHARE > problem.limit:
        return without, f"chosen, because drafts would take {num_bytes(more)} of {num_bytes(problem.limit)}"
    return problem, reason


def _misfit(options: EngineOptions) -> str | None:
    """Return why drafts do not fit other options that were given; None if they do."""
    if options.num_speculative_tokens is not None:
        return f"chosen, because num_speculative_tokens is {options.num_speculative_tokens} and nothing else is named"
    if options.steps_in_flight == 2:
        return "chosen, because drafts need the tokens of the step before, and steps_in_flight is 2"
    for name, usual in (("draft_depth", "chosen"), ("draft_acceptance", "same")):
        if getattr(options, name) not in (None, usual):
            return f"chosen, because {name} is {getattr(options, name)}, which is only for drafts that are named"
    return None
