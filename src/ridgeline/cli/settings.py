"""The table of an engine's settings, for whoever starts one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ridgeline.plan import EngineConfig


def settings_table(name: str, config: EngineConfig, weight_bytes: int, *, on_host: bool = True) -> RenderableType:
    """Every setting of an engine, its value, reason and override; then where the memory goes."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table

    from ridgeline.spec.text import num_bytes

    table = Table(title=name, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in ("setting", "value", "why", "override"):
        table.add_column(column, justify="right" if column == "value" else "left", overflow="fold")
    for s in config.settings():
        table.add_row(s.name, s.value, s.reason, s.override)
    memory = Table(title="memory", box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    memory.add_column("for")
    memory.add_column("takes", justify="right")
    for what, size in config.memory(weight_bytes, on_host=on_host):
        memory.add_row(what, num_bytes(size))
    return Group(table, memory)
