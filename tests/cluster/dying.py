"""A client that dies in the middle of a run on a cluster of its own.

Run as a script by ``test_runs.py``: ``dying.py STORE EXECUTOR DRAW`` kills its
own process with SIGKILL when the run reports that draw.
"""

import hashlib
import os
import signal
import sys

import numpy as np
from scipy import sparse

import daskfactor as dfac
from daskfactor.inference import setting
from tests.cluster.support import cluster

SETTINGS = {"draws": 24, "tune": 12, "random_seed": 5, "blocks": 3}
SETTINGS |= {"unstored": "zero", "progressbar": False}
SAMPLER = dfac.PSGLD(warm_start=4)
MODEL = dfac.TweedieNMF(2, dispersion=1.0)  # for which others compile sparse kernels, too
LONGEST_SEGMENT = 6
"""Cycles between checkpoints, which a run this small would make more rarely."""


def data():
    rng = np.random.default_rng(2)
    return sparse.csr_array(rng.poisson(0.4, (60, 40)).astype(np.float32))


def digest(tree):
    """What tells two runs apart, their draws and what is known of each."""
    names = [("posterior", "W"), ("posterior", "H"), ("sample_stats", "lp")]
    values = b"".join(tree[group][name].values.tobytes() for group, name in names)
    return hashlib.sha256(values).hexdigest()


def sampled(V=None, model=MODEL, sampler=SAMPLER, **options):
    """A run of these settings, of one process if no executor is named."""
    given = data() if V is None else V
    return dfac.sample(given, model, sampler, **{"executor": "serial"} | SETTINGS | options)


def main():
    store, executor, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
    setting.LONGEST_SEGMENT = LONGEST_SEGMENT

    def die(event):
        if event.phase == "draw" and event.done >= last:
            os.kill(os.getpid(), signal.SIGKILL)

    with cluster(2, processes=True) as client:
        sampled(store=store, client=client, executor=executor, callback=die)


if __name__ == "__main__":
    main()
