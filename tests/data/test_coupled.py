"""Several matrices on one grid: what was given, however it came and rows are named."""

import pickle
from pathlib import Path

import anndata
import dask
import dask.array as da
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import sparse
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import daskfactor as dfac
from daskfactor.coupled.source import CoupledData, join
from daskfactor.data.blocks import open_shared
from daskfactor.data.grid import Grid
from daskfactor.errors import DataError, ModelError, OptionError
from daskfactor.kernels.views import BlockView, SparseBlock
from tests.refusals import refused

RNG = np.random.default_rng(12)
COUNTS = RNG.poisson(1.5, (24, 9)).astype("f4")
GAPPY = np.where(RNG.random((24, 7)) < 0.3, np.nan, RNG.normal(4, 2, (24, 7))).astype("f4")
RATED = np.where(RNG.random((24, 8)) < 0.4, RNG.integers(1, 6, (24, 8)), 0).astype("f4")


MIXED = {"counts": sp.csr_array(COUNTS), "gappy": GAPPY, "rated": sp.csr_array(RATED)}
KINDS = st.sampled_from(["dense", "zero", "missing"])


def unit(values):
    return float(np.nanmean(values.astype("f8")))


def labelled(values, labels, rows="cell", columns="gene"):
    return xr.DataArray(values, {rows: list(labels)}, [rows, columns])


def matrix(values, labels, kind):
    """A matrix with row labels: dense, or of the entries that are not zero."""
    made = values if kind == "dense" else sp.csr_matrix(values)
    return anndata.AnnData(made, pd.DataFrame(index=list(labels)))


def known(values, kind):
    """The same with NaN for what is missing."""
    return np.where(values == 0, np.nan, values) if kind == "missing" else values


@pytest.mark.libraries
def test_views_of_three_kinds_stand_side_by_side_in_their_units():
    stored = {"counts": "zero", "rated": "missing"}
    with join(MIXED, unstored=stored, blocks=5, dtype="float64") as data:
        assert isinstance(data, CoupledData)
        assert (data.shape, data.unstored) == ((24, 24), "mixed")
        parts = [COUNTS, GAPPY, known(RATED, "missing")]
        naive = np.hstack([own / unit(own) for own in parts])
        np.testing.assert_allclose(data.to_numpy(), naive, rtol=1e-6)
        assert data.total_observed == np.count_nonzero(~np.isnan(naive))
        np.testing.assert_array_equal(data.row_observed, (~np.isnan(naive)).sum(axis=1))
        np.testing.assert_array_equal(data.col_observed, (~np.isnan(naive)).sum(axis=0))
        assert data.mean == pytest.approx(1.0)
        for own, joint in zip(parts, data.joints, strict=True):
            assert joint.unit == joint.mean == pytest.approx(unit(own))
            assert (joint.minimum, joint.maximum) == (np.nanmin(own), np.nanmax(own))
            assert joint.n_observed == np.count_nonzero(~np.isnan(own))
        assert [own.is_integer for own in data.joints] == [True, False, True]
        kinds = {(own[1], type(data.view(*own))) for own in data.grid.all_blocks()}
        dense = {col for col, kind in kinds if kind is BlockView}
        assert dense == set(np.unique(np.nonzero(data.owner == 1)[1]).tolist())


def test_one_matrix_is_as_it_was_given_on_blocks_of_its_own():
    with join({"a": COUNTS}) as data, dfac.as_blocks(COUNTS) as alone:
        assert data.grid == alone.grid
        assert data.joints[0].unit == 1.0
        np.testing.assert_array_equal(data.to_numpy(), COUNTS)


@pytest.mark.parametrize("kind", ["dense", "zero", "missing"])
def test_a_chain_is_bent_back(kind):
    ratings, features = RATED, np.abs(GAPPY[:8])
    features = np.nan_to_num(features)
    second = features if kind == "dense" else sp.csr_array(features)
    between = {"r": dfac.Relation("user", "item"), "f": dfac.Relation("item", "feature")}
    stored = {"r": "missing"} | ({} if kind == "dense" else {"f": kind})
    given = {"r": sp.csr_array(ratings), "f": second}
    with join(given, between, blocks=4, unstored=stored, dtype="float64") as data:
        assert data.shape == (24 + 7, 8)
        assert [own.turned for own in data.joints] == [False, True]
        parts = known(ratings, "missing"), known(features, kind)
        naive = np.vstack([parts[0] / unit(parts[0]), parts[1].T / unit(parts[1])])
        np.testing.assert_allclose(data.to_numpy(), naive, rtol=1e-6)
        rows, cols = np.mgrid[:31, :8]
        np.testing.assert_allclose(data.values(rows.ravel(), cols.ravel()), naive.ravel(), 1e-6)
        assert data.placed["factors"]["feature"]["span"] == (24, 31)


