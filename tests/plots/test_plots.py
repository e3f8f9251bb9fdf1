import numpy as np
import pytest
import xarray as xr
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor import plots
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.plots.canvas import heaviest, save
from daskfactor.plots.particles import diversity_plot, weights_plot
from daskfactor.plots.pictures import particle_panel
from daskfactor.results.compare import intensity_shares, pairwise_distances
from daskfactor.results.components import components_of, factor_moments
from daskfactor.runs.trace import Run
from tests.fake_particles import fake_particles, random_particles
from tests.fake_run import fake_run
from tests.refusals import refused
from tests.results.particle_tree import WEIGHTS, particle_store, particle_tree

BARE = fake_run().filter(lambda node: node.name == "posterior")


def pictures(count=3, height=4, width=5):
    return np.random.default_rng(0).random((count, height, width)) * 255


def test_faces_panel_shares_one_gray_scale_and_gives_sd_its_own():
    original = pictures()
    erased = np.where(original > 100, np.nan, original)
    figure = plots.faces_panel(original, erased, original, original / 50, labels=list("abc"))
    axes = np.array(figure.axes[:12]).reshape(4, 3)
    assert {ax.images[0].get_clim() for ax in axes[:3].ravel()} == {(0.0, original.max())}
    assert axes[3, 0].images[0].get_clim()[1] < original.max() / 40
    assert [ax.get_title() for ax in axes[0]] == ["a", "b", "c"]
    assert_array_equal(axes[1, 2].images[0].get_array().mask, np.isnan(erased[2]))
    nowhere = plots.faces_panel(original, original, original, original * np.nan)
    assert isinstance(nowhere, Figure)


def without(tree, *names):
    return tree.filter(lambda node: node.name not in names)


def test_what_figures_refuse():
    for call, match in (
        (
            lambda a: plots.faces_panel(a, a, a[:2], a),
            r"restored must have the shape .* got \(2, 4, 5\)",
        ),
        (lambda a: plots.faces_panel(a[0], a, a, a), "array of images"),
        (lambda _: plots.trace_plot(BARE), "must have a group 'sample_stats'"),
        (lambda _: plots.overview(BARE.isel(draw=slice(0))), "no draws yet"),
        (
            lambda _: save(plots.trace_plot(fake_run()), "run.doc"),
            "name of an image file must end in",
        ),
        (lambda _: plots.plot_ranks(xr.Dataset()), "select_rank"),
    ):
        refused(OptionError, match, call, pictures())


def test_trace_plot_draws_every_chain_in_both_panels_and_marks_divergences():
    tree = fake_run(chains=2, draws=20, warmup=5)
    whole, zoom = plots.trace_plot(tree).axes
    assert_array_equal(whole.lines[0].get_ydata(), tree["sample_stats/lp"].values[0])
    assert (len(whole.lines), whole.lines[2].get_xdata()[-1]) == (4, tree.attrs["tune"])
    (mark,) = [line for line in zoom.lines if line.get_marker() == "|"]
    assert list(mark.get_xdata()) == [tree["sample_stats/draw"].values[3]]


def test_trace_plot_cuts_no_draw_off_but_the_first_looks_at_the_fit():
    tree = fake_run(chains=1, draws=100, warmup=5)
    tree["sample_stats/lp"][0, 50] -= 1000.0
    tree["warmup_sample_stats/lp"][0, 0] -= 1e6
    bottom, _ = plots.trace_plot(tree).axes[0].get_ylim()
    lowest = float(tree["sample_stats/lp"].min())
    assert lowest - 1000 < bottom < lowest
    assert len(plots.trace_plot(without(fake_run(), "warmup_sample_stats")).axes) == 2


def test_shares_add_up_and_follow_the_product():
    shares = intensity_shares(np.array([[1.0, 2.0], [1.0, 4.0]]), np.array([[3.0], [1.0]]), False)
    assert_allclose(shares, [0.5, 0.5])
    assert_allclose(intensity_shares(np.zeros((2, 4)), np.zeros((4, 3)), False), 0.25)


