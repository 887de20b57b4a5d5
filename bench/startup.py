"""Measure how long the command line takes to answer: python bench/startup.py MODEL

Prints medians of whole processes with a warm page cache; runs of a bare interpreter alternate with them.
"""

from __future__ import annotations

import subprocess
import sys

from common import emit, median_seconds

ROUNDS = 7


def main() -> None:
    model = sys.argv[1]
    ridgeline = [sys.executable, "-m", "ridgeline"]
    cases = {
        "bare python": [sys.executable, "-c", "pass"],
        "import ridgeline": [sys.executable, "-c", "import ridgeline"],
        "--help": [*ridgeline, "--help"],
        "inspect": [*ridgeline, "inspect", model],
        "doctor": [*ridgeline, "doctor"],
        "import torch": [sys.executable, "-c", "import torch"],
        "generate, one token": [*ridgeline, "generate", "-m", model, "Once upon a time", "--max-tokens", "1"],
    }
    for case, command in cases.items():

        def run(command: list[str] = command) -> None:
            subprocess.run(command, check=True, capture_output=True)

        run()  # warms the page cache
        emit(f"startup: {case}", True, seconds=round(median_seconds(run, ROUNDS), 3))


if __name__ == "__main__":
    main()
