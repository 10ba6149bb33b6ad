"""Tables of the plan, without lines around the cells."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table_of(title: str, rows: Iterable[dict[str, str]]) -> Table:
    """Each row has the headings of all as its keys; names are at the left, numbers at the right."""
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        padding=(0, 0, 0, 1),
    )
    for row in rows:
        if not table.columns:
            for heading in row:
                justify = "left" if heading in ("device", "") else "right"
                table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        table.add_row(*row.values())
    return table
