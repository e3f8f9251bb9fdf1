"""`BayesianNMF`: Bayesian factorization with the interface of scikit-learn."""

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
from daskfactor.results.components import factor_moments
from daskfactor.results.pointwise import log_likelihood
from daskfactor.results.predict import with_new
from daskfactor.runs.backends import view_of
from daskfactor.runs.metadata import read_root
from daskfactor.runs.trace import Run

Array = NDArray[Any]
BETA = {"frobenius": 2.0, "kullback-leibler": 1.0, "itakura-saito": 0.0}
"""Powers of the divergences by their names in scikit-learn."""
SAMPLE_OPTIONS = "sampler", "draws", "tune", "chains", "thin", "init", "starts", "store", "client"
"""Parameters that are passed to `sample`."""
FLOATS = ["float64", "float32"]
"""Data types that are kept."""


@dataclass(eq=False, repr=False)
class BayesianNMF(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    r"""Sample a non-negative matrix factorization, X ≈ W H, as a scikit-learn transformer.

    Uses :func:`sample` and :func:`transform`. NaN is a missing entry, sparse input stays sparse,
    and the draws are kept.

    Parameters
    ----------
    n_components
        Number of components K; ``"auto"`` infers it while sampling, see :class:`TweedieNMF`.
    beta_loss
        Power β of the likelihood, or the name of its divergence as for scikit-learn's ``NMF``:
        ``"kullback-leibler"`` (1, counts), ``"frobenius"`` (2), ``"itakura-saito"`` (0).
    model
        Model of non-negative factors that replaces both, such as ``NegativeBinomialNMF(20)``
        or a ``TweedieNMF`` with custom priors.
    sampler, draws, tune, chains, thin, init, starts, client
        As for :func:`sample`.
    store, overwrite
        As for :func:`sample`, except that a fit replaces the run of the last fit of the same
        estimator. A clone, such as those of cross-validation, needs another store or none.
    unstored
        Meaning of the entries that a sparse X does not store: ``"zero"`` or ``"missing"``.
    random_state
        Seed; None draws a new one at every fit.
    verbose
        Whether to show a progress bar.

    Attributes
    ----------
    components_ : ndarray (K, n_features)
        Posterior mean of H; components are aligned over draws and chains, largest first.
    components_sd_ : ndarray (K, n_features)
        Posterior standard deviation of H.
    n_components_ : int
        Number of components; for ``"auto"`` the number that the draws support.
    n_iter_ : int
        Number of cycles per chain.
    n_features_in_, feature_names_in_
        Number and names of the features, as in all estimators of scikit-learn.
    trace_ : xarray.DataTree
        Aligned draws, for :func:`predict`, :func:`summarize`, :func:`report` and plots.

    Notes
    -----
    The model is that of Şimşekli et al. 2017, section 2. ``transform`` is deterministic and treats
    every row separately; `sample_transform` returns draws for new rows.

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
        """Sample both factors from their posterior.

        Parameters
        ----------
        X
            Data (n_samples, n_features): array, sparse matrix or DataFrame, NaN where missing; or
            anything else that :func:`sample` takes, such as a dask array, AnnData or a path.
        y
            Not used.
        uncertainty, weights
            Uncertainties or weights of the entries, as for :func:`as_blocks`.

        Raises
        ------
        ValueError
            If the data or a parameter is invalid.
        """
        del y
        model = self._model()
        if self.store is not None and self.store == getattr(self, "_store_of_original", None):
            raise OptionError(
                f"store={self.store!r} belongs to the original of this estimator, which is a "
                "clone; pass store=None (cross-validation and searches clone the estimator), or "
                "another path with set_params(store=...)"
            )
        blocks = self._blocks(X, reset=True, uncertainty=uncertainty, weights=weights)
        trace = sample(
            blocks,
            model,
            random_seed=self._seed(),
            keep="draws",
            overwrite=self.overwrite or self._is_stored(),
            progressbar=bool(self.verbose),
            **{name: getattr(self, name) for name in SAMPLE_OPTIONS},
        )
        self.trace_ = align(trace)
        H = factor_moments(Run(self.trace_), "H", None)
        self.n_components_ = self._n_features_out = _supported_components(self.trace_, len(H[0]))
        self.components_, self.components_sd_ = (values[: self.n_components_] for values in H)
        self.n_iter_ = self.tune + self.draws * self.thin
        return self

    def fit_transform(self, X: Any, y: Any = None, **fit_params: Any) -> Array:
        """Fit, and return the posterior means of the rows of X, as `transform` does."""
        means: Array = self.fit(X, y, **fit_params).transform(X, **fit_params)
        return means

    def transform(self, X: Any, *, uncertainty: Any = None, weights: Any = None) -> Array:
        """Return the posterior mean of the factors of every row, (n_samples, K).

        The result is deterministic, and rows do not depend on each other. Conditional means given
        H are averaged over the draws of H. If the fit had ``uncertainty`` or ``weights``, pass
        those of the entries of X.
        """
        means = self._transform_rows(X, uncertainty, weights, point=True)
        dtype = X.dtype if getattr(X, "dtype", None) in FLOATS else np.float64
        return means.values[:, : self.n_components_].astype(dtype, copy=False)

    def sample_transform(
        self, X: Any, draws: int | None = None, *, uncertainty: Any = None, weights: Any = None
    ) -> Array:
        """Return draws of the factors of every row from their posterior, (draws, n_samples, K).

        Parameters
        ----------
        X
            As for `transform`.
        draws
            Number of draws per chain; by default as many as the fit has drawn.
        uncertainty, weights
            Uncertainties or weights of the entries, if the fit had them.
        """
        factors = self._transform_rows(X, uncertainty, weights, draws=draws)
        values: Array = factors.values[..., : self.n_components_]
        return values.reshape(-1, *values.shape[2:])

    def inverse_transform(self, X: Any) -> Array:
        """Return W H with the posterior mean of H, (n_samples, n_features)."""
        check_is_fitted(self)
        W = np.asarray(X)
        if W.ndim != 2 or W.shape[1] != self.n_components_:
            raise OptionError(
                f"X must have the shape (n_samples, {self.n_components_}) of the result of "
                f"transform, got shape {W.shape}; pass what transform returned"
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
        r"""Return the mean log predictive density of held-out entries of X.

        .. math:: \frac{1}{n} \sum_{ij} \log \frac{1}{T} \sum_t p(v_{ij} \mid w_i^{(t)} h_j^{(t)})

        A share of the entries is held out, the factors of the rows are drawn given the others (as
        by `sample_transform`), and the held-out entries are scored. Higher is better; the unit is
        nats per entry.

        Parameters
        ----------
        X
            Data as for `fit`; pass rows that the fit has not used.
        y
            Not used.
        share
            Share of the observed entries to hold out.
        random_seed
            Seed of the held-out entries and of the draws; use the same for all estimators in a
            comparison.
        uncertainty, weights
            Uncertainties or weights of the entries, if the fit had them.
        """
        del y
        check_is_fitted(self)
        blocks = self._blocks(X, reset=False, uncertainty=uncertainty, weights=weights)
        split = hold_out(blocks, share, random_seed=random_seed)
        new = self._transform_rows(split.train, checked=True, random_seed=random_seed)
        run, _ = with_new(Run.of(self.trace_), "W", new)
        weighting = _weights_at(blocks, split.cells)
        tree = log_likelihood(run.tree, split.cells, split.values, held_out=True, **weighting)
        variables = tree["held_out_log_likelihood"].to_dataset().data_vars.values()
        densities = next(iter(variables)).values.reshape(-1, len(split.values))
        return float(np.mean(logsumexp(densities, axis=0) - np.log(len(densities))))

    def _transform_rows(
        self,
        X: Any,
        uncertainty: Any = None,
        weights: Any = None,
        checked: bool = False,
        **options: Any,
    ) -> xr.DataArray:
        """Return the factors of rows under the fitted draws."""
        check_is_fitted(self)
        if isinstance(self.random_state, Integral):
            options = {"random_seed": int(self.random_state)} | options
        if not checked:
            X = self._blocks(X, reset=False, uncertainty=uncertainty, weights=weights)
        progressbar = bool(self.verbose)
        return transform(self.trace_, X, progressbar=progressbar, client=self.client, **options)

    def _is_stored(self) -> bool:
        """Return whether the store holds the run of the last fit."""
        if self.store is None or not hasattr(self, "trace_"):
            return False
        with suppress(StoreError):
            run = read_root(view_of(self.store))["attributes"].get("trace_id")
            return bool(run == self.trace_.attrs.get("trace_id"))
        return False

    def _signed(self) -> bool:
        """Return whether the data may be negative."""
        beta = getattr(self.model, "beta", None) if self.model is not None else self._beta()
        return beta == 2.0

    def _beta(self) -> Any:
        """Return the power of the likelihood; None for an unknown name."""
        return BETA.get(self.beta_loss) if isinstance(self.beta_loss, str) else self.beta_loss

    def _model(self) -> FactorModel:
        """Return the model that the parameters describe."""
        if self.model is not None:
            if not (isinstance(self.model, FactorModel) and self.model.nonnegative):
                raise OptionError(
                    f"model must have non-negative factors, got {self.model!r}; pass a model such "
                    "as TweedieNMF(10) or NegativeBinomialNMF(10), or leave it out and pass "
                    "n_components and beta_loss"
                )
            if self.n_components != "auto":
                raise OptionError(
                    f"n_components and model exclude each other, got {self.n_components!r} and a "
                    f"model with n_components={self.model.n_components!r}; leave one of them out"
                )
            return self.model
        if (beta := self._beta()) is None:
            raise OptionError(
                f"beta_loss must be a number or one of {', '.join(map(repr, BETA))}, "
                f"got {self.beta_loss!r}"
            )
        return TweedieNMF(self.n_components, beta=beta)

    def _seed(self) -> int | None:
        """Return the seed for `sample`, or None for a fresh one."""
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        if self.random_state is None:
            return None
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _blocks(self, X: Any, reset: bool, **cells: Any) -> Any:
        """Return X as blocks, after the checks of scikit-learn for the types that it supports."""
        one_of("unstored", self.unstored, (None, "zero", "missing"))
        unstored = None
        if supported := _is_supported(X):
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
        if reset and not supported:
            self.n_features_in_ = blocks.shape[1]
        return blocks


def _is_supported(X: Any) -> bool:
    """Return whether scikit-learn supports the type of X; `as_blocks` checks all others."""
    marks = ("__fspath__", "obs_names", "dask", "nchunks")
    return not (isinstance(X, xr.DataArray | str) or any(hasattr(X, mark) for mark in marks))


def _weights_at(blocks: Any, cells: Any) -> dict[str, Array]:
    """Return the uncertainties or weights of cells as arguments of `log_likelihood`."""
    matrix = blocks.weights
    if matrix is None:
        return {}
    weights = np.asarray(
        (matrix.observed_sparse() if matrix.is_sparse else matrix.to_numpy())[cells]
    )
    if blocks.weighting == "uncertainty":
        return {"uncertainty": weights**-0.5}
    return {"weights": weights}


def _supported_components(trace: xr.DataTree, width: int) -> int:
    """Return the number of aligned components, sorted by weight, that the draws support."""
    posterior = trace["posterior"].to_dataset()
    if "effective_components" not in posterior:
        return width
    return max(1, round(float(posterior["effective_components"].median())))
