"""A progress bar for long work on files, counted in bytes or elements; silent where not wanted."""

from __future__ import annotations

from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ByteProgress:
    """`with ByteProgress("convert", total, show=True) as bar: ... bar.advance(n)`."""

    def __init__(self, title: str, total: int, show: bool) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            disable=not show,
        )
        self._total = total
        self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._bar.update(self._task, completed=self._total)
        self._bar.stop()

    def advance(self, amount: int) -> None:
        """`amount` more is done."""
        self._bar.advance(self._task, amount)
