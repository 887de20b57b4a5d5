"""Parts of the server: markers in streams, tool calls, reasoning, metrics, the gate, keys."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.cli.flags.serving import ServedFlags, ServerFlags, serve_options
from ridgeline.errors import RequestError
from ridgeline.serve.api.answer import AnswerReader, Piece, Reading, merge_calls
from ridgeline.serve.api.marks import MarkScanner
from ridgeline.serve.api.metrics import Page
from ridgeline.serve.api.tools import calls_of
from ridgeline.serve.engine.meters import Histogram
from ridgeline.serve.gate import Gate
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.options import ServeOptions, read_keys
from ridgeline.serve.service import Service


def pieces(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(edges)]


def read(reading: Reading, parts: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    reader = AnswerReader(reading)
    found: list[Piece] = [p for part in parts for p in reader.push(part)] + reader.flush()
    calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in merge_calls(found)]
    return "".join(p.content for p in found), "".join(p.reasoning for p in found), calls


@given(
    text=st.text("ab<>", max_size=40), mark=st.sampled_from(["<a>", "aab", "abab"]), cuts=st.lists(st.integers(0, 40))
)
def test_a_marker_is_found_in_any_split(text: str, mark: str, cuts: list[int]) -> None:
    scanner, before, after = MarkScanner(mark), "", None
    for piece in pieces(text, cuts):
        if after is not None:
            after += piece
            continue
        certain, after = scanner.push(piece)
        before += certain
    if after is None:
        before += scanner.flush()
    wanted = text.partition(mark)
    assert (before, after) == (wanted[0], wanted[2] if wanted[1] else None)


F = {"name": "f", "arguments": {"x": [1, "</a>"]}}
G = {"name": "g", "parameters": {}}
CALLS = [("f", F["arguments"]), ("g", {})]
ANSWERS = [
    (
        "hermes",
        f"Hi. <tool_call>\n{json.dumps(F)}\n</tool_call>\n<tool_call>{json.dumps(G)}</tool_call>",
        "Hi. ",
        CALLS,
    ),
    (
        "hermes",
        f"a <tool_call>{json.dumps(F)}</tool_call>\n\nb  <tool_call>{json.dumps(G)}</tool_call> \n<tool",
        "a \n\nb   \n<tool",
        CALLS,
    ),
    ("hermes", f"<tool_call>{json.dumps(F)}</tool_call> \n", "", CALLS[:1]),
    ("hermes", f"<tool_call>{json.dumps(F)}", "", CALLS[:1]),
    ("hermes", "a < b <tool_call>no</tool_call> c", "a < b <tool_call>no</tool_call> c", []),
    ("hermes", "<tool_call>{", "<tool_call>{", []),
    ("mistral", f"Hi [TOOL_CALLS][{json.dumps(F)}, {json.dumps(G)}]", "Hi ", CALLS),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": [1, "</a>"]}[TOOL_CALLS]g[ARGS]{}', "", CALLS),
    ("mistral", '[TOOL_CALLS]f{"x": [1, "</a>"]}', "", CALLS[:1]),
    ("mistral", "[TOOL_CALLS]?", "[TOOL_CALLS]?", []),
    ("llama3_json", f"{json.dumps(F)}; {json.dumps(G)}", "", CALLS),
    ("llama3_json", f"<|python_tag|>{json.dumps(G)}", "", CALLS[1:]),
    ("llama3_json", '{"an": "object"}', '{"an": "object"}', []),
    ("llama3_json", "<b>text</b>", "<b>text</b>", []),
]


@pytest.mark.parametrize(("parser", "text", "content", "calls"), ANSWERS)
@given(cuts=st.lists(st.integers(0, 160)))
def test_tool_calls(parser: str, text: str, content: str, calls: list[Any], cuts: list[int]) -> None:
    found, _, called = read(Reading("auto", parser=parser), pieces(text, cuts))
    assert (found, called) == (content, calls)


THOUGHTS = [
    (False, "<think>\na <b>\n</think>\n\nSo.", "So.", "a <b>\n"),
    (False, " \n a", " \n a", ""),
    (False, " \n<th", " \n<th", ""),
    (False, "\n \n<think>a</think>b <think>c</think>", "b <think>c</think>", "a"),
    (False, "No <think>thoughts</think>", "No <think>thoughts</think>", ""),
    (False, "<think>cut", "", "cut"),
    (False, "<thin", "<thin", ""),
    (True, "a</think>b", "b", "a"),
    (True, "\ncut", "", "cut"),
]


@pytest.mark.parametrize(("inside", "text", "content", "thought"), THOUGHTS)
@given(cuts=st.lists(st.integers(0, 60)))
def test_reasoning(inside: bool, text: str, content: str, thought: str, cuts: list[int]) -> None:
    found = read(Reading(thinks=True, inside=inside), pieces(text, cuts))
    assert found[:2] == (content, thought)


def test_calls_by_schema() -> None:
    array = json.dumps([F, G])
    assert read(Reading("required"), [array[:9], array[9:]])[2] == CALLS
    assert read(Reading("required"), ["[{"])[0] == "[{"  # cut by max_tokens: the text is kept
    assert read(Reading("named", function="f"), ['{"x"', ": 1}"])[2] == [("f", {"x": 1})]
    assert calls_of("[" * 10_000) == []
    assert calls_of('{"name": 1, "arguments": {}}') == calls_of('{"name": "f"}') == calls_of("3") == []


def test_prometheus_parses_the_metrics() -> None:
    """Parse the metrics with Prometheus' own client."""
    page = Page({"model_name": 'a"b\\c\nd'})
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    page.histogram("x:seconds", "Some.", histogram)
    page.values("counter", "x:n_total", "Some.", [({"a": "1"}, 2.0), ({"a": "2"}, 3.5)])
    found = {f.name: f for f in text_string_to_metric_families(page.text())}
    samples = {(s.name, s.labels.get("le")): s.value for s in found["x:seconds"].samples}
    assert found["x:seconds"].type == "histogram"
    assert samples == {
        ("x:seconds_bucket", "0.1"): 2, ("x:seconds_bucket", "1.0"): 3, ("x:seconds_bucket", "+Inf"): 4,
        ("x:seconds_sum", None): 7.65, ("x:seconds_count", None): 4,
    }  # fmt: skip
    assert [s.value for s in found["x:n"].samples] == [2.0, 3.5]
    assert found["x:n"].samples[0].labels["model_name"] == 'a"b\\c\nd'


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12))))
def test_the_gate_never_exceeds_its_capacity(moves: list[tuple[bool, int]]) -> None:
    gate, inside = Gate(4, 6), list[int]()
    for enter, n in moves:
        if not enter and inside:
            gate.leave(inside.pop())
        elif enter:
            try:
                gate.enter(n)
                inside.append(n)
            except APIError as e:
                assert e.status == (400 if n > 10 else 429)
                assert n > 10 or (sum(inside) + n > 10 and 1 <= (e.retry_after or 0) <= 60)
        assert gate.open == sum(inside) <= 10


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# remark\n one \n\ntwo\n")
    keys = read_keys(["three"], str(file), "four, five,")
    options = ServeOptions(("m",), key_hashes=keys)
    for key in ("one", "two", "three", "four", "five"):
        assert options.key_of(key.encode()) == hashlib.sha256(key.encode()).digest()
    assert options.key_of(b"") is None and options.key_of(b"# remark") is None
    assert read_keys([], None, None) == ()
    file.write_text("# nothing\n")
    for wrong in (str(file), str(tmp_path / "none")):
        with pytest.raises(RequestError, match="api-key-file"):
            read_keys([], wrong, None)


