"""The commands on a real run, one after another, as a person would use them."""

import csv
import io
import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

import daskfactor
from tests.cli.shell import answer, fails, plain, succeed

ROWS, COLUMNS = 24, 20


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    counts = rng.poisson(rng.gamma(1, 2, (ROWS, 2)) @ rng.gamma(1, 2, (2, COLUMNS)))
    with (tmp_path / "counts.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["gene", *(f"c{j}" for j in range(COLUMNS))])
        for i, row in enumerate(counts):
            writer.writerow([f"g{i}", *("" if (i + j) % 7 == 0 else v for j, v in enumerate(row))])
    return "counts.csv"


OPTIONS = ("-k", 2, "--draws", 12, "--tune", 10, "--blocks", 2, "--seed", 4, "--monitor", "missing")


def test_fit_info_resume_predict_plot(table):
    fit = ("fit", table, "--store", "run.zarr", *OPTIONS)
    fitted = answer(*fit)
    assert fitted["data"]["shape"] == [ROWS, COLUMNS]
    assert fitted["data"]["n_observed"] == (np.add(*np.indices((ROWS, COLUMNS))) % 7 > 0).sum()
    assert (fitted["draws_done"], fitted["draws_kept"]) == (12, 12)
    assert answer("info", "run.zarr")["lp_mean"] == fitted["lp_mean"]
    for command in (fit, ("info", "none.zarr"), ("info", table)):
        fails(4, "", *command)

    assert answer("resume", "run.zarr", "--draws", 8)["draws_done"] == 20

    text = succeed("predict", "run.zarr", "--rows", "0,3", "--columns", "7:9")
    lines = list(csv.reader(io.StringIO(text)))
    pairs = itertools.product(("g0", "g3"), ("c7", "c8"))
    assert [tuple(line[:2]) for line in lines[1:]] == list(pairs)
    mean, _, lower, upper = np.array([line[2:] for line in lines[1:]], dtype=float).T
    assert (lower <= mean).all()
    assert (mean <= upper).all()

    succeed("plot", "run.zarr", "-o", "run.png")


def test_the_number_of_components_may_be_left_to_the_run(table):
    options = ("--store", "run.zarr", "--draws", 6, "--tune", 4, "--blocks", 1)
    fitted = answer("fit", table, *options, "-k", "auto")
    low, middle, high = fitted["effective_components"]
    assert 1 <= low <= middle <= high <= ROWS
    assert f"the data support {middle} (5 to 95 %" in plain(succeed("info", "run.zarr"))
    for text in ("0", "many", "2.5"):
        fails(2, "must be a whole number", "fit", table, "--store", "x.zarr", "-k", text)


def test_a_run_begins_where_another_ended(table):
    succeed("fit", table, "--store", "one.zarr", *OPTIONS, "--starts", 2)
    succeed("fit", table, "--store", "two.zarr", *OPTIONS, "--init", "one.zarr")
    paths = ("one.zarr", "two.zarr")
    kinds = [json.loads(daskfactor.open_run(path).attrs["init"]) for path in paths]
    assert kinds[0] == {"kind": "auto", "starts": 2, "drawn": []}
    assert kinds[1] == {"kind": "sample", "starts": 1, "drawn": [[0, 11]]}
    match = "or the path of a run's store, got 'elsewhere'"
    fails(3, match, "fit", table, "--store", "x.zarr", *OPTIONS, "--init", "elsewhere")


def test_long_tables_are_fitted_and_asked_for_by_label(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = [(f"u{i}", j, rng.poisson(3)) for i in range(9) for j in range(6) if (i + j) % 4]
    text = "".join(f"{stars},{film},{user}\n" for user, film, stars in lines)
    (tmp_path / "t.csv").write_text("stars,film,user\n" + text)
    long = ("--rows", "user", "--columns", "film", "--values", "stars", "--unstored", "missing")
    options = ("-k", 2, "--draws", 4, "--tune", 4, "--seed", 1, "--store")
    assert answer("fit", "t.csv", *long, *options, "run.zarr")["data"]["shape"] == [9, 6]
    found = list(csv.reader(io.StringIO(succeed("predict", "run.zarr", "--rows", "u3,u1"))))
    assert [line[0] for line in found[1:]] == ["u3"] * 6 + ["u1"] * 6
    fails(3, "did you mean 'u3'", "predict", "run.zarr", "--rows", "U33")
    (tmp_path / "w.csv").write_text("a,b,c\n1,2,3\n2,1,4\n")
    match = "say which: pass --rows a, --columns b, --values c (or --table)"
    fails(3, match, "fit", "w.csv", *options, "w.zarr")
    assert answer("fit", "w.csv", *options, "w.zarr", "--matrix")["data"]["shape"] == [2, 3]
    match = "--count cannot be combined with --values"
    fails(3, match, "fit", "w.csv", *options, "x.zarr", "--count", "--values", "c")


def test_the_best_columns_are_written_under_their_labels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = [(f"u{i}", 10 * j, rng.poisson(3)) for i in range(9) for j in range(8) if (i + j) % 3]
    table = pd.DataFrame(lines, columns=["user", "film", "stars"])
    table.to_csv("t.csv", index=False)
    options = ("--draws", 4, "--tune", 4, "--seed", 1, "--unstored", "missing", "--table")
    succeed("fit", "t.csv", "--store", "run.zarr", "-k", 2, *options)
    wanted = daskfactor.recommend("run.zarr", ["u3", "u1"], 2, exclude=table, by="lower")
    asked = ("--rows", "u3,u1", "-n", 2, "--by", "lower")
    for left_out in ("t.csv", "seen"):
        text = succeed("recommend", "run.zarr", *asked, "--exclude", left_out, "-q")
        found = pd.read_csv(io.StringIO(text))
        assert found["user"].tolist() == ["u3", "u3", "u1", "u1"]
        assert found["rank"].tolist() == [1, 2, 1, 2]
        assert found["film"].tolist() == wanted["film"].values.reshape(-1).tolist()
        np.testing.assert_allclose(found["lower"], wanted["lower"].values.reshape(-1), rtol=1e-6)
    left = {(user, film) for user, film, _ in lines}
    assert not left & set(zip(found["user"], found["film"], strict=True))
    columns = ("--columns", "20,70", "--by-label", "--rows", "u3")
    report = answer("recommend", "run.zarr", "-o", "top.parquet", *columns)
    assert report["sizes"] == {"user": 1, "rank": 10}
    assert set(pd.read_parquet("top.parquet")["film"]) == {20, 70, -1}
    fails(3, "did you mean 'u3'", "recommend", "run.zarr", "--rows", "u33")


def test_errors_leave_no_store_behind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.csv").write_text("1,2\n-3,4\n")
    told = fails(3, "", "fit", "bad.csv", "--store", "bad.zarr", "-k", 1)
    assert told.splitlines()[-1].startswith("error: ")
    assert not Path("bad.zarr").exists()


def test_predictions_of_unlabelled_cells_carry_their_positions(tmp_path):
    V, store = np.random.default_rng(0).poisson(4, (12, 10)).astype("f4"), tmp_path / "r.zarr"
    options = {"draws": 3, "tune": 3, "random_seed": 0, "progressbar": False}
    daskfactor.sample(V, daskfactor.TweedieNMF(2), store=store, **options)
    text = succeed("predict", store, "--rows", "2,7", "--columns", "5:7")
    cells = [line.split(",")[:2] for line in text.splitlines()]
    assert cells == [["row", "column"], ["2", "5"], ["2", "6"], ["7", "5"], ["7", "6"]]


@pytest.mark.quick("tweedie")
@pytest.mark.parametrize("model", ["gaussian", "tweedie"])
def test_fit_with_covariates(table, model):
    lines = Path(table).read_text().splitlines()
    lines[1] = "g0" + "," * COLUMNS
    Path(table).write_text("\n".join(lines) + "\n")
    np.save("covariates.npy", np.arange(2.0 * ROWS).reshape(ROWS, 2))
    options = ("--store", "run.zarr", "--model", model, "-k", 2, "--draws", 3, "--tune", 2)
    told = succeed("fit", table, "--row-covariates", "covariates.npy", *options)
    assert daskfactor.open_run("run.zarr")["posterior"].sizes["row_feature"] == 2
    rates = "prior rates learnt by component and by covariates (W) and"
    assert (rates in plain(told)) == (model != "gaussian")


def test_an_array_of_many_dimensions_is_read_alike_by_all_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = np.random.default_rng(0).gamma(2.0, size=(8, 3, 4))
    cube = xr.DataArray(values, dims=("time", "lat", "lon"), name="precip")
    cube.to_dataset().to_zarr("cube.zarr", consolidated=False)
    read, short = ("cube.zarr:precip", "--rows", "time"), ("-k", 1, "--tune", 5, "--quiet")
    succeed("fit", *read, "--store", "run.zarr", *short, "--draws", 4)
    again = ("--draws", 3, "--data", "cube.zarr:precip", "--quiet")
    assert answer("resume", "run.zarr", *again)["draws_done"] == 7
    lines = succeed("transform", "run.zarr", *read, "--quiet").splitlines()
    assert (lines[0], len(lines)) == ("time,component,mean,sd", 9)
