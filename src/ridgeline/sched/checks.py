"""Check the sequences that a scheduler is given, and its rows."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ridgeline.sched.sequence import Sequence


def check_family(sequence: Sequence, family: Seq[Sequence], live: Mapping[int, Sequence]) -> Seq[Sequence]:
    """Return the choices of a request. Raise ValueError for another prompt than `sequence` has, or an id in use."""
    for member in family:
        if member.tokens != sequence.tokens or member.root != sequence.root:
            raise ValueError(f"sequence {member.id} has another prompt than its parent {sequence.id}")
    if len({m.id for m in family}) < len(family) or any(m.id in live for m in family):
        raise ValueError(f"sequence id {sequence.id}, or one of its children's, is in use")
    return family


def check_fork(parent: Sequence, child: Sequence) -> None:
    """Raise ValueError unless a child continues what its parent, which is running, has computed."""
    shared = parent.computed
    if parent.replay_from != shared:
        raise ValueError(f"sequence {parent.id} has a step in flight")
    same = child.tokens[:shared] == parent.tokens[:shared] and child.root == parent.root
    if not same or len(child.tokens) <= shared:
        raise ValueError(f"sequence {child.id} does not begin with the {shared} tokens of {parent.id}")


def check_rows(live: Mapping[int, Sequence], running: Seq[Sequence], free_rows: Seq[int]) -> None:
    """Raise AssertionError unless each row is free or belongs to one running sequence, and every length is valid."""
    rows = [seq.row for seq in running] + list(free_rows)
    assert sorted(rows) == list(range(len(rows))), "rows are lost or used twice"
    assert [seq.order for seq in running] == sorted(seq.order for seq in running), "running sequences are out of order"
    assert all(live.get(seq.id) is seq for seq in running), "an ended sequence is running"
    assert sum(seq.row >= 0 for seq in live.values()) == len(running), "a row without a sequence"
    for seq in live.values():
        assert seq.num_prompt <= len(seq.tokens) < seq.max_length, f"sequence {seq.id} has too many tokens"
