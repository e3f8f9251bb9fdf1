"""AnnData of every form, object and file: the same matrix under the same names."""

import warnings

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from daskfactor.data import adapters, coo
from daskfactor.data.annotated import Compressed
from daskfactor.errors import DataError, DataWarning, OptionError
from tests.data.written import names_of
from tests.refusals import refused

pytestmark = pytest.mark.libraries

RNG = np.random.default_rng(3)
COUNTS = RNG.poisson(RNG.gamma(1, 1, (40, 3)) @ RNG.gamma(1, 1, (3, 30))).astype("f4")
CELLS, GENES = [f"cell {i}" for i in range(40)], [f"gene {j}" for j in range(30)]
MASK = RNG.random(30) < 0.5
CHOSEN, NULLABLE = np.array(GENES)[MASK].tolist(), pd.array(MASK, "boolean")
# Which matrix, and what it is of the counts.
LAYERS = {None: 1, "columns": 2, "dense": 3, "raw": 4}
FORMS = ("memory", "view", "backed", "h5ad", "zarr 2", "zarr 3", "lazy")


def annotated():
    obs = pd.DataFrame({"kind": pd.Categorical(list("ab") * 20)}, index=CELLS)
    var = pd.DataFrame({"variable": MASK, "mean": COUNTS.mean(0)}, index=GENES)
    made = anndata.AnnData(sparse.csr_matrix(4 * COUNTS), obs, var)
    made.raw = made.copy()
    made.X = sparse.csr_matrix(COUNTS)
    made.layers["columns"] = sparse.csc_matrix(2 * COUNTS)
    made.layers["dense"] = 3 * COUNTS
    return made


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """One AnnData in all the forms that it can be passed in."""
    folder, made = tmp_path_factory.mktemp("annotated"), annotated()
    made.write_h5ad(folder / "a.h5ad")
    with warnings.catch_warnings(action="ignore"):  # of the format of zarr that is the default
        for version in (2, 3):
            with anndata.settings.override(zarr_write_format=version):
                made.write_zarr(folder / f"{version}.zarr")
        backed = anndata.read_h5ad(folder / "a.h5ad", backed="r")
        yield {
            "memory": made,
            "view": made[:],
            "backed": backed,
            "h5ad": folder / "a.h5ad",
            "zarr 2": str(folder / "2.zarr"),
            "zarr 3": folder / "3.zarr",
            "lazy": anndata.experimental.read_lazy(folder / "3.zarr"),
        }
        backed.file.close()


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_matrix(forms, form, layer):
    if form == "lazy" and layer == "raw":
        pytest.skip("anndata reads no raw lazily")
    masks = "variable", MASK, MASK.tolist(), pd.Series(MASK, GENES), pd.Series(MASK), NULLABLE
    for mask in (None, masks[(FORMS.index(form) + [*LAYERS].index(layer)) % 6]):
        data = dfac.as_blocks(forms[form], 3, layer=layer, mask_var=mask)
        kept = slice(None) if mask is None else MASK
        np.testing.assert_array_equal(data.to_numpy(), LAYERS[layer] * COUNTS[:, kept])
        assert data.is_sparse == (layer != "dense")
        assert names_of(data) == [CELLS, GENES if mask is None else CHOSEN]
        assert (data.source.kind, data.source.layer) == ("anndata", layer)
        lazily = form not in ("memory", "view", "backed") or (form, layer) == ("backed", None)
        assert data.source.lazy == lazily or (form, layer) == ("backed", "raw")


def test_what_a_mask_leaves_out_does_not_change_the_bits(forms):
    wanted = dfac.as_blocks(anndata.AnnData(sparse.csr_matrix(COUNTS[:, MASK])), 3)
    for form in FORMS:
        found = dfac.as_blocks(forms[form], wanted.grid, mask_var="variable")
        assert found.fingerprint == wanted.fingerprint


