"""What `calibrate` takes, refuses, returns and draws; `tests/statistical` says what it sees."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import daskfactor as dfac
from daskfactor import plots
from daskfactor.errors import DaskfactorError, OptionError
from tests.refusals import refused

MODEL = dfac.TweedieNMF(2, dispersion=1.0, rate_w=1.0, rate_h=0.5)
SAMPLER = dfac.Gibbs(warm_start=2)


def calibrate(model=MODEL, **options):
    settings = {"replications": 12, "draws": 60, "tune": 10, "random_seed": 1}
    quiet = {"progressbar": False, "executor": "serial"}
    usual = {"shape": (3, 4), "sampler": SAMPLER}
    return dfac.calibrate(model, **usual | quiet | settings | options)


def test_what_it_returns():
    found = calibrate(cells=2, missing=0.3)
    names = set(found["quantity"].values)
    cells = [name[3:-1].split(",") for name in names if name.startswith("mu[")]
    assert len(cells) == 2
    sizes = {f"w[{row}]" for row, _ in cells} | {f"h[{column}]" for _, column in cells}
    others = {"log_likelihood", "w_sum", "h_sum", *(f"mu[{i},{j}]" for i, j in cells)}
    assert names == sizes | others
    assert found["rank"].sizes["replication"] == 12
    known = found["p"].dropna("quantity")
    assert (np.diff(known) >= 0).all()
    assert (found["rank"].max("replication") <= found["levels"]).all()
    assert json.loads(found.attrs["sampler"])["type"] == "Gibbs"
    assert found.verdict in " ".join(str(found).split())  # lines are broken
    assert found.identical(calibrate(cells=2, missing=0.3))
    assert not found["rank"].equals(calibrate(cells=2, missing=0.3, random_seed=2)["rank"])


def test_every_executor_gives_the_same_ranks():
    assert calibrate(blocks=2).equals(calibrate(blocks=2, executor=dfac.LanesExecutor(2)))


def test_replications_may_share_runs_or_have_their_own():
    events = []
    alone = calibrate(together=1, callback=events.append)
    assert [event.done for event in events if event.phase == "replications"] == list(range(1, 13))
    some = calibrate(together=5)
    for found in (alone, some):
        assert found.sizes["replication"] == 12
        assert found["ess"].sel(quantity="mu[0,1]" if "mu[0,1]" in found else "w_sum") > 0


def test_few_draws_say_nothing():
    found = calibrate(draws=10)
    assert found["p"].isnull().all()
    assert found.verdict.startswith("Nothing can be said of")
    assert not found.attrs["calibrated"]
    refused(OptionError, "calibrate with more", plots.calibration_plot, found)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"model": dfac.TweedieNMF(2), "sampler": dfac.BlockHMC()},
            'dispersion="auto" is estimated from the data and has no prior',
        ),
        ({"shape": 5}, "shape must be two whole numbers.*got 5"),
        ({"shape": (3, 0)}, "at least 1, got 0"),
        ({"missing": 1.0}, "below 1, got 1.0"),
        ({"missing": "half"}, "below 1, got 'half'"),
        ({"replications": 3}, "at least 10, got 3"),
        ({"draws": 0}, "draws must be a whole number of at least 1, got 0"),
        ({"moments": (1.0,)}, "moments must be a mean and a positive variance"),
        ({"moments": (1.0, -1.0)}, "moments must be a mean and a positive variance"),
        (
            {"model": dfac.TweedieNMF(1, dispersion=1.0, fixed_w=np.ones((3, 1))), "together": 2},
            "together=2 puts replications into one matrix",
        ),
    ],
)
def test_what_it_refuses(options, said):
    with pytest.raises(DaskfactorError, match=said) as caught:
        calibrate(**options)
    assert "\n" not in str(caught.value)


def test_frozen_components_are_no_part_of_what_is_drawn():
    W = np.array([[1.0, 4.0], [2.0, 0.5], [3.0, 2.0]])
    drawn = dfac.TweedieNMF(3, dispersion=1.0, fixed_w=W).draw_prior(
        np.random.default_rng(0), (3, 4), 1.0, 1.0
    )
    np.testing.assert_array_equal(drawn.W[:, :2], W)
    assert drawn.W[:, 2].std() > 0
    assert drawn.H.shape == (3, 4)
    model = dfac.TweedieNMF(2, dispersion=1.0, fixed_w=W[:, :1])
    assert calibrate(model).sizes["replication"] == 12


@pytest.mark.parametrize("biases", [True, False])
def test_what_is_learnt_is_drawn(biases):
    rng = np.random.default_rng(0)
    model = dfac.GaussianMF(2, biases=biases)
    drawn = model.draw_prior(rng, (2000, 3000), 5.0, 4.0)
    assert drawn.W.shape == (2000, model.width)
    assert set(drawn.learnt) == {"noise", "precision_w", "precision_h"}
    assert drawn.dispersion == drawn.learnt["noise"]
    precision = drawn.learnt["precision_w"]
    np.testing.assert_allclose(drawn.W[:, :2].var(axis=0) * precision[:2], 1, rtol=0.2)
    np.testing.assert_array_equal(drawn.learnt["precision_h"][:2], precision[:2])
    moving = 3 if biases else 2
    assert np.isfinite(precision).sum() == moving
    np.testing.assert_array_equal(drawn.W[:, -1], 1.0)
    if biases:
        assert drawn.H[3].mean() == pytest.approx(5.0, abs=5 * drawn.H[3].std() / 3000**0.5)
    fixed = dfac.GaussianMF(2, biases=False, noise=1.0, precision_w=1.0, precision_h=1.0)
    assert not fixed.draw_prior(rng, (3, 4), 5.0, 4.0).learnt


def test_a_dispersion_of_counts_is_drawn():
    rng, model = np.random.default_rng(0), dfac.NegativeBinomialNMF(1, rate_w=1.0, rate_h=1.0)
    drawn = [model.draw_prior(rng, (1, 1), 1.0, 1.0) for _ in range(2000)]
    alpha = np.array([own.dispersion for own in drawn])
    assert stats.kstest(alpha, "expon").pvalue > 1e-3
    assert [own.learnt["dispersion"] for own in drawn] == alpha.tolist()
    given = replace(model, dispersion=0.3).draw_prior(rng, (1, 1), 1.0, 1.0)
    assert (given.dispersion, dict(given.learnt)) == (0.3, {})


def test_dispersions_of_columns_are_drawn_around_what_they_share():
    rng = np.random.default_rng(0)
    model = dfac.NegativeBinomialNMF(1, rate_w=1.0, rate_h=1.0, dispersion="column")
    drawn = [model.draw_prior(rng, (1, 2), 1.0, 1.0).dispersion for _ in range(2000)]
    logs = np.log(drawn)
    scaled = (logs[:, 0] + 0.58) / np.sqrt(1.0 / 2.0 * (1.0 + 1.0 / 1.0))
    assert stats.kstest(scaled, "t", (4,)).pvalue > 1e-3
    assert np.corrcoef(stats.rankdata(logs, axis=0).T)[0, 1] == pytest.approx(0.5, abs=0.08)
    refused(OptionError, "together=2 puts", calibrate, model, sampler=dfac.BlockHMC(), together=2)


def test_links_are_drawn_with_what_they_add():
    X, rng = np.random.default_rng(1).normal(size=(500, 2)), np.random.default_rng(0)
    model = dfac.GaussianMF(2, covariates_w=X, link_precision_w=1e-4, precision_w=1.0)
    drawn = model.draw_prior(rng, (500, 3), 5.0, 4.0)
    link = drawn.learnt["link_w"]
    assert link.shape == (2, model.width)
    away = drawn.W - X @ link
    np.testing.assert_allclose(away[:, :2].std(axis=0), 1.0, rtol=0.2)
    np.testing.assert_array_equal(link[:, 3], 0.0)  # the constant that column biases meet
    assert np.abs(link[:, :3]).min() > 0


@pytest.mark.parametrize(
    ("model", "sampler", "names"),
    [
        (dfac.TweedieNMF(2), dfac.Gibbs(2), ()),
        (dfac.TweedieNMF("auto", dispersion=1.0), dfac.Gibbs(2), ("rate",)),
        (dfac.NegativeBinomialNMF(1), dfac.BlockHMC(warm_start=2), ("dispersion",)),
        (
            dfac.TweedieNMF(1, dispersion=1.0, rate_w="row", shape_h="auto"),
            dfac.BlockHMC(warm_start=2),
            ("rate_w", "shape_h"),
        ),
        (
            dfac.GaussianMF(1, covariates_h=np.eye(4)[:, :2]),
            dfac.Gibbs(),
            ("noise", "precision_w", "link_h", "link_precision_h"),
        ),
    ],
    ids=["nothing", "components", "dispersion", "rows", "links"],
)
def test_what_a_model_learns_is_ranked(model, sampler, names):
    found = calibrate(model, sampler=sampler, replications=10, draws=30, tune=5)
    assert set(names) <= set(found["quantity"].values)
    assert np.isfinite(found["ess"]).all()


def test_the_plot_has_two_axes_for_each_quantity(tmp_path):
    found = calibrate(replications=40, cells=1)
    figure = plots.calibration_plot(found, most=3, path=tmp_path / "ranks.png")
    known = min(3, int((found["levels"] > 0).sum()))
    assert len(figure.axes) == 2 * known
    assert figure.axes[0].get_title(loc="left").startswith(str(found["quantity"].values[0]))
    assert (tmp_path / "ranks.png").stat().st_size > 1000
    refused(OptionError, "takes what calibrate returned", plots.calibration_plot, found[["ess"]])
