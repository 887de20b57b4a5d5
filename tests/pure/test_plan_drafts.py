"""Plans with a draft model, a head or n-grams: cost from their specs, memory, and where the acceptance comes from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
from test_clock import KEPT
from typer.testing import CliRunner

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cli.main import app
from ridgeline.cost.calibrated import Counts, facts_of, terms_of
from ridgeline.cost.calibration import machine_of
from ridgeline.cost.operations import Forward, Slice
from ridgeline.cost.precision import Precision
from ridgeline.cost.roofline import time_step
from ridgeline.cost.shard import Scheme
from ridgeline.errors import CheckpointError, RequestError
from ridgeline.plan.changes import change
from ridgeline.plan.compare import compare
from ridgeline.plan.explain import explain
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.plan.speculation import Draft, Speculation, parse_acceptance, parse_draft, speculation_of
from ridgeline.spec import GatedMLP, Mamba2, ModelSpec, RMSNorm
from ridgeline.spec.cards import measured_acceptance, rank_accuracies
from ridgeline.spec.heads import Eagle3Spec, EagleSpec, HeadSpec, MedusaSpec

H100 = hardware("h100")
TARGET, SMALL = (find_model(name).spec for name in ("llama-3.1-8b", "llama-3.2-1b"))
WIDTH, VOCAB = TARGET.hidden_size, TARGET.vocab_size
ATTENTION = TARGET.attentions(shared=False)[0]
SIZES = {"hidden_size": WIDTH, "vocab_size": VOCAB, "draft_vocab_size": VOCAB}
LAYER = {"attention": ATTENTION, "mlp": GatedMLP(14336), "norm": RMSNorm(), "max_position_embeddings": 8192}
HEADS: dict[str, HeadSpec] = {
    "medusa": MedusaSpec(**SIZES, num_heads=3),
    "shared": MedusaSpec(**SIZES, num_heads=4, num_blocks=2, shared_head=True),
    "eagle": EagleSpec(**SIZES, **LAYER),
    "eagle3": Eagle3Spec(**{**SIZES, "draft_vocab_size": 32000}, **LAYER, own_embedding=False),
}  # fmt: skip


def planner(draft: Draft | None, depth: int = 4, acceptance: tuple[float, ...] = (0.8,), **more: object) -> Planner:
    speculation = None if draft is None else speculation_of(draft, depth, acceptance)
    return Planner(replace(Deployment(TARGET, H100), speculation=speculation, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HEADS)
def test_the_operations_of_a_head_are_those_of_its_spec(name: str) -> None:
    """A step of a head computes the multiply-accumulates that its spec counts, and reads the matrices of products."""
    head, precision = HEADS[name], Precision()
    for tokens, context in ((1, 700), (3, 900)):
        ops = Forward(head, precision).operations([Slice(1, tokens, context, tokens)])
        assert sum(op.flops * op.layers for op in ops) == pytest.approx(2 * head.work(tokens, context))
    read = sum(precision.weight_bytes(w) for w in head.products() if w.is_matrix)
    assert sum(op.weight_bytes * op.layers for op in ops) == pytest.approx(read)


def test_a_draft_model_costs_its_own_steps() -> None:
    """k drafts take a step with two tokens and k - 1 steps with one, each at least as long as reading the weights."""
    plan, alone = planner(Draft("small", SMALL)), Planner(Deployment(SMALL, H100))
    steps = alone.step([Slice(8, 2, 1000)]).seconds + 3 * alone.decode(8, 1000).seconds
    assert plan.drafting_s(8, 1000) == pytest.approx(steps)
    assert plan.drafting_s(8, 1000) > 4 * 2 * SMALL.num_params() / H100.read_bytes_per_s
    verify = planner(None).decode(8, 1000, 5).seconds
    assert plan.token_s(8, 1000) == pytest.approx((verify + steps) / ((1 - 0.8**5) / 0.2))


def test_medusa_is_one_step_and_eagle_one_for_each_depth() -> None:
    head = HEADS["medusa"]
    one = time_step(Forward(head, Precision()).operations([Slice(8, 1, 1000)]), H100).seconds
    assert planner(Draft("m", head)).drafting_s(8, 1000) == pytest.approx(one)
    assert planner(Draft("m", head)).drafts == 3  # as many as it has heads
    two = Forward(replace(head, num_heads=2), Precision()).operations([Slice(8, 1, 1000)])
    assert planner(Draft("m", head), 2).drafting_s(8, 1000) == pytest.approx(time_step(two, H100).seconds)
    eagle = HEADS["eagle"]
    gained = ceil((1 - 0.8**5) / 0.2)
    first, later = (
        time_step(Forward(eagle, Precision()).operations([Slice(8, n, 1000)]), H100).seconds for n in (gained, 1)
    )
    assert planner(Draft("e", eagle)).drafting_s(8, 1000) == pytest.approx(first + 3 * later)
    assert planner(Draft("ngram", None)).drafting_s(8, 1000) == 0.0


@pytest.mark.parametrize("spec", [SMALL, *HEADS.values()], ids=["model", *HEADS])
def test_the_draft_takes_memory(spec: ModelSpec | HeadSpec) -> None:
    """Weights in bfloat16, vectors in float32, and two bytes for each number of keys and values."""
    load, kept = Load(4, 900, 100), sum(layer.mixer.state().elements for layer in spec.layers if layer.mixer)
    with_draft, without = planner(Draft("d", spec)).footprint(load), planner(None).footprint(load)
    matrices = sum(w.num_params for w in spec.weights() if w.is_matrix)
    vectors = sum(w.num_params for w in spec.weights()) - matrices
    assert with_draft.weight_bytes - without.weight_bytes == 2 * matrices + 4 * vectors
    assert with_draft.formula_bytes - without.formula_bytes == 2 * kept * 4 * 1000
    pages = 4 * 63 + 1
    assert with_draft.pages_bytes - without.pages_bytes == 2 * kept * 16 * pages


@pytest.mark.parametrize("drafts", [1, 4])
def test_steps_with_drafts_are_replayed_on_a_calibrated_machine(drafts: int) -> None:
    """A step that verifies drafts is recorded as a decode step is, and so are the steps of a draft model."""

    def way(batch: Slice, *, drafting: bool = False) -> str:
        ops, facts = Forward(SMALL, Precision()).operations([batch]), facts_of(SMALL, drafts=drafting)
        (found,) = [t for t in terms_of(facts, Counts.of(ops, [batch]), 0.0) if t.endswith(" step")]
        return found

    assert way(Slice(8, 1 + drafts, 100, 1 + drafts)) == "replayed step"
    assert way(Slice(8, 2, 100), drafting=True) == "replayed step"
    assert way(Slice(8, 2, 100)) == way(Slice(30, 1 + 2 * drafts, 100, 1 + 2 * drafts)) == "plain step"
    measured = planner(Draft("small", SMALL), drafts, hardware=machine_of(KEPT))
    assert 0 < measured.drafting_s(2, 100) < measured.verification_s(2, 100)


def test_given_acceptance_measured_acceptance_and_an_assumed_one() -> None:
    draft = Draft("d", SMALL, (0.9, 0.8))
    assert speculation_of(draft, 3, (0.5,)).source == "as given"
    measured = speculation_of(draft, 3)
    assert measured.shares == pytest.approx((0.9, 0.72, 0.576)) and measured.source.startswith("measured")
    assumed = speculation_of(Draft("d", SMALL), 3)
    assert assumed.source.startswith("assumed: ") and "2211.17192" in assumed.source
    for kind in ("medusa", "eagle", "eagle3"):
        assert speculation_of(Draft("d", HEADS[kind]), 3).source.startswith("assumed: ")


@pytest.mark.parametrize(("text", "found"), [
    ("llama:4", ("llama", 4, ())), ("llama", ("llama", 4, ())), ("a/b:2:0.8", ("a/b", 2, (0.8,))),
    ("C:dir:3", ("C:dir", 3, ())), ("ngram:8:0.5/0.6", ("ngram", 8, (0.5, 0.6))), ("x:y", ("x:y", 4, ())),
])  # fmt: skip
def test_names_of_drafts(text: str, found: tuple[str, int, tuple[float, ...]]) -> None:
    assert parse_draft(text) == found


@pytest.mark.parametrize(("text", "message"), [
    ("speculate=llama-3.2-1b:0", "the number of drafts is 0"), ("speculate=llama-3.2-1b:4:1.5", "from 0 to 1"),
    ("speculate=llama-3.2-1b:2.5", "the number of drafts is 2.5"), ("speculate=no-such-model", "unknown model"),
    ("speculate=auto", "speculate is auto, which only an engine chooses"),
    ("speculate=mamba-2.8b:4", "its layer 0 is recurrent"), ("speculate=0.8/x:4", "unknown model '0.8/x'"),
    ("pp=2,speculate=llama-3.2-1b", "pipeline stages; set pp to 1"), ("speculate=nan:4", "from 0 to 1"),
])  # fmt: skip
def test_drafts_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        change(Deployment(TARGET, H100), text)


def test_a_head_of_another_model_is_refused() -> None:
    with pytest.raises(RequestError, match=r"hidden size 4096, and .* has 2048"):
        replace(Deployment(SMALL, H100), speculation=speculation_of(Draft("head", HEADS["eagle"]), 4))
    with pytest.raises(RequestError, match="tp 3 does not divide"):
        planner(Draft("d", SMALL), scheme=Scheme(tp=3))
    with pytest.raises(RequestError, match="must be from 0 to 1"):
        parse_acceptance("0.5,1.2")
    with pytest.raises(RequestError, match="write a number from 0 to 1"):
        parse_acceptance("0.5,")
    with pytest.raises(RequestError, match="give at least one number"):
        Speculation((), 4)
    assert Draft(
        "m", replace(SMALL, layers=(replace(SMALL.layers[0], mixer=Mamba2(2, 64, 16, 1, 4, RMSNorm())),))
    ).misfit(TARGET)


def test_comparison_names_the_acceptance_and_the_cost() -> None:
    rows = compare(Deployment(TARGET, H100), Load(1, 768, 256), ["speculate=llama-3.2-1b:4", "speculate=ngram:4:0.4"])
    by = {row.text: row for row in rows}
    notes = "; ".join(by["speculate=llama-3.2-1b:4"].notes)
    assert "acceptance 0.7 (assumed: T5-small" in notes and "2.77 tokens expected" in notes
    assert "of weights, and " in notes and "a verification takes 1.0" in notes
    assert "acceptance 0.4 (as given)" in "; ".join(by["speculate=ngram:4:0.4"].notes)
    small, plain = by["speculate=llama-3.2-1b:4"], by["unchanged"]
    assert small.sequence_bytes > plain.sequence_bytes and small.largest_batch < plain.largest_batch
    assert 1 < small.figures.tokens_per_s / plain.figures.tokens_per_s < 2.77
    lines = dict(explain(planner(Draft("small", SMALL)), Load(1, 768, 256)))
    assert lines["tokens a verification"].startswith("1 + 0.8 + 0.64 + 0.512 + 0.41 = 3.36")
    assert "without drafts" in lines["token with drafts"] and "parameters" in lines["draft small"]


def test_acceptance_of_a_card(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    assert measured_acceptance(tmp_path) == ()
    for text, found in (
        ("no front matter", ()),
        ("---\nlicense: x\n---\naccepted_shares: [0.5]\n", ()),
        ("---\nlicense: x\naccepted_shares: [0.8, 0.6, 0]\n---\n", (0.8, 0.75, 0.0)),
        ("---\naccepted_shares: []\n---\n", ()),
    ):
        card.write_text(text)
        assert measured_acceptance(tmp_path) == pytest.approx(found)
    for bad in ("[0.5, 0.6]", "[1.5]", "0.5", '["a"]', "[0.5", "[true]", f"[{'9' * 400}]"):
        card.write_text(f"---\naccepted_shares: {bad}\n---\n")
        with pytest.raises(CheckpointError, match="accepted_shares"):
            measured_acceptance(tmp_path)


def test_accuracies_of_a_card(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    assert rank_accuracies(tmp_path) == ()
    for text, found in (
        ("---\naccepted_shares: [0.8]\n---\n", ()),
        ("---\nrank_accuracies: [[0.5, 0.25], [0.4]]\n---\n", ((0.5, 0.25), (0.4,))),
    ):
        card.write_text(text)
        assert rank_accuracies(tmp_path) == found
    wrong = ("[0.5]", "[[0.5, 0.6]]", "[[-0.1]]", "[[]]", '[["a"]]', "[[0.5]", "0.5", "[[NaN]]")
    for bad in (*wrong, "[" * 20_000, f"[[{'9' * 400}]]"):
        card.write_text(f"---\nrank_accuracies: {bad}\n---\n")
        with pytest.raises(CheckpointError, match="rank_accuracies"):
            rank_accuracies(tmp_path)


def test_on_the_command_line(tmp_path: Path) -> None:
    """`speculate=` takes a folder, whose card has the acceptance; the plan, its JSON and its formulas name it."""
    from ridgeline.catalog.models import built_in_folder

    folder = built_in_folder("pocket-draft")
    assert folder is not None
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    (tmp_path / "README.md").write_text("---\naccepted_shares: [0.9, 0.8]\n---\n")
    command = ["plan", "pocket", "--hardware", "cpu-server", f"speculate={tmp_path}:2"]
    shown = CliRunner().invoke(app, [*command, "--explain"], env={"COLUMNS": "100"})
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "2.70 tokens" in text and "measured, from the card of the draft" in text and "times plain decode" in text
    found = json.loads(CliRunner().invoke(app, [*command, "--json"]).output)
    speculation = found["deployment"]["speculation"]
    assert speculation["kind"] == "model" and speculation["tokens"] == pytest.approx(2.7)
    assert found["time"]["verification_s"] > found["time"]["step_s"] * 0.99 and found["time"]["drafting_s"] > 0
