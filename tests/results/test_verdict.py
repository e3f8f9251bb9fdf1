"""The lights over a run: what they go by, and what they say is to be done."""

import json
import math
import re
import warnings
from html import unescape

import numpy as np
import pytest
import xarray as xr
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from typer.testing import CliRunner

import daskfactor as dfac
from daskfactor import plots
from daskfactor.cli.main import app
from daskfactor.results import verdict
from daskfactor.results.align import as_drawn
from daskfactor.results.annotation import result_of
from daskfactor.results.diagnose import (
    agreement,
    convergence,
    rhat_beyond_autocorrelation,
    trend,
)
from daskfactor.results.finalize import measured
from daskfactor.results.series import balanced_density
from daskfactor.results.summary import describe_trend
from daskfactor.results.summary_cache import cached_at
from daskfactor.results.verdict import (
    Component,
    Facts,
    components_light,
    density_light,
    moments_light,
)
from tests.fake_run import drawn_tree
from tests.results.test_summary import run, statuses
from tests.tiers import FULL

ONE = Facts(chains=1, draws=500, tune=500)
FOUR = Facts(chains=4, draws=500, tune=500)


def predictions(rhat, ess, facts=FOUR, rising=False, within=2.0, count=40):
    rhat, ess = (np.broadcast_to(np.asarray(one, float), count) for one in (rhat, ess))
    return verdict.predictions_light(rhat, ess, facts, rising=rising, within=lambda: within)


def test_predictions_depend_on_error_and_rhat_and_the_density_on_its_rhat():
    others = np.full(39, 1.001)  # one number of many is above by chance, unless it is far above
    for rhat, ess, status in (
        *((1.01, 100, "green"), (1.01, 99, "amber"), (1.02, 4000, "amber")),
        *((1.1, 400, "amber"), (1.11, 4000, "red"), (1.0, 12, "amber"), (1.0, 11, "red")),
        *((np.r_[1.05, others], 200, "green"), (np.r_[1.15, others], 200, "amber")),
    ):
        assert predictions(rhat, ess).status == status, (rhat, ess)
    for rhat, moving, status in (
        *((1.05, None, "green"), (1.051, None, "amber"), (1.11, None, "red")),
        *((1.0, "it rose", "red"), (math.nan, None, "red")),
    ):
        assert density_light(rhat, moving, FOUR, within=lambda: 2.0).status == status, (
            rhat,
            moving,
        )


def test_moments_of_chains_are_judged_by_their_differences():
    noise, var = np.random.default_rng(0).normal(size=(2, 4, 200)), np.ones((4, 200))
    means, counts = (noise[0] * 0.1, noise[1] * 1.5), np.full(4, 500)
    near, far = (moments_light(own, var, counts, FOUR) for own in means)
    assert (near.status, far.status) == ("green", "red")
    assert near.numbers["error"] == pytest.approx(0.05, rel=0.1)  # .1 / sqrt(4)
    alone = moments_light(var[:1], var[:1], np.full(1, 500), ONE)
    assert (alone.status, "four chains" in alone.advice) == ("none", True)


def test_observations_go_by_the_distance_of_chains_in_sds_of_an_observation():
    apart = np.array([[-1.0], [-0.5], [0.5], [1.0]]) * np.ones((4, 30))
    one = float(apart.var(axis=0, ddof=1)[0] / 4) ** 0.5
    for sd, error, rising, status in (
        *((one / 0.069, 0.0, False, "green"), (one / 0.071, 0.0, False, "amber")),
        *((one / 0.29, 0.0, False, "amber"), (one / 0.31, 0.0, False, "red")),
        *((100.0, 9.9, False, "green"), (100.0, 11.0, False, "amber"), (100.0, 31.0, False, "red")),
        (100.0, 0.0, True, "amber"),
    ):
        given = apart, np.full(30, error), np.full(30, sd), FOUR
        assert verdict.observations_light(*given, rising=rising).status == status, (sd, error)
    alone = verdict.observations_light(
        apart[:2], np.zeros(30), np.full(30, 100.0), ONE, rising=False
    )
    assert (alone.status, alone.alone, "chains=4" in alone.advice) == ("amber", True, True)


