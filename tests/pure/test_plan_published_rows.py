"""The published results that expected times are fitted to: every row can be read, planned and traced to its source."""

from __future__ import annotations

import re

import pytest

from ridgeline.plan.published import Result, results, sources

UNITS = {
    "decode": {"tokens/s"}, "served_tpot": {"ms"}, "ttft": {"ms"}, "prefill": {"tokens/s"}, "latency": {"s"},
    "throughput": {"tokens/s", "tokens/s/device"},
}  # fmt: skip


def test_there_are_enough_results_from_several_sources_machines_and_engines() -> None:
    rows = results()
    assert len(rows) >= 100
    assert {row.source for row in rows} == set(sources())
    assert len({row.machine for row in rows}) >= 8
    assert len({row.engine for row in rows}) >= 5


def test_sources_have_an_address_and_say_how_they_were_read() -> None:
    for name, source in sources().items():
        assert source.address.startswith("https://"), name
        assert source.title and source.read, name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", source.retrieved), name


@pytest.mark.parametrize("source", sorted(sources()))
def test_rows_have_a_positive_figure_that_their_quote_contains(source: str) -> None:
    for row in (r for r in results() if r.source == source):
        assert row.figure > 0 and row.seconds > 0
        assert row.unit in UNITS[row.kind]
        numbers = {float(text.replace(",", "")) for text in re.findall(r"\d[\d,]*\.?\d*", row.quote) if text.strip(",")}
        assert row.figure in numbers, row


@pytest.mark.parametrize("source", sorted(sources()))
def test_rows_name_models_and_machines_of_the_catalog_and_can_be_planned(source: str) -> None:
    for row in (r for r in results() if r.source == source):
        deployment = row.deployment  # raises RequestError for an unknown name, type or number of devices
        assert deployment.scheme.devices == row.tp
        assert row.steps and all(often > 0 for often, _ in row.steps)


def result(**changes: object) -> Result:
    """Return a result that the tests below change."""
    values = {
        "source": "a", "model": "llama-2-7b", "machine": "h100", "engine": "e", "version": "1", "weights": "bfloat16",
        "activations": "bfloat16", "state": "bfloat16", "tp": 2, "batch": 4, "prompt": 100, "output": 11,
        "kind": "throughput", "figure": 10.0, "unit": "tokens/s/device", "quote": "10",
    }  # fmt: skip
    return Result(**{**values, **changes})  # type: ignore[arg-type]


def test_seconds_of_each_kind() -> None:
    assert result().seconds == pytest.approx(4 * 11 / 20)  # two devices with 10 tokens/s each
    assert result(unit="tokens/s").seconds == pytest.approx(4 * 11 / 10)
    assert result(kind="decode", unit="tokens/s").seconds == pytest.approx(0.1)
    assert result(kind="prefill", unit="tokens/s").seconds == pytest.approx(10.0)
    assert result(kind="ttft", unit="ms").seconds == pytest.approx(0.01)
    assert result(kind="latency", unit="s").seconds == pytest.approx(10.0)


def test_steps_of_each_kind() -> None:
    batch = result().steps
    assert batch[0][1].count == 4 and batch[0][1].tokens == 100
    assert sum(often for often, _ in batch[1:]) == pytest.approx(10)  # the first token comes from the prompts' step
    served = result(kind="served_tpot", unit="ms").steps
    assert served[0][0] == pytest.approx(3 / 10)  # three other prompts in the ten gaps of an answer
    chunks = result(kind="prefill", unit="tokens/s", prompt=1200).steps
    assert [s.tokens for _, s in chunks] == [512, 512, 176]
    assert [s.sampled for _, s in chunks] == [0, 0, 1]
