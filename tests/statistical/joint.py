"""Geweke's joint test of whole chains, with all that a model learns.

W, H and hyperparameters are drawn from the prior; then data given them, and a cycle of the chain
given the data, in turn: everything stays on the prior. A chain goes on as `sample` lets it, from
checkpoint to checkpoint, each with new data. Masses and steps are learnt before, on other data.

Where nothing is shared by all rows and columns many problems are one matrix; else a chain has one
problem, and there are many chains. Problems are independent, so the mean of any function over
rounds has an honest standard error, and errors grow from round to round.

Source: J. Geweke, "Getting it right", JASA 99, 2004.
"""

from typing import Any, NamedTuple

import numpy as np

from daskfactor.data.sources import as_blocks
from daskfactor.executors import SerialExecutor
from daskfactor.inference.base import Sampler
from daskfactor.inference.calibration import block_diagonal
from daskfactor.inference.chain import Chain, TrackRun
from daskfactor.inference.parameters import LINK_PRECISIONS, LINKS
from daskfactor.inference.program import DISPERSION, RATE, SHIFT
from daskfactor.inference.setting import RunOptions, Setting
from daskfactor.models.log_linear import multiples
from daskfactor.models.settings import PriorDraw

TUNE = 60


class Joint(NamedTuple):
    """What is tested: a model and a sampler, on problems of a shape, and for how long. ``copies``
    problems are in one matrix; ``chains`` of these. ``temperature`` may be 1, under which a sampler
    moves as under any other, and the posterior is the same."""

    model: Any
    sampler: Sampler
    shape: tuple[int, int] = (2, 3)
    copies: int = 1
    chains: int = 1
    rounds: int = 12
    moments: tuple[float, float] = (2.0, 2.0)
    gaps: tuple[tuple[int, int], ...] = ()
    blocks: int = 1
    seed: int = 0
    temperature: float | None = None

    @property
    def whole(self):
        return self.shape[0] * self.copies, self.shape[1] * self.copies


def drawn(case, rng):
    return case.model.draw_prior(rng, case.whole, *case.moments)


def means(case, W, H):
    """WH of every problem, (copies, I, J)."""
    one, other = (own.reshape(-1, case.copies, own.shape[1]) for own in (W, H.T))
    return np.asarray(np.einsum("ick,jck->cij", one, other))


def chain_at(case, true, number, rng):
    """A chain that has not started, of data drawn given factors and dispersion."""
    law = case.model.likelihood
    V = law.sample(rng, means(case, true.W, true.H), true.dispersion)
    for row, col in case.gaps:
        V[:, row, col] = np.nan
    matrix = V[0] if case.copies == 1 else block_diagonal(V)
    unstored = None if case.copies == 1 else "missing"
    data = as_blocks(matrix, case.blocks, dtype="float64", unstored=unstored, allow_empty=True)
    data.mean, data.variance = case.moments
    options = RunOptions(case.rounds, TUNE, 1, 1, case.seed, "moments", 0, "float64")
    kernel = case.sampler.kernel(case.model, data)
    run = data, case.model, kernel, options, SerialExecutor()
    return Chain(Setting(*run, temperature=case.temperature), number)


def spread(bands, values, name=None):
    """Give each band its rows of values, or of an array of that name."""
    for band in bands:
        own = values[band.offset : band.offset + len(band.values)]
        if name is None:
            band.values[:] = own
        else:
            band.arrays[name] = own.copy()


def put(chain, true, moments):
    """Set a chain's state and hyperparameters."""
    model, state, learnt = chain.setting.model, chain.tracks[0].state, true.learnt
    for bands, values in zip(state.factors, (true.W, true.H.T), strict=True):
        spread(bands, values)
    if not model.nonnegative:
        put_gaussian(chain, true)
        return
    shapes = tuple(learnt.get(f"shape_{own}", getattr(model, f"shape_{own}")) for own in "wh")
    rates = list(model.rates_under(moments[0], shapes))
    for side, (of, bands) in enumerate(zip(model.rates_of, state.factors, strict=True)):
        own = learnt.get("rate", learnt.get(f"rate_{'wh'[side]}"))
        if of == "component":
            rates[side] = tuple(map(float, own))
        elif of is not None:
            spread(bands, own[:, None], RATE)
    if np.ndim(true.dispersion):
        spread(state.factors[1], true.dispersion[:, None], DISPERSION)
    typical = float(np.exp(np.mean(np.log(true.dispersion))))
    hyper = type(chain.hyper)(typical, *rates, *shapes)
    chain.values = chain.values | hyper._asdict()
    for side, own in enumerate(model.covariates):
        if own is not None:
            names = {LINKS[side], LINK_PRECISIONS[side]} & learnt.keys()
            chain.values = chain.values | {name: learnt[name] for name in names}
            spread(state.factors[side], rates[side] / multiples(own, learnt[LINKS[side]]), RATE)


