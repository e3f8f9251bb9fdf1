import json
from itertools import permutations
from unittest.mock import Mock

import dask
import numpy as np
import pytest
import xarray as xr
from numpy.testing import assert_allclose, assert_array_equal

import daskfactor as dfac
from daskfactor import component_variability, downstream, pairwise_distances, top_entries
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.results import compare
from daskfactor.results.components import components_of, format_quantity
from daskfactor.runs.trace import Run
from tests.fake_particles import fake_particles, random_particles
from tests.fake_run import COMPONENTS, SHAPE, fake_run
from tests.refusals import refused
from tests.results.runs import store_run

H2 = [[1.0, 0.1], [0.1, 1.0]]


def two_lists(weight=(0.75, 0.25), scale=1.0):
    """Two particles of two components over four words, the second in another order and scale."""
    first = np.array([[5, 0], [3, 1], [2, 2], [0, 7]])
    second = np.array([[4, 0], [1, 3], [5, 1], [0, 6]])[:, ::-1] * [scale, 2.0]
    return fake_particles([first, second], [H2, np.array(H2)[::-1]], weight)


def split(W, H, weight, at):
    """The same posterior, one of its particles as two of half the mass, in another order."""
    order, halved = np.append(np.arange(len(W)), at)[::-1], np.array(weight)
    halved[at] /= 2
    return W[order], H[order], halved[order]


def moved(W, H, seed=3, signed=False):
    """The same particles, their components in other orders and scales."""
    rng, W, H = np.random.default_rng(seed), W.copy(), H.copy()
    for m in range(len(W)):
        order = rng.permutation(W.shape[2])
        scale = rng.uniform(0.3, 3.0, order.size)
        if signed:
            scale *= rng.choice([-1, 1], order.size)
        W[m], H[m] = W[m][:, order] * scale, H[m][order] / scale[:, None]
    return W, H


def by_label(top):
    """Share and mean of every label of every component, whichever particle lists it."""
    table = top.to_dataframe().reset_index().drop_duplicates(["component", "label"])
    return table.set_index(["component", "label"])[["share", "mean"]].sort_index()


def test_the_largest_entries_of_two_particles():
    top = top_entries(two_lists(), count=2)
    assert top["label"].dims == ("chain", "draw", "component", "rank")
    first, second = top["label"].values[0]
    assert first.tolist() == [["w0", "w1"], ["w3", "w2"]]
    assert second.tolist() == [["w2", "w0"], ["w3", "w1"]]
    assert_allclose(top["value"].values[0, 1], [[0.5, 0.4], [0.6, 0.3]])
    found = by_label(top).loc[0]
    assert found["share"].to_dict() == pytest.approx({"w0": 1.0, "w1": 0.75, "w2": 0.25})
    assert found["mean"].to_dict() == pytest.approx({"w0": 0.475, "w1": 0.25, "w2": 0.275})
    assert top["weight"].values.tolist() == [[0.75, 0.25]]
    table = top.to_dataframe()
    table, whole = top.to_dataframe(), top_entries(two_lists(), count=9)
    assert len(table) == 8
    assert {"label", "value", "share", "mean", "weight"} <= set(table.columns)
    assert whole.sizes["rank"] == 4
    assert by_label(whole)["share"].loc[0].to_dict().items() >= {"w2": 1.0, "w3": 0.0}.items()


def test_ties_go_by_position_and_the_largest_are_those_of_a_sort():
    values = np.random.default_rng(0).integers(0, 5, (1, 40, 2)) + np.eye(40, 2) * 9
    top = top_entries(fake_particles(values, [H2]), count=11)
    for k, own in enumerate(np.argsort(-values[0].sum(axis=0))):
        expected = np.argsort(-values[0, :, own], kind="stable")[:11]
        assert top["label"].values[0, 0, k].tolist() == [f"w{i}" for i in expected]


