"""Test the LLM of notebooks: its tables are those of the commands, and a kernel of Jupyter shows them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from calibrated import kept_with

import ridgeline
from ridgeline.cost.calibration import save
from ridgeline.errors import RequestError
from ridgeline.notebook import LLM, Bar, Shown, in_notebook
from ridgeline.spec.request import SamplingParams

GREEDY = SamplingParams(max_tokens=4, temperature=0)
HOSTILE = "<script>alert(1)</script> & <td>"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pocket", max_model_len=128, threads=1)


def rows(page: str) -> list[list[str]]:
    """Return the texts of the cells of all tables. An XML parser refuses what is not closed or not escaped."""
    body = ElementTree.fromstring(f"<body>{page}</body>").iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in body]


def test_answers_are_those_of_any_llm_and_a_table(llm: LLM) -> None:
    prompts = ["def f(x):", HOSTILE]
    found = llm.generate(prompts, GREEDY)
    wanted = ridgeline.LLM("pocket", max_model_len=128, threads=1).generate(prompts, GREEDY)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]
    head, first, second = rows(found._repr_html_())  # type: ignore[attr-defined]
    assert head == ["prompt", "answer", "end", "tokens", "TTFT", "TPOT"]
    assert first[:4] == [prompts[0], found[0].outputs[0].text, "length", "4"]
    assert second[0] == HOSTILE
    assert {"max_model_len", "threads"} <= {row[0] for row in rows(llm._repr_html_())}


def test_a_plan_is_a_table_of_the_engine_as_it_runs(llm: LLM) -> None:
    plan = llm.plan(batch=2, prompt=64, output=16)
    assert plan.data["num_params"] == llm.loaded.spec.num_params()
    assert plan.data["load"] == {"batch": 2, "prompt": 64, "output": 16, "context": 80}
    assert any(row[:1] == ["weights"] for row in rows(plan._repr_html_()))
    assert "TTFT" in repr(plan) and max(map(len, repr(plan).splitlines())) <= 80
    with pytest.raises(RequestError, match="at least 1"):
        llm.plan(batch=0)
    with pytest.raises(RequestError, match='cache="on"'):
        LLM("pocket", cache="off").plan()


def test_times_stand_beside_predicted_ones(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outputs = llm.generate(["def f(x):", "import"], GREEDY)
    assert "ridgeline calibrate" in repr(llm.beside(outputs))
    save(kept_with(1))
    found = llm.beside(outputs)
    assert [row.name for row in found.data] == ["total time", "TTFT, mean", "TPOT, mean"]
    assert found.data[0].measured == max(one.timing.total_s for one in outputs)
    assert [row[0] for row in rows(found._repr_html_()[: found._repr_html_().index("<?xml")])[1:]] == [
        row.name for row in found.data
    ]
    assert ElementTree.fromstring(found.svg).tag.endswith("svg")


def test_texts_are_escaped_and_no_bar_is_shown_outside_of_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    assert Shown([HOSTILE])._repr_html_() == "<p>&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;td&gt;</p>"
    assert not in_notebook()
    Bar("prompts", 1).add(1)
    assert capsys.readouterr() == ("", "")


CELLS = (
    "from ridgeline import SamplingParams\nfrom ridgeline.notebook import LLM",
    "llm = LLM('pocket', max_model_len=128)\nllm",
    "outputs = llm.generate(['def f(x):', 'import'], SamplingParams(max_tokens=8, temperature=0))\noutputs",
    "llm.plan(batch=2)",
    "llm.verify(quick=True)",
    "llm.beside(outputs)",
)


@pytest.fixture
def pages() -> Iterator[list[str]]:
    """Run a notebook in a kernel of its own, and return the HTML that each cell shows, progress included."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=300).execute()
    yield ["".join(out.get("data", {}).get("text/html", "") for out in cell.outputs) for cell in book.cells]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the kernel's libraries warn
def test_a_kernel_shows_progress_and_tables(pages: list[str]) -> None:
    imports, settings, answers, plan, checks, times = pages
    assert not imports
    assert "threads" in settings and "loading, bytes" in settings
    assert "prompts: 2 of 2" in answers and "<td" in answers
    assert "Memory per device" in plan
    assert "cases: " in checks and "preempted" in checks and "DIFFERENT" not in checks
    assert "ridgeline calibrate" in times or "total time" in times
