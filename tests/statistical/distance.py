"""How far the moments of a run are from those of an exact posterior."""

import numpy as np

from tests.statistical.allocations import Priors, posterior
from tests.statistical.exact import CASES, reference_posterior
from tests.statistical.replicas import run_copies

BY_NAME = {case.name: case for case in CASES}


class Distance:
    """Differences in posterior standard deviations, and ratios to what is exact."""

    # The tolerances of an exact sampler: there is no step to blame.
    most_off, ratios_between, most_sum = 0.05, (0.93, 1.07), 0.02

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

    most_off, ratios_between, most_sum = 0.10, (0.90, 1.12), 0.03


def exact_distance(case, sampler, **settings):
    """The distance of an exact sampler; counts under gamma priors are quickest by allocations."""
    priors = Priors(case.rate_w, case.rate_h, case.shape_w, case.shape_h)
    if case.beta == 1 and priors[2:] != (1, 1):
        exact = posterior(case.V, case.K, priors)
    else:
        exact = reference_posterior(case)
    return Distance(run_copies(case, sampler, **settings)[0], exact)