def test_scale_changes_no_entry_and_entries_of_real_factors_count_by_size():
    scaled = top_entries(two_lists(scale=77.0), 2).isel(component=[1, 0])  # it weighs more now
    scaled = scaled.assign_coords(component=[0, 1])
    xr.testing.assert_allclose(top_entries(two_lists(), 2), scaled, rtol=1e-12)
    W, H, weight = random_particles(count=2)
    W[..., 0, :] = -20.0
    top = top_entries(fake_particles(W, H, weight, kind="GaussianMF"), count=1)
    assert (top["label"] == "w0").all()
    assert (abs(top["value"]) > 0.9).all()


def test_labels_components_and_the_other_factor():
    tree = two_lists()
    top = top_entries(tree, 1, component=1, labels=["a", "b", "c", "d"])
    assert top["component"].values.tolist() == [1]
    assert (top["label"] == "d").all()
    top = top_entries(tree, 1, factor="H")
    assert top["label"].values[0].tolist() == [[[0], [1]], [[0], [1]]]
    assert top.attrs == {"factor": "H", "dim": "text"}
    named = tree["posterior"].to_dataset().assign_coords(meaning=("word", list("klmn")))
    tree["posterior"] = xr.DataTree(named)
    assert top_entries(tree, 1, labels="meaning")["label"].values[0, 0].tolist() == [["k"], ["n"]]


def scored(*answers, **options):
    """Scores of two particles by a list of answers."""
    answers = iter(answers)
    tree = fake_particles(*random_particles(count=2))
    return downstream(tree, lambda W, H: next(answers), **options)


def test_what_comparisons_refuse():
    lists = two_lists()
    for message, call, *given, options in (
        ('factor must be "W" or "H"', top_entries, lists, {"factor": "V"}),
        ("count must be a whole number", top_entries, lists, {"count": 0}),
        (r"no component \[5\]; .* \[0, 1\]", top_entries, lists, {"component": 5}),
        ("for each of the 4 entries of 'word'", top_entries, lists, {"labels": ["a"]}),
        ("not a coordinate of 'word', which has", top_entries, lists, {"labels": "colour"}),
        ('of must be "W", "H" or "both"', pairwise_distances, lists, "V", {}),
        ('must be "angle" or "euclidean"', pairwise_distances, lists, {"metric": "city"}),
        ("different units", pairwise_distances, lists, "both", {"metric": "euclidean"}),
        ("most must be a whole number", pairwise_distances, lists, {"most": 0}),
        ("score must return a number or a dict", scored, "high", "low", {}),
        ("an empty dict", scored, {}, {}, {}),
        ("the same names for every particle, got", scored, {"a": 1}, {"b": 1}, {}),
        ('best must be "highest"', scored, 1.0, 1.0, {"best": "most"}),
        ("'score' is not a number for any", scored, np.nan, np.nan, {}),
        ("needs draws", downstream, fake_run(keep="moments"), lambda W, H: 0.0, {}),
    ):
        refused(OptionError, message, call, *given, **options)


