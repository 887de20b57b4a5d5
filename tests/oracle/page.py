"""Write the parts of docs/models.md that follow from the catalog, between marks in the page.

`python -m oracle.page`, with tests/ on the path, writes the largest published model of each type that `ridgeline plan`
knows.
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.archs import ENCODERS, FAMILIES
from ridgeline.catalog.models import find_model, published

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- published: begin -->", "<!-- published: end -->"
HEAD = "| model_type | largest published model in the catalog | parameters | used per token |\n|---|---|---|---|\n"


def published_rows() -> dict[str, str]:
    """Return a line of the table for each model type that has a published model, by model type."""
    largest: dict[str, tuple[int, str]] = {}
    for name, entry in published().items():
        kind = str(entry["config"].get("model_type"))
        if kind in FAMILIES or kind in ENCODERS:
            largest[kind] = max(largest.get(kind, (0, "")), (find_model(name).spec.num_params(), name))
    rows = {}
    for kind in sorted(largest):
        params, name = largest[kind]
        active = find_model(name).spec.num_active_params()
        rows[kind] = f"| `{kind}` | {name} | {params:,} | {active:,} |"
    return rows


def written_rows() -> dict[str, str]:
    """Return the lines of the table in the page, by model type."""
    lines = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].splitlines()
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    table = HEAD + "\n".join(published_rows().values())
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
