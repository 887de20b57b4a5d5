"""Describe how the rotations of a model depend on the lengths of its sequences.

The rotation of a token usually depends on its position alone. Under dynamic NTK and LongRoPE it also depends on a
length: a token is rotated with the frequencies of a context of that many tokens. The length is the token's position
plus one, or the floor of its sequence if that is larger. The floor is the same for all tokens of a sequence, and two
sequences share state only if their floors are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ridgeline.spec.rope import DynamicNTKScaling, LongRopeScaling, RopeScaling

NEVER = 1 << 62  # a length that no sequence reaches


@dataclass(frozen=True, slots=True)
class Regimes:
    """The lengths at which the frequencies of a model change; empty if its rotations depend on positions alone.

    breaks: lengths in rising order. Contexts longer than breaks[i] and at most breaks[i + 1] have the same frequencies.
    restarts: lengths among `breaks` after which a sequence is computed again from its first token. grown: a longer
    prompt is rotated as a whole with the frequencies of its length; None: no prompt is.
    """

    breaks: Sequence[int] = ()
    restarts: tuple[int, ...] = ()
    grown: int | None = None

    def floor(self, num_prompt: int, length: int) -> int:
        """Return the floor of a sequence of `length` tokens with a prompt of `num_prompt` tokens; 0 for none."""
        passed = bisect_left(self.restarts, length)
        restarted = self.restarts[passed - 1] + 1 if passed else 0
        grown = num_prompt if self.grown is not None and num_prompt > self.grown else 0
        return max(restarted, grown)

    def end(self, length: int) -> int:
        """Return how long a sequence of `length` tokens may become before it must be computed again."""
        passed = bisect_left(self.restarts, length)
        return self.restarts[passed] if passed < len(self.restarts) else NEVER

    def contexts(self) -> list[int]:
        """Return one length for each set of frequencies, in rising order."""
        return [1, *(length + 1 for length in self.breaks)]


def regimes_of(scalings: Iterable[RopeScaling | None], max_model_len: int) -> Regimes:
    """Return the regimes of a model with these rotations, for sequences of at most `max_model_len` tokens."""
    ends: set[int] = set()
    grown: int | None = None
    for scaling in scalings:
        match scaling:
            case LongRopeScaling(original_max_position_embeddings=original) if original < max_model_len:
                ends.add(original)
            case DynamicNTKScaling(original_max_position_embeddings=original) if original < max_model_len:
                grown = original if grown is None else min(grown, original)
    restarts = tuple(sorted(ends))
    if grown is None:
        return Regimes(restarts, restarts)
    below = [end for end in restarts if end < grown]
    every = range(grown, max_model_len)
    return Regimes((*below, *every) if below else every, restarts, grown)


NO_REGIMES = Regimes()
