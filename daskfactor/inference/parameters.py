"""The protocol of parameters, which are learnt between segments; and what their draws share.

To learn something more, write a `Parameter` and name its class in the model's `parameters`: it
declares what results show, and says where its values start, how they are drawn and what prior
they have. Checkpoints keep all values.

A link's conditional needs the whole factor, which is brought together for it.
Rows without any data tell nothing of it: they are integrated out wherever hyperparameters are
drawn, and drawn anew from their prior afterwards. Among many of them a link would hardly move.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from daskfactor.checks import refuse_unknown
from daskfactor.executors.state import Array, ChainState, FactorBand
from daskfactor.inference.bands import pieces_of, put_array
from daskfactor.inference.program import Fit, Kernel, factor_word
from daskfactor.inference.setting import Setting, in_callers_order
from daskfactor.kernels.philox import Address
from daskfactor.models.settings import Learnt
from daskfactor.random import Stream, generator, noise_key

Values = dict[str, Any]
"""Hyperparameters by the names that results have, and what else a checkpoint keeps of them."""
SIDES = ("rows", "columns")
LINKS = ("link_w", "link_h")
LINK_PRECISIONS = ("link_precision_w", "link_precision_h")


class View(NamedTuple):
    """A chain between two segments, as parameters see it.

    Attributes
    ----------
    address
        Seed of the run, and number of the chain.
    state
        State of the track that a parameter is learnt from.
    cycle
        Cycles done.
    fit
        Fit of the state; None at cycle 0, unless a `GaussianMF` starts from a result.
    tuning
        Whether the sampler's metric still learns.
    alone
        Whether the chain has one track.
    rng
        Generator of this cycle, which parameters use one after the other.
    """

    address: tuple[int, int]
    state: ChainState
    cycle: int
    fit: Fit | None
    tuning: bool
    alone: bool
    rng: Generator

    def generator(self, stream: Stream, *words: int) -> Generator:
        """Return a generator of this chain and cycle."""
        return generator(*self.address, stream, self.cycle, *words)


class Parameter:
    """Something that is learnt between segments.

    The chain holds its values; a chain updates its parameters in order, each given the values
    that those before it have left.

    Attributes
    ----------
    learnt
        Variables of the results, of a class that a model names among its `parameters`.
    """

    learnt: ClassVar[tuple[Learnt, ...]] = ()

    def __init__(self, setting: Setting) -> None:
        self.setting, self.data = setting, setting.data
        self.model = cast("Any", setting.model)
        self.covariates, self.variables = self.model.covariates, self.model.learnt
        self.linked = [at for at, table in enumerate(self.covariates) if table is not None]

    def hyper(self, values: Values) -> Any:
        """Return the hyperparameters as programs take them."""
        kind = self.model.hyper_type
        return kind(*(values[name] for name in kind._fields))

    @classmethod
    def from_prior(cls, rng: Generator, model: Any, values: Values) -> Values:
        """Draw the values from their prior; with hyperparameters that they change."""
        return {}

    def initial(self, values: Values) -> Values:
        """Return the values that a chain starts from."""
        return {}

    def due(self, view: View) -> bool:
        """Return whether to update it now."""
        return True

    def update(self, view: View, values: Values) -> Values:
        """Return the values that change; bands of the state may change in place."""
        return {}

    def log_prior(self, state: ChainState, values: Values) -> float:
        """Return the part of the log prior density that bands do not record."""
        return 0.0

    def results(self, state: ChainState, values: Values) -> Values:
        """Return the values that results show in another form."""
        return {}

    def attrs(self, values: Values) -> Values:
        """Return the attributes of results."""
        return {}

    # -- rows of factors -------------------------------------------------------

    def seen(self, factor: int) -> NDArray[np.bool_]:
        """Tell which rows (columns) have any data, in the grid's order."""
        return np.asarray((self.data.row_observed, self.data.col_observed)[factor] > 0)

    def informative_rows(self, factor: int) -> list[Any]:
        """Return which rows of every band of a factor hyperparameters are learnt from.

        They are all rows, or those that have data where there are covariates.
        """
        if self.covariates[factor] is None:
            return [slice(None)] * self.data.grid.blocks
        return pieces_of(self.data.grid, factor, self.seen(factor))

    def without_data(self, factor: int) -> list[Array]:
        """Return the rows of every band that have no data."""
        return list(map(np.flatnonzero, pieces_of(self.data.grid, factor, ~self.seen(factor))))

    def observed_rows(self, state: ChainState, factor: int) -> Array:
        """Return the rows of a factor that have data, in the caller's order, double precision."""
        data, side = self.data, SIDES[factor]
        seen = in_callers_order(data, side, self.seen(factor))
        return in_callers_order(data, side, state.gather(side))[seen].astype(np.float64)

    def put(self, state: ChainState, factor: int, name: str, values: Array) -> None:
        """Put an array, a row for each of a factor's in the caller's order, into the bands."""
        values = values.astype(self.data.dtype)[self.data.order(factor)]
        put_array(state, self.data.grid, factor, name, values)

    def refresh(self, number: int, state: ChainState, shapes: Sequence[float] = (1.0, 1.0)) -> None:
        """Draw the momentum of a chain's state whose values are a draw."""
        key = noise_key(self.setting.options.seed, number, Stream.START)
        for factor, shape in enumerate(shapes):
            how: Any = {"kernel": self.setting.kernel, "key": key, "factor": factor}
            state.each(partial(refresh_band, shape=shape, **how), factor)


