"""Read the counters of speculative decoding from a server's /metrics: Ridgeline's or vLLM's, which have equal names."""

from __future__ import annotations

import re

from ridgeline.sched.stats import DraftCounts

PATH = "/metrics"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
TRIED = "ridgeline:draft_tried_tokens_per_pos_total"
_LINE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>\S+)")
_POSITION = re.compile(r'(?:^|,)\s*position="(\d+)"')
MOST_POSITIONS = 1000  # positions beyond it are left out: nobody drafts so many tokens


def draft_counts(text: str) -> DraftCounts | None:
    """Return the drafts that a server has verified so far; None if it does not count them.

    vLLM does not count the drafts at each position whose predecessors were accepted. Its depth is fixed, so they are
    the accepted ones of the position before.
    """
    totals: dict[str, float] = {}
    accepted, tried = dict[int, int](), dict[int, int]()
    for line in text.splitlines():
        if (found := _LINE.match(line)) is None:
            continue
        name, position = found["name"], _POSITION.search(found["labels"] or "")
        try:
            value = float(found["value"])
        except ValueError:
            continue
        if position is None:
            totals[name] = totals.get(name, 0.0) + value
        elif int(position[1]) < MOST_POSITIONS and name in (
            TRIED,
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        ):
            (tried if name == TRIED else accepted)[int(position[1])] = int(value)
    if "vllm:spec_decode_num_drafts_total" not in totals:
        return None
    verifications, run, total = (
        int(totals.get(f"vllm:spec_decode_num_{name}_total", 0))
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    at = _listed(accepted)
    return DraftCounts(verifications, run, total, at, _listed(tried) or [verifications, *at][: len(at)])


def _listed(found: dict[int, int]) -> list[int]:
    return [found.get(i, 0) for i in range(max(found, default=-1) + 1)]
