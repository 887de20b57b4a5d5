"""Bytes of keys and values, and times by the formulas of the lectures: exact items, which hold on every machine."""

from __future__ import annotations

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.footprint import formula_bytes
from ridgeline.cost.precision import Precision
from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, equal, within
from ridgeline.plan.textbook import Textbook
from ridgeline.spec import ModelSpec

LLAMA_7B, LLAMA_13B, MISTRAL, DEEPSEEK = "llama-2-7b", "llama-2-13b", "mistral-7b-v0.3", "deepseek-v2"
BATCHES, SAID_RATES = (1, 64, 256), (124.7, 2689.0, 3562.0)  # of claim 43
GB = 10**9


def _by_formula(spec: ModelSpec, tokens: int, heads: str) -> int:
    """Return S x K x H x L x 2 x 2 bytes, with the key heads, or with the query heads as notes often do."""
    return sum(tokens * getattr(m, heads) * m.head_dim * 2 * 2 for m in spec.attentions(shared=False))


def predict(setup: Setup) -> Facts:
    """Compute each figure by its formula from published sizes."""
    llama, mistral = find_model(LLAMA_7B).spec, find_model(MISTRAL).spec
    large, machine = find_model(LLAMA_13B).spec, hardware("h100")
    book = Textbook(2 * large.num_params(), _by_formula(large, 1024, "num_kv_heads"), machine.read_bytes_per_s)
    return {
        "llama_cache": _by_formula(llama, 2048, "num_kv_heads"),
        "llama_weights": 2 * llama.num_params(),
        "mistral_cache": 4 * _by_formula(mistral, 4096, "num_kv_heads"),
        "mistral_cache_by_query_heads": 4 * _by_formula(mistral, 4096, "num_heads"),
        "rates": [n / (book.memory_bytes(n) / book.bytes_per_s) for n in BATCHES],
        "memory": [book.memory_bytes(n) for n in BATCHES],
        "h100_memory": machine.memory_bytes,
        "latent_numbers": 512 + 64,
    }  # fmt: skip


def measure(setup: Setup) -> Facts:
    """Count the same bytes as the planner counts pages, from the specs' own lists of state."""
    precision = Precision()
    llama, mistral = find_model(LLAMA_7B).spec, find_model(MISTRAL).spec
    latents = find_model(DEEPSEEK).spec.layers[0].mixer
    assert latents is not None
    return {
        "llama_cache": formula_bytes(llama, precision, 2048),
        "mistral_cache": 4 * formula_bytes(mistral, precision, 4096),
        "latent_numbers": latents.state().elements,
    }


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Compare the formulas with the planner's count, and both with what is said."""
    llama, mistral = measured["llama_cache"], measured["mistral_cache"]
    weights, by_query_heads = predicted["llama_weights"], predicted["mistral_cache_by_query_heads"]
    total = (llama + weights) / GB
    worst = max(abs(found / said - 1) for found, said in zip(predicted["rates"], SAID_RATES, strict=True))
    fits = [size <= predicted["h100_memory"] for size in predicted["memory"]]
    rates = ", ".join(f"{rate:,.1f}" for rate in predicted["rates"])
    needed, there = predicted["memory"][-1] / GB, predicted["h100_memory"] / GB
    return (
        equal(7, llama, predicted["llama_cache"], f"LLaMA-2 7B has {llama:,.0f} bytes at 2,048 tokens, as the formula"),
        equal(
            14, measured["latent_numbers"], predicted["latent_numbers"],
            "a token has 512 + 64 numbers in each layer of DeepSeek-V2; the keys of 128 heads of 128 numbers would "
            "have 16,384, and the values as many",
        ),
        within(
            41, total, 13.5, 15.5,
            f"{llama / 32 / 1e6:.1f} MB a layer, {llama / GB:.2f} GB of cache, {weights / GB:.2f} GB of parameters: "
            f"{total:.2f} GB without the overhead, which is no arithmetic and has to be measured",
        ),
        within(
            42, mistral / GB, 7.5, 8.6,
            f"the cache has {mistral / GB:.2f} GB, because the model has 8 key heads; {by_query_heads / GB:.2f} GB "
            "would be that of its 32 query heads",
        ),
        within(
            43, worst if fits == [True, True, False] else 1.0, 0, 0.01,
            f"memory over bandwidth gives {rates} tokens/s, and a batch of 256 needs {needed:.0f} of {there:.0f} GB",
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "memory",
    "Bytes of the cache, and the rates that follow from them",
    (7, 14, 41, 42, 43),
    predict,
    measure,
    judge,
    "Predicted are formulas over published sizes. Measured is the planner's own count of state, layer by layer. Both "
    "are whole numbers, so they are equal on every machine or one of them is wrong.",
    timed=False,
)
