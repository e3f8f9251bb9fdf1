"""Files and folders appear whole, and only under a name that is free or may be replaced."""

import contextlib
import itertools
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from scipy import sparse

import daskfactor as dfac
from daskfactor import publish
from daskfactor.errors import StoreError
from daskfactor.plots.canvas import new_figure, save
from daskfactor.publish import Publication, publishing, recover
from daskfactor.runs.backends import LocalBackend
from daskfactor.runs.store import RunStore
from tests.cli.shell import fails, succeed
from tests.refusals import refused
from tests.results.runs import ATTRS, create_store, factors, fill, make_spec
from tests.results.writer import SERVER, start
from tests.tiers import FULL

V = np.random.default_rng(0).poisson(3.0, (12, 9)).astype("f4")
COUNTS = sparse.csr_array(V)
QUICK = {"draws": 6, "tune": 4, "random_seed": 1, "progressbar": False}


# -- killed at any moment ------------------------------------------------------------------


class Killed(BaseException):
    pass


STEPS = ("mkdir", "rename", "replace", "link", "unlink", "rmdir")
"""System calls that change what has which name."""


class Death:
    """Has a process die before or after its n-th call: none that comes later does anything."""

    def __init__(self, patch, fatal, before):
        self.left, self.dead, self.before = fatal, False, before
        for name in STEPS:
            patch.setattr(os, name, self.deadly(getattr(os, name)))
        patch.setattr(publish, "_exchange", self.deadly(publish._exchange))

    def deadly(self, real):
        def call(*args, **options):
            self.dead |= self.before and self.left == 0
            if not self.dead:
                found = real(*args, **options)
                self.left -= 1
                self.dead |= not self.before and self.left < 0
            if self.dead:
                raise Killed
            return found

        return call


def word_at(path):
    """What a file or folder of this test holds; a folder is whole if it has both of its files."""
    if path.is_dir():
        texts = {(path / name).read_text() for name in ("a", "b")}
        assert len(texts) == 1
        return texts.pop()
    return path.read_text() if path.exists() else None


def make(path, word, folder):
    if folder:
        path.mkdir()
        for name in ("a", "b"):
            (path / name).write_text(word)
    else:
        path.write_text(word)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("kind", ["file", "folder", "folder without exchange"])
@pytest.mark.parametrize("old", ["old", None])
def test_a_kill_at_any_step_leaves_the_old_or_the_new_one(tmp_path, monkeypatch, kind, old, before):
    folder, seen, locks, hold = kind != "file", [], [], publish.Lock.__init__

    def held(self, *args):
        locks.append(self)
        hold(self, *args)

    monkeypatch.setattr(publish.Lock, "__init__", held)
    if kind == "folder without exchange":
        monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    for fatal in itertools.count():
        target = tmp_path / f"{fatal}" / "x"
        target.parent.mkdir()
        if old is not None:
            make(target, old, folder)
        with monkeypatch.context() as patch:
            death = Death(patch, fatal, before)
            try:
                with publishing(target, True, lambda path: True) as draft:
                    make(draft, "new", folder)
            except Killed:
                pass
        for lock in locks:
            lock.release()  # as the system does
        found = word_at(target)
        if kind != "folder without exchange":
            assert found in (old, "new")  # at every moment
        recover(target)
        assert word_at(target) in (old, "new")
        assert {path.name for path in target.parent.iterdir()} <= {"x"}
        with publishing(target, True, lambda path: True) as draft:
            make(draft, "newest", folder)
        assert word_at(target) == "newest"
        assert [path.name for path in target.parent.iterdir()] == ["x"]
        seen.append(found)
        if not death.dead:
            break
    assert len(seen) > 5
    assert {old, "new"} <= set(seen)
    assert seen[-1] == "new"


