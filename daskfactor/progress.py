"""What long work tells of itself while it goes on, and a progress bar that shows it."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

R = TypeVar("R")

Phase = Literal[
    "compile",
    "load",
    "warm start",
    "tune",
    "draw",
    "save",
    "pilot",
    "particles",
    "replications",
    "weights",
    "keys",
    "entries",
    "blocks",
]

_MILLION_ENTRIES = ("M entries", 1e-6)
_UNITS: Final = {
    "pilot": ("runs", 1.0),
    "particles": ("runs", 1.0),
    "replications": ("runs", 1.0),
    "keys": _MILLION_ENTRIES,
    "entries": _MILLION_ENTRIES,
    "blocks": _MILLION_ENTRIES,
}
"""What is counted in a phase where it is not cycles, and in which multiple."""

NOTE_WIDTH: Final = 30
"""Characters of a message that fit beside the bar in a terminal of 80."""


@dataclass(frozen=True)
class RunEvent:
    """A step of a run.

    ``done`` and ``total`` count cycles over all chains (iterations in the warm
    start, entries in a conversion); a total of 0 is one that nobody knows.
    ``log_likelihood`` is the latest that was computed, or NaN.
    """

    phase: Phase
    done: float = 0.0
    total: float = 0.0
    log_likelihood: float = math.nan
    message: str = ""


OnEvent = Callable[[RunEvent], None]


def ignore(event: RunEvent) -> None:
    """Listen to a run that nobody watches."""


def counted(
    function: Callable[[Any, Any], R],
    count: int,
    on_event: OnEvent,
    told: Callable[[R], str] = lambda found: "",
) -> Callable[[Any, Any], R]:
    """Wrap a function that is mapped over items so that it tells of every item that is done."""
    done, lock = 0, threading.Lock()

    def telling(item: Any, work: Any) -> R:
        nonlocal done
        found = function(item, work)
        with lock:
            done += 1
            on_event(RunEvent("draw", done, count, message=told(found)))
        return found

    return telling


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit, multiple = _UNITS.get(task.description, ("cycles", 1.0))
        return Text(f"{speed * multiple:.4g} {unit}/s" if speed else "", style="cyan")


def _column(width: int) -> Column:
    """Make a column that keeps its width in a narrow terminal; the last one gives way."""
    return Column(no_wrap=True, min_width=width)


@contextmanager
def progress_bar(enabled: bool = True) -> Iterator[OnEvent]:
    """Show a line per phase on standard error: share done, rate, time left, log-likelihood."""
    if not enabled:
        yield ignore
        return
    bar = Progress(
        TextColumn("{task.description}", table_column=_column(10)),
        BarColumn(bar_width=10, table_column=_column(10)),
        TaskProgressColumn("{task.percentage:>3.0f} %", table_column=_column(5)),
        _RateColumn(table_column=_column(13)),
        TimeRemainingColumn(compact=True, table_column=_column(5)),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, max_width=NOTE_WIDTH)),
        console=Console(stderr=True),
    )
    tasks: dict[str, Task] = {}

    def listen(event: RunEvent) -> None:
        if event.phase not in tasks:
            for other in tasks.values():
                bar.update(other.id, completed=other.total)
            number = bar.add_task(event.phase, total=event.total or None, note="")
            tasks[event.phase] = bar.tasks[bar.task_ids.index(number)]
        task = tasks[event.phase]
        note = event.message
        if math.isfinite(event.log_likelihood):
            note = f"log-likelihood {event.log_likelihood:.6g}"
        bar.update(
            task.id,
            completed=event.done,
            total=event.total or None,
            note=note or task.fields["note"],
        )

    with bar:
        yield listen
