"""Text tables as programs and repositories write them, and files that other libraries read."""

import lzma
import zipfile
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest

import daskfactor as dfac
from daskfactor.data import tables
from daskfactor.data.opening import OF_OTHER_LIBRARIES
from daskfactor.errors import DataError, DataWarning
from tests.data.written import names_of, written
from tests.refusals import refused

pytestmark = pytest.mark.libraries

RATED = [(196, 242, 3), (186, 302, 3), (196, 51, 1), (244, 51, 2)]
DENSE = np.array([[0, 0, 3.0], [1, 3, 0], [2, 0, 0]])  # of users 186, 196, 244
COUNTS = pd.DataFrame([[5, 0, 2], [1, 7, 0]], ["g1", "g2"], ["s1", "s2", "s3"])
OF_COUNTS = COUNTS.to_numpy().tolist(), [*COUNTS.index], [*COUNTS.columns]


def read(path, match=None, **options):
    """Values, labels of rows and labels of columns; check the warning if there has to be one."""
    with nullcontext() if match is None else pytest.warns(DataWarning, match=match):
        data = dfac.as_blocks(path, 1, **options)
    return data.to_numpy().tolist(), *names_of(data)


@pytest.mark.parametrize(
    ("name", "separator"), [("u.data", "\t"), ("ratings.dat", "::"), ("r.csv", ",")]
)
def test_ratings_without_a_header(tmp_path, name, separator):
    lines = [separator.join(map(str, (*line, 881250949))) for line in RATED]
    path = written(tmp_path, name, "\n".join(lines) + "\n")
    values, *labels = read(path, unstored="missing", rows=0, columns=1, values=2)
    assert labels == [[186, 196, 244], [51, 242, 302]]
    np.testing.assert_array_equal(values, np.where(DENSE == 0, np.nan, DENSE))


def test_columns_of_ratings_are_found_again(tmp_path):
    lines = (f"{user}::{item}::{1 + user % 2 / 2}::9" for user in range(6) for item in (5, 7))
    path, store = written(tmp_path, "ratings.dat", "\n".join(lines)), tmp_path / "run.zarr"
    named = {"rows": 0, "columns": 1, "values": 2, "unstored": "missing"}
    assert read(path, **named) == ([[1, 1], [1.5, 1.5]] * 3, [*range(6)], [5, 7])
    data, quiet = dfac.as_blocks(path, 1, **named), {"progressbar": False, "random_seed": 0}
    dfac.sample(data, dfac.TweedieNMF(1), draws=2, tune=2, store=store, **quiet)
    assert dfac.resume(store, draws=1, progressbar=False)["posterior"].sizes["draw"] == 3


def test_names_that_hold_a_blank_and_a_bag_of_words(tmp_path):
    text = "user id,item id,star rating\n1,5,3\n2,5,4\n1,6,1\n2,6,2\n"
    named = {"rows": "user id", "columns": "item id", "unstored": "zero"}
    found = read(written(tmp_path, "r.csv", text), **named)
    assert found == ([[3, 1], [4, 2]], [1, 2], [5, 6])
    text = "3\n6\n4\n1 2 1\n1 5 2\n2 2 7\n3 6 1\n"
    path = written(tmp_path, "docword.kos.txt", text)
    refused(DataError, "rows='document', columns='word', values='count'", dfac.as_blocks, path)
    found = read(path, table=True, unstored="zero")
    assert found == ([[1, 2, 0], [7, 0, 0], [0, 0, 1]], [1, 2, 3], [2, 5, 6])


@pytest.mark.parametrize("separator", [",", "\t"])
def test_comments_before_a_dense_table(tmp_path, separator):
    text = COUNTS.to_csv(sep=separator)
    assert read(written(tmp_path, "v.csv", f"# made by hand\n#\n\n{text}")) == OF_COUNTS
    wrong = written(tmp_path, "w.csv", f"# made by hand\n{text}".replace("7", "x"))
    refused(DataError, "line 4, field 3: 'x' is not a number", dfac.as_blocks, wrong)


def test_a_header_that_numpy_writes_as_a_comment(tmp_path):
    values, _, columns = OF_COUNTS
    np.savetxt(tmp_path / "v.csv", COUNTS, header="s1,s2,s3", delimiter=",")
    assert read(tmp_path / "v.csv", table=False) == (values, None, columns)
    np.savetxt(tmp_path / "v.txt", COUNTS, header="three columns\nof numbers follow here")
    assert read(tmp_path / "v.txt", table=False)[0] == values


def test_counts_of_reads_beside_what_describes_the_genes(tmp_path):
    text = (
        '# Program:featureCounts v2.0.1; Command:"featureCounts" "-a" "x.gtf"\n'
        "Geneid\tChr\tStart\tEnd\tStrand\tLength\ta.bam\tb.bam\n"
        "ENSG1\tchr1;chr1\t10;90\t20;99\t+;+\t19\t5\t0\nENSG2\tchr2\t5\t9\t-\t4\t0\t8\n"
    )
    path, match = written(tmp_path, "counts.txt", text), "columns Chr to Length of .* are left out"
    assert read(path, match) == ([[5, 0], [0, 8]], ["ENSG1", "ENSG2"], ["a.bam", "b.bam"])


