"""Options that verbs have in common, each said once: their types, and how a verb shows them.

A verb takes them as ``**options: Unpack[...]`` of one of the classes here, which tells type
checkers and editors their names and types; `verb` puts them into its signature one by one.
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypedDict, TypeVar, cast, get_args

from daskfactor.errors import OptionError

if TYPE_CHECKING:
    from daskfactor.executors import Executor
    from daskfactor.executors.device import CUDA
    from daskfactor.progress import OnEvent

P = ParamSpec("P")
R = TypeVar("R")

USUAL: Final = {"progressbar": True, "executor": "auto"}
"""What options are that are left out; the others are None."""
BLOCKS_ONLY: Final = ("balance", "allow_empty", "dtype", "memory_limit")
"""Options that verbs once had, and `as_blocks` alone has now."""


class Running(TypedDict, total=False):
    """Where a verb does its work, and who is told how far it is; as for `sample`."""

    progressbar: bool
    client: Any
    executor: "str | Executor"
    callback: "OnEvent | None"


class OnDevice(Running, total=False):
    """The same of verbs that work on a GPU, too."""

    device: "str | CUDA | None"


class Reading(TypedDict, total=False):
    """Which matrix of an input is meant, and how it is read; as for `as_blocks`."""

    unstored: str | None
    rows: Any
    columns: Any
    values: str | int | bool | None
    header: bool | None
    table: bool | None
    layer: str | None
    mask_var: Any
    storage_options: Mapping[str, Any] | None


class Weighing(Reading, total=False):
    """The same, and what its cells count for."""

    uncertainty: Any
    weights: Any


class OnMatrix(Running, Reading, total=False):
    """Options of verbs on a matrix."""

    blocks: Any


class OnSampled(OnDevice, Weighing, total=False):
    """Options of verbs that fit or sample the factors of a matrix, on a GPU if asked to."""

    blocks: Any


def split(options: Mapping[str, Any]) -> tuple[OnDevice, dict[str, Any]]:
    """Part what tells where a verb does its work from what `as_blocks` is told."""
    running = {name: own for name, own in options.items() if name in OnDevice.__annotations__}
    reading = {name: own for name, own in options.items() if name not in running}
    return cast("OnDevice", running), reading


OF_OTHERS = {"samples": "draws", "n_samples": "draws", "warmup": "tune", "n_components": "model"}
"""Names of other libraries, or of another argument, and what stands for them here."""


def near_name(given: str, known: Iterable[str]) -> str:
    """A name that is spelt almost like the one that was given, or has it as a part; or nothing."""
    names = sorted(known)
    parts = [name for name in names if given in name.split("_")]
    return next(iter([*parts, *get_close_matches(given, names, 1, 0.7)]), "")


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """Show what a function takes as ``**options`` by name, refuse other names.

    Those that `as_blocks` alone has are refused with a sentence.
    """
    shown = signature(function)
    *own, taken = shown.parameters.values()
    (kind,) = get_args(taken.annotation)
    common = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=USUAL.get(name),
            annotation=getattr(hint, "__forward_arg__", hint),
        )
        for name, hint in kind.__annotations__.items()
    ]
    known = {each.name for each in (*own, *common)}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = [name for name in kwargs if name not in known]
        moved = [name for name in BLOCKS_ONLY if name in unknown and "unstored" in known]
        if moved:
            given = ", ".join(f"{name}={kwargs[name]!r}" for name in moved)
            raise OptionError(
                f"{' and '.join(f'{name}=' for name in moved)} can be given to as_blocks only: "
                f"{function.__name__}(as_blocks(V, {given}), ...)"
            )
        weighing = [name for name in ("uncertainty", "weights") if name in unknown]
        if weighing and "unstored" in known:
            raise OptionError(
                f"{function.__name__} takes no {' and '.join(weighing)}: every cell counts alike "
                "there; leave it out"
            )
        if unknown:
            name = OF_OTHERS.get(unknown[0], unknown[0])
            near = near_name(name, known - {*kwargs, own[0].name})
            raise TypeError(
                f"{function.__name__}() got an unexpected keyword argument {unknown[0]!r}"
                f"{near and f'; did you mean {near!r}?'}"
            )
        return function(*args, **kwargs)

    checked.__signature__ = shown.replace(parameters=[*own, *common])  # type: ignore[attr-defined]
    return checked