@pytest.mark.parametrize("lasting", [False, True])
def test_an_interruption_puts_back_what_was_set_aside(tmp_path, monkeypatch, lasting):
    make(target := tmp_path / "x", "old", folder=True)
    monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    rename = Path.rename

    def failing(self, other):
        if other == target and (lasting or word_at(self) == "new"):
            raise OSError(5, "Input/output error")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", failing)
    with (
        pytest.raises(OSError, match="Input/output"),
        publishing(target, True, lambda path: True) as draft,
    ):
        make(draft, "new", folder=True)
    monkeypatch.undo()
    assert word_at(target) == (None if lasting else "old")
    recover(target)
    assert word_at(target) == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


# -- what is in the way --------------------------------------------------------------------


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("there", [False, True])
def test_what_appears_meanwhile_is_kept(tmp_path, folder, there):
    target = tmp_path / "x"
    with Publication(target) as publication:
        make(publication.draft, "new", folder)
        make(target, "of another", there)
        refused(StoreError, "exists already", publication.publish)
    assert word_at(target) == "of another"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("step", ["open", "mkdir"])
def test_a_name_that_cannot_be_reserved_leaves_nothing(tmp_path, monkeypatch, step):
    real, last = getattr(os, step), {"open": "lock", "mkdir": "new"}[step]

    def full(path, *args):
        if Path(path).name == last:
            raise OSError(28, "No space left on device", str(path))
        return real(path, *args)

    monkeypatch.setattr(os, step, full)
    refused(OSError, r"No space left on device: '.*/x'", Publication, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_one_process_makes_a_name_at_a_time(tmp_path):
    target = tmp_path / "x"
    with Publication(target), pytest.raises(StoreError, match="written by this process"):
        Publication(target)
    process, pipe = start(reserve_and_wait, str(target))
    assert pipe.recv() == "reserved"
    refused(StoreError, rf"x is being written by process {process.pid} on", Publication, target)
    process.kill()
    process.join()
    with publishing(target) as draft:
        draft.write_text("after a dead process")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def reserve_and_wait(path, pipe):
    with Publication(path) as publication:
        publication.draft.write_text("half")
        pipe.send("reserved")
        pipe.recv()


def test_what_a_link_points_at_is_replaced_and_not_the_link(tmp_path):
    real, link = tmp_path / "big disk" / "run.zarr", tmp_path / "run.zarr"
    link.symlink_to(real)
    dfac.sample(V, dfac.TweedieNMF(2), store=real, **QUICK)
    found = dfac.sample(V, dfac.TweedieNMF(1), store=link, overwrite=True, **QUICK)
    assert found["posterior"].sizes["component"] == 1
    options = {"unstored": "zero", "progressbar": False}
    dfac.convert(COUNTS, tmp_path / "big disk" / "v.zarr", **options)
    (tmp_path / "v.zarr").symlink_to(tmp_path / "big disk" / "v.zarr")
    dfac.convert(2 * COUNTS, tmp_path / "v.zarr", overwrite=True, **options)
    for name in ("run.zarr", "v.zarr"):
        assert (tmp_path / name).is_symlink()
        assert sorted(path.name for path in real.parent.iterdir()) == ["run.zarr", "v.zarr"]
    assert dfac.open_run(real)["posterior"].sizes["component"] == 1
    assert dfac.as_blocks(tmp_path / "big disk" / "v.zarr").total == 2 * COUNTS.sum()


# -- runs ----------------------------------------------------------------------------------


@pytest.mark.quick("True")
@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_while_a_run_is_replaced_leaves_one_of_both(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(publish, "_exchange", lambda one, other: False)
    path, seen, fatal = tmp_path / "run.zarr", [], 0
    spec = make_spec(chains=1, warmup_draws=0, monitor_rows=None, monitor_columns=None)
    while True:
        with create_store(path, spec, overwrite=True) as store:
            store.write_draws(0, 0, *factors(0, 0, 3))
            store.checkpoint({}, {"draws": 3})
        store = create_store(path, spec, overwrite=True)
        store.write_draws(0, 0, *factors(1, 0, 5))
        with monkeypatch.context() as patch:
            death = Death(patch, fatal, before=True)
            with contextlib.suppress(Killed):
                store.checkpoint({}, {"draws": 5})
        place = store._place
        for lock in (place._lock, *held_by(place._reservation)):
            lock.release()  # as the system does
        W = dfac.open_run(path)["posterior"]["W"]
        draws = W.sizes["draw"]
        np.testing.assert_array_equal(W[0], factors(int(draws == 5), 0, draws)[0])
        seen.append(draws)
        if not death.dead:
            break
        fatal += 1 if draws == 3 else 40  # the old one goes file by file
    assert seen == sorted(seen)
    assert set(seen) == {3, 5}
    assert [one.name for one in tmp_path.iterdir()] == ["run.zarr"]


def held_by(reservation):
    """Locks that a reservation has not given up."""
    publication = reservation and reservation._publication
    found = [reservation and reservation._replaced, publication and publication._lock]
    return [lock for lock in found if lock is not None]


def test_what_a_kill_had_set_aside_is_put_back_when_it_is_opened(tmp_path):
    dfac.sample(V, dfac.TweedieNMF(2), store=tmp_path / "run.zarr", **QUICK)
    dfac.convert(COUNTS, tmp_path / "v.zarr", unstored="zero", progressbar=False)
    for name in ("run.zarr", "v.zarr"):
        aside = tmp_path / f".{name}.partial"
        aside.mkdir()
        (tmp_path / name).rename(aside / "old")
    assert dfac.open_run(tmp_path / "run.zarr")["posterior"].sizes["draw"] == 6
    assert dfac.as_blocks(tmp_path / "v.zarr").total == COUNTS.sum()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run.zarr", "v.zarr"]


@pytest.mark.quick("KeyboardInterrupt", "RuntimeError")
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, RuntimeError])
def test_a_run_stays_until_the_one_that_replaces_it_has_a_checkpoint(tmp_path, monkeypatch, error):
    monkeypatch.setattr("daskfactor.inference.setting.LONGEST_SEGMENT", 2)
    path = tmp_path / "run.zarr"
    before = dfac.sample(V, dfac.TweedieNMF(2), store=path, **QUICK).load()
    save, made = RunStore.checkpoint, []

    def fail(self, *args):
        if len(made) == fatal:
            raise error
        save(self, *args)
        made.append(1)
        assert [one.name for one in tmp_path.iterdir()] == ["run.zarr"]

    monkeypatch.setattr(RunStore, "checkpoint", fail)
    options = QUICK | {"store": path, "overwrite": True, "random_seed": 2}
    fatal = 0
    refused(error, None, dfac.sample, V, dfac.TweedieNMF(2), **options)
    np.testing.assert_array_equal(dfac.open_run(path)["posterior"]["W"], before["posterior"]["W"])
    assert [one.name for one in tmp_path.iterdir()] == ["run.zarr"]
    fatal = 1
    refused(error, None, dfac.sample, V, dfac.TweedieNMF(2), **options)
    fatal = -1
    resumed = dfac.resume(path, progressbar=False)
    whole = dfac.sample(V, dfac.TweedieNMF(2), **QUICK | {"random_seed": 2})
    np.testing.assert_array_equal(resumed["posterior"]["W"], whole["posterior"]["W"])


