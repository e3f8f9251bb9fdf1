"""What a progress bar shows in a terminal of eighty columns."""

import io
import time

import pytest
from rich.console import Console

from daskfactor import progress
from daskfactor.progress import NOTE_WIDTH, RunEvent, progress_bar


@pytest.fixture
def screen(monkeypatch):
    shown = io.StringIO()

    def console(stderr):
        assert stderr
        return Console(file=shown, width=80, force_terminal=True, color_system=None)

    monkeypatch.setattr(progress, "Console", console)
    return shown


def line_of(screen, phase):
    """The line of a phase as it was drawn last."""
    return [line for line in screen.getvalue().splitlines() if phase in line][-1]


def test_a_message_of_the_full_width_is_shown_whole(screen):
    message = "ring: blocks of about 0.53 ms".ljust(NOTE_WIDTH, ".")
    with progress_bar() as on_event:
        on_event(RunEvent("load", 0, 1))
        on_event(RunEvent("load", 1, 1, message=message))
        on_event(RunEvent("draw", 10, 20, -1234567.0))
    assert message in line_of(screen, "load")
    assert "50 %" in line_of(screen, "draw")
    assert "log-likelihood -1.23457e+06" in line_of(screen, "draw")
    with progress_bar(False) as on_event:
        on_event(RunEvent("load", 0, 1))
    assert on_event is progress.ignore


def test_entries_are_counted_in_millions_and_a_whole_may_be_unknown(screen):
    with progress_bar() as on_event:
        on_event(RunEvent("keys", 0))
        on_event(RunEvent("keys", 5e6))
        first = screen.getvalue()
        for done in (2e6, 4e6, 5e6):
            on_event(RunEvent("keys", done, 5e6))
            time.sleep(0.01)
        on_event(RunEvent("entries", 1, 2))
    assert "%" not in first
    assert "M entries/s" in line_of(screen, "keys")
    assert "100 %" in line_of(screen, "keys")
    assert "50 %" in line_of(screen, "entries ")