def test_dense_regions_are_read_a_few_rows_at_a_time_and_may_be_masked_whole(monkeypatch):
    monkeypatch.setattr(adapters, "DENSE_PART", 1)
    monkeypatch.setattr(adapters, "MIN_LINES", 7)
    for chunks in (None, ((25, 15), (4, 20, 6))):
        read = []

        def part(rows, cols, read=read):
            read.append((rows.stop - rows.start, cols.stop - cols.start))
            return COUNTS[rows, cols]

        info = adapters.SourceInfo("test", lazy=True)
        source = adapters.Source(info, COUNTS.shape, chunks=chunks, read=part)
        source = adapters.masked(source, np.flatnonzero(MASK))
        found = source.read(slice(0, 40), slice(2, 9))
        np.testing.assert_array_equal(found, COUNTS[:, np.flatnonzero(MASK)[2:9]])
        assert max(rows for rows, _ in read) == (7 if chunks is None else 25)
        if chunks is not None:
            assert (source.chunks[0], sum(source.chunks[1])) == ((25, 15), MASK.sum())
    info, chunks = adapters.SourceInfo("test"), ((2,), (3, 3))
    source = adapters.Source(info, (2, 6), chunks=chunks, read=lambda *at: COUNTS[at])
    assert adapters.masked(source, np.array([4, 5])).chunks == ((2,), (2,))


class Spied:
    """An array that notes how much of it is read at a time."""

    def __init__(self, values):
        self.values, self.most = values, 0
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, part):
        found = self.values[part]
        self.most = max(self.most, found.size)
        return found


def test_sparse_files_are_read_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr(coo, "PIECE", 50)
    matrix = sparse.csr_matrix(COUNTS)
    data, indices = Spied(matrix.data), Spied(matrix.indices)
    file = Compressed("csr", matrix.shape, data, indices, matrix.indptr)
    found = dfac.as_blocks(file, 3, unstored="zero")
    np.testing.assert_array_equal(found.to_numpy(), COUNTS)
    assert data.most == indices.most == 50


def put(parent, name, kind, value=None, version="0.2.0", **more):
    """A group or an array, with what anndata tells of it."""
    if value is None:
        made = parent.create_group(name)
    else:
        text = h5py.string_dtype() if value.dtype == object else None
        made = parent.create_dataset(name, data=value, dtype=text)
    made.attrs.update({"encoding-type": kind, "encoding-version": version} | more)
    return made


def as_written(path, matrix, names):
    """Write counts as versions of anndata do, which differ in how they write names."""
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        group = put(file, "X", f"{matrix.format}_matrix", version="0.1.0", shape=matrix.shape)
        for part in ("data", "indices", "indptr"):
            group[part] = getattr(matrix, part)
        for side, labels in (("obs", CELLS), ("var", GENES)):
            frame = put(file, side, "dataframe", _index="_index")
            frame.attrs.create("column-order", np.array([], h5py.string_dtype()))
            write_names(frame, np.array(labels, object), names)


def write_names(frame, labels, names):
    if names == "string-array":
        put(frame, "_index", names, labels)
    elif names == "categorical":
        group, order = put(frame, "_index", names, ordered=False), np.argsort(labels)
        put(group, "categories", "string-array", labels[order])
        put(group, "codes", "array", np.argsort(order).astype("i1"))
    else:  # of pandas 3
        group = put(frame, "_index", names, version="0.1.0", **{"na-value": "NaN"})
        put(group, "values", "string-array", labels)
        put(group, "mask", "array", np.zeros(len(labels), bool))


@pytest.mark.parametrize("names", ["string-array", "nullable-string-array", "categorical"])
@pytest.mark.parametrize(
    ("format_", "values", "index"),
    [("csr", "u2", "u2"), ("csr", "i8", "i8"), ("csc", "f8", "i4"), ("csc", "?", "i8")],
)
def test_files_of_other_versions(tmp_path, names, format_, values, index):
    counts = COUNTS.astype(values)
    matrix = sparse.csr_matrix(counts).asformat(format_)
    for start, stop in zip(matrix.indptr, matrix.indptr[1:], strict=False):  # unsorted
        for own in (matrix.indices, matrix.data):
            own[start:stop] = own[start:stop][::-1].copy()
    matrix.indices, matrix.indptr = matrix.indices.astype(index), matrix.indptr.astype(index)
    as_written(tmp_path / "a.h5ad", matrix, names)
    data = dfac.as_blocks(tmp_path / "a.h5ad", 3, mask_var=MASK)
    np.testing.assert_array_equal(data.to_numpy(), counts[:, MASK])
    assert names_of(data) == [CELLS, CHOSEN]


