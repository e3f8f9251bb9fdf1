import itertools
import re
import warnings

import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

import daskfactor as dfac
from daskfactor.errors import OptionError
from daskfactor.results.diagnose import addressed_cells, convergence, factor_series, trend
from daskfactor.results.ranks import band, uniformity
from daskfactor.runs.trace import Symmetries
from tests.fake_run import drawn_tree, fake_run
from tests.refusals import refused
from tests.results import particle_tree as particles
from tests.results.particle_tree import WEIGHTS, M, modes, particle_factors, particle_tree


def run(chains=2, draws=500, lp=None, move=None, swap=False, seed=0):
    """Independent draws around three plain components; ``move`` shifts them, (chain, draw)."""
    rng = np.random.default_rng(seed)
    W, H = np.eye(3).repeat(4, axis=0) * [1, 2, 3] + 0.1, np.eye(3).repeat(3, axis=1) + 0.1
    W, H = (own * np.exp(0.1 * rng.normal(size=(chains, draws, *own.shape))) for own in (W, H))
    if move is not None:
        W *= np.exp(move)[..., None, None]
    if swap:
        W[1:], H[1:] = W[1:, ..., [1, 2, 0]], H[1:, :, [1, 2, 0]]
    tree = drawn_tree(W, H, lp=rng.normal(size=(chains, draws)) if lp is None else lp)
    model = '{"type": "TweedieNMF", "n_components": 3}'
    tree.attrs = {"model": model, "sampler": '{"type": "PSGLD"}'}
    return tree


def statuses(found):
    """Lights over what every run has; a made-up one has no law of observations."""
    return [found.lights[name].status for name in ("predictions", "components", "log_density")]


def series_of(W, H, law, seed=5, count=3, dims=("row", "column")):
    group = drawn_tree(W, H, dims)["posterior"].to_dataset()
    return factor_series(group, law, addressed_cells((6, 9), count, seed))


def test_functionals_are_what_their_names_say_and_cells_are_addressed():
    rng = np.random.default_rng(0)
    W, H = rng.random((1, 4, 6, 7)), rng.random((1, 4, 7, 9))
    series = series_of(W, H, Symmetries(np.arange(7), False, 7), dims=("gene", "day"))
    found, mu = {one.name: one.values for one in series}, W @ H
    assert_allclose(found["mu_mean"], mu.mean(axis=(2, 3)))
    assert_allclose(found["mu_norm"], np.linalg.norm(mu, axis=(2, 3)))
    values = np.linalg.svd(mu, compute_uv=False)
    for k in range(5):
        assert_allclose(found[f"singular_value[{k}]"], values[..., k], rtol=1e-4)
    for i, j in zip(*addressed_cells((6, 9), 3, 5), strict=True):
        assert_allclose(found[f"mu[{i},{j}]"], mu[:, :, i, j])
    assert_allclose(found["w_sum"], W.sum(axis=(2, 3)))
    assert_allclose(sum(found[f"component[{k}]"] for k in range(7)), found["mu_mean"])
    few, many = addressed_cells((100, 30), 3, 1), addressed_cells((100, 30), 50, 1)
    assert_array_equal(few, [one[:3] for one in many])
    assert (np.array(many).T < (100, 30)).all()
    assert np.any(np.array(few) != addressed_cells((100, 30), 3, 2))


def test_functionals_of_signed_factors_do_not_see_a_sign():
    rng = np.random.default_rng(1)
    W, H = rng.normal(size=(1, 4, 6, 3)), rng.normal(size=(1, 4, 3, 9))
    law = Symmetries(np.arange(2), True, 2)  # the third stands for a bias
    turn = np.array([-1.0, 1.0, 1.0])
    before, after = series_of(W, H, law), series_of(W * turn, H * turn[:, None], law)
    for old, new in zip(before, after, strict=True):
        assert_allclose(old.values, new.values, err_msg=old.name)
    names = [one.name for one in before if one.kind == "component"]
    assert names == ["component[0]", "component[1]"]


