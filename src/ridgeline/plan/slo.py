"""The settings that keep a promise at the least cost; or, where none do, what it would take.

Searched: how many devices share the model (tp, and ep where there are experts), the tokens of a prompt in one step, and
the batch. Kept: what a user fixed, and the output: nothing that changes a token is tried, only named. Cost: seconds of
a device for an output token, prompts included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline.catalog.machines import machines
from ridgeline.cost.footprint import largest
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.plan.changes import change
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Figures, Load, Planner

CHUNKS = (128, 256, 512, 1024, 2048, 4096)
DEVICES = (1, 2, 4, 8)
MOST_SEQS = 1 << 12
# Tried one by one where nothing else keeps the promise, the least lossy first.
LOSSY = ("weights=fp8", "weights=int8", "kv=fp8", "weights=int4", "weights=int4,kv=fp8")


@dataclass(frozen=True, slots=True)
class Setting:
    """A way to run it. why: what ends the batch there. changed: what it gives up, where nothing else does."""

    deployment: Deployment
    figures: Figures
    why: str
    changed: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """settings: that keep the promise, the cheapest first, one for each number of devices. otherwise: where there are
    none, what would keep it. closest: what comes nearest of all that was tried, where nothing keeps it on this machine.
    """

    settings: tuple[Setting, ...]
    closest: Setting | None
    otherwise: tuple[Setting, ...]


def kept(slo: Slo, figures: Figures) -> bool:
    """Is it, served among others: see planner.py?"""
    return all(value <= limit for _, value, limit in _pairs(slo, figures))


def _pairs(slo: Slo, figures: Figures) -> Iterator[tuple[str, float, float]]:
    """What was promised: its name, what it is, and what it may be."""
    ttft, tpot = figures.served_ttft_s, figures.served_tpot_s
    found = {"ttft": ttft, "tpot": tpot, "e2e": ttft + (figures.load.output - 1) * tpot}
    for name, limit in slo.limits.items():
        yield name, found[name], limit


def search(deployment: Deployment, load: Load, promise: Slo) -> Answer:
    """load: its prompt and output are kept, its batch is what is looked for."""
    settings, near = _on_machine(deployment, load, promise)
    if settings:
        return Answer(settings, None, ())
    keeping: list[Setting] = []
    others = [near] if near else []
    for text, other in _others(deployment):
        found, near = _on_machine(other, load, promise)
        if found:
            keeping.append(replace(found[0], changed=text))
        elif near:
            others.append(replace(near, changed=text))
    closest = min(others, key=lambda s: _miss(promise, s.figures), default=None)
    return Answer((), closest, tuple(keeping))


def _on_machine(
    deployment: Deployment, load: Load, promise: Slo
) -> tuple[tuple[Setting, ...], Setting | None]:  # fmt: skip
    """Those that keep the promise; and the nearest to it of all."""
    keeping: list[Setting] = []
    near: list[Setting] = []
    for scheme in _schemes(deployment):
        planner = Planner(replace(deployment, scheme=scheme))
        tried = [s for chunk in _chunks(load.prompt) if (s := _best(planner.with_chunk(chunk), load, promise))]
        good = [s for s in tried if kept(promise, s.figures)]
        near += tried
        if good:
            keeping.append(min(good, key=_cost))
    missed = min(near, key=lambda s: _miss(promise, s.figures), default=None)
    return tuple(sorted(keeping, key=_cost)), missed


def _chunks(prompt: int) -> list[int]:
    """Up to the first that takes the whole prompt."""
    return [n for i, n in enumerate(CHUNKS) if i == 0 or CHUNKS[i - 1] < prompt]


def _cost(setting: Setting) -> float:
    return setting.figures.device_seconds_per_token


def _miss(promise: Slo, figures: Figures) -> float:
    return max((value / limit for _, value, limit in _pairs(promise, figures)), default=0.0)


def _schemes(deployment: Deployment) -> Iterator[Scheme]:
    """What is left open: devices that share the model, where a user fixed none."""
    given = deployment.scheme
    if given.devices > given.replicas:
        yield given
        return
    moe = any(layer.mlp and layer.mlp.num_experts for layer in deployment.spec.layers)
    for count in DEVICES:
        if count > 1 and deployment.hardware.link is None:
            return
        for name in ("tp", "ep") if moe and count > 1 else ("tp",):
            scheme = replace(given, **{name: count})
            try:
                scheme.check(deployment.spec)
            except RequestError:
                continue
            yield scheme


def _best(planner: Planner, load: Load, promise: Slo) -> Setting | None:
    """The largest batch that keeps the promise, or of one sequence where none does; None where not even that fits."""
    deployment = planner.deployment
    room = min(planner.memory.largest_batch(load.context, MOST_SEQS), MOST_SEQS)
    if not room:
        return None
    ttft = planner.ttft_s(load.prompt)
    scheme, chunks = deployment.scheme, planner.num_chunks(load.prompt)

    def figures(batch: int) -> Figures:
        one = replace(load, batch=batch)
        step, tpot = planner.decode(batch, load.context).seconds, planner.tpot_s(one)
        return Figures(one, step, ttft, tpot, 0.0, chunks, scheme.replicas, scheme.devices)

    batch = largest(lambda n: kept(promise, figures(n)), room)
    found = figures(max(batch, 1))
    binding = max(_pairs(promise, found), key=lambda pair: pair[1] / pair[2])[0]
    return Setting(deployment, found, "memory" if batch == room else binding)


def _others(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    """Changes of the model, then other machines of the kind, as options."""
    for text in LOSSY:
        yield text, change(deployment, text).deployment
    for machine in machines():
        if machine.name != deployment.hardware.name and machine.kind == deployment.hardware.kind:
            yield f"--hardware {machine.name}", replace(deployment, hardware=machine)


def smallest_fit(deployment: Deployment, load: Load) -> str:
    """The least change with which one sequence of the load fits, as options: devices, then narrower weights."""
    for text in ("", *LOSSY):
        after = change(deployment, text).deployment if text else deployment
        for scheme in _schemes(replace(after, scheme=Scheme())):
            one = Planner(replace(after, scheme=scheme))
            if one.memory.footprint(1, load.context).fits:
                name = next((f" --{n} {v}" for n in ("tp", "ep") if (v := getattr(scheme, n)) > 1), "")
                return f"{text}{name}".strip()
    return "a larger machine, or a smaller model,"
