"""Drafts in the simulator: against closed forms, the planner and the engine's rule; and with every kind of page."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from test_plan_drafts import HEADS
from test_sim import each, pool
from typer.testing import CliRunner

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cli.main import app
from ridgeline.engine.depth import DepthRule
from ridgeline.measure.scrape import TRIED, draft_counts
from ridgeline.measure.served import describe, predict
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.plan.speculation import Draft, Speculation
from ridgeline.sched.stats import DraftCounts
from ridgeline.sim import (
    Drafts,
    LinearCost,
    Request,
    Settings,
    Simulated,
    Workload,
    cost_of,
    draft_cost_of,
    drafts_of,
    settings,
    simulate,
)
from ridgeline.spec.codec import head_from_json, head_to_json
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.state import ALL

DRAFT = Draft("draft", find_model("pocket-draft").spec)
VERIFY = LinearCost((1, 6), (0.010, 0.012))  # 4 % more for each draft


def rule(most: int, rounds: bool) -> DepthRule:
    return DepthRule(most, rounds=rounds)


def run(
    acceptance: float | tuple[float, ...], depth: int, *, draft_s: float = 0.001, answers: int = 1,
    tokens: int = 10_000, chosen: bool = False, batch: int = 1, seed: int = 0,
) -> Simulated:  # fmt: skip
    """Simulate requests with drafts of a model whose steps take `draft_s`."""
    drafts = Drafts(Speculation(acceptance, depth, draft=DRAFT), each(draft_s), rule if chosen else None)
    workload = Workload([Request(0, 1, tokens)] * answers, clients=batch)
    return simulate(workload, pool(pages=answers * tokens // 16 + 100), VERIFY, drafts=drafts, seed=seed)


@pytest.mark.parametrize(("acceptance", "depth"), [(0.8, 4), (0.95, 7), (1.0, 4)])
def test_tokens_of_a_verification(acceptance: float, depth: int) -> None:
    """A verification gives (1 - a^(k+1)) / (1 - a) tokens (arXiv:2211.17192, equation 1), and a token of one sequence
    takes (verification + k draft steps) / that.
    """
    expected = depth + 1 if acceptance == 1 else (1 - acceptance ** (depth + 1)) / (1 - acceptance)
    found = run(acceptance, depth).report
    assert found.drafts is not None and found.tpot_s is not None
    assert found.drafts.tokens_per_verification == pytest.approx(expected, rel=0.02)
    step = VERIFY.seconds(1 + depth, 1 + depth, [0])
    assert found.tpot_s.mean == pytest.approx((step + depth * 0.001) / expected, rel=0.02)
    assert found.drafts.drafting_share == pytest.approx(depth * 0.001 / (step + depth * 0.001), rel=1e-3)
    assert found.output_tokens == 10_000


def test_acceptance_by_depth() -> None:
    """A verification gives 1 + s_1 + s_2 + s_3 tokens, where s_j is the share that reaches depth j."""
    found = run((0.9, 0.7), 3).report.drafts
    assert found is not None
    assert found.tokens_per_verification == pytest.approx(1 + 0.9 + 0.9 * 0.7 + 0.9 * 0.7 * 0.7, rel=0.02)
    assert found.acceptance == pytest.approx((0.9, 0.7, 0.7), abs=0.02)


def test_every_token_has_a_time() -> None:
    """Accepted drafts have the time of their step: answers are complete, in order, and several tokens share a time."""
    found = run(0.8, 4, answers=12, batch=5, tokens=200)
    for times in found.book.token_times():
        assert len(times) == 200 and times == sorted(times) and len(set(times)) < 120
    assert found.report.itl_s is not None and found.report.itl_s.p50 == 0.0
    again, other = run(0.8, 4, answers=12, batch=5, tokens=200), run(0.8, 4, answers=12, batch=5, tokens=200, seed=1)
    assert found.report == again.report != other.report


def test_what_is_accepted_does_not_depend_on_the_batch() -> None:
    """Each sequence draws with a generator of its own, so it takes as many verifications alone as beside others."""
    counts = [run(0.7, 3, answers=6, batch=batch, tokens=300).report.drafts for batch in (1, 6)]
    assert counts[0] is not None and counts[1] is not None
    assert counts[0].num_accepted == counts[1].num_accepted
    assert counts[0].verifications == counts[1].verifications


@pytest.mark.parametrize(
    ("acceptance", "draft_s", "least"), [(0.9, 0.0005, 2.2), (0.0, 0.001, 0.95), (0.6, 0.02, 0.95)]
)
def test_the_engines_rule_chooses_the_depth(acceptance: float, draft_s: float, least: float) -> None:
    """Drafts that pay are used, and others hardly cost anything: factors over plain decode of 10 ms a token."""
    found = run(acceptance, 4, draft_s=draft_s, tokens=3000, chosen=True).report
    assert found.tpot_s is not None
    assert 0.010 / found.tpot_s.mean > least


def test_a_single_sequence_takes_the_planned_time() -> None:
    """The simulator and the planner agree on TPOT: for a draft model, Medusa's heads, EAGLE, and for a given cost.

    All drafts are accepted, so that no chance is left.
    """
    deployment = Deployment(find_model("llama-3.1-8b").spec, hardware("h100"))
    small = Draft("small", find_model("llama-3.2-1b").spec)
    drafts_by = [small, Draft("medusa", HEADS["medusa"]), Draft("eagle", HEADS["eagle"]), None]
    for speculation in (Speculation(1.0, 3, 0.1, draft) for draft in drafts_by):
        planned = replace(deployment, speculation=speculation)
        load = Load(1, 256, 1200)
        drafts = drafts_of(planned, None, draft_cost_of)
        chosen = settings(planned, max_model_len=load.context + 1, max_num_seqs=4)
        workload = Workload([Request(0, load.prompt, load.output)], clients=1)
        found = simulate(workload, chosen, cost_of(planned), drafts=drafts).report
        assert found.tpot_s is not None
        assert found.tpot_s.mean == pytest.approx(Planner(planned).tpot_s(load), rel=0.02)


WINDOW, STATE = StateGroup("window", 4, 11, 64), StateGroup("state", 16, 1, 256, snapshot=True)
SMALL = StateGroup("kv", 4, ALL, 64)


@pytest.mark.parametrize("groups", [(SMALL,), (WINDOW,), (STATE,), (SMALL, WINDOW, STATE)])
@pytest.mark.parametrize("model", [True, False])
def test_random_loads_with_few_pages(groups: tuple[StateGroup, ...], model: bool) -> None:
    """With preemption, shared prefixes and chunks every answer is complete, and no page is lost."""
    rng = Random(len(groups) + model)
    speculation = Speculation(0.7, 3, draft=DRAFT if model else Draft("ngram", None))
    drafts = Drafts(speculation, each(0.001) if model else None, rule)
    requests = []
    for n in range(60):
        prompt = rng.randint(1, 80)
        blocks = (rng.randrange(3), 100 + n)[: -(-prompt // 16)] if rng.random() < 0.5 else ()
        requests.append(Request(rng.randrange(10**9), prompt, rng.randint(1, 60), blocks, 16))
    requests.sort(key=lambda r: r.arrival_ns)
    pages = tuple(3 * g.most_pages(160) + 2 for g in groups)
    found = simulate(Workload(requests), Settings(groups, pages, 12, 64, 160), VERIFY, drafts=drafts)
    assert found.report.requests == 60 and found.report.preemptions > 0
    assert found.report.output_tokens == sum(r.output_tokens for r in requests)
    assert [len(times) for times in found.book.token_times()] == [r.output_tokens for r in requests]


def test_on_the_command_line() -> None:
    command = [
        "simulate", "pocket", "--hardware", "cpu-server", "--num-requests", "8", "--input-len", "32", "--output-len",
        "64", "--arrivals", "closed:2",
    ]  # fmt: skip
    drafts = [*command, "--speculative", "pocket-draft", "--draft-depth", "fixed"]
    shown = CliRunner().invoke(app, [*drafts, "--draft-acceptance-rate", "0.87,0.92"], env={"COLUMNS": "100"})
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "drafts: pocket-draft, 4 at most; acceptance 0.87, 0.92 (as given)" in text
    assert "tokens a verification; " in text and "drafting takes " in text
    assumed = json.loads(CliRunner().invoke(app, [*command, "--speculative", "ngram", "--json"]).output)
    assert assumed["speculation"]["acceptance_source"].startswith("assumed: ")
    changed = json.loads(CliRunner().invoke(app, [*command, "speculate=pocket-draft:2:0.9", "--json"]).output)
    assert changed["speculation"]["depth"] == 2 and changed["drafts"]["tokens_per_verification"] > 2
    plain = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    assert plain["drafts"] is None and plain["speculation"] is None


@pytest.mark.parametrize(("flags", "message"), [
    ("--num-speculative-tokens 3", "--num-speculative-tokens needs --speculative"),
    ("--draft-acceptance-rate 0.5", "--draft-acceptance-rate needs --speculative"),
    ("--speculative ngram --draft-acceptance-rate 2", "must be from 0 to 1"),
    ("--speculative ngram --num-speculative-tokens 0", "the number of drafts is 0"),
    ("--speculative no-such-model", "unknown model"),
    ("--speculative auto", "--speculative is auto, which only an engine on its own machine can choose"),
])  # fmt: skip
def test_flags_that_are_refused(flags: str, message: str) -> None:
    found = CliRunner().invoke(app, ["simulate", "pocket", *flags.split()])
    assert found.exit_code != 0
    assert message in str(found.exception)


def test_pages_are_taken_for_the_draft() -> None:
    """A draft model runs on the pages of its drafts, so a sequence needs room for them, and its state takes bytes."""
    deployment = Deployment(find_model("llama-3.1-8b").spec, hardware("l40s"))
    small = Speculation(0.8, 4, draft=Draft("small", find_model("llama-3.2-1b").spec))
    alone, both = settings(deployment), settings(replace(deployment, speculation=small))
    assert both.groups[0].page_bytes > alone.groups[0].page_bytes
    assert both.num_pages[0] < alone.num_pages[0]


def test_counters_of_a_server() -> None:
    text = (
        "# HELP vllm:spec_decode_num_drafts_total x\nvllm:spec_decode_num_drafts_total 10\n"
        "vllm:spec_decode_num_draft_tokens_total 30.0\nvllm:spec_decode_num_accepted_tokens_total 14\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 8\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{model="m",position="1"} 6\nother{a="b"} NaN\n'
    )
    vllm = draft_counts(text)
    assert vllm == DraftCounts(10, 30, 14, [8, 6], [10, 8])
    ours = draft_counts(text + f'{TRIED}{{position="0"}} 10\n{TRIED}{{position="1"}} 7\n')
    assert ours is not None and ours.acceptance == (0.8, 6 / 7)
    assert draft_counts("") is None and draft_counts("vllm:spec_decode_num_drafts_total x\n") is None


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_heads_as_json(head: Any) -> None:
    assert head_from_json(json.loads(json.dumps(head_to_json(head)))) == head


def test_a_described_server_with_drafts_is_predicted() -> None:
    """The acceptance is the one that was counted in the run; without a count, the line says that it is assumed."""
    small = Draft("small", find_model("llama-3.2-1b").spec)
    planned = Deployment(
        find_model("llama-3.1-8b").spec, hardware("h100"), speculation=Speculation(0.7, 3, draft=small)
    )
    chosen = settings(planned, max_model_len=600, max_num_seqs=4)
    names = ("num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len")
    described = json.loads(json.dumps(describe(planned, {name: getattr(chosen, name) for name in names}, "chosen")))
    workload = Workload([Request(0, 100, 400)], clients=1)
    found, times = predict(described, workload, None, 0, DraftCounts(10, 30, 27, [9, 9, 9], [10, 9, 9]))
    assert found.drafts is not None and found.drafts.acceptance == pytest.approx((0.9, 1, 1), abs=0.06)
    assert "acceptance of drafts 0.9, 1, 1 (as measured in this run)" in times
    plain, without = predict({**described, "drafts": None}, workload, None, 0)
    assert plain.drafts is None and "acceptance" not in without
    assert found.tpot_s is not None and plain.tpot_s is not None and found.tpot_s.mean < plain.tpot_s.mean / 1.5
    assert "(assumed: " in predict(described, workload, None, 0)[1]
    other = replace(planned, speculation=Speculation(0.2, 2, draft=Draft("ngram", None)))
    assert describe(other, {})["drafts"] == {"name": "ngram", "model": None, "head": None, "most": 2, "depth": "fixed"}