def test_independent_draws_have_converged():
    found = dfac.summarize(run())
    assert statuses(found) == ["green", "green", "green"]
    assert not any(light.advice for light in found.lights.values())
    assert "All 3 components appear in both chains" in found.verdict
    assert found.notes == []
    assert found["rhat"].max() < 1.02
    kinds = {"density", "product", "scale", "part", "component", "aligned"}
    assert set(found["kind"].values) == kinds
    assert found["share"].sel(functional="aligned[1]") == 1.0
    table, mu = found.to_dataframe(), run()["posterior/W"].values @ run()["posterior/H"].values
    assert table.loc["lp", "kind"] == "density"
    assert table.loc["mu_mean", "mean"] == pytest.approx(float(mu.mean()))
    text = str(found)  # a table and a verdict
    assert text.startswith("2 chains of 500 draws")
    assert "components, aligned" in text
    assert "predictions  GREEN" in text
    assert max(map(len, text.split("\n\n")[1].split("\n"))) < 80
    assert all("xarray" in repr(found[part]) for part in ("rhat", ["rhat"]))


@pytest.mark.parametrize("chains", [1, 3])
def test_a_run_that_still_rises_is_seen(chains):
    rise = np.broadcast_to(np.linspace(-3, 0, 200), (chains, 200))
    noise = np.random.default_rng(3).normal(size=rise.shape)
    found = dfac.summarize(run(chains=chains, draws=200, lp=10 * rise + noise))
    assert found.log_density.status == "red"
    assert "the log density still rose by" in found.log_density.reasons[0].lower()
    assert "tune=400" in found.log_density.advice
    assert found.predictions.status == "amber"  # WH itself is at rest, as far as it shows
    assert ("One chain cannot show" in found.verdict) == (chains == 1)


def test_chains_that_disagree_on_the_product_are_seen_and_few_draws_are_told_from_them():
    found = dfac.summarize(run(draws=300, move=np.array([[0.0], [0.5]]) * np.ones((2, 300))))
    assert found.predictions.status == "red"
    assert "different modes" in found.predictions.advice
    assert found["rhat"].sel(functional="mu_mean") > 1.5
    found = dfac.summarize(run(draws=35))
    assert found.predictions.status == "amber"
    assert re.search(r"Draw about \d00 more in each chain", found.predictions.advice)


def test_components_that_change_places_are_no_alarm():
    found, after = (dfac.summarize(tree) for tree in (run(swap=True), dfac.align(run(swap=True))))

    def rhat(one, kind):
        return one["rhat"].where(one["kind"] == kind, drop=True)

    assert rhat(found, "component").max() > 1.3
    assert rhat(found, "aligned").max() < 1.02
    assert statuses(found) == ["green", "green", "green"]
    assert "through align()" in found.notes[0]
    assert "as drawn" not in str(found).partition("\n\npredictions")[0]  # no number to go by
    # Sizes that rounding makes equal have other ranks.
    assert_allclose(rhat(after, "aligned"), rhat(found, "aligned"), rtol=1e-3)


def test_chains_with_other_components_are_seen_and_named():
    tree, other = run(), np.random.default_rng(8)
    tree["posterior/W"].values[1, ..., 2] = other.permutation(np.arange(12.0))
    tree["posterior/H"].values[1, :, 2] = other.permutation(np.arange(9.0))
    aligned = dfac.align(tree)
    having = (aligned["alignment/share_by_chain"] >= 0.5).sum("chain")
    lost = int(having.values.argmin())
    for found in map(dfac.summarize, (tree, aligned)):
        assert [found.predictions.status, found.components.status] == ["red", "red"]
        assert f"Component {lost} of 3 is not the same in both chains" in found.verdict
        table = found.to_dataframe().query("kind == 'aligned'")
        assert_array_equal(table["chains_with"], having)
        assert found.components.numbers["least_chains"] == 1
        assert sorted(found["share"].dropna("functional").values.tolist()) == [0.5, 1.0, 1.0]