def test_four_factors_in_an_even_circle():
    between = {name: dfac.Relation(*name) for name in ("ab", "bc", "cd", "da")}
    sizes = {"a": 5, "b": 4, "c": 3, "d": 6}
    given = {n: RNG.random((sizes[n[0]], sizes[n[1]])).astype("f4") + 0.1 for n in between}
    with join(given, between, blocks=3, dtype="float64") as data:
        scaled = {name: own / unit(own) for name, own in given.items()}
        naive = np.block([[scaled["ab"], scaled["da"].T], [scaled["bc"].T, scaled["cd"]]])
        np.testing.assert_allclose(data.to_numpy(), naive, rtol=1e-6)


def test_rows_are_matched_in_another_order_and_missing_ones_lie_in_bands_of_their_own():
    labels = np.array([f"c{number}" for number in range(24)])
    has = {"a": np.arange(24), "b": RNG.permutation(24)[:15], "c": RNG.permutation(24)[:10]}
    parts = {name: own[has[name]] for name, own in zip("abc", (COUNTS, GAPPY, RATED), strict=True)}
    given = {
        own: labelled(parts[own], labels[has[own]], columns=column)
        for own, column in zip("abc", "xyz", strict=True)
    }
    with join(given, blocks=6, dtype="float64") as data:
        assert data.axes["cell"].labels.tolist() == labels.tolist()
        naive = np.full((24, 24), np.nan)
        for own, start in (("a", 0), ("b", 9), ("c", 16)):
            width = parts[own].shape[1]
            naive[has[own], start : start + width] = parts[own] / unit(parts[own])
        np.testing.assert_allclose(data.to_numpy(), naive, rtol=1e-6)
        for own in "abc":  # by position in the matrix as it was given
            rows, cols = data.cells_of(own, np.arange(len(has[own])), np.zeros(len(has[own]), int))
            found = data.values(rows, cols) * unit(parts[own])
            np.testing.assert_allclose(found, parts[own][:, 0], rtol=1e-6)
        for row, col in data.grid.all_blocks():
            if data.owner[row, col] < 0:
                assert data.n_stored[row, col] == data.n_observed[row, col] == 0
        patterns = {
            tuple(np.unique(data.owner[row][data.owner[row] >= 0])): row for row in range(6)
        }
        assert set(patterns) == {
            tuple(np.flatnonzero([row in own for own in has.values()])) for row in range(24)
        }


@st.composite
def problems(draw):
    """Views of some of the rows, in orders of their own, perhaps items' features; and blocks."""
    count, size = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    found = {}
    for name in "abc"[:count]:
        rows = draw(st.permutations(range(size)))
        held = [0, *(row for row in rows if row and draw(st.booleans()))]
        found[name] = draw(st.permutations(held)), draw(st.integers(1, 5)), draw(KINDS)
    if draw(st.booleans()):  # of the columns of a
        rows = draw(st.permutations(range(found["a"][1])))
        found["turned"] = rows, draw(st.integers(1, 4)), draw(KINDS)
    return found, draw(st.integers(0, 6))


@given(problem=problems(), seed=st.integers(0, 2**16))
@settings(max_examples=60)
def test_it_is_what_a_naive_reference_makes_of_it(problem, seed):
    shapes, blocks = problem
    rng = np.random.default_rng(seed)
    given, parts, between, stored = {}, {}, {}, {}
    for name, (rows, width, kind) in shapes.items():
        values = rng.integers(0, 4, (len(rows), width)).astype("f4")
        values[0, 0] = 2  # something is observed
        prefix = "a" if name == "turned" else "r"
        given[name] = matrix(values, [f"{prefix}{row}" for row in rows], kind)
        if name == "a":
            given[name].var_names = [f"a{column}" for column in range(width)]
        between[name] = dfac.Relation("a" if name == "turned" else "row", name)
        parts[name] = known(values, kind)
        if kind != "dense":
            stored[name] = kind
    naive, expected = reference(parts, shapes)
    bands = bands_needed(shapes)
    asked = {"blocks": blocks or None, "unstored": stored, "dtype": "float64", "allow_empty": True}
    if bands > min(naive.shape) or (blocks and not bands <= blocks <= min(naive.shape)):
        with pytest.raises((DataError, OptionError), match=r"bands on a side|blocks must be from"):
            join(given, between, **asked)
        return
    with join(given, between, **asked) as data:
        whole = data.to_numpy()
        labels = data.axes["row"].labels.tolist()
        order = [*(labels.index(row) for row in expected), *range(len(expected), len(whole))]
        np.testing.assert_allclose(whole[order], naive, rtol=1e-6)
        i, j = (own.ravel() for own in np.indices(data.shape))
        np.testing.assert_array_equal(data.values(i, j), whole.ravel())
        assert data.total_observed == np.count_nonzero(~np.isnan(naive))


