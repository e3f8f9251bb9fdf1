"""What is passed where it does not belong gets one sentence, with the call that works."""

import ast
import datetime as dt
import inspect
import json
import re
import uuid
import warnings
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from daskfactor.cli.main import app
from daskfactor.cli.wording import in_shell
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import DataError, DataWarning, OptionError, StoreFormatError
from daskfactor.results import verdict
from daskfactor.results.verdict import Facts, other_starts
from daskfactor.stein import particle_summary
from tests.cli.shell import fails, succeed
from tests.refusals import refused

RUN = {"draws": 4, "tune": 4, "random_seed": 0, "progressbar": False}
V = np.random.default_rng(0).poisson(3.0, (8, 6)).astype(float)


@pytest.fixture(scope="module")
def trace():
    return dfac.sample(V, dfac.TweedieNMF(2), **RUN)


@pytest.mark.parametrize("name", ["predict", "summarize", "align"])
def test_a_group_is_no_trace(trace, name):
    verb = getattr(dfac, name)
    for group in (trace["posterior"], trace["posterior"].to_dataset()):
        refused(
            OptionError, r"got only its group 'posterior'; pass trace, not trace\[", verb, group
        )


def test_a_trace_that_xarray_wrote_is_opened_by_xarray(trace, tmp_path):
    path = str(tmp_path / "t.zarr")
    with warnings.catch_warnings(action="ignore"):
        trace.to_zarr(path)
    refused(StoreFormatError, r"written by xarray.*xarray\.open_datatree\('", dfac.open_run, path)
    again = xr.open_datatree(path, engine="zarr")
    xr.testing.assert_equal(dfac.predict(again)["mean"], dfac.predict(trace)["mean"])


def test_models_of_other_verbs_are_sent_there():
    refused(OptionError, r"pass it to stein_posterior\(V", dfac.sample, V, dfac.SILFNMF(2), **RUN)
    for model in (dfac.AllocationModel.nmf(2), dfac.GaussianAdditive(2)):
        refused(OptionError, r"pass it to log_evidence\(", dfac.sample, V, model, **RUN)


@pytest.mark.parametrize("option", ["uncertainty", "weights"])
def test_verbs_without_weights_of_cells_say_so(option):
    words = f"log_evidence takes no {option}: every cell has the same weight"
    refused(OptionError, words, dfac.log_evidence, V, dfac.TweedieNMF(2), **{option: 1.0})


def test_fractions_under_a_law_of_counts_are_told():
    for model in (dfac.NegativeBinomialNMF(2), dfac.TweedieNMF(2, dispersion=1.0)):
        with pytest.warns(DataWarning, match="the data hold fractions.* law of counts; take Twe"):
            dfac.sample(V + 0.5, model, **RUN)
    dfac.sample(V + 0.5, dfac.TweedieNMF(2), **RUN)  # any intensities: a dispersion is estimated


def test_tables_that_are_no_matrix():
    dask = pytest.importorskip("dask.dataframe")
    lazy = dask.from_pandas(pd.DataFrame(V), npartitions=2)
    refused(DataError, r"pass frame\.compute\(\), or write it as Parquet", dfac.as_blocks, lazy)
    long = pd.DataFrame({"user": [1, 2], "item": [1, 1], "week": [3, 4], "count": [5.0, 6.0]})
    refused(DataError, r"a table is no tensor: .*sparse\.COO", dfac.sample, long, dfac.CP(2), **RUN)


def test_an_uncertainty_is_read_from_whatever_holds_a_matrix(tmp_path):
    sigma = np.random.default_rng(1).uniform(1.0, 2.0, V.shape)
    path = tmp_path / "unc.csv"
    pd.DataFrame(sigma).to_csv(path, index=False, header=False)
    found = dfac.as_blocks(V, 1, dtype="float64", uncertainty=path).weights.view(0, 0).block
    np.testing.assert_allclose(found, 1 / sigma**2)


