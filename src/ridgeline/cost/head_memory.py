"""Bound the memory of the drafts of a head, besides its weights and its state in pages, in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.cost.memory import Workspace
from ridgeline.spec import ModelSpec
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.heads import HeadSpec, MedusaSpec
from ridgeline.spec.workspace import FLOAT, feature_rows


class HeadWorkspace:
    """Counts the memory that the passes of a head and its kept features take.

    drafts: draft tokens of a sequence, or rows of a head for the tree that they are chosen from, if these are more.
    width: rows of a sequence in a pass that propose. Other arguments: as those of Workspace.
    """

    def __init__(
        self, head: HeadSpec, groups: Sequence[StateGroup], *, on_cpu: bool, drafts: int = 0, width: int = 1,
        float_bytes: int = FLOAT,
    ) -> None:  # fmt: skip
        self._head, self._drafts, self._float_bytes = head, drafts, float_bytes
        self._layer: Workspace | None = None
        if not isinstance(head, MedusaSpec):
            like = ModelSpec(
                head.kind, head.draft_vocab_size, head.hidden_size, head.max_position_embeddings, head.layers, head.norm
            )
            self._layer = Workspace(like, groups, on_cpu=on_cpu, drafts=width - 1, float_bytes=float_bytes)

    def bytes(self, max_tokens: int, max_seqs: int, length: int, swap_bytes: int = 0) -> int:
        """Return the bytes beside a step of the target; see Workspace.bytes."""
        head, width = self._head, self._head.hidden_size
        if self._layer is None:
            assert isinstance(head, MedusaSpec)
            kept = feature_rows(max_seqs + 1, self._drafts, 0) * width
            # Each sequence has the state and a block of every head, their logits, and what sampling reads of these.
            passes = max_seqs * head.num_heads * (3 * width + 2 * head.vocab_size)
            return self._float_bytes * (kept + max_tokens * width + passes)
        kept = feature_rows(max_seqs + 1, self._drafts, max_tokens) * width
        streams = max_tokens * (
            2 * head.target_hidden_size * max(1, len(head.aux(head.target_layers or 8))) + 4 * width
        )
        return self._float_bytes * (kept + streams) + self._layer.bytes(max_tokens, max_seqs, length)