NOISY = {
    "counts": (dfac.TweedieNMF(2), {}),
    "columns": (dfac.NegativeBinomialNMF(2, dispersion="column"), {}),
    "uncertain": (dfac.TweedieNMF(2, beta=2.0), {"uncertainty": True}),
}


@pytest.mark.parametrize("kind", NOISY)
def test_observations_have_the_sd_that_predictions_have(kind):
    rng, (model, options) = np.random.default_rng(0), NOISY[kind]
    V = rng.poisson(rng.gamma(2.0, 1.0, (9, 2)) @ rng.gamma(2.0, 1.0, (2, 7))).astype(float)
    if options:
        options = {"uncertainty": rng.uniform(0.5, 3.0, V.shape)}
    settings = {"draws": 50, "tune": 50, "chains": 2, "random_seed": 0, "progressbar": False}
    trace = dfac.sample(V, model, **settings, **options)
    found = dfac.summarize(trace)
    names = [own for own in found["functional"].values if str(own).startswith("mu[")]
    rows, columns = np.array([re.findall(r"\d+", own) for own in names], int).T
    group = trace["posterior"]
    mu = np.einsum("cdpk,cdkp->cdp", group["W"].values[:, :, rows], group["H"].values[..., columns])
    sd = dfac.predict(trace)["sd"].values[rows, columns]
    off = (mu.mean(axis=1).var(axis=0, ddof=1) / 2 / sd**2).mean() ** 0.5
    assert found.observations.numbers["off"] == pytest.approx(off, rel=1e-4)
    sizes = np.minimum(found["ess_bulk"], found["ess_tail"]).sel(functional=names).values
    error = (mu.var(axis=(0, 1)) / sizes / sd**2).mean() ** 0.5
    assert found.observations.numbers["error"] == pytest.approx(error, rel=1e-4)


def autoregressive(chains, draws, rho, seed=0):
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(chains, draws + 200))
    for at in range(1, noise.shape[1]):
        noise[:, at] = rho * noise[:, at - 1] + (1 - rho**2) ** 0.5 * noise[:, at]
    return noise[:, 200:]


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_autocorrelation_alone_sets_no_chains_apart(rho):
    pooled = {
        name: verdict.pooled_rhat(
            np.array([rhat(autoregressive(4, 125, rho, n)) for n in range(60)])
        )
        for name, rhat in {
            "usual": lambda draws: convergence(draws).rhat,
            "beyond": rhat_beyond_autocorrelation,
            "surely": lambda draws: rhat_beyond_autocorrelation(draws, 2.0),
        }.items()
    }
    assert pooled["beyond"] - 1 < 0.5 * (pooled["usual"] - 1)
    assert pooled["surely"] < 1.01
    apart = autoregressive(4, 125, rho) + np.array([[0.0], [0.0], [0.0], [2.0]])
    assert rhat_beyond_autocorrelation(apart, 2.0) > verdict.LARGE_RHAT


EMPTY = np.array([])
SLOW, BY_HAND = ONE._replace(fixed_sampler=True), ONE._replace(fixed_step=True)


