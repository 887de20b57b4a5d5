"""Search the cheapest settings that keep latency limits; if there are none, search changes that would keep them.

The search covers the number of devices that share the model (tp, and ep if there are experts), the chunk size and the
batch. It keeps what the user fixed. Changes that alter the output are only proposed, not applied. The cost is device
seconds per output token, prompts included.

Times are those to expect (plan/expected.py), and a limit is kept if the time stays below it with the confidence that
was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.catalog.machines import machines
from ridgeline.cost.footprint import largest
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.plan.changes import FindDraft, change, published_draft
from ridgeline.plan.expected import ROOF, Sureness, sureness
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Figures, Load, Planner

CHUNKS = (128, 256, 512, 1024, 2048, 4096)
DEVICES = (1, 2, 4, 8)
MOST_SEQS = 1 << 12
CONFIDENCE = 0.9  # probability with which a limit is kept, if the user asks for no other
# Tried one after the other if nothing else keeps the limits, the least lossy first.
LOSSY = ("weights=fp8", "weights=int8", "kv=fp8", "weights=int4", "weights=int4,kv=fp8")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the model.

    figures: the expected ones, as medians. sure: margins over them. why: the limit that bounds the batch. changed: the
    change that it needs, if any.
    """

    deployment: Deployment
    figures: Figures
    sure: Sureness
    why: str
    changed: str = ""

    @property
    def is_bound(self) -> bool:
        """Return whether its times are lower bounds by the roofline, because too little is known of the machine."""
        return self.sure.is_roof and not self.deployment.hardware.is_measured

    @property
    def sure_ttft_s(self) -> float:
        """Return the TTFT in the steady state that is kept with the confidence that was asked for."""
        return self.figures.served_ttft_s * self.sure.ttft

    @property
    def sure_tpot_s(self) -> float:
        """Return the TPOT in the steady state that is kept with the confidence that was asked for."""
        return self.figures.served_tpot_s * self.sure.tpot


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a search.

    settings: all that keep the limits, the cheapest first, one per number of devices. otherwise: if there are none,
    changes that would keep the limits. closest: if nothing keeps the limits on this machine, the setting that misses
    them least.
    """

    settings: tuple[Setting, ...]
    closest: Setting | None
    otherwise: tuple[Setting, ...]


def kept(slo: Slo, figures: Figures, sure: Sureness) -> bool:
    """Return whether the figures of the steady state are within the limits, margins included."""
    return all(value <= limit for _, value, limit in _pairs(slo, figures, sure))


def _pairs(slo: Slo, figures: Figures, sure: Sureness) -> Iterator[tuple[str, float, float]]:
    """Yield each limited figure: its name, its value with the margin, and its limit."""
    ttft, tpot = figures.served_ttft_s * sure.ttft, figures.served_tpot_s * sure.tpot
    found = {"ttft": ttft, "tpot": tpot, "e2e": ttft + (figures.load.output - 1) * tpot}
    for name, limit in slo.limits.items():
        yield name, found[name], limit


def search(
    deployment: Deployment, load: Load, promise: Slo, confidence: float = CONFIDENCE, batch: int | None = None
) -> Answer:
    """Search settings for a load. Its prompt and output lengths are kept.

    confidence: probability with which each limit is kept. batch: the only batch of each replica; None: the largest one
    that keeps the limits is searched. Raises RequestError if the confidence is not at least 0.5 and below 1.
    """
    settings, near = settings_within(deployment, load, promise, confidence, batch)
    if settings:
        return Answer(settings, None, ())
    keeping: list[Setting] = []
    others = [near] if near else []
    for text, other in _others(deployment):
        found, near = settings_within(other, load, promise, confidence, batch)
        if found:
            keeping.append(replace(found[0], changed=text))
        elif near:
            others.append(replace(near, changed=text))
    closest = min(others, key=lambda s: _miss(promise, s), default=None)
    return Answer((), closest, tuple(keeping))


def each_within(
    deployment: Deployment, load: Load, promise: Slo, changes: Sequence[str], find_draft: FindDraft = published_draft,
    confidence: float = CONFIDENCE, batch: int | None = None,
) -> tuple[Setting, ...]:  # fmt: skip
    """Return the cheapest setting of a deployment, and of each change applied alone: those that keep the limits first.

    Where nothing keeps them, the setting that misses them least stands for the change; where nothing fits, none does.
    confidence, batch: as in `search`.
    """
    found: list[Setting] = []
    for text in ("", *changes):
        after = change(deployment, text, find_draft).deployment if text else deployment
        settings, near = settings_within(after, load, promise, confidence, batch)
        one = settings[0] if settings else near
        if one is not None:
            found.append(replace(one, changed=text))
    return tuple(sorted(found, key=lambda s: (not kept(promise, s.figures, s.sure), _cost(s))))


def settings_within(
    deployment: Deployment, load: Load, promise: Slo, confidence: float | None, batch: int | None = None
) -> tuple[tuple[Setting, ...], Setting | None]:  # fmt: skip
    """Return the settings that keep the limits, and the one that misses them least.

    confidence: as in `search`; None: times are those of the machine as it is given, without a margin.
    """
    if confidence is not None:
        check_confidence(confidence)
    keeping: list[Setting] = []
    near: list[Setting] = []
    sure = ROOF if confidence is None else sureness(deployment.hardware, confidence)
    for scheme in _schemes(deployment):
        planner = Planner(replace(deployment, scheme=scheme), sure.efficiency)
        tried = [
            s for chunk in _chunks(load.prompt)
            if (s := _best(planner.with_chunk(chunk), load, promise, sure, batch))
        ]  # fmt: skip
        good = [s for s in tried if kept(promise, s.figures, sure)]
        near += tried
        if good:
            keeping.append(min(good, key=_cost))
    missed = min(near, key=lambda s: _miss(promise, s), default=None)
    return tuple(sorted(keeping, key=_cost)), missed


def check_confidence(confidence: float) -> None:
    """Raise RequestError for a confidence that is out of range."""
    if not 0.5 <= confidence < 1:
        raise RequestError(f"--confidence is {confidence:g}; it must be at least 0.5 and below 1")


def _chunks(prompt: int) -> list[int]:
    """Return the chunk sizes to try, up to the first that holds the whole prompt."""
    return [n for i, n in enumerate(CHUNKS) if i == 0 or CHUNKS[i - 1] < prompt]


def _cost(setting: Setting) -> float:
    return setting.figures.device_seconds_per_token


def _miss(promise: Slo, setting: Setting) -> float:
    return max((value / limit for _, value, limit in _pairs(promise, setting.figures, setting.sure)), default=0.0)


def _schemes(deployment: Deployment) -> Iterator[Scheme]:
    """Yield the ways to share the model between devices; only the user's one if there is any."""
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
                replace(deployment, scheme=scheme)
            except RequestError:
                continue
            yield scheme