def tilted(weight, degrees=30.0):
    """Two particles: one component tilted between them, one that stays."""
    tilt = np.radians(degrees)
    straight, other = [[1.0, 0.0], [0.0, 0.0]], [[np.cos(tilt), 0.0], [np.sin(tilt), 0.0]]
    W = [[*straight, [0.0, 1.0]], [*other, [0.0, 1.0]]]
    H = [[[3.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]]
    return fake_particles(W, H, weight)


def test_angles_from_the_mean_direction():
    p, tilt = 0.8, np.radians(30)
    found = component_variability(tilted([p, 1 - p]))
    phi = np.degrees(np.arctan2((1 - p) * np.sin(tilt), p + (1 - p) * np.cos(tilt)))
    size = np.cos(tilt) + np.sin(tilt)
    shares = np.array([3 / 4, size / (size + 1)])
    mean = p * shares[0] + (1 - p) * shares[1]
    for name, values in {
        "angle_w": [p * phi + (1 - p) * (30 - phi), 0.0],
        "angle_w_sd": [np.sqrt(p * (1 - p)) * abs(30 - 2 * phi), 0.0],
        "angle_h": [0.0, 0.0],
        "share": [1.0, 1.0],
        "intensity": [mean, 1 - mean],
        "intensity_sd": [abs(np.diff(shares)[0]) * 0.4] * 2,
    }.items():
        assert found[name].values == pytest.approx(values), name
    assert found["angle_w"].attrs["units"] == "degree"
    # A mode of its own does not move the direction.
    found = component_variability(tilted([0.8, 0.2], degrees=90))
    assert found["angle_w"].values == pytest.approx([0.2 * 90, 0.0])
    assert found["share"].values == pytest.approx([0.8, 1.0])


def test_an_empty_component_is_a_right_angle_away():
    W, H, _ = random_particles(count=3)
    W[2, :, 1] = 0.0
    tree = fake_particles(W, H, [0.5, 0.4, 0.1])
    found = component_variability(tree)
    assert np.isfinite(found.to_array()).all()
    assert found["share"].values == pytest.approx([1, 0.9, 1])
    assert pairwise_distances(tree).values[0, 2] > 30


def test_a_trace_is_aligned_if_it_is_not():
    W, H, weight = random_particles()
    plain = fake_particles(*moved(W, H), weight)
    for read in (component_variability, top_entries):
        xr.testing.assert_allclose(read(plain), read(dfac.align(plain)))
    assert (component_variability(plain)["share"] == pytest.approx(1.0, abs=1e-12)).all()


def test_a_particle_in_two_halves_changes_no_weighted_number():
    W, H, weight = random_particles(noise=0.3)
    *pair, half = split(W, H, weight, 1)
    trees = fake_particles(*moved(W, H), weight), fake_particles(*moved(*pair), half)

    def purpose(W, H):
        return {"first": float((W @ H)[0].sum()), "second": float((W @ H)[:, 1].max())}

    # Components are numbered after the likeliest draw, which is another one of the halves.
    whole, halves = (component_variability(tree) for tree in trees)
    for name in whole.data_vars:
        assert_allclose(np.sort(whole[name]), np.sort(halves[name]), rtol=1e-7, err_msg=name)
    one, two = (np.sort(by_label(top_entries(tree, 4)), axis=0) for tree in trees)
    assert_allclose(one, two, rtol=1e-10)
    one, two = (downstream(tree, purpose)[["mean", "sd", "best"]] for tree in trees)
    xr.testing.assert_allclose(one, two, rtol=1e-10)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("of", "metric"), [("W", "angle"), ("both", "angle"), ("H", "euclidean")])
def test_copies_in_another_order_scale_and_sign_are_at_distance_zero(of, metric, signed):
    W, H, _ = random_particles(count=1)
    W = W * np.random.default_rng(1).choice([-1, 1], W.shape) if signed else W
    pair = moved(np.repeat(W, 4, 0), np.repeat(H, 4, 0), signed=signed)
    tree = fake_particles(*pair, kind="GaussianMF" if signed else "SILFNMF")
    found = pairwise_distances(tree, of, metric=metric)
    assert found.values == pytest.approx(np.zeros((4, 4)), abs=1e-5)
    assert pairwise_distances(tree, of, aligned=False, metric=metric).values.max() > 0.1


def test_distances_of_two_particles_by_hand():
    W = [np.eye(3)[:, :2], np.array([[0, np.cos(0.5)], [2, 0], [0, np.sin(0.5)]])]
    tree = fake_particles(W, [H2, np.array(H2)[::-1]])
    distance = pairwise_distances(tree)
    assert (distance.dims, distance.attrs["units"]) == (("draw", "other_draw"), "degree")
    size = np.cos(0.5) + np.sin(0.5)
    moved_by = np.hypot(1 - np.cos(0.5) / size, np.sin(0.5) / size)
    # H on the scale of a W that adds up to 1: rows 2 and `size` times as long in the second.
    rows = np.linalg.norm(H2, axis=1)
    for options, expected in (
        ({}, np.degrees(0.5) / 2),
        ({"aligned": False}, 90),
        ({"of": "both"}, np.degrees(0.5) / 4),
        ({"metric": "euclidean"}, moved_by),
        ({"of": "H", "metric": "euclidean"}, np.hypot((size - 1) * rows[0], 1 * rows[1])),
    ):
        assert pairwise_distances(tree, **options).values[0, 1] == pytest.approx(expected)


