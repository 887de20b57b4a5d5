"""Time a new user's path: three commands from an empty folder to the first answer of a GGUF file.

    python bench/first_answer.py --python python3.11 python3.12 --install ridgeline-*.whl model.gguf

For each Python, in a new folder: `python -m venv`, `pip install` and `ridgeline generate -m MODEL`. The times include
the downloads of pip, so they depend on the network, and on pip's cache. --install takes a wheel or the folder of the
sources. With --without-compiler no command finds a compiler, so the sources give a package without kernels. The answers
must be equal for all Pythons, or the program fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = ["def __init__(self, path):", "--temperature", "0", "--max-tokens", "16"]


def path_of(python: str, install: str, model: str, env: dict[str, str]) -> tuple[list[float], str]:
    """Return the seconds of each command, and the answer. Raises CalledProcessError if a command fails."""
    seconds, answer = [], ""
    with tempfile.TemporaryDirectory() as folder:
        bin_folder = Path(folder) / "env" / "bin"
        for command in (
            [python, "-m", "venv", f"{folder}/env"],
            [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", install],
            [str(bin_folder / "ridgeline"), "generate", "-m", model, *PROMPT],
        ):
            start = time.perf_counter()
            done = subprocess.run(command, env=env, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
            seconds.append(time.perf_counter() - start)
            answer = done.stdout
    return seconds, answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="A GGUF file.")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="Interpreters. Default: this one.")
    parser.add_argument("--install", required=True, help="A wheel of Ridgeline, or the folder of its sources.")
    parser.add_argument("--without-compiler", action="store_true", help="Name compilers that do not exist (CC, CXX).")
    given = parser.parse_args()
    env = dict(os.environ)
    if given.without_compiler:
        env |= {"CC": "/no/compiler", "CXX": "/no/compiler"}
    answers = set()
    print(f"{'python':30}{'venv':>8}{'install':>9}{'answer':>8}{'all':>8}  (seconds)")
    for python in given.python:
        seconds, answer = path_of(python, str(Path(given.install).resolve()), str(Path(given.model).resolve()), env)
        answers.add(answer)
        print(f"{python[-30:]:30}{seconds[0]:8.1f}{seconds[1]:9.1f}{seconds[2]:8.1f}{sum(seconds):8.1f}", flush=True)
    if len(answers) > 1:
        raise SystemExit(f"the answers differ: {answers}")
    print(f"the answer: {answers.pop()!r}")


if __name__ == "__main__":
    main()
