"""Samplers on a GPU that is none draw what they draw on processors, but for rounding."""

from collections import Counter

import numpy as np
import pytest
from scipy import sparse

import daskfactor as dfac
from daskfactor.kernels.cuda.device import Device
from tests.kernels.cuda.fake import standing_in

RUN = {"random_seed": 1, "progressbar": False, "blocks": 4, "draws": 10, "tune": 10}


def counts(missing=True):
    rng = np.random.default_rng(0)
    V = rng.poisson(2 * rng.gamma(0.5, 1.0, (60, 3)) @ rng.gamma(0.5, 1.0, (3, 41)))
    V = V.astype(np.float32)
    if missing:
        V[rng.random(V.shape) < 0.1] = np.nan
    return V


def both(monkeypatch, V, model, sampler, **options):
    """Traces of processors and of the device, and how often this ran each of its kernels."""
    launched = Counter()
    launch = Device.launch

    def noted(self, source, name, *rest):
        launched[name] += 1
        launch(self, source, name, *rest)

    monkeypatch.setattr(Device, "launch", noted)
    run = RUN | options
    here = dfac.sample(V, model, sampler, **run)
    assert not launched
    with standing_in():
        there = dfac.sample(V, model, sampler, device="cuda", **run)
    return here, there, launched


def check_same(here, there, tolerance):
    for group in ("posterior", "posterior_moments", "sample_stats"):
        for name, own in here[group].data_vars.items():
            if own.dtype.kind != "f":
                continue
            scale = float(np.abs(own).max())
            apart = float(np.abs(own - there[group][name]).max())
            assert apart <= tolerance * scale, (group, name, apart, scale)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_dispersions_of_columns(monkeypatch, kind):
    V = counts() if kind == "dense" else sparse.csr_array(counts(missing=False))
    options = {} if kind == "dense" else {"unstored": "missing"}
    model = dfac.NegativeBinomialNMF(3, dispersion="column")
    here, there, launched = both(monkeypatch, V, model, dfac.PSGLD(), **options)
    check_same(here, there, 2e-5)
    assert launched["dense_col_fits" if kind == "dense" else "sparse_col_fits"]


def in_double(V, **options):
    return dfac.as_blocks(V, 4, dtype="float64", **options)


PATHS = {
    "counts": (counts(), dfac.TweedieNMF(3), {}),
    "shapes below 1": (counts(), dfac.TweedieNMF(3, shape_w=0.3, shape_h=0.5), {}),
    "shapes above 1": (counts(), dfac.TweedieNMF(3, shape_w=1.5), {}),
    "a shape to learn": (counts(), dfac.TweedieNMF(3, shape_w="auto"), {}),
    "rates": (counts() + 1, dfac.TweedieNMF(3, beta=0.5, rate_w="row", rate_h="component"), {}),
    "dispersions": (counts(), dfac.NegativeBinomialNMF(3, dispersion="column"), {}),
    "sparse": (sparse.csr_array(counts(False)), dfac.TweedieNMF(3), {"unstored": "zero"}),
    "sparse, linear": (
        sparse.csr_array(counts(False)),
        dfac.TweedieNMF(3, beta=2.0, dispersion=1.0),
        {"unstored": "zero"},
    ),
    "ratings": (
        sparse.csr_array(counts(False)),
        dfac.TweedieNMF(3, dispersion=1.0),
        {"unstored": "missing"},
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_of_rows(monkeypatch, name):
    """Decisions are those of processors: one that was not would move a whole row.

    Few cycles, as rounding grows by a factor in each while steps are learnt.
    """
    V, model, options = PATHS[name]
    with in_double(V, **options) as data:
        how = {"tune": 3, "draws": 4, "blocks": None}
        here, there, launched = both(monkeypatch, data, model, dfac.BlockHMC(), **how)
    check_same(here, there, 1e-7)
    # Both factors at the ends and between them: kicks of every round's last visit alone.
    assert launched["leapfrog_kick"] > launched["leapfrog_drift"] == 7 * 2 * 4


def test_paths_of_rows_in_single_precision(monkeypatch):
    model = dfac.TweedieNMF(3, dispersion=1.0)
    here, there, _ = both(monkeypatch, counts(), model, dfac.BlockHMC(), tune=2, draws=2)
    check_same(here, there, 1e-4)


@pytest.mark.parametrize("name", ["counts", "rates", "sparse", "sparse, linear", "ratings"])
def test_entries_that_are_drawn(monkeypatch, name):
    V, model, options = PATHS[name]
    with in_double(V, **options) as data:
        how = {"blocks": None}
        here, there, launched = both(monkeypatch, data, model, dfac.SGLD(), **how)
    check_same(here, there, 1e-6)
    assert launched["draw_entries"]


def test_entries_that_are_drawn_match_moments(monkeypatch):
    sampler = dfac.SGLD(subsample=0.3, transition="moments")
    here, there, _ = both(monkeypatch, counts(), dfac.TweedieNMF(3), sampler, tune=4, draws=4)
    check_same(here, there, 1e-4)
