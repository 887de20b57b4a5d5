"""No package except spec, archs, ops and nn checks kinds of mixers: they call methods of the mixer instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import ridgeline
from ridgeline.measure.probes import RECURRENT
from ridgeline.ops.recurrent import input_matrices
from ridgeline.spec import (
    S4,
    Attention,
    ChannelMixer,
    ClampedSwiGLU,
    Dilated,
    FirstTokens,
    GatedMLP,
    KimiDelta,
    LatentAttention,
    Layer,
    LightningAttention,
    ModelSpec,
    MoE,
    Pattern,
    RecurrentMixer,
    RMSNorm,
    Rope,
    SharedAttention,
    TokenMixer,
    Ungated,
)
from ridgeline.spec.delta import DeltaMixer
from ridgeline.spec.mixer import Mixer, RecurrentBase

SOURCE = Path(ridgeline.__file__).parent
# spec and archs define and build mixers; ops and nn choose a kernel by the kind of mixer. load/gguf writes the keys of
# a GGUF file that stand for a mixer, as archs does for config.json.
MAY_TELL_APART = ("spec", "archs", "ops", "nn")
KINDS = frozenset(kind.__name__ for union in (TokenMixer, ChannelMixer, Pattern) for kind in get_args(union))
NAMES = KINDS | {"TokenMixer", "ChannelMixer", "RecurrentMixer", "DeltaMixer", "Pattern", "ClampedSwiGLU", "Ungated"}
NORM = RMSNorm()
ATTENTION = Attention(8, 2, 64, 0.125, Rope(64))


def checks_of_kinds(source: str) -> Iterator[int]:
    """Yield the lines that check the kind of a mixer: isinstance, a class pattern, or a comparison or table by type."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                found = {n.id for n in ast.walk(kinds) if isinstance(n, ast.Name)}
                found |= {n.attr for n in ast.walk(kinds) if isinstance(n, ast.Attribute)}
            case ast.MatchClass(cls=ast.Name(id=name) | ast.Attribute(attr=name)):
                found = {name}
            case ast.Compare(comparators=others):
                found = {n.id for other in others for n in ast.walk(other) if isinstance(n, ast.Name)}
            case ast.Dict(keys=keys):
                found = {key.id for key in keys if isinstance(key, ast.Name)}
            case _:
                continue
        if found & NAMES:
            yield node.lineno


def test_no_package_above_checks_kinds_of_mixers() -> None:
    files = [path for path in SOURCE.rglob("*.py") if not path.relative_to(SOURCE).is_relative_to("load/gguf")]
    files = [path for path in files if path.relative_to(SOURCE).parts[0] not in MAY_TELL_APART]
    found = [f"{p.relative_to(SOURCE)}:{line}" for p in files for line in checks_of_kinds(p.read_text("utf-8"))]
    assert not found, "call a method of the mixer instead (spec/mixer.py): " + ", ".join(found)


@pytest.mark.parametrize("planted", [
    "isinstance(x, Attention | Mamba)", "isinstance(m := x.mixer, (spec.MoE,))",
    "type(x) is S4", "type(x) in (S4, S4D)",
    "table = {Mamba: 1}", "match x:\n    case LatentAttention():\n        pass", "issubclass(x, RecurrentMixer)",
])  # fmt: skip
def test_a_planted_check_is_found(planted: str) -> None:
    assert list(checks_of_kinds(planted))


@pytest.mark.parametrize("harmless", ["isinstance(x, RMSNorm)", "x.mixer.is_recurrent", "MoE(8, 2, 64)"])
def test_other_code_is_not_found(harmless: str) -> None:
    assert not list(checks_of_kinds(harmless))


def test_the_sizes_of_pieces_are_declared_once() -> None:
    """The count of memory and the ops that it counts have one declaration of their chunks and blocks."""
    names = {"SCAN_CHUNK", "SCAN_BLOCK", "SSD_CHUNK", "S4_BLOCK", "DELTA_CHUNK"}
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
            found += [(path.name, t.id) for t in targets if isinstance(t, ast.Name) and t.id in names]
    assert sorted(found) == [("workspace.py", name) for name in sorted(names)]


def test_every_recurrent_mixer_is_served() -> None:
    """The ops have one entry for each kind; the matrices that multiply a block's input are the mixer's own."""
    for mixer in RECURRENT.values():
        names = {w.name.removesuffix(".weight") for w in mixer.weights(64)}
        assert set(input_matrices(mixer)) <= names


