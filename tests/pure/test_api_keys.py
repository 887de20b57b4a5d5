"""API keys with limits: the file, the buckets, and the order of those that wait."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from ridgeline.cli.flags.serve_flags import read_options
from ridgeline.errors import RequestError
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.keys import OPTION, ApiKey, Bucket, Keys, keys_of
from ridgeline.serve.shares import Shares

A, B = b"a", b"b"
ONE = {"key": "secret", "name": "one"}


@pytest.mark.parametrize(("name", "text"), [
    ("k.toml", '[[keys]]\nkey = "secret"\nname = "one"\nrequests_per_minute = 5\nweight = 2'),
    ("k.yaml", "keys:\n- {key: secret, name: one, requests_per_minute: 5, weight: 2}\n"),
    ("k.json", '{"keys": [{"key": "secret", "name": "one", "requests_per_minute": 5, "weight": 2}]}'),
])  # fmt: skip
def test_a_file_of_keys(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = keys_of(read_options(str(tmp_path / name), OPTION), name)
    assert found == {hashlib.sha256(b"secret").digest(): ApiKey("one", 5, None, 2)}


@pytest.mark.parametrize(("found", "words"), [
    ({}, "one list `keys`"),
    ({"keys": []}, "1 to 10000 entries"),
    ({"keys": [ONE], "key": 1}, "one list `keys`"),
    ({"keys": ["secret"]}, "entry 1 of keys is not a table"),
    ({"keys": [{"name": "one"}]}, "no text `key`"),
    ({"keys": [{**ONE, "key": 5}]}, "no text `key`"),
    ({"keys": [{**ONE, "rate": 5}]}, "unknown field rate"),
    ({"keys": [{**ONE, "requests_per_minute": 0}]}, "requests_per_minute is 0"),
    ({"keys": [{**ONE, "tokens_per_minute": 1.5}]}, "tokens_per_minute is 1.5"),
    ({"keys": [{**ONE, "weight": 0}]}, "weight is 0"),
    ({"keys": [{**ONE, "weight": True}]}, "weight is True"),
    ({"keys": [{**ONE, "weight": float("nan")}]}, "weight is nan"),
    ({"keys": [ONE, {**ONE, "name": "two"}]}, "entry 2 of keys has the key or the name of an earlier entry"),
    ({"keys": [ONE, {**ONE, "key": "other"}]}, "entry 2 of keys has the key or the name of an earlier entry"),
])  # fmt: skip
def test_bad_files_of_keys(found: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        keys_of(found, "keys.toml")
    assert words in str(caught.value) and "secret" not in str(caught.value)


def test_a_bucket_refills_evenly() -> None:
    bucket = Bucket(60, 0.0)  # one each second
    bucket.take(90, 0.0)
    assert bucket.level(0.0) == -30 and bucket.wait(1, 0.0) == 31 and bucket.level(31.0) == 1
    assert bucket.level(1e6) == 60


def test_the_limits_of_a_key() -> None:
    now = [0.0]
    keys = Keys({A: ApiKey("one", 2, 100), B: ApiKey("two")}, clock=lambda: now[0])
    assert keys.headers(A) == {
        "x-ratelimit-limit-requests": "2", "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "0.000s",
        "x-ratelimit-limit-tokens": "100", "x-ratelimit-remaining-tokens": "100", "x-ratelimit-reset-tokens": "0.000s",
    }  # fmt: skip
    keys.enter(A)
    keys.enter(A)
    with pytest.raises(APIError) as caught:
        keys.enter(A)
    assert caught.value.status == 429 and caught.value.retry_after == 30 and "2 requests a minute" in str(caught.value)
    now[0] = 30.0
    keys.enter(A)
    keys.charge(A, 160)
    now[0] = 65.0  # 35 s bring 58 tokens back, and one request
    with pytest.raises(APIError) as caught:
        keys.enter(A)
    assert caught.value.retry_after == 2 and "100 tokens a minute" in str(caught.value)
    assert keys.uses[A].total_refused == 2 and keys.uses[A].total_tokens == 160 and keys.uses[A].total_requests == 3
    for _ in range(100):  # no limits, and no key
        keys.enter(B)
        keys.enter(None)
    assert keys.headers(B) == keys.headers(None) == {}


async def served(weights: dict[bytes, float], asked: list[tuple[bytes, int]], slots: int = 1) -> list[bytes]:
    """Return the order in which requests, each of one answer and some tokens, get their turns."""
    shares, order = Shares(slots, lambda key: weights[key or b""]), list[bytes]()

    async def one(key: bytes, tokens: int) -> None:
        await shares.enter(key, 1, tokens)
        order.append(key)
        await asyncio.sleep(0)
        shares.leave(key, 1)

    await asyncio.gather(*(one(key, tokens) for key, tokens in asked))
    assert not shares.waiting(A) and not shares.waiting(B)
    return order


def test_keys_share_the_queue_by_weight() -> None:
    """B has three times the weight of A, and gets three turns for one, although all requests of A came first."""
    order = asyncio.run(served({A: 1.0, B: 3.0}, [(A, 99)] * 40 + [(B, 99)] * 40))
    assert order[0] == A and 28 <= order[1:41].count(B) <= 31
    even = asyncio.run(served({A: 1.0, B: 1.0}, [(A, 299)] * 40 + [(B, 99)] * 40))
    assert 28 <= even[1:41].count(B) <= 31  # turns are shared by tokens, not by requests


def test_an_idle_key_saves_up_no_turns() -> None:
    async def run() -> list[bytes]:
        shares, order = Shares(1, lambda key: 1.0), list[bytes]()

        async def one(key: bytes) -> None:
            await shares.enter(key, 1, 9)
            order.append(key)
            shares.leave(key, 1)

        for _ in range(50):
            await one(A)
        await shares.enter(A, 1, 9)
        tasks = [asyncio.ensure_future(one(key)) for key in [A] * 10 + [B] * 10]
        await asyncio.sleep(0)
        shares.leave(A, 1)
        await asyncio.gather(*tasks)
        return order[50:]

    assert 4 <= asyncio.run(run())[:10].count(B) <= 6


def test_a_request_that_is_cancelled_leaves_the_queue() -> None:
    async def run() -> None:
        shares = Shares(1, lambda key: 1.0)
        await shares.enter(A, 1, 1)
        waiting = asyncio.ensure_future(shares.enter(B, 1, 1))
        await asyncio.sleep(0)
        assert shares.waiting(B) == 1
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert shares.waiting(B) == 0
        chosen = asyncio.ensure_future(shares.enter(B, 1, 1))
        await asyncio.sleep(0)
        shares.leave(A, 1)  # its turn has come, but it is cancelled before it runs
        chosen.cancel()
        await asyncio.gather(chosen, return_exceptions=True)
        await asyncio.wait_for(shares.enter(A, 9, 1), 1)  # all slots are free, so even a larger request goes

    asyncio.run(run())
