"""`sampler="auto"`: what it chooses, and that the choice is told and kept."""

import itertools
import json

import numpy as np
import pytest
import xarray as xr

import daskfactor as dfac
from daskfactor.data.sources import outline
from daskfactor.errors import OptionError
from daskfactor.inference.base import Sampler, best_sampler, known
from tests.random_sparse import random_array

RUN = {"draws": 6, "tune": 6, "random_seed": 3, "progressbar": False}
MADE = {"executor": "serial", **RUN}


def counts(rows, columns, mean):
    return np.random.default_rng(rows).poisson(mean, (rows, columns)).astype(np.float32)


def chosen(model, V, **options):
    with dfac.as_blocks(V, allow_empty=True, **options) as data:
        return best_sampler(model.sized(data.shape), data).name


POISSON = {"beta": 1.0, "dispersion": 1.0}
COLUMNS = dfac.NegativeBinomialNMF(3, dispersion="column")
TABLE = [
    ("quick and informed", dfac.TweedieNMF(3), counts(30, 40, 5), "BlockHMC"),
    ("another law", dfac.TweedieNMF(3, beta=0.0), 1 + counts(30, 40, 5), "BlockHMC"),
    ("large", dfac.TweedieNMF(3), counts(400, 300, 5), "SGHMC"),
    ("few counts that may vary more", dfac.TweedieNMF(3), counts(60, 40, 0.05), "SGHMC"),
    ("few Poisson counts", dfac.TweedieNMF(3, **POISSON), counts(60, 40, 0.05), "Gibbs"),
    ("few cells a row", dfac.TweedieNMF(6), counts(9, 8, 0.05), "BlockHMC"),
    ("large and spiky", dfac.TweedieNMF(3, shape_w=0.3), counts(400, 300, 5), "BlockHMC"),
    ("learnt shapes", dfac.TweedieNMF(3, shape_h="auto"), counts(400, 300, 5), "BlockHMC"),
    ("huge and spiky", dfac.TweedieNMF(100, shape_w=0.3), counts(400, 300, 5), "PSGLD"),
    ("relevance", dfac.TweedieNMF("auto"), counts(400, 300, 5), "SGHMC"),
    ("overdispersed", dfac.NegativeBinomialNMF(3), counts(400, 300, 5), "SGHMC"),
    ("few overdispersed counts", dfac.NegativeBinomialNMF(3), counts(60, 40, 0.05), "SGHMC"),
    ("columns that vary", COLUMNS, counts(60, 40, 0.05), "SGHMC"),
    ("many overdispersed counts", dfac.NegativeBinomialNMF(3), counts(60, 40, 5), "BlockHMC"),
    ("real-valued", dfac.GaussianMF(3), counts(30, 40, 5), "SGHMC"),
]


@pytest.mark.parametrize(
    ("model", "V", "name"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE]
)
def test_what_is_chosen(model, V, name):
    """On every grid, in every type, and from an outline alone."""
    assert chosen(model, V) == name
    assert chosen(model, V, blocks=1, dtype="float64") == name
    asked = dict.fromkeys(("blocks", "unstored", "memory_limit", "entries"))
    seen = outline(V, dtype=np.dtype(np.float32), balance=False, **asked)
    assert best_sampler(model.sized(V.shape), seen).name == name


@pytest.mark.parametrize("beta", [2.0, 1.0, 0.5, 0.0, -1.0])
def test_tiny_data_are_drawn_exactly(beta):
    """Whatever has a finite step is off there, if by little."""
    for shape, K in itertools.product([(2, 2), (4, 4), (10, 8)], [1, 2, 3]):
        model = dfac.TweedieNMF(K, beta=beta, dispersion=1.0)
        assert chosen(model, 1 + counts(*shape, 2)) in ("BlockHMC", "Gibbs")


