"""What reaches the terminal: one sentence for an error, an exit code, JSON."""

import json
import math
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import typer

from daskfactor.errors import (
    DaskfactorError,
    DaskfactorWarning,
    DivergenceError,
    EngineError,
    StoreError,
)

UNEXPECTED = 1
REFUSED = 3
STORE = 4
DIVERGED = 5
INTERRUPTED = 130


def exit_code(error: BaseException) -> int:
    """The exit code that stands for an error."""
    match error:
        case KeyboardInterrupt():
            return INTERRUPTED
        case DivergenceError():
            return DIVERGED
        case StoreError():
            return STORE
        case EngineError():
            return UNEXPECTED
        case DaskfactorError():
            return REFUSED
        case OSError():
            return STORE
        case _:
            return UNEXPECTED


@contextmanager
def reporting(debug: bool = False, store: str | None = None) -> Iterator[None]:
    """Turn an error into one sentence on stderr and an exit code, a warning into one line.

    Parameters
    ----------
    debug : bool
        Print the traceback, too.
    store : str, optional
        The store that a run is writing; after Ctrl-C the reader is told how to go on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", DaskfactorWarning)
        show = warnings.showwarning
        warnings.showwarning = _show_warning(show)
        try:
            yield
        except KeyboardInterrupt as error:
            _fail(error, _after_interrupt(store), debug)
        except (typer.Exit, typer.Abort):
            raise
        except DaskfactorError as error:
            _fail(error, str(error), debug)
        except OSError as error:
            _fail(error, _file_trouble(error), debug)
        except Exception as error:  # noqa: BLE001 - the last stop before the user
            text = f"unexpected {type(error).__name__}: {error} (--debug shows where)"
            _fail(error, text, debug)


def _after_interrupt(store: str | None) -> str:
    if store is None:
        return "interrupted"
    if "://" in store or Path(store).exists():
        return f"interrupted; go on with: daskfactor resume {store}"
    return "interrupted before anything was written"


def _file_trouble(error: OSError) -> str:
    if error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return str(error) or type(error).__name__


def _fail(error: BaseException, text: str, debug: bool) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(" ".join(text.split()), err=True)
    raise typer.Exit(exit_code(error)) from None


def _show_warning(usual: Any) -> Any:
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, DaskfactorWarning):
            typer.secho("note: ", fg="yellow", err=True, nl=False)
            typer.echo(" ".join(str(message).split()), err=True)
        else:
            usual(message, category, filename, lineno, file, line)

    return show


def print_json(values: Mapping[str, Any]) -> None:
    """One JSON object on stdout; numbers that JSON does not know become null."""
    typer.echo(json.dumps(plain(values), indent=2, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """A value in JSON's own types."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item") and not hasattr(value, "__len__"):
        value = value.item()
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