@pytest.mark.parametrize("keep", ["draws", "moments"])
def test_overview_is_written_as_a_picture(tmp_path, keep):
    path = tmp_path / "run.png"
    save(plots.overview(fake_run(keep=keep), count=9, title="run"), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def told(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_legend_covers_no_trace():
    figure = plots.trace_plot(fake_run(chains=2))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert told(figure) == ["chain 0", "diverging", "chain 1"]
    box = legend.get_window_extent()
    assert not any(ax.get_window_extent().overlaps(box) for ax in figure.axes)
    assert all(ax.get_legend() is None for ax in figure.axes)


def dots(ax):
    """Places and areas of the dots and the crosses of an axes."""
    found = [one for one in ax.collections if isinstance(one, PathCollection)]
    return [(one.get_offsets().data, one.get_sizes()) for one in found]


def test_trace_plot_shows_particles_by_weight():
    tree, heavy = particle_tree(), np.flatnonzero(WEIGHTS)
    left, right = plots.trace_plot(tree).axes
    (places, areas), (crosses, _) = dots(left)
    assert places[:, 0].tolist() == heavy.tolist()
    assert_array_equal(places[:, 1], tree["sample_stats/objective"].values[0, heavy])
    assert_allclose(areas / areas.max(), WEIGHTS[heavy] / WEIGHTS.max())
    assert crosses[:, 0].tolist() == np.flatnonzero(WEIGHTS == 0).tolist()
    assert left.get_ylabel() == "objective"
    assert [line.get_ydata()[0] for line in left.lines] == [9.0]
    assert left.get_xlabel() == right.get_xlabel() == "particle"
    (places, _), (crosses, _) = dots(right)
    assert_array_equal(places[:, 1], tree["sample_stats/lp"].values[0, heavy])
    assert not len(crosses)
    left, _ = plots.trace_plot(particle_tree(silf=False)).axes  # without an objective
    assert left.get_ylabel() == "log density"
    assert not left.lines
    assert len(dots(left)[0][0]) == 4


def test_particles_without_weights_are_shown_alike(tmp_path):
    tree = particle_store(tmp_path / "run.zarr", done=4)
    left, right = plots.trace_plot(tree).axes
    (places, areas), _ = dots(left)
    assert (len(places), len(set(areas.tolist()))) == (4, 1)
    assert "not available until" in right.texts[0].get_text()
    assert len(plots.overview(tree).axes) == 2 + 3 * 3


def weighted(weights, draws):
    """Mean and spread over the first axis."""
    mean = np.tensordot(weights, draws, 1)
    return mean, np.sqrt(np.tensordot(weights, (draws - mean) ** 2, 1))


@pytest.mark.parametrize("chain", [0, None])
def test_components_of_particles_are_aligned_and_weighted(chain):
    tree = particle_tree()
    aligned = dfac.align(tree)
    mean, sd = weighted(WEIGHTS, aligned["posterior/W"].values[0].swapaxes(1, 2))
    assert_allclose(factor_moments(Run(aligned), "W", chain), [mean, sd])
    shown = components_of(tree, chain)
    order = shown.labels
    assert_allclose(shown.W.mean, mean[order] / mean[order].mean(axis=1)[:, None])
    assert order == list(range(len(order)))
    assert_allclose(shown.present, aligned["alignment/share"].values[order])
    assert len(plots.components(tree, chain=chain).axes) == 3 * 3
    assert len(plots.overview(tree, count=2).axes) == 2 + 3 * 2
    unaligned = weighted(WEIGHTS, tree["posterior/H"].values[0])
    assert_allclose(factor_moments(Run(tree), "H", 0), unaligned)


def test_equal_weights_give_the_plain_moments():
    tree = without(fake_run(), "posterior_moments")
    streamed = factor_moments(Run(fake_run()), "H", 1)
    assert_allclose(streamed, factor_moments(Run(tree), "H", 1))
    plain, weights = factor_moments(Run(tree), "W", 0), np.full((2, 20), 1 / 40)
    tree["sample_stats/weight"] = tree["sample_stats/lp"].copy(data=weights)
    assert_array_equal(factor_moments(Run(tree), "W", 0), plain)
    W = tree["posterior/W"].isel(chain=0).transpose("draw", "component", ...).values
    assert_allclose(plain, [W.mean(0), W.std(0)], rtol=1e-5)
    weights[0, 10:] = 0
    tree["sample_stats/weight"] = tree["sample_stats/lp"].copy(data=weights / weights.sum())
    assert_allclose(factor_moments(Run(tree), "W", 0), [W[:10].mean(0), W[:10].std(0)], rtol=1e-5)


def test_chains_are_pooled_by_their_mass():
    tree, weights = fake_run(), np.random.default_rng(0).random((2, 20))
    weights[1] *= 0.1
    weights /= weights.sum()
    tree["sample_stats/weight"] = tree["sample_stats/lp"].copy(data=weights)
    aligned = dfac.align(tree)
    W = aligned["posterior/W"].transpose("chain", "draw", "component", "row").values
    expected = weighted(weights.ravel(), W.reshape(-1, *W.shape[2:]))
    assert_allclose(factor_moments(Run(aligned), "W", None), expected)
    tree["sample_stats/weight"].values[0] = 0.0
    bare, match = without(tree, "posterior_moments"), "no draw of chain 0 has a positive weight"
    refused(OptionError, match, factor_moments, Run(bare), "W", 0)


def table(scored=True):
    names = ["log_evidence", "standard_error", "discretization_error"]
    names += ["held_out_log_score", "held_out_difference_error"] if scored else []
    columns = {name: ("rank", np.array([-3.0, -1.0, -2.0])) for name in names}
    attrs = {"best": 2, "not_distinguishable": [3], "best_held_out": 2}
    return abs(xr.Dataset(columns, coords={"rank": [1, 2, 3]})).assign_attrs(attrs)


def test_two_panels_or_one_and_a_file(tmp_path):
    figure = plots.plot_ranks(table(), tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 1000
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["evidence", "held-out cells"]
    assert len(plots.plot_ranks(table(scored=False)).axes) == 1


MASSES = np.array([0.1, 0.5, 0.0, 0.15, 0.25])
NAMES = [3, 5, 8, 13, 21]


def particles(**options):
    W, H, _ = random_particles(rows=12)
    return fake_particles(W, H, MASSES, draws=NAMES, **options)


def test_masses_in_descending_order_above_their_objectives():
    tree = particles()
    top, bottom = weights_plot(tree).axes
    assert [bar.get_height() for bar in top.patches] == [0.5, 0.25, 0.15, 0.1, 0.0]
    assert [tick.get_text() for tick in bottom.get_xticklabels()] == ["5", "21", "13", "3", "8"]
    assert bottom.collections[0].get_offsets()[:, 1].tolist() == [91.0, 94.0, 93.0, 90.0, 92.0]
    assert {tuple(line.get_ydata()) for line in bottom.lines} == {(110.0, 110.0)}
    assert "2.9 particles" in top.get_title(loc="left")
    # Masses of a sampler are equal, and lie above the log density.
    top, bottom = weights_plot(fake_run()).axes
    assert {bar.get_height() for bar in top.patches} == {1 / 40}
    assert bottom.get_title(loc="left") == "log density"
    assert not bottom.lines
    assert not weights_plot(tree.drop_nodes("constant_data")).axes[1].lines
    for given, count, expected in (
        (tree, 3, [1, 4, 3]),
        (tree, 99, [1, 4, 3, 0, 2]),
        (fake_run(), 3, [0, 20, 39]),  # of equal ones some at even distances
    ):
        assert heaviest(Run(given).masses, count).tolist() == expected


def test_pictures_of_either_sign_are_white_at_zero():
    tree = particles()

    def shown(tree):
        return particle_panel(tree, image_shape=(4, 3), particles=1).axes[0].images[0]

    assert (shown(tree).get_cmap().name, shown(tree).norm.vmin) == ("gray", 0)
    tree["posterior"] = tree["posterior"].to_dataset().assign(W=tree["posterior/W"] - 0.5)
    signed = shown(tree)
    assert signed.norm.vmin == -signed.norm.vmax
    assert_allclose(signed.cmap(signed.norm(0.0))[:3], 1.0, atol=0.05)
    W, H, weight = random_particles(rows=12)
    W[:, ::2] *= -1
    low, high = shown(fake_particles(W, H, weight, kind="GaussianMF")).get_clim()
    assert low == -high < 0


def test_a_panel_has_a_row_for_a_particle_and_a_scale_for_a_component():
    tree = particles()
    figure = particle_panel(tree, image_shape=(4, 3), particles=2, components=[2, 0])
    axes = np.array(figure.axes).reshape(2, 2)
    assert [ax.get_title() for ax in axes[0]] == ["component 2", "component 0"]
    names = ["particle 5\nmass 0.500", "particle 21\nmass 0.250"]
    assert [ax.get_ylabel() for ax in axes[:, 0]] == names
    aligned = dfac.align(tree)["posterior/W"].isel(chain=0)
    for (row, column), ax in np.ndenumerate(axes):
        own = aligned.isel(draw=(1, 4)[row], component=(2, 0)[column]).values
        assert_allclose(ax.images[0].get_array(), (own / own.sum()).reshape(4, 3), rtol=1e-12)
    for column in axes.T:
        shown = np.array([ax.images[0].get_array() for ax in column])
        assert {ax.images[0].get_clim() for ax in column} == {(0.0, np.quantile(shown, 0.995))}
    assert axes[0, 0].images[0].get_clim() != axes[0, 1].images[0].get_clim()
    W, H, weight = random_particles(count=2, noise=0.0, rows=12)
    W[1], H[1] = W[1][:, [2, 0, 1]] * 5.0, H[1][[2, 0, 1]]
    axes = particle_panel(fake_particles(W, H, weight), (4, 3)).axes
    same = np.array([ax.images[0].get_array() for ax in axes])
    assert_allclose(same[:3], same[3:], rtol=1e-12)


def test_profiles_of_chosen_particles_with_titles_of_their_own():
    figure = particle_panel(particles(), particles=[2, 0], names=list("abc"), factor="H")
    axes = np.array(figure.axes).reshape(2, 3)
    assert [ax.get_title() for ax in axes[0]] == list("abc")
    assert axes[0, 0].get_ylabel().startswith("particle 8")
    assert not axes[0, 0].images
    assert axes[0, 0].get_ylim() == axes[1, 0].get_ylim()


def two_modes():
    """Particles of two modes, taking turns."""
    W, H, _ = random_particles(count=6, noise=0.02, rows=12)
    W[1::2] = W[1::2, ::-1]
    return fake_particles(W, H, np.full(6, 1 / 6), draws=range(10, 16))


def correlations(tree, at):
    """The Stein matrix as it is shown: its diagonal is one."""
    matrix = tree["stein/stein_matrix"].values
    root = np.sqrt(np.diag(matrix))
    return (matrix / np.outer(root, root))[np.ix_(at, at)]


def test_distances_and_stein_matrix_are_in_one_order_that_shows_modes():
    tree = two_modes()
    left, right = diversity_plot(tree).axes[:2]
    order = [int(tick.get_text()) for tick in left.get_xticklabels()]
    assert [one % 2 for one in order] in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
    assert [int(tick.get_text()) for tick in right.get_yticklabels()] == order
    at = [one - 10 for one in order]
    distances = pairwise_distances(tree).values[np.ix_(at, at)]
    assert_allclose(left.images[0].get_array(), distances)
    expected = correlations(tree, at)
    assert_allclose(right.images[0].get_array(), expected)
    low, high = right.images[0].get_clim()
    assert (low, high) == (-high, pytest.approx(expected[~np.eye(6, dtype=bool)].max()))
    # A selection takes its part of the matrix.
    panel = diversity_plot(tree.sel(draw=[11, 14, 15])).axes[1]
    at = [int(tick.get_text()) - 10 for tick in panel.get_yticklabels()]
    assert sorted(at) == [1, 4, 5]
    assert_allclose(panel.images[0].get_array(), correlations(tree, at))
    # What is next to diagonal is not blown up.
    tree["stein/stein_matrix"][:] = np.eye(6) * 5.0 + 1e-6
    panel = diversity_plot(tree).axes[1]
    assert panel.images[0].get_clim() == (-0.1, 0.1)
    assert panel.get_title(loc="left") == "Stein matrix, at most 2e-07 off the diagonal"


def test_diversity_of_draws_is_of_distances_alone():
    figure = diversity_plot(fake_run(draws=4), of="both")
    assert len(figure.axes) == 2  # and its bar of colors
    assert figure.axes[0].get_xticklabels()[0].get_text().count(":") == 1
    with pytest.warns(SamplingWarning, match="one in 2 of .* is compared"):
        large = diversity_plot(fake_run(chains=2, draws=150))
    assert not large.axes[0].get_xticklabels()


def test_what_figures_of_particles_refuse():
    for call, message in (
        (
            lambda p: particle_panel(p, image_shape=(5, 5)),
            "must have 12 pixels, .* got .* 25 pixels",
        ),
        (lambda p: particle_panel(p, factor="V"), 'factor must be "W" or "H"'),
        (lambda p: particle_panel(p, particles=0), "particles must be at least 1"),
        (lambda p: particle_panel(p, particles=[0, 9]), "positions from 0 to 4"),
        (lambda p: particle_panel(p, components=[7]), "no component"),
        (lambda p: particle_panel(p, names=["a"]), "one name for each of 3 components, got 1"),
    ):
        refused(OptionError, message, call, particles())


def test_moved_figures_say_where_they_are():
    refused(AttributeError, "examples/readings.py draws", getattr, plots, "scores_plot")