@pytest.mark.parametrize("ending", [".xz", ".zip", ".zst"])
def test_packed_tables(tmp_path, ending):
    path, long = (tmp_path / f"{name}.csv{ending}" for name in "vt")
    if ending == ".zst":
        pa = pytest.importorskip("pyarrow")
        with pa.output_stream(path, compression="zstd") as file:
            file.write(COUNTS.to_csv().encode())
    else:
        COUNTS.to_csv(path)
        pd.DataFrame(RATED, columns=["user", "item", "rating"]).to_csv(long, index=False)
        assert read(long, values="rating", unstored="zero")[0] == DENSE.tolist()
    assert read(path) == OF_COUNTS


def test_archives_of_several_files_and_damaged_ones(tmp_path):
    with zipfile.ZipFile(tmp_path / "v.csv.zip", "w") as archive:
        archive.writestr("a.csv", "1,2\n3,4\n")
        archive.writestr("b.csv", "1,2\n3,4\n")
    for name in ("w.csv.zip", "ml.zip"):
        (tmp_path / name).write_bytes(b"PK nothing")
    (tmp_path / "w.csv.xz").write_bytes(lzma.compress(b"1,2\n3,4\n" * 999)[:-20])
    for name, match in (
        ("v.csv.zip", r"holds 2 files \(a.csv, b.csv\); unpack"),
        ("w.csv.zip", "w.csv.zip cannot be read as a table"),
        ("w.csv.xz", "w.csv.xz cannot be read as a table"),
        ("ml.zip", "is compressed, .* unpack it"),
    ):
        refused(DataError, match, dfac.as_blocks, tmp_path / name)


def test_texts_of_other_encodings_and_decimal_commas_are_refused(tmp_path):
    (tmp_path / "v.csv").write_text("a,b\n1,2\n3,4\n", encoding="utf-16")
    refused(DataError, "is UTF-16 text; save it as UTF-8", dfac.as_blocks, tmp_path / "v.csv")
    (tmp_path / "w.csv").write_bytes("g,ä,b\nx,2.5,3\ny,4,5\n".encode("latin-1"))
    match, path = "is not UTF-8 text: .*; save it as UTF-8", tmp_path / "w.csv"
    refused(DataError, match, dfac.as_blocks, path, table=False)
    path = written(tmp_path, "v.csv", "a;b\n1,5;2,25\n3;4,5\n")
    refused(DataError, r"'1,5' is not a number; write numbers with a point", dfac.as_blocks, path)


@pytest.mark.parametrize("ending", OF_OTHER_LIBRARIES)
def test_files_of_other_libraries_are_refused_with_the_call_that_reads_them(tmp_path, ending):
    path, library = written(tmp_path, f"v{ending}", "any"), OF_OTHER_LIBRARIES[ending]
    match = f"not read here; pass what {library.partition('.')[0]}.*{path.name}"
    refused(DataError, match, dfac.as_blocks, path)
    refused(DataError, match, dfac.convert, path, tmp_path / "v.zarr", unstored="zero")


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
def test_a_first_column_of_texts_is_labels_wherever_it_is(tmp_path, kind):
    frame = COUNTS.rename_axis("gene").reset_index().assign(s3=[2.5, 0.5])
    path = tmp_path / f"v.{kind}"
    if kind == "csv":
        frame.to_csv(path, index=False)
    elif kind == "parquet":
        frame.to_parquet(path)
    values, *labels = read(frame if kind == "frame" else path)
    assert (values, labels) == ([[5, 0, 2.5], [1, 7, 0.5]], [["g1", "g2"], ["s1", "s2", "s3"]])


@pytest.mark.parametrize(
    ("text", "names", "values"),
    [
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
    data, rows, columns = read(path, table=False, dtype="float64")
    assert (None if rows is None else rows[0]) == names
    assert data[0] == values
    assert columns is None or columns == ["a", "b"]


def test_a_header_or_a_comment_may_be_long_and_columns_not_read_hold_anything(tmp_path):
    (tmp_path / "t.csv").write_bytes("user,item,n,name\n1,5,2,caf\xe9\n2,5,1,x\n".encode("latin-1"))
    named = {"rows": "user", "columns": "item", "values": "n", "unstored": "zero"}
    assert read(tmp_path / "t.csv", **named)[0] == [[2], [1]]
    names = [f"/a/long/path/of/a/file/{n:06}.bam" for n in range(3000)]
    numbers = "\n".join(",".join(map(str, range(row, 3000 + row))) for row in range(3))
    comments = "# what was run: ä" * 9000 + "\n" + "# more\n" * 2500
    path = written(tmp_path, "v.csv", f"{comments}{','.join(names)}\n{numbers}\n")
    values, *labels = read(path)
    assert (len(values), labels) == (3, [None, names])


def test_entries_between_blanks_of_any_number(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "CSV_BLOCK", 16)
    path = written(tmp_path, "t.txt", "% edges\n1 2 3 \n  1   7   4\n2\t2 1.5\n\n")
    values, *_ = read(path, rows=0, columns=1, values=2, unstored="zero")
    assert values == [[3, 4], [1.5, 0]]
    path = written(tmp_path, "m.dat", 'user::film::n\n1::"Alien: 2::5\n2::Brazil::3\n')
    values, _, films = read(path, rows="user", columns="film", unstored="zero")
    assert (values, films) == ([[5, 0], [0, 3]], ['"Alien: 2', "Brazil"])


def test_numbers_as_objects_are_no_labels():
    numbers = pd.Series([1, 2, 5], dtype=object)
    frame = pd.DataFrame({"a": numbers, "b": [1.5, 2, 3], "c": [1, 2, 9.5]})
    match = "1 column of the DataFrame holds no numbers: a"
    refused(DataError, match, dfac.as_blocks, frame, table=False)
