"""How far the moments of a run are from those of an exact posterior."""

import numpy as np

from tests.statistical.allocations import Priors, posterior
from tests.statistical.exact import CASES, reference_posterior
from tests.statistical.replicas import run_copies

BY_NAME = {case.name: case for case in CASES}
SPIKES = BY_NAME["poisson-small"]._replace(name="spikes", shape_w=0.5, shape_h=0.5)


class Distance:
    """Differences in posterior standard deviations, and ratios to what is exact."""

    # The tolerances of an exact sampler: there is no step to blame.
    most_off, ratios_between, most_sum, most_error = 0.05, (0.93, 1.07), 0.02, 0.02

    def __init__(self, got, exact):
        sd = np.sqrt(exact["var_mu"])
        self.rms = float(np.sqrt(np.mean(((got.mean - exact["mean_mu"]) / sd) ** 2)))
        self.error = float(np.max(got.mean_error / sd))
        self.ratios = got.variance / exact["var_mu"]
        self.sum_w = got.sum_w / exact["sum_w"]

    @property
    def passes(self):
        low, high = self.ratios_between
        return (
            self.rms < self.most_off
            and bool(np.all((self.ratios >= low) & (self.ratios <= high)))
            and abs(self.sum_w - 1) < self.most_sum
        )

    def __str__(self):
        return (
            f"rms {self.rms:.4f} sd (Monte Carlo {self.error:.4f}), variance ratios "
            f"{np.round(self.ratios, 3).ravel()}, ΣW {self.sum_w:.4f}"
        )


class Biased(Distance):
    """With the tolerances of a sampler that takes steps, on one or two components."""

    most_off, ratios_between, most_sum, most_error = 0.10, (0.90, 1.12), 0.03, 0.03


class Rejecting(Biased):
    """With those of a sampler all of whose copies are taken or rejected together."""

    most_off = 0.05


def distance(case, sampler, kind=Distance, exact=None, **settings):
    """The distance of a run; counts under gamma priors are quickest by allocations."""
    priors = Priors(case.rate_w, case.rate_h, case.shape_w, case.shape_h)
    if exact is None:
        by_allocations = case.beta == 1 and priors[2:] != (1, 1)
        exact = posterior(case.V, case.K, priors) if by_allocations else reference_posterior(case)
    return kind(run_copies(case, sampler, **settings)[0], exact)
