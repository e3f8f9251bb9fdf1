"""Thermodynamic integration: the marginal likelihood from chains at powers of the likelihood."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import xarray as xr

from daskfactor.checks import positive_number, warn, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import ModelError, OptionError, SamplingWarning
from daskfactor.evidence.additive import additive_series
from daskfactor.evidence.base import Evidence, EvidenceMethod, EvidenceProblem
from daskfactor.evidence.quadrature import (
    FitMoments,
    FitSeries,
    Rule,
    Vector,
    discretization_error,
    ladder,
    summarize,
    weights,
)
from daskfactor.evidence.tempered import (
    both_sides,
    listed_entries,
    prior_fits,
    prior_series,
    sampled_fits,
    tempered_series,
)
from daskfactor.inference.base import Sampler
from daskfactor.inference.passes import normalizer
from daskfactor.inference.psgrrld import PSGRRLD
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.random import Stream, generator

Choice = Sampler | Literal["exact"]

SMALL = 1e6
"""Listed entries times components up to which rows are moved exactly by default."""
FEWEST_DRAWS = 0.1
"""Share of the draws at t = 1 that the lowest temperatures take, with exact moves."""
LEAST_TUNED = 0.3
"""The same for tuning, and for the draws of a sampler, which forgets no faster there."""
LIGHT, FEWEST_EFFECTIVE = 0.01, 10.0
"""Weight of a temperature from which on fewer effective draws than these are warned of."""


@dataclass(frozen=True)
class ThermodynamicIntegration(EvidenceMethod):
    r"""Log evidence by integrating the mean log-likelihood over temperatures.

    .. math:: \log p(V) = \int_0^1 E_t[\log p(V \mid \theta)]\,dt, \qquad
        p_t(\theta) \propto p(\theta)\,p(V \mid \theta)^t, \qquad t_i = (i/T)^c

    Every temperature is a chain of its own from its own start, so they run side by side
    and give the same numbers on every executor. The log-likelihood is that of all data,
    normaliser included. At t = 0 the prior is drawn from exactly.

    Parameters
    ----------
    temperatures
        T: the ladder has T + 1 temperatures, 0 and 1 among them. An even T lets the
        discretization error be read off the halved ladder.
    power
        c; 1 for the paper's uniform ladder (which misses by far more), else at least 2.
    draws
        Log-likelihoods taken at t = 1. A temperature t = u^c takes max(u³, 0.1) of
        them (0.3 with a sampler), because lower ones count less and forget faster. None:
        1000 with exact moves, 400 with a sampler, 16000 for a `GaussianAdditive`.
    tune
        Cycles or sweeps before the first draw; with exact moves a lower temperature
        takes its share of them, but never less than 0.3. None: 200, or 400 with a sampler.
    every
        Cycles or sweeps from one draw to the next. None: 1, or 5 with a sampler.
    sampler
        ``"exact"`` moves whole rows by Metropolis and Hastings' rule
        (`daskfactor.kernels.rowwise`): no step, no bias. Any sampler of a `TweedieNMF`
        that can be tempered, such as :class:`PSGLD` (the paper's), :class:`PSGRRLD` or
        :class:`HMC`. None takes ``"exact"`` up to 10⁶ listed entries times components
        (for β = 1 zeros are not listed), else PSGRRLD, whose extrapolation cancels
        the bias of first order of its step; a plain Langevin chain at ε is off by about
        d ρ ε / 4 nats with d parameters (ρ < 1), tens of nats on small problems.
    rule
        ``"euler-maclaurin"``, ``"variance"`` or ``"trapezoid"``
        (`daskfactor.evidence.quadrature`); None: the first, or the last on a uniform ladder.

    Notes
    -----
    Şimşekli et al. 2016 (stochastic thermodynamic integration; equation 10 there lacks
    the factor t of the likelihood's gradient); Friel and Pettitt 2008.

    Standard errors come from each chain's own autocorrelation, so a chain that never
    finds a part of the posterior does not know of it.
    """

    temperatures: int = 10
    power: float = 5.0
    draws: int | None = None
    tune: int | None = None
    every: int | None = None
    sampler: Choice | None = None
    rule: Rule | None = None
    suits = ("matrix", "vector")

    def __post_init__(self) -> None:
        whole_number("temperatures", self.temperatures, 2)
        power = positive_number("power", self.power)
        if power != 1 and power < 2:
            raise OptionError(
                f"power must be 1 (a uniform ladder) or at least 2, got {self.power!r}; 5 suits "
                "most data"
            )
        object.__setattr__(self, "power", power)
        for name, least in (("draws", 10), ("tune", 0), ("every", 1)):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least)
        if self.rule is not None and self.rule not in get_args(Rule):
            raise OptionError(
                f"rule must be one of {', '.join(map(repr, get_args(Rule)))} or None, got "
                f"{self.rule!r}"
            )
        if not (self.sampler in (None, "exact") or isinstance(self.sampler, Sampler)):
            raise OptionError(
                'sampler must be None, "exact" or a sampler such as PSGRRLD(), got '
                f"{self.sampler!r}"
            )

    def check(self, model: Any) -> None:
        if model.evidence_data == "vector":
            return
        if not model.likelihood.has_density:
            raise ModelError(
                f"the law with {model.likelihood} has no density to integrate; an evidence needs "
                "beta = 2, 0, -1 or 0 < beta <= 1"
            )
        if isinstance(self.sampler, Sampler):
            if not self.sampler.tempers:
                raise ModelError(
                    f"{self.sampler.name} does not sample powers of a TweedieNMF's likelihood; "
                    "use PSGRRLD(), HMC(), or leave sampler out"
                )
            self.sampler.check_model(model)

    # -- what None stands for ---------------------------------------------------

    @property
    def quadrature(self) -> Rule:
        """The rule that is used."""
        return self.rule or ("trapezoid" if self.power == 1 else "euler-maclaurin")

    @property
    def _ladder(self) -> Vector:
        return ladder(self.temperatures, self.power)

    def choice(self, data: BlockedData, model: TweedieNMF) -> Choice:
        """The sampler that is used."""
        if self.sampler is not None:
            return self.sampler
        work = listed_entries(data, model.likelihood) * model.n_components
        return "exact" if work <= SMALL else PSGRRLD()

    def _lengths(self, exact: bool) -> tuple[int, int, int]:
        usual = (1000, 200, 1) if exact else (400, 400, 5)
        given = (self.draws, self.tune, self.every)
        draws, tune, every = (
            default if own is None else own for own, default in zip(given, usual, strict=True)
        )
        return draws, tune, every

    def _share(self, t: float, exact: bool) -> float:
        """Part of the draws that a temperature takes."""
        if self.power == 1 or self.quadrature != "euler-maclaurin":
            return 1.0
        return max(float(t ** (3 / self.power)), FEWEST_DRAWS if exact else LEAST_TUNED)

    def remedy(self, discretization: bool) -> str:
        """Say what makes an error smaller."""
        if not discretization:
            return "raise draws and tune"
        more = f"raise temperatures above {self.temperatures}"
        return more if self.power > 1 else f"leave power={self.power:g} out, or {more}"

    # -- the estimate -------------------------------------------------------------

    def estimate(self, problem: EvidenceProblem) -> Evidence:
        if problem.model.evidence_data == "vector":
            lengths = (self.draws or 16000, self.tune or 1000, self.every or 1)
            return self._assemble(*additive_series(problem, self._ladder, lengths), problem)
        data, model = problem.data, problem.model
        choice = self.choice(data, model)
        lengths = self._lengths(choice == "exact")
        sides = both_sides(data, model.likelihood) if choice == "exact" else None
        one = partial(_one_temperature, model, data, choice, sides, problem.seed, lengths)
        items = [
            (i, float(t), self._share(float(t), choice == "exact"))
            for i, t in enumerate(self._ladder)
        ]
        # The hottest chains, which are the longest, come first.
        found = problem.map(one, items[::-1], "tempered-chain")[::-1]
        phi = float(model.dispersion)
        level = normalizer(data, phi, model.likelihood, problem.executor)
        level += (sides.constant if sides is not None else 0.0) / phi
        made = {
            "sampler": choice if isinstance(choice, str) else choice.name,
            "dispersion": phi,
            "rate_w": model.rate_w,
            "rate_h": model.rate_h,
        }
        return self._assemble([_scaled(series, phi, level) for series in found], made, problem)

    def _assemble(
        self, series: list[FitSeries], made: dict[str, Any], problem: EvidenceProblem
    ) -> Evidence:
        """Integrate means and variances; find both errors, and make the trace."""
        rule = self.quadrature
        own = weights(self.temperatures, self.power, rule)
        rows = [
            summarize(one, *pair)
            for one, pair in zip(series, zip(own.mean, own.variance, strict=True), strict=True)
        ]
        table: dict[str, Vector] = {
            name: np.array([getattr(row, name) for row in rows]) for name in FitMoments._fields
        }
        means, variances = table["mean"], table["variance"]
        _warn_of_slow_chains(own.mean, table["ess"])
        names = {"total_error": "contribution_error"}
        trace = xr.Dataset(
            {names.get(name, name): ("temperature", values) for name, values in table.items()}
            | {
                "weight": ("temperature", own.mean),
                "variance_weight": ("temperature", own.variance),
                "draws": ("temperature", np.array([one.fine.size for one in series])),
                "acceptance": ("temperature", np.array([one.acceptance for one in series])),
            },
            coords={"temperature": self._ladder},
            attrs={
                "rule": rule,
                "power": self.power,
                "unit": "nats",
                **made,
                "n_components": problem.model.n_components,
                "random_seed": str(problem.seed),
            },
        )
        return Evidence(
            own.integral(means, variances),
            float(np.sqrt(np.sum(table["total_error"] ** 2))),
            discretization_error(self.temperatures, self.power, rule, means, variances),
            trace,
        )


def _warn_of_slow_chains(weight: Vector, ess: Vector) -> None:
    """Say so where a temperature that counts has hardly any independent draws."""
    worst = float(ess[np.abs(weight) > LIGHT].min())
    if worst < FEWEST_EFFECTIVE:
        warn(
            f"the chain of one temperature has an effective sample size of {worst:.1f} only: its "
            "standard error is a guess, and it may not have come to the posterior yet; raise "
            "draws and tune",
            SamplingWarning,
        )


Item = tuple[int, float, float]
"""Number of a temperature, t, and its share of the draws."""


def _one_temperature(
    model: TweedieNMF,
    data: BlockedData,
    choice: Choice,
    sides: Any,
    seed: int,
    lengths: tuple[int, int, int],
    item: Item,
    work: Any = None,
) -> FitSeries:
    """The chain of one temperature; what an executor maps, on any machine."""
    del work
    number, t, share = item
    draws, tune, every = lengths
    draws = max(10, round(draws * share))
    rng = generator(seed, number, Stream.TEMPERATURE, model.n_components)
    if isinstance(choice, Sampler):
        if t == 0:
            return prior_fits(model, data, rng, draws)
        return sampled_fits(model, data, choice, (seed, number), t, (draws, tune, every))
    if t == 0:
        return prior_series(model, data, sides, rng, draws)
    tune = round(tune * max(share, LEAST_TUNED))
    return tempered_series(model, data, sides, rng, t, (draws, tune, every))


def _scaled(series: FitSeries, dispersion: float, level: float) -> FitSeries:
    """Log-likelihoods from sums of fit."""
    coarse = None if series.coarse is None else series.coarse / dispersion + level
    return series._replace(fine=series.fine / dispersion + level, coarse=coarse)
