"""Give the text on which models are measured: a package of the running Python's standard library.

The built-in model was trained on that library. Another model may be measured on it too, and only differences of models
are judged, never how well a model knows this text.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

FEW = ("events.py", "tasks.py")  # of `--quick`: some 15,000 tokens of the built-in model


def texts(quick: bool) -> list[Path]:
    """Return the files of Python's asyncio package, or a few of them."""
    folder = Path(sysconfig.get_path("stdlib")) / "asyncio"
    return [folder / name for name in FEW] if quick else sorted(folder.glob("*.py"))
