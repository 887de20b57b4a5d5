"""Names of the ways to accept draft tokens."""

from __future__ import annotations

from typing import Literal, get_args

Acceptance = Literal["same", "rejection", "typical"]
ACCEPTANCES: tuple[Acceptance, ...] = get_args(Acceptance)
# What each means for the answers, for reports.
MEANING: dict[Acceptance, str] = {
    "same": "tokens as without drafts",
    "rejection": "rejection sampling: other tokens, the model's distribution",
    "typical": "typical acceptance is lossy: it changes the distribution of answers",
}
