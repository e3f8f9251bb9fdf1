"""Dual averaging of a step size towards a wanted acceptance rate."""

import math
from dataclasses import dataclass, replace

GAMMA, OFFSET, DECAY = 0.05, 10.0, 0.75
"""How strongly log ε is drawn to its start, how many cycles are damped, and how weights fall."""
REACH = math.log(10.0)
"""Steps that are tried gravitate to ten times the first one: large ones are cheap to try."""


@dataclass(frozen=True)
class DualAveraging:
    """log ε and its average after ``count`` cycles.

    log ε ← log(10 ε₁) - √t / γ / (t + t₀) Σ (δ - α),  the average with weights t^(-κ)

    ``start`` is log ε₁, ``error`` the averaged δ - α.

    Source: Hoffman and Gelman 2014, "The No-U-Turn Sampler", equation 6 and algorithm 5.
    """

    start: float
    log_step: float
    log_average: float
    error: float = 0.0
    count: int = 0

    @classmethod
    def at(cls, step: float) -> "DualAveraging":
        """Before the first cycle."""
        start = math.log(step)
        return cls(start, start, start)

    def after(self, acceptance: float, target: float) -> "DualAveraging":
        """With one more cycle's acceptance probability."""
        count = self.count + 1
        share = 1.0 / (count + OFFSET)
        error = (1.0 - share) * self.error + share * (target - acceptance)
        log_step = self.start + REACH - math.sqrt(count) / GAMMA * error
        weight = count**-DECAY
        average = weight * log_step + (1.0 - weight) * self.log_average
        return replace(self, log_step=log_step, log_average=average, error=error, count=count)
