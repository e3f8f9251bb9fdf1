"""A figure that a notebook shows where it is the value of a cell, once, whatever else is loaded."""

import re
import warnings
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure

from daskfactor.checks import warn
from daskfactor.errors import DataWarning


class Shown(Figure):
    """A figure with a picture of its own, for which no backend of pyplot has to be set up."""

    def savefig(self, fname: Any, **options: Any) -> None:
        """Write the picture; of characters that the font lacks one sentence tells."""
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            super().savefig(fname, **options)
        lacking = {}
        for one in found:
            glyph = re.match(
                r"Glyph (\d+) .*missing from (?:current font|font\(s\) )(.*)\.", str(one.message)
            )
            if glyph is None:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
            else:
                lacking[chr(int(glyph[1]))] = glyph[2]
        if lacking:
            least = min(lacking)
            font = lacking[least] or "in use"
            warn(
                f"labels have characters that the font {font} lacks, such as {least!r}: boxes "
                "stand for them; name a font that has them in matplotlib's rcParams['font.family']",
                DataWarning,
            )

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
