"""Options of commands, derived from the annotations and docstrings of commands and verbs.

Source files of verbs are parsed, not imported: ``--help`` loads none of the libraries that they
need.
"""

import ast
import re
from collections.abc import Mapping
from copy import copy
from functools import cache
from inspect import Parameter, cleandoc, formatannotation, get_annotations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, get_origin, get_type_hints

from typer.models import OptionInfo

import daskfactor
from daskfactor import options

ROOT: Final = Path(daskfactor.__file__).parent
FLAGS: Final = {
    "V": ("--data",),
    "as_json": ("--json",),
    "components": ("--components", "-k"),
    "covariates_h": ("--column-covariates",),
    "covariates_w": ("--row-covariates",),
    "header": ("--header/--no-header",),
    "lanes": ("--threads",),
    "memory_limit": ("--memory",),
    "n": ("-n",),
    "n_components": ("-k", "--components"),
    "names": ("--list",),
    "output": ("--output", "-o"),
    "particles": ("--particles", "-m"),
    "quiet": ("--quiet", "-q"),
    "random_seed": ("--seed",),
    "table": ("--table/--matrix",),
}
"""Names of options that differ from the name of the parameter."""
MINIMA: Final = {"tune": 0, "seed": 0} | dict.fromkeys(
    (
        *("blocks", "chains", "components", "draws", "max_iter", "n", "n_components"),
        *("particles", "pilot", "starts", "thin", "threads", "workers"),
    ),
    1,
)
METAVARS: Final = {
    "V": "FILE",
    "cluster": "local:N",
    "column_covariates": "FILE",
    "exclude": "FILE|seen",
    "executor": "auto|threads|serial|tasks|ring",
    "init": "KIND|RUN",
    "network": "RATE",
    "row_covariates": "FILE",
    "scheduler": "ADDRESS",
    "uncertainty": "FILE|NUMBER",
    "weights": "FILE|NUMBER",
}
TYPES: Final = {"str": str, "float": float, "int": int, "bool": bool} | {
    "tuple[int, int]": tuple[int, int]
}
"""Types of options by their text in a signature; a union takes the first of these."""


def flags(parameter: str) -> tuple[str, ...]:
    """Return the names of the option of a parameter."""
    return FLAGS.get(parameter) or (f"--{parameter.replace('_', '-')}",)


def options_of(command: type) -> dict[str, Parameter]:
    """Return the options of a command: its own, those of its groups, then those of all commands.

    Options are the annotated attributes of a class, with help from the section Parameters of its
    docstring, and the parameters of verbs in its table ``verbs``. Those of a class with a ``panel``
    have a panel of this name in the help.
    """
    *groups, base, _ = command.__mro__
    texts: dict[str, str] = {}
    for group in (base, *groups[::-1]):
        texts |= {name: text for name, (_, text) in _entries(group.__doc__ or "").items()}
    options: dict[str, Parameter] = {}
    for group in groups:
        options |= _attributes(group, texts) | options
    for group in groups:
        panel = vars(group).get("panel")
        for verb, names in vars(group).get("verbs", {}).items():
            for name in names.split():
                options.setdefault(name, _option(name, *parameters_of(verb)[name], panel))
    return options | _attributes(base, texts)


def _attributes(group: type, texts: Mapping[str, str]) -> dict[str, Parameter]:
    """Return the options that are attributes of a class."""
    hints, content = get_type_hints(group, include_extras=True), vars(group)
    names = [
        name
        for name in get_annotations(group)
        if ClassVar not in (hints[name], get_origin(hints[name]))
    ]
    panel, none = content.get("panel"), Parameter.empty
    return {n: _option(n, hints[n], content.get(n, none), texts[n], panel) for n in names}


def _option(name: str, hint: Any, default: Any, text: str, panel: str | None) -> Parameter:
    """Return an option as a keyword-only parameter, with its names and limits from the tables."""
    kind, info = hint, OptionInfo(default=...)
    if get_origin(hint) is Annotated:
        kind, info = hint.__origin__, copy(hint.__metadata__[0])
    info.help = text
    if isinstance(info, OptionInfo):
        names = flags(name)
        info.param_decls = [f"{names[0]}/--no-{names[0][2:]}"] if default is True else names
        if info.min is None and info.parser is None:  # a parser checks what it reads
            info.min = MINIMA.get(name)
        info.metavar = info.metavar or METAVARS.get(name)
        info.rich_help_panel = panel
    hint = Annotated[kind, info]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def source_of(verb: str) -> str:
    """Return the source text of the module that defines a verb."""
    stub = (ROOT / "__init__.pyi").read_text(encoding="utf-8")
    (module,) = re.findall(rf"^from \.(\S+) import {verb} as", stub, re.M)
    return (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


@cache
def parameters_of(verb: str) -> dict[str, tuple[Any, Any, str]]:
    """Return type, default and help of the parameters of a verb.

    Parameters without a default or without an entry in the docstring are left out.
    """
    (text,) = re.findall(rf"^def {verb}\b.*?(?=^[^\s)]|\Z)", source_of(verb), re.M | re.S)
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    pairs = [
        *zip(arguments.args[::-1], arguments.defaults[::-1], strict=False),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    signature = {
        argument.arg: (ast.unparse(argument.annotation), ast.literal_eval(default))
        for argument, default in pairs
        if argument.annotation and isinstance(default, ast.Constant)
    }
    if arguments.kwarg and arguments.kwarg.annotation:
        (group,) = re.findall(r"^Unpack\[(\w+)\]$", ast.unparse(arguments.kwarg.annotation))
        for name, hint in getattr(options, group).__annotations__.items():
            text = getattr(hint, "__forward_arg__", None) or formatannotation(hint)
            signature[name] = text, options.DEFAULTS.get(name)
    entries = _entries(ast.get_docstring(function) or "")
    return {
        name: (_type(*signature[name], choices), signature[name][1], _in_shell(text, signature))
        for name, (choices, text) in entries.items()
        if name in signature
    }


def _type(annotation: str, default: Any, choices: tuple[str, ...]) -> Any:
    """Return the type of an option for an annotation and choices in a docstring."""
    names = annotation.split(" | ")
    scalar = next((kind for name, kind in TYPES.items() if name in names), str)
    kind: Any = Literal[choices] if choices else scalar
    return kind | None if default is None else kind


def _entries(docstring: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return choices and text of each entry of the section Parameters."""
    _, _, section = cleandoc(docstring).partition("\nParameters\n----------\n")
    section = re.split(r"\n\n\w+\n---", section)[0]
    entries = {}
    for names, kind, text in re.findall(
        r"^(\w[\w, ]*?)(?: : (.*))?\n((?:(?:    .*)?\n?)+)", section, re.M
    ):
        choices = tuple(re.findall(r'"(.*?)"', kind)) if kind.startswith("{") else ()
        for name in names.split(", "):
            entries[name] = choices, " ".join(text.split())
    return entries


def _in_shell(text: str, parameters: Mapping[str, Any]) -> str:
    """Return the first sentence, with options for names of parameters, and without markup."""

    def word(match: re.Match[str]) -> str:
        return flags(match[1])[0] if match[1] in parameters else match[1].strip('"')

    sentence = re.sub(r"(\.)\s+(?![a-z]).*", r"\1", text)
    return re.sub(r"``(.+?)``", word, re.sub(r":\w+:`(\w+)`", r"\1", sentence))
