"""Draw tokens: with the kernels of csrc/ where they were compiled, otherwise with numpy (noise.py).

Both draw the same token, unless two sums of score and noise differ by rounding in float64 alone.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from ridgeline.ops.noise import Key
from ridgeline.sample import noise
from ridgeline.sample.logits import Floats, Ints

if find_spec("ridgeline._kernels") is not None:
    from ridgeline._kernels import draw_logits as _draw_logits
    from ridgeline._kernels import draw_scores as _draw_scores
    from ridgeline._kernels import likely as _likely
    from ridgeline._kernels import philox as _philox

    def draw(scores: Floats, ids: Ints | None, key: Key) -> int:
        """Return the index of the token with the largest sum of score and noise; see noise.draw."""
        return _draw_scores(np.ascontiguousarray(scores), None if ids is None else np.ascontiguousarray(ids), key)

    def draw_logits(logits: Floats, top: float, temperature: float, key: Key) -> int:
        """Return the token that `draw` takes from the scores (logits - top) / temperature, float64.

        logits [n], float32. top: the largest of them. temperature: above 1e-30.
        """
        return _draw_logits(np.ascontiguousarray(logits), top, temperature, key)

    def likely(logits: Floats, top: float, temperature: float, least: float) -> tuple[Ints, float] | None:
        """Find the tokens with a score (logits - top) / temperature of at least `least`, up to rounding in float32.

        logits [n], float32. top: the largest of them. temperature: above 1e-30. least: above -80. Returns their ids,
        ascending, and the sum of e^score of all others; None where there are no kernels.
        """
        found = np.empty(logits.size + 1, np.int64)
        count, rest = _likely(np.ascontiguousarray(logits), top, temperature, least, found)
        return found[:count], rest

    def random_words(key: tuple[int, int], counter: tuple[int, int, int, int]) -> Key:
        """Return the block of 256 random bits of Philox for a key and a counter, as four words."""
        one, two, three, four = _philox(key, counter)
        return one, two, three, four

else:
    draw = noise.draw

    def draw_logits(logits: Floats, top: float, temperature: float, key: Key) -> int:
        """Return the token that `draw` takes from the scores (logits - top) / temperature, float64."""
        return draw((logits.astype(np.float64) - top) / temperature, None, key)

    def likely(logits: Floats, top: float, temperature: float, least: float) -> tuple[Ints, float] | None:
        """Return None: without kernels, computing all scores is as fast."""
        return None

    def random_words(key: tuple[int, int], counter: tuple[int, int, int, int]) -> Key:
        """Return the block of 256 random bits of Philox for a key and a counter, as four words."""
        made = np.random.Philox(key=np.array(key, np.uint64), counter=[counter[0] - 1, *counter[1:]])
        one, two, three, four = made.random_raw(4).tolist()
        return one, two, three, four