def bands_needed(shapes):
    """Sets of rows that the same views have, or factors of columns, whichever are more."""
    shared = {name: set(own[0]) for name, own in shapes.items() if name != "turned"}
    patterns = {
        tuple(row in own for own in shared.values()) for row in set().union(*shared.values())
    }
    return max(len(patterns) + ("turned" in shapes), len(shared))


def reference(parts, shapes):
    """The joint matrix, cell by cell, its shared rows by number; and labels of these."""
    shared = {name: own for name, own in shapes.items() if name != "turned"}
    numbers = sorted({row for rows, *_ in shared.values() for row in rows})
    extra = shapes["turned"][1] if "turned" in shapes else 0
    width = sum(own for _, own, _ in shared.values())
    out = np.full((len(numbers) + extra, width), np.nan)
    start = 0
    for name, (rows, columns, _) in shared.items():
        level = unit(parts[name]) if len(shapes) > 1 else 1.0
        for at, row in enumerate(rows):
            for column in range(columns):
                out[numbers.index(row), start + column] = parts[name][at, column] / level
        start += columns
    for at, item in enumerate(shapes["turned"][0] if extra else ()):
        for feature in range(extra):
            value = parts["turned"][at, feature] / unit(parts["turned"])
            out[len(numbers) + feature, item] = value
    return out, [f"r{number}" for number in numbers]


def test_copies_for_workers_and_a_scratch_file_give_the_same_blocks(tmp_path):
    with dask.config.set({"temporary-directory": str(tmp_path)}):
        given = {"unstored": {"counts": "zero", "rated": "missing"}, "blocks": 4}
        data, scratch = join(MIXED, **given), join(MIXED, memory_limit=0, **given)
        assert data.in_memory
        assert not scratch.in_memory
        assert scratch.fingerprint == data.fingerprint
        np.testing.assert_array_equal(scratch.to_numpy(), data.to_numpy())
        copies = [pickle.loads(pickle.dumps(own)) for own in (data, scratch)]
        copies.append(open_shared(pickle.loads(pickle.dumps(data.share())), 0))
        for copy in copies:
            assert copy.fingerprint == data.fingerprint
            np.testing.assert_array_equal(copy.to_numpy(), data.to_numpy())
            for block in data.grid.all_blocks():
                one, other = copy.view(*block), data.view(*block)
                assert type(one) is type(other)
                if isinstance(one, SparseBlock):
                    assert one.zeros == other.zeros
        for own in (*copies, data, scratch):
            own.close()


def sources():
    return {
        "scipy": sp.csc_array(RATED),
        "pydata": sparse.COO.from_numpy(RATED),
        "xarray": xr.DataArray(sparse.COO.from_numpy(RATED), dims=("row", "column")),
        "dask": da.from_array(sparse.COO.from_numpy(RATED), (8, 8)),
        "path": "rated.npz",
        "Path": Path("rated.npz"),
    }


