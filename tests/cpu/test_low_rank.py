"""Low-rank terms of matrices: the model equals one whose matrices include the terms, and the cost is counted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oracle.build import build
from oracle.families import CASES
from ridgeline.cost.low_rank import low_rank_operations, low_rank_terms
from ridgeline.cost.precision import Precision
from ridgeline.errors import DeviceError
from ridgeline.nn import Model
from ridgeline.ops import open_table
from ridgeline.quant import LowRank, store
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import ModelSpec
from ridgeline.spec.quant import FORMATS, PLAIN, FormatTable

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3]]
RANK = 3
# Families by the operation after the product: a norm and a rotation of heads, biases, a scan, experts, latents, a tied
# head.
FAMILIES = ["llama", "qwen3_moe", "gpt2", "mamba2", "deepseek_v2", "gemma2", "qwen3_next"]


def terms_of(spec: ModelSpec, seed: int = 5) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return a term for every matrix that may have one, a tenth of the matrix in size."""
    rng = np.random.default_rng(seed)
    found = {}
    for weight in spec.weights():
        if weight.is_matrix and len(weight.shape) == 2 and "embed" not in weight.name:
            rows, columns = weight.shape
            down = rng.normal(size=(RANK, columns)) / columns**0.5
            found[weight.name] = down.astype(np.float32), (0.1 * rng.normal(size=(rows, RANK))).astype(np.float32)
    return found


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_term_equals_the_merged_matrix(family: str, device: str, tmp_path: Any) -> None:
    build(CASES[family], tmp_path)
    loaded = load_model(str(tmp_path), LoadOptions(device=device))
    spec, memory = loaded.spec, loaded.table.memory
    weights = {name: memory.get(x) for name, x in loaded.model.weights.items()}
    terms = terms_of(spec)
    assert terms
    merged = dict(weights)
    for name, (down, up) in terms.items():
        merged[name] = (weights[name].astype(np.float64) + up.astype(np.float64) @ down).astype(np.float32)
    step = DenseStep.build(PROMPTS, memory)

    def put(x: np.ndarray) -> Any:
        return memory.put(np.ascontiguousarray(x), "float32", "float32")

    def logits(arrays: dict[str, np.ndarray], low_rank: Any) -> np.ndarray:
        own = {name: put(x) for name, x in arrays.items()}
        return memory.get(Model(spec, own, loaded.table, 256, FormatTable(), low_rank)(step))

    wanted = logits(merged, {})
    found = logits(weights, {name: tuple(map(put, pair)) for name, pair in terms.items()})
    plain = logits(weights, {})
    assert np.abs(found - wanted).max() < 3e-5 * np.abs(wanted).max()
    assert np.abs(plain - wanted).max() > 1e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("scheme", FORMATS)
def test_a_term_stays_exact_beside_a_rounded_matrix(scheme: str) -> None:
    rng, table = np.random.default_rng(0), open_table("cpu")
    weight, down, up, x = (rng.normal(size=s).astype(np.float32) for s in ((40, 65), (3, 65), (40, 3), (7, 65)))
    term = LowRank(*(store(m, None, table, PLAIN) for m in (down, up)))
    linears = [store(weight, None, table, FORMATS[scheme], t) for t in (None, term)]
    for linear in linears:
        linear.prepare()
    alone, both = (np.asarray(linear.apply(x)) for linear in linears)
    assert np.abs(both - alone - (x @ down.T) @ up.T).max() < 1e-4
    assert np.array_equal(*(np.asarray(linear.dequantize()) for linear in linears))


def test_a_stage_with_a_term_is_composed_and_says_why(tmp_path: Any) -> None:
    build(CASES["llama"], tmp_path)
    loaded = load_model(str(tmp_path), LoadOptions(device="cpu"))
    table = open_table("cpu")
    own = {name: loaded.table.memory.get(x) for name, x in loaded.model.weights.items()}
    term: Any = terms_of(loaded.spec)["layers.1.mixer.k.weight"]
    Model(loaded.spec, own, table, 256, FormatTable(), {"layers.1.mixer.k.weight": term})
    found = [choice for choice in table.choices() if choice.op == "attention_input"]
    assert {choice.backend for choice in found} == {"cpu", "composed"}
    reason = "k has a low-rank term, which is added to the product before the rest of the stage"
    assert [choice.refusals[-1] for choice in found if choice.backend == "composed"] == [("cpu", reason)]
    forced = open_table("cpu", {"attention_input": "cpu"})
    with pytest.raises(DeviceError, match=f"--ops attention_input=cpu: {reason}"):
        Model(loaded.spec, own, forced, 256, FormatTable(), {"layers.1.mixer.k.weight": term})
    for wrong in ("layers.1.mixer.x.weight", "embed.weight", "layers.0.mixer_norm.weight"):
        with pytest.raises(ValueError, match=f"no matrix '{wrong}' that takes a low-rank term"):
            Model(loaded.spec, own, table, 256, FormatTable(), {wrong: term})


def test_terms_of_wrong_shapes_are_refused() -> None:
    table = open_table("cpu")
    down, up, other = (store(np.ones(s, np.float32), None, table, PLAIN) for s in ((2, 5), (7, 2), (7, 3)))
    with pytest.raises(ValueError, match=r"needs matrices \[r, in\] and \[out, r\], not \(2, 5\) and \(7, 3\)"):
        LowRank(down, other)
    with pytest.raises(ValueError, match=r"of \(7, 5\) does not fit a matrix of \(7, 6\)"):
        store(np.ones((7, 6), np.float32), None, table, PLAIN, LowRank(down, up))


def test_the_cost_model_counts_bytes_and_operations(tmp_path: Any) -> None:
    build(CASES["llama"], tmp_path)
    spec = load_model(str(tmp_path), LoadOptions(device="cpu")).spec
    terms = terms_of(spec)
    counted = low_rank_operations(spec, dict.fromkeys(terms, RANK), 5, Precision("float32", "float32", "float32"))
    assert sum(o.weight_bytes * o.layers for o in counted) == sum(m.nbytes for pair in terms.values() for m in pair)
    multiplied = sum(2 * 5 * m.size for pair in terms.values() for m in pair)
    added = sum(5 * len(up) for _, up in terms.values())
    assert sum(o.flops * o.layers for o in counted) == multiplied + added
    q = next(o for o in counted if o.name == "low rank mixer.q")
    rows, columns = next(w.shape for w in spec.weights() if w.name == "layers.0.mixer.q.weight")
    assert (q.layers, q.activation_bytes) == (len(spec.layers), 4 * 5 * (columns + 2 * RANK + 4 * rows))
    assert low_rank_operations(spec, {}, 5, Precision("float32")) == ()
    for name, rank in (("layers.0.mixer.q", 3), ("layers.0.mixer.q.weight", 0)):
        with pytest.raises(ValueError, match="the name must be a matrix of the model, and the rank at least 1"):
            low_rank_terms(spec, {name: rank})
