"""Translate messages of the library for the shell: ``tune=700`` becomes ``--tune 700``."""

import re
from collections.abc import Container
from typing import Final

from daskfactor.cli.verb_options import METAVARS, flags

COMMANDS: Final = {
    "resume": "daskfactor resume {run}",
    "sample": "daskfactor fit ...",
    "stein_posterior": "daskfactor particles ...",
}
"""Commands that replace calls of verbs."""
PHRASES: Final = (
    ("", r"\bdaskfactor\.resume", "daskfactor resume"),
    ("", r"(?<!\()\b(align|discretization_bias)\((trace)?\)", r"daskfactor.\1 in Python"),
    ("", r"\bor select_rank\b", "or daskfactor select-rank"),
    ("", r"\bgiven as store=", "given as --store"),
    ("", r'run again with keep="draws"', "run daskfactor fit again with --keep draws"),
    ("", r" to as_blocks or convert", ""),
    ("", r"\bas_blocks or sample\b", "daskfactor fit"),
    ("", r"""sample\(V, model, (\w+="\w+")\) or as_blocks\(V, \1\)""", r"\1"),
    ("", r"""as_blocks\(V, (\w+=(?:"\w+"|True))\)""", r"\1"),
    ("", r', step="auto"', ""),
    ("", r"\bmonitor=\.", "--monitor missing."),
    ("", r"\bwith open_run\b(?!\()", "with daskfactor info"),
    ("", r"\bwith resume\b(?!\()", "with daskfactor resume"),
    (
        "layer",
        r"\blayer is for AnnData, an object or a file of one",
        "--layer is for a file of AnnData",
    ),
    (
        "mask_var",
        r"\bmask_var is for AnnData, an object or a file of one",
        "--mask-var is for a file of AnnData",
    ),
    (
        "table",
        r"\brows, columns, values and table say",
        "--rows, --columns, --values and --table say",
    ),
    ("table", r"\(a DataFrame, a CSV", "(a CSV"),
    (
        "table",
        r"\brows and columns name dimensions of an xarray\.DataArray",
        "--rows and --columns name dimensions of a netCDF variable",
    ),
    ("row_covariates", r"\bcovariates_w\b", "--row-covariates"),
    ("column_covariates", r"\bcovariates_h\b", "--column-covariates"),
    ("values", r"\bvalues=False", "--count"),
    ("weights", r"^(weights|uncertainty) of a\b", r"--\1 of a"),
    ("weights", r"\bbe a DataArray with", "be a netCDF variable with"),
    ("weights", r",( or)? a pair of vectors \(rows, columns\)( whose product it is)?", ""),
    ("weights", r"\bpass its contents as a scipy matrix", "pass a .npz file of scipy"),
    ("weights", r"pass weights to as_blocks", "pass --weights"),
    ("sampler", r"\bNegativeBinomialNMF\b", "--model negative-binomial"),
    ("sampler", r"\btake TweedieNMF\b", "take --model tweedie"),
    ("n_components", r'\bn_components(?!=["\d])', "-k"),
)
"""Required option of the command (or ``""``), pattern in Python, replacement in the shell."""
ARGUMENT: Final = r"""\b(\w+)=(True|False|\.\.\.|"\w+"|'\w+'|\d+(?:\.\d+)?|(?=[,;) ]|$))"""
"""Pattern of a keyword argument, with or without a value."""


def in_shell(text: str, run: str = "RUN", options: Container[str] | None = None) -> str:
    """Replace the calls and arguments in a message by commands and options.

    Parameters
    ----------
    text
        The message.
    run
        Store of the run that the message is about.
    options
        Parameters of the command; arguments that are not among them stay unchanged. By default
        all arguments are replaced.
    """

    def argument(match: re.Match[str]) -> str:
        if options is not None and match[1] not in options:
            return match[0]
        return _option(match[1], match[2].strip("\"'"))

    def command(call: re.Match[str]) -> str:
        arguments = re.sub(ARGUMENT, lambda match: _option(match[1], match[2]), call[2] or "")
        return f"{COMMANDS[call[1]].format(run=run)} {arguments}".rstrip()

    for name, python, shell in PHRASES:
        if not name or options is None or name in options:
            text = re.sub(python, shell, text)
    text = re.sub(rf"\b({'|'.join(COMMANDS)})\((?:\.\.\.|path)(?:, ([^()]*))?\)", command, text)
    if options and "sampler" in options:
        text = re.sub(r"\b([A-Z]\w*)\(\)", _sampler, text)
    text = re.sub(r"^([a-z_]+)()(?= must )", argument, text)
    return re.sub(ARGUMENT, argument, text)


def _option(parameter: str, value: str) -> str:
    name, _, negation = flags(parameter)[0].partition("/")
    if value == "False":
        return negation or f"{parameter}=False"
    if value == "...":
        value = METAVARS.get(parameter, value)
    return f"{name} {value}".removesuffix(" True").rstrip()


def _sampler(call: re.Match[str]) -> str:
    from daskfactor.inference.base import Sampler
    from daskfactor.inference.registry import algorithms

    return f"--sampler {call[1].lower()}" if call[1] in algorithms(Sampler) else call[0]
