r"""Numbers that sum up a draw, and that may be compared between draws and chains.

What no order, scale or sign of components changes comes from sums of columns and
from the K x K Gram matrices A = WᵀW and B = HHᵀ: the norm of WH is √tr(AB), its
singular values are the roots of the eigenvalues of LᵀBL with A = LLᵀ. So a draw costs
(I + J) K² operations, and WH is never formed.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.matching import Law, sizes
from daskfactor.results.trace import each_draw

Array = NDArray[np.float64]
Cells = tuple[NDArray[np.int64], NDArray[np.int64]]

SPECTRUM: Final = 5
"""Singular values that are followed, the largest ones."""


class Series(NamedTuple):
    """One number per draw.

    ``kind`` is ``"density"``; ``"product"``, of WH alone; ``"scale"``, which the priors
    alone hold in place; ``"component"``, one for each component in the order of the
    draws; ``"aligned"``, in one order.
    """

    name: str
    kind: str
    values: Array
    share: float = float("nan")
    least_share: float = float("nan")


def addressed_cells(shape: tuple[int, int], count: int, seed: int) -> Cells:
    """Positions of different cells; cell n of a seed does not depend on how many there are.

    In a small matrix there may be fewer than ``count``.
    """
    places = (np.random.default_rng(seed).random((count, 2)) * shape).astype(np.int64)
    _, first = np.unique(places, axis=0, return_index=True)
    chosen = places[np.sort(first)]
    return chosen[:, 0], chosen[:, 1]


def factor_series(group: xr.Dataset, law: Law, cells: Cells) -> list[Series]:
    """All series that the draws of a group give, read a few draws at a time."""
    shape = (group.sizes["chain"], group.sizes["draw"])
    labels = _labels(group.sizes["component"], law, cells)
    values = np.empty((len(labels), *shape))
    for at, chain in enumerate(group["chain"].values.tolist()):
        for number, (W, H) in enumerate(each_draw(group, chain)):
            values[:, at, number] = _of_draw(W, H, law, cells)
    return [Series(*label, one) for label, one in zip(labels, values, strict=True)]


def _labels(width: int, law: Law, cells: Cells) -> list[tuple[str, str]]:
    """Name and kind of every number of `_of_draw`."""
    size = "norm" if law.signed else "sum"
    return [
        ("mu_mean", "product"),
        ("mu_norm", "product"),
        *((f"singular_value[{k}]", "product") for k in range(min(width, SPECTRUM))),
        *((f"mu[{i},{j}]", "product") for i, j in zip(*cells, strict=True)),
        (f"w_{size}", "scale"),
        (f"h_{size}", "scale"),
        *((f"component[{k}]", "component") for k in range(law.components)),
    ]


def _of_draw(W: NDArray[Any], H: NDArray[Any], law: Law, cells: Cells) -> Array:
    W, H = W.astype(np.float64), H.astype(np.float64)
    gram_w, gram_h = W.T @ W, H @ H.T
    cell_count = W.shape[0] * H.shape[1]
    of_w, of_h = (size[: law.components] for size in sizes(W, H, law.signed))
    rows, columns = cells
    return np.concatenate(
        [
            [W.sum(axis=0) @ H.sum(axis=1) / cell_count],
            [np.sqrt(max(0.0, float(np.sum(gram_w * gram_h))))],
            _singular_values(gram_w, gram_h),
            np.einsum("pk,kp->p", W[rows], H[:, columns]),
            [np.linalg.norm(of_w), np.linalg.norm(of_h)]
            if law.signed
            else [of_w.sum(), of_h.sum()],
            of_w * of_h / (np.sqrt(cell_count) if law.signed else cell_count),
        ]
    )


def _singular_values(gram_w: Array, gram_h: Array) -> Array:
    """The largest singular values of WH, in descending order."""
    # So little that it does not show, but enough for a component of zeros.
    jitter = 1e-13 * float(np.trace(gram_w)) + np.finfo(np.float64).tiny
    root = np.linalg.cholesky(gram_w + jitter * np.eye(len(gram_w)))
    found = np.linalg.eigvalsh(root.T @ gram_h @ root)
    return np.sqrt(np.maximum(found[::-1][:SPECTRUM], 0.0))


def shares_of(alignment: xr.Dataset) -> tuple[Array, Array]:
    """Shares of the draws in which components appear: of all, and of the chain with the fewest."""
    by_chain = alignment["share_by_chain"].transpose("chain", "component").values
    return alignment["share"].values, np.nanmin(by_chain, axis=0)


def aligned_series(series: list[Series], alignment: xr.Dataset, law: Law) -> list[Series]:
    """Sizes of the components in one order, from those in the order of the draws.

    Size is what neither scale nor sign changes, so that the order is all that matters.
    """
    sizes_drawn = np.stack([one.values for one in series if one.kind == "component"], axis=-1)
    order = alignment["permutation"].transpose("chain", "draw", "component").values
    shares, least = shares_of(alignment)
    found = np.take_along_axis(sizes_drawn, order[..., : law.components], axis=-1)
    return [
        Series(f"aligned[{k}]", "aligned", found[..., k], float(shares[k]), float(least[k]))
        for k in range(law.components)
    ]
