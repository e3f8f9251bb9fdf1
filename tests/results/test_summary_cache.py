"""What a run writes down of itself when it ends: read instead of its draws, while it holds."""

import json
import shutil
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import xarray as xr
import zarr

import daskfactor as dfac
from daskfactor.errors import StoreFormatError
from daskfactor.results import finalize, summary
from daskfactor.results.summary import compute_summary
from daskfactor.results.summary_cache import VERDICT, cached_at, cached_in
from tests.cli.shell import fails, succeed
from tests.refusals import refused

QUIET = {"progressbar": False, "executor": "serial", "random_seed": 3}
V = np.random.default_rng(0).poisson(3.0, (12, 9)).astype("f4")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("noted") / "run.zarr"
    dfac.sample(V, dfac.TweedieNMF(2), draws=20, tune=10, chains=2, store=path, **QUIET)
    return path


@pytest.fixture
def copied(store, tmp_path):
    return shutil.copytree(store, tmp_path / "run.zarr")


def said(path, *options):
    return json.loads(succeed("info", path, "--json", *options))


def test_what_is_noted_is_what_the_draws_say(store, monkeypatch):
    tree = dfac.open_run(store)
    attrs, noted = cached_at(store)
    assert (attrs[VERDICT], cached_in(tree)) == (tree.attrs[VERDICT], noted)
    found = compute_summary(tree)
    xr.testing.assert_identical(summary.Summary.from_dict(noted.summary), found)
    assert noted.measured == json.loads(json.dumps(finalize.measured(tree)))
    again = AssertionError("the draws were judged again")
    monkeypatch.setattr(summary, "all_series", Mock(side_effect=again))
    for source in (store, tree):
        assert type(dfac.summarize(source)) is summary.Summary
        assert dfac.summarize(source).lights == found.lights
    assert "lights" in said(store)
    assert "predictions" in str(dfac.summarize(tree))
    refused(AssertionError, "again", dfac.summarize, tree, cells=5)  # other numbers


def test_info_says_the_same_without_what_is_noted(copied, monkeypatch):
    noted, diagnosed = said(copied), said(copied, "--diagnose")
    with monkeypatch.context() as patch:
        patch.setattr("daskfactor.results.summary_cache.RULES", -1)  # other rules count for nothing
        assert cached_at(copied) is None
        assert cached_in(dfac.open_run(copied)) is None
        assert said(copied) == noted
    del zarr.open_group(copied, mode="r+").attrs[VERDICT]
    assert cached_at(copied) is None
    assert (said(copied), said(copied, "--diagnose")) == (noted, diagnosed)


def test_a_part_of_a_run_is_judged_anew(store):
    tree = dfac.open_run(store)
    parts = {"draw": slice(None, None, 2)}, {"chain": [1]}, {"row": slice(5)}
    others = dfac.align(tree), tree.map_over_datasets(lambda one: one * 2.0)
    for changed in (*(tree.isel(part) for part in parts), *others):
        assert cached_in(changed) is None


def test_a_longer_run_is_judged_anew(copied):
    before = zarr.open_group(copied, mode="r").attrs[VERDICT]
    tree = dfac.resume(copied, draws=10, progressbar=False)
    assert cached_in(tree).measured["draws_done"] == 30
    assert dfac.summarize(copied).attrs["draws"] == 30
    zarr.open_group(copied, mode="r+").attrs[VERDICT] = before  # as it is while the run goes on
    assert cached_at(copied) is None
    assert cached_in(dfac.open_run(copied)) is None
    assert dfac.summarize(copied).attrs["draws"] == 30
    dfac.resume(copied, progressbar=False)  # complete, but for what it says of itself
    assert cached_at(copied)[1].measured["draws_done"] == 30


def test_what_others_have_written_there_is_ignored(copied):
    for text in ("", "{", "[]", "{}", '{"of": 3, "imprint": 1, "measured": {}}'):
        zarr.open_group(copied, mode="r+").attrs[VERDICT] = text
        assert cached_at(copied) is None
    assert "lights" in said(copied)


@pytest.mark.parametrize("gone", [False, True])
def test_damage_is_told_as_ever(copied, gone):
    chunk = copied / "posterior" / "W" / "c" / "0" / "0" / "0" / "0"
    raw = chunk.read_bytes()
    chunk.unlink() if gone else chunk.write_bytes(raw[:20] + bytes([raw[20] ^ 4]) + raw[21:])
    assert cached_at(copied) is None
    refused(StoreFormatError, r"posterior/W/c/0/0/0/0 is ", dfac.summarize, copied)
    fails(4, "", "info", copied)


def test_a_run_of_moments_and_particles_note_theirs(tmp_path):
    model, path = dfac.TweedieNMF(2, beta=2.0, dispersion=1.0), tmp_path / "moments.zarr"
    dfac.sample(V, model, draws=8, tune=4, keep="moments", store=path, **QUIET)
    assert cached_at(path)[1].measured["draws_kept"] == 0
    assert dfac.summarize(path).predictions.status == "none"
    path = tmp_path / "particles.zarr"
    tree = dfac.stein_posterior(V, model, particles=3, store=path, **QUIET)
    assert cached_in(tree).measured["particles"]["with_weight"] is not None
    assert str(dfac.summarize(path)) == str(compute_summary(tree))


def test_draws_that_are_too_many_are_left_to_who_asks(tmp_path, monkeypatch):
    monkeypatch.setattr(finalize, "MAX_SUMMARIZED_BYTES", 10)
    path = tmp_path / "run.zarr"
    dfac.sample(V, dfac.TweedieNMF(2), draws=8, tune=4, store=path, **QUIET)
    assert cached_at(path)[1].summary is None
    monkeypatch.setattr("daskfactor.cli.show.QUICKLY_READ", 10)
    assert "pass --diagnose" in succeed("info", path)
    assert "lights" not in said(path)
    assert dfac.summarize(path).attrs["draws"] == 8


def test_info_imports_nothing_that_takes_long(store):
    code = (
        "import sys; from daskfactor.cli.main import app\n"
        f"try: app(['info', {str(store)!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "slow = {'xarray', 'pandas', 'dask', 'numba', 'zarr', 'scipy'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "predictions" in done.stdout
