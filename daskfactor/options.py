"""Options that several verbs share: their types, and a decorator that adds them to signatures.

A verb takes them as ``**options: Unpack[...]`` of one of the classes in this module, which gives
type checkers and editors their names and types. `verb` adds them one by one to its signature.
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

DEFAULTS: Final = {"progressbar": True, "executor": "auto"}
"""Defaults of options; all others default to None."""
BLOCKS_ONLY: Final = ("balance", "allow_empty", "dtype", "memory_limit")
"""Options of `as_blocks` that verbs had in earlier versions."""


class Running(TypedDict, total=False):
    """Options for execution and progress, as for `sample`."""

    progressbar: bool
    client: Any
    executor: "str | Executor"
    callback: "OnEvent | None"


class OnDevice(Running, total=False):
    """Options for execution of verbs that also run on a GPU."""

    device: "str | CUDA | None"


class Reading(TypedDict, total=False):
    """Options for reading a matrix, as for `as_blocks`."""

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
    """Options for reading a matrix with uncertainties or weights of cells."""

    uncertainty: Any
    weights: Any


class OnMatrix(Running, Reading, total=False):
    """Options of verbs on a matrix."""

    blocks: Any


class OnSampled(OnDevice, Weighing, total=False):
    """Options of verbs that fit or sample the factors of a matrix, optionally on a GPU."""

    blocks: Any


def split(options: Mapping[str, Any]) -> tuple[OnDevice, dict[str, Any]]:
    """Split options into those for execution and those for `as_blocks`."""
    running = {name: value for name, value in options.items() if name in OnDevice.__annotations__}
    reading = {name: value for name, value in options.items() if name not in running}
    return cast("OnDevice", running), reading


ALIASES = {"samples": "draws", "n_samples": "draws", "warmup": "tune", "n_components": "model"}
"""Names in other libraries, or of other arguments, and the corresponding names here."""


def near_name(name: str, candidates: Iterable[str]) -> str:
    """Return the candidate that contains a name, or is spelt similarly; ``""`` if there is none."""
    names = sorted(candidates)
    longer = [other for other in names if name in other.split("_")]
    return next(iter([*longer, *get_close_matches(name, names, 1, 0.7)]), "")


def _refusal(
    verb_name: str, options: Mapping[str, Any], names: set[str], data_name: str
) -> Exception:
    """Return the error for options that a verb does not have.

    Parameters
    ----------
    verb_name
        Name of the verb.
    options
        Options that were passed.
    names
        Names of all arguments of the verb.
    data_name
        Name of its first argument.
    """
    unknown = [name for name in options if name not in names]
    moved = [name for name in BLOCKS_ONLY if name in unknown]
    weighting = [name for name in ("uncertainty", "weights") if name in unknown]
    if moved and "unstored" in names:
        values = ", ".join(f"{name}={options[name]!r}" for name in moved)
        return OptionError(
            f"{' and '.join(f'{name}=' for name in moved)} can be passed to as_blocks only; use "
            f"{verb_name}(as_blocks(V, {values}), ...)"
        )
    if weighting and "unstored" in names:
        return OptionError(
            f"{verb_name} takes no {' and '.join(weighting)}: every cell has the same weight; "
            f"leave {' and '.join(weighting)} out"
        )
    near = near_name(ALIASES.get(unknown[0], unknown[0]), names - {*options, data_name})
    return TypeError(
        f"{verb_name}() got an unexpected keyword argument {unknown[0]!r}"
        f"{near and f'; did you mean {near!r}?'}"
    )


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """Add the options of a function to its signature by name, and refuse other names."""
    original = signature(function)
    *explicit, options = original.parameters.values()
    (group,) = get_args(options.annotation)
    shared = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=DEFAULTS.get(name),
            annotation=getattr(hint, "__forward_arg__", hint),
        )
        for name, hint in group.__annotations__.items()
    ]
    names = {parameter.name for parameter in (*explicit, *shared)}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not names.issuperset(kwargs):
            raise _refusal(function.__name__, kwargs, names, explicit[0].name)
        return function(*args, **kwargs)

    checked.__signature__ = original.replace(parameters=[*explicit, *shared])  # type: ignore[attr-defined]
    return checked
