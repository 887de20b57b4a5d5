"""`ridgeline verify`: the exactness matrix is complete, tests what it claims to test, and
finds engines that are wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from oracle.build import build
from oracle.case import VOCAB
from oracle.families import CASES
from oracle.ours import SPECS, write
from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import main
from ridgeline.engine import Engine, engine
from ridgeline.ops.reference import paged
from ridgeline.runtime import layout, sampling, step
from ridgeline.runtime.arena import Arena
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.runner import DeviceRunner
from ridgeline.sample.sampler import NoiseKey, SampleRow
from ridgeline.sched.cache import StateCache
from ridgeline.sched.sequence import Sequence as Sequence_
from ridgeline.sched.work import Work
from ridgeline.verify import CaseResult, Report, baseline, matrix, verify
from ridgeline.verify.baseline import Baseline
from ridgeline.verify.heads import HEADS
from ridgeline.verify.matrix import AXES, Case, Scale, cases, lengths
from ridgeline.verify.requests import DISTINCT, GREEDY, SAMPLED, Prompts
from ridgeline.verify.run import run_case
from shares import ONE_OF_EACH, daily

Patch = pytest.MonkeyPatch
NEW_TOKENS = 8  # tokens of an answer; the tests take as long as their steps
SCALE = Scale(longest=256, new_tokens=NEW_TOKENS, windows=(24,))


# Bugs are planted in the buckets of a step and in the code that reads them; the cpu's kernels use page tables instead.
DEVICES = {"mistral": "reference", "gpt2": "reference"}


@cache
def loaded(name: str) -> LoadedModel:
    with TemporaryDirectory() as folder:
        if name in SPECS:
            write(SPECS[name], folder)
            return LLM(folder, cache="off", device="cpu").loaded
        build(CASES[name], folder)
        # A model whose frequencies depend on the length is served with the length of its case.
        device = DEVICES.get(name, "cpu")
        return LLM(folder, max_model_len=CASES[name].max_model_len, cache="off", device=device).loaded


def unequal(report: Report) -> list[str]:
    """Return the results that are wrong, for the message of an assertion."""
    return [
        f"{r.case.axis} {r.case.value}: {r.verdict} {r.error} {r.missing} {[d.describe() for d in r.differences]}"
        for r in report.results
        if r.verdict not in ("equal", "near tie", "not run")
    ]


def run_cases(name: str, chosen: Sequence[Case]) -> list[CaseResult]:
    """Return the results of some cases."""
    model = loaded(name)
    prompts, naive = Prompts(model.spec.vocab_size, model.eos_token_ids, 0), Baseline(model)
    return [run_case(model, case, replace(SCALE, longest=model.max_model_len), prompts, naive) for case in chosen]


def one(name: str, case: Case) -> CaseResult:
    """Return the result of one case."""
    (result,) = run_cases(name, [case])
    return result


# The matrix -------------------------------------------------------------------------------------------


def test_the_matrix_has_every_value_of_every_axis() -> None:
    found = cases(SCALE, 0)
    assert {c.chunk for c in found} >= {None, 1, 7, 16, 1000}
    assert {c.prefix for c in found} == {"cold", "hit"}
    assert {c.others for c in found} >= {0, 1, 7, 40}
    assert {c.preempt for c in found} == {None, "recompute", "swap"}
    assert {(c.drafts, c.wrong) for c in found} == {(0, 0.0), (4, 0.0), (4, 0.5), (12, 0.0)}
    assert {(c.source, c.tree) for c in found if c.tree > 1} == {("medusa", 3), ("eagle", 3)}
    assert {c.source for c in found} == {"known", "ngram", "model", *HEADS}
    assert {c.n for c in found} == {1, 4}
    assert {c.page for c in found} == {1, 16, 64}
    assert {c.steps_in_flight for c in found} == {1, 2}
    windowed = [c.prompt for c in found if c.axis == "window" and c.prompt]
    assert min(windowed) < 24 < max(windowed)
    assert 24 in windowed
    assert sum(c.axis == "combined" for c in found) == matrix.NUM_COMBINATIONS
    assert not [c for c in found if c.impossible]


def test_a_quick_matrix_has_few_values_of_each_axis() -> None:
    found = cases(replace(SCALE, quick=True), 0)
    assert list(dict.fromkeys(c.axis for c in found)) == ["default", *AXES, "window", "combined"]
    assert len(found) == 1 + len(AXES) + 1 + 1 + matrix.NUM_QUICK_COMBINATIONS  # there are two ways to preempt


def test_a_seed_fixes_the_cases_and_another_one_draws_others() -> None:
    assert cases(SCALE, 3) == cases(SCALE, 3)
    assert cases(SCALE, 3) != cases(SCALE, 4)


@pytest.mark.parametrize("longest", [4, 20, 50, 96, 100, 256, 5000])
@pytest.mark.parametrize("windows", [(), (1,), (24,), (24, 4096)])
def test_prompts_fit_the_context_or_the_case_says_why_not(longest: int, windows: tuple[int, ...]) -> None:
    scale = Scale(longest, min(NEW_TOKENS, longest // 4), windows)
    for case in cases(scale, 0):
        if not case.impossible:
            found = lengths(case, scale)
            assert 1 <= min(found.prompts) <= max(found.prompts) <= scale.room
            assert 0 <= found.shared < min(found.prompts)
            assert (case.prefix == "hit") == (found.shared >= case.page)
    if longest == 4:
        assert not cases(scale, 0)[0].impossible  # the default case always runs


# Right engines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["granitemoehybrid", "nemotron_h_moe", "nemotron_h"])
def test_hybrids(name: str) -> None:
    """Snapshots of the state are only kept at the ends of steps, so a hit may begin elsewhere
    than the matrix expects.
    """
    report = verify(loaded(name), quick=True)
    assert report.equal, unequal(report)


@pytest.mark.parametrize("name", ["llama_gqa", "qwen2_window", "gpt_oss", "cla_mixed", "deepseek_v2_lite"])
def test_quick(name: str) -> None:
    report = verify(loaded(name), quick=True)
    assert report.equal, unequal(report)
    assert report.complete, unequal(report)
    value = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert value["equal"]
    assert value["complete"]
    assert value["greedy"]["equal"] == value["greedy"]["total"] > 100
    assert [c["verdict"] for c in value["cases"]] == [r.verdict for r in report.results]


def test_the_command(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    build(CASES["gpt2"], tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    found = []
    for arguments in ([], ["--json", "--ops", "product=composed"]):
        monkeypatch.setattr("sys.argv", ["ridgeline", "verify", str(tmp_path), "--quick", "--seed", "1", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        assert not caught.value.code
        found.append(capsys.readouterr().out)
    table, value = found[0].splitlines(), json.loads(found[1])
    assert table[0].split()[:4] == ["axis", "value", "greedy", "sampled"]
    assert all(len(line) <= 100 for line in table)
    assert [name for name in AXES if any(line.startswith(name) for line in table)] == list(AXES)
    assert " cases: 13 equal, 1 not run; tokens equal: " in " ".join(table)
    assert (value["model"], value["seed"], value["quick"], value["equal"]) == (str(tmp_path), 1, True, True)
    assert len(value["cases"]) == 14
    said = "products with plain matrices, activations exact: "
    assert said in " ".join(table) and value["arithmetic"] == [f"{said}numbers of tokens stay as they are computed"]


def test_a_difference_is_exit_status_1(tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    build(CASES["gpt2"], tmp_path)
    noise_by_index_in_the_batch(monkeypatch)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("sys.argv", ["ridgeline", "verify", str(tmp_path), "--quick"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "DIFFERENT: " in out
    assert "batch 7 others: request 1, choice 0 (sampled), token 0: " in out


@pytest.mark.parametrize("name", daily([*CASES, *SPECS], ONE_OF_EACH))
def test_the_matrix_for_every_family(name: str, record_property: Callable[[str, object], None]) -> None:
    report = verify(loaded(name), new_tokens=NEW_TOKENS, seed=crc32(name.encode()) % 1000)  # as ever, if others come
    record_property("near ties", [d.describe() for r in report.results for d in r.differences])
    assert report.equal, unequal(report)
    assert report.complete, unequal(report)


# Wrong engines: each bug patches one function that naive sampling does not use --------------------------

_bucket, _attend_bucket = layout._bucket, paged._attend_bucket
_sample, _host_rows, _prefix_hash = sampling.sample, engine.RequestLoop._host_rows, Sequence_.prefix_hash
_swap_in, _swap_out, _copy = Arena.swap_in, Arena.swap_out, Arena.copy


def pages_out_of_order(patch: Patch) -> None:
    def bucket(*args: Any) -> Any:
        rows, pages, first = _bucket(*args)
        return rows, np.roll(pages, 1, axis=1), first

    patch.setattr(layout, "_bucket", bucket)


def pages_of_a_neighbor(patch: Patch) -> None:
    def bucket(*args: Any) -> Any:
        rows, pages, first = _bucket(*args)
        pages[-1] = pages[0]
        return rows, pages, first

    patch.setattr(layout, "_bucket", bucket)


def chunks_forget_the_ones_before(patch: Patch) -> None:
    def bucket(slices: layout.Slices, members: Any, *args: Any) -> Any:
        rows, pages, first = _bucket(slices, members, *args)
        later = (rows.shape[1] > 1) & (slices.starts[members] > 0)
        pages[later, 0] = pages[later, -1]
        return rows, pages, first

    patch.setattr(layout, "_bucket", bucket)


def window_off_by_one(patch: Patch) -> None:
    def attend(case: Any, *args: Any) -> Any:
        return _attend_bucket(replace(case, window=case.window - 1), *args)

    patch.setattr(paged, "_attend_bucket", attend)


def hash_without_a_token(patch: Patch) -> None:
    def prefix_hash(seq: Sequence_, position: int, grid: int) -> bytes:
        tokens, seq.tokens = seq.tokens, [0 if i == position - 1 else t for i, t in enumerate(seq.tokens)]
        try:
            return _prefix_hash(seq, position, grid)
        finally:
            seq.tokens = tokens

    patch.setattr(Sequence_, "prefix_hash", prefix_hash)


def noise_by_index_in_the_batch(patch: Patch) -> None:
    def sample(logits: Any, rows: Sequence[SampleRow], picks: Any) -> Any:
        return _sample(logits, [replace(r, noise=replace(r.noise, seed=i)) for i, r in enumerate(rows)], picks)

    patch.setattr(sampling, "sample", sample)


def forks_write_to_one_page(patch: Patch) -> None:
    patch.setattr(Arena, "copy", lambda *args: None)


def swapped_to_the_wrong_pages(patch: Patch) -> None:
    def swap_in(arena: Arena, group: int, host: Sequence[int], pages: Sequence[int]) -> None:
        _swap_in(arena, group, host, [*pages[1:], pages[0]])

    patch.setattr(Arena, "swap_in", swap_in)


def stale_token_of_the_step_before(patch: Patch) -> None:
    patch.setattr(DeviceRunner, "_remember", lambda *args: None)


def accepted_drafts_not_replayed(patch: Patch) -> None:
    read = DraftInputs.read
    patch.setattr(DraftInputs, "read", lambda *args: [0 * kept for kept in read(*args)])


def rejected_drafts_stay_in_the_state(patch: Patch) -> None:
    """Rejected drafts run as if they were known tokens."""
    build = layout.build_segments

    def segments(slices: layout.Slices, memory: Any) -> Any:
        known = replace(slices, drafts=np.zeros_like(slices.drafts))
        return build(known, memory)._replace(keep=build(slices, memory).keep)

    patch.setattr(step, "build_segments", segments)


def sampled_although_preempted(patch: Patch) -> None:
    """Penalties count the token of a step in flight, which is sampled again after the preemption."""

    def host_rows(running: engine.RequestLoop[Any], works: Sequence[Work]) -> Any:
        now = {answer.sequence.id: answer.sequence.epoch for answer in running._answers.values()}
        return _host_rows(running, [work._replace(epoch=now.get(work.sequence, 0)) for work in works])

    patch.setattr(engine.RequestLoop, "_host_rows", host_rows)


# The bug, the model, and the axes that must find it; if these include the default case, it must find it too, else not.
BUGS: list[tuple[Callable[[Patch], None], str, set[str]]] = [
    (pages_out_of_order, "gpt2", {"default", "chunks", "prefix"}),
    (pages_of_a_neighbor, "gpt2", {"batch", "forks"}),
    (chunks_forget_the_ones_before, "gpt2", {"chunks"}),
    (window_off_by_one, "mistral", {"default", "window"}),
    (hash_without_a_token, "gpt2", {"prefix"}),
    (noise_by_index_in_the_batch, "gpt2", {"batch", "forks"}),
    (forks_write_to_one_page, "gpt2", {"forks"}),
    (swapped_to_the_wrong_pages, "gpt2", {"preempted"}),
    (stale_token_of_the_step_before, "gpt2", {"in flight"}),
    (accepted_drafts_not_replayed, "mamba2", {"drafts"}),
    (rejected_drafts_stay_in_the_state, "mamba2", {"drafts"}),
]


@pytest.mark.parametrize(("bug", "name", "axes"), BUGS, ids=[bug.__name__ for bug, *_ in BUGS])
def test_caught(bug: Callable[[Patch], None], name: str, axes: set[str], monkeypatch: Patch) -> None:
    """Run only the cases of these axes and of a quick matrix, because the whole matrix would take ten times as long."""
    loaded(name)
    bug(monkeypatch)
    chosen = [c for c in cases(replace(SCALE, quick=True), 0) if c.axis in axes | {"default"}]
    results = run_cases(name, chosen)
    different = {r.case.axis for r in results if r.verdict == "DIFFERENT"}
    assert different == axes, [(r.case.value, r.verdict, r.error) for r in results]


def test_penalties_that_count_a_token_twice_are_caught(monkeypatch: Patch) -> None:
    sampled_although_preempted(monkeypatch)
    result = one("llama_gqa", Case(chunk=3, others=7, preempt="recompute", n=4, page=2, steps_in_flight=2))
    assert result.verdict == "DIFFERENT"
    assert not any(d.greedy for d in result.differences)


def test_an_exception_is_the_error_of_its_case(monkeypatch: Patch) -> None:
    submit = DeviceRunner.submit

    def broken(self: DeviceRunner, plan: Any, sampling: Any) -> Any:
        if self._groups[0].page_tokens == 1:
            raise RuntimeError("pages of one token")
        return submit(self, plan, sampling)

    monkeypatch.setattr(DeviceRunner, "submit", broken)
    report = verify(loaded("gpt2"), quick=True)
    errors = [r for r in report.results if r.verdict == "error"]
    assert {r.error for r in errors} == {"RuntimeError: pages of one token"}
    assert [r for r in report.results if r.case.page == 1] == errors
    assert not report.equal
    assert all(r.verdict in ("equal", "not run") for r in report.results if r not in errors)


def test_a_stuck_engine_is_an_error(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Engine, "step", lambda self: [])
    result = one("gpt2", Case())
    assert result.verdict == "error"
    assert "not complete after" in result.error


# Features that were not in use, and near ties -----------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "missing"),
    [
        (Case(preempt="recompute"), "nothing was computed again"),
        (Case(preempt="swap"), "nothing was swapped"),
        (Case(others=1, chunk=1), "no other sequence ran"),
    ],
)
def test_a_setting_that_was_not_at_work_is_named(case: Case, missing: str) -> None:
    """A single sequence is never preempted; in steps of one token, no other sequence is in the batch."""
    result = one("gpt2", case)
    assert result.verdict == "not exercised"
    assert result.missing == (missing,)


def test_a_prefix_that_is_not_found_is_named(monkeypatch: Patch) -> None:
    monkeypatch.setattr(StateCache, "find_prefix", lambda self, seq: (0, [[] for _ in self.groups]))
    assert one("gpt2", Case(prefix="hit")).missing == ("no prefix hit",)


def test_a_prefix_that_is_found_where_none_is_shared_is_named(monkeypatch: Patch) -> None:
    monkeypatch.setattr(engine, "hash_root", lambda **parts: b"")
    assert one("gpt2", Case(others=DISTINCT)).missing == ("a prefix was found",)


def test_chunks_that_are_not_cut_are_named() -> None:
    observed = one("gpt2", Case(chunk=7)).observed
    assert observed.first_token == observed.least_first_token == 6  # the prompt has 40 tokens
    assert replace(observed, first_token=1).missing(Case(chunk=7)) == (
        "first token too early",
        "first token too late",
    )


def test_differences_within_rounding_are_near_ties(monkeypatch: Patch) -> None:
    noise_by_index_in_the_batch(monkeypatch)
    monkeypatch.setattr(baseline, "NEAR_LOGITS", 100.0)
    result = one("gpt2", Case(others=2))
    assert result.verdict == "near tie"
    assert all(d.near and not d.greedy for d in result.differences)
    assert result.sampled.equal < result.sampled.total
    assert result.greedy.equal == result.greedy.total
    assert "a near tie" in result.differences[0].describe()


def test_the_gap_of_a_token() -> None:
    """Greedy: the difference of logits. Sampled: the difference of logits with noise."""
    model, new = loaded("gpt2"), 4
    naive, prompt = Baseline(model), (5, 6, 7)

    def request(params: SamplingParams) -> GenerationRequest:
        return GenerationRequest(prompt, replace(params, max_tokens=new), (NoiseKey(0, 3),))

    greedy = request(GREEDY)
    answer = naive.answer(greedy, 0)
    gaps = [naive.gap(greedy, 0, 1, token) or 0.0 for token in range(VOCAB)]
    assert min(gaps) == gaps[answer.tokens[1]] == 0
    assert sorted(gaps)[1] == pytest.approx(answer.leads[1], abs=1e-5)
    assert naive.smallest_lead() == min(answer.leads)

    sampled = request(SAMPLED)
    taken = naive.answer(sampled, 0).tokens[2]
    assert naive.gap(sampled, 0, 2, taken) == 0
    others = [naive.gap(sampled, 0, 2, token) for token in range(VOCAB) if token != taken]
    assert all(gap is None or gap > 0 for gap in others) and any(others)
    kept = request(replace(SAMPLED, allowed_token_ids=(3, 4)))
    assert naive.gap(kept, 0, 0, 5) is None
