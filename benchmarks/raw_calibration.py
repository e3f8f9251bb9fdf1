"""Calibration of what results show raw: W, H, rates, shapes, dispersions, precisions, noise.

Simulation-based calibration of the samplers that ``sampler="auto"`` may choose, with every kind of
model that they take, on data that say much of W H: there only the priors hold the scale that W
and H share, and a sampler has to move along it for intervals of W and of H to cover. Each line has
the sampler, the model, the least p value of all quantities (over as many quantities, the least of
them is below 0.001 by chance about once in a hundred lines), which quantity has it, what share of
the true W and H lie in their 90 % intervals, the least number of independent draws of a quantity
in a run, and quantities of which too few draws are independent to say anything.

    python -m benchmarks.raw_calibration [--pairs TEXT] [--replications 200] [--draws 500]

``--pairs BlockHMC`` takes the lines with that text in their name. All of them take about an hour
on one core.
"""

import argparse
import warnings
from typing import Any

import numpy as np
import xarray as xr

import daskfactor as dfac
from daskfactor.errors import DivergenceError

SHAPE = 12, 9
COUNTS = {"moments": (50.0, 2500.0)}
LINKED = np.random.default_rng(0).normal(size=(SHAPE[0], 2))
KNOWN: dict[str, Any] = {"dispersion": 1.0}
BLOCK_HMC, GIBBS, SGHMC, PSGLD = dfac.BlockHMC(), dfac.Gibbs(), dfac.SGHMC(), dfac.PSGLD()
COUNTED = {
    "Poisson": dfac.TweedieNMF(2, **KNOWN),
    "rates of rows and columns": dfac.TweedieNMF(2, rate_w="row", rate_h="column", **KNOWN),
    "rates of components": dfac.TweedieNMF(2, rate_w="component", rate_h="component", **KNOWN),
}
SHAPED = dfac.TweedieNMF(1, rate_w="component", shape_w="auto", shape_h="auto", **KNOWN)
OTHERS = {
    "normal": dfac.TweedieNMF(2, beta=2.0, dispersion=4.0),
    "compound Poisson": dfac.TweedieNMF(2, beta=0.5, dispersion=0.5),
    "gamma": dfac.TweedieNMF(1, beta=0.0, dispersion=0.1, shape_w=2.0, shape_h=2.0),
    "negative binomial": dfac.NegativeBinomialNMF(1),
    "negative binomial, dispersions of columns": dfac.NegativeBinomialNMF(1, dispersion="column"),
}
REAL = {
    "Gaussian": dfac.GaussianMF(1, biases=False),
    "Gaussian, biases": dfac.GaussianMF(1),
    "Gaussian, covariates": dfac.GaussianMF(1, covariates_w=LINKED),
}
PAIRS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    **{f"BlockHMC, {name}": (m, BLOCK_HMC, COUNTS) for name, m in (COUNTED | OTHERS).items()},
    "BlockHMC, shapes": (SHAPED, BLOCK_HMC, COUNTS),
    **{f"Gibbs, {name}": (m, GIBBS, {"moments": (2.0, 4.0)}) for name, m in COUNTED.items()},
    "Gibbs, shapes": (SHAPED, GIBBS, {"moments": (2.0, 4.0)}),
    **{f"SGHMC, {name}": (m, SGHMC, COUNTS) for name, m in (COUNTED | OTHERS).items()},
    "PSGLD, sparse factors": (dfac.TweedieNMF(2, shape_w=0.3, **KNOWN), PSGLD, COUNTS),
    **{f"Gibbs, {name}": (m, GIBBS, {}) for name, m in REAL.items()},
    **{f"SGHMC, {name}": (m, SGHMC, {}) for name, m in REAL.items()},
}


def coverage(found: xr.Dataset, factor: str) -> float:
    """Return how often the truth's rank is among the middle 90 % of a factor's entries."""
    own = [name for name in found["quantity"].values if str(name).startswith(f"{factor}[")]
    own = [name for name in own if found["levels"].sel(quantity=name) > 0]
    if not own:
        return float("nan")
    levels = found["levels"].sel(quantity=own)
    share = (found["rank"].sel(quantity=own) + 0.5) / (levels + 1)
    return float(((share > 0.05) & (share < 0.95)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", default="")
    parser.add_argument("--replications", type=int, default=200)
    parser.add_argument("--draws", type=int, default=500)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    for name, (model, sampler, options) in PAIRS.items():
        if given.pairs not in name:
            continue
        run: dict[str, Any] = {"tune": 500, "random_seed": 1, "progressbar": False}
        run |= {"executor": "serial", "blocks": 1, "together": 1, "draws": given.draws}
        try:
            found = dfac.calibrate(
                model, SHAPE, sampler, replications=given.replications, **options, **run
            )
        except DivergenceError as error:
            print(f"{name}: {error}", flush=True)
            continue
        known = found.dropna("quantity", subset=["p"])
        slow = ", ".join(set(found["quantity"].values) - set(known["quantity"].values))
        print(
            f"{name}: p {float(known['p'].min()):.2g} of {known['quantity'].values[0]}, "
            f"W {coverage(found, 'w'):.1%}, H {coverage(found, 'h'):.1%}, "
            f"{float(found['ess'].min()):.0f} draws" + (f"; slow: {slow}" if slow else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
