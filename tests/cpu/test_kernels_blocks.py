"""Recurrent blocks and the input of latent attention by kernels: close to the reference's primitives in float64, and
the same bits in any batch and in any chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.ops import api
from ridgeline.ops.api import Segments, SequenceBucket
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.ops.stages import LatentInput, RecurrentBlock
from ridgeline.runtime.layout import Slices, build_segments
from ridgeline.spec import (
    S4,
    S4D,
    GatedConvolution,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    LayerNorm,
    LightningAttention,
    Mamba,
    Mamba2,
    RMSNorm,
    Rope,
    ShortConvolution,
    TaylorAttention,
)

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from cpu.test_kernels_stages import REFERENCE, RMS, WIDTH, Cpu, compare, draw, rotary, same_bits, weights, wide  # noqa: E402

MIXERS: dict[str, Any] = {
    "mamba": Mamba(24, 5, 4, 3),
    "mamba, normed": Mamba(24, 5, 4, 3, inner_norm=RMSNorm(0.1), inner_norm_weights=False),
    "mamba2": Mamba2(4, 6, 5, 2, 4, RMSNorm(0.1)),
    "short convolution": ShortConvolution(24, 3, bias=True),
    "gated convolution": GatedConvolution(24, 4, "gelu"),
    "based": TaylorAttention(2, 9, 4),
    "lightning": LightningAttention(3, 7, RMSNorm(0.1)),
    "s4": S4(WIDTH, 6),
    "s4d": S4D(WIDTH, 4, "silu", bias=False),
    "gated delta": GatedDelta(4, 2, 8, 6, 4, RMSNorm(0.1, offset=1.0)),
    "kimi delta": KimiDelta(3, 7, 3, 5, RMSNorm(0.1)),
}
by_mixer = pytest.mark.parametrize("name", MIXERS)
LENGTHS = (1, 63, 30, 1, 5)


def arrays_of(mixer: Any) -> dict[str, np.ndarray]:
    found = {"norm.weight": 1 + draw(WIDTH, key=99, scale=0.1)}
    for i, w in enumerate(mixer.weights(WIDTH)):
        value = draw(*w.shape, key=i)
        found[w.name] = value * (1.5 * w.shape[-1] ** -0.5 if w.is_matrix else 0.5)
        if w.name == "log_dt":
            found[w.name] -= 2
    return found


def states_of(mixer: Any, count: int) -> list[np.ndarray]:
    return [np.zeros((count, *shape), np.float32) for shape in mixer.state().parts]


def segments_of(*lengths: int) -> Segments:
    counts = np.array(lengths, np.int64)
    rows = np.arange(counts.size)
    return build_segments(Slices.plain(rows, np.zeros_like(rows), counts), NumpyMemory())


def block(mixer: Any, threads: int = 1, norm: Any = RMS) -> Any:
    cpu = Cpu(threads)
    return cpu.backend.stage(
        api.RECURRENT_BLOCK, RecurrentBlock(mixer, norm, 0.5), weights(arrays_of(mixer), cpu.table)
    )


def as_tensors(segments: Segments) -> Segments:
    buckets = tuple(SequenceBucket(*(wide(a) for a in b)) for b in segments.buckets)
    return Segments(buckets, wide(segments.order), wide(segments.sequence_order))


@pytest.mark.parametrize("lengths", [(1,), (100,), (1, 1, 1), LENGTHS], ids=str)
@by_mixer
def test_a_block_is_its_definition(name: str, lengths: tuple[int, ...]) -> None:
    mixer, segments, total = MIXERS[name], segments_of(*lengths), sum(lengths)
    residual, delta = draw(total, WIDTH), draw(total, WIDTH, key=1)
    for norm, given in ((RMS, delta), (LayerNorm(1e-5), None), (None, delta)):
        got = block(mixer, 2, norm)(residual, given, states_of(mixer, len(lengths)), (), segments)
        case, exact = RecurrentBlock(mixer, norm, 0.5), weights(wide(arrays_of(mixer)), REFERENCE)
        states = [wide(s) for s in states_of(mixer, len(lengths))]
        wanted = REFERENCE.stage(api.RECURRENT_BLOCK, case, exact)(
            wide(residual), wide(given), states, (), as_tensors(segments)
        )
        for found, true in zip(got[:2], wanted[:2], strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, true.numpy(), rtol=0, atol=3e-5 * max(1.0, np.abs(true.numpy()).max()))


@by_mixer
def test_batch_chunks_and_threads_change_no_bit(name: str) -> None:
    mixer = MIXERS[name]
    residual, delta = draw(sum(LENGTHS), WIDTH), draw(sum(LENGTHS), WIDTH, key=1)
    _, whole, left, _ = block(mixer)(residual, delta, states_of(mixer, len(LENGTHS)), (), segments_of(*LENGTHS))
    for threads in (1, 2, 4):
        run, begin = block(mixer, threads), 0
        for i, length in enumerate(LENGTHS):
            states, done, outs = states_of(mixer, 1), 0, []
            for count in (1, 7, 16, 1, 100):
                some = slice(begin + done, begin + min(done + count, length))
                if some.start < some.stop:
                    tokens = segments_of(some.stop - some.start)
                    _, out, states, _ = run(residual[some], delta[some], states, (), tokens)
                    outs.append(out)
                    done += some.stop - some.start
            assert same_bits((np.concatenate(outs),), (whole[begin : begin + length],))
            assert same_bits(tuple(s[0] for s in states), tuple(s[i] for s in left))
            begin += length


LATENT = LatentAttention(3, 12, 5, 4, 7, 0.3, RMSNorm(0.1), 11, Rope(4))
LATENTS = [LATENT, replace(LATENT, q_lora_rank=None), replace(LATENT, rope=Rope(4, interleaved=True)),
           replace(LATENT, rope=None), replace(LATENT, latent_bias=True),
           LatentAttention(16, 128, 64, 32, 64, 0.1, RMSNorm(1e-6), 100, Rope(32, interleaved=True))]  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 63, 100, 257])
@pytest.mark.parametrize("m", LATENTS, ids=range(len(LATENTS)))
def test_the_input_of_latent_attention(m: LatentAttention, tokens: int) -> None:
    arrays = {n: a for n, a in arrays_of(m).items() if not n.startswith(("kv_b", "o."))}
    residual, delta = draw(tokens, WIDTH), draw(tokens, WIDTH, key=1)
    for norm, given, scale in ((RMS, delta, 0.3), (None, None, 1.0)):
        args = (residual, given, rotary(tokens, m.rope))
        compare(api.LATENT_INPUT, LatentInput(m, norm, scale), arrays, args, size=600)


@pytest.mark.parametrize("m", LATENTS, ids=range(len(LATENTS)))
def test_the_input_of_latent_attention_in_any_batch(m: LatentAttention) -> None:
    arrays = {n: a for n, a in arrays_of(m).items() if not n.startswith(("kv_b", "o."))}
    residual, angles = draw(530, WIDTH), rotary(530, m.rope)
    whole = Cpu().stage(api.LATENT_INPUT, LatentInput(m, RMS, 1.0), arrays)(residual, None, angles)
    for threads in (1, 2, 4):
        run = Cpu(threads).stage(api.LATENT_INPUT, LatentInput(m, RMS, 1.0), arrays)
        for begin, end in ((0, 1), (7, 8), (3, 3), (3, 36), (400, 530)):
            some = type(angles)(*(a[begin:end] for a in angles)) if angles else None
            assert same_bits(run(residual[begin:end], None, some), tuple(a[begin:end] for a in whole))
