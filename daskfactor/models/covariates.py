"""Side information of rows or columns: covariates, and the matrix that links them to a factor."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, sparse

from daskfactor.checks import label_at, match_labels
from daskfactor.errors import ModelError
from daskfactor.models.settings import Auto, FactorModel, Learnt, StoredArrays

Array = NDArray[Any]

MOST_DIRECT = 1000
"""Covariates up to which XᵀX is decomposed, once; with more, every draw solves its systems."""
TOLERANCE = 1e-6
"""Residual at which conjugate gradients stop, in units of the right-hand side (Simm et al.)."""
is_sparse: Callable[[Any], bool] = sparse.issparse
PARTS = ("data", "indices", "indptr")
LINKED = ("covariates_w", "covariates_h")


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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Covariates):
            return NotImplemented
        mine, others = self.arrays(), other.arrays()
        return mine.keys() == others.keys() and all(
            np.array_equal(mine[name], others[name]) for name in mine
        )

    def __hash__(self) -> int:
        return hash(self.shape)

    def __repr__(self) -> str:
        return f"Covariates(shape={self.shape})"

    def described(self) -> list[int]:
        return list(self.shape)

    @classmethod
    def known(cls, described: list[int]) -> Self:
        return cls((described[0], described[1]))

    def arrays(self) -> dict[str, Array]:
        if self.values is None:
            return {}
        if is_sparse(self.values):
            return {name: getattr(self.values, name) for name in PARTS}
        return {"values": self.values}

    def with_arrays(self, arrays: Mapping[str, Array]) -> Self:
        values: Any = arrays.get("values")
        if "data" in arrays:
            parts: Any = tuple(arrays[name] for name in PARTS)
            values = sparse.csr_array(parts, shape=self.shape)
        return type(self)(self.shape, values, self.names)

    @cached_property
    def mean_square(self) -> float:
        """Mean over the rows of X of their squared lengths; 1 if all of them are zero."""
        entries = self.values.data if is_sparse(self.values) else self.values
        return float(np.sum(np.square(entries)) / self.shape[0]) or 1.0

    @cached_property
    def with_ones(self) -> "Covariates":
        """These and, as the last one, a covariate that is 1 everywhere."""
        kind = sparse if is_sparse(self.values) else np
        values = kind.hstack([self.values, np.ones((self.shape[0], 1))])
        if is_sparse(values):
            values = sparse.csr_array(values)
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
        """Return (XᵀX + λ_β I)⁻¹ R for R of (F, C)."""
        if self.shape[1] <= MOST_DIRECT:
            roots, vectors = self._spectrum
            return np.asarray(vectors @ ((vectors.T @ right) / (roots + ridge)[:, None]))
        return np.stack([self._solve(ridge, column) for column in right.T], axis=1)

    def _solve(self, ridge: float, right: Array) -> Array:
        """Solve (XᵀX + λ_β I) b = r by conjugate gradients, preconditioned by the diagonal."""
        from scipy.sparse.linalg import LinearOperator, cg

        X, size = self.values, (self.shape[1], self.shape[1])
        diagonal = self._squares + ridge
        left = LinearOperator(size, lambda b: X.T @ (X @ b) + ridge * b, dtype=np.float64)
        scaled = LinearOperator(size, lambda b: b / diagonal, dtype=np.float64)
        found, _ = cg(left, right, rtol=TOLERANCE, M=scaled)
        return np.asarray(found)

    @cached_property
    def _squares(self) -> Array:
        """Squared lengths of the columns of X, (F,)."""
        return np.asarray((self.values * self.values).sum(axis=0)).ravel()

    def at(self, rows: Array) -> "Covariates":
        """Return those of some rows, given by position or mask."""
        values = self.values[rows]
        labels = None if self.labels is None else self.labels[rows]
        return Covariates(values.shape, values, self.names, labels)

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
        found, side = match_labels(labels, self.labels), _side(name)
        twice, lost = found.twice[1], np.flatnonzero(found.at < 0)
        remedy = "or drop the labels to match by position"
        if twice is not None:
            raise ModelError(
                f"{name} has more than one row labelled {twice!r}, and its rows are matched to the "
                f"data's {side} by label; keep one of each, {remedy}"
            )
        if len(lost):
            raise ModelError(
                f"{name} lacks {len(lost)} of the data's {len(found.at)} {side}, the first of them "
                f"{label_at(labels, lost[0])} (its own labels begin with "
                f"{label_at(self.labels, 0)}); give all of them covariates, {remedy}"
            )
        return self.at(found.at)

    def check_length(self, name: str, length: int) -> None:
        """Refuse covariates that are not one row for each row (or column) of the data.

        Raises
        ------
        ModelError
            If they are not.
        """
        if self.shape[0] != length:
            side = _side(name)
            raise ModelError(
                f"{name} must have one row for each of the data's {length} {side}, got "
                f"{self.shape[0]} rows; give all of them covariates, in the order of the data"
            )


def checked_covariates(name: str, given: Any) -> Covariates | None:
    """Covariates from what the user passed: an array (n, F), dense, sparse or labelled.

    Raises
    ------
    ModelError
        If they are no finite real numbers in two dimensions.
    """
    if given is None or isinstance(given, Covariates):
        return given
    values: Any
    wanted = f"{name} must be an array of real numbers, ({_side(name)}, covariates)"
    try:
        values = sparse.csr_array(given) if is_sparse(given) else np.ma.asanyarray(given)
    except (RuntimeError, TypeError, ValueError):  # of uneven lists, or an array of `sparse`
        values = np.ma.empty(0, dtype=object)
    if values.dtype.kind not in "biuf":
        raise ModelError(
            f"{wanted}, got {type(given).__name__} of dtype {getattr(given, 'dtype', 'object')}; "
            "encode categories as columns of 0 and 1, and pass sparse ones as a scipy matrix"
        )
    if values.ndim != 2 or 0 in values.shape:
        raise ModelError(f"{wanted}, got shape {values.shape}; one covariate is one column")
    if is_sparse(values):
        values = values.astype(np.float64)
        values.sum_duplicates()
        entries = values.data
    else:
        entries = values = np.array(values.astype(np.float64).filled(np.nan), order="C")
    gone = int(np.count_nonzero(~np.isfinite(entries)))
    if gone:
        raise ModelError(
            f"{name} must be finite, and {gone} of its entries are NaN, infinite or masked; fill "
            "them in, for example with the mean of their column, and add a column that marks them"
        )
    return Covariates((values.shape[0], values.shape[1]), values, _names(given), _labels(given))


class SideInformation(FactorModel):
    """A model with fields for covariates, and for the precisions of their links."""

    covariates_w: Any
    covariates_h: Any
    link_precision_w: float | Auto
    link_precision_h: float | Auto

    @property
    def covariates(self) -> tuple[Covariates | None, Covariates | None]:  # type: ignore[override]
        """Covariates of the rows and of the columns."""
        return self.covariates_w, self.covariates_h

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse data whose rows or columns are not those of the covariates.

        Raises
        ------
        ModelError
            If they are not.
        """
        for name, own, length in zip(LINKED, self.covariates, shape, strict=True):
            if own is not None:
                own.check_length(name, length)

    def sized(self, shape: Sequence[int], labels: Sequence[Any] = (None, None)) -> Self:
        """The model for data of this shape and these labels, by which covariates are found."""
        del shape
        sides = enumerate(zip(LINKED, self.covariates, strict=True))
        found: dict[str, Any] = {
            name: own.matching(name, labels[side]) for side, (name, own) in sides if own is not None
        }
        return replace(self, **found) if found else self

    @property
    def starting_ridges(self) -> tuple[float, float]:
        """Precisions of both links, or the means of their priors where they are drawn.

        These are such that covariates shift a row by one unit of what they shift.
        """
        given = self.link_precision_w, self.link_precision_h
        w, h = (
            float(own) if own != "auto" else 1.0 if of is None else of.mean_square
            for own, of in zip(given, self.covariates, strict=True)
        )
        return w, h

    def learnt_links(self, effect: str, unit: str = "") -> list[Learnt]:
        """Name links and their precisions; ``effect`` says what covariates times a link are."""
        found = []
        sides = zip("wh", ("row_feature", "column_feature"), self.covariates, strict=True)
        for side, dim, own in sides:
            if own is not None:
                doc = f"link: {effect} of {side.upper()}"
                found.append(Learnt(f"link_{side}", (dim, "component"), doc))
                found.append(
                    Learnt(f"link_precision_{side}", (), f"precision of link_{side}{unit}")
                )
        return found


def _names(given: Any) -> tuple[str, ...] | None:
    """Labels of the columns of an xarray.DataArray or a pandas.DataFrame."""
    labels = getattr(given, "columns", None)
    if hasattr(given, "dims") and hasattr(given, "indexes"):
        labels = given.indexes.get(given.dims[1])
    return None if labels is None else tuple(map(str, labels))


def _labels(given: Any) -> Any:
    """Labels of the rows of an xarray.DataArray or a pandas.DataFrame; None: they are numbered."""
    index = getattr(given, "index", None)
    if hasattr(given, "dims") and hasattr(given, "indexes"):
        index = given.indexes.get(given.dims[0])
    numbered = index is None or callable(index) or type(index).__name__ == "RangeIndex"
    if numbered:
        return None
    return index if getattr(index, "nlevels", 1) > 1 else np.asarray(index)


def _side(name: str) -> str:
    return "rows" if name.endswith("w") else "columns"


COVARIATES = {"check": checked_covariates, "arrays": Covariates}
