"""How many keys queries see, summed over the queries of a step, exactly: windows and patterns included."""

from __future__ import annotations

from ridgeline.spec import Attention, Dilated, FirstTokens, Strided


def attended(attention: Attention, tokens: int, context: int) -> int:
    """Pairs of a query and a key that it sees, of the last `tokens` queries of `context` tokens."""
    return _up_to(attention, context) - _up_to(attention, context - tokens)


def _up_to(attention: Attention, count: int) -> int:
    """The sum of the keys that queries 1..count see."""
    window = attention.window
    if window is None:
        return count * (count + 1) // 2
    match attention.pattern:
        case FirstTokens(count=first):
            return _capped(count, window + first)
        case Dilated(step=step):
            return _strides(min(count, step * window), step) + max(count - step * window, 0) * window
        case Strided(stride=stride):
            beyond = max(count - window, 0)
            near = min(count, window)
            far = _strides(count, stride) - _strides(near, stride) - beyond * -(-near // stride)
            return _capped(count, window) + far
    return _capped(count, window)


def _capped(count: int, most: int) -> int:
    """The sum of min(i, most) for i in 1..count."""
    rising = min(count, most)
    return rising * (rising + 1) // 2 + (count - rising) * most


def _strides(count: int, stride: int) -> int:
    """The sum of ceil(i / stride) for i in 1..count."""
    whole, rest = divmod(count, stride)
    return stride * whole * (whole + 1) // 2 + rest * (whole + 1)
