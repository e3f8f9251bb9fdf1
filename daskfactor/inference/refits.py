"""Refits without some cells for ArviZ's functions of exact cross-validation."""

from importlib import import_module
from typing import Any

import numpy as np
import xarray as xr
from scipy import sparse

from daskfactor.data.holdout import HeldOut, hold_out
from daskfactor.errors import OptionError
from daskfactor.inference.sampling import sample
from daskfactor.options import Reading
from daskfactor.results.pointwise import HELD_OUT, log_likelihood
from daskfactor.runs.schema import CELL_INDICES


class Refits:
    """Methods that ArviZ calls on a ``SamplingWrapper``."""

    model: Any
    sample_kwargs: dict[str, Any]
    V: Any
    cells: tuple[Any, Any]

    def sel_observations(self, idx: Any) -> tuple[Any, HeldOut]:
        """Return V without some of the cells, and these cells with their values."""
        at = np.atleast_1d(np.asarray(idx))
        cells = self.cells[0][at], self.cells[1][at]
        options = self.sample_kwargs
        reading = {name: options[name] for name in Reading.__annotations__ if name in options}
        split = hold_out(self.V, cells=cells, **reading)
        return split.train, split

    def sample(self, modified_observed_data: Any) -> xr.DataTree:
        """Draw from the posterior given what is left."""
        read = Reading.__annotations__.keys() - {"unstored"}  # these cells are left out already
        options: dict[str, Any] = {"progressbar": False, "keep": "draws"}
        options |= {name: value for name, value in self.sample_kwargs.items() if name not in read}
        return sample(modified_observed_data, self.model, **options)

    def get_inference_data(self, fitted_model: xr.DataTree) -> xr.DataTree:
        """Return the trace itself."""
        return fitted_model

    def log_likelihood__i(self, excluded_obs: HeldOut, idata__i: xr.DataTree) -> xr.DataArray:
        """Return the log density of the cells under every draw that has not seen them."""
        tree = log_likelihood(idata__i, excluded_obs.cells, excluded_obs.values, held_out=True)
        return tree[HELD_OUT].to_dataset()["V"].load()


def sampling_wrapper(tree: Any, V: Any, model: Any, sampler: Any = "auto", **options: Any) -> Any:
    r"""Let ArviZ's ``loo_kfold`` and ``reloo`` fit a model again without some of the cells.

    .. math:: \sum_i \log \frac1T \sum_t p(v_i \mid \theta^{(t)}), \qquad
        \theta^{(t)} \sim p(\theta \mid V \text{ without the fold of cell } i)

    Only the cells of ``tree`` take turns; all other cells of V are in every fit. That is the
    honest score of these cells, at the price of one run for each fold, and
    ``arviz.loo_kfold(tree, wrapper, k=10)`` of ArviZ 1.x gives it. ``arviz.reloo(wrapper, ...)``
    (0.2x and 1.x) goes by ``arviz.loo`` but for cells whose Pareto k is large, which it refits
    without, one by one.

    Parameters
    ----------
    tree
        Result of `log_likelihood` for the cells.
    V, model, sampler, options
        As for `sample`. Of a sparse matrix, say what entries are that are not stored
        (``unstored=``).

    Returns
    -------
    SamplingWrapper
        An instance of the class of that name of the ArviZ that is installed.

    Raises
    ------
    OptionError
        If there is no ArviZ, the tree has no log-likelihood of cells, or ``unstored`` is not
        given for a sparse matrix. Later, if V has no value at one of the cells.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2), **run)
    >>> tree = dfac.log_likelihood(trace, ([0, 1], [2, 3]))
    >>> wrapper = dfac.sampling_wrapper(tree, V, dfac.TweedieNMF(2), draws=20, tune=20)
    >>> wrapper.model.n_components
    2
    """
    try:
        cells = tuple(np.asarray(tree["log_likelihood"][name].values) for name in CELL_INDICES)
    except (KeyError, TypeError) as error:
        raise OptionError(
            "the first argument is the result of daskfactor.log_likelihood for cells that take "
            f"turns, of those that its run has seen, got {type(tree).__name__}"
        ) from error
    if sparse.issparse(V) and options.get("unstored") is None:
        raise OptionError(
            'V is sparse: pass unstored="zero" or unstored="missing", as for the run of the tree'
        )
    base, converted = _of_arviz()
    made = type("SamplingWrapper", (Refits, base), {})(
        model=model,
        idata_orig=converted(tree) if isinstance(tree, xr.DataTree) else tree,
        sample_kwargs={"sampler": sampler} | options,
    )
    made.V, made.cells = V, cells
    return made


def _of_arviz() -> tuple[Any, Any]:
    """Return ArviZ's class of wrappers, and its conversion of a tree."""
    for name in ("arviz", "arviz_stats.loo"):
        try:
            module = import_module(name)
        except ImportError:
            continue
        return module.SamplingWrapper, getattr(module, "from_datatree", lambda tree: tree)
    raise OptionError("refits for ArviZ need ArviZ, which is not installed: pip install arviz")
