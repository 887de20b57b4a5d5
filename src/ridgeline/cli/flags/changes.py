"""The flags of commands that change a model and write it as a checkpoint."""

from __future__ import annotations

from typing import Annotated

from ridgeline.cli.option import option

Out = Annotated[str, option("--out", help="Folder to write. It must not exist.")]
Format = Annotated[
    str,
    option(
        "--format",
        help="Config of the result: family (the original's, which transformers opens), ridgeline (our own) or auto "
        "(family where it can say the sizes). Default: auto.",
    ),
]
