"""Figure that a notebook displays as the value of a cell, without a backend of pyplot."""

import re
import warnings
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

from daskfactor.checks import warn
from daskfactor.errors import DataWarning


class NotebookFigure(Figure):
    """Figure with its own PNG representation, which needs no backend of pyplot."""

    def savefig(self, fname: Any, **options: Any) -> None:
        """Write the figure to a file; issue one warning for all characters that the font lacks."""
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            super().savefig(fname, **options)
        missing = {}
        for one in messages:
            glyph = re.match(
                r"Glyph (\d+) .*missing from (?:current font|font\(s\) )(.*)\.", str(one.message)
            )
            if glyph is None:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
            else:
                missing[chr(int(glyph[1]))] = glyph[2]
        if missing:
            example = min(missing)
            font = missing[example] or "in use"
            warn(
                f"the font {font} lacks characters of labels, such as {example!r}, and draws "
                "boxes; set matplotlib's rcParams['font.family'] to a font that has them",
                DataWarning,
            )

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