def test_a_file_where_an_array_belongs_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sparse.save_npz("s.npz", sparse.csr_array(V))
    np.save("v.npy", V)
    dfac.convert("s.npz", "b.zarr", unstored="zero", progressbar=False)
    for file in (Path("s.npz"), "b.zarr"):
        words = rf"must be dense, too, because every cell has one, got \S*{file}$"
        refused(OptionError, words, dfac.as_blocks, V, weights=file)
    words = r"got \S*b\.zarr, which is not in memory"
    refused(OptionError, words, dfac.as_blocks, "s.npz", weights=Path("b.zarr"), unstored="zero")
    for file in ("s.npz", "b.zarr"):
        fit = "fit", "v.npy", "--store", "r.zarr", "-k", 2
        words = rf"\S*{file}; pass its numbers as a table"
        assert re.search(words, fails(3, "two dimensions", *fit, "--row-covariates", file))


LABELS = {
    "date": ([dt.date(2000, 1, day) for day in range(1, 9)], "2000-01-01"),
    "interval": (list(pd.interval_range(0, 8)), "(0, 1]"),
    "bytes": ([bytes([97 + at]) for at in range(8)], "a"),
    "UUID": ([uuid.UUID(int=at) for at in range(8)], str(uuid.UUID(int=0))),
    "decimal": ([Decimal(at) for at in range(8)], "0"),
    "mixed": (["a", 1, 2.5, "b", "c", "d", "e", "f"], "a"),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_that_no_store_keeps_are_texts(kind, tmp_path):
    labels, first = LABELS[kind]
    given = np.empty(8, object)
    given[:] = labels
    frame = pd.DataFrame(V, index=pd.Index(given, name="k"))
    with pytest.warns(DataWarning, match=r"the labels 'k' are of type .* kept as texts, such as"):
        found = dfac.sample(frame, dfac.TweedieNMF(1), store=tmp_path / "r.zarr", **RUN)
    assert str(found["posterior"]["k"].values[0]) == first
    given[3] = None
    frame = pd.DataFrame(V, index=pd.Index(given, name="k"))
    words = r"1 of the 8 labels 'k' are missing, the first at position 3; fill"
    refused(DataError, words, dfac.as_blocks, frame)


def test_labels_that_differ_by_rounding_are_the_same():
    data = xr.DataArray(V, {"y": np.linspace(0, 0.7, 8)}, ["y", "x"])
    near = data.assign_coords(y=data["y"] * (1 + 1e-15) + 1e-17) * 0 + 2.0
    assert dfac.as_blocks(data, 1, weights=near).weights.minimum == 2.0
    other = data.assign_coords(y=data["y"] + 0.05) * 0 + 2.0
    turned = data.assign_coords(y=2460000.5 + np.arange(8.0)) * 0 + 2.0
    rows = turned.assign_coords(y=turned["y"].values[::-1])
    refused(DataError, "the row labels of weights are not", dfac.as_blocks, turned, weights=rows)
    refused(DataError, "the row labels of weights are not", dfac.as_blocks, data, weights=other)


def test_held_out_cells_are_of_what_sample_takes_for_the_data():
    counts = sparse.csr_array(np.where(V > 3, V, 0))
    with pytest.warns(DataWarning, match="taken to be observed zeros"):
        held = dfac.hold_out(counts, 0.3, random_seed=0)
    assert (held.values == 0).any()
    assert np.isnan(held.train.data).sum() == held.values.size
    rated = dfac.hold_out(counts, 0.3, unstored="missing", random_seed=0)
    for train, meaning in ((held.train, "zero"), (rated.train, "missing")):
        assert dfac.as_blocks(train, allow_empty=True).unstored == meaning


def test_what_is_not_stored_is_zero_in_tables_and_missing_for_real_values():
    table = pd.DataFrame({"user": [0, 0, 1], "item": [0, 1, 1], "rating": [5.0, 3.0, 4.0]})
    with pytest.warns(DataWarning, match="taken to be observed zeros, as in counts"):
        assert dfac.as_blocks(table, 1, table=True).unstored == "zero"
    values = sparse.csr_array(np.where(V > 1, V, 0))
    with pytest.warns(DataWarning, match="taken to be missing"):
        found = dfac.sample(values, dfac.GaussianMF(1), **RUN)
    assert json.loads(found.attrs["data"])["unstored"] == "missing"


def test_advice_speaks_the_language_of_where_it_is_read():
    for python, shell in (
        ("Four chains: sample(..., chains=4).", "Four chains: daskfactor fit ... --chains 4."),
        ("Draw more: resume(..., draws=500).", "Draw more: daskfactor resume r.zarr --draws 500."),
        ('Choose it, step="auto", or use sampler="auto".', "Choose it, or use --sampler auto."),
        ('Store draws: keep="draws".', "Store draws: --keep draws."),
        ("Read W through align(), which", "Read W through daskfactor.align in Python, which"),
    ):
        assert in_shell(python, "r.zarr") == shell
    assert in_shell("resume(...)", r"C:\Users\a b") == r"daskfactor resume C:\Users\a b"


def test_refusals_of_data_speak_shell_in_a_shell(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dfac.sample(V, dfac.TweedieNMF(2), store="r.zarr", **RUN)
    np.save("v.npy", V)
    np.save("w.npy", V[1:])
    sparse.save_npz("s.npz", sparse.csr_array(V))
    dfac.convert("s.npz", "b.zarr", unstored="zero", progressbar=False)
    fit = "--store", "x.zarr", "-k", 2
    pairs = {
        ("fit", "r.zarr", *fit): "with daskfactor info, or continue it with daskfactor resume",
        ("convert", "r.zarr", "x.zarr"): "with daskfactor info, or continue it with daskfactor",
        ("fit", "v.npy", "--rows", "a", *fit): "--rows, --columns, --values and --table say how",
        ("convert", "v.npy", "x.zarr", "--rows", "a"): "--rows and --columns name dimensions of",
        ("fit", "v.npy", "--layer", "a", *fit): "--layer is for a file of AnnData, got ",
        ("fit", "v.npy", "--mask-var", "a", *fit): "--mask-var is for a file of AnnData, got ",
        ("fit", "v.npy", "--weights", "w.npy", *fit): "or be a netCDF variable with dimensions",
        ("fit", "s.npz", "--weights", "b.zarr", "--unstored", "zero", *fit): "--weights of a",
        ("fit", "v.npy", "--row-covariates", "b.zarr", *fit): "--row-covariates must be",
    }
    python = r"open_run|DataArray|DataFrame|pair of vectors|scipy matrix|covariates_"
    for command, words in pairs.items():
        told = fails(3, words, *command)
        assert not re.search(rf"{python}|(?<!-)\b(layer|mask_var|rows, columns) ", told), told
    assert in_shell("go on with resume(...)") == "go on with daskfactor resume RUN"


def test_every_advice_is_told_in_words_of_the_shell():
    told = []
    for module in (verdict, particle_summary):
        nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
        inner = {own for node in nodes if isinstance(node, ast.JoinedStr) for own in node.values}
        for node in nodes:
            if node in inner:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = node.values
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts = [node]
            else:
                continue
            text = "".join(own.value if isinstance(own, ast.Constant) else "7" for own in parts)
            told += re.findall(r"[^.:]*\w\((?:\.\.\.|trace).*", text)
    assert len(told) > 5
    for text in told:
        shell = in_shell(text, "run.zarr")
        assert re.search(r"daskfactor( fit| resume| particles|\.\w+ in Python)", shell), text
        assert "(" not in shell, shell


NAMED_OF_OTHERS = {
    *("b", "exp", "p"),  # formulas, and an escape of a byte string
    "astype",  # NumPy, pandas
    *("Client", "compute_chunk_sizes", "map_blocks"),  # Dask
    "FixedComponents",  # as it shows itself
    "ravel",
    "reindex_like",
    "sum_duplicates",
    "to_numpy",
    "toarray",
    "todense",
}
"""Calls in sentences that are of no name of the package, and have no dot."""
ARGUMENTS_OF_OTHERS = {
    *("asynchronous", "chunks", "decimal", "dims", "engine", "index_col", "meta", "sep", "year")
}


def sentences():
    """Yield where each text of the package stands that a user may read, and the text."""
    root = Path(dfac.__file__).parent
    for file in sorted(root.rglob("*.py")):
        if file.relative_to(root).parts[0] in ("kernels", "reports", "markup.py"):
            continue  # C++ and HTML
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        left = {own for node in nodes if isinstance(node, ast.JoinedStr) for own in node.values}
        left |= {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if node in left or not isinstance(node, ast.JoinedStr | ast.Constant):
                continue
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [own.value if isinstance(own, ast.Constant) else "7" for own in parts]
            if all(isinstance(own, str) for own in texts) and " " in "".join(texts):
                yield f"{file.name}:{node.lineno}", "".join(texts)


def test_calls_arguments_and_options_that_sentences_name_exist():
    public = {name: getattr(dfac, name) for name in dfac.__all__ if name != "plots"}
    known = {
        name: set(inspect.signature(own).parameters)
        for name, own in public.items()
        if callable(own)
    }
    every = set().union(*known.values(), ARGUMENTS_OF_OTHERS)
    known["set_params"] = known["BayesianNMF"]
    commands = typer.main.get_command(app).commands.values()
    options = {name for command in commands for own in command.params for name in own.opts}
    wrong, count = [], 0
    for where, text in sentences():
        for name, given in re.findall(r"(?<![\w.])([A-Za-z_][\w.]*)\(([^()]*)\)", text):
            own = name.removeprefix("daskfactor.")
            if own in known:
                names = set(re.findall(r"\b([a-z_]+)=(?!=)", given))
                wrong += [(where, f"{name}({bad}=)") for bad in names - known[own]]
                count += 1
            elif not ("." in own or own in NAMED_OF_OTHERS or hasattr(BlockedData, own)):
                wrong.append((where, name))
        wrong += [
            (where, bad) for bad in set(re.findall(r"(?<![\w{])([a-z_]+)=(?![=\d])", text)) - every
        ]
        wrong += [(where, bad) for bad in set(re.findall(r"--[a-z][\w-]*", text)) - options]
    assert not wrong, "\n".join(map(str, wrong))
    assert count > 50


PYTHON_ONLY = r"""[=({"]|None|False|held\.cells|CUDA\(|V\b"""
"""Values of arguments that no shell has."""


def test_every_sentence_names_options_of_a_command_as_the_shell_has_them():
    commands = typer.main.get_command(app).commands.values()
    options = {own.name for command in commands for own in command.params}
    for where, text in sentences():
        if where.partition(":")[0] not in ("wording.py", "verb_options.py"):
            shell = in_shell(text, options=options)
            left = re.findall(rf"\b([a-z_]+)=(?!{PYTHON_ONLY})", shell)
            assert not options & {*left}, (where, shell)


def test_what_writes_says_what_it_wrote(tmp_path):
    run = tmp_path / "run.zarr"
    dfac.sample(V, dfac.TweedieNMF(2), store=run, **RUN)
    np.savetxt(tmp_path / "v.csv", V, delimiter=",")
    short = "--ranks", "1,2", "--held-out", "0", "--draws", "10", "--tune", "4"
    for name, command in (
        ("p.csv", ("predict", run, "--rows", "1")),
        ("r.parquet", ("recommend", run, "--rows", "1")),
        ("t.nc", ("transform", run, tmp_path / "v.csv")),
        ("e.png", ("select-rank", tmp_path / "v.csv", *short)),
    ):
        told = succeed(*command, "-o", tmp_path / name)
        assert told.endswith(f"wrote {tmp_path / name}\n")
        assert (tmp_path / name).exists()


def test_components_beside_biases_go_by_their_numbers(tmp_path):
    quiet = {"random_seed": 0, "progressbar": False}
    trace = dfac.sample(V, dfac.GaussianMF(2), store=tmp_path / "run.zarr", **RUN)
    point = dfac.optimize(V, dfac.GaussianMF(2), **quiet)
    new = dfac.transform(trace, V[:3], **quiet)
    trace.load().to_netcdf(tmp_path / "run.nc")
    stored = xr.open_datatree(tmp_path / "run.nc")
    names = ["0", "1", "row_bias", "column_bias"]
    aligned = dfac.align(trace)
    for held in (trace["posterior"], aligned["posterior_moments"], stored["posterior"], point, new):
        assert held["component_name"].values.tolist() == names
        assert held.sel(component=0).sizes.get("component", 1) == 1
    W = trace["posterior"]["W"]
    assert W.sel(component=[0, 1]).sizes["component"] == 2
    assert (W.where(W["component_name"] == "column_bias", drop=True) == 1).all()
    top = dfac.top_entries(aligned, 1, component="row_bias")
    assert top["component"].values.tolist() == [2]
    dfac.report(trace, tmp_path / "report.html")
    assert "row_bias" in (tmp_path / "report.html").read_text(encoding="utf-8")
    again = dfac.sample(V, dfac.GaussianMF(2), init=point, **RUN)
    assert again["posterior"].sizes["component"] == 4
    alone = dfac.sample(V, dfac.TweedieNMF(2), **RUN)
    assert "component_name" not in alone["posterior"].coords


@pytest.mark.parametrize("axis", [0, 1])
def test_many_rows_or_columns_of_zeros_are_told(axis):
    counts = np.zeros((3000, 6))
    counts[:1900] = 1
    counts = sparse.csr_array(counts.T if axis == 0 else counts)
    side = ("columns", "rows")[axis]
    quick = {"draws": 1, "tune": 0, "random_seed": 0, "progressbar": False, "unstored": "zero"}
    with pytest.warns(DataWarning, match=f"1100 of 3000 {side} hold nothing but zeros") as caught:
        dfac.sample(counts, dfac.TweedieNMF(1, dispersion=1), **quick)
    (advice,) = (str(one.message) for one in caught if "nothing but" in str(one.message))
    rest = eval(advice.rpartition("for example ")[2], {"V": counts, "np": np})
    assert rest.shape == ((6, 1900) if axis == 0 else (1900, 6))
    with warnings.catch_warnings(action="error"):
        dfac.as_blocks(rest, unstored="zero")


def test_starts_are_advised_where_there_are_more_of_them():
    advice = {starts: other_starts(Facts(4, 100, starts=starts)) for starts in (1, 8, 64, None)}
    assert "sample(..., starts=8)" in advice[1]
    assert "sample(..., starts=32)" in advice[8]
    assert all("starts=" not in advice[own] for own in (64, None))


def test_a_store_that_is_taken_is_refused_before_data_are_read(tmp_path, monkeypatch):
    dfac.sample(V, dfac.TweedieNMF(2), store=tmp_path / "r.zarr", **RUN)
    np.save(tmp_path / "v.npy", V)
    monkeypatch.setattr("daskfactor.data.sources.open_source", None)
    fit = "fit", tmp_path / "v.npy", "--store", tmp_path / "r.zarr", "-k", 2
    fails(4, "exists and holds a run", *fit)


def test_a_share_in_percent_is_told_what_it_is(trace):
    refused(OptionError, "got 90; 90 % is 0.9$", dfac.predict, trace, interval=90)


def test_predictions_have_the_units_of_the_data():
    rain = xr.DataArray(V, dims=("time", "place"), attrs={"units": "mm"})
    found = dfac.sample(rain.where(rain > 2), dfac.TweedieNMF(2), monitor="missing", **RUN)
    for predicted in (dfac.predict(found), dfac.monitored(found)):
        names = ("mean", "sd", "lower", "upper")
        assert {predicted[name].attrs.get("units") for name in names} == {"mm"}
