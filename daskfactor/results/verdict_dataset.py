"""Dataset that prints as a table, followed by sentences that interpret it."""

from textwrap import TextWrapper
from typing import Final

import xarray as xr

from daskfactor import markup
from daskfactor.results.verdict import LIGHTS

WIDTH: Final = 100
"""Characters in a printed line."""
INDENT: Final = 20
"""Indentation of the sentences of a light."""


def wrapped(text: str) -> str:
    """Wrap long lines, and indent continuations of lights."""
    lines = []
    for line in text.split("\n"):
        deep = line.startswith((" ", *LIGHTS.values()))
        lines += TextWrapper(WIDTH, subsequent_indent=" " * INDENT * deep).wrap(line)
    return "\n".join(lines)


class VerdictDataset(xr.Dataset):  # type: ignore[no-untyped-call]
    """Dataset that prints as a table and a verdict, if it has the variables of the table."""

    __slots__ = ()

    @property
    def verdict(self) -> str:
        """Interpretation of the numbers, and advice."""
        return str(self.attrs["verdict"])

    def _table(self) -> str | None:
        """Return the table above the verdict; None if variables are missing."""
        return None

    def __repr__(self) -> str:
        table = self._table()
        return super().__repr__() if table is None else f"{table}\n\n{wrapped(self.verdict)}"

    def _repr_html_(self) -> str:
        table = self._table()
        if table is None:
            return str(super()._repr_html_())
        sentences = markup.paragraphs(self.verdict.split("\n"))
        return markup.titled(type(self).__name__, sentences, markup.verbatim(table))