OF_OTHERS = {
    "vllm:num_preemptions_total", "vllm:request_num_preemptions", "vllm:kv_block_lifetime_seconds",
    "vllm:kv_block_idle_before_evict_seconds", "vllm:kv_block_reuse_gap_seconds", "vllm:kv_cache_usage_perc",
    "llamacpp:n_busy_slots_per_decode", "llamacpp:n_decode_total", "llamacpp:requests_deferred",
    "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total",
}  # fmt: skip


def test_the_dashboards_metrics_exist() -> None:
    """Every metric of docs/grafana.json and of other servers' dashboards is in /metrics."""
    from ridgeline.sched.page_times import PageTimes
    from ridgeline.sched.stats import DraftCounts, GroupStats, Stats
    from ridgeline.serve.api import metrics
    from ridgeline.serve.engine.messages import Report
    from ridgeline.serve.engine.meters import EngineMeters

    stats = Stats(
        1, 2, (GroupStats("g", 9, 3, 4, 0, 0, 0, 0),), *range(7), DraftCounts(1, 2, 1, [1, 0]), page_times=PageTimes()
    )
    page = Page({"model_name": "m"})
    report = Report(0, stats, EngineMeters())
    metrics._requests(page, report)
    metrics._engine(page, report)
    source = Path(metrics.__file__).read_text()
    text = Path(__file__).parents[2].joinpath("docs/grafana.json").read_text()
    asked = set(re.findall(r"(?:vllm|ridgeline):\w+|http_requests_total", text))
    assert len(asked) > 15
    for name in asked | OF_OTHERS:
        base = name.removesuffix("_bucket")
        assert f"# TYPE {base} " in page.text() or f'"{base}"' in source, name