def put_gaussian(chain, true):
    model, learnt, K = chain.setting.model, true.learnt, chain.setting.model.n_components
    changed = {"noise": true.dispersion, "mean": chain.values["priors"]["mean"]}
    for own in "wh":
        if f"precision_{own}" in learnt:
            changed[f"precision_{own}"] = tuple(map(float, learnt[f"precision_{own}"][:K]))
        if (name := f"link_precision_{own}") in learnt:
            changed[name] = learnt[name]
    if model.biases:
        changed["row_bias_precision"] = float(learnt["precision_w"][K])
        changed["column_bias_precision"] = float(learnt["precision_h"][K + 1])
    chain.values = chain.values | changed
    state = chain.tracks[0].state
    for bands, name, own in zip(state.factors, LINKS, model.covariates, strict=True):
        if own is not None:
            chain.values = chain.values | {name: learnt[name]}
            spread(bands, own.predicted(learnt[name]), SHIFT)


def here(chain, true):
    """The chain's state as a draw of the prior, with what this draws of hyperparameters."""
    run = chain.tracks[0]
    W, H = (run.state.gather(side) for side in ("rows", "columns"))
    learnt = chain.learnt(run)
    own = {name: learnt[name] for name in true.learnt}
    return PriorDraw(W, H.T, own.get("dispersion", chain.hyper.dispersion), own)


def follow(case, chain, true, rng):
    """The chain that goes on where one stood, with new data."""
    found = chain_at(case, true, chain.number, rng)
    found.recall(chain.memory())
    run = chain.tracks[0]
    found.tracks = [TrackRun(run.track, found.setting, run.state, run.cycle)]
    if hasattr(found, "fit"):  # gradient and fit are other data's
        found.fit = None
        for band in run.state.bands():
            band.arrays["gradient"][:] = 0
    return found


def scores(case):
    """z of every function: rounds of new data and a cycle against draws of the prior."""
    rng = np.random.default_rng(case.seed)
    first = chain_at(case, drawn(case, rng), 0, rng)
    first.start()
    first.advance(TUNE)
    first.forget()
    rounds, fresh = [], []
    for number in range(case.chains):
        true, chain = drawn(case, rng), first
        chain.number = number
        chain.tracks[0].cycle = TUNE
        put(chain, true, case.moments)
        total = 0.0
        for cycle in range(case.rounds):
            chain = follow(case, chain, true, rng)
            chain.advance(TUNE + cycle + 1)
            chain.forget()
            true = here(chain, true)
            total = total + functions(case, true)[1]
        assert not chain.divergences
        rounds.append(total / case.rounds)
        for _ in range(4):
            names, found = functions(case, drawn(case, rng))
            fresh.append(found)
    after, before = np.concatenate(rounds, axis=1), np.concatenate(fresh, axis=1)
    error = np.sqrt(after.var(axis=1) / after.shape[1] + before.var(axis=1) / before.shape[1])
    z = (after.mean(axis=1) - before.mean(axis=1)) / error
    return dict(zip(names, np.round(z, 2).tolist(), strict=True))


def functions(case, true):
    """What is compared, (functions, copies): of finite variance under every prior."""
    K, copies = case.model.n_components, case.copies
    W = true.W.reshape(-1, copies, true.W.shape[1]).swapaxes(0, 1)
    H = true.H.T.reshape(-1, copies, true.H.shape[0]).swapaxes(0, 1)
    mu = means(case, true.W, true.H)
    found = {}
    if case.model.nonnegative:
        w, h, m = np.log(W), np.log(H), np.log(mu)
        bounded = {"w": W / (1 + W), "h": H / (1 + H), "mu": mu / (1 + mu)}
    else:  # the level has a flat prior: nothing depends on it
        level = case.moments[0] if not case.model.biases else H[..., K + 1].mean(axis=1)
        w, h, m = W[..., :K], H[..., :K], mu - np.reshape(level, (-1, 1, 1))
        bounded = {"w": np.tanh(w**2), "h": np.tanh(h**2), "mu": np.tanh(m)}
        w, h, m = np.arctan(w), np.arctan(h), np.arctan(m)
    for name, own in {"w": w, "h": h, "mu": m}.items():
        found[name] = own.mean(axis=(1, 2))
        found[f"{name}^2"] = (own**2).mean(axis=(1, 2))
        found[f"{name} bounded"] = bounded[name].mean(axis=(1, 2))
    found["w h"] = (w[:, 0] * h[:, 0]).mean(axis=1)
    found["mu mu"] = m[:, 0, 0] * m[:, -1, -1]
    found["w mu"] = w[:, 0, 0] * m[:, 0, 0]
    if (covariates := case.model.covariates[0]) is not None:  # which say where rows are
        predicted = covariates.predicted(true.learnt["link_w"])
        away = (np.log(true.W) if case.model.nonnegative else true.W)[:, :K] - predicted[:, :K]
        away *= np.sqrt(true.learnt.get("precision_w", np.ones(K))[:K])
        rows = np.mean(away**2, axis=1)
        found |= {"rows": rows.mean(keepdims=True), "last row": rows[-1:]}
    for name, own in true.learnt.items():
        values = np.asarray(own, np.float64)
        values = np.arctan(values**2) if name in LINKS else np.log(values)
        values = values.reshape(-1, copies)
        of = np.nanmean(values, axis=0)
        found |= {name: of, f"{name}^2": np.nanmean(values**2, axis=0)}
        found |= {f"{name} w": of * found["w"], f"{name} h": of * found["h"]}
        found |= {f"{name} mu": of * found["mu"], f"{name} w^2": of * found["w bounded"]}
    return list(found), np.array(list(found.values()))
