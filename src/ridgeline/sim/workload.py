"""Workloads: requests with their lengths and times of arrival.

Times are whole nanoseconds, so that sums do not depend on the order of their terms. Random numbers follow from a seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import NamedTuple

import numpy as np

from ridgeline.errors import RequestError

SECOND = 10**9  # nanoseconds


class Request(NamedTuple):
    """One request. arrival_ns: nanoseconds after the start.

    blocks: numbers for the prompt's blocks of `block_tokens` tokens. Each number includes all blocks before it: prompts
    with equal first blocks begin with equal tokens.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, or sent by `clients`: each sends its next request `think_ns` after an answer.

    With clients, times of arrival are ignored, and requests are sent in order.
    """

    requests: Sequence[Request]
    clients: int | None = None
    think_ns: int = 0


def poisson(rate: float, seed: int) -> Iterator[int]:
    """Yield times of independent arrivals without end, `rate` per second."""
    return _times(lambda rng, n: rng.exponential(SECOND / rate, n), seed)


def gamma(rate: float, cv: float, seed: int) -> Iterator[int]:
    """Yield times of arrivals without end. cv: coefficient of variation of the gaps; 1 is Poisson, more is bursty."""
    shape = 1 / cv**2
    return _times(lambda rng, n: rng.gamma(shape, SECOND / rate / shape, n), seed)


def on_off(rate: float, on_s: float, off_s: float, seed: int) -> Iterator[int]:
    """Yield Poisson arrivals for `on_s` seconds, none for `off_s`, and so on; `rate` is the mean over both."""
    on, off = round(on_s * SECOND), round(off_s * SECOND)
    for time in poisson(rate * (on + off) / on, seed):
        yield time // on * (on + off) + time % on


def _times(gaps: Callable[[np.random.Generator, int], np.ndarray], seed: int) -> Iterator[int]:
    rng, time = np.random.default_rng((seed, 0)), 0
    while True:
        for gap in gaps(rng, 4096).round().astype(np.int64).tolist():
            time += gap
            yield time


def lengths(prompt: int, output: int, cv: float, seed: int, limit: int | None = None) -> Iterator[Request]:
    """Yield requests without end, at time 0, with log-normal lengths of these means and coefficient of variation `cv`.

    limit: most tokens of prompt and output together; longer requests are cut.
    """
    if not cv:
        return repeat(Request(0, prompt, output))
    return _log_normal((prompt, output), cv, seed, limit)


def _log_normal(means: tuple[int, int], cv: float, seed: int, limit: int | None) -> Iterator[Request]:
    rng, sigma = np.random.default_rng((seed, 1)), math.sqrt(math.log1p(cv * cv))
    while True:
        drawn = [np.exp(rng.normal(math.log(mean) - sigma**2 / 2, sigma, 4096)).round() for mean in means]
        for prompt, output in zip(*(d.astype(np.int64).clip(1).tolist() for d in drawn), strict=True):
            if limit is not None:
                prompt = min(prompt, limit - 1)
                output = min(output, limit - prompt)
            yield Request(0, prompt, output)


def arrive(requests: Iterable[Request], times: Iterable[int], count: int | None = None) -> list[Request]:
    """Return the first `count` requests, with other times of arrival."""
    pairs = zip(requests, times, strict=False)
    return [request._replace(arrival_ns=time) for request, time in islice(pairs, count)]


def scale_rate(requests: Iterable[Request], factor: float) -> list[Request]:
    """Return the requests at `factor` times their rate."""
    return [r._replace(arrival_ns=round(r.arrival_ns / factor)) for r in requests]


def repeated(requests: Sequence[Request], count: int) -> list[Request]:
    """Return `count` requests: the given ones repeated in time, each round with its own prefixes."""
    if not requests:
        raise RequestError("there is no request to repeat")
    span = requests[-1].arrival_ns + max(1, requests[-1].arrival_ns // len(requests))
    blocks = 1 + max(chain.from_iterable(r.blocks for r in requests), default=-1)
    rounds = -(-count // len(requests))
    found = (
        r._replace(arrival_ns=r.arrival_ns + n * span, blocks=tuple(b + n * blocks for b in r.blocks))
        for n in range(rounds)
        for r in requests
    )
    return list(islice(found, count))


def parse_arrivals(text: str) -> Callable[[Sequence[Request], int], Workload]:
    """Parse `poisson:8`, `gamma:8,cv=4`, `onoff:8,on=10,off=30` (requests per second) or `closed:32,think=1` (clients,
    seconds).

    Returns a function of requests and a seed that makes a workload. Raises RequestError for any other text.
    """
    kind, _, rest = text.partition(":")
    main, *pairs = rest.split(",")
    names = {"poisson": (), "gamma": ("cv",), "onoff": ("on", "off"), "closed": ("think",)}
    if kind not in names:
        raise RequestError(f"--arrivals {text}: kinds are poisson:RATE, gamma:RATE,cv=, onoff:RATE,on=,off=, closed:N")
    values = {"rate": main} | {pair.partition("=")[0]: pair.partition("=")[2] for pair in pairs}
    numbers = {name: _number(text, name, value, {"rate", *names[kind]}) for name, value in values.items()}
    missing = [name for name in names[kind] if name not in numbers and name != "think"]
    if missing:
        raise RequestError(f"--arrivals {text}: {kind} needs {missing[0]}=, as in {kind}:8,{missing[0]}=4")
    if kind == "closed":
        if numbers["rate"] != int(numbers["rate"]):
            raise RequestError(f"--arrivals {text}: the number of clients is a whole number, as in closed:32")
        think = round(numbers.get("think", 0.0) * SECOND)
        return lambda requests, seed: Workload(requests, int(numbers["rate"]), think)
    rate = numbers["rate"]
    times: dict[str, Callable[[int], Iterator[int]]] = {
        "poisson": lambda seed: poisson(rate, seed),
        "gamma": lambda seed: gamma(rate, numbers["cv"], seed),
        "onoff": lambda seed: on_off(rate, numbers["on"], numbers["off"], seed),
    }
    return lambda requests, seed: Workload(arrive(requests, times[kind](seed)))


def _number(text: str, name: str, value: str, known: set[str]) -> float:
    if name not in known:
        raise RequestError(f"--arrivals {text}: {name} is not known; known are {', '.join(sorted(known))}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    least_is_fine = name in ("off", "think")
    if not math.isfinite(number) or number < 0 or (number == 0 and not least_is_fine):
        raise RequestError(f"--arrivals {text}: {name} is {value!r}; it must be a positive number")
    return number


def cut(workload: Workload, limit: int) -> Workload:
    """Return the workload with requests cut to `limit` tokens: first prompts, then answers; each keeps a token."""
    found = []
    for r in workload.requests:
        prompt = min(r.prompt_tokens, limit - 1)
        found.append(r._replace(prompt_tokens=prompt, output_tokens=min(r.output_tokens, limit - prompt)))
    return replace(workload, requests=found)
