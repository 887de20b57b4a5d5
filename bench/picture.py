"""Draw a command's output as a picture for the docs: python bench/picture.py OUT.svg COMMAND ..."""

from __future__ import annotations

import subprocess
import sys

from rich.console import Console
from rich.text import Text


def main() -> None:
    out, *command = sys.argv[1:]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=None)
    console = Console(record=True, width=112, file=sys.stderr)
    console.print(Text.from_ansi(f"$ {' '.join(command)}\n{run.stdout.rstrip()}"))
    console.save_svg(out, title="ridgeline")


if __name__ == "__main__":
    main()