def test_the_one_thing_to_do_fits_the_trouble():
    for light, advice in (
        # Four times the draws halve an error of .2.
        (predictions(1.0, 25), "Draw about 1500 more in each chain"),
        (predictions(1.0, 25, ONE), "Draw about 1500 more: resume(..., draws=1500)."),
        (predictions(1.3, 10, rising=True), "Tune longer: sample(..., tune=1000)"),
        (predictions(1.5, 5, within=1.01), "starts=8"),
        (predictions(1.2, 30, within=1.2), "Draw about"),
        (predictions(1.3, 3, SLOW), 'sampler="auto"'),
        (predictions(1.0, 400, ONE._replace(diverging=0.2)), 'step="auto"'),
        (predictions(1.0, 400, BY_HAND), "Measure the bias"),
        # Draws that never change are those of a chain that is stuck.
        (predictions(EMPTY, EMPTY, ONE, count=0), 'step="auto"'),
        (predictions(EMPTY, EMPTY, ONE._replace(draws=3), count=0), "Draw about"),
        # Chains at levels of their own have settled apart.
        (density_light(1.5, None, FOUR, within=lambda: 1.0), "starts=8"),
        (density_light(1.5, None, FOUR, within=lambda: 1.5), "Tune longer"),
        (density_light(1.5, "it fell", BY_HAND, within=lambda: 1.5), 'step="auto"'),
    ):
        assert advice in light.advice


def test_lights_of_steps_by_hand_and_of_chains_that_are_stuck():
    assert (predictions(1.0, 400).advice, predictions(1.0, 400, BY_HAND).status) == ("", "amber")
    assert predictions(1.0, 400, BY_HAND, rising=True).status == "red"
    for facts in (ONE, ONE._replace(draws=3)):
        assert predictions(EMPTY, EMPTY, facts, count=0).status == "red"
    rounded = {1: 100, 100: 100, 101: 200, 950: 1000, 1001: 1100, 12345: 13000}
    assert {n: verdict.rounded_up(n) for n in rounded} == rounded


def test_components_are_judged_by_the_chains_that_have_them():
    good, lost = Component("a", 1.0, 4, 0.99), Component("b", 0.75, 3, 0.4)
    weak, vague = Component("c", 0.3, 0, 0.9), Component("d", 0.9, 4, 0.9)
    rough, alike = Component("e", 1.0, 4, 0.99, 0.5), lost._replace(agreement=0.99)

    def found(*components, sound=True):
        return components_light(components, FOUR, sound=sound)

    for pair, status in (
        *(((good, good), "green"), ((good, lost), "red"), ((good, alike), "red")),
        *(((good, vague), "amber"), ((rough,), "amber")),
    ):
        assert found(*pair).status == status
    for pair, at, words in (
        ((good, lost), 0, "Component b of 2 is not the same in all 4 chains"),
        ((good, lost), 0, "the chains disagree"),
        ((good, vague), 0, "Component d varies noticeably across all 4 chains"),
        ((vague, vague), 0, "Components d, d vary noticeably across all 4 chains"),
        ((rough,), -1, "Its size has a Monte Carlo"),
        ((rough, good), -1, "Their sizes have a Monte Carlo"),
        ((good, weak), 0, "do not separate them"),
        ((rough,), 1, "sizes and intervals are imprecise"),
    ):
        assert words in found(*pair).reasons[at]
    assert "Component a can be interpreted." in found(good, lost).reasons
    assert "fewer components" in found(good, weak).advice
    assert "predictions first" in found(good, weak, sound=False).advice


def test_lights_are_text_and_numbers_that_files_take(tmp_path):
    found = dfac.summarize(run(), cells=4)
    flat = {name: light.as_dict() for name, light in found.lights.items()}
    assert flat["predictions"]["status"] == found.predictions.status == "green"
    assert all(isinstance(value, str | float) for own in flat.values() for value in own.values())
    assert json.loads(json.dumps(flat)) == flat
    assert verdict.Light.from_dict(flat["components"]) == found.components
    found.to_netcdf(tmp_path / "summary.nc")
    with xr.open_dataset(tmp_path / "summary.nc") as read:
        assert read.attrs["predictions_error"] == found.predictions.numbers["error"]
        assert read.attrs["components_status"] == "green"


def test_a_light_prints_as_its_status_and_sentences():
    light = verdict.Light("amber", ("One reason.", "Another."), "Draw more.", {"rhat": 1.1})
    assert str(light) == "AMBER. One reason. Another. → Draw more."
    assert repr(light).startswith("Light(status='amber', reasons=('One reason.', 'Another.')")
    assert str(verdict.Light("green", ("All is well.",))) == "GREEN. All is well."


