r"""How well components are told apart: which swap places between draws, and how wide they are.

The swaps are what EPA PMF's bootstrap table (BS) counts, with posterior draws in place of
resampled data: each component of a draw is mapped to the component of the posterior mean that it
resembles most, or to none,

.. math:: m(k) = \arg\max_l \cos(w_k, \bar w_l) \cos(h_k, \bar h_l), \qquad
    \min(\cos(w_k, \bar w_{m(k)}), \cos(h_k, \bar h_{m(k)})) \ge 0.8

and the widths of intervals stand for the ranges of its displacement table (DISP).

Source: Paatero, Eberly, Brown and Norris 2014, "Methods for estimating uncertainty in factor
analytic solutions"; Norris et al. 2014, EPA PMF 5.0 user guide, sections 6.4 and 6.5.
"""

from typing import Any, Final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.align import aligned_run, unit
from daskfactor.results.components import Factor, components_of
from daskfactor.results.schema import MOMENTS
from daskfactor.results.trace import Trace, each_weighted_draw, reads_here

Array = NDArray[np.float64]

MIN_COSINE: Final = 0.8
"""Cosine in W and in H from which on two components are taken to be the same."""
LARGE: Final = 0.1
"""Share of the largest entry of a component from which on an entry counts for its width."""


@reads_here
def component_swaps(trace: Trace) -> xr.Dataset:
    r"""In what share of the draws each component is itself, another or none; how wide it is.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store, read a few draws at a time;
        aligned if it is not. Particles count by their weight.

    Returns
    -------
    Dataset
        Over ``component``: ``matched`` (component, other), the share of the draws in which
        ``component`` resembles ``other`` most; ``none``, in which it resembles nothing;
        ``width_w`` and ``width_h``, the median width of the 90 % intervals of its large
        entries (a tenth of its largest or more), relative to their means.

    Raises
    ------
    OptionError
        If the run kept no draws.

    Notes
    -----
    Alignment puts a draw's components into the order that resembles the mean most *as a whole*,
    so that a swap counted here is one that no order of components undoes.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> dfac.component_swaps(trace)["matched"].shape
    (2, 2)
    """
    run = aligned_run(trace, "swaps between components")
    W, H = run.mean_factors(run.group(MOMENTS))
    mean_w, mean_h = unit(W, 0), unit(H, 1)
    count = mean_w.shape[1]
    mapped, total = np.zeros((count, count + 1)), 0.0
    for (W, H), mass in each_weighted_draw(run.posterior, run.weights):
        cos_w, cos_h = unit(W, 0).T @ mean_w, unit(H, 1) @ mean_h.T
        if run.law.signed:  # a component has no sign of its own
            cos_h = cos_h * np.sign(cos_w)
            cos_w = np.abs(cos_w)
        best = np.asarray((cos_w * cos_h).argmax(axis=1))
        each = np.arange(count)
        near = np.minimum(cos_w, cos_h)[each, best] >= MIN_COSINE
        mapped[each, np.where(near, best, count)] += mass
        total += mass
    found = components_of(run.tree)
    labels = run.posterior["component"].values
    at = [found.labels.index(label) for label in labels.tolist()]
    widths = {name: [_width(found.factor(name), k) for k in at] for name in ("W", "H")}
    return xr.Dataset(
        {
            "matched": (("component", "other"), mapped[:, :count] / total),
            "none": ("component", mapped[:, count] / total),
            "width_w": ("component", widths["W"]),
            "width_h": ("component", widths["H"]),
        },
        coords={"component": labels, "other": labels},
        attrs={"threshold": MIN_COSINE},
    )


def _width(factor: Factor, k: int) -> float:
    """Median relative width of the intervals of the large entries of a component."""
    sizes = np.abs(factor.mean[k])
    large: Any = sizes >= LARGE * sizes.max(initial=0.0)
    ends = factor.interval(k, large)
    if ends is None or not sizes.max(initial=0.0) > 0:
        return float("nan")
    return float(np.median((ends[1] - ends[0]) / sizes[large]))
