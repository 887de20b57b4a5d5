"""Show how many drafts the engine would verify: the expected speed-up of each depth, for several batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Line, Table
    from ridgeline.plan.planner import Planner

BATCHES = (1, 4, 16, 64)
CONTEXT = 1024  # tokens of a sequence, or the model's longest context if that is shorter


def expected_speedups(planner: Planner) -> list[dict[str, Any]]:
    """Return for each batch the factor of each depth over plain decode, and the depth that the engine would choose.

    The factors are those of the engine's rule (engine/depth.py), with predicted times in place of measured ones:
    "plain_s" of a step, "draft_s" of a draft more, and "round_s" of a round of the draft model.
    """
    from ridgeline.engine.depth import GAIN, factors

    drafts = planner.deployment.speculation
    assert drafts is not None, "nothing proposes drafts"
    context, found = min(CONTEXT, planner.deployment.spec.max_position_embeddings), []
    for batch in BATCHES:
        plain = planner.decode(batch, context).seconds
        draft = max(planner.verification_s(batch, context) - plain, 0.0) / (drafts.depth * batch)
        each = planner.drafting_s(batch, context) / drafts.depth
        speed = factors(plain, draft, each, batch, drafts.shares)
        best = max(speed)
        found.append({
            "batch": batch, "plain_s": plain, "draft_s": draft, "round_s": each, "factors": speed,
            "depth": speed.index(best) + 1 if best > GAIN else 0,
        })  # fmt: skip
    return found


def depth_table(planner: Planner) -> tuple[Table, Line]:
    """Return the expected speed-ups as a table, and a line that states the rule and its assumptions."""
    from ridgeline.cli.show.tables import Column, Line, Table
    from ridgeline.plan.units import seconds

    drafts = planner.deployment.speculation
    assert drafts is not None, "nothing proposes drafts"
    depths = (Column(f"depth {k}") for k in range(1, drafts.depth + 1))
    columns = Column("batch"), Column("plain", drop=1), Column("a draft", drop=2), Column("a round", drop=3), *depths
    name = drafts.draft.name if drafts.draft else "drafts"
    table = Table(f"Expected speed-up by depth: {name}", (*columns, Column("chosen")))
    for row in expected_speedups(planner):
        times = (seconds(row[key]) for key in ("plain_s", "draft_s", "round_s"))
        table.add_row(f"{row['batch']}", *times, *(f"{x:.2f} x" for x in row["factors"]), f"{row['depth']}")
    return table, Line(
        f"k drafts give 1 + a1 + a1 a2 + ... tokens of each sequence in plain + k x batch x draft + k x round seconds. "
        f"Acceptance {drafts.acceptance_text} ({drafts.source}). The engine measures these times and the acceptance "
        "while it runs, and takes the best depth for each sequence; 0 is no drafts.", style="dim",
    )  # fmt: skip
