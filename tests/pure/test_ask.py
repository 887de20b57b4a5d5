"""`plan --users`: layouts by hand arithmetic, budgets, prices, trials, commands to paste, and one-line errors."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from dataclasses import replace
from math import ceil, exp
from pathlib import Path
from typing import Any

import pytest
from calibrated import KEPT

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.catalog.prices import Price, price_of, prices
from ridgeline.cli.main import app, main
from ridgeline.cost.calibration import save
from ridgeline.cost.collectives import all_reduce_s
from ridgeline.cost.efficiency import efficiency_of
from ridgeline.cost.precision import Precision
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.plan.ask import Budget, Layout, Question, layouts, num_searches, slowed
from ridgeline.plan.ask_commands import Start, serve_command, vllm_command
from ridgeline.plan.ask_split import split_of
from ridgeline.plan.changes import change
from ridgeline.plan.limits import parse_time
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.plan.slo import settings_within
from ridgeline.sim import cost_of
from ridgeline.sim.ask import Spread, Trial, attempt, fewest, longest
from ridgeline.sim.ask_split import ShiftedCost
from ridgeline.spec import Attention

LLAMA = Deployment(find_model("llama-3.1-8b").spec, slowed(hardware("h100"), 1.6))
ASKED = Question(500, 20.0, 2000, 400, 1.0)


def read_questions() -> list[tuple[str, str, int, int, int, int, int]]:
    """Return the questions of docs/plan.md, which bench/ask.py answers."""
    path = Path(__file__).parents[2] / "bench" / "ask.py"
    (found,) = re.findall(r"^QUESTIONS = (\[.*?^\])", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return list(ast.literal_eval(found))


def only(deployment: Deployment, question: Question, tp: int, confidence: float | None = None) -> Layout:
    """Return the layout with these devices and unchanged outputs."""
    found, _ = settings_within(replace(deployment, scheme=Scheme(tp=tp)), question.load, question.promise, confidence)
    return next(Layout(s.deployment, s.figures, s.why, sure=s.sure) for s in found if s.deployment.scheme.tp == tp)


TWELVE = read_questions()


def by_hand(model: str, machine: str, tp: int, q: Question) -> tuple[float, int, float]:
    """Return the requests per second, the batch and the seconds of a step of one replica, with nothing but a model's
    sizes, a machine's figures, and the fractions of them that it is expected to reach.

    A step reads all weights and the state of each sequence, at the middle of its answer, and starts 7 kernels in each
    layer. A prompt takes 2 operations for each weight and token, and attention 2 x 2 x width for each pair. Two
    all-reduces in each layer take a row of 16 bits for each token. State takes nine tenths of what the weights leave.
    """
    spec, m = find_model(model).spec, hardware(machine)
    mixer, layers, width = spec.layers[0].mixer, len(spec.layers), spec.hidden_size
    assert isinstance(mixer, Attention)
    embedding = spec.vocab_size * width
    matrices = spec.num_params() - (0 if spec.tie_word_embeddings else embedding)
    expected = efficiency_of(m)
    assert expected is not None
    v, sure = expected.values, 1.2816  # deviations of a normal error that nine in ten stay below
    rate, flops = m.read_bytes_per_s * v["memory"], m.flops_per_s["bfloat16"] * v["compute16"]
    a_token = 2 * layers * mixer.num_kv_heads * mixer.head_dim * 2 / tp

    def sent(tokens: float) -> float:
        if tp == 1:
            return 0.0
        return 2 * layers * v["link"] * all_reduce_s(m.name, tp, tokens * width * 2, m.link)

    fixed_s = v["step_s"] + (7 * layers + 3) * v["kernel_s"]
    body = matrices - embedding
    pairs = q.prompt * (q.prompt + 1) / 2 * 4 * mixer.num_heads * mixer.head_dim * layers
    chunks = ceil(q.prompt / min(4096, max(128, 1 << (q.prompt - 1).bit_length())))
    prompt_s = 2 * body * q.prompt / tp / flops + pairs / tp / m.flops_per_s["bfloat16"] / v["attention"]
    prompt_s += sent(q.prompt) + chunks * fixed_s + v["request_s"]
    middle = q.prompt + q.output / 2

    def step_s(batch: int) -> float:
        weights = max(2 * matrices / tp / rate, 2 * matrices * batch / tp / flops)
        state = a_token * middle / (m.read_bytes_per_s * v["state"])
        return weights + batch * (state + v["sequence_s"]) + sent(batch) + fixed_s

    room = 0.9 * (m.memory_bytes - 2 * spec.num_params() / tp)
    fits = int(room / (a_token * (q.prompt + q.output)))
    limit = 1 / q.tokens_per_s / exp(sure * expected.spread["tpot"])
    batch = max((b for b in range(1, fits + 1) if step_s(b) + (b - 1) * prompt_s / (q.output - 1) <= limit), default=1)
    return batch / (batch * prompt_s + (q.output - 1) * step_s(batch)), batch, step_s(batch)


@pytest.mark.parametrize(("model", "machine", "tp", "users", "speed", "prompt", "output"), TWELVE)
def test_twelve_questions_by_hand(
    model: str, machine: str, tp: int, users: int, speed: int, prompt: int, output: int
) -> None:
    question = Question(users, speed, prompt, output, 2.0)
    assert question.requests_per_s == pytest.approx(users * speed / output)
    found = only(Deployment(find_model(model).spec, hardware(machine)), question, tp, 0.9)
    rate, batch, step = by_hand(model, machine, tp, question)
    assert found.requests_per_s * found.sure.tpot == pytest.approx(rate, rel=0.12)
    assert found.batch == pytest.approx(batch, rel=0.15, abs=1)
    assert found.figures.tpot_s == pytest.approx(step, rel=0.12)
    least = ceil(users * speed / output / rate * found.sure.tpot)
    assert found.least_replicas(question) == pytest.approx(least, rel=0.12, abs=1)


def test_a_slower_machine_takes_so_many_times_as_long() -> None:
    load = Load(16, 1000, 200)
    for tp in (1, 4):
        fast = Deployment(LLAMA.spec, hardware("h100"), scheme=Scheme(tp=tp))
        slow = replace(fast, hardware=slowed(fast.hardware, 1.6))
        for name in ("step_s", "ttft_s", "tpot_s"):
            a, b = (getattr(Planner(d).figures(load), name) for d in (fast, slow))
            assert b == pytest.approx(1.6 * a)


def test_prices_have_a_date_and_a_source_and_cost_follows() -> None:
    for machine, price in prices().items():
        assert hardware(machine).name == machine and price.dollars_per_hour > 0
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", price.date) and "/" in price.source
        per_second = float(re.findall(r"\$([\d.]+) a second", price.source)[0])
        assert price.dollars_per_hour == pytest.approx(per_second * 3600, abs=0.01)
    layout = replace(only(LLAMA, ASKED, 2), price=price_of("h100"))
    assert layout.cost(3) == pytest.approx(6 * 3.35)
    assert replace(layout, price=None).cost(3) == 6


def test_budgets() -> None:
    layout = replace(only(LLAMA, ASKED, 2), price=Price(2.5, "--price"))
    assert Budget.parse("9xh100", None) == Budget("h100", 9, None)
    assert Budget.parse("9xH100-SXM", None).machine == "h100"
    assert Budget.parse("9xh100", None).most_replicas(layout) == 4
    assert Budget.parse(None, 26.0).most_replicas(layout) == 5
    assert Budget.parse("9xh100", 14.0).most_replicas(layout) == 2
    with pytest.raises(RequestError, match=r"the price of h100 is not known; give it: --price 2\.50"):
        Budget.parse(None, 26.0).most_replicas(replace(layout, price=None))
    for wrong in ("h100", "8x", "xh100", "0xh100", "8*h100", "-8xh100"):
        with pytest.raises(RequestError, match="write a number of devices and their machine: 8xh100"):
            Budget.parse(wrong, None)


def trial(replicas: int, least: int) -> Trial:
    return Trial(replicas, 0.1, 0.2, 0.01, 0.02, 1.0, least / replicas, 1.0, replicas >= least)


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 11, 12, 40, 400])
@pytest.mark.parametrize("least", [1, 3, 10, 380])
def test_the_fewest_replicas_are_found(needed: int, least: int) -> None:
    tried: list[int] = []

    def try_out(count: int) -> Trial:
        tried.append(count)
        return trial(count, needed)

    found = fewest(10**6, least, try_out)
    assert found is not None and len(tried) <= 7 and min(tried) >= least
    if found.kept:
        assert max(needed, least) <= found.replicas <= max(needed, least) * 1.16 + 1
    assert fewest(least - 1, least, try_out) is None
    capped = fewest(least, least, try_out)
    assert capped is not None and capped.replicas == least and capped.kept == (least >= needed)


def test_more_replicas_are_faster_and_a_full_one_breaks_the_limits() -> None:
    question = Question(200, 20.0, 1000, 100, 1.0)  # 40 requests/s
    layout = only(LLAMA, question, 1)
    assert 20 < layout.requests_per_s < 36 and layout.least_replicas(question) == 2
    one, two, four = (attempt(layout, question, n, Spread()) for n in (1, 2, 4))
    assert not one.kept and one.load > 1 and two.kept and four.kept
    assert four.ttft_p99_s < two.ttft_p99_s < one.ttft_p99_s
    assert two.load == pytest.approx(2 * four.load) and two.tpot_p99_s < 1 / 20
    assert attempt(layout, question, 2, Spread()) == two
    assert longest(layout, question) == 4 * 1100


def test_separate_devices() -> None:
    """A prompt takes the time of one chunk, and its state goes over one link; tokens take a decode step alone."""
    layout = only(LLAMA, ASKED, 1)
    found = split_of(layout, ASKED)
    assert found is not None
    planner = Planner(found.prefill)
    assert found.prefill.chunk == 2048 and found.prompt_s == planner.ttft_s(2000)
    assert found.sending_s == pytest.approx(2000 * 2 * 32 * 8 * 128 * 2 / 50e9)
    assert found.batch > layout.batch  # no prompt lengthens a step
    assert found.tpot_s <= 1 / 20 and found.batch == Planner(found.decode).memory.largest_batch(2400)
    fast = split_of(layout, replace(ASKED, tokens_per_s=60.0))
    assert fast is not None and fast.tpot_s <= 1 / 60 < Planner(fast.decode).tpot_s(Load(fast.batch + 1, 2000, 400))
    prompts, answers = found.least(ASKED)
    assert prompts == ceil(25 * found.prompt_s / 0.95) and answers == ceil(25 * 399 * found.tpot_s / found.batch / 0.95)
    assert split_of(layout, replace(ASKED, ttft_s=found.prompt_s)) is None
    cost, shifted = cost_of(LLAMA), ShiftedCost(cost_of(LLAMA), 2000)
    assert shifted.of(1, 5) == cost.of(1, 2005) and shifted.seconds(1, 1, shifted.of(1, 5)) == cost.seconds(
        1, 1, cost.of(1, 2005)
    )


def test_lossy_types_are_proposed_only_if_they_are_narrower() -> None:
    narrow = replace(LLAMA, precision=Precision(weights="int4", state="fp8"), scheme=Scheme(tp=2))
    searched = [(replace(LLAMA, scheme=Scheme(tp=2)), None), (narrow, None)]
    assert num_searches(searched) == 5 + 1
    changed = {one.changed for one in layouts(searched[1:], ASKED, lambda: None)}
    assert changed == {""}
    cpu = Deployment(find_model("gemma-3-1b").spec, hardware("cpu-server"), Precision(activations="float32"))
    assert num_searches([(cpu, None)]) == 1


@pytest.mark.parametrize(("text", "seconds"), [("1s", 1.0), ("200ms", 0.2), ("0s", 0.0), ("0ms", 0.0), ("1.5s", 1.5)])
def test_times(text: str, seconds: float) -> None:
    assert parse_time("--ttft", text) == seconds


@pytest.mark.parametrize("text", ["1", "s", "-1s", "nans", "infs", "one s", "1m", ""])
def test_wrong_times(text: str) -> None:
    with pytest.raises(RequestError, match=r"--ttft is .*; write a time with us, ms or s"):
        parse_time("--ttft", text)


def start(**more: Any) -> Start:
    layout = Layout(LLAMA, Planner(LLAMA).figures(Load(64, 2000, 400)), "tpot")
    return Start("meta-llama/Llama-3.1-8B", replace(layout, **more), 3, 8192)


def words_of(command: str) -> list[str]:
    """Return the words of a block as a shell reads them: comments left out, lines joined."""
    return shlex.split(command.replace("\\\n", ""), comments=True)


@pytest.mark.parametrize("changes", ["", "weights=fp8", "weights=int4,kv=fp8", "speculate=llama-3.2-1b:4", "tp=4"])
def test_the_commands_to_paste(changes: str) -> None:
    """Ours is parsed by the command itself; vLLM's flags are those that its users know (vllm serve --help)."""
    import typer

    d = change(LLAMA, changes).deployment if changes else LLAMA
    one = start(deployment=d, changed=changes if "=" in changes and "weights" in changes else "")
    ours, theirs = words_of(serve_command(one)), words_of(vllm_command(one))
    assert ours[:2] == ["ridgeline", "serve"] and theirs[:2] == ["vllm", "serve"]
    command: Any = typer.main.get_command(app)
    sub = command.commands["serve"]
    parsed = sub.make_context("serve", ours[2:], resilient_parsing=True).params
    assert parsed["max_num_seqs"] == 64 and parsed["max_num_batched_tokens"] == 512 and parsed["max_model_len"] == 8192
    assert ("--tensor-parallel-size" in theirs) == (changes == "tp=4")
    assert ("Not served yet: --tensor-parallel-size 4" in serve_command(one)) == (changes == "tp=4")
    if changes.startswith("speculate"):
        assert parsed["speculative"] == "meta-llama/Llama-3.2-1B" and parsed["num_speculative_tokens"] == 4
        drafts = json.loads(theirs[theirs.index("--speculative-config") + 1])
        assert drafts == {"model": "meta-llama/Llama-3.2-1B", "num_speculative_tokens": 4}
    if changes == "weights=fp8":
        assert parsed["weights"] == "fp8" and theirs[theirs.index("--quantization") + 1] == "fp8"
    if "int4" in changes:
        assert parsed["weights"] == "int4" and parsed["kv_cache_dtype"] == "fp8"
        assert "quantized to int4" in vllm_command(one) and "--quantization" not in theirs
    assert all(len(line) <= 120 for line in [*serve_command(one).splitlines(), *vllm_command(one).splitlines()])


