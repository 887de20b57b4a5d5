"""Keep the costs of sequences in a simulation, which are needed many times."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ridgeline.sim.cost import StepCost
from ridgeline.sim.metrics import Ints

TABLE_BLOCK = 4096  # contexts
PROMPTS_KEPT = 1 << 16  # chunks of prompts in the cache, keyed by tokens and context


class CostTable:
    """A cost whose values for one token are kept for every context up to the longest one so far."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._of_prompt = lru_cache(PROMPTS_KEPT)(cost.of)
        self._rows = [(0,) * len(cost.of(1, 1))]  # by context
        self._table = np.array(self._rows, np.int64).T  # [numbers, contexts]

    def of(self, tokens: int, context: int) -> tuple[int, ...]:
        """Return cost.of(tokens, context)."""
        if tokens > 1:
            return self._of_prompt(tokens, context)
        if context >= len(self._rows):
            self._extend(context)
        return self._rows[context]

    def sums(self, contexts: Ints) -> Ints:
        """Return the sums over sequences [numbers, steps] for contexts [sequences, steps]."""
        while True:
            try:
                found: Ints = np.add.reduce(self._table.take(contexts, axis=1), axis=1)
            except IndexError:
                self._extend(int(contexts.max()))
            else:
                return found

    def _extend(self, longest: int) -> None:
        until = (longest // TABLE_BLOCK + 1) * TABLE_BLOCK
        self._rows += [self.cost.of(1, context) for context in range(len(self._rows), until)]
        self._table = np.array(self._rows, np.int64).T.copy()
