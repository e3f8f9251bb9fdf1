"""Events of long computations, and a progress bar that displays them."""

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

_UNITS: Final = {
    **dict.fromkeys(("pilot", "particles", "replications", "ranks"), ("runs", 1.0)),
    **dict.fromkeys(("keys", "entries", "blocks"), ("M entries", 1e-6)),
    "rows": ("rows", 1.0),
}
"""Units and factors of phases that do not count cycles."""

UPDATE_INTERVAL: Final = 0.2
"""Seconds between two updates of the display in a notebook."""
NOTE_WIDTH: Final = 30
"""Characters of a message that fit next to the bar in a terminal of 80 columns."""


@dataclass(frozen=True)
class RunEvent:
    """Progress of a run.

    Attributes
    ----------
    phase
        Phase of the run, such as ``"tune"`` or ``"draw"``.
    done, total
        Numbers of cycles over all chains (iterations in the warm start, entries in a conversion);
        a total of 0 is unknown.
    log_likelihood
        Most recent log-likelihood, or NaN.
    message
        Further information.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> events = []
    >>> trace = dfac.sample(
    ...     V, dfac.TweedieNMF(2), draws=10, tune=10, callback=events.append, progressbar=False
    ... )
    >>> events[-1].phase, events[-1].done == events[-1].total
    ('draw', True)
    """

    phase: Phase
    done: float = 0.0
    total: float = 0.0
    log_likelihood: float = math.nan
    message: str = ""


OnEvent = Callable[[RunEvent], None]


def ignore(event: RunEvent) -> None:
    """Ignore an event."""


def counted(
    function: Callable[[Any, Any], R],
    count: int,
    on_event: OnEvent,
    message: Callable[[R], str] = lambda result: "",
) -> Callable[[Any, Any], R]:
    """Wrap a function that is mapped over items so that it reports every completed item.

    Parameters
    ----------
    function
        Function of an item and a workspace.
    count
        Number of items.
    on_event
        Called with an event after every item.
    message
        Message of the event, from the result for the item.
    """
    done, lock = 0, threading.Lock()

    def reporting(item: Any, work: Any) -> R:
        nonlocal done
        result = function(item, work)
        with lock:
            done += 1
            on_event(RunEvent("draw", done, count, message=message(result)))
        return result

    return reporting


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        unit, multiple = _UNITS.get(task.description, ("cycles", 1.0))
        return Text(f"{speed * multiple:.4g} {unit}/s" if speed else "", style="cyan")


def _column(width: int) -> Column:
    """Return a column that keeps its width in a narrow terminal, where the last one shrinks."""
    return Column(no_wrap=True, min_width=width)


@contextmanager
def progress_bar(enabled: bool = True, callback: OnEvent | None = None) -> Iterator[OnEvent]:
    """Show a line per phase on standard error: share done, rate, time left, log-likelihood.

    In a notebook the lines are HTML in the cell and need no widgets. A callback receives every
    event, too.
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
    """Show the lines of the progress bar, if enabled."""
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
    """Show the lines of a bar in the current cell of a notebook."""
    from IPython.display import display

    last_update = 0.0
    handle = display(_as_html(bar), raw=True, display_id=True)

    def show(event: RunEvent) -> None:
        nonlocal last_update
        listen(event)
        if time.monotonic() - last_update >= UPDATE_INTERVAL:
            last_update = time.monotonic()
            handle.update(_as_html(bar), raw=True)

    try:
        yield show
    finally:
        handle.update(_as_html(bar), raw=True)


def _as_html(bar: Progress) -> dict[str, str]:
    """Return the lines as HTML, and as text for front ends without HTML."""
    rows = []
    for task in bar.tasks:
        bounded, seconds = task.total is not None, task.time_remaining
        rate, note = _RateColumn().render(task).plain, str(task.fields["note"])
        percent = f"{task.percentage:.0f} %" if bounded else ""
        remaining = f"{seconds:.0f} s left" if seconds else ""
        fraction = task.percentage / 100 if bounded else None
        rows.append((task.description, markup.bar(fraction), percent, rate, remaining, note))
    text = "\n".join("  ".join(filter(None, (row[0], *row[2:]))) for row in rows)
    return {"text/html": markup.table(rows, numbers=(2, 3)), "text/plain": text}