class Start(NamedTuple):
    """First state of a chain, its values there, and its fit where these are to be drawn."""

    state: ChainState
    values: Values
    fit: Fit | None = None


class LikelihoodParameter(Parameter, ABC):
    """The parameter that the likelihood depends on, a dispersion or the noise; it starts chains.

    Attributes
    ----------
    floor
        Smallest mean μ that gradients are taken at.
    latest
        The chain's mean estimate for `take`, and which counts still wait for theirs; None unless
        its last segment added an estimate.
    """

    floor: float
    latest: Any = None

    @abstractmethod
    def start(self, number: int, lead: Any, on_step: Any) -> Start:
        """Return the start of a chain; ``lead`` is this parameter of the run's first chain."""

    @abstractmethod
    def log_likelihood(self, fit: Fit, values: Values) -> float:
        """Return the log-likelihood, from a fit's sums."""

    @abstractmethod
    def has_diverged(self, fits: Any, state: ChainState, values: Values) -> bool:
        """Return whether finite factors are beyond anything the data could mean."""

    def recall(self, values: Values) -> None:
        """Take over what the values of a checkpoint hold."""

    def normalized(self, values: Values) -> Values:
        """Add to values that have changed what the fit leaves out of the log-likelihood."""
        return values

    def look(self, state: ChainState, fit: Fit, end: int, values: Values) -> Values:
        """Estimate the parameter at the end of a segment, for all chains of the run."""
        return {}

    def take(self, estimates: Sequence[Any], values: Values) -> Values:
        """Return the values that follow from the estimates of all chains."""
        return {}


class Link(Parameter):
    """The link from covariates to a factor, and its precision."""

    def __init__(self, setting: Setting, factor: int) -> None:
        super().__init__(setting)
        self.factor, self.name, self.of_name = factor, LINKS[factor], LINK_PRECISIONS[factor]


def stored_hyper(model: Any, stored: Any) -> Values:
    """Return the hyperparameters of a checkpoint, which are a list in those of older versions.

    Those that older versions did not have get their defaults.
    """
    fields = model.hyper_type._fields
    values = stored if isinstance(stored, dict) else dict(zip(fields, stored, strict=False))
    refuse_unknown("the stored hyperparameters", values, fields)
    each = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
    return dict(model.hyper_type(**each)._asdict())


def refresh_band(band: FactorBand, kernel: Kernel, key: Array, factor: int, shape: float) -> None:
    """Draw the momentum of a band whose values are a draw."""
    kernel.refresh(band, Address(key, 0, factor_word(factor), band.offset), shape)
