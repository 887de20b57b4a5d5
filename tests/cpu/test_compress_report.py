"""The printed report of `ridgeline quantize`, at every width of a terminal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ridgeline.cli.show.quantized import megabytes, parts, table, title, with_interval
from ridgeline.cli.show.tables import Line, Table
from ridgeline.compress import speed
from ridgeline.compress.compare import Comparison, Quality
from ridgeline.compress.inputs import MatrixKey
from ridgeline.compress.report import Report
from ridgeline.compress.speed import Speed, Speeds, measure_speeds
from ridgeline.errors import DeviceError
from ridgeline.evals.estimates import Estimate, Proportion


def quality(kl: float, error: float, top1: float, perplexity: float, change: float) -> Quality:
    share = Proportion(top1, top1 - 0.009, top1 + 0.008)
    return Quality(Estimate(kl, error), share, Estimate(perplexity, 0.5), Estimate(change, 0.002))


COMPARISON = Comparison(
    Quality(None, None, Estimate(22.96, 0.4)),
    {"rtn": quality(0.056, 0.0007, 0.861, 24.31, 1.059), "smooth-int8": quality(0.0013, 0.00003, 0.902, 23.6, 1.028)},
    31_000, Estimate(0.02, 0.001),
)  # fmt: skip
SPEEDS = Speeds({"as stored": Speed(1020.0, 980.0), "smooth-int8": Speed(1610.0, 15.83)}, ("predictions: by hand",))
REPORT = Report(
    "smooth-int8", "int8", "pocket", "128 sequences of FILES", COMPARISON,
    {"as stored": 1_269_000_000, "smooth-int8": 630_400_000}, {"as stored": 16.0, "smooth-int8": 8.1251},
    {MatrixKey("layers.3.mlp.down.weight"): 0.009, MatrixKey("layers.1.mlp.experts.down.weight", 3): 0.0004}, {}, {},
    (), 32, SPEEDS,
)  # fmt: skip


def lines(report: Report, width: int) -> list[str]:
    found = []
    for part in parts(report):
        shown = part if isinstance(part, Table | Line) else Line(part)
        found += [line.plain for line in shown.lines(width)]
    return found


def test_the_table_at_80_columns_has_every_figure() -> None:
    assert [line.plain for line in table(REPORT).lines(80)] == [
        "             bits     MB       KL  top-1   perplexity  tok/s predicted     tok/s",
        "                                                                        measured",
        "as stored      16  1,269                        22.96            1,020       980",
        "RTN          8.13    630    0.056  86.1%  24.31 +5.9%            1,610      15.8",
        "                           ±0.002  ±0.9%        ±0.4%",
        "smooth-int8  8.13    630   0.0013  90.2%  23.60 +2.8%            1,610      15.8",
        "                          ±0.0001  ±0.9%        ±0.4%",
    ]
    assert not table(REPORT).dropped(80)
    assert title(REPORT) == (
        "smooth-int8 g32 of pocket, calibrated on 128 sequences of FILES "
        "(held-out part: 31,000 tokens, none of them seen)"
    )


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = ("layers.1.mlp.experts.down[3]",)
    for line in lines(REPORT, width):
        assert len(line) <= width or line.strip() in long
    shown = " ".join(" ".join(lines(REPORT, width)).split())
    assert "layers.3.mlp.down 0.9%" in shown and "RTN has the speed of smooth-int8" in shown
    for name in table(REPORT).dropped(width):
        assert name in shown


def test_without_a_calibration_the_column_is_left_out_with_the_reason() -> None:
    speeds = Speeds({"as stored": Speed(None, 980.0), "smooth-int8": Speed(None, 15.8)}, ("no prediction: why",))
    shown = lines(replace(REPORT, speeds=speeds), 80)
    assert "no prediction: why" in shown and not any("predicted" in line for line in shown)


def test_rtn_has_no_speed_where_it_has_another_format() -> None:
    report = replace(REPORT, format="int8-outliers")
    assert not any("RTN has the speed" in line for line in lines(report, 80))
    (row,) = [line for line in lines(report, 80) if line.startswith("RTN")]
    assert "15.8" not in row and row.endswith("+5.9%")


def test_without_data_there_is_size_alone() -> None:
    report = replace(REPORT, comparison=None, speeds=None, calibration="")
    assert [column.name for column in table(report).columns] == ["", "bits", "MB"]
    json.dumps(report.to_json(), allow_nan=False)


@pytest.mark.parametrize(
    ("value", "half", "shown"),
    [
        (0.056, 0.0014, ("0.056", "±0.002")), (4.39, 0.2, ("4.4", "±0.2")), (0.0013, 0.00006, ("0.0013", "±0.0001")),
        (12.0, 3.0, ("12", "±3")), (0.5, None, ("0.5", "")), (0.0, 0.0, ("0", "")),
    ],
)  # fmt: skip
def test_a_value_has_the_digits_of_its_interval(value: float, half: float | None, shown: tuple[str, str]) -> None:
    assert with_interval(value, half) == shown


def test_megabytes_have_a_decimal_where_it_counts() -> None:
    assert [megabytes(n) for n in (2_540_000, 99_940_000, 269_000_000, 1_269_000_000)] == [
        "2.5",
        "99.9",
        "269",
        "1,269",
    ]


def test_a_model_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: str, threads: int | None) -> tuple[Speed, str]:
        if model == "large":
            raise DeviceError("the weights take 1 GB")
        return Speed(None, 5.0), "no prediction"

    monkeypatch.setattr(speed, "_measure", fails)
    found = measure_speeds({"as stored": "large", "rtn-int4": "small"}, None)
    assert set(found.by_name) == {"rtn-int4"}
    assert found.notes == ("the speed of as stored is not measured: the weights take 1 GB", "no prediction")
    shown = lines(replace(REPORT, scheme="rtn-int4", speeds=found, comparison=None, bits={"rtn-int4": 4.5},
                          num_bytes={"rtn-int4": 5}), 80)  # fmt: skip
    assert any("is not measured" in line for line in shown)
