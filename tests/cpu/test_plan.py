"""The planner against the programs that run: its pages equal the engine's, its operations equal those that torch
counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from published import PUBLISHED
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from oracle.mixers import CONVOLUTION, FULL, LATENT, LOCAL, MAMBA, MAMBA2, NORM, TAYLOR, VOCAB, WIDTH
from ridgeline.archs import spec_from_config
from ridgeline.catalog.machines import hardware
from ridgeline.cost.footprint import page_groups
from ridgeline.cost.operations import Forward, Slice
from ridgeline.cost.precision import Precision
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.runtime.arena import Arena
from ridgeline.settings import EngineOptions, resolve
from ridgeline.spec import (
    S4,
    S4D,
    Chunked,
    Dilated,
    FirstTokens,
    GatedConvolution,
    GatedDelta,
    GatedMLP,
    KimiDelta,
    Layer,
    LightningAttention,
    ModelSpec,
    SharedAttention,
    Strided,
)
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.mixers import TokenMixer

FLOAT = Precision("float32", "float32", "float32")
MIXERS: dict[str, TokenMixer] = {
    "full": FULL, "window": LOCAL, "first": replace(LOCAL, pattern=FirstTokens(3)),
    "dilated": replace(LOCAL, pattern=Dilated(3)), "strided": replace(LOCAL, pattern=Strided(4)), "latent": LATENT,
    "chunked": replace(LOCAL, pattern=Chunked()),
    "shared": SharedAttention(0, FULL), "mamba": MAMBA, "mamba2": MAMBA2, "convolution": CONVOLUTION,
    "taylor": TAYLOR, "lightning": LightningAttention(4, 8, NORM), "s4": S4(WIDTH, 8), "s4d": S4D(WIDTH, 8),
    "gated convolution": GatedConvolution(WIDTH, 3), "delta": GatedDelta(4, 2, 8, 8, 4, NORM),
    "kimi": KimiDelta(4, 8, 4, 8, NORM),
}  # fmt: skip


def model(*mixers: TokenMixer) -> ModelSpec:
    layers = tuple(Layer(m, GatedMLP(64), NORM) for m in mixers)
    return ModelSpec("x", VOCAB, WIDTH, 4096, layers, NORM)


class Counting(NumpyMemory):
    """Records the bytes that are requested."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def pages(self, num_pages: int, size: int) -> Any:
        found = super().pages(num_pages, size)
        self.bytes.append(found.nbytes)
        return found


def allocated(groups: tuple[StateGroup, ...], num_pages: tuple[int, ...]) -> list[int]:
    memory = Counting()
    Arena(groups, num_pages, [0] * len(groups), memory)
    return memory.bytes


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
@pytest.mark.parametrize("page_tokens", [1, 16])
@pytest.mark.parametrize("name", MIXERS)
def test_pages_are_those_of_the_engine(name: str, page_tokens: int, dtype: str) -> None:
    """For each sequence, an arena with these pages allocates the planned bytes."""
    spec = model(FULL, MIXERS[name], LOCAL, MIXERS[name])
    options = EngineOptions(block_size=page_tokens, max_num_seqs=3, max_num_batched_tokens=16)
    config = resolve(spec, 100, options, free_bytes=1 << 30, fixed_len=True, kv_cache_dtype=dtype)
    precision = replace(FLOAT, state=dtype)
    ours = page_groups(spec, precision, page_tokens)
    for a, b in zip(ours, config.groups, strict=True):
        assert (a.name, a.page_bytes) == (b.name, b.page_bytes)
        assert [(s.layer, s.offset, s.bytes) for s in a.slots] == [(s.layer, s.offset, s.bytes) for s in b.slots]
        assert a.slots == b.slots or dtype != "float32"  # parts are laid out by the engine
    planner = Planner(Deployment(spec, hardware("cpu-laptop"), precision, page_tokens=page_tokens))
    for batch in (1, 3):
        pages = tuple(batch * g.most_pages(100) + 1 for g in config.groups)
        assert sum(allocated(config.groups, pages)) == planner.memory.footprint(batch, 100).pages_bytes


def test_the_engines_own_pages_hold_the_batch_that_the_plan_says() -> None:
    """The engine fits the planned batch into the planned memory, but not into a tenth less."""
    spec = model(*[FULL] * 4)
    planner = Planner(Deployment(spec, hardware("cpu-laptop"), FLOAT))
    foot = planner.memory.footprint(64, 1000)
    options = EngineOptions(max_num_seqs=64, max_num_batched_tokens=512)

    def pages(share: float) -> int:
        free = int((foot.pages_bytes + foot.workspace_bytes) * share / 0.9)
        return resolve(spec, 1000, options, free_bytes=free, fixed_len=True).num_pages[0]

    full = 64 * planner.memory.groups[0].most_pages(1000) + 1
    assert pages(1.001) == full
    assert pages(0.9) < full


# Torch's counter counts every product of these families once. It counts all pairs of attention; we count only unmasked
# pairs.
COUNTED = [
    "meta-llama/Llama-2-7b-hf", "mistralai/Mistral-7B-v0.1", "Qwen/Qwen3-0.6B", "google/gemma-3-270m",
    "openai-community/gpt2", "EleutherAI/pythia-1.4b", "allenai/OLMo-2-0425-1B", "THUDM/GLM-4-9B-0414",
]  # fmt: skip


@pytest.mark.parametrize("name", COUNTED)
def test_operations_of_a_prompt_are_those_that_torch_counts(name: str) -> None:
    """The oracle is transformers' model of the same config, without weights, on two prompts of 100 tokens."""
    tokens, batch = 100, 2
    config = AutoConfig.for_model(**PUBLISHED[name][0])
    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        ids = torch.zeros(batch, tokens, dtype=torch.long)
        mask = torch.zeros(batch, 1, tokens, tokens)  # passed in, because creating a mask reads numbers
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        peer(ids, attention_mask=mask, use_cache=False)
    counted = counter.get_total_flops()
    spec = spec_from_config(PUBLISHED[name][0])
    ops = Forward(spec, Precision()).operations([Slice(batch, tokens, tokens, tokens)])
    ours = sum(o.flops * o.layers for o in ops if o.kind == "weights")
    pairs = sum(
        4 * batch * tokens * tokens * m.num_heads * m.head_dim  # type: ignore[union-attr]
        for layer in spec.layers
        if (m := layer.mixer)
    )
    rotations = counted - ours - pairs  # in some families, transformers multiplies positions with frequencies
    assert 0 <= rotations <= 2 * 2 * batch * tokens * 128 * len(spec.layers)
    seen = sum(o.flops * o.layers for o in ops if o.name == "Attention")
    assert seen == pairs * (tokens + 1) / (2 * tokens)