def test_sparse_data_count_by_what_a_pass_visits():
    """And rows have a price of their own."""
    V = random_array((300, 400), density=0.05, rng=0, dtype=np.float32).tocsr()
    assert chosen(dfac.TweedieNMF(5, beta=2.0), V, unstored="zero") == "BlockHMC"
    assert chosen(dfac.NegativeBinomialNMF(5), V.ceil(), unstored="zero") == "SGHMC"
    tall = random_array((30_000, 40), density=0.001, rng=0, dtype=np.float32).tocsr()
    assert chosen(dfac.TweedieNMF(3, beta=2.0), tall, unstored="zero") == "SGHMC"


def test_weights_of_cells_are_for_samplers_that_take_them():
    V = counts(60, 40, 0.05)
    assert chosen(dfac.TweedieNMF(3, **POISSON), V, weights=np.full(V.shape, 0.5)) != "Gibbs"


def test_whatever_may_be_chosen_says_why():
    claims = {
        name: own
        for name, kind in known(Sampler).items()
        for own in (kind().suited(dfac.TweedieNMF(2)), kind().suited(dfac.GaussianMF(2)))
        if own is not None and type(own).worth is not Sampler.worth
    }
    assert {"PSGLD", "SGHMC", "BlockHMC", "Gibbs"} <= set(claims)
    assert not {"PSGRRLD", "HMC", "SGLD", "LangevinDynamics"} & set(claims)
    assert all(own.merit for own in claims.values())


@pytest.mark.parametrize("sampler", [{}, {"sampler": "auto"}, {"sampler": None}])
def test_a_run_is_the_chosen_sampler_s_own_and_says_so(sampler):
    V, model, told = counts(12, 10, 4), dfac.TweedieNMF(2), []
    tree = dfac.sample(V, model, callback=told.append, **MADE, **sampler)
    same = dfac.sample(V, model, dfac.BlockHMC(), **MADE)
    xr.testing.assert_equal(tree["posterior"].to_dataset(), same["posterior"].to_dataset())
    assert json.loads(tree.attrs["sampler"])["type"] == "BlockHMC"
    assert tree.attrs["sampler_reason"] == dfac.BlockHMC.merit
    assert same.attrs["sampler_reason"] == "as asked for"
    assert f"BlockHMC: {dfac.BlockHMC.merit}" in [event.message for event in told]


def test_resume_keeps_it(tmp_path, monkeypatch):
    """Even where another would be chosen by then."""
    V, model, path = counts(12, 10, 4), dfac.TweedieNMF(2), tmp_path / "run.zarr"
    whole = dfac.sample(V, model, **MADE | {"draws": 12})
    dfac.sample(V, model, store=path, **MADE)
    monkeypatch.setattr(dfac.PSGLD, "worth", lambda *_: 1e9)
    assert chosen(model, V) == "PSGLD"
    more = dfac.resume(path, draws=6, progressbar=False)
    for name in ("W", "H"):
        np.testing.assert_array_equal(more["posterior"][name], whole["posterior"][name])


def test_what_a_run_would_cost_is_the_chosen_sampler_s():
    V, model = counts(400, 300, 5), dfac.TweedieNMF(3)
    assert dfac.estimate_cost(V, model) == dfac.estimate_cost(V, model, dfac.SGHMC())
    assert dfac.estimate_cost(V, model).state != dfac.estimate_cost(V, model, dfac.PSGLD()).state


def test_a_cost_of_blocks_is_the_chosen_sampler_s_whatever_their_numbers_are():
    model = dfac.TweedieNMF(3, **POISSON)
    for V in (counts(60, 40, 0.05), counts(60, 40, 0.05) * 0.5):
        with dfac.as_blocks(V, allow_empty=True) as data:
            cost = dfac.estimate_cost(data, model)
            own = best_sampler(model, data)
            assert cost == dfac.estimate_cost(data, model, own)
            assert own.name == ("Gibbs" if data.is_integer else "SGHMC")


def test_another_word_is_refused():
    with pytest.raises(OptionError, match='"auto" or one of BlockHMC'):
        dfac.sample(counts(4, 3, 4), dfac.TweedieNMF(1), "psgld")
