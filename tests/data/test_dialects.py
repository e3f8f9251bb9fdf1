"""Text tables as programs and repositories write them, and files that other libraries read."""

import lzma
import zipfile

import numpy as np
import pandas as pd
import pytest

import daskfactor as dfac
from daskfactor.data import tables
from daskfactor.data.files import OF_OTHER_LIBRARIES
from daskfactor.errors import DataError, DataWarning
from tests.data.written import names_of, written
from tests.refusals import refused

pytestmark = pytest.mark.libraries

TIME = 881250949
RATED = [(196, 242, 3), (186, 302, 3), (196, 51, 1), (244, 51, 2)]
DENSE = np.array([[0, 0, 3.0], [1, 3, 0], [2, 0, 0]])  # of users 186, 196, 244
COUNTS = pd.DataFrame([[5, 0, 2], [1, 7, 0]], ["g1", "g2"], ["s1", "s2", "s3"])


def labelled(data):
    """Return values and labels of a matrix."""
    return data.to_numpy(), *names_of(data)


@pytest.mark.parametrize(
    ("name", "separator"), [("u.data", "\t"), ("ratings.dat", "::"), ("r.csv", ",")]
)
def test_ratings_without_a_header_are_known_by_their_times(tmp_path, name, separator):
    lines = [separator.join(map(str, (*line, TIME + 9))) for line in RATED]
    path = written(tmp_path, name, "\n".join(lines) + "\n")
    with pytest.warns(DataWarning, match="keys of rows in 'user', of columns in 'item', values in"):
        data = dfac.as_blocks(path, 1, unstored="missing")
    values, users, items = labelled(data)
    assert (users, items) == ([186, 196, 244], [51, 242, 302])
    # Nobody has given a rating where there is none.
    np.testing.assert_array_equal(np.nan_to_num(values), DENSE)
    assert np.isnan(values).sum() == 5


def test_columns_of_ratings_are_found_again(tmp_path):
    lines = (
        f"{user}::{item}::{1 + user % 2 / 2}::{TIME}\n" for user in range(6) for item in (5, 7)
    )
    path = written(tmp_path, "ratings.dat", "".join(lines))
    named = {"rows": "user", "columns": "item", "values": "rating", "unstored": "missing"}
    data = dfac.as_blocks(path, 1, **named)
    values, users, items = labelled(data)
    assert (users, items) == ([*range(6)], [5, 7])
    np.testing.assert_array_equal(values, [[1, 1], [1.5, 1.5]] * 3)
    store = tmp_path / "run.zarr"
    quiet = {"progressbar": False, "random_seed": 0}
    dfac.sample(data, dfac.TweedieNMF(1), draws=2, tune=2, store=store, **quiet)
    assert dfac.resume(store, draws=1, progressbar=False)["posterior"].sizes["draw"] == 3


def test_a_name_may_hold_a_blank(tmp_path):
    path = written(tmp_path, "r.csv", "user id,item id,star rating\n1,5,3\n2,5,4\n1,6,1\n")
    with pytest.warns(DataWarning, match="keys of rows in 'user id', of columns in 'item id'"):
        data = dfac.as_blocks(path, 1, unstored="missing")
    values, users, items = labelled(data)
    assert (users, items) == ([1, 2], [5, 6])
    np.testing.assert_array_equal(values, [[3, 1], [4, np.nan]])


def test_a_bag_of_words(tmp_path):
    path = written(tmp_path, "docword.kos.txt", "3\n6\n4\n1 2 1\n1 5 2\n2 2 7\n3 6 1\n")
    with pytest.warns(DataWarning, match="keys of rows in 'document', of columns in 'word'"):
        data = dfac.as_blocks(path, 1, unstored="zero")
    values, documents, words = labelled(data)
    assert (documents, words) == ([1, 2, 3], [2, 5, 6])
    np.testing.assert_array_equal(values, [[1, 2, 0], [7, 0, 0], [0, 0, 1]])


@pytest.mark.parametrize("separator", [",", "\t"])
def test_comments_before_a_dense_table(tmp_path, separator):
    text = COUNTS.to_csv(sep=separator)
    path = written(tmp_path, "v.csv", f"# made by hand\n#\n\n{text}")
    values, rows, columns = labelled(dfac.as_blocks(path, 1))
    assert (rows, columns) == (["g1", "g2"], ["s1", "s2", "s3"])
    np.testing.assert_array_equal(values, COUNTS)
    wrong = written(tmp_path, "w.csv", f"# made by hand\n{text}".replace("7", "x"))
    refused(DataError, "line 4, field 3: 'x' is no number", dfac.as_blocks, wrong)