def _best(planner: Planner, load: Load, promise: Slo, sure: Sureness, fixed: int | None) -> Setting | None:
    """Return the setting with the largest batch that keeps the limits, or with one sequence if none does; None if not
    even that fits. fixed: the only batch that is allowed, or None.
    """
    deployment = planner.deployment
    room = min(planner.memory.largest_batch(load.context, MOST_SEQS), MOST_SEQS)
    if room < (fixed or 1):
        return None
    ttft = planner.ttft_s(load.prompt)
    scheme, chunks = deployment.scheme, planner.num_chunks(load.prompt)

    def figures(batch: int) -> Figures:
        one = replace(load, batch=batch)
        step, tpot = planner.decode(batch, load.context).seconds, planner.tpot_s(one)
        return Figures(one, step, ttft, tpot, 0.0, chunks, scheme.replicas, scheme.devices)

    batch = fixed or largest(lambda n: kept(promise, figures(n), sure), room)
    found = figures(max(batch, 1))
    binding = max(_pairs(promise, found, sure), key=lambda pair: pair[1] / pair[2])[0]
    if fixed and kept(promise, found, sure):
        binding = "--batch"
    return Setting(deployment, found, sure, "memory" if batch == room and not fixed else binding)


def _others(deployment: Deployment) -> Iterator[tuple[str, Deployment]]:
    """Yield lossy changes of the model, then other machines of the same kind, written as options."""
    for text in LOSSY:
        yield text, change(deployment, text).deployment
    for machine in machines():
        if machine.name != deployment.hardware.name and machine.kind == deployment.hardware.kind:
            yield f"--hardware {machine.name}", replace(deployment, hardware=machine)


def smallest_fit(deployment: Deployment, load: Load) -> str:
    """Return the smallest change with which one sequence of the load fits, as options: more devices first, then smaller
    weights.
    """
    for text in ("", *LOSSY):
        after = change(deployment, text).deployment if text else deployment
        for scheme in _schemes(replace(after, scheme=Scheme())):
            one = Planner(replace(after, scheme=scheme))
            if one.memory.footprint(1, load.context).fits:
                name = next((f" --{n} {v}" for n in ("tp", "ep") if (v := getattr(scheme, n)) > 1), "")
                return f"{text}{name}".strip()
    return "a larger machine or a smaller model"
