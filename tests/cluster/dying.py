"""A client that dies in the middle of a run.

Run as a script it kills its own process with SIGKILL when the run reports a draw: by
``test_sample.py``, on a cluster of its own, as ``dying.py STORE EXECUTOR DRAW``; by
``test_hosts.py``, on a host that shares nothing with its workers but an object store, as
``dying.py SCHEDULER DATA RUN EXECUTOR DRAW``, which writes data and samples; with draw 0 it
resumes the run and prints what it has found.
"""

import hashlib
import os
import signal
import sys

import numpy as np
from distributed import Client
from scipy import sparse

import daskfactor as dfac
from daskfactor.inference import setting
from daskfactor.runs import files
from daskfactor.runs.repository import RepositoryBackend
from tests.cluster.support import cluster

SETTINGS = {"draws": 24, "tune": 12, "random_seed": 5, "blocks": 3}
SETTINGS |= {"unstored": "zero", "progressbar": False}
AS_STORED = {"blocks": None, "unstored": None}
"""Settings that data in a store have."""
SAMPLER = dfac.PSGLD(warm_start=4)
MODEL = dfac.TweedieNMF(2, dispersion=1.0)  # for which others compile sparse kernels, too
LONGEST_SEGMENT = 6
"""Cycles between checkpoints, which a run this small would make more rarely."""


def data():
    rng = np.random.default_rng(2)
    return sparse.csr_array(rng.poisson(0.4, (60, 40)).astype(np.float32))


def digest(tree):
    """What tells two runs apart: draws, moments, monitored cells, and what is known of draws."""
    values = hashlib.sha256()
    for group in ("posterior", "posterior_moments", "monitor"):
        for name in sorted(tree[group].data_vars) if group in tree.children else ():
            values.update(tree[group][name].values.tobytes())
    for name in ("lp", "step_size"):
        values.update(tree["sample_stats"][name].values.tobytes())
    return values.hexdigest()


def sampled(V=None, model=MODEL, sampler=SAMPLER, **options):
    """A run of these settings, of one process if no executor is named."""
    given = data() if V is None else V
    return dfac.sample(given, model, sampler, **{"executor": "serial"} | SETTINGS | options)


def killed_at(draw):
    """A callback that kills this process when the run reports a draw."""

    def die(event):
        if event.phase == "draw" and event.done >= int(draw):
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def near(store, executor, draw):
    setting.LONGEST_SEGMENT = LONGEST_SEGMENT
    with cluster(2, processes=True) as client:
        sampled(store=store, client=client, executor=executor, callback=killed_at(draw))


def far(scheduler, place, run, executor, draw):
    setting.LONGEST_SEGMENT = LONGEST_SEGMENT
    RepositoryBackend.checkpoint_interval, files.MAX_COST_SHARE = (
        1e-9,
        1e9,
    )  # commit after each segment
    with Client(scheduler) as client:
        options = {"client": client, "executor": executor}
        if not int(draw):
            tree = dfac.resume(run, progressbar=False, **options)
            print(digest(tree), flush=True)
            return
        dfac.convert(data(), place, unstored="zero", blocks=3, progressbar=False)
        sampled(place, store=run, callback=killed_at(draw), **AS_STORED, **options)


if __name__ == "__main__":
    (near if len(sys.argv) == 4 else far)(*sys.argv[1:])