def test_moments_give_the_density_alone_and_one_component_no_alignment():
    found = dfac.summarize(fake_run(keep="moments"))
    assert found["functional"].values.tolist() == ["lp"]
    assert found.predictions.status == "red"  # its chains disagree at a cell that is monitored
    assert found.components.status == "none"
    assert "stored no draws" in found.components.reasons[0]
    found = dfac.summarize(fake_run().isel(component=[0]))
    assert "aligned" not in found["kind"].values
    W, H = particle_factors()
    found = dfac.summarize(particle_tree(W[..., :1], H[:, :1], WEIGHTS))
    assert set(found["kind"].values) == {"density", "product", "scale", "component"}
    assert found.components.status == "none"


def test_very_few_draws_say_nothing():
    found = dfac.summarize(run(draws=3))
    assert statuses(found)[::2] == ["red", "red"]
    assert "3 draws cannot be judged" in found.verdict
    assert np.isnan(found["rhat"]).all()
    assert "nan" in str(found)
    refused(OptionError, "no draws yet", dfac.summarize, run().isel(draw=slice(0)))
    refused(OptionError, "cells", dfac.summarize, run(), cells=-1)


BIASED = dfac.PSGLD(), dfac.PSGRRLD()
EXACT = dfac.Gibbs(), dfac.BlockHMC()


@pytest.mark.parametrize("sampler", [*BIASED, *EXACT])
def test_what_a_finite_step_hides_is_told_of_those_who_have_one(sampler):
    V, model = np.random.default_rng(0).poisson(3.0, (8, 6)).astype("f4"), dfac.TweedieNMF(2)
    trace = dfac.sample(V, model, sampler, 8, 4, random_seed=0, progressbar=False)
    for one in (trace, trace.copy()):
        assert ("bias of a finite step" in dfac.summarize(one).verdict) is (sampler in BIASED)
        del one.attrs["biased"]  # as of 0.1.0


def test_components_go_by_their_labels():
    tree = run(swap=True)
    plain = dfac.summarize(tree)
    named = tree.copy()
    named["posterior"] = tree["posterior"].to_dataset().assign_coords(component=list("abc"))
    found = dfac.summarize(named)
    names = [str(name) for name in found["functional"].values]
    of_a = [name for name in names if "[a]" in name]
    assert of_a == ["w_sum[a]", "h_sum[a]", "component[a]", "aligned[a]"]
    assert_array_equal(found["rhat"], plain["rhat"])
    part = dfac.summarize(named.isel(component=[2, 0]))
    assert {"component[c]", "aligned[a]"} < set(part["functional"].values.tolist())


def test_means_and_spreads_are_those_of_the_masses():
    W, H = particle_factors()
    objective = np.array([3.0, 70.0, 4.0, 8.0, 0.5, 5.0])
    found = dfac.summarize(particle_tree(objective=objective), cells=40)
    expected = {
        "lp": -100.0 + np.cos(2.0 * np.arange(M)),
        "objective": objective,
        "mu_mean": (W @ H).mean(axis=(1, 2)),
        "mu_norm": np.linalg.norm(W @ H, axis=(1, 2)),
        "mu[2,4]": (W @ H)[:, 2, 4],
        "h_sum": H.sum(axis=(1, 2)),
    }
    for name, values in expected.items():
        one, mean = found.sel(functional=name), WEIGHTS @ values
        parts = WEIGHTS * (values - mean) ** 2
        told = [float(one[own]) for own in ("mean", "sd", "one_particle")]
        assert told == pytest.approx([mean, np.sqrt(parts.sum()), parts.max() / parts.sum()])
    assert {"rhat", "ess_bulk"}.isdisjoint(found.data_vars)
    attrs = {"particles": 6, "with_weight": 4, "heaviest": 2, "discrepancy": 0.5}
    attrs |= {"discrepancy_equal": 0.75, "objective_min": 0.5, "objective_max": 70.0}
    assert attrs.items() <= found.attrs.items()
    assert found.attrs["effective"] == pytest.approx(1 / (WEIGHTS**2).sum())
    # Of no mass, but above the threshold of 9.
    assert "1 of the particles, with 0% of the mass, have an objective above" in found.verdict


