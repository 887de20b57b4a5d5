"""The ops table: it tries candidates in order, each serves an op or says why not, and the choice can be read
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ridgeline.errors import DeviceError
from ridgeline.nn import Model
from ridgeline.nn.binding import bind
from ridgeline.ops import Choice, OpsTable, api, open_table
from ridgeline.ops.api import Op, Weights
from ridgeline.ops.reference.backend import ReferenceBackend, SdpaBackend, TorchMemory
from ridgeline.ops.stages import Head, MLPBlock
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope
from ridgeline.spec.text import describe

PLAIN = Attention(2, 1, 8, 0.3)
CAPPED = Attention(2, 1, 8, 0.3, softcap=3.0)
MLP_CASE = MLPBlock(GatedMLP(5), RMSNorm(), 1.0)


class Fake:
    """Serves the given ops, with kernels that return the name of the backend."""

    def __init__(self, name: str, *serves: Op[Any]) -> None:
        self.name = name
        self.serves = serves
        self.asked: list[tuple[str, object]] = []

    def refuses(self, op: Op[Any], case: object) -> str | None:
        self.asked.append((op.name, case))
        return None if op in self.serves else f"{self.name} does not do {op.name}"

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        return None

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
        return lambda *args: (self.name, op.name, case, args)

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        return lambda *args: (self.name, op.name, case, weights, args)


def table(*backends: Any, **overrides: str) -> OpsTable:
    return OpsTable(TorchMemory("reference"), backends, overrides)


def mlp_weights(table: OpsTable) -> Weights:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x.gate.weight": (5, 4), "x.up.weight": (5, 4), "x.down.weight": (4, 5), "n.weight": (4,)}
    return bind({name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}, table, "x", "n")


def test_the_first_that_serves_is_taken() -> None:
    first, second, third = Fake("first"), Fake("second", api.ADD), Fake("third", api.ADD, api.SCALE)
    t = table(first, second, third)
    assert t.primitive(api.ADD)("a") == ("second", "add", None, ("a",))
    assert t.primitive(api.SCALE)("b")[0] == "third"
    assert first.asked == [("add", None), ("scale", None)]
    assert third.asked == [("scale", None)]  # later backends are not tried once an op is served


def test_refusals_are_recorded_with_reasons() -> None:
    t = table(Fake("first"), Fake("second"), Fake("third", api.ADD))
    assert t.choose(api.ADD) == Choice(
        "add", "primitive", "-", "third",
        (("first", "first does not do add"), ("second", "second does not do add")),
    )  # fmt: skip


def test_a_choice_is_made_per_case() -> None:
    t = table(SdpaBackend(), ReferenceBackend())
    assert t.choose(api.ATTENTION, PLAIN).backend == "sdpa"
    capped = t.choose(api.ATTENTION, CAPPED)
    assert capped.backend == "reference"
    assert capped.refusals == (("sdpa", SdpaBackend().refuses(api.ATTENTION, CAPPED)),)
    assert "cannot cap" in capped.refusals[0][1]
    assert "Attention(num_heads=2" in capped.case and "softcap=3" in capped.case


def test_choices_lists_each_case_once_and_in_order() -> None:
    t = table(SdpaBackend(), ReferenceBackend())
    assert t.choices() == ()
    t.choose(api.ATTENTION, CAPPED)
    t.primitive(api.ADD)
    t.primitive(api.ATTENTION, PLAIN)
    t.primitive(api.ADD)
    t.choose(api.MLP_BLOCK, MLP_CASE)
    found = [(c.op, c.level, c.case, c.backend) for c in t.choices()]
    assert found == [
        ("attention", "primitive", describe(CAPPED), "reference"), ("add", "primitive", "-", "reference"),
        ("attention", "primitive", describe(PLAIN), "sdpa"), ("mlp_block", "stage", describe(MLP_CASE), "composed"),
    ]  # fmt: skip


def test_choosing_builds_nothing() -> None:
    class NoKernels(Fake):
        def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
            raise AssertionError("a kernel was built")

    assert table(NoKernels("x", api.ADD)).choose(api.ADD).backend == "x"


def test_a_primitive_that_no_backend_serves() -> None:
    t = table(Fake("first"), Fake("second", api.SCALE))
    assert t.choose(api.ADD).backend == "none"
    with pytest.raises(DeviceError, match=r"no backend serves add .*first does not do add.*second does not do add"):
        t.primitive(api.ADD)


def test_an_override_decides() -> None:
    t = table(SdpaBackend(), ReferenceBackend(), attention="reference")
    choice = t.choose(api.ATTENTION, PLAIN)
    assert choice.backend == "reference"
    assert choice.refusals == (("sdpa", "overridden by --ops attention=reference"),)
    assert t.choose(api.ADD).refusals == (("sdpa", "attention only"),)  # other ops do not change
    kept = open_table("reference", {"attention": "sdpa"})
    assert kept.choose(api.ATTENTION, PLAIN).refusals == ()


def test_an_override_that_refuses() -> None:
    t = table(SdpaBackend(), ReferenceBackend(), attention="sdpa")
    assert t.choose(api.ATTENTION, PLAIN).backend == "sdpa"
    with pytest.raises(DeviceError, match=r"^--ops attention=sdpa: sdpa refuses Attention\(.*\): .*cannot cap scores"):
        t.primitive(api.ATTENTION, CAPPED)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"atention": "sdpa"},
            r"^--ops atention=sdpa: no such op; known are embedding, linear, .*attention_input.*head",
        ),
        ({"attention": "sdpaa"}, r"^--ops attention=sdpaa: no such backend; known are sdpa, reference$"),
        ({"attention": "composed"}, r"^--ops attention=composed: no such backend; known are sdpa, reference$"),
        ({"mlp_block": "x"}, r"^--ops mlp_block=x: no such backend; known are sdpa, reference, composed$"),
    ],
)
def test_unknown_overrides(overrides: dict[str, str], message: str) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        open_table("reference", overrides)
    assert "\n" not in str(caught.value)


def test_a_stage_without_a_fused_kernel_is_composed() -> None:
    t = table(ReferenceBackend())
    weights = mlp_weights(t)
    residual, delta = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    out, mlp = t.stage(api.MLP_BLOCK, MLPBlock(GatedMLP(5), RMSNorm(), 0.5), weights)(residual, delta)
    torch.testing.assert_close(out, residual + 0.5 * delta)
    x = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights.arrays["norm.weight"]
    gate, up, down = (weights.linears[n].dequantize() for n in ("gate", "up", "down"))
    torch.testing.assert_close(mlp, (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T)
    assert t.choices()[-1].op in ("norm", "activation", "add", "scale")  # the parts were chosen from the table as well


def test_a_fused_stage_is_used() -> None:
    fake = Fake("fused", api.MLP_BLOCK)
    t = table(fake, ReferenceBackend())
    weights = mlp_weights(t)
    assert t.stage(api.MLP_BLOCK, MLP_CASE, weights)("r", "d") == ("fused", "mlp_block", MLP_CASE, weights, ("r", "d"))
    assert t.choose(api.MLP_BLOCK, MLP_CASE).backend == "fused"


def test_a_fused_stage_can_be_overridden() -> None:
    t = table(Fake("fused", api.MLP_BLOCK), ReferenceBackend(), mlp_block="composed")
    choice = t.choose(api.MLP_BLOCK, MLP_CASE)
    assert choice.backend == "composed"
    assert choice.refusals[0] == ("fused", "overridden by --ops mlp_block=composed")
    residual, delta = t.stage(api.MLP_BLOCK, MLP_CASE, mlp_weights(t))(torch.ones(2, 4), None)
    assert residual.shape == delta.shape == (2, 4)
    refusing = table(Fake("fused"), ReferenceBackend(), mlp_block="fused")
    with pytest.raises(DeviceError, match=r"--ops mlp_block=fused: fused refuses MLPBlock.*does not do mlp_block"):
        refusing.stage(api.MLP_BLOCK, MLP_CASE, mlp_weights(refusing))


class LoudHead(Fake):
    """A fused head whose logits are the composition's plus 1000, so that a model's output shows its use."""

    def __init__(self) -> None:
        super().__init__("loud", api.HEAD)

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        assert isinstance(case, Head)
        plain = table(ReferenceBackend()).stage(api.HEAD, case, weights)
        return lambda residual, delta, rows: plain(residual, delta, rows) + 1000


def tiny(*scales: float) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    """Return a small model with a layer for each residual scale, and random weights."""
    layers = tuple(Layer(Attention(2, 1, 4, 0.5, Rope(4)), GatedMLP(12), RMSNorm(), None, scale) for scale in scales)
    spec = ModelSpec("tiny", 11, 8, 32, layers, RMSNorm())
    generator = torch.Generator().manual_seed(0)
    return spec, {w.name: torch.randn(w.shape, generator=generator) for w in spec.weights()}


def test_each_layer_scales_its_own_branches() -> None:
    """The addition happens one stage later, in the next layer or the head, and must not use that layer's scale."""
    scales = (0.5, 2.0, 0.25)
    spec, weights = tiny(*scales)
    plain, scaled = tiny(1.0, 1.0, 1.0)[0], dict(weights)
    for i, scale in enumerate(scales):
        for name in ("mixer.o", "mlp.down"):
            scaled[f"layers.{i}.{name}.weight"] = scale * weights[f"layers.{i}.{name}.weight"]
    t = table(ReferenceBackend())
    step = DenseStep.build([[1, 2, 3], [4]], t.memory)
    torch.testing.assert_close(Model(spec, weights, t, 32)(step), Model(plain, scaled, t, 32)(step))


