"""The loop of every rank but the first: it does what rank 0 tells it, and computes its part of each sum."""

from __future__ import annotations

from ridgeline.runtime.forward import Forward
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.orders import Open, Probe, Project, Settle
from ridgeline.runtime.runner import DeviceRunner


def follow(loaded: LoadedModel) -> None:
    """Follow rank 0 until it says that the ranks are done. loaded: the part of this rank.

    Raises RankError if another rank is lost.
    """
    group = loaded.model.group
    assert group is not None, "a model that is not cut has no ranks"
    runner: DeviceRunner | None = None
    forward: Forward | None = None
    while (order := group.broadcast()) is not None:
        if isinstance(order, Open):
            runner = forward = None  # release the pages of the engine before
            runner = DeviceRunner(loaded, order.groups, order.num_pages, **order.options)
            continue
        assert runner is not None, "no engine was opened"
        match order:
            case Project():
                assert forward is not None, "no step was run"
                forward.on_device(order.rows)
            case Settle():
                runner.settle(order.works, order.results)
            case Probe():
                runner.probe()
            case _:
                forward = runner.forward(order)
