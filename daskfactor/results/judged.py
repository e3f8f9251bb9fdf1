"""A Dataset that prints as a table and, under it, sentences on what the numbers mean."""

from textwrap import TextWrapper
from typing import Final

import xarray as xr

from daskfactor import markup
from daskfactor.results.verdict import LIGHTS

WIDTH: Final = 100
"""Of sentences in print."""
INDENT: Final = 20
"""Characters before what is said of a light."""


def wrapped(text: str) -> str:
    """Break long lines; what goes on is set in beneath the words."""
    lines = []
    for own in text.split("\n"):
        deep = own.startswith((" ", *LIGHTS.values()))
        lines += TextWrapper(WIDTH, subsequent_indent=" " * INDENT * deep).wrap(own)
    return "\n".join(lines)


class Judged(xr.Dataset):  # type: ignore[no-untyped-call]
    """A Dataset whose print is a table and a verdict, as long as it has what the table shows."""

    __slots__ = ()

    @property
    def verdict(self) -> str:
        """What the numbers mean, and what to do."""
        return str(self.attrs["verdict"])

    def _table(self) -> str | None:
        """Return what is printed above the verdict; None if variables for it are missing."""
        return None

    def __repr__(self) -> str:
        table = self._table()
        return super().__repr__() if table is None else f"{table}\n\n{wrapped(self.verdict)}"

    def _repr_html_(self) -> str:
        table = self._table()
        if table is None:
            return str(super()._repr_html_())
        said = markup.paragraphs(self.verdict.split("\n"))
        return markup.titled(type(self).__name__, said, markup.verbatim(table))
