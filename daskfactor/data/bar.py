"""A progress bar for passes over entries, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

Report = Callable[[str, int, int | None], None]
"""Called with a phase, what is done, and the whole, None where nobody knows it."""


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed / 1e6:.3g} M entries/s" if speed else "", style="cyan")


def _column(width: int) -> Column:
    return Column(no_wrap=True, min_width=width)


@contextmanager
def entries_bar(enabled: bool) -> Iterator[Report]:
    """A line per phase: share done, entries a second, time left."""
    if not enabled:
        yield lambda phase, done, total: None
        return
    bar = Progress(
        TextColumn("{task.description}", table_column=_column(10)),
        BarColumn(bar_width=10, table_column=_column(10)),
        TextColumn("{task.fields[share]:>5}", table_column=_column(5)),
        _RateColumn(table_column=_column(17)),
        TimeRemainingColumn(compact=True, table_column=_column(5)),
        console=Console(stderr=True),
    )
    tasks: dict[str, TaskID] = {}

    def report(phase: str, done: int, total: int | None) -> None:
        if phase not in tasks:
            tasks[phase] = bar.add_task(phase, total=total, share="")
        share = f"{done / total:.0%}" if total else ""
        bar.update(tasks[phase], completed=done, total=total, share=share.replace("%", " %"))

    with bar:
        yield report
