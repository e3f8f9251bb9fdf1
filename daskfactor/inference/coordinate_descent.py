"""Coordinate descent on squares: a point estimate of a matrix in which no cell is missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.inference.multiplicative import (
    AlternatingUpdates,
    Descent,
    OnCycle,
    mean_floor,
    pull_of,
)
from daskfactor.inference.passes import BOTH, Gathered, SharePass, run_pass
from daskfactor.kernels.coordinates import descend_rows
from daskfactor.models.settings import Mask, free_components

Array = NDArray[Any]

SWEEPS = 4
"""Sweeps over the columns of a factor for each pass over the data, which costs far more."""


@dataclass(frozen=True)
class CoordinateDescent(AlternatingUpdates):
    """Maximum-a-posteriori fit of squares, column by column of W and of H in turn.

    With G = H Hᵀ, for one component k after the other, four times over:

        w_k ← [w_k + (V h_k - W g_k - φ λ_w) / g_kk]₊

    and the same for H. Each column is the exact minimum given the others, so the objective never
    rises, and it falls in far fewer passes than by multiplicative updates; an entry that is zero
    may leave it again. V H and H Hᵀ need every cell, so that cells must be neither missing nor
    weighted, and priors must be exponential.

    Parameters
    ----------
    max_iter
        Largest number of iterations; one is two passes over the data.
    tol
        Stop when the objective falls by less than this share over 20
        iterations; 0 never stops early.

    Raises
    ------
    OptionError
        If the model is not a :class:`TweedieNMF` with ``beta=2`` and exponential priors, or a cell
        is missing or weighted.

    Notes
    -----
    Cichocki and Phan 2009 (HALS); Gillis and Glineur 2012, section 3, on several sweeps.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).gamma(3.0, size=(20, 15))
    >>> model = dfac.TweedieNMF(2, beta=2)
    >>> point = dfac.optimize(V, model, dfac.CoordinateDescent(), random_seed=0, progressbar=False)
    >>> bool(point["objective"][-1] <= point["objective"][0])
    True
    """

    max_iter: int = 300
    tol: float = 1e-4

    def check_model(self, model: Any) -> None:
        """Refuse models that are not squares under exponential priors."""
        if not _is_squares(model):
            raise OptionError(
                "CoordinateDescent fits a TweedieNMF with beta=2 and exponential priors, got "
                f"{model!r}; use MultiplicativeUpdates(), or leave method out"
            )

    def check_data(self, data: BlockedData) -> None:
        """Refuse data with cells that are missing or weighted."""
        if not _is_complete(data):
            raise OptionError(
                "CoordinateDescent needs a matrix in which no cell is missing or weighted; use "
                "MultiplicativeUpdates(), or leave method out"
            )

    def update(self, descent: Descent, iterations: int, on_cycle: OnCycle | None) -> None:
        """Update a band by coordinate descent, column by column."""
        likelihood, hyper = descent.model.at(descent.hyper)
        penalties = [pull_of(hyper, factor)[0] for factor in BOTH]
        move = partial(move_by_gram, penalties=penalties, frozen=descent.model.frozen)
        floor = mean_floor(descent.data, likelihood)
        program = SharePass(likelihood, floor, BOTH, finish=move, gram=True)
        run_pass(descent.place, program, iterations, on_cycle)


def suits(model: Any, data: BlockedData) -> bool:
    """Tell whether `CoordinateDescent` fits this model to these data."""
    return _is_squares(model) and _is_complete(data)


def _is_squares(model: Any) -> bool:
    alone = model.nonnegative and not model.tensor and not model.joins
    return bool(
        alone and model.likelihood.zeros == "linear" and model.shape_w == model.shape_h == 1
    )


def _is_complete(data: BlockedData) -> bool:
    return data.weights is None and data.n_missing == 0


def move_by_gram(gathered: Gathered, penalties: Sequence[Any], frozen: Sequence[Mask]) -> None:
    """Move a band by its share; ``penalties`` hold φ λ of both factors."""
    band, (numerator, _, gram), factor, _ = gathered
    free = free_components(frozen[factor], band.values.shape[1])
    pull = numerator - np.asarray(penalties[factor], numerator.dtype)
    descend_rows(band.values, pull, gram.astype(pull.dtype), free, SWEEPS)
