"""Measure what concerns Ridgeline alone: the size of an installation, start-up times, and products of matrices."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import peer_shapes
from common import commit
from peer_envs import ROOT, PeerError, ensure_ours, installed_bytes
from peer_table import CONTENDERS, OURS, PRODUCTS, SIZE, SIZE_MB, STARTUP, STARTUPS

if TYPE_CHECKING:
    from peers import Bench

PRODUCTS_SHAPE, PRODUCTS_TOKENS = "M", "512"


def measure(bench: Bench) -> None:
    """Measure the cases of Ridgeline alone that are wanted."""
    if PRODUCTS in bench.args.cases and PRODUCTS_SHAPE in bench.args.shapes:
        products(bench)
    wanted = [case for case in (SIZE, STARTUP) if case in bench.args.cases]
    if not wanted:
        return
    try:
        folder = ensure_ours(bench.work, commit())
    except PeerError as e:
        bench.say(f"[red]{e}[/]")
        return
    if SIZE in wanted:
        size = round(installed_bytes(folder) / 1e6, 1)
        bench.save("", SIZE, None, (folder / "bin" / "ridgeline").exists(), installed_mb=size, limit=SIZE_MB)
    for shape, form, limit in STARTUPS if STARTUP in wanted else ():
        startup(bench, folder, shape, form, limit)


def products(bench: Bench) -> None:
    """Measure the products of 512 tokens as shares of the peak: bench/products.py, which has a gate of its own."""
    ours = {c.kind: c for c in CONTENDERS if c.peer == OURS and c.kind in bench.args.kinds and c.kind != "fp32"}
    script = [sys.executable, str(ROOT / "bench" / "products.py")]
    what = ["--shapes", PRODUCTS_SHAPE, "--tokens", PRODUCTS_TOKENS, "--formats", ",".join(ours)]
    done = subprocess.run(
        [*script, *what, "--threads", str(bench.args.threads), "--rounds", str(bench.args.rounds)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for line in map(json.loads, done.stdout.splitlines()):
        shares = {name: line[name] for name in ("peak_share", "unit_share") if name in line}
        bench.save(PRODUCTS_SHAPE, PRODUCTS, ours[line["format"]], line["correct"], rounds=[shares])


def startup(bench: Bench, folder: Path, shape: str, form: str, limit: float) -> None:
    """Measure a process that prints one token, until it ends, which is slightly later than its token."""
    command = [str(folder / "bin" / "ridgeline"), "generate", "Once upon a time", "--max-tokens", "1"]
    if shape:
        command += ["-m", str(peer_shapes.make_model(shape, bench.work / "models" / shape / "hf"))]
    command += ["--weights", form] if form else []
    times = []
    with tempfile.TemporaryDirectory() as elsewhere:  # so that the installed package is imported, not the sources
        for _ in range(bench.args.rounds + 1):  # the first run warms the page cache
            start = time.perf_counter()
            done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
            times.append(time.perf_counter() - start)
    error = {"error": done.stderr.strip()[-300:]} if done.returncode else {}
    values = {"seconds": round(median(times[1:]), 3), "limit": limit, **error}
    bench.save(shape, STARTUP, None, not done.returncode, weights=form or "as stored", **values)