def test_every_kind_inherits_the_questions() -> None:
    """The union is the only list of recurrent mixers, and calibration has an example of each, under its own name."""
    assert all(issubclass(kind, Mixer) for kind in get_args(TokenMixer))
    assert {kind for kind in get_args(TokenMixer) if issubclass(kind, RecurrentBase)} == set(get_args(RecurrentMixer))
    assert set(get_args(DeltaMixer)) < set(get_args(RecurrentMixer))
    assert {type(mixer) for mixer in RECURRENT.values()} == set(get_args(RecurrentMixer))
    assert all(mixer.kind == name for name, mixer in RECURRENT.items())


def test_how_devices_divide_a_mixer() -> None:
    """Grouped attention is cut by its KV heads; latents are copied; state spaces are cut by channels."""
    assert ATTENTION.cut() == (8, 2)
    assert SharedAttention(0, ATTENTION).cut() == ATTENTION.cut()
    assert LatentAttention(16, 512, 128, 64, 128, 0.1, NORM).cut() == (16, 1)
    assert KimiDelta(4, 64, 4, 64, NORM).cut() == (4, 4)
    assert S4(256, 64).cut() == (0, 256)
    assert all(0 not in mixer.cut()[1:] for mixer in RECURRENT.values())


def test_a_recurrent_state_is_read_and_written() -> None:
    """Twice the state is moved for any context; the bytes of queries and results grow with the tokens."""
    for mixer in RECURRENT.values():
        one, many = mixer.traffic(1, 1), mixer.traffic(5, 1000)
        assert one.state == many.state == 2 * mixer.state().elements
        assert many.activations == 5 * one.activations > 0


def test_attention_reads_the_keys_of_its_queries() -> None:
    """A decode step reads all rows that are stored; dilated windows read fewer than are stored."""
    assert ATTENTION.traffic(1, 1000) == (1000 * 2 * 2 * 64, 2 * 8 * 64)
    dilated = Attention(8, 2, 64, 0.125, window=10, pattern=Dilated(4))
    assert dilated.traffic(1, 1000).state == 10 * 2 * 2 * 64
    shared = SharedAttention(0, ATTENTION)
    assert shared.traffic(7, 50) == ATTENTION.traffic(7, 50)
    assert not shared.state().elements
    assert shared.reads() == ATTENTION.state()


def test_layers_that_cost_the_same_have_one_key() -> None:
    slow, fast = (LightningAttention(4, 64, NORM, slope_scale=scale) for scale in (0.1, 0.9))
    assert slow.cost_key() == fast.cost_key()
    assert SharedAttention(0, ATTENTION).cost_key() == SharedAttention(3, ATTENTION).cost_key()
    assert ATTENTION.cost_key() is ATTENTION


def test_the_attention_of_a_layer() -> None:
    """`ModelSpec.attention` also finds the attention of sharing layers; a shared layer refuses
    to become another kind.
    """
    shared = SharedAttention(0, ATTENTION)
    layers = (Layer(ATTENTION, None, NORM), Layer(shared, GatedMLP(8), NORM), Layer(S4(64, 16), None, NORM))
    spec = ModelSpec("x", 10, 64, 100, layers, NORM)
    assert [spec.attention(i) for i in range(3)] == [ATTENTION, ATTENTION, None]
    assert [spec.state_layer(i) for i in range(3)] == [0, 0, 2]
    assert (len(spec.attentions(shared=True)), len(spec.attentions(shared=False))) == (2, 1)
    with pytest.raises(ValueError, match="do not become another kind"):
        shared.replaced_by(S4(64, 16))
    first = Attention(8, 2, 64, 0.125, Rope(64), window=5, pattern=FirstTokens(2))
    assert shared.replaced_by(first) == SharedAttention(0, first)
    assert ATTENTION.replaced_by(S4(64, 16)) == S4(64, 16)


def test_a_channel_mixer_says_whether_it_routes() -> None:
    moe = MoE(8, 2, 64, ClampedSwiGLU(1.7, 7.0), shared=GatedMLP(32))
    assert (GatedMLP(8).num_experts, GatedMLP(8).shared, moe.num_experts_per_tok) == (0, None, 2)
    assert moe.gated_parts == ("experts.", "shared.")
    assert MoE(8, 2, 64, Ungated("silu")).gated_parts == ()
    assert moe.workspace(10, 64) >= GatedMLP(32).workspace(10, 64)
