"""One verdict for a run, whichever verb is asked and whatever copy of the run it is given."""

import json
import warnings
from html import unescape

import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure
from numpy.testing import assert_allclose
from typer.testing import CliRunner

import daskfactor as dfac
from daskfactor import plots
from daskfactor.cli.main import app
from daskfactor.results.align import as_drawn
from daskfactor.results.annotation import told_by
from daskfactor.results.noted import noted_at
from daskfactor.results.series import balanced_density
from daskfactor.results.verdict import PLAIN_RHAT
from tests.results.test_summary import run, statuses

QUIET = {"progressbar": False, "executor": "serial", "random_seed": 3, "draws": 40, "tune": 40}
ONE = dfac.TweedieNMF(1, dispersion=1.0)
LOOSE = "Not settled, so that means and intervals are rough"


def counts(shape=(20, 15)):
    rng = np.random.default_rng(0)
    return rng.poisson(rng.gamma(1, 2, (shape[0], 2)) @ rng.gamma(1, 2, (2, shape[1]))) + 0.0


def drifting(scale=1.0, learnt=None):
    """A run whose product mixes, while the scale of W and H wanders, and the density with it."""
    tree = run(chains=4, draws=200)
    walk = np.cumsum(np.random.default_rng(4).normal(size=(4, 200)), axis=1)
    by = np.exp(0.02 * scale * walk)[..., None, None]
    tree["posterior/W"].values[:] *= by
    tree["posterior/H"].values[:] /= by
    tree.attrs |= {"rate_w": 1.0, "rate_h": 1.0}
    lp = tree["sample_stats/lp"].values
    if scale:
        lp += lp - balanced_density(tree)  # what the scale adds
    if learnt is not None:
        tree["posterior"] = tree["posterior"].to_dataset().assign(learnt)
    return tree


def said(summary):
    """Status and advice of each light; what sentences say beside numbers that rounding moves."""
    return {name: (one.status, one.advice) for name, one in summary.lights.items()}


@pytest.mark.parametrize(
    "model",
    [dfac.TweedieNMF(2), ONE, dfac.TweedieNMF(3, rate_w="component")],
    ids=["two", "one", "rates"],
)
def test_copies_of_a_run_have_its_verdict(model):
    tree = dfac.sample(counts(), model, dfac.BlockHMC(), chains=2, **QUIET)
    expected, aligned = dfac.summarize(tree), dfac.align(tree)
    other = dfac.sample(counts(), model, dfac.BlockHMC(), **QUIET | {"random_seed": 4})
    copies = {
        "aligned": aligned,
        "aligned twice": dfac.align(aligned),
        "read again": xr.DataTree.from_dict(aligned.to_dict()),
        "aligned to another run": dfac.align(aligned, dfac.align(other), threshold=0.99, by="w"),
    }
    for name, copy in copies.items():
        copy.attrs = dict(aligned.attrs)
        found = dfac.summarize(copy)
        assert said(found) == said(expected), name
        assert set(found["functional"].values) == set(expected["functional"].values), name
        rhat = found["rhat"].sel(functional=expected["functional"])
        kinds = expected["kind"] != "component"
        kinds &= ~expected["functional"].str.contains(r"\[\d\]") | (name[-3:] != "run")
        assert_allclose(rhat[kinds], expected["rhat"][kinds], rtol=1e-2)


def test_a_tensor_is_judged_as_it_was_drawn():
    V = np.random.default_rng(0).poisson(3.0, (9, 8, 7)) + 0.0
    tree = dfac.sample(V, dfac.CP(2, dispersion=1.0), dfac.BlockHMC(), chains=2, **QUIET)
    aligned = dfac.align(tree)
    assert said(dfac.summarize(aligned)) == said(dfac.summarize(tree))
    for copy in (aligned, dfac.align(aligned, aligned)):
        back = as_drawn(copy)
        for name in "WH":
            assert_allclose(
                back["posterior"][name], tree["posterior"][name], rtol=1e-5, err_msg=name
            )
    assert "axis_2_sum[1]" in dfac.summarize(tree)["functional"]