def test_separate_engines_stand_in_comments() -> None:
    one = replace(start(), prefill=3, decode=2)
    assert "# Not served yet: engines for prompts or answers only" in serve_command(one)
    assert json.loads(words_of(vllm_command(one))[-1])["kv_connector"] == "NixlConnector"
    assert "Start 3 engines for prompts and 2 for answers" in vllm_command(one)


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["ridgeline", "plan", *words])
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        main()
    found = capsys.readouterr()
    return int(caught.value.code or 0), found.out, found.err


SMALL = ("smollm2-135m", "--users", "300", "--input-len", "60", "--output-len", "40", "--hardware", "l4")


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(monkeypatch, capsys, *SMALL)
    assert status == 0
    for text in ("150 requests/s", "Answer", "TTFT, p99", "one failure", "/h", "ridgeline serve", "vllm serve"):
        assert text in out
    table = out[: out.index("Ridgeline:")]
    assert all(len(line) <= 80 for line in table.splitlines())


def test_json_has_every_figure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(monkeypatch, capsys, *SMALL, "--json", "--price", "2")
    found = json.loads(out)
    best = found["answer"]
    assert status == 0 and best["kept"] and best["dollars_per_hour"] == 2 * best["devices"]
    times = [found["expected"][name] for name in ("p10", "p50", "p90")]
    for figure in ("ttft_p99_s", "tpot_p99_s", "load"):
        low, middle, high = (one[figure] for one in times)
        assert low < middle < high == best[figure]  # the limits are kept with 90 %, unless --confidence says more
    per_million = best["dollars_per_hour"] / (found["question"]["output_tokens_per_s"] * 3600) * 1e6
    assert best["dollars_per_million_tokens"] == pytest.approx(per_million)
    assert best["price"] == {"dollars_per_device_hour": 2.0, "date": "", "source": "--price"}
    assert found["others"] and found["serve"].splitlines()[-1] and found["remarks"]
    exact = [o for o in found["others"] if o["kept"] and not o["changed"]]
    assert all(o["dollars_per_hour"] >= best["dollars_per_hour"] for o in exact)