def test_distances_are_the_least_of_all_orders_and_in_blocks_the_same(monkeypatch):
    rng = np.random.default_rng(4)
    W, H = rng.gamma(0.7, size=(2, 3, 8, 3)), rng.gamma(0.7, size=(2, 3, 3, 6))
    flat = list(zip(W.reshape(6, 8, 3), H.reshape(6, 3, 6), strict=True))
    tree = fake_particles(W, H)

    def angles(x, y):
        cosines = (x / np.linalg.norm(x, axis=0)).T @ (y / np.linalg.norm(y, axis=0))
        return np.degrees(np.arccos(np.clip(cosines, -1, 1)))

    def least(one, other):
        cost = (angles(one[0], other[0]) + angles(one[1].T, other[1].T)) / 2
        return min(cost[range(3), list(own)].mean() for own in permutations(range(3)))

    whole = pairwise_distances(tree, "both")
    assert_allclose(whole, [[least(a, b) for b in flat] for a in flat], atol=1e-5)
    assert whole["chain"].values.tolist() == [0, 0, 0, 1, 1, 1]
    assert whole["other_draw"].values.tolist() == [0, 1, 2, 0, 1, 2]
    counted = Mock(side_effect=compare._read)
    monkeypatch.setattr(compare, "_read", counted)
    monkeypatch.setattr(compare, "BLOCK_BYTES", 8 * 3 * 14 * 4)
    xr.testing.assert_allclose(pairwise_distances(tree, "both"), whole)
    assert max(len(call.args[-1]) for call in counted.call_args_list) <= 4
    assert counted.call_count > 2
    with pytest.warns(SamplingWarning, match="one in 3 of 40 draws is compared; pass most=40"):
        some = pairwise_distances(fake_run(), most=15)
    assert some.shape == (14, 14)
    assert_allclose(some, pairwise_distances(fake_run(), most=40).values[::3, ::3], atol=1e-6)


def test_frozen_components_are_not_exchanged():
    W, H, _ = random_particles(count=2)
    W[1], H[1] = W[0][:, [1, 0, 2]], H[0][[1, 0, 2]]
    tree = fake_particles(W, H)
    assert pairwise_distances(tree).values[0, 1] < 1e-5
    tree.attrs["model"] = '{"type": "TweedieNMF", "n_components": 3, "fixed_w": [0]}'
    assert pairwise_distances(tree).values[0, 1] > 10


def test_scores_of_two_classes():
    W, H, _ = random_particles(count=3)
    tree = fake_particles(W, H, [0.5, 0.5, 0.0], draws=[4, 7, 9])
    table = iter([{"a": 1.0, "b": 5.0}, {"a": 3.0, "b": 4.0}, {"a": 2.0, "b": 9.0}])
    found = downstream(tree, lambda W, H: next(table))
    assert found["value"].dims == ("chain", "draw", "score")
    assert found["value"].sel(score="a").values.tolist() == [[1, 3, 2]]
    numbers = {"mean": [2.0, 4.5], "sd": [1.0, 0.5], "best_draw": [7, 9], "best": [3.0, 9.0]}
    assert {name: found[name].values.tolist() for name in numbers} == numbers
    lowest = downstream(tree, lambda W, H: float(W[0, 0]), best="lowest")
    assert lowest["score"].values.tolist() == ["score"]
    assert int(lowest["best_draw"][0]) == [4, 7, 9][int(W[:, 0, 0].argmin())]
    of_one = scored(np.nan, 2.0)  # a score that one particle does not have
    assert np.isnan(of_one["mean"][0])
    assert of_one["best"].values.tolist() == [2.0]