@pytest.mark.parametrize("source", sources())
def test_one_word_for_unstored_holds_for_whatever_is_sparse(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sp.save_npz("rated.npz", sp.csr_array(RATED))
    np.save("counts.npy", COUNTS)
    given = {"dense": COUNTS, "file": "counts.npy", "rated": sources()[source]}
    with join(given, unstored="missing", blocks=3) as data:
        whole = data.to_numpy()
    np.testing.assert_array_equal(np.isnan(whole[:, -8:]), RATED == 0)
    assert not np.isnan(whole[:, :-8]).any()


def test_a_grid_of_before_is_taken_again_and_others_are_refused():
    with join(TWO, blocks=3) as data, join(TWO, blocks=data.grid) as again:
        assert again.grid == data.grid
        assert again.fingerprint == data.fingerprint
    wrong = Grid.even((24, 16), 2)
    refused(OptionError, "the grid is for other matrices", join, TWO, blocks=wrong)


LABELS = [f"c{number}" for number in range(24)]
INFINITE = COUNTS.copy()
INFINITE[3, 5] = np.inf
EMPTY_ROW = np.vstack([GAPPY[:-1], np.full((1, 7), np.nan)])
A, TWO, THREE = {"a": COUNTS}, {"a": COUNTS, "b": GAPPY}, {"a": COUNTS, "b": GAPPY, "c": RATED}
CIRCLE = {name: dfac.Relation(*name) for name in ("ab", "bc", "ca")}
OF_X, UPPER = labelled(COUNTS, LABELS, columns="x"), [*map(str.upper, LABELS)]
SETS = ("a", np.arange(18)), ("b", np.flatnonzero(np.arange(24) % 3))
BAD = {
    "odd circle": (ModelError, "odd circle, which", dict.fromkeys(CIRCLE, COUNTS[:9]), CIRCLE),
    "doubles": (
        *(ModelError, "'a' and 'b' relate the same factors, r and c"),
        *({"a": COUNTS, "b": COUNTS}, {n: dfac.Relation("r", "c") for n in "ab"}),
    ),
    "one factor": (
        *(ModelError, "rows and the columns of 'a' are one factor, 'r'"),
        *(TWO, {"a": dfac.Relation("r", "r"), "b": None}),
    ),
    "a label twice": (
        *(DataError, "cell of 'a' have the label c0 more than once"),
        {"a": labelled(COUNTS, ["c0", *LABELS[:-1]], columns="x"), "b": labelled(GAPPY, LABELS)},
    ),
    "no label in common": (
        *(DataError, "no label in common; first ones are 'c0' of 'a', 'C0' of 'b'"),
        {"a": OF_X, "b": labelled(GAPPY, UPPER)},
    ),
    "one of three has no label in common": (
        *(DataError, "cell of 'c' and of 'a' or 'b' have no label in common"),
        {"a": OF_X, "b": labelled(GAPPY, LABELS), "c": labelled(RATED, UPPER, columns="z")},
    ),
    "lengths": (
        *(DataError, "differ in the size of 'row': 24 of 'a', 20 of 'b', and not all have labels"),
        {"a": COUNTS, "b": GAPPY[:20]},
    ),
    "names": (ModelError, "a, x is in one only; name them alike", A, {"x": dfac.Relation()}),
    "a name with a slash": (OptionError, "without a slash, got 'a/b'", {"a/b": COUNTS}),
    "a name that is no text": (OptionError, "without a slash, got 1", {1: COUNTS}),
    "nothing": (OptionError, "takes several matrices", {}),
    "one matrix": (OptionError, "takes several matrices: .* got ndarray", COUNTS),
    "infinity": (DataError, "'b': .*row 3, column 5.*inf", {"a": COUNTS, "b": INFINITE}),
    "a row of NaN": (
        *(DataError, "1 of 24 rows have no observed entry: row 23"),
        {"a": EMPTY_ROW, "b": EMPTY_ROW},
    ),
    "a column of NaN": (
        *(DataError, r"1 of 17 columns have no observed entry: column 16 \(7 of b\)"),
        {"a": COUNTS, "b": np.hstack([GAPPY, np.full((24, 1), np.nan)])},
    ),
    "what is no matrix": (DataError, "'b': .*nowhere", {"a": COUNTS, "b": "nowhere.npy"}),
    "too few blocks": (OptionError, "blocks must be from 3", THREE, None, {"blocks": 2}),
    "too many blocks": (OptionError, "to 16", TWO, None, {"blocks": 17}),
    "weights": (OptionError, "weights cannot be given for several", A, None, {"weights": COUNTS}),
    "weighed blocks": (
        *(OptionError, "'b'"),
        {"a": COUNTS, "b": dfac.as_blocks(COUNTS, weights=COUNTS + 1)},
    ),
    "more sets of rows than columns": (
        *(DataError, "need 3 bands on a side, .* 22 x 2"),
        {n: labelled(COUNTS[own, :1], np.array(LABELS)[own], columns=n) for n, own in SETS},
    ),
    "unstored of nobody": (OptionError, "unstored names 'b'", A, None, {"unstored": {"b": "zero"}}),
    "unstored of dense data": (
        *(OptionError, "'a': unstored is \"missing\", but the input is dense"),
        *(A, None, {"unstored": {"a": "missing"}}),
    ),
    "unstored is no word": (
        *(OptionError, "'a': unstored must be"),
        *({"a": sp.csr_array(COUNTS)}, None, {"unstored": "none"}),
    ),
}

TOLD = DataError, ModelError, OptionError, dfac.errors.StoreError


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_sentence(case):
    kind, words, given, relations, options = (*BAD[case], None, None)[:5]
    assert kind in TOLD
    text = refused(kind, words, join, given, relations, **options or {})
    assert "\n" not in text
    assert len(text) < 400


def test_a_dict_for_one_model_and_a_matrix_for_several():
    for data, model, error, message in (
        (A, dfac.TweedieNMF(2), ModelError, "several matrices go with a coupled model"),
        (COUNTS, dfac.Coupled(2), OptionError, "takes several matrices"),
    ):
        refused(error, message, dfac.sample, data, model, progressbar=False)


def test_missing_cells_are_named_matrix_by_matrix():
    with join(TWO) as data:
        refused(OptionError, r'monitor=\{"a": ', data.missing_cells)
        assert data.part_shape("b") == (24, 7)
        rows, cols = data.cells_of("b", np.array([0, 3]), np.array([6, 1]))
        found = data.values(rows, cols) * np.float32(data.joints[1].unit)
        np.testing.assert_allclose(found, GAPPY[[0, 3], [6, 1]], rtol=1e-5)
