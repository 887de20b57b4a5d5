"""The arrays of low-rank terms that rows of a product choose by their slot."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.ops.arrays import Array


class SlotTerms(NamedTuple):
    """Terms for one matrix [out, in] in S slots: the product y becomes gain * y + up (down x) + add.

    down: [S, R, in] and up: [S, R, out], of which a slot has the first rows. gain, add: [S, out]. ranks: [S], the
    number of rows that each slot has.
    """

    down: Array
    up: Array
    gain: Array
    add: Array
    ranks: Array
