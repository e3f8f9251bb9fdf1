"""Gibbs sampling of counts and of real-valued matrices: exact, no step to choose.

Both go the same way: in the first pass over the data every row band gathers what the data and
the other factor say of it, and moves once it has met its last block; in the second one the
column bands do. What is gathered, and from which law a band then is drawn, is the model's.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Passes
from daskfactor.errors import DataError, ModelError
from daskfactor.executors.plan import Op
from daskfactor.executors.state import FactorBand
from daskfactor.inference.base import Data, Sampler, observations_per_parameter
from daskfactor.inference.normal_parameters import column_table, quadratic_form
from daskfactor.inference.program import (
    COLUMNS,
    HYPER_EVERY,
    RECORDED,
    ROWS,
    SHIFT,
    Arrays,
    ArraySpec,
    Bands,
    Kernel,
    Program,
    Visit,
    Work,
    unshifted,
)
from daskfactor.kernels.multinomial import Wide, add_rates, allocate
from daskfactor.kernels.regression import add_equations, draw_rows, transposed, triangle
from daskfactor.kernels.variates import fill_gamma
from daskfactor.kernels.views import AnyBlock
from daskfactor.models.settings import preserve_columns

PASSES = 2
"""Passes over the data in a cycle: one in which W moves, one in which H does."""
ALLOCATED, RATES = "allocated", "rates"
"""Sums of S, and of the other factor, that a band gathers until it moves."""
GRAMS, TARGETS = "grams", "targets"
"""Normal equations of a band's rows: products of the other factor's rows, and with the data."""


def gathered(band: FactorBand, name: str) -> Wide:
    """Return the sums that a band carries until it moves, zero at first, in double precision."""
    if name not in band.arrays:
        band.arrays[name] = np.zeros(band.values.shape)
    return band.arrays[name]


FEW_COUNTS, EFFICIENCY = 1.5, 20.0
"""Counts for each number of the factors up to which draws are nearly independent."""
LARGEST_COUNT = 2**31
"""Counts up to which binomials are drawn without loss."""

WORK = Work(1, PASSES, 20.0)
"""Sharing out the counts is about as dear as so many passes of multiplications: 10 if most are
small, 60 if all are large."""
WORK_OF_ROWS = Work(1, PASSES, 8.0, 0.5)
"""The same of whole rows, and more of it for each column, measured on ratings at K of 10 and 32."""
COUNTED: Arrays = RECORDED | dict.fromkeys((ALLOCATED, RATES), ArraySpec("cycle", wide=True))
EQUATIONS: Arrays = RECORDED | {
    GRAMS: ArraySpec("cycle", columns=triangle, wide=True),
    TARGETS: ArraySpec("cycle", wide=True),
}


@dataclass(frozen=True)
class Gibbs(Sampler):
    r"""Gibbs sampling: draws from the exact posterior, no step to choose.

    Each draw is a sweep, two passes over the data: one in which W moves given H, and one in
    which H moves given W. ``step_size`` in the results is always 1. Sums are over observed
    entries.

    Of a :class:`TweedieNMF` of Poisson counts, ``beta=1``, at a price in proportion to the
    stored entries that are not zero, times K:

    .. math:: s_{ij\cdot} \sim \mathrm{Mult}(v_{ij}; w_{ik} h_{kj}), \quad
        w_{ik} \sim \mathrm{Gamma}(a_w + s_{i+k}, \lambda_w + \textstyle\sum_j h_{kj}), \quad
        h_{kj} \sim \mathrm{Gamma}(a_h + s_{+jk}, \lambda_h + \textstyle\sum_i w_{ik})

    ``dispersion="auto"`` is then exactly 1, because that is what Poisson counts have.

    Of a :class:`GaussianMF`, whole rows at once. With the column biases taken off the data,
    and the bias of a row as one more entry of it, whose partner in every column is 1:

    .. math:: w_i \sim \mathcal N(\Lambda_i^{-1} b_i, \Lambda_i^{-1}), \quad
        \Lambda_i = \Lambda_w + \tfrac1\phi \textstyle\sum_j h_j h_j^\top, \quad
        b_i = \Lambda_w m_w + \tfrac1\phi \textstyle\sum_j v_{ij} h_j

    and columns likewise; noise, precisions and level are drawn after every sweep. That
    takes K² operations for a stored entry and K³/3 for a row or column, and K²/2 numbers
    for each row while rows move (see :func:`estimate_cost`); one K x K matrix for all rows of
    a band that has no missing cells. Draw by draw it forgets its past faster than
    :class:`SGHMC`, but a draw takes many times as long: it is for posteriors without any bias.

    Parameters
    ----------
    warm_start
        Passes of multiplicative updates before a chain of counts starts; ``"auto"`` takes
        100, down to 20 where a pass is dear (beyond 10⁹ entries times components), and up to
        2000 where it is cheap, while the log density still rises. A
        chain of a :class:`GaussianMF` starts from the prior.

    Raises
    ------
    ModelError
        When used with another ``beta``, or a ``dispersion`` other than 1.
    DataError
        When used on counts that are not whole numbers up to 2³¹.

    Notes
    -----
    Cemgil 2009, "Bayesian inference for nonnegative matrix factorisation models",
    section 3. The allocation ties W and H to each other from sweep to sweep, so the scale
    that they share in a component moves slowly where counts are large. Salakhutdinov and
    Mnih 2008, "Bayesian probabilistic matrix factorization using Markov chain Monte
    Carlo", section 3.3, for the real-valued model.

    Examples
    --------
    >>> import numpy as np
    >>> import daskfactor as dfac
    >>> V = np.random.default_rng(0).poisson(3.0, (20, 15))
    >>> run = {"draws": 20, "tune": 20, "random_seed": 0, "progressbar": False}
    >>> trace = dfac.sample(V, dfac.TweedieNMF(2, dispersion=1), dfac.Gibbs(), **run)
    >>> trace["posterior"]["H"].shape
    (1, 20, 2, 15)
    """

    warm_start: int | Literal["auto"] = "auto"

    biased: ClassVar[bool] = False
    dispersion: ClassVar[float | None] = 1.0
    _real_valued: ClassVar[bool] = True
    reason: ClassVar[str] = "exact, and quick where counts are few"

    def kernel(self, model: Any, data: Data = None, on_device: bool = False) -> Kernel:
        self._check(model, data, on_device, tensors=False)
        if not model.nonnegative:
            return RowGibbsKernel(self, Passes(PASSES), EQUATIONS, WORK_OF_ROWS)
        _check_counts(model)
        if data is not None:
            _check_data(data)
        return GibbsKernel(self, Passes(PASSES), COUNTED, WORK)

    def efficiency(self, model: Any, data: BlockedData) -> float:
        """Return 1 / (1 + c) for c events per factor entry: most where counts are few."""
        if not model.nonnegative or model.dispersion != self.dispersion:
            return 0.0
        return EFFICIENCY if observations_per_parameter(model, data) <= FEW_COUNTS else 0.0


def _check_counts(model: Any) -> None:
    """Refuse any law but Poisson's."""
    if model.joins:
        raise ModelError(
            "Gibbs() samples the counts of one matrix, not several in units of their means; "
            "use BlockHMC(), which is exact, too"
        )
    if not model.likelihood.counts:
        raise ModelError(
            f"Gibbs() samples Poisson counts, beta=1, and the model has {model.likelihood}; "
            "use PSGLD() or BlockHMC() for any other law"
        )
    if model.dispersion not in ("auto", 1.0):
        raise ModelError(
            "Gibbs() samples Poisson counts, whose dispersion is 1, and the model has "
            f'dispersion={model.dispersion:g}; leave it at "auto", or use PSGLD() for '
            "counts that vary more"
        )


