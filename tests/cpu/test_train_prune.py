"""Pruning: exact if the removed parts had no effect, and a one-line error if it is impossible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.archs import spec_from_config
from ridgeline.compress.prune.given import prune_to
from ridgeline.errors import DataError
from ridgeline.nn import Model
from ridgeline.ops import OpsTable, open_table
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import ModelSpec
from ridgeline.train.data.batches import Batch
from ridgeline.train.module import LanguageModel
from ridgeline.train.pocket.recipe import KeptParts

CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-12, "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
SMALL = CONFIG | {
    "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip
OPTIONS = KeptParts((0, 2), (1,))


@pytest.fixture
def table() -> OpsTable:
    return open_table("reference")


@pytest.fixture
def batch() -> Batch:
    ids = np.random.default_rng(0).integers(0, 64, 300)
    positions = np.concatenate([np.arange(60)] * 5)
    return Batch(ids, np.full(300, -1), positions, (60,) * 5)


def drawn(config: dict[str, Any], table: OpsTable) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """Return random weights that are large enough for every part to matter; the last norm is uniform."""
    spec, generator = spec_from_config(config), torch.Generator().manual_seed(1)
    weights = LanguageModel(spec, table, 64).weights()
    found = {}
    for name, p in weights.items():
        found[name] = torch.empty(p.shape)
        if p.dim() == 1:
            found[name].uniform_(0.5, 1.5, generator=generator)
        else:
            found[name].normal_(0.0, 0.3, generator=generator)
    return spec, found | {"norm.weight": torch.full((spec.hidden_size,), 1.5)}


def pruned(
    large: ModelSpec, weights: dict[str, torch.Tensor], small: ModelSpec, kept: KeptParts, batch: Batch, table: OpsTable
) -> dict[str, torch.Tensor]:
    found = prune_to(large, weights, small, kept, batch, table)
    return {name: torch.from_numpy(x) for name, x in found.items()}


def logits(spec: ModelSpec, weights: dict[str, torch.Tensor], batch: Batch, table: OpsTable) -> torch.Tensor:
    step = DenseStep(torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions), batch.lengths, table.memory)
    found: torch.Tensor = Model(spec, weights, table, 64)(step)
    return found


def test_all_kept_is_the_same_model_in_another_basis(table: OpsTable, batch: Batch) -> None:
    spec, weights = drawn(CONFIG, table)
    found = pruned(spec, weights, spec, KeptParts((0, 1, 2), (0, 1)), batch, table)
    assert not torch.allclose(found["embed.weight"], weights["embed.weight"], atol=0.1)
    torch.testing.assert_close(
        logits(spec, found, batch, table), logits(spec, weights, batch, table), atol=1e-3, rtol=1e-4
    )  # fmt: skip


def test_parts_without_effect_can_be_left_out(table: OpsTable, batch: Batch) -> None:
    """The model has a stream of 12 dimensions, a layer and heads that write nothing, and neurons without weight."""
    spec, weights = drawn(CONFIG, table)
    inside, _ = torch.linalg.qr(torch.randn(32, 12, generator=torch.Generator().manual_seed(2)))
    weights["embed.weight"] = weights["embed.weight"] @ inside @ inside.T
    for i in range(3):
        o, down = (weights[f"layers.{i}.{part}.weight"] for part in ("mixer.o", "mlp.down"))
        o[:, :16], down[:, 5:19] = 0.0, 0.0
        for name, x in (("mixer.o", o), ("mlp.down", down)):
            weights[f"layers.{i}.{name}.weight"] = inside @ inside.T @ x * (i != 1)
    small = spec_from_config(SMALL)
    found = pruned(spec, weights, small, OPTIONS, batch, table)
    torch.testing.assert_close(
        logits(small, found, batch, table), logits(spec, weights, batch, table), atol=1e-3, rtol=1e-4
    )  # fmt: skip


def test_text_gives_the_same_weights_again(table: OpsTable, batch: Batch) -> None:
    spec, weights = drawn(CONFIG, table)
    once, again = (pruned(spec, weights, spec_from_config(SMALL), OPTIONS, batch, table) for _ in range(2))
    assert all(torch.equal(x, again[name]) for name, x in once.items())


@pytest.mark.parametrize(
    ("large", "small", "options", "words"),
    [
        ({"attention_bias": True}, {}, OPTIONS, r"the small model lacks layers\.0\.mixer\.k\.bias"),
        ({"tie_word_embeddings": False}, {}, OPTIONS, r"the small model lacks head\.weight"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 8}, {}, OPTIONS, "RMS norms without an offset"),
        ({}, {}, KeptParts((0, 3), (1,)), "the layers 0, 3 cannot be kept; the model has 3 layers"),
        ({}, {}, KeptParts((0, 2), (2,)), "the KV heads 2 cannot be kept; the model has 2 KV heads"),
        ({}, {}, KeptParts((0,), (1,)), "does not fit"),
        ({}, {}, KeptParts((0, 2), (0, 1)), r"layers\.0\.mixer\.q\.weight is .32, 12., but .16, 12. in the"),
        ({}, {"hidden_size": 40}, OPTIONS, "does not fit"),
        ({}, {"intermediate_size": 25}, OPTIONS, "does not fit"),
        ({}, {"vocab_size": 65}, OPTIONS, "does not fit: embed.weight"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_cut_give_one_line(
    large: dict[str, Any], small: dict[str, Any], options: KeptParts, words: str, table: OpsTable, batch: Batch
) -> None:
    spec, weights = drawn(CONFIG | large, table)
    with pytest.raises(DataError, match=words) as caught:
        pruned(spec, weights, spec_from_config(SMALL | small), options, batch, table)
    assert "\n" not in str(caught.value)


def test_a_missing_part_is_named(table: OpsTable, batch: Batch) -> None:
    spec, weights = drawn(CONFIG, table)
    del weights["layers.2.mixer.v.weight"]
    with pytest.raises(DataError, match=r"without layers\.1\.mixer\.v\.weight cannot be pruned"):
        pruned(spec, weights, spec_from_config(SMALL), OPTIONS, batch, table)


def test_layers_that_are_not_requested_have_no_effect(table: OpsTable, batch: Batch) -> None:
    spec, weights = drawn(CONFIG, table)
    other = {name: x + 1.0 if name.startswith("layers.1.") else x for name, x in weights.items()}
    small = spec_from_config(SMALL)
    once, again = (pruned(spec, w, small, OPTIONS, batch, table) for w in (weights, other))
    assert all(torch.equal(x, again[name]) for name, x in once.items())
    kept = pruned(spec, weights, small, replace(OPTIONS, layers=(0, 1)), batch, table)
    assert not torch.equal(kept["layers.1.mixer.q.weight"], once["layers.1.mixer.q.weight"])