def test_components_that_can_be_turned_are_not_judged():
    """And cells that the run monitored are followed."""
    tree = run()
    cells = xr.Dataset(coords={"row_index": ("cell", [1, 7]), "column_index": ("cell", [8, 0])})
    tree["monitor"] = xr.DataTree(cells.assign(mean=(("chain", "cell"), np.zeros((2, 2)))))
    tree.attrs["model"] = json.dumps({"type": "GaussianMF", "n_components": 3, "biases": False})
    found = dfac.summarize(tree)
    assert found.components.status == "none"
    assert "a rotation leaves WH unchanged" in found.verdict
    assert not {"aligned", "component"} & set(found["kind"].values)
    assert statuses(found)[::2] == ["green", "green"]
    names = found["functional"].values
    assert [name for name in names if name.startswith("mu[")] == ["mu[1,8]", "mu[7,0]"]


def test_the_scale_of_a_component_takes_no_part_in_the_density():
    rng, scales = np.random.default_rng(1), ((5, 4), (2.0, 3.0))
    model = dfac.TweedieNMF(3, shape_w=1.5, shape_h=0.7)
    W, H = rng.gamma(1, 1, (5, 3)), rng.gamma(1, 1, (3, 4))

    def levelled(c):
        w, h = W * c, H / c[:, None]
        prior = 0.5 * np.log(w).sum() - 2.0 * w.sum() - 0.3 * np.log(h).sum() - 3.0 * h.sum()
        return prior - model.scale_density(w.sum(axis=0), h.sum(axis=1), *scales)

    assert levelled(np.array([0.1, 1.0, 30.0])) == pytest.approx(levelled(np.ones(3)))
    even = np.sqrt(3.0 * H.sum(axis=1) / (2.0 * W.sum(axis=0)))
    sums = (W * even).sum(axis=0), (H / even[:, None]).sum(axis=1)
    assert model.scale_density(*sums, *scales) == pytest.approx(0.0)


def test_a_log_density_that_only_sizes_move_is_settled():
    tree = run(chains=1, draws=400)
    tree.attrs |= {"rate_w": 1.0, "rate_h": 1.0}
    drift = np.exp(np.linspace(0, 1.5, 400))[None, :, None, None]
    tree["posterior/W"].values[:] *= drift
    tree["posterior/H"].values[:] /= drift
    w, h = tree["posterior/W"].values.sum(axis=2), tree["posterior/H"].values.sum(axis=3)
    lp = 20 * np.random.default_rng(2).normal(size=(1, 400))
    lp += (2 * np.sqrt(w * h) - w - h).sum(axis=-1)
    tree["sample_stats/lp"].values[:] = lp
    assert trend(lp) is not None
    assert describe_trend(tree) is None
    found = dfac.summarize(tree)
    assert float(found["rhat"].sel(functional="lp")) > 1.2
    assert float(found["rhat"].sel(functional="lp_balanced")) < 1.02
    assert found.log_density.status == "green"
    assert found.components.numbers["least_agreement"] > 0.95
    assert found.components.status == "amber"  # who reads W and H as drawn has to know


def test_halves_of_a_chain_stand_for_chains():
    draws = run(chains=1, draws=100)["posterior"].to_dataset()
    assert agreement(draws).min() > 0.99
    draws["W"].values[:, 50:, :, 0] = draws["W"].values[:, 50:, ::-1, 0]
    found = agreement(draws)
    assert found[0] < 0.5 < 0.99 < found[1:].min()


