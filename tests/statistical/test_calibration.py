"""`calibrate` on every pair of a model and an exact sampler, and planted bugs that it sees."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.inference.base import Sampler
from daskfactor.inference.program import Program
from daskfactor.models.settings import PriorDraw

pytestmark = pytest.mark.statistical

POISSON = dfac.TweedieNMF(2, dispersion=1.0, rate_w=1.0, rate_h=0.5)
FIXED = dfac.GaussianMF(1, noise=0.5, precision_w=1.0, precision_h=2.0, biases=False)
WARM = {"warm_start": 5}
PAIRS: dict[str, tuple[Any, Sampler, dict[str, Any]]] = {
    "Gibbs": (POISSON, dfac.Gibbs(**WARM), {"missing": 0.3}),
    "Gibbs, auto rates": (
        dfac.TweedieNMF(2, dispersion=1.0, shape_w=0.6, shape_h=2.0),
        dfac.Gibbs(**WARM),
        {"moments": (4.0, 1.0)},
    ),
    "BlockHMC": (POISSON, dfac.BlockHMC(**WARM), {"blocks": 2}),
    "BlockHMC, normal": (replace(POISSON, beta=2.0), dfac.BlockHMC(**WARM), {"missing": 0.3}),
    "BlockHMC, gamma": (
        dfac.TweedieNMF(2, beta=0.0, dispersion=0.3, rate_w=2.0, rate_h=2.0, shape_w=2.0),
        dfac.BlockHMC(**WARM),
        {"replications": 150},
    ),
    "BlockHMC, compound": (
        replace(POISSON, beta=0.5, shape_w=0.5),
        dfac.BlockHMC(**WARM),
        {"replications": 150},
    ),
    "HMC": (POISSON, dfac.HMC(**WARM), {"together": 10, "replications": 50, "draws": 400}),
    "Gibbs, real-valued": (FIXED, dfac.Gibbs(), {"missing": 0.2}),
    "Gibbs, all sampled": (
        dfac.GaussianMF(1),
        dfac.Gibbs(),
        {"replications": 20, "draws": 200, "tune": 80},
    ),
    "Gibbs, rates of rows": (
        dfac.TweedieNMF(2, dispersion=1.0, rate_w="row", rate_h="column"),
        dfac.Gibbs(**WARM),
        {"moments": (4.0, 1.0)},
    ),
    "Gibbs, rates of components": (
        dfac.TweedieNMF(2, dispersion=1.0, rate_w="component", rate_h="component"),
        dfac.Gibbs(**WARM),
        {"moments": (4.0, 1.0), "replications": 20, "draws": 200},
    ),
    "Gibbs, shapes": (
        dfac.TweedieNMF(1, dispersion=1.0, rate_w="component", shape_h="auto"),
        dfac.Gibbs(**WARM),
        {"moments": (4.0, 1.0), "replications": 20, "draws": 200},
    ),
}
"""Of every model with a prior and every sampler that is exact for it."""


def calibrated(model: Any, sampler: Sampler, **options: Any) -> Any:
    settings = {"replications": 300, "draws": 250, "tune": 150, "random_seed": 3}
    quiet = {"progressbar": False, "executor": "serial"}
    return dfac.calibrate(model, (4, 3), sampler, **quiet, **settings | options)


@pytest.mark.parametrize("name", PAIRS)
def test_exact_samplers_are_calibrated(name: str) -> None:
    model, sampler, options = PAIRS[name]
    found = calibrated(model, sampler, **options)
    assert found.attrs["calibrated"], str(found)
    assert found.sizes["replication"] == options.get("replications", 300)
    cells = [own for own in found["quantity"].values if "sum" not in own]
    assert np.isfinite(found["p"].sel(quantity=cells)).all(), "too few draws to say anything"


class Hot(dfac.BlockHMC):
    """The likelihood to the power 1 / 1.3."""

    def block_step(self, program: Program, *rest: Any) -> None:
        hyper = program.hyper._replace(dispersion=1.3 * program.hyper.dispersion)
        super().block_step(replace(program, hyper=hyper), *rest)


def test_a_temperature_is_seen() -> None:
    found = calibrated(POISSON, Hot(**WARM), replications=400)
    assert not found.attrs["calibrated"], str(found)
    assert found["quantity"][0] == "log_likelihood"
    assert found["shift"][0] > 5
    assert "NOT CALIBRATED" in found.verdict
    assert "lie too low" in found.verdict


class OtherRate(dfac.TweedieNMF):
    """Factors whose rate is not the model's."""

    def draw_prior(self, *rest: Any) -> PriorDraw:
        true = super().draw_prior(*rest)
        return true._replace(W=true.W / 1.1)


def test_a_rate_that_is_off_by_a_tenth_is_seen() -> None:
    """By the sums of W and of H, which nothing else holds in place."""
    wrong = OtherRate(2, dispersion=1.0, rate_w=1.0, rate_h=0.5)
    for model, right in ((POISSON, True), (wrong, False)):
        found = calibrated(model, dfac.Gibbs(**WARM), replications=2000, draws=150)
        assert found.attrs["calibrated"] == right, str(found)


def test_a_step_that_is_too_large_is_seen() -> None:
    found = calibrated(POISSON, dfac.PSGLD(step=0.5, **WARM), replications=400)
    assert not found.attrs["calibrated"], str(found)
    assert "half the step" in found.verdict


def test_too_short_a_run_is_seen() -> None:
    """Draws from the start, which is a mode."""
    found = calibrated(POISSON, dfac.Gibbs(warm_start=100), tune=0, draws=12)
    assert not found.attrs["calibrated"], str(found)
