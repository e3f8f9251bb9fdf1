"""Side information of rows or columns: covariates, and the matrix that links them to a factor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, sparse

from daskfactor.checks import label_at, match_labels
from daskfactor.errors import ModelError
from daskfactor.models.settings import Auto, FactorModel, Learnt, StoredArrays, as_table, is_sparse

Array = NDArray[Any]

MOST_DIRECT, TOLERANCE = 1000, 1e-6
PARTS = ("data", "indices", "indptr")


@dataclass(frozen=True, eq=False)
class Covariates(StoredArrays):
    r"""Covariates X of the rows (or columns) of a matrix, (n, F), and the law of their link.

    .. math:: w_k \sim \mathcal N(X b_k, I / \lambda_k), \quad
        b_k \sim \mathcal N(0, I / (\lambda_\beta \lambda_k))

    Attributes
    ----------
    shape
        n and F.
    values
        X in double precision, dense or in compressed rows; None for the model of a stored
        run whose arrays have not been read.
    names
        Of the F covariates; None: they are known by number.
    labels
        Of the n rows, by which those of the data are found; None: by position.

    References
    ----------
    Simm et al. 2017, "Macau: scalable Bayesian factorization with high-dimensional side
    information using MCMC", sections 2 and 3.
    """

    shape: tuple[int, int]
    values: Any = None
    names: tuple[str, ...] | None = None
    labels: Any = None

    def __repr__(self) -> str:
        return f"Covariates(shape={self.shape})"

    @property
    def length(self) -> int:
        return self.shape[0]

    @property
    def width(self) -> int:
        return self.shape[1]

    def arrays(self) -> dict[str, Array]:
        if is_sparse(self.values):
            return {name: getattr(self.values, name) for name in PARTS}
        return super().arrays()

    def read(self, name: str, arrays: Mapping[str, Array]) -> Self:
        if f"{name}/data" not in arrays:
            return super().read(name, arrays)
        parts: Any = tuple(arrays[f"{name}/{part}"] for part in PARTS)
        return replace(self, values=sparse.csr_array(parts, shape=self.shape))

    @cached_property
    def mean_square(self) -> float:
        """Mean over the rows of X of their squared lengths; 1 if all of them are zero."""
        entries = self.values.data if is_sparse(self.values) else self.values
        return float(np.sum(np.square(entries)) / self.shape[0]) or 1.0

    @cached_property
    def with_ones(self) -> "Covariates":
        """These and, as the last one, a covariate that is 1 everywhere."""
        blocks: Any = [self.values, np.ones((self.shape[0], 1))]
        values = sparse.hstack(blocks, "csr") if is_sparse(self.values) else np.hstack(blocks)
        return Covariates((self.shape[0], self.shape[1] + 1), values)

    @cached_property
    def _spectrum(self) -> tuple[Array, Array]:
        """Eigenvalues (F,) and eigenvectors (F, F) of XᵀX."""
        gram = self.values.T @ self.values
        roots, vectors = linalg.eigh(gram.toarray() if is_sparse(gram) else gram)
        # Rounding may turn a vector about, and draws with it, unless its sign is settled.
        largest = np.abs(vectors).argmax(axis=0)
        vectors *= np.sign(vectors[largest, np.arange(roots.size)])
        return np.maximum(roots, 0.0), vectors

    def predicted(self, link: Array) -> Array:
        """Return X B, (n, C)."""
        return np.asarray(self.values @ link)

    def draw_link(
        self, factor: Array, precision: Array, ridge: float, rng: np.random.Generator
    ) -> Array:
        r"""Draw B, (F, C), given the columns of the factor that it links to.

        .. math:: b_k \sim \mathcal N(A^{-1} X^\top w_k, A^{-1} / \lambda_k), \quad
            A = X^\top X + \lambda_\beta I

        With many covariates by solving, with fresh standard normal e and e',

        .. math:: A b_k = X^\top (w_k + e / \sqrt{\lambda_k})
            + \sqrt{\lambda_\beta / \lambda_k}\, e'

        Parameters
        ----------
        factor
            w less its prior mean without covariates, (n, C).
        precision, ridge
            λ, (C,), and λ_β.
        rng
            Where the normal numbers come from.

        References
        ----------
        Simm et al. 2017, section 3: noise injection.
        """
        X, size = self.values, (self.shape[1], factor.shape[1])
        if self.shape[1] <= MOST_DIRECT:
            roots, vectors = self._spectrum
            shifted = (roots + ridge)[:, None]
            spread = rng.normal(size=size) / np.sqrt(shifted * precision)
            return np.asarray(vectors @ ((vectors.T @ (X.T @ factor)) / shifted + spread))
        noisy = factor + rng.normal(size=factor.shape) / np.sqrt(precision)
        right = X.T @ noisy + np.sqrt(ridge / precision) * rng.normal(size=size)
        return self.solve(right, ridge)

    def solve(self, right: Array, ridge: float) -> Array:
        """Return (XᵀX + λ_β I)⁻¹ R for R of (F, C).

        XᵀX is decomposed, once, for up to `MOST_DIRECT` covariates; with more, every draw solves
        its systems.
        """
        if self.shape[1] <= MOST_DIRECT:
            roots, vectors = self._spectrum
            return np.asarray(vectors @ ((vectors.T @ right) / (roots + ridge)[:, None]))
        return np.stack([self._solve(ridge, column) for column in right.T], axis=1)

    def _solve(self, ridge: float, right: Array) -> Array:
        """Solve (XᵀX + λ_β I) b = r by conjugate gradients, preconditioned by the diagonal.

        They stop at a residual of `TOLERANCE` in units of r (Simm et al.).
        """
        from scipy.sparse.linalg import LinearOperator, cg

        X, size = self.values, (self.shape[1], self.shape[1])
        diagonal = self._squares + ridge
        left = LinearOperator(size, lambda b: X.T @ (X @ b) + ridge * b, dtype=np.float64)
        scaled = LinearOperator(size, lambda b: b / diagonal, dtype=np.float64)
        return np.asarray(cg(left, right, rtol=TOLERANCE, M=scaled)[0])

    @cached_property
    def _squares(self) -> Array:
        """Squared lengths of the columns of X, (F,)."""
        return np.asarray((self.values * self.values).sum(axis=0)).ravel()

    def at(self, rows: Any) -> Self:
        values = self.values[rows]
        labels = None if self.labels is None else self.labels[rows]
        return replace(self, shape=values.shape, values=values, labels=labels)

    def matching(self, name: str, labels: Any) -> "Covariates":
        """Return those of the rows (or columns) of data with these labels, in their order.

        By position where either has no labels, or both have the same. Stacked dimensions have
        labels of each, see `daskfactor.checks.match_labels`.

        Raises
        ------
        ModelError
            If a label is missing among those of the covariates, or is there more than once.
        """
        if self.labels is None or labels is None:
            return self
        matches, side, problem = match_labels(labels, self.labels), _side(name), None
        twice, missing = matches.repeated[1], np.flatnonzero(matches.at < 0)
        if twice is not None:
            problem = f"has more than one row labelled {twice!r}; keep one of each"
        elif len(missing):
            problem = (
                f"lacks {len(missing)} of the data's {len(matches.at)} {side}, the first of them "
                f"{label_at(labels, missing[0])} (its own labels begin with "
                f"{label_at(self.labels, 0)}); give all of them covariates"
            )
        if problem:
            raise ModelError(
                f"{name} {problem}, or drop the labels to match its rows to {side} by position"
            )
        return self.at(matches.at)


def checked_covariates(name: str, value: Any) -> Covariates | None:
    """Check covariates (n, F), dense, sparse or labelled.

    Raises
    ------
    ModelError
        If they are no finite real numbers in two dimensions.
    """
    if value is None or isinstance(value, Covariates):
        return value
    values = as_table(name, value, f"({_side(name)}, covariates)", compressed=True)
    entries = values.data if is_sparse(values) else values
    if count := int(np.count_nonzero(~np.isfinite(entries))):
        raise ModelError(
            f"{name} must be finite, and {count} of its entries are NaN, infinite or masked; fill "
            "them in, for example with the mean of their column, and add a column that marks them"
        )
    names, labels = _index(value, 1), _index(value, 0)
    names = None if names is None else tuple(map(str, names))
    if labels is not None and getattr(labels, "nlevels", 1) == 1:
        numbered = callable(labels) or type(labels).__name__ == "RangeIndex"  # lists have .index()
        labels = None if numbered else np.asarray(labels)
    return Covariates(values.shape, values, names, labels)


def _index(value: Any, axis: int) -> Any:
    """Return the labels along an axis of an xarray.DataArray or a pandas.DataFrame."""
    if hasattr(value, "dims") and hasattr(value, "indexes"):
        return value.indexes.get(value.dims[axis])
    return getattr(value, ("index", "columns")[axis], None)


@dataclass(frozen=True)
class LinkPrior:
    """The settings of the link from covariates to one factor.

    Attributes
    ----------
    side
        The factor's letter, "w" or "h".
    covariates, link_precision
        As the model has them.
    """

    side: str
    covariates: Covariates | None
    link_precision: float | Auto

    @classmethod
    def of(cls, model: FactorModel, side: str) -> Self:
        """Take the settings of one side from those of a model."""
        return cls(side, *(getattr(model, f"{field.name}_{side}") for field in fields(cls)[1:]))

    @property
    def starting_ridge(self) -> float:
        """Precision of the link, or the mean of its prior where it is drawn.

        It is such that covariates shift a row by one unit of what they shift.
        """
        if self.link_precision != "auto":
            return float(self.link_precision)
        return 1.0 if self.covariates is None else self.covariates.mean_square

    def draw_link(self, rng: np.random.Generator, precision: Array, learnt: dict[str, Any]) -> Any:
        """Draw the link, (F, C), and its precision, which goes into ``learnt`` if it is learnt.

        ``precision`` is that of the factor's columns, (C,).
        """
        assert self.covariates is not None
        ridge = self.starting_ridge
        if self.link_precision == "auto":
            ridge = learnt[f"link_precision_{self.side}"] = ridge * rng.exponential()
        link = rng.normal(size=(self.covariates.shape[1], len(precision)))
        return link / np.sqrt(ridge * precision)

    def learnt_link(self, effect: str, unit: str = "") -> list[Learnt]:
        """Name the link and its precision; ``effect`` describes covariates times the link."""
        if self.covariates is None:
            return []
        dim, name = f"{_side(self.side)[:-1]}_feature", f"link_{self.side}"
        return [
            Learnt(name, (dim, "component"), f"link: {effect} of {self.side.upper()}"),
            Learnt(f"link_precision_{self.side}", (), f"precision of {name}{unit}"),
        ]


def both(name: str, doc: str) -> Any:
    """Make a property of a model that has the attribute of the prior of W and of that of H."""
    return property(lambda self: tuple(getattr(one, name) for one in self.factor_priors), doc=doc)


class SideInformation(FactorModel):
    """A model with settings for each factor, whose names end with _w and _h; with covariates."""

    prior_kind: ClassVar[type[LinkPrior]] = LinkPrior

    @property
    def factor_priors(self) -> tuple[Any, Any]:
        """The settings of W and of H, as `prior_kind`."""
        return self.prior_kind.of(self, "w"), self.prior_kind.of(self, "h")

    covariates = both("covariates", "Covariates of the rows and of the columns.")
    starting_ridges = both("starting_ridge", "Precisions of links, or means of their priors.")

    def sized(self, shape: Sequence[int], labels: Sequence[Any] = (None, None)) -> Self:
        """Return the model for data of this shape, its covariates matched to the labels."""
        matched = {}
        for prior, of_side in zip(self.factor_priors, labels, strict=True):
            if prior.covariates is not None:
                name = f"covariates_{prior.side}"
                matched[name] = prior.covariates.matching(name, of_side)
        return self.changed(**matched) if matched else self


def _side(name: str) -> str:
    return "rows" if name.endswith("w") else "columns"


COVARIATES = {"check": checked_covariates, "arrays": Covariates}