def test_draws_of_a_sampler_count_equally_and_may_be_lazy():
    tree = fake_run()
    assert (Run(tree).masses == 1 / 40).all()
    lazy = tree.chunk({"draw": 3})
    with dask.config.set(scheduler="synchronous"):
        for read in (component_variability, top_entries, pairwise_distances):
            xr.testing.assert_allclose(read(lazy), read(tree))
    scores = downstream(tree, lambda W, H: float(W.sum()))
    expected = tree["posterior/W"].sum(("row", "component"))
    assert scores["mean"].values == pytest.approx([float(expected.mean())])
    at = {"chain": scores["best_chain"].values[0], "draw": scores["best_draw"].values[0]}
    assert float(expected.sel(at)) == scores["best"].values[0] == float(expected.max())
    W, H, _ = random_particles(count=4)  # of a selection masses add up again
    part = fake_particles(W, H, [0.1, 0.2, 0.3, 0.4]).sel(draw=[1, 3])
    assert_allclose(Run(part).masses, [[1 / 3, 2 / 3]])
    assert downstream(part, lambda W, H: 1.0)["mean"].values == pytest.approx([1])


def test_a_store_is_read_by_its_path_under_the_names_of_the_data(tmp_path):
    path = store_run(tmp_path / "run.zarr")
    with dask.config.set(scheduler="synchronous"):
        top = top_entries(path, 2)
        xr.testing.assert_equal(top, top_entries(dfac.open_run(path).load(), 2))
        assert top_entries(path, 1, "H")["label"].dtype.kind == "M"
        assert top_entries(path, 1, labels="weight")["label"].dtype.kind == "f"
    assert set(np.unique(top["label"])) <= {*(f"g{i}" for i in range(6)), "Ångström"}


PLAIN_W = np.eye(6, 3) + np.eye(6, 3, -3) + 0.01
PLAIN_H = np.eye(3, 5) + 0.01
TWEEDIE = json.dumps({"type": "TweedieNMF", "n_components": 3, "beta": 1.0})


def traced(change=None, draws=10, noise=0.0):
    """Draws of three plain components, of which some are changed."""
    rng = np.random.default_rng(0)
    pair = [np.stack([one] * draws) for one in (PLAIN_W, PLAIN_H * [[3.0], [2.0], [1.0]])]
    if noise:
        pair = [one * rng.gamma(1 / noise**2, noise**2, one.shape) for one in pair]
    if change is not None:
        change(*pair)
    return fake_particles(*pair, np.full(draws, 1 / draws))


def test_components_that_are_another_or_nothing_are_counted():
    def change(ws, hs):
        # In two of ten draws component 2 is a copy of component 0; in one it is like nothing.
        ws[:2, :, 2], hs[:2, 2] = ws[:2, :, 0], hs[:2, 0] / 3
        ws[2, :, 2], hs[2, 2] = 0.01, [0, 0, 0, 1.0, 1.0]

    plain = dfac.component_swaps(traced())
    assert_allclose(plain["matched"], np.eye(3))
    assert_array_equal(plain["none"], 0.0)
    found = dfac.component_swaps(traced(change))
    assert_allclose(found["matched"].sel(component=2), [0.2, 0.0, 0.7])
    assert_allclose(found["none"], [0.0, 0.0, 0.1])
    assert_allclose(found["matched"].sum("other") + found["none"], 1.0)


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_widths_are_those_of_the_spread(noise):
    found = dfac.component_swaps(traced(noise=noise, draws=400))
    # 2 x 1.645 standard deviations; scales are shared out, so that a little less is left.
    assert_allclose(found["width_w"], 3.29 * noise, rtol=0.3)
    assert_allclose(found["width_h"], 3.29 * noise, rtol=0.6)