def test_draws_without_weight_and_halves_change_nothing():
    W, H, _ = modes()
    w, lp, doubled = np.arange(12.0) / 66, np.sin(np.arange(12.0)), np.r_[np.arange(12), 5]
    half = w[doubled] * np.where(doubled == 5, 0.5, 1.0)
    W[0], H[0] = W[0, ::-1], 100.0
    found = dfac.summarize(particle_tree(W, H, w, lp=lp))
    less = dfac.summarize(particle_tree(W[1:], H[1:], w[1:], lp=lp[1:], objective=5 + lp[1:]))
    more = dfac.summarize(particle_tree(W[doubled], H[doubled], half, lp=lp[doubled]))
    for name in ("mean", "sd"):
        ours, *others = (own[name].drop_sel(functional="objective") for own in (found, less, more))
        for theirs in others:
            xr.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert found.attrs["with_weight"] == less.attrs["with_weight"] == 11
    assert found.attrs["alike"] == pytest.approx(1.0)


def test_one_mode_is_told_from_several():
    (W, H, orders), w = modes(), np.full(12, 1.0 / 12)
    one = dfac.summarize(particle_tree(W, H, w))
    assert one.attrs["alike"] == pytest.approx(1.0)
    assert "One mode" in one.verdict
    assert [one.predictions.status, one.components.status] == ["amber", "green"]
    assert "12 particles have positive weight, with an effective number of 12.0:" in one.verdict
    sizes = one["mean"].where(one["kind"] == "aligned", drop=True)
    assert sizes.sizes["functional"] == 3
    assert_allclose(one["share"].sel(functional="aligned[1]"), 1.0)
    # Six particles of another mode: one component lies elsewhere.
    other = W.copy()
    for m in range(6):
        moved = int(np.flatnonzero(orders[m] == 0)[0])
        other[m][:, moved] = np.roll(W[m][:, moved], 2)
    two = dfac.summarize(particle_tree(other, H, w))
    assert two.attrs["alike"] == pytest.approx(0.5)
    assert "Several modes" in two.verdict
    assert two.components.status == "red"
    assert "Do not average W and H" in two.components.advice
    # The other mode without mass is no mode.
    some = np.repeat([0.0, 1.0 / 6], 6)
    assert dfac.summarize(particle_tree(other, H, some)).attrs["alike"] == pytest.approx(1.0)


def test_aligned_sizes_are_those_of_an_aligned_trace():
    (W, H, _), w = modes(), np.arange(12.0) / 66
    tree = particle_tree(W, H, w)
    aligned = dfac.align(tree)
    sizes = aligned["posterior/W"].sum("gene") * aligned["posterior/H"].sum("day") / (12 * 9)
    for summary in map(dfac.summarize, (tree, aligned)):
        ours = summary["mean"].where(summary["kind"] == "aligned", drop=True)
        assert_allclose(ours, sizes.values[0].T @ w)


def test_a_particle_that_carries_everything_is_named():
    found = dfac.summarize(particle_tree(weights=[0.01, 0.0, 0.0, 0.97, 0.02, 0.0]))
    assert found.predictions.status == "red"
    assert "Particle 3 has 97% of the mass" in found.verdict
    alone = dfac.summarize(particle_tree(weights=np.eye(M)[4]))
    assert "Particle 4 has 100%" in alone.verdict
    assert (alone["sd"] == 0).all()
    assert alone.components.status == "none"
    assert (
        "4 particles have positive weight, with an effective number of 2.8"
        in dfac.summarize(particle_tree()).verdict
    )