def _check_data(data: BlockedData) -> None:
    """Refuse what are no counts, and weights: a share of a count is none."""
    data.refuse_weights("Gibbs() of counts", "leave sampler out")
    if not data.is_integer:
        raise DataError(
            "Gibbs() takes whole numbers, got data with fractions; round or rescale them to "
            "counts, or use PSGLD(), which takes any non-negative numbers"
        )
    if data.maximum > LARGEST_COUNT:
        raise DataError(
            f"Gibbs() takes counts up to 2**31, got one of {data.maximum:.6g}; use PSGLD(), "
            "or count in larger units"
        )


class GibbsKernel(Kernel):
    """Sweeps that share counts out among the components.

    Random numbers are addressed by the cycle and by global rows and columns.
    """

    rescales_every: ClassVar[int | None] = HYPER_EVERY

    def step(self, program: Program, visit: Visit) -> None:
        """Gather one side's sums; in the first pass rows move at the end, in the second columns."""
        op, data, bands, _ = visit
        second, position = divmod(op.iteration % (PASSES * data.grid.blocks), data.grid.blocks)
        factor = COLUMNS if second else ROWS
        self._gather(program, op, data.view(*op.block), bands, factor)
        if position == data.grid.blocks - 1:
            self._move(program, bands[factor], factor, op.cycle)

    def _gather(self, program: Program, op: Op, view: AnyBlock, bands: Bands, factor: int) -> None:
        """Add a block's share of what the factor that moves next is drawn from."""
        rows, cols = bands
        if program.hyper.dispersion != 1.0:
            raise ModelError(
                "Gibbs() samples the posterior of Poisson counts, of dispersion 1 at temperature "
                "1, and was asked for a dispersion over temperature of "
                f"{program.hyper.dispersion:g}; use PSGLD() for tempered posteriors"
            )
        if factor == COLUMNS:
            add_rates(view, False, rows.values, gathered(cols, RATES))
            return
        offsets, key = (rows.offset, cols.offset), np.array(program.key, dtype=np.uint32)
        sums = gathered(rows, ALLOCATED), gathered(cols, ALLOCATED)
        block, factors = view.arguments[:3], (rows.values, cols.values)
        allocate(block, factors, offsets, key, op.cycle, sums)
        add_rates(view, True, cols.values, gathered(rows, RATES))

    def _move(self, program: Program, band: FactorBand, factor: int, cycle: int) -> None:
        """Draw a band from its conditional."""
        shapes, rates = self._conditional(program, band, factor, cycle)
        with preserve_columns(band.values, program.frozen[factor]):
            fill_gamma(shapes, rates, *program.address(band, cycle, factor), band.values)

    def _conditional(
        self, program: Program, band: FactorBand, factor: int, cycle: int
    ) -> tuple[Wide, Wide]:
        """Return the shapes and rates of a band's entries, and reset its gathered sums."""
        rate, shape = program.prior(band, factor)
        shapes, rates = band.arrays.pop(ALLOCATED), band.arrays.pop(RATES)
        shapes += shape
        np.maximum(rates, 0.0, out=rates)  # taking missing cells off again may round
        rates += rate
        return shapes, rates