def test_draws_are_found_again_from_an_aligned_copy():
    tree = run(swap=True)
    rates = np.random.default_rng(0).gamma(2.0, size=(2, 500, 3))
    tree["posterior"] = (
        tree["posterior"].to_dataset().assign(rate=(("chain", "draw", "component"), rates))
    )
    aligned = dfac.align(tree)
    reference = tuple(tree["posterior"][name].values[0, 3] for name in "WH")
    for copy in (aligned, dfac.align(aligned, reference), aligned.isel(draw=slice(3, None, 2))):
        back = as_drawn(copy)["posterior"].to_dataset()
        expected = tree["posterior"].to_dataset().sel(draw=back["draw"])
        xr.testing.assert_allclose(back, expected)
    assert as_drawn(tree) is tree


def test_components_of_an_aligned_copy_are_judged_under_its_names():
    tree, rng = run(), np.random.default_rng(8)
    tree["posterior/W"].values[1, ..., 2] = rng.permutation(np.arange(12.0))
    tree["posterior/H"].values[1, :, 2] = rng.permutation(np.arange(9.0))
    aligned = dfac.align(tree)
    order = [2, 0, 1]
    means = aligned["posterior"].to_dataset().mean(["chain", "draw"]).isel(component=order)
    other = dfac.align(tree, means)
    lost = dfac.summarize(tree).components
    (name,) = (k for k in range(3) if f"Component {k} of 3" in lost.reasons[0])
    renamed = dfac.summarize(other).components
    assert (lost.status, renamed.status) == ("red", "red")
    assert f"Component {order.index(name)} of 3" in renamed.reasons[0]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "run.zarr"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dfac.sample(counts(), dfac.TweedieNMF(2), dfac.BlockHMC(), chains=2, store=path, **QUIET)
    return path


def of_page(tree):
    page = unescape(dfac.report(tree).html)
    page = page[page.index('<section id="verdict">') : page.index('<section id="care">')]
    parts = page.split("<h3>")[1:]
    marked = [part.split("<strong>To do:</strong> ") for part in parts]
    return [(one[1].split("</p>")[0] if len(one) > 1 else "") for one in marked], page


def test_all_verbs_that_judge_say_the_same(store):
    expected = dfac.summarize(dfac.open_run(store).load())
    lights = said(expected)
    tree = dfac.open_run(store)
    assert said(dfac.summarize(store)) == lights
    assert said(dfac.summarize(tree)) == lights
    assert said(dfac.summarize(dfac.align(store))) == lights
    assert said(type(expected).from_dict(noted_at(store)[1].summary)) == lights
    told = CliRunner().invoke(app, ["info", str(store), "--json"])
    of_info = json.loads(told.stdout)["lights"]
    assert {name: (one["status"], one["advice"]) for name, one in of_info.items()} == lights
    told = CliRunner().invoke(app, ["info", str(store), "--diagnose", "--json"])
    assert json.loads(told.stdout)["lights"] == of_info
    for copy in (tree, dfac.align(tree)):
        of_anndata = told_by(copy).uns["convergence"]
        assert {name: of_anndata[name] for name in lights} == {n: s for n, (s, _) in lights.items()}
        advice, page = of_page(copy)
        assert advice == [one for _, one in lights.values()]
        for light in expected.lights.values():
            assert f'<li class="{light.status}">' in page


def test_an_estimator_keeps_the_verdict_of_its_run():
    pytest.importorskip("sklearn")
    options = {"draws": 40, "tune": 40, "chains": 2}
    found = dfac.BayesianNMF(2, sampler=dfac.BlockHMC(), random_state=3, **options).fit(counts())
    trace = dfac.sample(
        dfac.as_blocks(counts(), dtype="float64"),
        dfac.TweedieNMF(2),
        dfac.BlockHMC(),
        random_seed=3,
        progressbar=False,
        **options,
    )
    assert said(dfac.summarize(found.trace_)) == said(dfac.summarize(trace))