EXTREME = st.sampled_from([math.inf, math.nan, 1.0, 1e-300, 1e200, 1e308])
NUMBERS = st.one_of(st.floats(0.0, 2.0), EXTREME)
LENGTHS, FLAG = st.integers(1, 10**6), st.booleans()
LONG = {"draws": LENGTHS, "tune": LENGTHS.map(lambda n: n - 1)}
FLAGS = dict.fromkeys(("fixed_step", "fixed_sampler", "explained"), FLAG)
RUNS = st.builds(Facts, st.integers(1, 4), **LONG, **FLAGS, diverging=st.sampled_from([0.0, 1.0]))


def check_light(light):
    """It is one of the lights, and asks for what can be done."""
    assert light.status in ("green", "amber", "red", "none")
    assert light.reasons
    assert not re.search(r"\b(inf|nan|infinity)\b", light.advice)
    assert all(100 <= int(number) <= 10**10 for number in re.findall(r"=(\d{2,})", light.advice))
    assert light.status == "green" or light.advice or light.status == "none"
    assert verdict.Light.from_dict(light.as_dict()).advice == light.advice


@settings(max_examples=300, deadline=None)
@given(RUNS, st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4), NUMBERS, FLAG)
def test_every_light_has_finite_advice(facts, pairs, number, flag):
    rhat, ess = np.array(pairs).reshape(-1, 2).T
    check_light(verdict.predictions_light(rhat, ess, facts, rising=flag, within=lambda: number))
    check_light(density_light(number, "it rose" if flag else None, facts, within=lambda: number))
    error, names = verdict.error_of(ess[~np.isnan(ess)]), [str(n) for n in range(len(rhat))]
    loose = verdict.check_convergence("sizes", names, rhat, error, drawn=flag)
    alone = [Component("a", 1.0, 1, 1.0)]
    found = [Component("a", x, facts.chains, r, verdict.error_of(np.array([r]))) for x, r in pairs]
    light = components_light(found or alone, facts, sound=flag)
    check_light(light)
    check_light(verdict.with_unconverged(light, [loose] if loose else [], facts, sound=flag))
    values = np.resize(np.append(rhat, number), (facts.chains, 3))
    check_light(moments_light(values, values[:, ::-1], np.full(facts.chains, facts.draws), facts))