class RowGibbsKernel(GibbsKernel):
    """Sweeps that draw whole rows of a real-valued model from their normal conditionals."""

    rescales_every: ClassVar[int | None] = None  # with the hyperparameters, see `Symmetries`

    def _gather(self, program: Program, op: Op, view: AnyBlock, bands: Bands, factor: int) -> None:
        arrays, other = bands[factor].arrays, bands[1 - factor].values
        targets = gathered(bands[factor], TARGETS)
        grams = arrays.setdefault(GRAMS, np.zeros((1, triangle(other.shape[1]))))
        by_rows = view if factor == ROWS else transposed(view)
        arrays[GRAMS] = add_equations(by_rows, other, grams, targets)

    def _move(self, program: Program, band: FactorBand, factor: int, cycle: int) -> None:
        grams, targets = band.arrays.pop(GRAMS), band.arrays.pop(TARGETS)
        columns, noise = self._columns(program, band.values, factor), program.hyper.noise
        address = program.address(band, cycle, factor)
        if SHIFT in band.arrays:  # λ (m + s) noise / noise
            targets += noise * columns[1] * band.arrays[SHIFT]
        draw_rows(band.values, grams, targets, columns, noise, None if program.common else address)

    def _columns(self, program: Program, values: Wide, factor: int) -> Wide:
        """Return prior means and precisions of a factor's columns, and which of them move."""
        columns, frozen = column_table(program.hyper, values.shape[1])[factor], program.frozen
        if (mask := frozen[factor]) is not None:
            columns = columns.copy()
            columns[3, : mask.size][mask] = 0
        return columns

    def log_prior(self, program: Program, band: FactorBand, factor: int) -> float:
        """Return the log prior density of a band, but for its constant."""
        return quadratic_form(unshifted(band), self._columns(program, band.values, factor))
