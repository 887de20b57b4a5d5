"""Where masks are made: quick ones within the step, others in threads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from cpu.test_structured_bounds import chain
from ridgeline import LLM
from ridgeline.errors import RequestError
from ridgeline.sample import grammar, masks
from ridgeline.sample.grammar import Grammars
from ridgeline.sample.masks import Grammar, MaskThreads
from ridgeline.spec.structure import StructuredOutputs

BITS = bytes([0b101, 0, 0, 0])


class Library:
    """Stands for a matcher of the library. Records the thread of each mask."""

    def __init__(self, threads: list[int], error: str = "") -> None:
        self.threads, self.error = threads, error

    def deep_copy(self) -> Library:
        return Library(self.threads, self.error)

    def consume_tokens(self, tokens: list[int]) -> None:
        pass

    def compute_bitmask(self) -> bytes:
        self.threads.append(threading.get_ident())
        return BITS

    def is_error(self) -> bool:
        return bool(self.error)

    def get_error(self) -> str:
        return self.error


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes all following masks quick, or none."""
    monkeypatch.setattr(masks, "QUICK_SECONDS", np.inf)
    return lambda quick: monkeypatch.setattr(masks, "QUICK_SECONDS", np.inf if quick else -1.0)


def run(matcher: masks.Matcher, count: int) -> None:
    for token in range(count):
        matcher.prepare()
        assert matcher.wait(60)
        assert matcher.allowed()[:4].tolist() == [True, False, True, False]
        matcher.push(token)


def test_a_quick_grammar_needs_threads_for_its_first_mask_only(speed: Any) -> None:
    found: list[int] = []
    quick = Grammar(Library(found), MaskThreads())
    run(quick.start(), 5)
    assert found[0] != threading.get_ident()
    assert found[1:] == [threading.get_ident()] * 4
    run(quick.start(), 2)  # another answer begins within the step
    assert found[5:] == [threading.get_ident()] * 2


def test_after_one_mask_that_is_not_quick_all_grammars_use_threads(speed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "CAREFUL_MASKS", 6)
    threads, first, second = MaskThreads(), list[int](), list[int]()
    one, two = Grammar(Library(first), threads), Grammar(Library(second), threads)
    run(one.start(), 2), run(two.start(), 2)
    speed(False)
    run(one.start(), 2)  # the first of these is made in the step
    assert [t == threading.get_ident() for t in first] == [False, True, True, False]
    speed(True)
    run(two.start(), 8)
    # One of six was made for the first grammar.
    assert [t == threading.get_ident() for t in second] == [False, True] + [False] * 5 + [True] * 3


def test_an_error_within_a_step_is_that_of_a_thread(speed: Any) -> None:
    found: list[int] = []
    broken = Grammar(Library(found, "odd"), MaskThreads())
    for _ in range(2):
        matcher = broken.start()
        for _ in range(2):  # it stays the same
            with pytest.raises(RequestError, match="it cannot be followed: odd"):
                matcher.allowed()
    assert [t == threading.get_ident() for t in found] == [False, True]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return LLM("pocket").grammars


def test_quick_structures_are_compiled_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_KEPT", 2)
    one, two, three = (StructuredOutputs(regex=f"{letter}+") for letter in "abc")
    first = grammars.compile(one)
    grammars.compile(two)
    assert grammars.compile(one) is first
    grammars.compile(three)  # displaces the second, which was used longest ago
    assert grammars.compile(one) is first
    assert len(grammars._kept) == 2
    monkeypatch.setattr(grammar, "KEPT_SECONDS", 0.0)
    slow = StructuredOutputs(regex="d+")
    assert grammars.compile(slow) is not grammars.compile(slow)


@pytest.mark.parametrize(
    "structure",
    [
        {"json": chain(900, lambda ref: {"items": {"$ref": ref}})},
        {"json": chain(900, lambda ref: {"allOf": [{"$ref": ref}]})},
        {"regex": "(a?" * 50 + "b" + ")*" * 50},
        {"grammar": "start: r0\n" + "".join(f'r{i}: "(" r{i + 1} ")" | "x"\n' for i in range(1000)) + 'r1000: "y"'},
    ],
)
def test_masks_need_little_stack(grammars: Grammars, structure: dict[str, Any]) -> None:
    """A step may make masks in a thread with the smallest stack that systems use, unlike compiling."""
    matcher, done = grammars.compile(StructuredOutputs.of(structure)).copy(), threading.Event()

    def walk() -> None:
        for _ in range(30):
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
            if not allowed.size or matcher.is_stopped():
                break
            matcher.consume_tokens([int(allowed[-1])])
        assert not matcher.is_error()
        done.set()

    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=walk)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert done.is_set()
