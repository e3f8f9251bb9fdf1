r"""Identifiability of components: swaps between draws, and widths of intervals.

Swaps correspond to the bootstrap table (BS) of EPA PMF, with posterior draws instead of resampled
data: each component of a draw is mapped to the most similar component of the posterior mean, or
to none,

.. math:: m(k) = \arg\max_l \cos(w_k, \bar w_l) \cos(h_k, \bar h_l), \qquad
    \min(\cos(w_k, \bar w_{m(k)}), \cos(h_k, \bar h_{m(k)})) \ge 0.8

and the widths of intervals correspond to the ranges of its displacement table (DISP).

Source: Paatero, Eberly, Brown and Norris 2014, "Methods for estimating uncertainty in factor
analytic solutions"; Norris et al. 2014, EPA PMF 5.0 user guide, sections 6.4 and 6.5.
"""

from typing import Any, Final

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.align import aligned_run, unit
from daskfactor.results.components import Factor, components_of
from daskfactor.runs.schema import MOMENTS
from daskfactor.runs.trace import Trace, each_draw, reads_in_threads

Array = NDArray[np.float64]

MIN_COSINE: Final = 0.8
"""Least cosine similarity in W and in H of two copies of one component."""
LARGE: Final = 0.1
"""Least size of an entry that counts for the width, as a share of the largest entry."""


@reads_in_threads
def component_swaps(trace: Trace) -> xr.Dataset:
    r"""Return the share of draws in which components swap, and the width of their intervals.

    Parameters
    ----------
    trace
        Result of a run that kept draws, or the path of its store, read a few draws at a time;
        aligned if it is not. Particles have their weights.

    Returns
    -------
    Dataset
        Over ``component``: ``matched`` (component, other), the share of the draws in which
        ``component`` is most similar to ``other``; ``none``, in which it is similar to none;
        ``width_w`` and ``width_h``, the median width of the 90 % intervals of its large
        entries (a tenth of its largest or more), relative to their means.

    Raises
    ------
    OptionError
        If the run kept no draws.

    Notes
    -----
    Alignment chooses the order of all components of a draw *jointly*, so that no other order
    removes a swap that is counted here.

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
    for W, H, mass in each_draw(run.posterior, run.weights):
        cos_w, cos_h = unit(W, 0).T @ mean_w, unit(H, 1) @ mean_h.T
        if run.symmetries.signed:  # the sign of a component is arbitrary
            cos_h = cos_h * np.sign(cos_w)
            cos_w = np.abs(cos_w)
        best = np.asarray((cos_w * cos_h).argmax(axis=1))
        each = np.arange(count)
        near = np.minimum(cos_w, cos_h)[each, best] >= MIN_COSINE
        mapped[each, np.where(near, best, count)] += mass
        total += mass
    components = components_of(run.tree)
    labels = run.posterior["component"].values
    at = [components.labels.index(label) for label in labels.tolist()]
    widths = {name: [_width(components.factor(name), k) for k in at] for name in ("W", "H")}
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
    """Return the median relative width of the intervals of large entries of a component."""
    sizes = np.abs(factor.mean[k])
    large: Any = sizes >= LARGE * sizes.max(initial=0.0)
    ends = factor.interval(k, large)
    if ends is None or not sizes.max(initial=0.0) > 0:
        return float("nan")
    return float(np.median((ends[1] - ends[0]) / sizes[large]))
