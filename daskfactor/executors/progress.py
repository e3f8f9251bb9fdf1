"""What a run tells of itself while it goes on, and a progress bar that shows it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

Phase = Literal[
    "compile", "load", "warm start", "tune", "draw", "save", "pilot", "particles", "weights"
]

UNITS: Final = {"pilot": "runs", "particles": "runs"}
"""What is counted in a phase, where it is not cycles."""


@dataclass(frozen=True)
class RunEvent:
    """A step of a run.

    ``done`` and ``total`` count cycles over all chains (iterations in the warm
    start); ``log_likelihood`` is the latest that was computed, or NaN.
    """

    phase: Phase
    done: float = 0.0
    total: float = 0.0
    log_likelihood: float = math.nan
    message: str = ""


OnEvent = Callable[[RunEvent], None]


def ignore(event: RunEvent) -> None:
    """A listener for runs that nobody watches."""


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit = UNITS.get(task.description, "cycles")
        return Text(f"{speed:.4g} {unit}/s" if speed else "", style="cyan")


def _column(width: int) -> Column:
    """A column that keeps its width in a narrow terminal; the last one gives way."""
    return Column(no_wrap=True, min_width=width)


@contextmanager
def progress_bar(enabled: bool = True) -> Iterator[OnEvent]:
    """A progress bar on standard error: phase, share done, rate, time left, log-likelihood."""
    if not enabled:
        yield ignore
        return
    bar = Progress(
        TextColumn("{task.description}", table_column=_column(10)),
        BarColumn(bar_width=10, table_column=_column(10)),
        TextColumn("{task.percentage:>3.0f} %", table_column=_column(5)),
        _RateColumn(table_column=_column(13)),
        TimeRemainingColumn(compact=True, table_column=_column(5)),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, max_width=30)),
        console=Console(stderr=True),
    )
    tasks: dict[str, Task] = {}

    def listen(event: RunEvent) -> None:
        if event.phase not in tasks:
            for other in tasks.values():
                bar.update(other.id, completed=other.total)
            number = bar.add_task(event.phase, total=event.total or 1.0, note="")
            tasks[event.phase] = bar.tasks[bar.task_ids.index(number)]
        task = tasks[event.phase]
        note = event.message
        if math.isfinite(event.log_likelihood):
            note = f"log-likelihood {event.log_likelihood:.6g}"
        bar.update(
            task.id,
            completed=event.done,
            total=event.total or 1.0,
            note=note or task.fields["note"],
        )

    with bar:
        yield listen