def test_a_process_killed_before_the_first_checkpoint_leaves_the_old_run(tmp_path):
    path = tmp_path / "run.zarr"
    dfac.sample(V, dfac.TweedieNMF(2), store=path, **QUICK)
    process, pipe = start(replace_and_wait, str(path))
    assert pipe.recv() == "begun"
    with pytest.raises(StoreError, match=f"is being written by process {process.pid} on"):
        dfac.resume(path, draws=2, progressbar=False)
    process.kill()
    process.join()
    assert dfac.open_run(path)["posterior"].sizes["draw"] == 6
    assert dfac.resume(path, draws=2, progressbar=False)["posterior"].sizes["draw"] == 8
    assert [one.name for one in tmp_path.iterdir()] == ["run.zarr"]


def replace_and_wait(path, pipe):
    with create_store(path, make_spec(), overwrite=True) as store:
        store.write_draws(0, 0, *factors(0, 0, 3))
        pipe.send("begun")
        pipe.recv()


def test_a_failed_run_removes_no_other_run(tmp_path):
    path = tmp_path / "run.zarr"
    with pytest.raises(RuntimeError), create_store(path, make_spec()):  # noqa: PT012
        path.rename(tmp_path / "moved.zarr")
        with create_store(path, make_spec()) as other:
            fill(other, make_spec(), draws=3)
        raise RuntimeError
    assert dfac.open_run(path)["posterior"].sizes["draw"] == 3


