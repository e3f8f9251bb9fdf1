"""Figures of a result by their names: the one list of them, which each joins where it is made."""

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import xarray as xr

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import P, in_style
from daskfactor.results.components import with_names
from daskfactor.results.trace import Run, Trace, as_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Kind(NamedTuple):
    """A figure that takes a result first.

    Attributes
    ----------
    draw
        The function.
    particles
        Whether it tells something of particles alone.
    """

    draw: Callable[..., "Figure"]
    particles: bool

    @property
    def about(self) -> str:
        """The first line of what is said of it."""
        return (self.draw.__doc__ or "").strip().split("\n")[0]

    @property
    def options(self) -> set[str]:
        """Names of the arguments beside the result and a figure to draw into."""
        return set(list(inspect.signature(self.draw).parameters)[1:]) - {"figure"}


FIGURES: dict[str, Kind] = {}


def figure(
    name: str, *, particles: bool = False
) -> Callable[[Callable[P, "Figure"]], Callable[P, "Figure"]]:
    """List a function among the figures of a result, under a name."""

    def listed(function: Callable[P, "Figure"]) -> Callable[P, "Figure"]:
        drawn = in_style(function)
        FIGURES[name] = Kind(drawn, particles)
        return drawn

    return listed


def named(name: str) -> Kind:
    """Find a figure by its name.

    Raises
    ------
    OptionError
        If there is none of this name.
    """
    if name not in FIGURES:
        raise OptionError(f"there is no figure {name!r}; figures are {', '.join(sorted(FIGURES))}")
    return FIGURES[name]


def draw(result: Trace | xr.Dataset, name: str, **options: Any) -> "Figure":
    """Draw a figure by its name; options are those of its function, and None is none.

    Parameters
    ----------
    result
        What `sample`, `resume`, `open_run`, `align`, `stein_posterior` or `optimize` returned,
        or the path of a store.
    name
        One of `FIGURES`.
    **options
        What the function of that figure takes.

    Returns
    -------
    matplotlib.figure.Figure
        What was drawn; nothing is shown.

    Raises
    ------
    OptionError
        If there is no such figure, or it cannot be drawn of this result.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> figure = dfac.plots.draw(trace, "shares")
    >>> figure.savefig("shares.png")  # doctest: +SKIP
    """
    kind, given = named(name), {key: own for key, own in options.items() if own is not None}
    if wrong := set(given) - kind.options:
        raise OptionError(
            f"the figure {name!r} takes no {' or '.join(sorted(wrong))}; it takes "
            f"{', '.join(sorted(kind.options)) or 'no options'}"
        )
    return kind.draw(result if isinstance(result, xr.Dataset) else as_tree(result), **given)


def draw_all(
    result: Trace | xr.Dataset, **options: Any
) -> Iterator[tuple[str, "Figure | OptionError"]]:
    """Draw all figures that tell something of a result, each with the options that it takes.

    In place of one that cannot be drawn comes the reason.

    Parameters
    ----------
    result
        As for `draw`.
    **options
        Of any of the figures; each takes those that it knows.

    Yields
    ------
    name : str
        One of `FIGURES`.
    figure : matplotlib.figure.Figure or OptionError
        The figure, or why there is none.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> [name for name, figure in dfac.plots.draw_all(trace)][:3]
    ['components', 'curves', 'maps']
    """
    tree = result if isinstance(result, xr.Dataset) else with_names(as_tree(result))
    particles = not isinstance(tree, xr.Dataset) and Run(tree).is_particles
    for name, kind in sorted(FIGURES.items()):
        if kind.particles and not particles:
            continue
        try:
            own = {key: value for key, value in options.items() if key in kind.options}
            yield name, draw(tree, name, **own)
        except OptionError as error:
            yield name, error
