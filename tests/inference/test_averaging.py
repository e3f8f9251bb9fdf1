"""Dual averaging finds the step with the wanted acceptance rate."""

import math
from dataclasses import asdict

import numpy as np
import pytest

from daskfactor.inference.hmc import DualAveraging


@pytest.mark.parametrize("target", [0.6, 0.8, 0.9])
@pytest.mark.parametrize("first", [1e-3, 1.0, 50.0])
def test_it_finds_the_step(target, first):
    """Where acceptance is exp(-ε) on average, with noise."""
    rng = np.random.default_rng(0)
    averaging = DualAveraging.at(first)
    for _ in range(2000):
        mean = math.exp(-math.exp(averaging.log_step))
        averaging = averaging.after(mean + rng.normal(0, 0.1), target)
    assert math.exp(-math.exp(averaging.log_average)) == pytest.approx(target, abs=0.03)


def test_it_is_plain_numbers():
    averaging = DualAveraging.at(0.3).after(0.5, 0.8)
    assert DualAveraging(**asdict(averaging)) == averaging
    assert averaging.log_step < DualAveraging.at(0.3).after(0.9, 0.8).log_step
