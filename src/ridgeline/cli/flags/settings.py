"""Make the tables of an engine's settings and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Table
    from ridgeline.settings import EngineConfig


def settings_tables(name: str, config: EngineConfig, weight_bytes: int, *, on_host: bool = True) -> tuple[Table, Table]:
    """Return a table of settings with value, reason and override, and a table of the memory that the model needs."""
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
    memory = Table("memory", (Column("use", right=False), Column("size")))
    for what, size in config.memory(weight_bytes, on_host=on_host):
        memory.add_row(what, num_bytes(size))
    return settings, memory
