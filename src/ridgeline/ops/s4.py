"""The step of S4 and S4D for one token, as coefficients that depend on the weights alone.

The formulas serve arrays of numpy and of torch alike: kernels for CPUs and for GPUs take their coefficients from here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline.spec import S4, S4D

Complex = Any  # an array [channels, modes] of complex128; a mode is a conjugate pair of numbers of the state


def token_terms(case: S4 | S4D, exp: Callable[[Any], Any], *system: Any) -> list[Complex]:
    """Return the coefficients of h = a h + b u and y = 2 Re(c h), which are a, b and 2 conj(c); and for S4 four more.

    S4 also adds e s + g r to h. Both sums are over the state before the token: s of 2 Re(conj(p) h), and r of
    2 Re(conj(p) a h). The four are e, g and the conjugates of the factors of both sums.

    exp: the exponential of an array. system: log_dt, A_log and A_imag, P and B (S4 alone), and C in float64.
    """
    log_dt, a_log, a_imag, *others = system
    a, dt = -exp(a_log) + 1j * a_imag, exp(log_dt)[:, None]
    pairs = [x[:, 0] + 1j * x[:, 1] for x in others]
    return _dplr(a, dt, *pairs) if isinstance(case, S4) else _diagonal(a, dt, exp, *pairs)


def _diagonal(a: Complex, dt: Any, exp: Callable[[Any], Any], c: Complex) -> list[Complex]:
    """Discretize by zero-order hold: h = exp(dt a) h + (exp(dt a) - 1) / a u."""
    once = exp(dt * a)
    return [once, (once - 1) / a, _seen(c)]


def _dplr(a: Complex, dt: Any, p: Complex, b: Complex, c: Complex) -> list[Complex]:
    """Discretize by the bilinear rule, with s(h) = sum of 2 Re(conj(p) h), r = 2 / dt and i = 1 / (r - a):

    v = i ((r + a) h - p s(h) + 2 b u), then h = v - solved s(v), where solved is the rank-one part of (r - A)^-1 beside
    i. s(v) is linear in h and u, so that both sums use the h before the token.
    """
    rate = 2 / dt
    inverse = 1 / (rate - a)
    solved = inverse * p / (1 + _both(p.conj() * inverse * p))
    kept, lost, given = inverse * (rate + a), inverse * p, 2 * inverse * b
    again, added = _both(p.conj() * lost), _both(p.conj() * given)
    return [
        kept,
        given - solved * added,
        _seen(c),
        solved * again - lost,
        -solved,
        _seen(p.conj()),
        _seen(p.conj() * kept),
    ]


def _both(x: Complex) -> Any:
    """Return the sum over conjugate pairs, of which one is given: [channels, modes] -> [channels, 1], real."""
    return 2 * x.real.sum(-1)[:, None]


def _seen(x: Complex) -> Complex:
    """Return factors with which 2 Re(x h), the sum of a conjugate pair, is a sum of products of real parts."""
    return 2 * x.conj()
