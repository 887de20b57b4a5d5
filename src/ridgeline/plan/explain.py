"""Explain the figures of a plan: each formula with its numbers."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.cost.calibrated import far_share, passes_s, rates_of
from ridgeline.cost.footprint import FRACTION
from ridgeline.cost.precision import FLOAT_BYTES, storage_of
from ridgeline.cost.roofline import StepTime
from ridgeline.plan.planner import Load, Planner
from ridgeline.plan.speculation import Speculation
from ridgeline.plan.textbook import Textbook
from ridgeline.plan.units import decimal_bytes, flops, number, seconds
from ridgeline.spec import State
from ridgeline.spec.hardware import HardwareSpec

Line = tuple[str, str]


def explain(planner: Planner, load: Load) -> tuple[Line, ...]:
    """Return a line for each figure of a plan: its name and its formula."""
    return (*_machine(planner.deployment.hardware), *_memory(planner, load), *_time(planner, load))


def _machine(h: HardwareSpec) -> Iterator[Line]:
    rates = ", ".join(f"{kind} {number(rate / 1e12)} TFLOP/s" for kind, rate in h.flops_per_s.items())
    figures = {
        "memory": decimal_bytes(h.memory_bytes), "bandwidth": f"{decimal_bytes(h.read_bytes_per_s)}/s",
        "operations": rates,
        "link": f"{h.link.name}: {decimal_bytes(h.link.bytes_per_s)}/s, {seconds(h.link.latency_s)}" if h.link else "",
    }  # fmt: skip
    for name, value in figures.items():
        if value:
            yield f"{h.name} {name}", f"{value} ({h.sources.get(name, 'as given')})"


def _memory(planner: Planner, load: Load) -> Iterator[Line]:
    d, f = planner.deployment, planner.footprint(load)
    memory = planner.memory
    matrices = sum(w.num_params for w in d.spec.weights() if w.is_matrix)
    vectors, bits = d.spec.num_params() - matrices, storage_of(d.precision.weights).bits
    is_packed = d.hardware.kind == "cpu" and d.scheme.devices == d.scheme.replicas
    packed = ", in whole panels of the kernels, with a copy of a tied head," if is_packed else ""
    yield (
        "weights",
        (
            f"{matrices:,} x {bits} bits + scales + {vectors:,} x {8 * FLOAT_BYTES} bits"
            f"{_split(planner)}{packed} = {decimal_bytes(f.weight_bytes - memory.draft_weight_bytes)}"
        ),
    )
    if d.draft is not None and d.draft.spec is not None:
        size, state = memory.draft_weight_bytes, memory.draft_sequence_bytes(load.context)
        yield (
            f"draft {d.draft.name}",
            (
                f"{d.draft.spec.num_params():,} parameters; weights {decimal_bytes(size)}, "
                f"state {decimal_bytes(state)} for each sequence"
            ),
        )
    yield from _state(planner, load)
    for group in planner.memory.groups:
        pages = group.most_pages(load.context)
        yield (
            f"pages ({group.name})",
            (
                f"({load.batch:,} x {pages:,} + 1) pages x {decimal_bytes(group.page_bytes)} = "
                f"{decimal_bytes((load.batch * pages + 1) * group.page_bytes)}"
            ),
        )
    left = decimal_bytes(f.memory_bytes - f.weight_bytes)
    yield "reserve", f"{1 - FRACTION:.0%} of the {left} that the weights leave = {decimal_bytes(f.reserve_bytes)}"
    yield (
        "free",
        (
            f"{decimal_bytes(f.memory_bytes)} - weights - pages - activations - logits - reserve = "
            f"{decimal_bytes(f.spare_bytes)}"
        ),
    )


def _split(planner: Planner) -> str:
    scheme = planner.deployment.scheme
    return f", over tp {scheme.tp} ep {scheme.ep} pp {scheme.pp}" if scheme.devices > scheme.replicas else ""


def _state(planner: Planner, load: Load) -> Iterator[Line]:
    """Yield one line for each kind of layer that keeps state."""
    d = planner.deployment
    kinds: dict[tuple[str, State], int] = {}
    for layer in d.spec.layers:
        if layer.mixer and layer.mixer.state().elements:
            key = (layer.mixer.kind, layer.mixer.state())
            kinds[key] = kinds.get(key, 0) + 1
    for (name, state), count in kinds.items():
        kept = state.elements_at(load.context) // state.elements
        row = state.parts[-1][-1]
        size = d.precision.state_bytes(state.elements_at(load.context), row, snapshot=state.snapshot)
        what = "float32" if state.snapshot else d.precision.state
        tokens = "once" if state.snapshot else f"{kept:,} tokens"
        yield (
            f"state of {name}",
            (
                f"{state.elements:,} numbers x {tokens} in {what} = {decimal_bytes(size)} per layer, x {count} layers "
                f"x batch {load.batch:,} = {decimal_bytes(size * count * load.batch)}"
            ),
        )


def _time(planner: Planner, load: Load) -> Iterator[Line]:
    d = planner.deployment
    decode = planner.decode(load.batch, load.context)
    yield from (_measured if d.hardware.rates else _operations)(decode, d.hardware)
    figures = planner.figures(load)
    if d.speculation is not None:
        yield from _speculation(planner, d.speculation, load)
    if d.blocks is not None:
        whole = planner.block_s(d.blocks, load.batch, load.context)
        yield (
            "token of a block",
            f"{d.blocks.passes:g} passes, the first with the block before it {seconds(whole)} / {d.blocks.size} tokens "
            f"= {seconds(whole / d.blocks.size)}",
        )
    yield "TPOT", f"(t({load.prompt + 1:,}) + 4 t(middle) + t({load.context:,})) / 6 = {seconds(figures.tpot_s)}"
    later = max(load.output - figures.first, 0)
    yield (
        "latency",
        (f"TTFT {seconds(figures.ttft_s)} + {later:,} x TPOT {seconds(figures.tpot_s)} = {seconds(figures.latency_s)}"),
    )
    if d.scheme.devices == d.scheme.replicas:
        held = planner.memory.weight_bytes + load.batch * planner.memory.sequence_bytes(load.context)
        rate = d.hardware.read_rate(held)
        formula = Textbook(planner.memory.weight_bytes, planner.memory.sequence_bytes(load.context), rate)
        yield (
            "in one line",
            (
                f"(weights {decimal_bytes(formula.weight_bytes)} + {load.batch:,} x state "
                f"{decimal_bytes(formula.state_bytes)}) / {decimal_bytes(rate)}/s = "
                f"{seconds(formula.step_s(load.batch))} a step (CS336)"
            ),
        )


def _speculation(planner: Planner, drafts: Speculation, load: Load) -> Iterator[Line]:
    at = load.batch, load.context
    verification, drafting, plain = planner.verification_s(*at), planner.drafting_s(*at), planner.decode(*at).seconds
    shares = " + ".join(f"{s:.3g}" for s in drafts.shares)
    yield (
        "tokens a verification",
        f"1 + {shares} = {drafts.tokens:.2f}, at acceptance {drafts.acceptance_text} ({drafts.source})",
    )
    yield (
        "token with drafts",
        (
            f"(verification of 1 + {drafts.depth} tokens {seconds(verification)} + drafting {seconds(drafting)}) / "
            f"{drafts.tokens:.2f} = {seconds((verification + drafting) / drafts.tokens)}, {seconds(plain)} without "
            "drafts"
        ),
    )


def _measured(step: StepTime, hardware: HardwareSpec) -> Iterator[Line]:
    """Yield the lines of a step on a calibrated machine: passes at measured rates, and each operation's overhead."""
    rates = hardware.rates
    assert rates is not None
    far = far_share([t.operation for t in step.operations], rates)
    yield "from memory", f"{far:.0%} of the bytes that the step reads; the others are in caches"
    for t in step.operations:
        op = t.operation
        passes = "".join(
            f"{number(numbers)} numbers x {number(rows)} rows x "
            f"{rates_of(op, rates).seconds(numbers, rows, far) / (numbers * rows) * 1e12:.3g} ps + "
            for numbers, rows in op.passes
        )
        overhead = (t.seconds - passes_s(op, rates, far)) / op.layers
        yield op.name, f"{op.layers} x ({passes}{seconds(overhead)}) = {seconds(t.seconds)} ({op.stored or 'moves'})"
    yield "overhead", f"{seconds(step.overhead_s)} for the step and its sequences"


def _operations(step: StepTime, hardware: HardwareSpec) -> Iterator[Line]:
    for t in step.operations:
        op = t.operation
        if op.messages:
            assert hardware.link is not None
            yield (
                op.name,
                (
                    f"{op.layers} x ({decimal_bytes(op.link_bytes)} / {decimal_bytes(hardware.link.bytes_per_s)}/s + "
                    f"{op.messages} x {seconds(hardware.link.latency_s)}) = {seconds(t.seconds)}"
                ),
            )
            continue
        rate = hardware.peak(op.compute)
        yield (
            op.name,
            (
                f"{op.layers} x max({flops(op.flops)} / {number(rate / 1e12)} TFLOP/s {hardware.unit(op.compute)}, "
                f"{decimal_bytes(op.bytes)} / {decimal_bytes(hardware.read_bytes_per_s)}/s) = {seconds(t.seconds)}"
            ),
        )