def test_a_report_of_an_unsound_run_does_not_say_that_nothing_needs_care():
    rise = np.linspace(-30, 0, 200) + np.random.default_rng(0).normal(size=(2, 200))
    tree = run(draws=200, lp=rise)
    about = {"shape": [12, 9], "dims": ["row", "column"], "n_observed": 108}
    tree.attrs |= {"data": json.dumps(about), "created_at": "", "random_seed": 0, "tune": 0}
    for copy in (tree, dfac.align(tree)):
        page = dfac.report(copy).html
        assert "Do not rely on it" in page
        assert "beyond the usual" not in page
        assert "beyond what the verdict above says" in page


def test_the_density_is_drawn_as_it_is_judged():
    tree = drifting(5.0)
    lp, balanced = tree["sample_stats/lp"].values, balanced_density(tree)
    assert np.abs(balanced - lp).max() > 1.0
    for copy in (tree, dfac.align(tree)):
        figure = plots.trace_plot(copy)
        assert isinstance(figure, Figure)
        whole, judged = figure.axes
        for chain in range(4):
            assert_allclose(whole.lines[chain].get_ydata(), lp[chain])
            assert_allclose(judged.lines[chain].get_ydata(), balanced[chain], rtol=1e-5)
        assert "balanced" in judged.get_title(loc="left")
    assert "balanced" not in plots.trace_plot(run()).axes[1].get_title(loc="left")


def test_a_scale_that_does_not_mix_is_seen():
    still, moving = dfac.summarize(drifting(0.0)), dfac.summarize(drifting())
    assert statuses(still) == ["green", "green", "green"]
    assert float(moving["rhat"].sel(functional="w_sum")) > PLAIN_RHAT
    assert statuses(moving) == ["green", "amber", "green"]
    assert LOOSE in moving.components.reasons[-1]
    assert "sizes of W and of H (" in moving.components.reasons[-1]
    assert "through align()" in moving.components.advice
    assert "may be read" not in moving.components.advice


@pytest.mark.parametrize("dims", [(), ("component",), ("row",)])
def test_hyperparameters_that_do_not_mix_are_seen(dims):
    shape = (4, 200, *({"component": 3, "row": 12}[dim] for dim in dims))
    rng = np.random.default_rng(5)
    sound = rng.gamma(5.0, size=shape)
    learnt = (("chain", "draw", *dims), sound)
    assert statuses(dfac.summarize(drifting(0.0, {"rate_w": learnt}))) == ["green"] * 3
    sound[2] += 10.0
    found = dfac.summarize(drifting(0.0, {"rate_w": learnt}))
    assert statuses(found) == ["green", "amber", "green"]
    assert "sampled hyperparameters (rate_w" in found.components.reasons[-1]
    assert "Draw about" in found.components.advice


def test_sizes_of_components_that_do_not_mix_are_seen():
    tree = run(chains=4, draws=200)
    by = np.exp(0.02 * np.cumsum(np.random.default_rng(4).normal(size=(4, 200)), axis=1))
    tree["posterior/W"].values[..., 0] *= by[..., None]
    tree["posterior/H"].values[:, :, 1] *= by[..., None]
    found = dfac.summarize(tree)
    assert found.components.status != "green"
    assert "sizes of components (aligned[" in " ".join(found.components.reasons)


@pytest.mark.parametrize("seed", range(6))
def test_no_red_number_stands_beside_green_lights(seed):
    """Whatever drifts: a number of the table with an R-hat above the bound has its light."""
    rng = np.random.default_rng(seed)
    tree = run(chains=int(rng.integers(1, 4)), draws=120, swap=bool(seed % 2), seed=seed)
    group = tree["posterior"]
    for name in "WH":
        walk = np.cumsum(rng.normal(size=(*group[name].shape[:2], 1, 1)), axis=1)
        group[name].values[:] *= np.exp(0.01 * (seed % 3) * walk)
    tree.attrs |= {"rate_w": 1.0, "rate_h": 1.0}
    for copy in (tree, dfac.align(tree)):
        found = dfac.summarize(copy)
        table = str(found).split("\n\n")[1]
        worst = max(float(line[23:30]) for line in table.split("\n")[1:])
        assert worst <= PLAIN_RHAT or set(statuses(found)) != {"green"}