def test_files_that_are_damaged_are_refused(tmp_path):
    matrix, path = sparse.csr_matrix(COUNTS), tmp_path / "a.h5ad"
    matrix.indptr[3] = 10**6
    as_written(path, matrix, "string-array")
    refused(DataError, "matrix is damaged: indptr falls after position 3", dfac.as_blocks, path, 3)
    with h5py.File(path, "a") as file:
        file["X"].attrs["encoding-type"] = "dataframe"
    refused(DataError, r"X of .*a\.h5ad is stored as dataframe, which is no", dfac.as_blocks, path)
    with h5py.File(path, "a") as file:
        del file["X"]
        file["obs/_index"].attrs["encoding-type"] = "of-the-future"
        file["X"] = COUNTS
    (tmp_path / "b.h5ad").write_text("nothing")
    for name, message in (
        ("a", r"obs/_index of .* cannot be read by the anndata that is"),
        ("b", r"b\.h5ad is not a readable AnnData file"),
        ("c", r"c\.h5ad does not exist"),
    ):
        refused(DataError, message, dfac.as_blocks, tmp_path / f"{name}.h5ad")


@pytest.mark.parametrize("form", ["memory", "h5ad", "zarr 3"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": "count"}, r"has no layer 'count'; its layers are: columns, dense"),
        ({"mask_var": "hv"}, r"has no column 'hv' in var \(its columns: variable, mean"),
        ({"mask_var": "mean"}, "'mean' of var in .* must be one boolean .* float32"),
        ({"mask_var": MASK[:5]}, r"mask_var must be .* 30 variables, .* shape \(5,\)"),
        ({"mask_var": [1] * 30}, r"must be one boolean .* dtype int64 .*astype\(bool\)"),
        ({"mask_var": [False] * 30}, "selects none of the 30 variables"),
        ({"mask_var": pd.Series([True, None] * 15, dtype="boolean")}, "has missing values; fill"),
        ({"mask_var": pd.Series(MASK, GENES[::-1])}, "a Series with other names"),
    ],
)
def test_sentences(forms, form, options, message):
    refused(DataError, message, dfac.as_blocks, forms[form], **options)


def test_layers_and_masks_belong_to_annotated_data(tmp_path):
    match = r"layer is for AnnData, .*leave it out"
    for data in (COUNTS, dfac.as_blocks(COUNTS), xr.DataArray(COUNTS), str(tmp_path)):
        refused(OptionError, match, dfac.as_blocks, data, layer="counts")
    refused(OptionError, "mask_var is for AnnData", dfac.as_blocks, COUNTS, mask_var="variable")
    refused(OptionError, match, dfac.hold_out, dfac.as_blocks(COUNTS), layer="counts")
    place, given = tmp_path / "x.zarr", sparse.csr_array(COUNTS)
    refused(OptionError, match, dfac.convert, given, place, layer="x", progressbar=False)
    refused(DataError, "has no layer 'x'", dfac.sample, annotated(), dfac.TweedieNMF(2), layer="x")


def test_a_part_of_an_object_is_read_and_one_without_a_matrix_is_refused():
    made = annotated()
    part = dfac.as_blocks(made[10:30, [3, 5, 7]])
    np.testing.assert_array_equal(part.to_numpy(), COUNTS[10:30, [3, 5, 7]])
    assert part.labels.cell(0, 1) == "row 0 (cell 10), column 1 (gene 5)"
    assert dfac.as_blocks(made.layers["columns"], unstored="zero").labels.row_dim == "row"
    del made.X
    match = r"has no X; set it, or choose a layer with layer= \(it has columns"
    refused(DataError, match, dfac.as_blocks, made)


