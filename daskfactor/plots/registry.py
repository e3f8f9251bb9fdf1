"""Registry of the figures of a result by name; functions register where they are defined."""

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import xarray as xr

from daskfactor.errors import OptionError
from daskfactor.plots.canvas import P, in_style
from daskfactor.results.components import with_names
from daskfactor.runs.trace import Run, Trace, as_tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Kind(NamedTuple):
    """A function that draws a figure of a result, its first argument.

    Attributes
    ----------
    draw
        The function.
    particles
        True for figures of sets of particles only.
    """

    draw: Callable[..., "Figure"]
    particles: bool

    @property
    def title(self) -> str:
        """First line of the docstring of the function."""
        return (self.draw.__doc__ or "").strip().split("\n")[0]

    @property
    def options(self) -> set[str]:
        """Names of the arguments, without the result and the figure to draw into."""
        return set(list(inspect.signature(self.draw).parameters)[1:]) - {"figure"}


FIGURES: dict[str, Kind] = {}


def figure(
    name: str, *, particles: bool = False
) -> Callable[[Callable[P, "Figure"]], Callable[P, "Figure"]]:
    """Return a decorator that registers a function under a name and applies the common style."""

    def register(function: Callable[P, "Figure"]) -> Callable[P, "Figure"]:
        styled = in_style(function)
        FIGURES[name] = Kind(styled, particles)
        return styled

    return register


def figure_by_name(name: str) -> Kind:
    """Return a figure by its name.

    Raises
    ------
    OptionError
        If no figure has this name.
    """
    if name not in FIGURES:
        raise OptionError(f"there is no figure {name!r}; use one of {', '.join(sorted(FIGURES))}")
    return FIGURES[name]


def draw(result: Trace | xr.Dataset, name: str, **options: Any) -> "Figure":
    """Draw a figure by its name.

    Parameters
    ----------
    result
        Result of `sample`, `resume`, `open_run`, `align`, `stein_posterior` or `optimize`, or the
        path of a store.
    name
        One of `FIGURES`.
    **options
        Arguments of the function of that figure; None stands for the default.

    Returns
    -------
    matplotlib.figure.Figure
        The figure; it is not displayed.

    Raises
    ------
    OptionError
        If there is no such figure, or it cannot be drawn for this result.

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
    kind = figure_by_name(name)
    arguments = {key: value for key, value in options.items() if value is not None}
    if wrong := set(arguments) - kind.options:
        raise OptionError(
            f"the figure {name!r} takes no {' or '.join(sorted(wrong))}; pass "
            f"{', '.join(sorted(kind.options)) or 'no options'}"
        )
    return kind.draw(result if isinstance(result, xr.Dataset) else as_tree(result), **arguments)


def draw_all(
    result: Trace | xr.Dataset, **options: Any
) -> Iterator[tuple[str, "Figure | OptionError"]]:
    """Draw all figures that apply to a result, each with the options that it takes.

    Parameters
    ----------
    result
        As for `draw`.
    **options
        Arguments of any of the figures; each figure ignores the others.

    Yields
    ------
    name : str
        One of `FIGURES`.
    figure : matplotlib.figure.Figure or OptionError
        The figure, or the reason why it cannot be drawn.

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
            arguments = {key: value for key, value in options.items() if key in kind.options}
            yield name, draw(tree, name, **arguments)
        except OptionError as error:
            yield name, error
