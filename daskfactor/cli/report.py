"""What reaches the terminal: one sentence for an error, an exit code, JSON."""

import json
import math
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from daskfactor.errors import (
    DaskfactorError,
    DaskfactorWarning,
    DivergenceError,
    EngineError,
    StoreError,
)

if TYPE_CHECKING:
    import xarray as xr

UNEXPECTED = 1
REFUSED = 3
STORE = 4
DIVERGED = 5
INTERRUPTED = 130

OPTIONS: set[str] = set()
"""Names of all options of the commands, as Python has them; the application fills them in."""


def exit_code(error: BaseException) -> int:
    """Find the exit code that stands for an error."""
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


def _in_words_of_the_shell(text: str) -> str:
    """Rewrite arguments of Python, such as ``overwrite=True``, as options of the commands."""

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("\"'")
        if name not in OPTIONS:
            return match[0]
        told = f"--{name.replace('_', '-')}"
        return told if value == "True" else f"{told} {value}"

    text = text.replace("resume(path, V=...)", "daskfactor resume RUN --data FILE")
    return re.sub(r"""\b([a-z_]+)=(True|"\w+"|'\w+'|\d+(?:\.\d+)?)""", option, text)


def _fail(error: BaseException, text: str, debug: bool) -> None:
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    typer.secho("error: ", fg="red", bold=True, err=True, nl=False)
    typer.echo(" ".join(_in_words_of_the_shell(text).split()), err=True)
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
            typer.echo(_in_words_of_the_shell(" ".join(str(message).split())), err=True)
        else:
            usual(message, category, filename, lineno, file, line)

    return show


def print_run(tree: "xr.DataTree", store: str, as_json: bool) -> None:
    """Print what a run was and came to, as a table or as JSON."""
    from rich.console import Console

    from daskfactor.cli.summary import run_summary, summary_table

    summary = run_summary(tree, store)
    if as_json:
        print_json(summary)
    else:
        Console().print(summary_table(summary))


def print_json(values: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; numbers that JSON does not know become null."""
    typer.echo(json.dumps(plain(values), indent=2, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """Turn a value into JSON's own types."""
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
