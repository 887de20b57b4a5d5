"""Traces of real requests: Azure's CSV and Mooncake's JSON lines, told apart by their first line.

    TIMESTAMP,ContextTokens,GeneratedTokens             Azure LLM inference traces, 2023 (CC BY 4.0)
    2023-11-16 18:17:03.9799600,4808,10

    {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}        Mooncake, in milliseconds

A number of hash_ids identifies a block of 512 tokens and all blocks before it; the last block may be shorter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.sim.workload import Request

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK = 512  # tokens
MAX_COUNT = 1 << 40  # tokens of a request, milliseconds of a trace: more than any real one
MILLISECOND = 10**6  # nanoseconds

# Parses a line into a request with its time; raises _Bad.
_Parse = Callable[[str], Request]


class _Bad(Exception):
    """An error in a line. column: where it is, from 1."""

    def __init__(self, column: int, message: str) -> None:
        super().__init__(message)
        self.column = column


def read_trace(path: str | Path, limit: int | None = None) -> list[Request]:
    """Read the first `limit` requests of a trace, in order of arrival; the first arrives at time 0.

    Raises RequestError, with the line and the column, for a malformed trace.
    """
    lines = _lines(Path(path))
    if not lines:
        raise RequestError(f"{path} is empty; give an Azure CSV or Mooncake JSON lines")
    azure = lines[0].strip().lstrip("\ufeff") == ",".join(AZURE)
    if not azure and not lines[0].lstrip().startswith("{"):
        raise RequestError(
            f"{path}:1:1: neither {','.join(AZURE)} (Azure) nor a JSON object with {', '.join(MOONCAKE)} (Mooncake)"
        )
    parse: _Parse = _azure if azure else _mooncake
    found: list[Request] = []
    for number, line in enumerate(lines[azure:], 1 + azure):
        if limit is not None and len(found) == limit:
            break
        try:
            found.append(parse(line))
        except _Bad as e:
            raise RequestError(f"{path}:{number}:{e.column}: {e}") from None
    if not found:
        raise RequestError(f"{path} has no request")
    found.sort(key=lambda r: r.arrival_ns)
    start = found[0].arrival_ns
    return [r._replace(arrival_ns=r.arrival_ns - start) for r in found]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise RequestError(f"the trace {path} cannot be read: {e}") from None


def _azure(line: str) -> Request:
    fields = line.split(",")
    if len(fields) != len(AZURE):
        raise _Bad(len(line) + 1, f"{len(fields)} fields instead of {len(AZURE)}: {','.join(AZURE)}")
    prompt, output = 2 + len(fields[0]), 3 + len(fields[0]) + len(fields[1])  # their columns
    return Request(_instant(fields[0]), _count(fields[1], prompt, AZURE[1]), _count(fields[2], output, AZURE[2]))


def _instant(text: str) -> int:
    """Return the nanoseconds of a time; digits after the microsecond count."""
    whole, _, fraction = text.partition(".")
    try:
        seconds = datetime.fromisoformat(whole) - datetime(1970, 1, 1)
        return seconds.days * 86_400 * 10**9 + seconds.seconds * 10**9 + int((fraction or "0").ljust(9, "0")[:9])
    except ValueError:
        raise _Bad(1, f"{text!r} is no time like 2023-11-16 18:17:03.9799600") from None


def _count(text: str, column: int, name: str) -> int:
    digits = text.strip()
    if not digits.isdecimal() or len(digits) > len(str(MAX_COUNT)) or not 0 < int(digits) <= MAX_COUNT:
        raise _Bad(column, f"{name} is {digits!r:.60}; it must be a whole number from 1 to {MAX_COUNT}")
    return int(digits)


def _mooncake(line: str) -> Request:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        raise _Bad(e.pos + 1, f"no JSON: {e.msg}") from None
    except ValueError:  # Python's limit for the digits of a number
        raise _Bad(_longest_number(line), "a number has too many digits") from None
    except RecursionError:
        raise _Bad(1, "lists or objects are nested too deeply") from None
    if not isinstance(row, dict):
        raise _Bad(1, f"no JSON object with {', '.join(MOONCAKE)}")
    time, prompt, output = (_whole(line, row, name) for name in MOONCAKE[:3])
    blocks = row.get("hash_ids")
    if not isinstance(blocks, list) or not all(type(b) is int and 0 <= b < 1 << 63 for b in blocks):
        raise _Bad(_column(line, "hash_ids"), "hash_ids must be a list of whole numbers from 0 to 2^63 - 1")
    if len(blocks) > -(-prompt // MOONCAKE_BLOCK):
        raise _Bad(
            _column(line, "hash_ids"),
            f"{len(blocks)} hash_ids for {prompt} tokens; they stand for {MOONCAKE_BLOCK} tokens each",
        )
    return Request(time * MILLISECOND, prompt, output, tuple(blocks), MOONCAKE_BLOCK)


def _whole(line: str, row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    least = int(name != "timestamp")
    if type(value) is not int or not least <= value <= MAX_COUNT:
        said = f"{value!r:.60}"
        raise _Bad(_column(line, name), f"{name} is {said}; it must be a whole number from {least} to {MAX_COUNT}")
    return value


def _longest_number(line: str) -> int:
    """Return the column of the number with the most digits."""
    return max(re.finditer(r"\d+", line), key=lambda found: len(found[0])).start() + 1


def _column(line: str, name: str) -> int:
    return line.find(f'"{name}"') + 1 or 1
