"""Propose trees of drafts with the heads of a Medusa model (arXiv:2401.10774, section 2.3.3).

Head d proposes the tokens at depth d of the tree, whatever comes before them. A tree is a set of paths of ranks: (0, 2)
is the third best token of the second head after the best one of the first. The paths that are expected to be accepted
most often are chosen once, from how often the token of each rank was right on held-out text.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from ridgeline.errors import RequestError
from ridgeline.nn.heads import MedusaHead
from ridgeline.nn.model import Model
from ridgeline.runtime.chain import spread
from ridgeline.runtime.drafter import Ask, Place
from ridgeline.runtime.medusa_drafter import Made, MedusaDrafter
from ridgeline.sample.acceptance import draw_candidates
from ridgeline.sample.logits import Floats
from ridgeline.sample.rejection import Draft
from ridgeline.sample.tree import Path, likely_paths, static_tree

# Shares of positions at which the token of rank 0, 1, ... of each head is right, for a folder whose card has none. They
# are those of heads that `ridgeline train` made for `pocket` in 100 updates, at 11,305 held-out positions.
ACCURACIES: tuple[tuple[float, ...], ...] = (
    (0.262, 0.077, 0.043, 0.030, 0.029, 0.025, 0.019, 0.015, 0.015, 0.015),
    (0.195, 0.046, 0.041, 0.028, 0.024, 0.021, 0.016, 0.017, 0.017, 0.015),
    (0.170, 0.038, 0.038, 0.025, 0.026, 0.019, 0.020, 0.019, 0.019, 0.017),
    (0.168, 0.054, 0.038, 0.024, 0.023, 0.019, 0.015, 0.017, 0.012, 0.011),
)
LEAST = 1e-4  # share of a token that was never right: without one, a head that was measured briefly proposes nothing


def tree_paths(accuracies: Sequence[Sequence[float]], heads: int, width: int, size: int) -> tuple[Path, ...]:
    """Return the paths of a tree, the likeliest ones first. The first n of them are the tree of n drafts.

    accuracies: shares of right tokens by head and rank; later heads are taken to be as good as the last one of them.
    They are made to fall with the rank, so that a token is never tried before a better one. A token that was never
    right comes last. heads: number of heads. width: ranks that are used. size: most paths.
    """
    rows = [[max(x, LEAST) for x in accuracies[min(d, len(accuracies) - 1)]] for d in range(heads)]
    return likely_paths([list(accumulate(row, min))[:width] for row in rows], size)


class MedusaTrees(MedusaDrafter):
    """Proposes static trees. accuracies: measured shares of right tokens by head and rank; (): ACCURACIES."""

    def __init__(
        self, head: MedusaHead, target: Model, place: Place, accuracies: Sequence[Sequence[float]] = ()
    ) -> None:
        super().__init__(head, target, place)
        heads = head.spec.num_heads
        self._paths = tree_paths(accuracies or ACCURACIES, heads, place.tree, place.num_drafts)
        self.tree, self.most = place.tree, len(self._paths)

    def levels(self, drafts: int) -> int:
        """Return how many heads so many drafts of a sequence take."""
        return max(map(len, self._paths[:drafts]))

    def draft(self, asks: Sequence[Ask], *, follow: bool = True) -> list[list[Draft]]:
        """Return the tree of each sequence; see Drafter."""
        self.rounds = 0  # until heads run
        return super().draft(asks, follow=follow)

    def _extend(self, drafts: Sequence[list[Draft]], asks: Sequence[Ask], going: Sequence[int], made: Made) -> None:
        place, vocabulary = self._place, self._head.vocabulary
        self.rounds = len(made.logits)
        logits = [spread(self._memory.get(x), vocabulary, place.vocab_size) for x in made.logits]
        for row, i in enumerate(going):
            drafts[i].extend(self._tree(asks[i], [x[row] for x in logits]))

    def _tree(self, ask: Ask, logits: Sequence[Floats]) -> list[Draft]:
        """Return the tree of one sequence. logits: [vocabulary] of each head."""
        paths, tops = self._paths[: ask.depth], list[list[Draft]]()
        try:
            for d in range(self.levels(len(paths))):
                count = 1 + max(path[d] for path in paths if len(path) > d)
                tops.append(draw_candidates(logits[d], ask.sampling.ahead(d), self._place.acceptance, count))
        except RequestError:  # the logits are broken
            paths = tuple(path for path in paths if len(path) <= len(tops))
        return static_tree(lambda path: tops[len(path)], paths, ask.sampling.is_end)
