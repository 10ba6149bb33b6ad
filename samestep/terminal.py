"""Rich's console, for text of any origin.

Names, texts and other programs' output are printed as they are: `[red]` is no markup in them, and
their control characters are shown, not obeyed. Only colors and cursor moves of Rich itself reach
the terminal. In a stdout that is no terminal, texts stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from samestep.environment import visible


class Console(rich.console.Console):
    """A console without markup, unless it is asked for; see the module.

    Args:
        options: of `rich.console.Console`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    @property
    def file(self) -> IO[str]:
        # Below a progress line, stdout is a proxy of Rich between two of `environment.Output`.
        file = self._file or super().file
        while hasattr(file, "rich_proxied_file"):
            file = file.rich_proxied_file
        return file

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render_str(self, text: str, **options: Any) -> Text:
        # Before the width is measured.
        return super().render_str(self._shown(text), **options)

    def render(
        self, renderable: Any, options: rich.console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(self._shown(segment.text), segment.style)

    def _shown(self, text: str) -> str:
        return visible(text) if self.stderr or self.is_terminal else text

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # as from any other write; Rich would exit with code 1
