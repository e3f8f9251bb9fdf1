"""The command ``daskfactor``: subcommands, messages on the terminal, and exit codes."""

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
from typing import Annotated, Any

import typer
from rich.console import Console
from typer import Option

from daskfactor.cli import convert, fit, predict, show
from daskfactor.cli import options as o
from daskfactor.cli.verb_options import options_of
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
    """SIGTERM, which stops a command like Ctrl-C."""


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
"""Exit codes by class of error; the first match counts."""


@contextmanager
def reporting(options: Mapping[str, Any], debug: bool) -> Iterator[None]:
    """Report an error as one sentence on stderr and an exit code, and a warning as one line.

    Arguments of Python in messages are replaced by options of the command.
    """

    def say(head: str, color: str, text: str) -> None:
        typer.secho(f"{head}: ", fg=color, bold=head == "error", err=True, nl=False)
        message = " ".join(in_shell(text, options=options).split())
        typer.echo(visible(message), err=True)

    notes: set[str] = set()

    with warnings.catch_warnings(), terminating():
        warnings.simplefilter("always", DaskfactorWarning)
        default = warnings.showwarning

        def show_warning(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if debug and not issubclass(category, DaskfactorWarning):
                default(message, category, *rest)
            elif str(message) not in notes:
                notes.add(str(message))
                say("note", "yellow", str(message))

        warnings.showwarning = show_warning  # type: ignore[assignment]
        try:
            yield
        except (typer.Exit, typer.Abort):
            raise
        except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - the top level
            if debug:
                traceback.print_exception(error, file=sys.stderr)
            say("error", "red", _sentence(error))
            raise typer.Exit(next(n for kind, n in EXIT_CODES if isinstance(error, kind))) from None


@contextmanager
def terminating() -> Iterator[None]:
    """Make SIGTERM raise `Terminated`, unless another handler is set."""
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
    """Return the message of an error."""
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
    """Convert a value to types of JSON; infinite numbers and NaN become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def command(kind: type[o.Command]) -> Callable[..., None]:
    """Make a function for typer from the class of a command."""
    options = options_of(kind)

    def run(**values: Any) -> None:
        with reporting(options, values["debug"]):
            answer = kind(**values)()
            if answer is None:
                return
            content, *parts = answer
            if values["as_json"]:
                text = json.dumps(plain(content), indent=2, ensure_ascii=False, allow_nan=False)
                parts = [text]
            for part in parts:
                if isinstance(part, str):
                    typer.echo(visible(part))
                else:
                    Console().print(part)

    run.__doc__ = inspect.cleandoc(kind.__doc__ or "").partition("\nParameters\n---")[0]
    run.__signature__ = inspect.Signature([*options.values()])  # type: ignore[attr-defined]
    run.__annotations__ = {name: p.annotation for name, p in options.items()}
    return run


COMMANDS = {
    "demo": convert.Demo,
    "convert": convert.Convert,
    "fit": fit.Fit,
    "estimate-cost": fit.EstimateCost,
    "resume": fit.Resume,
    "particles": fit.Particles,
    "predict": predict.Predict,
    "recommend": predict.Recommend,
    "transform": predict.Transform,
    "select-rank": fit.SelectRank,
    "info": show.Info,
    "plot": show.Plot,
    "report": show.Report,
    "annotate": show.Annotate,
}
"""Commands by name, in the order of the help."""
app = typer.Typer(
    name="daskfactor",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for name, kind in COMMANDS.items():
    app.command(name)(command(kind))


def _print_version(enabled: bool) -> None:
    if enabled:
        from importlib.metadata import version

        typer.echo(f"daskfactor {version('daskfactor')}")
        raise typer.Exit


@app.callback()
def daskfactor(
    version: Annotated[
        bool,
        Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Bayesian non-negative matrix factorization for data that does not fit in memory.

    Try the demo:  `daskfactor demo faces`

    Fit your own data:  `daskfactor fit table.csv --store run.zarr -k 10`,
    then run `info`, `plot`, `report` or `predict` on run.zarr.

    Exit codes: 0 success, 1 unexpected error, 2 wrong usage, 3 invalid data, model or option,
    4 error with a file or store, 5 diverged chain, 130 interrupted, 143 terminated.
    """