def test_rows_are_those_of_all_logits() -> None:
    spec, weights = tiny(1.0, 1.0)
    t = table(ReferenceBackend())
    step = DenseStep.build([[1, 2, 3], [4], [5, 6]], t.memory)
    model = Model(spec, weights, t, 32)
    torch.testing.assert_close(model(step, step.last_rows(t.memory)), model(step)[[2, 3, 5]])


def test_a_model_runs_on_the_choices_of_the_table() -> None:
    spec, weights = tiny(1.0, 1.0)

    def logits(backends: Sequence[Any]) -> tuple[torch.Tensor, OpsTable]:
        t = table(*backends)
        step = DenseStep.build([[1, 2, 3], [4]], t.memory)
        return Model(spec, weights, t, 32)(step), t

    plain, _ = logits([ReferenceBackend()])
    fused, t = logits([LoudHead(), ReferenceBackend()])
    torch.testing.assert_close(fused, plain + 1000)
    by_op = {c.op: c.backend for c in t.choices()}
    assert by_op["head"] == "loud"
    # No stage serves layers that share another layer's keys, keep latents or a summary, select keys or have experts.
    absent = {"query_input", "latent_input", "indexed_input", "recurrent_block", "expert_block"}
    assert not absent & set(by_op)
    others = {op.name for op in api.STAGES} - absent - {"head"}
    assert {by_op[name] for name in others} == {"composed"}
    assert len({(c.op, c.case) for c in t.choices()}) == len(t.choices())