def test_the_print_tells_it_all():
    text, table = str(dfac.summarize(particle_tree())), dfac.summarize(particle_tree(silf=False))
    lines = text.split("\n")
    assert lines[0] == "6 particles, 4 with positive weight, effective number 2.8"
    assert lines[1] == "Stein discrepancy 0.5, with equal weights 0.75"
    assert lines[2].startswith("objective 4.463 to 5.65, threshold 9")
    titles = ("log density, objective", "W H", "size of W", "components, aligned")
    assert all(any(line.startswith(title) for line in lines) for title in titles)
    assert "predictions  RED    4 particles have positive weight" in text
    assert "R-hat" not in text
    assert "objective" not in str(table).split("\n")[2]
    assert "mean" in table.to_dataframe()
    assert "<xarray" in repr(table[["mean"]])


def test_particles_without_weights_yet_count_alike(tmp_path):
    tree = particles.particle_store(tmp_path / "run.zarr", done=4)
    found = dfac.summarize(tree)
    assert "4 particles have no weights yet" in found.predictions.reasons[0]
    assert str(found).startswith("4 particles\nobjective")
    values = np.linalg.norm(np.matmul(*(part[:4] for part in particle_factors())), axis=(1, 2))
    assert float(found["mean"].sel(functional="mu_norm")) == pytest.approx(values.mean())
    refused(OptionError, "no draws yet", dfac.summarize, tree.isel(draw=slice(0)))


with warnings.catch_warnings(action="ignore"):
    import arviz


def autoregressive(coefficient, chains, draws, seed):
    out = np.random.default_rng(seed).standard_normal((chains, draws))
    out[:, 0] /= np.sqrt(1 - coefficient**2)
    for t in range(1, draws):
        out[:, t] += coefficient * out[:, t - 1]
    return out


DRAWS = {
    "independent": autoregressive(0.0, 4, 500, 0),
    "slow": autoregressive(0.95, 4, 501, 1),
    "alternating": autoregressive(-0.8, 3, 200, 2),
    "skewed": np.exp(3 * autoregressive(0.5, 2, 300, 3)),
    "apart": autoregressive(0.3, 4, 100, 4) + np.arange(4)[:, None],
    "ties": np.round(autoregressive(0.6, 2, 50, 5)),
    "wider": autoregressive(0.0, 2, 80, 6) * np.array([[1.0], [4.0]]),
    "shortest": autoregressive(0.0, 2, 4, 7),
    "short": autoregressive(0.7, 2, 9, 8),
    "one chain": autoregressive(0.7, 1, 400, 9),
}


@pytest.mark.libraries
@pytest.mark.parametrize("name", DRAWS)
def test_same_as_arviz(name):
    draws = DRAWS[name]
    found, data = convergence(draws), arviz.convert_to_dataset(draws[:, :, None])
    for method in ("bulk", "tail"):
        # Releases differ in what they take for tails.
        tails = {"prob": (0.05, 0.95)} if method == "tail" else {}
        expected = float(arviz.ess(data, method=method, **tails)["x"].values[0])
        assert getattr(found, f"ess_{method}") == pytest.approx(expected, rel=1e-9), method
    # ArviZ wants two chains; halves of one are two.
    if draws.shape[0] > 1:
        assert found.rhat == pytest.approx(float(arviz.rhat(data)["x"].values[0]), rel=1e-9)


def test_one_chain_that_drifts_is_seen_and_what_cannot_be_said_is_nan():
    still = autoregressive(0.2, 1, 400, 12)
    assert convergence(still).rhat < 1.02
    assert convergence(still + np.linspace(0, 5, 400)).rhat > 1.5
    assert np.isnan(convergence(np.ones((2, 3)))).all()
    assert np.isnan(convergence(np.full((2, 50), 3.7))).all()
    holed = autoregressive(0.0, 2, 50, 13)
    holed[1, 4] = np.nan
    assert np.isnan(convergence(holed)).all()