def test_a_run_finds_its_layer_and_its_variables_again(forms, tmp_path):
    options = {"tune": 3, "random_seed": 0, "progressbar": False}
    chosen = {"layer": "columns", "mask_var": "variable"}
    model = dfac.TweedieNMF(2, dispersion=1.0)
    data = dfac.as_blocks(forms["h5ad"], 2, **chosen)
    whole = dfac.sample(data, model, dfac.PSGLD(), draws=6, **options)
    for form in ("h5ad", "memory"):
        store = str(tmp_path / f"{form}.zarr")
        data = dfac.as_blocks(forms[form], 2, **chosen)
        dfac.sample(data, model, dfac.PSGLD(), draws=3, store=store, **options)
        given = {} if form == "h5ad" else {"V": forms[form]}
        trace = dfac.resume(store, draws=3, progressbar=False, **given)
        assert trace["posterior"]["W"].equals(whole["posterior"]["W"])
        assert trace["posterior"]["var"].values.tolist() == CHOSEN


def test_cells_held_out_of_counts_are_any_cells():
    held = dfac.hold_out(annotated(), 0.1, random_seed=0)
    assert (held.values == 0).any()
    assert np.isnan(held.train.X.data).sum() == held.values.size == 120
    blocks = dfac.as_blocks(annotated(), layer="columns", mask_var="variable")
    held = dfac.hold_out(blocks, 0.1, random_seed=0)
    assert held.train.labels.col_coords["var"].tolist() == CHOSEN
    np.testing.assert_array_equal(held.values, 2 * COUNTS[:, MASK][held.cells])


def test_ratings_in_a_file_stay_ratings(tmp_path):
    data = dfac.as_blocks(sparse.csr_matrix(COUNTS), unstored="missing")
    dfac.export(data, tmp_path / "ratings.h5ad")
    again = dfac.as_blocks(tmp_path / "ratings.h5ad")
    assert (again.unstored, again.n_missing) == ("missing", data.n_missing)
    held = dfac.hold_out(anndata.read_h5ad(tmp_path / "ratings.h5ad"), 0.1, random_seed=0)
    assert (held.values > 0).all()
    assert dfac.as_blocks(held.train, allow_empty=True).unstored == "missing"


def test_conversion_takes_layers_and_variables(forms, tmp_path):
    for form in ("memory", "h5ad", "zarr 2", "zarr 3"):
        store = tmp_path / f"{form}.zarr"
        dfac.convert(forms[form], store, layer="columns", mask_var="variable", progressbar=False)
        data = dfac.as_blocks(store)
        np.testing.assert_array_equal(data.to_numpy(), 2 * COUNTS[:, MASK])
        assert names_of(data) == [CELLS, CHOSEN]
    for layer, message in (
        ("dense", "input is dense, and convert is for sparse"),
        ("x", "has no layer 'x'; its layers are: columns, dense"),
    ):
        refused(DataError, message, dfac.convert, forms["h5ad"], tmp_path / "x.zarr", layer=layer)


def test_costs_are_known_without_reading(forms):
    costs = [dfac.estimate_cost(forms[form], dfac.TweedieNMF(2)) for form in ("h5ad", "backed")]
    assert costs[0] == costs[1]


@pytest.mark.quick("asarray")
@pytest.mark.parametrize("form", [np.asarray, sparse.csr_matrix])
def test_counts_are_asked_for_where_values_of_an_annotated_matrix_are_none(form):
    made = anndata.AnnData(form(np.log1p(COUNTS)), layers={"counts": form(COUNTS)})
    run = {"draws": 1, "tune": 1, "random_seed": 0, "progressbar": False}
    with pytest.warns(DataWarning, match=r"X of the AnnData holds fractions, .* beta=1 .*counts"):
        dfac.sample(made, dfac.TweedieNMF(1), **run)
    with warnings.catch_warnings(action="error", category=DataWarning):
        dfac.sample(made, dfac.TweedieNMF(1, dispersion=1.0), layer="counts", **run)
        dfac.sample(made, dfac.TweedieNMF(1, beta=2.0), **run)
        dfac.sample(np.log1p(COUNTS), dfac.TweedieNMF(1), **run)
