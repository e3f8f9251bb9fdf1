"""Options of commands, derived from the signatures and docstrings of verbs.

Source files are parsed, not imported: ``--help`` loads none of the libraries that verbs need.
"""

import ast
import re
from collections.abc import Mapping
from functools import cache
from inspect import Parameter, cleandoc, formatannotation
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from typer import Option

import daskfactor
from daskfactor import options

ROOT: Final = Path(daskfactor.__file__).parent
FLAGS: Final = {
    "V": ("--data",),
    "covariates_h": ("--column-covariates",),
    "covariates_w": ("--row-covariates",),
    "header": ("--header/--no-header",),
    "lanes": ("--threads",),
    "memory_limit": ("--memory",),
    "n": ("-n",),
    "n_components": ("-k", "--components"),
    "particles": ("--particles", "-m"),
    "random_seed": ("--seed",),
    "table": ("--table/--matrix",),
}
"""Names of options that differ from the name of the parameter."""
MINIMA: Final = {"tune": 0} | dict.fromkeys(
    ("blocks", "chains", "draws", "n", "particles", "pilot", "starts", "thin"), 1
)
METAVARS: Final = {
    "V": "FILE",
    "exclude": "FILE|seen",
    "executor": "auto|threads|serial|tasks|ring",
    "init": "KIND|RUN",
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


class VerbParameter(NamedTuple):
    """A parameter of a verb: annotation as text, default, and entry in the docstring."""

    annotation: str
    default: Any
    choices: tuple[str, ...]
    help: str

    @property
    def type(self) -> Any:
        """Type of the option."""
        names = self.annotation.split(" | ")
        scalar = next((kind for name, kind in TYPES.items() if name in names), str)
        kind: Any = Literal[self.choices] if self.choices else scalar
        return kind | None if self.default is None else kind


class VerbOptions:
    """Parameters of a verb that a command offers as options.

    Parameters
    ----------
    verb
        Name of a public function.
    parameters
        Names of its parameters.
    panel
        Title of the panel of options in the help.
    """

    def __init__(self, verb: str, *parameters: str, panel: str | None = None) -> None:
        self.verb, self.parameters, self.panel = verb, parameters, panel

    def options(self) -> dict[str, Parameter]:
        """Return the options as parameters of a command function."""
        documented = parameters_of(self.verb)
        return {name: self._option(name, documented[name]) for name in self.parameters}

    def _option(self, name: str, parameter: VerbParameter) -> Parameter:
        info = Option(
            *flags(name),
            help=parameter.help,
            min=MINIMA.get(name),
            metavar=METAVARS.get(name),
            rich_help_panel=self.panel,
        )
        return option(name, Annotated[parameter.type, info], parameter.default)


def option(name: str, annotation: Any, default: Any) -> Parameter:
    """Return an option as a keyword-only parameter of a command function."""
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def source_of(verb: str) -> str:
    """Return the source text of the module that defines a verb."""
    stub = (ROOT / "__init__.pyi").read_text(encoding="utf-8")
    (module,) = re.findall(rf"^from \.(\S+) import {verb} as", stub, re.M)
    return (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


@cache
def parameters_of(verb: str) -> dict[str, VerbParameter]:
    """Return the parameters of a verb that have a default and an entry in its docstring."""
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
    entries = _entries(cleandoc(ast.get_docstring(function) or ""))
    return {
        name: VerbParameter(*signature[name], choices, _in_shell(text, signature))
        for name, (choices, text) in entries.items()
        if name in signature
    }


def _entries(docstring: str) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return choices and first sentence of each entry of the section Parameters."""
    _, _, section = docstring.partition("\nParameters\n----------\n")
    section = re.split(r"\n\n\w+\n---", section)[0]
    entries = {}
    for names, kind, text in re.findall(
        r"^(\w[\w, ]*?)(?: : (.*))?\n((?:(?:    .*)?\n?)+)", section, re.M
    ):
        sentence = re.match(r".*?\.(?=\s|$)(?!\s+[a-z])|.*", " ".join(text.split()))
        choices = tuple(re.findall(r'"(.*?)"', kind)) if kind.startswith("{") else ()
        for name in names.split(", "):
            entries[name] = choices, sentence[0] if sentence else ""
    return entries


def _in_shell(text: str, parameters: Mapping[str, Any]) -> str:
    """Replace names of parameters by options; strip markup of values and roles."""

    def word(match: re.Match[str]) -> str:
        return flags(match[1])[0] if match[1] in parameters else match[1].strip('"')

    return re.sub(r"``(.+?)``", word, re.sub(r":\w+:`(\w+)`", r"\1", text))