@pytest.mark.parametrize("rho", [0.0, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("length", [120, 500, 3000])
def test_stationary_series_have_no_trend(rho, length):
    series = autoregressive(rho, 100, length, 8) * np.sqrt(1 - rho**2)
    found = [trend(one[None], spread=1.0) for one in series]
    assert sum(one is not None for one in found) <= 1


@pytest.mark.parametrize("sign", [1, -1])
def test_a_trend_is_seen_above_noise_or_above_what_is_stationary(sign):
    noise, ramp = autoregressive(0.5, 2, 500, 9) * 0.75**0.5, sign * np.linspace(0, 1, 500)
    found = trend(np.stack([noise[0], noise[1] + 2 * ramp]))
    assert found is not None
    assert found.change == pytest.approx(sign * 1.5, abs=0.5)
    assert found.sd == pytest.approx(1.0, abs=0.2)
    assert trend(noise + 0.2 * ramp) is None
    slow = np.cumsum(noise[:1], axis=1) / 20 + 20 * ramp * np.sqrt(np.abs(ramp))
    assert trend(slow) is None  # slow series look alike, but for their size
    assert trend(slow, spread=1.0) is not None
    assert trend((noise + 9 * ramp)[:, :80]) is None


COUNT, LEVELS = 150, 15


def test_p_values_of_uniform_ranks_are_uniform():
    rng = np.random.default_rng(0)
    found = [uniformity(rng.integers(0, LEVELS + 1, COUNT), LEVELS) for _ in range(1000)]

    def of(name):
        return np.array([getattr(one, name) for one in found])

    for name, level in itertools.product(("ecdf_p", "chi_square_p"), (0.01, 0.1, 0.5)):
        within = np.mean(of(name) <= level)
        assert abs(within - level) < 5 * np.sqrt(level * (1 - level) / 1000) + 0.01
    for level in (0.01, 0.1):
        within = np.mean(of("p") <= level)
        assert level / 4 < within < level + 5 * np.sqrt(level * (1 - level) / 1000)
    for z in (of("shift"), of("spread")):
        assert abs(z.mean()) < 5 / np.sqrt(z.size)
        assert abs(z.var() - 1) < 5 * np.sqrt(2 / z.size)


def test_what_is_not_uniform_is_seen_and_named():
    for name, a, b, sign in (
        *(("shift", 1.6, 1.0, 1), ("shift", 1.0, 1.6, -1)),
        *(("spread", 0.6, 0.6, 1), ("spread", 1.8, 1.8, -1)),
    ):
        rng = np.random.default_rng(1)
        found = uniformity(rng.binomial(LEVELS, rng.beta(a, b, 2 * COUNT)), LEVELS)
        assert found.p < 0.001
        assert max(found.ecdf_p, found.chi_square_p) < 0.05
        assert sign * getattr(found, name) > 3.5


def test_bins_of_many_levels_expect_what_they_hold():
    ranks = np.random.default_rng(2).integers(0, 64, 100)
    parts = np.array_split(np.arange(64), 20)
    observed = [np.isin(ranks, part).sum() for part in parts]
    wanted = stats.chisquare(observed, [100 * len(part) / 64 for part in parts]).pvalue
    assert uniformity(ranks, 63).chi_square_p == pytest.approx(wanted)


def test_the_band_holds_whole_lines():
    lower, upper = band(COUNT, LEVELS)
    rng = np.random.default_rng(3)
    drawn = rng.multinomial(COUNT, np.full(LEVELS + 1, 1 / (LEVELS + 1)), 4000)
    share = drawn.cumsum(axis=1)[:, :-1] / COUNT
    inside = ((share >= lower) & (share <= upper)).all(axis=1).mean()
    assert 0.93 < inside < 0.98
