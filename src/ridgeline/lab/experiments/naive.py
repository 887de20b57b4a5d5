"""The cost of sampling without a cache: a token computes the whole history again."""

from __future__ import annotations

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.timing import answers, exponent, model, token_s
from ridgeline.plan.planner import Deployment, Planner

LENGTHS, TOKENS = (64, 128, 256, 512, 960), 16  # tokens of history; tokens of the timed answers with a cache
LONG = (2048, 4096, 8192, 16384)  # history of a Llama 2 7B, by count
# With a cache a token of a small model hardly depends on the history. Without one it has to compute all of it, which
# grows at least as the history does.
LEAST_GAP = 0.6  # between the two exponents


def predict(setup: Setup) -> Facts:
    """Count attention's pairs for a token and a whole answer, and the operations of a Llama 2 7B."""
    planner = Planner(Deployment(find_model("llama-2-7b").spec, hardware("h100")))

    def pairs(tokens: int, *, cached: bool) -> float:
        return sum(t if cached else t * (t + 1) / 2 for t in range(1, tokens + 1))

    totals = {str(n): [pairs(n, cached=True), pairs(n, cached=False)] for n in LENGTHS}
    return {
        "pairs": totals,
        "cached_exponent": exponent([(n, totals[str(n)][0]) for n in LENGTHS]),
        "naive_exponent": exponent([(n, totals[str(n)][1]) for n in LENGTHS]),
        "flops_exponent": exponent([(n, planner.naive(1, n).flops) for n in LONG]),
    }


def measure(setup: Setup) -> Facts:
    """Time a token after histories of several lengths, with a cache and without."""
    repetitions = 2 if setup.quick else 5
    longest = max(LENGTHS) + TOKENS
    cached = model(setup.model, setup.threads, 1, longest)
    naive = model(setup.model, setup.threads, 1, longest, cache="off")
    times: dict[str, list[float]] = {}
    for n in LENGTHS:
        setup.on_part(f"naive: {n} tokens")
        one = min(token_s(cached, (setup.seed, n, i), 1, n, TOKENS) for i in range(repetitions))
        all_again = min(answers(naive, (setup.seed, n, i), 1, n, 1)[0].timing.ttft_s for i in range(repetitions + 1))
        times[str(n)] = [one, all_again]
    return {
        "seconds": times,
        "cached_exponent": exponent([(float(n), t[0]) for n, t in times.items()]),
        "naive_exponent": exponent([(float(n), t[1]) for n, t in times.items()]),
    }


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the distance between the exponents, and the exponents of the counts, which are 3 and 2 in the limit."""
    cached, naive = measured["cached_exponent"], measured["naive_exponent"]
    counted = abs(predicted["naive_exponent"] - 3) < 0.1 and abs(predicted["cached_exponent"] - 2) < 0.1
    found = at_least(
        6, naive - cached, LEAST_GAP,
        f"a token takes T^{naive:.2f} without a cache and T^{cached:.2f} with one; attention's pairs of an answer grow "
        f"as T^{predicted['naive_exponent']:.2f} and T^{predicted['cached_exponent']:.2f}. The linear part hides the "
        f"square: a token of a Llama 2 7B takes T^{predicted['flops_exponent']:.2f} at 2,048 to 16,384 tokens",
    )  # fmt: skip
    return (only_if(found, counted),)


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the time of a token over its history."""
    curves = tuple(
        Series(name, [(float(n), t[i] * 1e3) for n, t in measured["seconds"].items()], measured=True)
        for i, name in enumerate(("with a cache", "without"))
    )
    return (Figure("Time of a token", "tokens before it", "ms", curves),)


EXPERIMENT = Experiment(
    "naive", "Sampling with and without a cache", (6,), predict, measure, judge,
    "Without a cache each token computes its whole history again. Pairs of attention then grow with the cube of an "
    "answer's length. At lengths of a few thousand the products with matrices, which grow with the square, still take "
    "most of the time.", figures,
)  # fmt: skip