@settings(
    max_examples=60 if FULL else 25,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(st.data(), st.integers(1, 3), st.integers(1, 6), st.integers(1, 2))
def test_every_run_has_a_verdict(data, chains, draws, components):
    number = st.sampled_from([0.0, 1.0, 1.0, 2.0, 2.5, 1e-30, 1e200, math.inf, math.nan])
    some = st.lists(number, min_size=1, max_size=3 * chains * draws * components)

    def drawn(*shape):
        return np.resize(np.array(data.draw(some)), shape)

    W, H = drawn(chains, draws, 3, components), drawn(chains, draws, components, 2)
    tree = drawn_tree(W, H, lp=drawn(chains, draws))
    tree["posterior/dispersion"] = xr.DataArray(drawn(chains, draws), dims=("chain", "draw"))
    model = {"type": "TweedieNMF", "n_components": components}
    tree.attrs = {"model": json.dumps(model), "sampler": '{"type": "Gibbs"}'}
    tree.attrs |= {"rate_w": 1.0, "rate_h": 1.0}
    found = dfac.summarize(tree, cells=2)
    for light in found.lights.values():
        check_light(light)
    assert json.loads(json.dumps(measured(tree)))["draws_kept"] == draws


def test_chains_that_stand_still_have_a_verdict():
    for draws in (5, 50):  # all of them at places of their own
        tree = run(chains=2, draws=draws)
        for name in ("posterior/W", "posterior/H", "sample_stats/lp"):
            tree[name].values[:] = tree[name].values[:, :1]
        found = dfac.summarize(tree)
        assert found["rhat"].sel(functional="mu_mean") == math.inf
        assert [one.status for one in (found.predictions, found.log_density)] == ["red", "red"]
        assert "tune=100" in found.predictions.advice
    lp = np.random.default_rng(0).normal(size=(4, 500)) - 4210.3
    lp[1] = lp[1, 0] - 1 / 3  # one of them
    assert trend(lp) is None
    assert dfac.summarize(run(chains=4, draws=500, lp=lp)).log_density.status != "green"


@pytest.mark.statistical
def test_the_default_run_of_sound_data_is_green():
    rng = np.random.default_rng(0)
    mu = rng.exponential(size=(200, 5)) @ rng.exponential(size=(5, 100))
    trace = dfac.sample(
        rng.poisson(mu), dfac.TweedieNMF(5), random_seed=0, progressbar=False, blocks=1
    )
    assert trace["posterior"].sizes["chain"] == 4
    assert {own.status for own in dfac.summarize(trace).lights.values()} == {"green"}


@pytest.mark.parametrize("explained", [False, True])
def test_one_chain_is_green_only_where_the_fit_rules_out_another_end(explained):
    alone = ONE._replace(explained=explained)
    found = [Component(str(k), 1.0, 1, 0.99, 0.1) for k in range(3)]
    for light in (predictions(1.0, 400, alone), components_light(found, alone, sound=True)):
        assert light.status == ("green" if explained else "amber")
        assert ("chains=4" in light.advice) == (not explained)
        assert any("One chain" in reason for reason in light.reasons) == (not explained)
    # What more draws would mend comes first.
    assert "resume(" in predictions(1.05, 50, alone).advice
    assert predictions(1.0, 400, FOUR).status == "green"


def test_a_fit_rules_it_out_that_leaves_poisson_noise_of_counts():
    tree = run(chains=1, draws=400)
    cases = (1.0, "auto", "green"), (1.4, "auto", "amber"), (1.0, 1.0, "amber")
    for dispersion, asked, status in cases:
        model = {"type": "TweedieNMF", "n_components": 3, "beta": 1.0, "dispersion": asked}
        tree.attrs |= {"model": json.dumps(model), "dispersion": dispersion}
        assert statuses(dfac.summarize(tree))[:2] == [status, status]


QUIET = {"progressbar": False, "executor": "serial", "random_seed": 3, "draws": 40, "tune": 40}
SINGLE = dfac.TweedieNMF(1, dispersion=1.0)
RATES = dfac.TweedieNMF(3, rate_w="component")
LOOSE = "Not converged, so that means and intervals are imprecise"


def counts(shape=(20, 15)):
    rng = np.random.default_rng(0)
    return rng.poisson(rng.gamma(1, 2, (shape[0], 2)) @ rng.gamma(1, 2, (2, shape[1]))) + 0.0


def walk():
    return np.exp(0.02 * np.cumsum(np.random.default_rng(4).normal(size=(4, 200)), axis=1))


def drifting(scale=1.0, **learnt):
    """A run whose product mixes, while the scale of W and H wanders, and the density with it."""
    tree, by = run(chains=4, draws=200), walk()[..., None, None] ** scale
    tree["posterior/W"].values[:] *= by
    tree["posterior/H"].values[:] /= by
    tree.attrs |= {"rate_w": 1.0, "rate_h": 1.0}
    lp = tree["sample_stats/lp"].values
    if scale:
        lp += lp - balanced_density(tree)  # what the scale adds
    for name, (dims, values) in learnt.items():
        tree[f"posterior/{name}"] = xr.DataArray(values, dims=dims)
    return tree


def said(summary):
    """Status and advice of each light; what sentences say beside numbers that rounding moves."""
    return {name: (one.status, one.advice) for name, one in summary.lights.items()}


@pytest.mark.parametrize("model", [dfac.TweedieNMF(2), SINGLE, RATES], ids=["two", "one", "rates"])
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
        back = as_drawn(copy)["posterior"]
        for name in "WH":
            assert_allclose(back[name], tree["posterior"][name], rtol=1e-5, err_msg=name)
    assert "axis_2_sum[1]" in dfac.summarize(tree)["functional"]


def test_draws_are_found_again_from_an_aligned_copy():
    tree, rates = run(swap=True), np.random.default_rng(0).gamma(2.0, size=(2, 500, 3))
    tree["posterior/rate"] = xr.DataArray(rates, dims=("chain", "draw", "component"))
    aligned = dfac.align(tree)
    reference = tuple(tree["posterior"][name].values[0, 3] for name in "WH")
    for copy in (aligned, dfac.align(aligned, reference), aligned.isel(draw=slice(3, None, 2))):
        back = as_drawn(copy)["posterior"].to_dataset()
        xr.testing.assert_allclose(back, tree["posterior"].to_dataset().sel(draw=back["draw"]))
    assert as_drawn(tree) is tree


def test_components_of_an_aligned_copy_are_judged_under_its_names():
    tree, rng = run(), np.random.default_rng(8)
    tree["posterior/W"].values[1, ..., 2] = rng.permutation(np.arange(12.0))
    tree["posterior/H"].values[1, :, 2] = rng.permutation(np.arange(9.0))
    aligned, order = dfac.align(tree), [2, 0, 1]
    means = aligned["posterior"].to_dataset().mean(["chain", "draw"]).isel(component=order)
    other, lost = dfac.align(tree, means), dfac.summarize(tree).components
    (name,) = (k for k in range(3) if f"Component {k} of 3" in lost.reasons[0])
    renamed = dfac.summarize(other).components
    assert (lost.status, renamed.status) == ("red", "red")
    assert f"Component {order.index(name)} of 3" in renamed.reasons[0]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "run.zarr"
    with warnings.catch_warnings(action="ignore"):
        dfac.sample(counts(), dfac.TweedieNMF(2), dfac.BlockHMC(), chains=2, store=path, **QUIET)
    return path


def of_page(tree):
    """What the page advises, and what it says of the verdict."""
    page = unescape(dfac.report(tree).html)
    page = page[page.index('<section id="verdict">') : page.index('<section id="care">')]
    advice = [part.partition("<strong>To do:</strong> ")[2] for part in page.split("<h3>")[1:]]
    return [own.split("</p>")[0] if own else "" for own in advice], page


def test_all_verbs_that_judge_say_the_same(store):
    tree = dfac.open_run(store)
    expected = dfac.summarize(tree.load())
    lights = said(expected)
    for one in (store, dfac.open_run(store), dfac.align(store)):
        assert said(dfac.summarize(one)) == lights
    assert said(type(expected).from_dict(cached_at(store)[1].summary)) == lights
    for more in ([], ["--diagnose"]):
        told = CliRunner().invoke(app, ["info", str(store), "--json", *more])
        of_info = json.loads(told.stdout)["lights"]
        assert {name: (one["status"], one["advice"]) for name, one in of_info.items()} == lights
    copies = dfac.align(tree), dfac.open_run(store)
    for copy in copies:
        of_anndata = result_of(copy).uns["convergence"]
        assert {name: of_anndata[name] for name in lights} == {n: s for n, (s, _) in lights.items()}
    for copy in copies if FULL else copies[:1]:
        advice, page = of_page(copy)
        assert advice == [one for _, one in lights.values()]
        for light in expected.lights.values():
            assert f'<li class="{light.status}">' in page


@pytest.mark.full
def test_an_estimator_keeps_the_verdict_of_its_run():
    pytest.importorskip("sklearn")
    V, options = dfac.as_blocks(counts(), dtype="float64"), {"draws": 40, "tune": 40, "chains": 2}
    found = dfac.BayesianNMF(2, sampler=dfac.BlockHMC(), random_state=3, **options).fit(counts())
    options |= {"random_seed": 3, "progressbar": False}
    trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.BlockHMC(), **options)
    assert said(dfac.summarize(found.trace_)) == said(dfac.summarize(trace))


