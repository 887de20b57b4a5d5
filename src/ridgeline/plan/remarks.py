"""Say what a plan takes for granted, where a user may not expect it."""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.cost.precision import storage_of
from ridgeline.plan.planner import Deployment

BETWEEN_HOSTS = "infiniband-400g"  # the link that a remark names as an example


def remarks(d: Deployment) -> tuple[str, ...]:
    """Return a sentence for each part of a deployment that the machine does not have."""
    return (*_missing_units(d), *_wide_links(d))


def _missing_units(d: Deployment) -> Iterator[str]:
    """Yield a remark for activations in a type of 8 bits or fewer that the machine does not multiply."""
    kind, machine = d.precision.activations, d.hardware
    unit = machine.unit(kind)
    if storage_of(kind).bits < 16 and unit != kind:
        yield (
            f"{machine.name} has no unit for {kind}: products with {kind} activations run in {unit}, so these "
            "activations save bytes only, and what it takes to convert them is not counted"
        )


def _wide_links(d: Deployment) -> Iterator[str]:
    """Yield a remark for more devices than the link joins."""
    link, scheme = d.hardware.link, d.scheme
    shared = scheme.devices // scheme.replicas
    if link is None or link.most_devices is None or shared <= link.most_devices:
        return
    yield (
        f"{link.name} joins {link.most_devices} devices at most, and this plan lets {shared} share the model over it: "
        f"its times are too short; name the link between hosts, as in --link {BETWEEN_HOSTS}"
    )
