"""Match the rules of a checkpoint's config with names of modules.

A regular expression from a config may take exponential time on a name. All but the simplest run in a helper process
with limits.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ridgeline.bounded import BoundedPool, Limits, job
from ridgeline.errors import BoundExceeded, CheckpointError

LIMITS = Limits(seconds=20.0, memory_bytes=256 << 20)
# Letters, dots and at most two repetitions of any letter: such an expression takes no more than quadratic time.
_PLAIN = r"(?:[\w$^-]|\\?\.(?!\*))*"
_SIMPLE = re.compile(rf"{_PLAIN}(?:\.\*{_PLAIN}){{0,2}}")
_LONGEST_SIMPLE = 200


def match_names(patterns: Sequence[str], names: Sequence[str]) -> dict[str, list[int]]:
    """Return, for each name, the indices of the regular expressions that match it from its beginning.

    Raises CheckpointError for an expression that is malformed or takes too long.
    """
    if not patterns or not names:
        return {name: [] for name in names}
    if all(len(p) <= _LONGEST_SIMPLE and _SIMPLE.fullmatch(p) for p in patterns):
        pairs = match_job(None, list(patterns), list(names))
    else:
        try:
            with BoundedPool() as pool:
                pairs = pool.run_sync(match_job, list(patterns), list(names), limits=LIMITS)
        except BoundExceeded as e:
            raise CheckpointError(
                f"config.json: a regular expression of quantization_config cannot be used: {e}"
            ) from None
    found: dict[str, list[int]] = {name: [] for name in names}
    for i, j in pairs:
        found[names[j]].append(i)
    return found


@job
def match_job(state: None, patterns: list[str], names: list[str]) -> list[list[int]]:
    """Return the pairs [pattern, name] of indices for which the expression matches."""
    pairs: list[list[int]] = []
    for i, pattern in enumerate(patterns):
        try:
            compiled = re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as e:
            raise CheckpointError(f"config.json: quantization_config has a bad regular expression: {e}") from None
        pairs.extend([i, j] for j, name in enumerate(names) if compiled.match(name))
    return pairs