def test_a_report_of_an_unsound_run_does_not_say_that_nothing_needs_care():
    rise = np.linspace(-30, 0, 200) + np.random.default_rng(0).normal(size=(2, 200))
    tree, about = run(draws=200, lp=rise), {"shape": [12, 9], "dims": ["row", "column"]}
    about["n_observed"] = 108
    tree.attrs |= {"data": json.dumps(about), "created_at": "", "random_seed": 0, "tune": 0}
    for page in (dfac.report(own).html for own in ((tree, dfac.align(tree)) if FULL else (tree,))):
        assert "Not reliable" in page
        assert "<p>None.</p>" not in page
        assert "except those in the verdict above" in page


def test_the_density_is_drawn_as_it_is_judged():
    tree = drifting(5.0)
    lp, balanced = tree["sample_stats/lp"].values, balanced_density(tree)
    assert np.abs(balanced - lp).max() > 1.0
    for copy in (tree, dfac.align(tree)):
        whole, judged = plots.trace_plot(copy).axes
        for chain in range(4):
            assert_allclose(whole.lines[chain].get_ydata(), lp[chain])
            assert_allclose(judged.lines[chain].get_ydata(), balanced[chain], rtol=1e-5)
        assert "balanced" in judged.get_title(loc="left")
    assert "balanced" not in plots.trace_plot(run()).axes[1].get_title(loc="left")


