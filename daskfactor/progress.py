"""What long work tells of itself while it goes on, and a progress bar that shows it."""

import math
import threading
import time
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

from daskfactor import markup

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
    "ranks",
    "weights",
    "keys",
    "entries",
    "blocks",
    "rows",
]

_MILLION_ENTRIES = ("M entries", 1e-6)
_UNITS: Final = {
    "pilot": ("runs", 1.0),
    "particles": ("runs", 1.0),
    "replications": ("runs", 1.0),
    "ranks": ("runs", 1.0),
    "keys": _MILLION_ENTRIES,
    "entries": _MILLION_ENTRIES,
    "blocks": _MILLION_ENTRIES,
    "rows": ("rows", 1.0),
}
"""What is counted in a phase where it is not cycles, and in which multiple."""

REDRAWN: Final = 0.2
"""Seconds between two pictures in a notebook."""
NOTE_WIDTH: Final = 30
"""Characters of a message that fit beside the bar in a terminal of 80."""


@dataclass(frozen=True)
class RunEvent:
    """A step of a run.

    Attributes
    ----------
    phase
        What the run does, such as ``"tune"`` or ``"draw"``.
    done, total
        Cycles over all chains (iterations in the warm start, entries in a conversion); a total
        of 0 is one that nobody knows.
    log_likelihood
        The latest that was computed, or NaN.
    message
        What else is to be told.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> seen = []
    >>> trace = dfac.sample(
    ...     V, dfac.TweedieNMF(2), draws=10, tune=10, callback=seen.append, progressbar=False
    ... )
    >>> seen[-1].phase, seen[-1].done == seen[-1].total
    ('draw', True)
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
def progress_bar(enabled: bool = True, callback: OnEvent | None = None) -> Iterator[OnEvent]:
    """Show a line per phase on standard error: share done, rate, time left, log-likelihood.

    In a notebook the lines are HTML in the cell, for which no widgets are needed. A callback
    hears of every event, too.
    """
    with _lines(enabled) as show:
        if callback is None:
            yield show
            return

        def on_event(event: RunEvent) -> None:
            show(event)
            callback(event)

        yield on_event


@contextmanager
def _lines(enabled: bool) -> Iterator[OnEvent]:
    """Show lines, unless nobody wants them."""
    if not enabled:
        yield ignore
        return
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}", table_column=_column(10)),
        BarColumn(bar_width=10, table_column=_column(10)),
        TaskProgressColumn("{task.percentage:>3.0f} %", table_column=_column(5)),
        _RateColumn(table_column=_column(13)),
        TimeRemainingColumn(compact=True, table_column=_column(5)),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, max_width=NOTE_WIDTH)),
        console=console,
        disable=console.is_jupyter,
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

    if console.is_jupyter:
        with _in_cell(bar, listen) as show:
            yield show
    else:
        with bar:
            yield listen


@contextmanager
def _in_cell(bar: Progress, listen: OnEvent) -> Iterator[OnEvent]:
    """Show the lines of a bar in the cell of a notebook that is running."""
    from IPython.display import display

    drawn = 0.0
    handle = display(_as_html(bar), raw=True, display_id=True)

    def show(event: RunEvent) -> None:
        nonlocal drawn
        listen(event)
        if time.monotonic() - drawn >= REDRAWN:
            drawn = time.monotonic()
            handle.update(_as_html(bar), raw=True)

    try:
        yield show
    finally:
        handle.update(_as_html(bar), raw=True)


def _as_html(bar: Progress) -> dict[str, str]:
    """The lines as a display's data, as text also for what shows no HTML."""
    rows = []
    for task in bar.tasks:
        known, left = task.total is not None, task.time_remaining
        rate, note = _RateColumn().render(task).plain, str(task.fields["note"])
        percent = f"{task.percentage:.0f} %" if known else ""
        rest = f"{left:.0f} s left" if left else ""
        share = task.percentage / 100 if known else None
        rows.append((task.description, markup.bar(share), percent, rate, rest, note))
    text = "\n".join("  ".join(filter(None, (row[0], *row[2:]))) for row in rows)
    return {"text/html": markup.table(rows, numbers=(2, 3)), "text/plain": text}
