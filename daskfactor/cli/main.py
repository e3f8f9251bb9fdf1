"""The command ``daskfactor``: its commands, what reaches the terminal, and exit codes."""

import inspect
import json
import math
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import is_dataclass
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option
from typer.models import OptionInfo

from daskfactor.cli import convert, fit, predict, show
from daskfactor.cli import options as o
from daskfactor.cli.verb_options import Shows, option
from daskfactor.cli.wording import in_shell
from daskfactor.errors import (
    DaskfactorError,
    DaskfactorWarning,
    DivergenceError,
    EngineError,
    StoreError,
)
from daskfactor.markup import visible


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


EXIT_CODES = (
    (Terminated, 143),
    (KeyboardInterrupt, 130),
    (DivergenceError, 5),
    (StoreError, 4),
    (EngineError, 1),
    (DaskfactorError, 3),
    (OSError, 4),
    (Exception, 1),
)
"""The first class that an error belongs to says how the command ends."""


@contextmanager
def reporting(options: Mapping[str, Any], debug: bool) -> Iterator[None]:
    """Turn an error into one sentence on stderr and an exit code, a warning into one line.

    Arguments of Python that a sentence names are written as options of the command.
    """

    def say(head: str, color: str, text: str) -> None:
        typer.secho(f"{head}: ", fg=color, bold=head == "error", err=True, nl=False)
        said = " ".join(in_shell(text, options=options).split())
        typer.echo(visible(said), err=True)

    notes: set[str] = set()

    with warnings.catch_warnings(), terminating():
        warnings.simplefilter("always", DaskfactorWarning)
        usual = warnings.showwarning

        def show_warning(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if debug and not issubclass(category, DaskfactorWarning):
                usual(message, category, *rest)
            elif str(message) not in notes:
                notes.add(str(message))
                say("note", "yellow", str(message))

        warnings.showwarning = show_warning  # type: ignore[assignment]
        try:
            yield
        except (typer.Exit, typer.Abort):
            raise
        except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - the last stop
            if debug:
                traceback.print_exception(error, file=sys.stderr)
            say("error", "red", _sentence(error))
            raise typer.Exit(next(n for kind, n in EXIT_CODES if isinstance(error, kind))) from None


@contextmanager
def terminating() -> Iterator[None]:
    """Have SIGTERM raise `Terminated`, where nothing else is done about it."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def stop(*_: Any) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _sentence(error: BaseException) -> str:
    match error:
        case DaskfactorError():
            return str(error)
        case KeyboardInterrupt():
            return str(error) or ("terminated" if isinstance(error, Terminated) else "interrupted")
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror or error}"
        case OSError():
            return str(error) or type(error).__name__
        case _:
            return f"unexpected {type(error).__name__}: {error} (--debug shows where)"


def plain(value: Any) -> Any:
    """Turn a value into JSON's own types; numbers that JSON does not know become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def command(function: Callable[..., o.Answer | None]) -> Callable[..., None]:
    """Make a command of a function; it gains ``--json`` and ``--debug``.

    A parameter whose type is a group of options (a dataclass, or a table of parameters of a verb)
    becomes these options, under a headline of their own where the group names one. The function
    returns the values that ``--json`` prints, and what people are shown instead: text or tables;
    None if it has written its result itself.
    """
    options = _options_of(function)
    for name, kind in (("as_json", o.Json), ("debug", o.Debug)):
        options.setdefault(name, option(name, kind, False))

    @wraps(function)
    def run(*, debug: bool, **given: Any) -> None:
        with reporting(options, debug):
            answer = _call(function, given)
            if answer is None:
                return
            values, *shown = answer
            if given["as_json"]:
                text = json.dumps(plain(values), indent=2, ensure_ascii=False, allow_nan=False)
                shown = [text]
            for part in shown:
                if isinstance(part, str):
                    typer.echo(visible(part))
                else:
                    Console().print(part)

    run.__signature__ = inspect.Signature([*options.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in options.items()}
    return run


def _options_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the options of a command, or of a group under its headline."""
    options: dict[str, inspect.Parameter] = {}
    panel = getattr(function, "panel", None)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = parameter.annotation
        if is_dataclass(hint):
            options |= _options_of(hint)  # type: ignore[arg-type]
        elif isinstance(shows := hint.__metadata__[0], Shows):
            options |= shows.options()
        else:
            about = copy(shows)
            if isinstance(about, OptionInfo):
                about.rich_help_panel = panel
            options[name] = option(name, Annotated[hint.__origin__, about], parameter.default)
    return options


def _call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call a command, or make a group, with its options."""
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = parameter.annotation
        if is_dataclass(hint):
            arguments[name] = _call(hint, given)  # type: ignore[arg-type]
        elif isinstance(shows := hint.__metadata__[0], Shows):
            arguments[name] = {own: given[own] for own in shows.parameters}
        else:
            arguments[name] = given[name]
    return function(**arguments)


app = typer.Typer(
    name="daskfactor",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (
    convert.demo,
    convert.convert,
    fit.fit,
    fit.estimate_cost,
    fit.resume,
    fit.particles,
    predict.predict,
    predict.recommend,
    predict.transform,
    fit.select_rank,
    show.info,
    show.plot,
    show.report,
    show.annotate,
):
    app.command()(command(verb))


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"daskfactor {version('daskfactor')}")
        raise typer.Exit


@app.callback()
def daskfactor(
    version: Annotated[
        bool,
        Option("--version", callback=_print_version, is_eager=True, help="Print it and stop."),
    ] = False,
) -> None:
    """Bayesian non-negative matrix factorization for data that does not fit in memory.

    A first look:  `daskfactor demo faces`

    Your own data:  `daskfactor fit table.csv --store run.zarr -k 10`,
    then `info`, `plot`, `report` or `predict` run.zarr.

    Exit codes: 0 done, 1 unexpected error, 2 wrong usage, 3 data, model or options that
    cannot be used, 4 trouble with a file or store, 5 the chain diverged, 130 interrupted, 143
    terminated.
    """