def test_a_header_that_numpy_writes_as_a_comment(tmp_path):
    np.savetxt(tmp_path / "v.csv", COUNTS, header="s1,s2,s3", delimiter=",")
    values, rows, columns = labelled(dfac.as_blocks(tmp_path / "v.csv", 1))
    assert (rows, columns) == (None, ["s1", "s2", "s3"])
    np.testing.assert_array_equal(values, COUNTS)
    np.savetxt(tmp_path / "v.txt", COUNTS, header="three columns\nof numbers follow here")
    np.testing.assert_array_equal(dfac.as_blocks(tmp_path / "v.txt", 1).to_numpy(), COUNTS)


def test_counts_of_reads_beside_what_describes_the_genes(tmp_path):
    text = (
        '# Program:featureCounts v2.0.1; Command:"featureCounts" "-a" "x.gtf"\n'
        "Geneid\tChr\tStart\tEnd\tStrand\tLength\ta.bam\tb.bam\n"
        "ENSG1\tchr1;chr1\t10;90\t20;99\t+;+\t19\t5\t0\nENSG2\tchr2\t5\t9\t-\t4\t0\t8\n"
    )
    with pytest.warns(DataWarning, match="columns Chr to Length of .* are left out"):
        data = dfac.as_blocks(written(tmp_path, "counts.txt", text), 1)
    values, genes, samples = labelled(data)
    assert (genes, samples) == (["ENSG1", "ENSG2"], ["a.bam", "b.bam"])
    np.testing.assert_array_equal(values, [[5, 0], [0, 8]])


def test_decimal_commas_are_told(tmp_path):
    path = written(tmp_path, "v.csv", "a;b\n1,5;2,25\n3;4,5\n")
    refused(DataError, r"'1,5' is no number; write numbers with a point", dfac.as_blocks, path)


@pytest.mark.parametrize("ending", [".xz", ".zip", ".zst"])
def test_packed_tables(tmp_path, ending):
    path = tmp_path / f"v.csv{ending}"
    if ending == ".zst":
        pa = pytest.importorskip("pyarrow")
        with pa.output_stream(path, compression="zstd") as file:
            file.write(COUNTS.to_csv().encode())
    else:
        COUNTS.to_csv(path)
    values, rows, _ = labelled(dfac.as_blocks(path, 1))
    assert rows == ["g1", "g2"]
    np.testing.assert_array_equal(values, COUNTS)
    long = tmp_path / f"t.csv{ending}"
    if ending != ".zst":
        pd.DataFrame(RATED, columns=["user", "item", "rating"]).to_csv(long, index=False)
        found = dfac.as_blocks(long, 1, values="rating", unstored="zero").to_numpy()
        np.testing.assert_array_equal(found, DENSE)


def test_archives_of_several_files_and_damaged_ones(tmp_path):
    with zipfile.ZipFile(tmp_path / "v.csv.zip", "w") as archive:
        archive.writestr("a.csv", "1,2\n3,4\n")
        archive.writestr("b.csv", "1,2\n3,4\n")
    refused(
        DataError, r"holds 2 files \(a.csv, b.csv\); unpack", dfac.as_blocks, tmp_path / "v.csv.zip"
    )
    (tmp_path / "w.csv.zip").write_bytes(b"PK nothing")
    refused(
        DataError, "w.csv.zip cannot be read as a table", dfac.as_blocks, tmp_path / "w.csv.zip"
    )
    (tmp_path / "w.csv.xz").write_bytes(lzma.compress(b"1,2\n3,4\n" * 999)[:-20])
    refused(DataError, "w.csv.xz cannot be read as a table", dfac.as_blocks, tmp_path / "w.csv.xz")
    (tmp_path / "ml.zip").write_bytes(b"PK nothing")
    refused(DataError, "is compressed, .* unpack it", dfac.as_blocks, tmp_path / "ml.zip")


def test_texts_of_other_encodings(tmp_path):
    (tmp_path / "v.csv").write_text("a,b\n1,2\n3,4\n", encoding="utf-16")
    refused(DataError, "is UTF-16 text; save it as UTF-8", dfac.as_blocks, tmp_path / "v.csv")
    (tmp_path / "w.csv").write_bytes("g,ä,b\nx,2.5,3\ny,4,5\n".encode("latin-1"))
    refused(DataError, "is no UTF-8 text: .*; save it as UTF-8", dfac.as_blocks, tmp_path / "w.csv")


@pytest.mark.parametrize("ending", OF_OTHER_LIBRARIES)
def test_files_of_other_libraries_are_refused_with_the_call_that_reads_them(tmp_path, ending):
    path = written(tmp_path, f"v{ending}", "anything")
    library = OF_OTHER_LIBRARIES[ending].partition(".")[0]
    for verb in (
        dfac.as_blocks,
        lambda own: dfac.convert(own, tmp_path / "v.zarr", unstored="zero"),
    ):
        refused(DataError, f"not read here; pass what {library}.*{path.name}", verb, path)


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_a_first_column_of_texts_is_labels_wherever_it_is(tmp_path, kind):
    frame = COUNTS.rename_axis("gene").reset_index().assign(s3=[2.5, 0.5])
    path = tmp_path / f"v.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "parquet":
        frame.to_parquet(path)
    values, rows, columns = labelled(dfac.as_blocks(frame if kind == "frame" else path, 1))
    assert (rows, columns) == (["g1", "g2"], ["s1", "s2", "s3"])
    np.testing.assert_array_equal(values, [[5, 0, 2.5], [1, 7, 0.5]])