def test_a_budget_that_is_too_small(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("smollm2-135m", "--users", "90000", "--input-len", "60", "--output-len", "40", "--budget", "1xl4")
    status, out, _ = run(monkeypatch, capsys, *words)
    (users,) = re.findall(r"it would\s+serve about ([\d,]+) users", out)
    assert status == 0 and 100 < int(users.replace(",", "")) < 90000 and "breaks a limit" in out
    assert "ridgeline serve" not in out


@pytest.mark.parametrize(("words", "message"), [
    (("--users", "0"), "--users is 0; it must be from 1"), (("--tokens-per-second", "5"), "needs --users"),
    (("--budget", "8xh100"), "--budget needs --users"), (("--users", "5", "--ttft", "1"), "--ttft is '1'; write"),
    (("--users", "5", "--slo", "ttft=1s"), "--slo does not go with --users"),
    (("--users", "5", "--compare", "kv=fp8"), "--compare does not go with --users"),
    (("--users", "5", "--batch", "4"), "--batch does not go with --users"),
    (("--users", "5", "--budget", "8"), "write a number of devices"), (("--users", "5", "--slowdown", "0.5"), "from 1"),
    (("--users", "5", "--budget", "8xh1"), "unknown hardware 'h1'"), (("--users", "5", "--price", "-1"), "is -1"),
    (("--users", "5", "--dollars-per-hour", "0"), "--dollars-per-hour is 0"),
    (("--users", "5", "--budget", "8xh100", "--hardware", "l4"), "leave out --hardware"),
    (("--users", "5", "--tokens-per-second", "99999"), "no layout gives 99999 tokens/s"),
    (("--users", "5", "--dollars-per-hour", "9", "--hardware", "mi300x"), "the price of mi300x is not known"),
    (("--users", "5", "--input-len", "8000"), "8,256 tokens together, but the model has 8,192 positions"),
    (("--users", "5", "--slowdown", "0"), "--slowdown is 0"), (("--users", "5", "--length-cv", "-1"), "from 0 to 5"),
    (("--users", "5", "--seed", "-1"), "--seed is -1"), (("--users", "5", "--length-cv", "nan"), "--length-cv is nan"),
    (("--users", "5", "--output-len", "0"), "--output-len is 0"), (("--users", "5", "--think", "x"), "--think is 'x'"),
])  # fmt: skip
def test_invalid_values_give_one_line(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(monkeypatch, capsys, "smollm2-135m", *words)
    assert (status, out) == (2, "") and message in err and err.count("\n") == 1


def test_a_calibrated_machine_has_its_own_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its times are not multiplied, it is one device, and separate devices are not tried."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save(KEPT)
    words = ("pocket", "--users", "4", "--input-len", "32", "--output-len", "32", "--hardware", "local")
    status, out, _ = run(monkeypatch, capsys, *words)
    text = " ".join(out.split())
    assert status == 0 and "times are predictions for this engine" in text and "--slowdown" not in text
    assert "a second one costs 1 device" in text and "prefill +" not in text and "give it: --price" in text
    assert "ridgeline serve pocket --max-num-seqs" in text and "--device cuda" not in text
    assert "# pocket ships with Ridgeline only." in text
