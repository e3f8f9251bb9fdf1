"""Small posteriors made of weighted particles, for the tests of what reads them."""

import json

import numpy as np

from daskfactor.runs.run_writer import Sink
from daskfactor.runs.schema import OBJECTIVE, PARTICLES, RATES, THRESHOLD, RunSpec
from daskfactor.runs.trace import open_run
from tests.results.runs import create_store

ROWS, COLUMNS, K, M = 7, 5, 3, 6
WEIGHTS = np.array([0.05, 0.0, 0.5, 0.25, 0.0, 0.2])
KERNEL = {"scale_w": 1.5, "scale_h": 2.5, "power_w": -0.5, "power_h": -0.5, "tangent": 0}


def particle_factors(count=M, seed=0, silf=True):
    """Unlike factors W (count, I, K) and H (count, K, J); columns of W on the simplex."""
    rng = np.random.default_rng(seed)
    W, H = rng.gamma(0.5, size=(count, ROWS, K)) + 0.01, rng.gamma(2.0, size=(count, K, COLUMNS))
    return (W / W.sum(axis=1, keepdims=True) if silf else W), H


def particle_spec(W, H, *, silf=True, **changes):
    count, rows, width = W.shape
    model = {"beta": 2.0, "threshold": 9.0} if silf else {"beta": 1.0}
    model |= {"type": "SILFNMF" if silf else "TweedieNMF", "n_components": width}
    documents = {
        "model": model,
        "sampler": {"type": "Ensemble", "start": "q_transform"},
        "data": {"shape": [rows, H.shape[2]], "n_observed": 33},
    }
    attrs = {name: json.dumps(own) for name, own in documents.items()}
    attrs |= {"random_seed": "3", "dtype": str(W.dtype), "executor": "serial"}
    attrs |= {"particles": count, "sampling_time": 1.5}
    attrs |= {"threshold": 9.0} if silf else {"dispersion": 1.0, "rate_w": 2.0, "rate_h": 3.0}
    options = {"shape": (rows, H.shape[2], width), "chains": 1, "draws": count, "attrs": attrs}
    options |= {"dims": ("gene", "day"), "coords": {"gene": [f"g{i}" for i in range(rows)]}}
    options |= {"statistics": (*PARTICLES, OBJECTIVE) if silf else PARTICLES}
    options |= {"constants": THRESHOLD if silf else RATES, "dtype": str(W.dtype)}
    return RunSpec(**options | changes)


def fill_particles(
    sink, W, H, *, weights=None, lp=None, objective=None, silf=True, done=None, at_once=M
):
    """Write some particles at a time and, if all are done, their weights."""
    count = len(W)
    objective = 5.0 + np.sin(3.0 * np.arange(count)) if objective is None else objective
    stop = count if done is None else done
    for m in range(0, stop, at_once):
        end = min(m + at_once, stop)
        number = np.arange(m, end)
        sink.write_draws(0, m, W[m:end], np.swapaxes(H[m:end], 1, 2))
        stats = {"seconds": 0.5 + number, "n_iter": 100 + number}
        if silf:
            stats["objective"] = np.asarray(objective)[m:end]
        sink.write_stats(0, m, stats)
        sink.checkpoint({}, {"draws": end})
    if done is None:
        root = np.random.default_rng(5).normal(size=(count, count))
        sink.write_weights(
            weight=WEIGHTS if weights is None else np.asarray(weights),
            lp=-100.0 + np.cos(2.0 * np.arange(count)) if lp is None else np.asarray(lp),
            stein_matrix=root @ root.T,
            discrepancy=0.5,
            discrepancy_equal=0.75,
            attrs=KERNEL,
        )


def particle_tree(W=None, H=None, weights=None, *, silf=True, **more):
    """A finished run of particles in memory."""
    W, H = particle_factors(silf=silf) if W is None else (W, H)
    sink = Sink(particle_spec(W, H, silf=silf))
    fill_particles(sink, W, H, weights=weights, silf=silf, **more)
    return sink.tree()


def particle_store(path, W=None, H=None, *, silf=True, **more):
    """The same through a store, opened again."""
    W, H = particle_factors(silf=silf) if W is None else (W, H)
    with create_store(path, particle_spec(W, H, silf=silf)) as store:
        fill_particles(store, W, H, silf=silf, **more)
    return open_run(path)


def modes(seed=0, count=12, noise=0.02, silf=True):
    """Particles of one mode, their components in any order."""
    rng = np.random.default_rng(seed)
    base_w, base_h = np.eye(3).repeat(4, axis=0) + 0.05, np.eye(3).repeat(3, axis=1) + 0.05
    W = base_w * np.exp(noise * rng.normal(size=(count, 12, 3)))
    H = base_h * np.exp(noise * rng.normal(size=(count, 3, 9)))
    orders = np.array([rng.permutation(3) for _ in range(count)])
    W = np.take_along_axis(W, orders[:, None], axis=2)
    H = np.take_along_axis(H, orders[:, :, None], axis=1)
    if silf:
        total = W.sum(axis=1)
        W, H = W / total[:, None], H * total[:, :, None]
    return W, H, orders