def test_coverage_counts_cells_inside_their_intervals_and_of_monitored_ones_needs_no_draws():
    """And leaves values out that are not known."""
    tree = fake_run()
    tree.attrs["model"] = TWEEDIE
    rows, columns = np.indices((12, 7)).reshape(2, -1)
    inside = dfac.predict(tree, interval=0.8).load()
    values = inside["mean"].values.copy()
    values[:3] = inside["upper"].values[:3] + 1.0
    found = dfac.held_out_coverage(tree, (rows, columns), values.ravel(), levels=(0.8,))
    assert (float(found["inside"][0]), int(found["cells"])) == (9 / 12, 84)
    assert_allclose(found["rmse"], np.square(values - inside["mean"].values).mean() ** 0.5)
    assert int(dfac.held_out_coverage(tree, ([3, 4], [3, 3]), [5.0, np.nan])["cells"]) == 1
    tree = fake_run(keep="moments")
    tree.attrs["model"] = TWEEDIE
    cells = [tree["monitor"][name].values[::-1] for name in ("row_index", "column_index")]
    found = dfac.held_out_coverage(tree, cells, dfac.monitored(tree)["mean"].values[::-1])
    assert (found["inside"].values.tolist(), float(found["rmse"])) == ([1.0] * 4, 0.0)
    match = "did not monitor these cells"
    refused(OptionError, match, dfac.held_out_coverage, tree, ([3], [3]), [1.0])


def test_columns_of_w_have_mean_one_and_rows_of_h_what_a_component_adds():
    tree = fake_run(keep="moments", chains=1)
    found, moments = components_of(tree), tree["posterior_moments"].isel(chain=0)
    W, H = (moments[f"{name}_mean"].values for name in "WH")
    assert_allclose(found.W.mean.mean(axis=1), 1.0)
    assert_allclose(found.W.mean.T @ found.H.mean, W @ H)
    added = (W[:, :, None] * H).mean(axis=0)
    assert_allclose(found.H.mean, added[found.labels])
    assert_allclose(found.weight, np.sort(added.sum(axis=1) / added.sum())[::-1])
    # The spread is scaled like the mean, and intervals hold it.
    own = (moments["H_var"] ** 0.5 / moments["H_mean"]).values[found.labels]
    assert_allclose(np.sqrt(found.H.variance) / found.H.mean, own)
    low, high = found.H.interval(1)
    assert (low > 0).all()
    assert ((low < found.H.mean[1]) & (found.H.mean[1] < high)).all()
    assert_array_equal(found.H.interval(1, [4, 2]), [low[[4, 2]], high[[4, 2]]])


def test_draws_have_the_names_of_align_with_all_chains_together():
    tree = fake_run()
    found, aligned = components_of(tree), dfac.align(tree)
    assert found.labels == list(range(COMPONENTS))
    draws = aligned["posterior/W"].transpose("component", "row", ...)
    mean = draws.values.reshape(COMPONENTS, SHAPE[0], -1).mean(axis=-1)
    assert_allclose(found.W.mean, mean / mean.mean(axis=1)[:, None])
    assert_allclose(found.present, aligned["alignment/share"])
    assert found.chain is None
    assert components_of(tree, chain=1).chain == 1


def test_moments_of_chains_are_never_mixed():
    tree = fake_run(keep="moments")
    found = components_of(tree)
    assert (found.chain, found.present) == (0, None)
    assert_array_equal(found.H.mean, components_of(tree.isel(chain=[0])).H.mean)
    refused(OptionError, "from 0 to 1, got 2", components_of, tree, chain=2)


def test_a_point_has_no_interval():
    V = xr.DataArray(np.random.default_rng(0).poisson(3.0, (9, 7)), dims=("gene", "cell"))
    updates = dfac.MultiplicativeUpdates()
    point = dfac.optimize(V, dfac.TweedieNMF(2), updates, random_seed=0, progressbar=False)
    found = components_of(point)
    assert found.H.interval(0) is None
    assert_allclose(found.W.mean.T @ found.H.mean, point["W"] @ point["H"], rtol=1e-5)
    assert found.W.names[:2] == ["gene 0", "gene 1"]
    refused(OptionError, "with W and H, got W", components_of, point[["W"]])


def test_what_a_quantity_is_called():
    for attrs, expected in (
        ({}, "a name"),
        ({"long_name": "radiance", "units": "W m-2"}, "radiance [W m-2]"),
        ({"standard_name": "air_pressure", "units": "1"}, "air pressure"),
    ):
        assert format_quantity(attrs, "a_name") == expected
