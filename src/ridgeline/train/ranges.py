"""Check that numbers of options are in their ranges."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.errors import RidgelineError


def check_ranges(
    options: object, ranges: Mapping[str, tuple[float, float]], error: type[RidgelineError], *, flags: bool = False
) -> None:
    """Raise `error` for the first attribute that is not in its range, or is NaN.

    ranges: the least and the largest value, by name. flags: whether the message names the flag too.
    """
    for name, (least, most) in ranges.items():
        value = getattr(options, name)
        if not least <= value <= most:  # also true of NaN
            shown = f"{name} (--{name.replace('_', '-')})" if flags else name
            raise error(f"{shown} is {value}; it must be from {least:g} to {most:g}")
