"""Print what Ridgeline and some of its extras (dev,ray) need, a line each: what pip can install before it is built."""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]


def needed(extra: str) -> list[str]:
    """Return the requirements of an extra, those of the extras that it names included."""
    found = []
    for line in project["optional-dependencies"][extra]:
        own = re.fullmatch(r"ridgeline\[(.*)\]", line)
        found += [one for name in own[1].split(",") for one in needed(name)] if own else [line]
    return found


print("\n".join([*project["dependencies"], *(line for extra in sys.argv[1].split(",") for line in needed(extra))]))
