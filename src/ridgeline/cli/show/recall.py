"""Show recall as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ridgeline.cli.show.tables import Column, Table

if TYPE_CHECKING:
    from ridgeline.evals import Estimate, Recall

NAMES = ("model", "original")


def recall_table(found: Sequence[Recall]) -> tuple[Table, str]:
    """Return the recall of a model, and of its original if it is given, by pairs and distances, with a remark."""
    distances = list(dict.fromkeys(cell.distance for cell in found[0].cells))
    columns = [Column("", right=False), Column("pairs", right=True), Column("chance", right=True)]
    table = Table("", [*columns, *(Column(f"distance {d}", right=True) for d in distances)])
    for name, recall in zip(NAMES, found, strict=False):
        for pairs in dict.fromkeys(cell.pairs for cell in recall.cells):
            cells = [cell for cell in recall.cells if cell.pairs == pairs]
            table.add_row(f"recall, {name}", str(pairs), f"{cells[0].chance:.3f}", *(_cell(c.accuracy) for c in cells))
    means = "; ".join(
        f"{name}: {r.mean:.3f}, and {r.mean_exact:.3f} where the value must be the most likely of all tokens"
        for name, r in zip(NAMES, found, strict=False)
    )
    return table, f"mean recall, {means}"


def _cell(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.3f}"
