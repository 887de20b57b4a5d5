"""Make the tables of an engine's settings and memory."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ridgeline.cli.show.tables import Table
    from ridgeline.settings import EngineConfig


def settings_tables(
    name: str, config: EngineConfig, weight_bytes: int, *, on_host: bool = True, program_bytes: int | None = None,
    resident: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> tuple[Table, Table]:  # fmt: skip
    """Return a table of settings with value, reason and override, and a table of the memory that the model needs.

    program_bytes: see `EngineConfig.memory`. resident: columns of the memory table beside the one with the most that
    each use can take: by the name of the column, the bytes that are resident by use.
    """
    from ridgeline.cli.show.tables import Column, Table
    from ridgeline.spec.text import num_bytes

    settings = Table(
        name,
        (
            Column("setting", right=False), Column("value"), Column("why", right=False, wraps=True),
            Column("override", right=False, drop=1),
        ),
    )  # fmt: skip
    for s in config.settings():
        settings.add_row(s.name, s.value, s.reason, s.override)
    memory = Table("memory", (Column("use", right=False), *map(Column, resident), Column("at most")))
    for use, most in config.memory(weight_bytes, on_host=on_host, program_bytes=program_bytes):
        now = (num_bytes(column[use]) if use in column else "" for column in resident.values())
        memory.add_row(use, *now, num_bytes(most))
    return settings, memory


def huge_line() -> str:
    """Return a line that says whether pages of state lie in huge pages of the system, and why."""
    from ridgeline.spec.text import num_bytes
    from ridgeline.system import huge_pages

    size, reason = huge_pages()
    if size:
        return f"pages of state lie in huge pages of {num_bytes(size)}: {reason}"
    return f"pages of state lie in no huge pages, so that prompts take slightly longer: {reason}"