def test_a_failed_run_is_removed_before_others_may_write_it(tmp_path, monkeypatch):
    path, opened = tmp_path / "run.zarr", []
    close = LocalBackend.close

    def closing(self):
        close(self)
        opened.append(path.exists())

    monkeypatch.setattr(LocalBackend, "close", closing)
    with pytest.raises(RuntimeError), create_store(path, make_spec()):
        raise RuntimeError
    assert opened == [False]
    assert not list(tmp_path.iterdir())


TRIALS = 50 if FULL else 10


def compete(folder, me, barrier, pipe):
    """Begin a run at the same path and moment as another process, many times; say what came."""
    answers = []
    for trial in range(TRIALS):
        path = Path(folder) / f"{trial}.zarr"
        spec = make_spec(chains=1, attrs=ATTRS | {"random_seed": me})
        barrier.wait(60)  # until the other one is there; broken if that has died
        try:
            with create_store(path, spec) as store:
                store.write_draws(0, 0, *factors(me, 0, 2))
                store.checkpoint({}, {"draws": 2})
                store.finish({"winner": me})
            answers.append("")
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    pipe.send(answers)


def test_of_two_processes_that_begin_at_one_path_one_wins(tmp_path):
    barrier = SERVER.Barrier(2)
    others = [start(compete, str(tmp_path), me, barrier) for me in (1, 2)]
    answers = np.array([pipe.recv() for _, pipe in others])
    for process, _ in others:
        process.join()
    assert ((answers == "").sum(0) == 1).all()
    for trial, pair in enumerate(answers.T):
        winner = int(np.flatnonzero(pair == "")[0]) + 1
        (refusal,) = filter(None, pair)
        assert refusal.startswith("StoreError: ")
        assert "is being written by process" in refusal or "exists and holds a run" in refusal
        tree = dfac.open_run(tmp_path / f"{trial}.zarr")
        assert (tree.attrs["winner"], tree.attrs["random_seed"]) == (winner, winner)
        np.testing.assert_array_equal(tree["posterior"]["W"][0], factors(winner, 0, 2)[0])
    assert len(list(tmp_path.iterdir())) == TRIALS


# -- commands ------------------------------------------------------------------------------

STOPPED = """
import os, signal, sys
from daskfactor.cli.main import app
from daskfactor.inference import setting
from daskfactor.runs.store import RunStore
setting.LONGEST_SEGMENT = 5
save, calls = RunStore.checkpoint, []
def checkpoint(self, *args):
    if len(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGTERM)
    calls.append(1)
    save(self, *args)
RunStore.checkpoint = checkpoint
app(sys.argv[2:])
"""


