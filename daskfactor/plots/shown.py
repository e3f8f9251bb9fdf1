"""A figure that a notebook shows where it is the value of a cell, once, whatever else is loaded."""

from io import BytesIO

from matplotlib.figure import Figure


class Shown(Figure):
    """A figure with a picture of its own, for which no backend of pyplot has to be set up."""

    def _repr_png_(self) -> bytes:
        picture = BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()