def test_a_scale_that_does_not_mix_is_seen():
    still, moving = dfac.summarize(drifting(0.0)), dfac.summarize(drifting())
    assert statuses(still) == ["green", "green", "green"]
    assert float(moving["rhat"].sel(functional="w_sum")) > verdict.LARGE_RHAT
    assert statuses(moving) == ["green", "amber", "green"]
    assert LOOSE in moving.components.reasons[-1]
    assert "sizes of W and of H (" in moving.components.reasons[-1]
    assert "through align()" in moving.components.advice
    assert "can be interpreted" not in moving.components.advice


@pytest.mark.parametrize("dims", [(), ("component",), ("row",)])
def test_hyperparameters_that_do_not_mix_are_seen(dims):
    shape = (4, 200, *({"component": 3, "row": 12}[dim] for dim in dims))
    sound = np.random.default_rng(5).gamma(5.0, size=shape)
    learnt = (("chain", "draw", *dims), sound)
    assert statuses(dfac.summarize(drifting(0.0, rate_w=learnt))) == ["green"] * 3
    sound[2] += 10.0
    found = dfac.summarize(drifting(0.0, rate_w=learnt))
    assert statuses(found) == ["green", "amber", "green"]
    assert "sampled hyperparameters (rate_w" in found.components.reasons[-1]
    assert "Draw about" in found.components.advice


def test_sizes_of_components_that_do_not_mix_are_seen():
    tree = run(chains=4, draws=200)
    tree["posterior/W"].values[..., 0] *= walk()[..., None]
    tree["posterior/H"].values[:, :, 1] *= walk()[..., None]
    found = dfac.summarize(tree)
    assert found.components.status != "green"
    assert "sizes of components (aligned[" in " ".join(found.components.reasons)


@pytest.mark.parametrize("seed", range(6))
def test_no_red_number_stands_beside_green_lights(seed):
    """Whatever drifts: a number of the table with an R-hat above the bound has its light."""
    rng = np.random.default_rng(seed)
    tree = run(chains=int(rng.integers(1, 4)), draws=120, swap=bool(seed % 2), seed=seed)
    for factor in (tree["posterior"][name] for name in "WH"):
        steps = rng.normal(size=(*factor.shape[:2], 1, 1))
        factor.values[:] *= np.exp(0.01 * (seed % 3) * np.cumsum(steps, axis=1))
    tree.attrs |= {"rate_w": 1.0, "rate_h": 1.0}
    for found in map(dfac.summarize, (tree, dfac.align(tree))):
        table = str(found).split("\n\n")[1]
        worst = max(float(line[23:30]) for line in table.split("\n")[1:])
        assert worst <= verdict.LARGE_RHAT or set(statuses(found)) != {"green"}
