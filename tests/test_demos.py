import numpy as np
import pytest

from daskfactor import demos
from daskfactor.errors import OptionError
from tests.refusals import refused


def test_faces_are_the_bytes_that_the_package_ships_and_digits_are_pixels_by_pictures():
    images = demos.load_faces()
    assert images.truth.shape == (10304, 400)
    assert images.labels[10] == "s2/1"
    assert (images.truth.min(), images.truth.max()) == (0.0, 251.0)
    for column in (0, 143, 399):
        person, pose = images.labels[column].removeprefix("s").split("/")
        content = (demos.faces_folder() / f"s{person}" / f"{pose}.pgm").read_bytes()
        pixels = np.frombuffer(content[-10304:], np.uint8)
        np.testing.assert_array_equal(images.truth[:, column], pixels)
    digits = demos.load_digits()
    assert digits.truth.shape == (64, 1797)
    assert digits.truth.max() == digits.white


def small(count=6):
    truth = np.random.default_rng(1).integers(1, 17, (64, count)).astype(np.float32)
    labels = [str(i) for i in range(count)]
    return demos.Images("digits", truth, (8, 8), 16.0, "digit", labels, 3, (0, 2))


def test_erase_takes_the_share_it_was_told_and_only_that():
    images = small(500)
    observed = demos.erase(images, 0.3, 5)
    gone = np.isnan(observed.values)
    assert gone.mean() == pytest.approx(0.3, abs=5 * np.sqrt(0.21 / gone.size))
    np.testing.assert_array_equal(observed.values[~gone], images.truth[~gone])
    np.testing.assert_array_equal(gone, np.isnan(demos.erase(images, 0.3, 5).values))
    assert observed.dims == ("pixel", "digit")
    assert observed.pixel_row.values[9] == 1
    for share in (0.0, 1.0, -0.1, float("nan")):
        refused(OptionError, "strictly between 0 and 1", demos.erase, small(), share, 0)


def test_errors_coverage_and_means_of_rows():
    truth = np.array([[3.0, 4.0], [0.0, 0.0]])
    erased = np.array([[True, False], [False, False]])
    estimate = np.array([[1.0, 99.0], [99.0, 99.0]])
    assert demos.relative_error(truth, estimate, erased) == pytest.approx(2 / 5)
    assert demos.relative_error(truth, truth, erased) == 0.0
    truth = np.array([1.0, 2.0, 3.0, 4.0])
    assert demos.coverage(truth, np.full(4, 2.0), np.full(4, 3.0)) == 0.5  # both ends count
    observed = np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, np.nan]])
    np.testing.assert_array_equal(demos.row_means(observed)[:, 0], [2.0, 0.0])


def test_on_grid_changes_the_named_cells_and_nothing_else():
    elsewhere = np.full((3, 2), 9.0, dtype=np.float32)
    result = demos.on_grid(np.array([1.0, 2.0]), (np.array([0, 2]), np.array([1, 0])), elsewhere)
    np.testing.assert_array_equal(result, [[9.0, 1.0], [9.0, 9.0], [2.0, 9.0]])
    assert (elsewhere == 9.0).all()


def test_a_whole_demo_beats_the_row_mean_and_its_intervals_hold(tmp_path):
    images = demos.load_digits()
    part = images._replace(truth=images.truth[:, :300], labels=images.labels[:300], n_components=10)
    options = {"draws": 60, "tune": 60, "blocks": 2, "progressbar": False}
    evaluation = demos.run(part, store=str(tmp_path / "digits.zarr"), **options)
    errors = {score.method: score.error for score in evaluation.scores}
    assert errors["posterior mean"] < 0.85 * errors["row mean"] < errors["zero fill"]
    assert 0.85 < evaluation.coverage < 0.95
    watched = demos.cells_to_monitor(part, evaluation.erased)
    np.testing.assert_array_equal(np.isfinite(evaluation.sd), watched)
    assert demos.picture(evaluation).axes


def test_shown_pictures_are_watched_whole():
    images = small()
    erased = np.zeros(images.truth.shape, dtype=bool)
    erased[5, 1] = True
    watched = demos.cells_to_monitor(images, erased)
    assert watched[:, [0, 2]].all()
    assert watched[5, 1]
    assert watched.sum() == 2 * 64 + 1


def test_the_picture_shows_truth_where_it_was_observed():
    images = small()
    erased = np.zeros(images.truth.shape, dtype=bool)
    erased[0] = True
    mean = np.full(images.truth.shape, 5.0)
    evaluation = demos.Evaluation(images, erased, [], 0.9, 0.9, mean, mean / 10)
    restored = demos.picture(evaluation).axes[4].images[0].get_array()
    assert restored[0, 0] == 5.0
    assert restored[7, 7] == images.truth[63, 0]


def test_missing_faces_tell_what_to_install(monkeypatch):
    monkeypatch.setattr(demos.importlib.util, "find_spec", lambda name: None)
    refused(OptionError, r"pip install 'daskfactor\[examples\]'", demos.load_faces)
