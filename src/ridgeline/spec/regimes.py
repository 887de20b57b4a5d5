"""How the rotations of a model follow the lengths of its sequences.

Most rotations of a token follow from its position alone. Those of dynamic NTK and LongRoPE also follow from a length: a
token turns with the frequencies of a context of so many tokens. That length is the token's position plus one, or the
floor of its sequence where that is larger. The floor is the same for all tokens of a sequence, and two sequences share
state only if their floors are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ridgeline.spec.rope import DynamicNTKScaling, LongRopeScaling, RopeScaling

NEVER = 1 << 62  # a length that no sequence reaches


@dataclass(frozen=True, slots=True)
class Regimes:
    """At which lengths the frequencies of a model change; empty for a model whose rotations know no length.

    breaks: lengths in rising order. Contexts longer than breaks[i] and at most breaks[i + 1] have the same frequencies.
    restarts: those of `breaks` after which a sequence is computed again from its first token. grown: above this length
    a prompt turns as a whole with the frequencies of its length; None: no prompt does.
    """

    breaks: Sequence[int] = ()
    restarts: tuple[int, ...] = ()
    grown: int | None = None

    def floor(self, num_prompt: int, length: int) -> int:
        """The floor of a sequence of `length` tokens, of which the first `num_prompt` are its prompt; 0 for none."""
        passed = bisect_left(self.restarts, length)
        restarted = self.restarts[passed - 1] + 1 if passed else 0
        grown = num_prompt if self.grown is not None and num_prompt > self.grown else 0
        return max(restarted, grown)

    def end(self, length: int) -> int:
        """How long a sequence of `length` tokens may become before it has to be computed again."""
        passed = bisect_left(self.restarts, length)
        return self.restarts[passed] if passed < len(self.restarts) else NEVER

    def contexts(self) -> list[int]:
        """One length for each set of frequencies, in rising order."""
        return [1, *(length + 1 for length in self.breaks)]


def regimes_of(scalings: Iterable[RopeScaling | None], max_model_len: int) -> Regimes:
    """The regimes of a model with these rotations, for sequences of at most `max_model_len` tokens."""
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
