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
    running = {name: value for name, value in options.items() if name in OnDevice.__annotations__}
    reading = {name: value for name, value in options.items() if name not in running}
    return cast("OnDevice", running), reading


OF_OTHERS = {"samples": "draws", "n_samples": "draws", "warmup": "tune", "n_components": "model"}
"""Names of other libraries, or of another argument, and what stands for them here."""


def near_name(name: str, known: Iterable[str]) -> str:
    """Return the known name that has this one as a part, or is spelt almost like it; or nothing."""
    names = sorted(known)
    longer = [other for other in names if name in other.split("_")]
    return next(iter([*longer, *get_close_matches(name, names, 1, 0.7)]), "")


def _refusal(verb_name: str, options: Mapping[str, Any], known: set[str], data: str) -> Exception:
    """Return the error of options of which a verb does not know all; ``data``: its first argument.

    Those that `as_blocks` alone has are refused with a sentence.
    """
    unknown = [name for name in options if name not in known]
    moved = [name for name in BLOCKS_ONLY if name in unknown]
    weighing = [name for name in ("uncertainty", "weights") if name in unknown]
    if moved and "unstored" in known:
        values = ", ".join(f"{name}={options[name]!r}" for name in moved)
        return OptionError(
            f"{' and '.join(f'{name}=' for name in moved)} can be given to as_blocks only: "
            f"{verb_name}(as_blocks(V, {values}), ...)"
        )
    if weighing and "unstored" in known:
        return OptionError(
            f"{verb_name} takes no {' and '.join(weighing)}: every cell counts alike there; leave "
            "it out"
        )
    near = near_name(OF_OTHERS.get(unknown[0], unknown[0]), known - {*options, data})
    return TypeError(
        f"{verb_name}() got an unexpected keyword argument {unknown[0]!r}"
        f"{near and f'; did you mean {near!r}?'}"
    )


def verb(function: Callable[P, R]) -> Callable[P, R]:
    """Show what a function takes as ``**options`` by name, refuse other names."""
    shown = signature(function)
    *named, options = shown.parameters.values()
    (kind,) = get_args(options.annotation)
    common = [
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=USUAL.get(name),
            annotation=getattr(hint, "__forward_arg__", hint),
        )
        for name, hint in kind.__annotations__.items()
    ]
    known = {parameter.name for parameter in (*named, *common)}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not known.issuperset(kwargs):
            raise _refusal(function.__name__, kwargs, known, named[0].name)
        return function(*args, **kwargs)

    checked.__signature__ = shown.replace(parameters=[*named, *common])  # type: ignore[attr-defined]
    return checked
