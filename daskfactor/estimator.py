"""`BayesianNMF`: the posterior of a factorization behind scikit-learn's interface."""

from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from numbers import Integral
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import sparse
from scipy.special import logsumexp
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, check_non_negative, validate_data

from daskfactor.checks import one_of
from daskfactor.data.holdout import hold_out
from daskfactor.data.sources import as_blocks
from daskfactor.errors import OptionError, StoreError
from daskfactor.inference.sampling import sample
from daskfactor.inference.transform import transform
from daskfactor.models.settings import FactorModel
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.results.align import align
from daskfactor.results.backends import view_of
from daskfactor.results.components import factor_moments
from daskfactor.results.metadata import read_root
from daskfactor.results.pointwise import log_likelihood
from daskfactor.results.predict import with_new
from daskfactor.results.trace import Run

Array = NDArray[Any]
BETA = {"frobenius": 2.0, "kullback-leibler": 1.0, "itakura-saito": 0.0}
"""scikit-learn's names of the divergences that laws have."""
SAMPLED = "sampler", "draws", "tune", "chains", "thin", "init", "starts", "store", "client"
"""Parameters that `sample` has, too."""
FLOATS = ["float64", "float32"]


@dataclass(eq=False, repr=False)
class BayesianNMF(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    r"""Sample a non-negative matrix factorization, X ≈ W H, as a scikit-learn transformer.

    A face of :func:`sample` and :func:`transform`: NaN is a missing entry, sparse input stays
    sparse, and what is drawn is kept.

    Parameters
    ----------
    n_components
        Number of components K; ``"auto"`` finds it while it samples, see :class:`TweedieNMF`.
    beta_loss
        Power β of the law, or its divergence's name as for scikit-learn's ``NMF``:
        ``"kullback-leibler"`` (1, counts), ``"frobenius"`` (2), ``"itakura-saito"`` (0).
    model
        A model of non-negative factors in place of both, such as
        ``NegativeBinomialNMF(20)`` or a ``TweedieNMF`` with priors of one's own.
    sampler, draws, tune, chains, thin, init, starts, client
        As for :func:`sample`.
    store, overwrite
        As for :func:`sample`, but that a fit replaces the run of the estimator's own last fit.
        A clone, such as those of cross-validation, needs another store or none.
    unstored
        ``"zero"`` or ``"missing"``: what entries are that a sparse X does not store.
    random_state
        Seed; None draws a new one at every fit.
    verbose
        Whether progress is shown.

    Attributes
    ----------
    components_ : ndarray (K, n_features)
        Posterior mean of H, components aligned over draws and chains, largest first.
    components_sd_ : ndarray (K, n_features)
        Posterior standard deviation of the same.
    n_components_ : int
        Number of components: of ``"auto"`` as many as the draws support.
    n_iter_ : int
        Cycles of every chain.
    n_features_in_, feature_names_in_
        As everywhere in scikit-learn.
    trace_ : xarray.DataTree
        The aligned draws, for :func:`predict`, :func:`summarize`, :func:`report` and plots.

    Notes
    -----
    Şimşekli et al. 2017, section 2, for the model. ``transform`` is deterministic and takes every
    row by itself; draws of new rows are given by `sample_transform`.

    Examples
    --------
    >>> import numpy as np
    >>> from daskfactor import BayesianNMF
    >>> X = np.random.default_rng(0).poisson(3.0, (30, 8))
    >>> BayesianNMF(2, draws=50, tune=50, random_state=0).fit_transform(X).shape
    (30, 2)
    """

    n_components: Any = "auto"
    _: KW_ONLY
    beta_loss: Any = "kullback-leibler"
    model: Any = None
    sampler: Any = "auto"
    draws: int = 500
    tune: int = 500
    chains: int = 1
    thin: int = 1
    init: Any = "auto"
    starts: int = 1
    unstored: str = "zero"
    store: Any = None
    overwrite: bool = False
    client: Any = None
    random_state: Any = None
    verbose: Any = False

    def __sklearn_clone__(self) -> Self:
        clone: Self = super().__sklearn_clone__()
        if self.store is not None:
            clone._store_of_original = self.store
        return clone

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.input_tags.allow_nan = True
        tags.input_tags.positive_only = not self._signed()
        tags.transformer_tags.preserves_dtype = FLOATS
        return tags

    def fit(self, X: Any, y: Any = None, *, uncertainty: Any = None, weights: Any = None) -> Self:
        """Draw from the posterior of both factors.

        Parameters
        ----------
        X
            (n_samples, n_features): array, sparse matrix, DataFrame, NaN where missing; or
            anything else that :func:`sample` takes, such as a dask array, AnnData or a path.
        y
            Not used.
        uncertainty, weights
            Of the entries, as for :func:`as_blocks`.

        Raises
        ------
        ValueError
            If data or parameters cannot be used.
        """
        del y
        model = self._model()
        if self.store is not None and self.store == getattr(self, "_store_of_original", None):
            raise OptionError(
                f"this estimator is a clone, and store={self.store!r} belongs to the original; "
                "pass store=None (cross-validation and searches clone the estimator), or another "
                "path with set_params(store=...)"
            )
        blocks = self._blocks(X, reset=True, uncertainty=uncertainty, weights=weights)
        trace = sample(
            blocks,
            model,
            random_seed=self._seed(),
            keep="draws",
            overwrite=self.overwrite or self._stored_here(),
            progressbar=bool(self.verbose),
            **{name: getattr(self, name) for name in SAMPLED},
        )
        self.trace_ = align(trace)
        H = factor_moments(Run(self.trace_), "H", None)
        self.n_components_ = self._n_features_out = _supported(self.trace_, len(H[0]))
        self.components_, self.components_sd_ = (own[: self.n_components_] for own in H)
        self.n_iter_ = self.tune + self.draws * self.thin
        return self

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> Array:
        """Fit, then give the means of the rows of X as `transform` does."""
        found: Array = self.fit(X, y, **fit_params).transform(X, **fit_params)
        return found

    def transform(self, X: Any, *, uncertainty: Any = None, weights: Any = None) -> Array:
        """Give the posterior mean of the factors of every row, (n_samples, K).

        Deterministic; no row depends on another. Means are over draws of H of means given it.
        ``uncertainty`` or ``weights`` of the entries of X are needed if the fit had them.
        """
        found = self._drawn(X, uncertainty, weights, point=True)
        dtype = X.dtype if getattr(X, "dtype", None) in FLOATS else np.float64
        return found.values[:, : self.n_components_].astype(dtype, copy=False)

    def sample_transform(
        self, X: Any, draws: int | None = None, *, uncertainty: Any = None, weights: Any = None
    ) -> Array:
        """Draw the factors of every row from their posterior, (draws, n_samples, K).

        Parameters
        ----------
        X
            As for `transform`.
        draws
            How many of each chain; None: as many as were drawn at the fit.
        uncertainty, weights
            Of the entries, if the fit had them.
        """
        found = self._drawn(X, uncertainty, weights, draws=draws)
        values: Array = found.values[..., : self.n_components_]
        return values.reshape(-1, *values.shape[2:])

    def inverse_transform(self, X: Any) -> Array:
        """Give W H with the posterior mean of H, (n_samples, n_features)."""
        check_is_fitted(self)
        W = np.asarray(X)
        if W.ndim != 2 or W.shape[1] != self.n_components_:
            raise OptionError(
                f"inverse_transform takes (n_samples, {self.n_components_}), which transform "
                f"gives, got shape {W.shape}"
            )
        return W @ self.components_

    def score(
        self,
        X: Any,
        y: Any = None,
        *,
        share: float = 0.2,
        random_seed: int = 0,
        uncertainty: Any = None,
        weights: Any = None,
    ) -> float:
        r"""Give the mean log predictive density of entries of X that were held out.

        .. math:: \frac{1}{n} \sum_{ij} \log \frac{1}{T} \sum_t p(v_{ij} \mid w_i^{(t)} h_j^{(t)})

        A share of the entries is left out, rows are drawn given the others (as by
        `sample_transform`), and their density is taken; higher is better, in nats an entry.

        Parameters
        ----------
        X
            As for `fit`; rows that the fit has not seen for an honest score.
        y
            Not used.
        share
            Of the observed entries that are left out.
        random_seed
            Seed of their choice and of the draws: the same for all estimators that are compared.
        uncertainty, weights
            Of the entries, if the fit had them.
        """
        del y
        check_is_fitted(self)
        blocks = self._blocks(X, reset=False, uncertainty=uncertainty, weights=weights)
        held = hold_out(blocks, share, random_seed=random_seed)
        new = self._drawn(held.train, checked=True, random_seed=random_seed)
        run, _ = with_new(Run.of(self.trace_), "W", new)
        own = _weights_at(blocks, held.cells)
        told = log_likelihood(run.tree, held.cells, held.values, held_out=True, **own)
        found = told["held_out_log_likelihood"].to_dataset()
        densities = next(iter(found.data_vars.values())).values.reshape(-1, len(held.values))
        return float(np.mean(logsumexp(densities, axis=0) - np.log(len(densities))))

    def _drawn(
        self,
        X: Any,
        uncertainty: Any = None,
        weights: Any = None,
        checked: bool = False,
        **how: Any,
    ) -> xr.DataArray:
        """Transform rows with the fitted draws."""
        check_is_fitted(self)
        if isinstance(self.random_state, Integral):
            how = {"random_seed": int(self.random_state)} | how
        if not checked:
            X = self._blocks(X, reset=False, uncertainty=uncertainty, weights=weights)
        shown = bool(self.verbose)
        return transform(self.trace_, X, progressbar=shown, client=self.client, **how)

    def _stored_here(self) -> bool:
        """Check that the store holds the run of the last fit."""
        if self.store is None or not hasattr(self, "trace_"):
            return False
        with suppress(StoreError):
            run = read_root(view_of(self.store))["attributes"].get("trace_id")
            return bool(run == self.trace_.attrs.get("trace_id"))
        return False

    def _signed(self) -> bool:
        beta = getattr(self.model, "beta", None) if self.model is not None else self._beta()
        return beta == 2.0

    def _beta(self) -> Any:
        named = isinstance(self.beta_loss, str)
        return BETA.get(self.beta_loss) if named else self.beta_loss

    def _model(self) -> FactorModel:
        """Say which model the parameters stand for."""
        if self.model is not None:
            if not (isinstance(self.model, FactorModel) and self.model.nonnegative):
                raise OptionError(
                    "model must be one of non-negative factors, such as TweedieNMF(10) or "
                    f"NegativeBinomialNMF(10), got {self.model!r}; leave it out for n_components "
                    "and beta_loss"
                )
            if self.n_components != "auto":
                raise OptionError(
                    f"n_components={self.n_components!r} and a model that has "
                    f"{self.model.n_components!r}; leave out the one or the other"
                )
            return self.model
        if (beta := self._beta()) is None:
            raise OptionError(
                f"beta_loss must be a number or one of {', '.join(map(repr, BETA))}, "
                f"got {self.beta_loss!r}"
            )
        return TweedieNMF(self.n_components, beta=beta)

    def _seed(self) -> int | None:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        if self.random_state is None:
            return None
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _blocks(self, X: Any, reset: bool, **cells: Any) -> Any:
        """Put X on a grid; what scikit-learn knows is checked as it does, all else by the grid."""
        one_of("unstored", self.unstored, (None, "zero", "missing"))
        unstored = None
        if known := _known(X):
            X = validate_data(
                self,
                X,
                reset=reset,
                accept_sparse="csr",
                dtype=[np.float64, np.float32],
                ensure_all_finite="allow-nan",
            )
            if not self._signed():
                check_non_negative(X, f"{type(self).__name__} (input X)")
            names = getattr(self, "feature_names_in_", None)
            if sparse.issparse(X):
                unstored = self.unstored
            elif names is not None:
                X = xr.DataArray(X, dims=("row", "column"), coords={"column": names})
        dtype = str(X.dtype) if getattr(X, "dtype", None) in FLOATS else "float64"
        blocks = as_blocks(X, dtype=dtype, unstored=unstored, allow_empty=True, **cells)
        if reset and not known:
            self.n_features_in_ = blocks.shape[1]
        return blocks


def _known(X: Any) -> bool:
    """Whether scikit-learn knows this kind of data; all others are for `as_blocks` to check."""
    marks = ("__fspath__", "obs_names", "dask", "nchunks")
    return not (isinstance(X, xr.DataArray | str) or any(hasattr(X, mark) for mark in marks))


def _weights_at(blocks: Any, cells: Any) -> dict[str, Array]:
    """Uncertainties or weights of cells, as `log_likelihood` takes them."""
    own = blocks.weights
    if own is None:
        return {}
    found = np.asarray((own.observed_sparse() if own.is_sparse else own.to_numpy())[cells])
    uncertain = blocks.weighting == "uncertainty"
    return {"uncertainty": found**-0.5} if uncertain else {"weights": found}


def _supported(trace: xr.DataTree, width: int) -> int:
    """How many of the aligned components, which come by weight, the draws support."""
    posterior = trace["posterior"].to_dataset()
    if "effective_components" not in posterior:
        return width
    return max(1, round(float(posterior["effective_components"].median())))