@pytest.mark.quick("2-interrupted; to continue, run: daskfactor resume run.zarr")
@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (0, "interrupted before the first checkpoint; run.zarr is unchanged"),
        (2, "interrupted; to continue, run: daskfactor resume run.zarr"),
    ],
)
def test_sigterm_ends_a_fit_as_ctrl_c_does(tmp_path, calls, told):
    np.save(tmp_path / "v.npy", V)
    dfac.sample(V, dfac.TweedieNMF(1), store=tmp_path / "run.zarr", **QUICK)
    fit = ["fit", "v.npy", "--store", "run.zarr", "-k", "2", "--draws", "20", "--overwrite"]
    terminal, stderr = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(calls), *fit],
        cwd=tmp_path,
        stderr=stderr,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(stderr)
    text = b""
    with contextlib.suppress(OSError):  # at the end of what a terminal shows
        while read := os.read(terminal, 65536):
            text += read
    os.close(terminal)
    assert process.wait() == 143
    assert told in text.decode()
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")  # the cursor is shown again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.zarr", "v.npy"]
    found = dfac.open_run(tmp_path / "run.zarr")["posterior_moments" if calls == 0 else "posterior"]
    assert found.sizes["component"] == (1 if calls == 0 else 2)


RANKS = ["select-rank", "v.npy", "--ranks", "1:2", "--temperatures", "2", "--held-out", "0", "-q"]
WRITERS = {
    "predict.csv": ["predict", "run.zarr"],
    "predict.nc": ["predict", "run.zarr"],
    "predict.parquet": ["predict", "run.zarr"],
    "predict.zarr": ["predict", "run.zarr"],
    "recommend.csv": ["recommend", "run.zarr", "-q"],
    "transform.csv": ["transform", "run.zarr", "v.npy", "-q"],
    "plot.png": ["plot", "run.zarr", "--figure", "shares"],
    "report.html": ["report", "run.zarr"],
    "ranks.nc": RANKS,
    "ranks.png": RANKS,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    np.save(folder / "v.npy", V)
    dfac.sample(V, dfac.TweedieNMF(2), store=folder / "run.zarr", **QUICK | {"draws": 30})
    return folder


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.filterwarnings("ignore")
def test_commands_replace_nothing_that_is_there_unless_told_to(place, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for file in ("v.npy", "run.zarr"):
        Path(file).symlink_to(place / file)

    if name.endswith(".zarr"):
        zarr.create_group(name, attributes={"mark": "precious"})
    else:
        Path(name).write_text("precious")

    def is_kept():
        if name.endswith(".zarr"):
            return zarr.open_group(name, mode="r").attrs.get("mark") == "precious"
        return Path(name).read_bytes() == b"precious"

    command = (*WRITERS[name], "-o", name)
    fails(4, f"{name} exists already; give another name, or allow --overwrite", *command)
    assert is_kept()
    succeed(*command, "--overwrite")
    assert not is_kept()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "run.zarr", "v.npy"])


def test_a_result_replaces_neither_a_run_nor_a_folder_of_somebody(place, tmp_path):
    (tmp_path / "thesis.zarr").mkdir()
    (tmp_path / "thesis.zarr" / "text").write_text("precious")
    dfac.sample(V, dfac.TweedieNMF(2), store=tmp_path / "run.zarr", **QUICK)
    for there in ("run.zarr", "thesis.zarr"):
        command = ("predict", place / "run.zarr", "-o", tmp_path / there, "--overwrite")
        fails(4, "is a folder that is not replaced", *command)
    assert (tmp_path / "thesis.zarr" / "text").read_text() == "precious"
    assert dfac.open_run(tmp_path / "run.zarr")["posterior"].sizes["draw"] == 6


def test_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    def full(*_, **options):
        raise OSError(28, "No space left on device")

    figure, match = new_figure(1, 1), r"a picture to .*x\.png, the disk is full; .* try again"
    monkeypatch.setattr(Path, "mkdir", full)
    refused(StoreError, match, save, figure, tmp_path / "x.png")


def test_pages_and_pictures_are_kept_in_python_too(place, tmp_path):
    page = tmp_path / "page.html"
    page.write_text("precious")
    with pytest.raises(StoreError, match=r"page\.html exists already.*overwrite=True"):
        dfac.report(place / "run.zarr", page)
    assert page.read_text() == "precious"
    dfac.report(place / "run.zarr", page, overwrite=True)
    assert page.read_text() != "precious"