def test_the_memory_of_the_server_is_a_metric() -> None:
    from ridgeline.catalog.models import find_model
    from ridgeline.sched.stats import DraftCounts, GroupStats, Stats
    from ridgeline.serve.api import metrics
    from ridgeline.serve.engine.messages import Report
    from ridgeline.serve.engine.meters import EngineMeters
    from ridgeline.settings import EngineOptions, resolve

    config = resolve(find_model("llama-3-8b").spec, 256, EngineOptions(), free_bytes=1 << 32, fixed_len=True)
    stats = Stats(0, 0, (GroupStats("all", 9, 0, 4, 0, 0, 0, 0),), *range(7), DraftCounts(), resident_pages=(7,))
    page = Page({})
    service = SimpleNamespace(ready=SimpleNamespace(config=config), client=SimpleNamespace(engines=1))
    metrics._memory(page, cast(Service, service), Report(0, stats, EngineMeters(resident_bytes=5)))
    state, most = 7 * config.groups[0].page_bytes, config.state_bytes
    for line in (
        'ridgeline:resident_bytes{process="engine"} 5', f"ridgeline:state_resident_bytes {state}",
        f"ridgeline:state_bytes {most}",
    ):  # fmt: skip
        assert f"{line}\n" in page.text()


def test_the_type_of_the_cache_is_a_label() -> None:
    from ridgeline.catalog.models import find_model
    from ridgeline.serve.api import metrics
    from ridgeline.settings import EngineOptions, resolve

    config = resolve(
        find_model("llama-3-8b").spec, 256, EngineOptions(max_num_seqs=2), free_bytes=1 << 32, fixed_len=True,
        kv_cache_dtype="fp8",
    )  # fmt: skip
    page = Page({"model_name": "m"})
    metrics._cache(page, config)
    labels = f'block_size="16",cache_dtype="fp8",num_gpu_blocks="{config.num_pages[0]}"'
    assert f'vllm:cache_config_info{{model_name="m",{labels}}} 1\n' in page.text()


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout_headers", 0.0), ("timeout_write", float("nan")), ("timeout_engine", 0.5), ("max_connections", 0)],
)
def test_invalid_limits_give_one_line(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=f"--{name.replace('_', '-')} is .*must be .*at least"):
        serve_options(ServedFlags(), replace(ServerFlags(), **{name: value}), 0)
    found = serve_options(ServedFlags(), replace(ServerFlags(), **{name: 60}), 0)
    assert (
        60 in (found.max_connections, found.timeouts.headers, found.timeouts.write, found.patience.engine)
        and found.timeouts.body == 30.0
    )
