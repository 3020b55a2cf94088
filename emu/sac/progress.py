"""How far a run is, on a terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Iterator


class TerminalProgress:
    """A progress bar on stderr, only on a terminal.

    Args:
        total: ticks of the run.
    """

    def __init__(self, total: int) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("start the workers", total=total)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the bar is on the screen."""
        with self._bar:
            yield

    def phase(self, text: str) -> None:
        """A new phase begins."""
        self._bar.update(self._task, description=text)

    def tick(self) -> None:
        """One unit is done."""
        self._bar.advance(self._task)
