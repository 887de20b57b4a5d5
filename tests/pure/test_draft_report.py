"""Reports about drafts: of a run, in a server's log, and the rule of depth in `explain`."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.cli.main import app
from ridgeline.engine.depth import DepthRule, factors
from ridgeline.sched.draft_report import WIDTH, draft_report
from ridgeline.sched.stats import DraftCounts, DraftSpeed
from ridgeline.serve.draft_log import DraftLog

SPEED = DraftSpeed(10.0, 3.3, 6.1, 17.4, 10.0, 18.1, [5, 0, 0, 0, 95], 24)


def counts(*verified: tuple[int, int]) -> DraftCounts:
    found = DraftCounts()
    for run, accepted in verified:
        found.add(run, accepted, run)
    return found


def test_a_gain_that_was_not_measured_is_not_stated() -> None:
    unmeasured = DraftSpeed(10.0, 0.1, 0.0, 9.9, 10.0, 10.0, [90, 0, 0, 0, 4])
    found = " ".join(draft_report("pocket-draft", counts((4, 4)), unmeasured, "same"))
    assert "their gain is not known yet" in found
    assert "times plain" not in found and "tokens as without drafts" in found


def test_a_report() -> None:
    """If three of four verifications reach depth 1, two depth 2 and one depth 3, they give 1 + 0.75 + 0.5 + 0.25."""
    lines = draft_report("pocket-draft", counts((3, 3), (3, 2), (3, 1), (3, 0)), SPEED, "same")
    assert all(len(line) <= WIDTH for line in lines)
    assert " ".join(" ".join(lines).split()) == (
        "drafts: pocket-draft, depth 3 (0 from batch 24 on); 2.50 tokens a verification, 2.50 expected from 75, 50, 25 "
        "% reaching depths 1 to 3 drafts: 1.74 times plain decode, 1.81 predicted; verification 61% of the time, "
        "drafting 33%; tokens as without drafts"
    )


def test_reports_of_other_runs() -> None:
    """With several depths, the expectation counts each depth over the verifications that got so far."""
    mixed = counts((1, 1), (1, 1), (2, 2), (2, 1))
    text = " ".join(" ".join(draft_report("off", mixed, None, "typical")).split())
    assert "the given proposer, depth 1.5 on average, at most 2; 2.25 tokens a verification" in text
    assert "2.50 expected from 100, 50 % reaching depths 1 to 2" in text
    assert "times plain decode" not in text and "typical acceptance is lossy" in text
    assert draft_report("ngram", DraftCounts(), SPEED, "same") == []
    assert "reaching depth 1" in " ".join(draft_report("ngram", counts((1, 0)), DraftSpeed(), "rejection"))
    total = mixed.plus(counts((4, 0)))
    assert total.tried_at == [5, 2, 0, 0] and total.plus(mixed, -1).tried_at[0] == 1


def test_a_report_of_trees() -> None:
    """Positions are those of the accepted path: a tree of 7 drafts that is 3 levels deep accepts at most 3."""
    found = DraftCounts()
    for accepted in (3, 2, 1, 0):
        found.add(7, accepted, 3)
    found.add(2, 2, 2)  # cut to a chain
    assert (found.run, found.accepted, found.in_trees) == (30, 8, 4)
    assert (found.accepted_at, found.tried_at) == ([4, 3, 1], [5, 4, 2])
    assert found.plus(found, -1).in_trees == 0
    lines = draft_report("heads", found, None, "same", "the reason")
    assert all(len(line) <= WIDTH for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "heads, 6.0 drafts on average, in trees of at most 3 levels; 2.60 tokens a verification" in text
    assert text.endswith("drafts: chains instead of trees: the reason")


def test_the_log_of_a_server(caplog: pytest.LogCaptureFixture) -> None:
    """The report is logged again only after more verifications, and not while the engine is down."""
    found = SimpleNamespace(
        proposer="ngram", drafts=counts((2, 1)), draft_speed=None, draft_acceptance="same", untreed=None
    )

    async def answer() -> Any:
        return SimpleNamespace(stats=found)

    client: Any = SimpleNamespace(up=True, report=answer)
    drafts = DraftLog(client)
    with caplog.at_level(logging.INFO, "ridgeline.serve.draft_log"):
        asyncio.run(drafts.once())
        asyncio.run(drafts.once())
        assert caplog.records[0].message.startswith("drafts: ngram, depth 2; 2.00 tokens a verification")
        once = len(caplog.records)
        found.drafts.add(2, 2, 2)
        client.up = False
        asyncio.run(drafts.once())
        assert len(caplog.records) == once
        client.up = True
        asyncio.run(drafts.once())
        assert len(caplog.records) == 2 * once


def test_the_formula_of_the_rule() -> None:
    """k drafts give (1 - a^(k+1)) / (1 - a) tokens in plain + k (batch draft + round) seconds."""
    found = factors(0.010, 0.0005, 0.001, 4, [0.8, 0.64, 0.512])
    assert found == pytest.approx([(1 - 0.8 ** (k + 1)) / 0.2 * 0.010 / (0.010 + k * 0.003) for k in (1, 2, 3)])
    rule = DepthRule(2, rounds=False)
    assert rule.off_from() is None
    for batch, each in ((1, 0.0001), (8, 0.01), (32, 0.01)):
        for _ in range(6):
            rule.step(batch, 0, 0, 0.01, 0.0, batch)
            rule.step(batch, batch, 0, 0.01 + batch * each, 0.0, batch)
    assert rule.off_from() == 8


def test_explain_shows_the_rule() -> None:
    command = ["explain", "pocket", "--speculative", "pocket-draft", "--draft-acceptance-rate", "0.9"]
    shown = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert max(map(len, shown.output.splitlines())) <= 80
    text = " ".join(shown.output.split())
    assert "Expected speed-up by depth: pocket-draft" in text and "Acceptance 0.9 (as given)" in text
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)["draft_depth"]
    assert [row["batch"] for row in rows] == [1, 4, 16, 64] and all(len(row["factors"]) == 4 for row in rows)
    for row in rows:
        shares = [0.9**k for k in range(1, 5)]
        times = row["plain_s"], row["draft_s"], row["round_s"], row["batch"]
        assert row["factors"] == pytest.approx(factors(*times, shares))
    plain = json.loads(CliRunner().invoke(app, ["explain", "pocket", "--json"]).output)
    assert "draft_depth" not in plain
    refused = CliRunner().invoke(app, ["explain", "pocket", "--draft-acceptance-rate", "0.5"])
    assert "needs --speculative" in str(refused.exception)