NOT_RATINGS = "1,3,7,734003200\n1,4,9,1610612736\n2,3,8,524288000\n"


@pytest.mark.parametrize(
    ("text", "names", "values"),
    [
        pytest.param(NOT_RATINGS, None, [1, 3, 7, 734003200], id="sizes are no times"),
        pytest.param(f"1,2,3,{TIME}\n4,5,999,{TIME}\n", None, [1, 2, 3, TIME], id="nor these"),
        pytest.param("fe80::1,5,6,7\nfe80::2,1,2,3\n", "fe80::1", [5, 6, 7], id="colons in names"),
        pytest.param("k;p,5,0,3\nk;q,1,0,3\n", "k;p", [5, 0, 3], id="semicolons in names"),
        pytest.param("#me,1,2.5\n#you,3,4\nfoo,5,6\n", "#me", [1, 2.5], id="names like comments"),
        pytest.param("#me,1,2.5\n#you,3,4\n", "#me", [1, 2.5], id="all of them"),
        pytest.param("# in mm\n1.5,2\n3,4\n", None, [1.5, 2], id="a comment of two words"),
        pytest.param("a b\nx 1 2\ny 3 4\n", "x", [1, 2], id="a header without its corner"),
        pytest.param("1.5  2 \n  3   4\n", None, [1.5, 2], id="aligned by blanks"),
        pytest.param("4\n1\n2\n1 2 3\n", None, None, id="no bag of words"),
    ],
)
def test_what_looks_like_something_else(tmp_path, text, names, values):
    path = written(tmp_path, "v.csv", text)
    if values is None:
        refused(DataError, "line 4 has 3 fields, the lines before it 1", dfac.as_blocks, path)
        return
    data, rows, columns = labelled(dfac.as_blocks(path, 1, table=False, dtype="float64"))
    assert (None if rows is None else rows[0]) == names
    np.testing.assert_array_equal(data[0], values)
    assert columns is None or columns == ["a", "b"]
    if "." not in text:
        dfac.as_blocks(path, 1)


def test_a_header_or_a_comment_may_be_long(tmp_path):
    names = [f"/a/long/path/of/a/file/{n:06}.bam" for n in range(3000)]
    numbers = "\n".join(",".join(map(str, range(row, 3000 + row))) for row in range(3))
    comments = "# what was run: ä" * 9000 + "\n" + "# more\n" * 2500
    path = written(tmp_path, "v.csv", f"{comments}{','.join(names)}\n{numbers}\n")
    values, rows, columns = labelled(dfac.as_blocks(path, 1))
    assert (rows, columns) == (None, names)
    assert values.shape == (3, 3000)


def test_columns_that_are_not_read_may_hold_anything(tmp_path):
    (tmp_path / "t.csv").write_bytes("user,item,n,name\n1,5,2,caf\xe9\n2,5,1,x\n".encode("latin-1"))
    named = {"rows": "user", "columns": "item", "values": "n", "unstored": "zero"}
    np.testing.assert_array_equal(
        dfac.as_blocks(tmp_path / "t.csv", 1, **named).to_numpy(), [[2], [1]]
    )


def test_entries_between_blanks_of_any_number(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CSV_BLOCK", 16)
    path = written(tmp_path, "t.txt", "% edges\n1 2 3 \n  1   7   4\n2\t2 1.5\n\n")
    data = dfac.as_blocks(path, 1, rows=0, columns=1, values=2, unstored="zero")
    np.testing.assert_array_equal(data.to_numpy(), [[3, 4], [1.5, 0]])
    path = written(tmp_path, "m.dat", 'user::film::n\n1::"Alien: 2::5\n2::Brazil::3\n')
    data = dfac.as_blocks(path, 1, rows="user", columns="film", unstored="zero")
    assert labelled(data)[2] == ['"Alien: 2', "Brazil"]
    np.testing.assert_array_equal(data.to_numpy(), [[5, 0], [0, 3]])


def test_numbers_as_objects_are_no_labels():
    frame = pd.DataFrame(
        {"a": pd.Series([1, 2, 5], dtype=object), "b": [1.5, 2, 3], "c": [1, 2, 9.5]}
    )
    refused(DataError, "1 column of the DataFrame holds no numbers: a", dfac.as_blocks, frame)
