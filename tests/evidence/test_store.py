"""Stores of log_evidence and select_rank; what a kill leaves of them is in tests/test_kill.py."""

import numpy as np
import pytest

import daskfactor as dfac
from daskfactor.errors import DataError, OptionError, StoreError, StoreFormatError
from daskfactor.evidence import rank, thermodynamic
from tests.refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore::daskfactor.errors.SamplingWarning")  # short

X = np.array([[2.0, 1, 0, 4], [0, 3, 1, 1], [5, 0, 2, 0]])
MODEL = dfac.TweedieNMF(2)
LADDER = dfac.ThermodynamicIntegration(temperatures=3, draws=60, tune=20)
QUIET = {"progressbar": False, "executor": "serial"}


def test_a_call_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(thermodynamic, "FIRST_ROUND", 0.1)
    store, reached = tmp_path / "evidence", []

    def stop(event):
        if event.phase == "draw":
            reached.append(event.done)
            if len(reached) == 2:
                raise KeyboardInterrupt

    options = {"random_seed": 3, **QUIET}
    with pytest.raises(KeyboardInterrupt):
        dfac.log_evidence(X, MODEL, LADDER, store=store, callback=stop, **options)
    found = dfac.log_evidence(X, MODEL, LADDER, store=store, callback=stop, **options)
    assert found.trace.identical(dfac.log_evidence(X, MODEL, LADDER, **options).trace)
    assert reached == sorted(set(reached)), "rounds are done again"
    done = len(reached)
    again = dfac.log_evidence(X, MODEL, LADDER, store=store, callback=stop, **QUIET)  # any seed
    assert again.value == found.value
    assert len(reached) == done


def test_another_call_is_refused(tmp_path):
    store = tmp_path / "evidence"
    options = {"random_seed": 3, "store": store, **QUIET}
    dfac.log_evidence(X, MODEL, LADDER, **options)
    other = dfac.ThermodynamicIntegration(temperatures=4, draws=60, tune=20)
    for names, V, model, method, more in (
        ("V", X + 1, MODEL, LADDER, {}),
        ("model", X, dfac.TweedieNMF(3), LADDER, {}),
        ("method", X, MODEL, other, {}),
        ("random_seed", X, MODEL, LADDER, {"random_seed": 4}),
    ):
        match = rf"begun by a call with other values of {names}; repeat"
        refused(StoreError, match, dfac.log_evidence, V, model, method, **options | more)
    ranks = X, MODEL, [2], LADDER, None
    refused(StoreError, "other values of .*function", dfac.select_rank, *ranks, **options)
    refused(OptionError, "make the same call again", dfac.resume, store)
    run = {"draws": 4, "tune": 4, "progressbar": False}
    refused(StoreError, "not a run store", dfac.sample, X, MODEL, store=store, **run)
    refused(OptionError, "leave store out", dfac.log_evidence, X, MODEL, dfac.Chib(), store=store)
    refused(OptionError, "this machine", dfac.log_evidence, X, MODEL, store="s3://bucket/evidence")
    refused(StoreError, "exists and is no store", dfac.log_evidence, X, MODEL, store=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["evidence"]


def test_arrays_of_a_model_are_a_part_of_it(tmp_path):
    fixed = [dfac.TweedieNMF(2, fixed_w=np.full((3, 1), value)) for value in (1.0, 2.0)]
    options = {"random_seed": 3, "store": tmp_path / "evidence", **QUIET}
    dfac.log_evidence(X, fixed[0], LADDER, **options)
    refused(StoreError, "values of model", dfac.log_evidence, X, fixed[1], LADDER, **options)


VECTOR = np.random.default_rng(0).normal(3.0, 1.0, 30)
SHORT = dfac.ThermodynamicIntegration(temperatures=3, draws=200, tune=20)
RANKS = {
    "matrix": (X, dfac.TweedieNMF(1), dfac.Chib(100, 40)),
    "counts": (X.astype(int), dfac.AllocationModel.nmf(1), dfac.SequentialMonteCarlo(16, 4)),
    "vector": (VECTOR, dfac.GaussianAdditive(1), SHORT),
}


@pytest.mark.parametrize("kind", RANKS)
def test_finished_ranks_are_kept(kind, tmp_path, monkeypatch):
    for name in ("DRAWS", "TUNE"):
        monkeypatch.setattr(rank, name, 8)
    V, model, method = RANKS[kind]
    store, asked, share = tmp_path / "ranks", [], 0.3 if kind == "matrix" else None

    def stop(event):
        if event.phase == "ranks":
            asked.append(event.message)
            if len(asked) == 2:
                raise KeyboardInterrupt

    call = V, model, [1, 2], method, share
    with pytest.raises(KeyboardInterrupt):
        dfac.select_rank(*call, store=store, callback=stop, **QUIET)
    estimate, computed = type(method).estimate, []

    def counted(self, problem):
        computed.append(problem.model.n_components)
        return estimate(self, problem)

    monkeypatch.setattr(type(method), "estimate", counted)
    table = dfac.select_rank(*call, store=store, **QUIET)
    assert computed == ([1, 2] if kind == "matrix" else [2])  # scores come first
    computed.clear()
    again = dfac.select_rank(*call, store=store, **QUIET)
    assert not computed
    assert again.identical(table)
    whole = dfac.select_rank(*call, **QUIET)
    assert whole.drop_vars("seconds").identical(table.drop_vars("seconds"))


def test_a_refused_call_leaves_no_store_and_an_empty_folder_may_become_one(tmp_path):
    store = tmp_path / "evidence"
    with pytest.raises(DataError, match="negative"):
        dfac.log_evidence(-X, MODEL, LADDER, store=store, **QUIET)
    assert list(tmp_path.iterdir()) == []
    store.mkdir()
    assert np.isfinite(dfac.log_evidence(X, MODEL, LADDER, store=store, **QUIET).value)


def test_other_blocks_are_named_as_such(tmp_path):
    dfac.log_evidence(X, MODEL, LADDER, store=tmp_path / "e", blocks=1, **QUIET)
    with pytest.raises(StoreError, match="other values of V or of blocks;"):
        dfac.log_evidence(X, MODEL, LADDER, store=tmp_path / "e", blocks=2, **QUIET)


def test_a_store_of_an_evidence_is_no_run(tmp_path):
    dfac.log_evidence(X, MODEL, LADDER, store=tmp_path / "e", **QUIET)
    with pytest.raises(StoreFormatError, match="the store of log_evidence or"):
        dfac.open_run(tmp_path / "e")
