"""Exact posteriors of tiny factorizations, as ground truth for samplers.

Three independent routes, each checked against the others in ``test_exact.py``:

- one component: quadrature over H on a tensor grid; given H the rows are
  independent and each is a one-dimensional integral, closed where it can be;
- Poisson, two components: enumeration of every way to share the counts out;
  given the shares the components are two problems of one component each;
- anything else: tempered Monte Carlo from the prior to the posterior, in
  independent replicates, whose spread gives honest standard errors.
"""

import math
import pickle
import sys
from functools import cache, lru_cache, partial, update_wrapper
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy
from scipy import special

from daskfactor import models
from tests import kept as on_disk
from tests.models import laws
from tests.models.laws import divergence, log_density, log_normalizer

NAN = float("nan")

OUTER_NODES = {1: 121, 2: 81, 3: 45}  # nodes per column, by number of columns
INNER_NODES = 181


@cache
def _source():
    """Return what posteriors follow from besides their arguments: sources and versions."""
    files = Path(__file__), Path(laws.__file__), *sorted(Path(models.__file__).parent.glob("*.py"))
    versions = np.__version__, scipy.__version__, sys.version_info[:2]
    return repr((versions, [file.read_bytes() for file in files])).encode()


def kept(function):
    """Remember what a function finds, for all processes and for later sessions of tests."""

    @lru_cache(maxsize=4096)
    def found(*args):
        file = on_disk.named("posteriors", _source(), pickle.dumps((function.__name__, args)))
        content = on_disk.kept(file, lambda: pickle.dumps(function(*args)))
        return dict(pickle.loads(content))

    return update_wrapper(found, function)


NEGATIVE_BINOMIAL = -math.inf
"""In place of a power: the negative binomial law, whose size is one over the dispersion."""


class Case(NamedTuple):
    """A tiny problem whose posterior is known."""

    name: str
    V: np.ndarray
    beta: float
    dispersion: float = 1.0
    rate_w: float = 1.0
    rate_h: float = 1.0
    K: int = 1
    shape_w: float = 1.0
    shape_h: float = 1.0


def _case(name, values, beta, **settings):
    return Case(name, np.array(values, dtype=np.float64), beta, **settings)


CASES = [
    _case("poisson", [[4, 7], [2, 5]], 1.0),
    _case("poisson-small", [[0, 1], [3, 0]], 1.0, rate_w=0.8, rate_h=1.5),
    _case("poisson-gaps", [[3, NAN, 0], [1, 6, NAN]], 1.0),
    _case("poisson-tall", [[0, 2], [NAN, 1], [4, 1]], 1.0, rate_h=0.5),
    _case("poisson-overdispersed", [[4, 0], [2, 6]], 1.0, dispersion=2.0),
    _case("gaussian", [[4, 7], [2, 5]], 2.0),
    _case("gaussian-skewed", [[0.3, 1.4], [-0.5, 0.8]], 2.0, dispersion=0.5),
    _case("gaussian-gaps", [[0.2, NAN, 1.9], [1.1, 3.0, NAN]], 2.0, rate_w=0.7),
    _case("compound", [[1.3, 0.0], [2.1, 0.4]], 0.5, dispersion=0.7),
    _case("compound-gaps", [[0.6, NAN, 3.2], [0.0, 1.5, NAN]], 0.5, rate_h=0.8),
    _case("gamma", [[0.4, 3.1], [1.2, 0.2]], 0.0, dispersion=0.5),
    _case("gamma-gaps", [[0.3, NAN, 2.0], [1.7, 0.9, NAN]], 0.0, rate_w=1.3),
    _case("gamma-tall", [[0.3, NAN], [NAN, 0.8], [1.9, 2.4]], 0.0, dispersion=0.3),
    _case("poisson-two", [[2, 1], [0, 3]], 1.0, K=2),
    _case("poisson-two-large", [[4, 7], [2, 5]], 1.0, K=2, rate_h=0.7),
    _case("poisson-two-gaps", [[2, NAN, 0], [1, 4, NAN]], 1.0, K=2),
    _case("gaussian-two", [[0.3, 2.4], [1.6, 0.8]], 2.0, dispersion=0.5, K=2),
    _case("compound-two", [[1.3, 0.0], [0.4, 2.1]], 0.5, dispersion=0.7, K=2),
    _case("gamma-two-gaps", [[0.4, 3.1, NAN], [1.2, 0.2, 0.9]], 0.0, dispersion=0.5, K=2),
]


def reference_posterior(case):
    """Ground truth for a case, by whichever route is exact for it. The keys are those of
    `exact_posterior`; the Monte Carlo route adds a standard error ``<key>_se`` for each."""
    settings = (case.beta, case.dispersion, case.rate_w, case.rate_h)
    if (case.shape_w, case.shape_h) != (1.0, 1.0):
        assert case.K == 1, "gamma priors are integrated over one component only"
        shapes = (case.shape_w, case.shape_h)
        return _read_only(_quadrature(case.V.tobytes(), case.V.shape, *settings, shapes))
    return exact_posterior(case.V, *settings, case.K)


def exact_posterior(V, beta, dispersion=1.0, rate_w=1.0, rate_h=1.0, K=1):
    """Posterior of ``mu = W H`` under exponential priors; NaN marks missing cells.
    ``mean_mu``, ``var_mu`` (I, J), for missing cells too; ``sum_w``, the posterior mean of the
    sum over W; ``log_evidence``."""
    V = np.ascontiguousarray(V, dtype=np.float64)
    settings = (float(beta), float(dispersion), float(rate_w), float(rate_h))
    if K == 1:
        return _read_only(_quadrature(V.tobytes(), V.shape, *settings))
    if K == 2 and beta == 1.0 and dispersion == 1.0:
        return _read_only(_poisson_two(V.tobytes(), V.shape, rate_w, rate_h))
    return metropolis_posterior(V, beta, K, dispersion, rate_w, rate_h)


def _read_only(result):
    """A copy of a cached result whose arrays no caller can change for the others."""
    for value in result.values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return dict(result)


@kept
def _quadrature(data, shape, beta, phi, rate_w, rate_h, shapes=(1.0, 1.0)):
    return _one_component(data, shape, beta, phi, rate_w, rate_h, shapes=shapes)


@lru_cache(maxsize=4096)
def _one_component(
    data, shape, beta, phi, rate_w, rate_h, outer=0, numeric=False, shapes=(1.0, 1.0)
):
    V = np.frombuffer(data).reshape(shape)
    H, log_weight = _outer_grid(shape[1], rate_h, outer or OUTER_NODES[shape[1]])
    log_weight = log_weight + _gamma_over_exponential(H, rate_h, shapes[1]).sum(axis=1)
    rows = [_row_integrals(row, H, beta, phi, rate_w, numeric, shapes[0]) for row in V]
    log_joint = log_weight + sum(row[0] for row in rows)
    log_evidence = float(special.logsumexp(log_joint))
    weight = np.exp(log_joint - log_evidence)
    mean = np.array([(weight * first) @ H for _, first, _ in rows])
    square = np.array([(weight * second) @ H**2 for _, _, second in rows])
    observed = V[~np.isnan(V)]
    return {
        "mean_mu": mean,
        "var_mu": square - mean**2,
        "sum_w": float(sum(weight @ first for _, first, _ in rows)),
        "log_evidence": log_evidence + float(np.sum(_constant(observed, beta, phi))),
    }


def _gamma_over_exponential(x, rate, shape):
    """Log of the ratio of a Gamma(shape, rate) density to an Exponential(rate) one."""
    return np.asarray((shape - 1.0) * np.log(rate * x) - special.gammaln(shape))


def _outer_grid(columns, rate, nodes):
    """Tensor grid over H (n, J) and its log-weights, prior density included. ``h = exp(t - exp(-t))
    / rate`` makes both tails fall double-exponentially, so that equal steps in t converge
    exponentially fast (Takahasi and Mori 1974)."""
    t = np.linspace(-3.7, 3.9, nodes)
    scaled = np.exp(t - np.exp(-t))
    log_one = np.log(t[1] - t[0]) + t - np.exp(-t) + np.log1p(np.exp(-t)) - scaled
    H = np.stack(np.meshgrid(*[scaled / rate] * columns, indexing="ij"), axis=-1)
    weights = np.stack(np.meshgrid(*[log_one] * columns, indexing="ij"), axis=-1)
    return H.reshape(-1, columns), weights.sum(axis=-1).ravel()


def _row_integrals(row, H, beta, phi, rate, numeric=False, shape=1.0):
    """Integrate one row's weight w out of exp(-sum_j d(v_j | w h_j) / phi) Gamma(w; shape, rate).
    But for Poisson's, closed forms are those of exponential priors, so another shape is integrated
    numerically."""
    seen = ~np.isnan(row)
    v, H = row[seen], H[:, seen]
    if v.size == 0:
        one = np.ones(len(H))
        return 0.0 * one, shape * one / rate, shape * (shape + 1.0) * one / rate**2
    closed = None if numeric else _CLOSED.get(beta)
    integrate = closed or _numeric_row
    if shape != 1.0:
        integrate = partial(_poisson_row if closed is _poisson_row else _numeric_row, shape=shape)
    pieces = [integrate(v, H[at : at + 1024], beta, phi, rate) for at in range(0, len(H), 1024)]
    log_z, first, second = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
    return log_z, first, second


def _poisson_row(v, H, beta, phi, rate, shape=1.0):
    """A gamma integral."""
    total, slope = shape + v.sum() / phi, rate + H.sum(axis=1) / phi
    constant = np.sum(special.xlogy(v, v) - v) / phi + special.gammaln(shape)
    log_z = special.gammaln(total) - total * np.log(slope) + shape * np.log(rate) - constant
    log_z += np.sum(special.xlogy(v, H), axis=1) / phi
    return log_z, total / slope, total * (total + 1.0) / slope**2


def _gaussian_row(v, H, beta, phi, rate):
    """A Gaussian integral cut off at zero; every entry may have its own ``phi``."""
    precision = np.sum(H**2 / phi, axis=1)
    center = (H @ (v / phi) - rate) / precision
    sd = 1.0 / np.sqrt(precision)
    cut = center / sd
    c = np.maximum(-cut, 30.0)  # far cut-offs, where the direct formulas cancel
    far_first = 1 / c - 2 / c**3 + 10 / c**5 - 74 / c**7 + 706 / c**9
    far_second = 2 / c**2 - 10 / c**4 + 74 / c**6 - 706 / c**8 + 8162 / c**10
    near = np.maximum(cut, -30.0)
    log_mass = np.where(
        cut < 0,  # log of (integral of exp(-x^2 / 2 + cut x) over x > 0), less log(2 pi) / 2
        np.log(special.erfcx(-np.minimum(cut, 0.0) / np.sqrt(2.0)) / 2.0),
        0.5 * near**2 + special.log_ndtr(near),
    )
    log_root = 0.5 * np.log(2.0 * np.pi)
    ratio = np.exp(-0.5 * near**2 - log_root - special.log_ndtr(near))
    first = sd * np.where(cut < -30.0, far_first, near + ratio)
    second = sd**2 * np.where(cut < -30.0, far_second, 1.0 + near * (near + ratio))
    log_z = np.log(rate) - 0.5 * np.sum(v**2 / phi) + log_root + np.log(sd) + log_mass
    return log_z, first, second


def _gamma_row(v, H, beta, phi, rate):
    """A generalised inverse Gaussian integral: Bessel functions K."""
    order = 1.0 - v.size / phi
    slope = np.sum(v / H, axis=1) / phi
    argument = 2.0 * np.sqrt(rate * slope)
    small = np.minimum(argument, 1e5)
    half = 0.5 * np.log(small / argument)
    log_k = [np.log(special.kve(order + extra, small)) + half for extra in (0, 1, 2)]
    log_scale = 0.5 * np.log(slope / rate)
    log_z = np.log(2.0 * rate) + order * log_scale + log_k[0] - argument
    log_z += np.sum(np.log(v / H) + 1.0, axis=1) / phi
    first = np.exp(log_k[1] - log_k[0] + log_scale)
    return log_z, first, np.exp(log_k[2] - log_k[0] + 2.0 * log_scale)


def _half_row(v, H, beta, phi, rate):
    """Trapezoid in log w; the divergence is linear in sqrt(w) and 1 / sqrt(w)."""
    rise = 2.0 * np.sum(np.sqrt(H), axis=1) / phi
    fall = 2.0 * np.sum(v / np.sqrt(H), axis=1) / phi
    high = np.full(len(H), np.log(90.0 / rate))
    with np.errstate(divide="ignore"):
        low = np.clip(2.0 * np.log(fall / 60.0), high - 42.0, high - 7.0)
    x = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, INNER_NODES)
    root = np.exp(0.5 * x)
    log_f = x - rate * root**2 - rise[:, None] * root - fall[:, None] / root
    log_z, first, second = _weighted(log_f, root**2)
    log_z += np.log(rate) + np.log((high - low) / (INNER_NODES - 1))
    return log_z + 4.0 * np.sum(np.sqrt(v)) / phi, first, second


def _numeric_row(v, H, beta, phi, rate, shape=1.0):
    """Trapezoid in log w for any beta: slow, and the check on the others."""
    x = np.linspace(np.log(300.0 / rate) - 46.0, np.log(300.0 / rate), 12 * INNER_NODES)
    w = np.exp(x)
    pairs = zip(v, H.T, strict=True)
    misfit = sum(_entry_misfit(value, h[:, None] * w, beta, phi) for value, h in pairs)
    log_prior = np.log(rate) - rate * w + _gamma_over_exponential(w, rate, shape)
    log_z, first, second = _weighted(log_prior + x - misfit, w)
    return log_z + np.log(x[1] - x[0]), first, second


def _entry_misfit(v, mu, beta, phi):
    """Minus the log-density but for what `_constant` gives."""
    if beta == NEGATIVE_BINOMIAL:
        return np.asarray((v + 1.0 / phi) * np.log1p(phi * mu) - special.xlogy(v, mu))
    return np.asarray(divergence(v, mu, beta) / phi)


def _constant(v, beta, phi):
    if beta == NEGATIVE_BINOMIAL:
        size = 1.0 / phi
        counted = special.gammaln(v + size) - special.gammaln(size) - special.gammaln(v + 1.0)
        return np.asarray(counted + v * np.log(phi))
    return log_normalizer(v, phi, beta)


def _weighted(log_f, w):
    top = log_f.max(axis=1)
    weight = np.exp(log_f - top[:, None])
    total = weight.sum(axis=1)
    each = "ij,ij->i" if w.ndim == 2 else "ij,j->i"
    first, second = (np.einsum(each, weight, power) / total for power in (w, w**2))
    return top + np.log(total), first, second


_CLOSED = {2.0: _gaussian_row, 1.0: _poisson_row, 0.5: _half_row, 0.0: _gamma_row}


@kept
def _poisson_two(data, shape, rate_w, rate_h):
    """Sum over every split X = S + (X - S); given S the components are independent."""
    X = np.frombuffer(data).reshape(shape)
    parts = {s.tobytes(): _share(s, rate_w, rate_h) for s in _shares(X)}
    pairs = [(parts[s.tobytes()], parts[(X - s).tobytes()]) for s in _shares(X)]
    log_p = np.array([a["log_evidence"] + b["log_evidence"] for a, b in pairs])
    log_evidence = float(special.logsumexp(log_p))
    weight = np.exp(log_p - log_evidence)
    mean = np.array([a["mean_mu"] + b["mean_mu"] for a, b in pairs])
    variance = np.array([a["var_mu"] + b["var_mu"] for a, b in pairs])
    sum_w = np.array([a["sum_w"] + b["sum_w"] for a, b in pairs])
    overall = np.tensordot(weight, mean, 1)
    return {
        "mean_mu": overall,
        "var_mu": np.tensordot(weight, variance + (mean - overall) ** 2, 1),
        "sum_w": float(weight @ sum_w),
        "log_evidence": log_evidence,
    }


def _shares(X):
    ranges = [[NAN] if np.isnan(x) else [float(n) for n in range(int(x) + 1)] for x in X.flat]
    for cells in product(*ranges):
        yield np.array(cells).reshape(X.shape)


def _share(s, rate_w, rate_h):
    nodes = {2: 65, 3: 41}[s.shape[1]]
    return _one_component(s.tobytes(), s.shape, 1.0, 1.0, rate_w, rate_h, nodes)


def metropolis_posterior(
    V, beta, K, dispersion=1.0, rate_w=1.0, rate_h=1.0, replicates=16, particles=512, steps=120
):
    """As `exact_posterior`, with a standard error under ``<key>_se``, for any K and beta. Every
    replicate tempers its particles from the prior to the posterior (weights, resampling, Metropolis
    moves in log space), which gives an unbiased evidence, and then goes on with Metropolis moves
    for the moments. Nothing but the log-density is used: no gradient, no step that a sampler under
    test shares."""
    V = np.ascontiguousarray(V, dtype=np.float64)
    settings = (float(beta), K, float(dispersion), float(rate_w), float(rate_h))
    return _read_only(_metropolis(V.tobytes(), V.shape, *settings, replicates, particles, steps))


@kept
def _metropolis(data, shape, beta, K, phi, rate_w, rate_h, replicates, particles, steps):
    V = np.frombuffer(data).reshape(shape)
    target = _Target(V, beta, phi, np.repeat((rate_w, rate_h), np.array(shape) * K), K)
    rng = np.random.default_rng(20170305)
    x = np.log(rng.exponential(1.0 / target.rates, (replicates, particles, target.rates.size)))
    x, log_evidence = _temper(target, x, rng)
    totals = {"mean_mu": 0.0, "square": 0.0, "sum_w": 0.0}
    for _ in range(steps):
        x = _move(target, x, 1.0, rng)
        mu = target.mean(x)
        totals["mean_mu"] += mu.mean(axis=1) / steps
        totals["square"] += (mu**2).mean(axis=1) / steps
        totals["sum_w"] += target.factors(x)[0].sum(axis=(-1, -2)).mean(axis=1) / steps
    # the variance about the pooled mean, so that the replicates' errors average out
    pooled = np.mean(totals["mean_mu"], axis=0)
    totals["var_mu"] = totals.pop("square") - 2.0 * totals["mean_mu"] * pooled + pooled**2
    result = _summary(totals)
    highest = log_evidence.max()
    ratio = np.exp(log_evidence - highest)
    result["log_evidence"] = float(highest + np.log(ratio.mean()) + target.constant())
    result["log_evidence_se"] = float(ratio.std(ddof=1) / np.sqrt(replicates) / ratio.mean())
    return result


def _summary(totals):
    result = {}
    for name, values in totals.items():
        result[name] = np.mean(values, axis=0)
        result[name + "_se"] = np.std(values, axis=0, ddof=1) / np.sqrt(len(values))
    return result


LADDER = (np.arange(17) / 16) ** 4  # powers of the likelihood, prior to posterior


class _Target(NamedTuple):
    """Log-density over x = log of (W, H), flattened along the last axis."""

    V: np.ndarray
    beta: float
    phi: float
    rates: np.ndarray
    K: int

    def factors(self, x):
        rows, columns = self.V.shape
        theta = np.exp(x)
        W = theta[..., : rows * self.K].reshape(*x.shape[:-1], rows, self.K)
        return W, theta[..., rows * self.K :].reshape(*x.shape[:-1], columns, self.K)

    def mean(self, x):
        W, H = self.factors(x)
        return np.asarray(np.einsum("...ik,...jk->...ij", W, H))

    def log_likelihood(self, x):
        """Log-likelihood of the observed cells, up to a constant."""
        rows, columns = np.nonzero(~np.isnan(self.V))
        mu = np.maximum(self.mean(x)[..., rows, columns], 1e-300)
        return np.asarray(-_misfit(self.V[rows, columns], mu, self.beta).sum(axis=-1) / self.phi)

    def constant(self):
        """What turns `log_likelihood` into the normalised one, found at a mean of 1."""
        v = self.V[~np.isnan(self.V)]
        offset = _misfit(v, np.ones_like(v), self.beta) / self.phi
        return float(np.sum(log_density(v, 1.0, self.phi, self.beta) + offset))

    def log_prior(self, x):
        """Exponential priors in log space (the Jacobian is x), up to a constant."""
        return np.asarray((x - self.rates * np.exp(x)).sum(axis=-1))


def _misfit(v, mu, beta):
    """The divergence without its part that is free of mu, written out once more."""
    if beta in (0.0, 1.0):
        log = np.log(mu)
        return np.asarray(mu - v * log if beta == 1.0 else v / mu + log)
    power = mu ** (beta - 1.0)
    return np.asarray(mu * power / beta - v * power / (beta - 1.0))


def _temper(target, x, rng):
    """Particles from the prior to the posterior, and each replicate's log-evidence."""
    replicates, particles = x.shape[:2]
    log_evidence = np.zeros(replicates)
    for low, high in pairwise(LADDER):
        gain = (high - low) * target.log_likelihood(x)
        log_evidence += special.logsumexp(gain, axis=1) - np.log(particles)
        weight = np.exp(gain - gain.max(axis=1, keepdims=True))
        edges = np.cumsum(weight, axis=1)
        points = (np.arange(particles) + rng.random((replicates, 1))) / particles
        for replicate in range(replicates):
            mass = edges[replicate]
            chosen = np.searchsorted(mass, points[replicate] * mass[-1])
            x[replicate] = x[replicate, np.minimum(chosen, particles - 1)]
        for _ in range(5):
            x = _move(target, x, high, rng)
    return x, log_evidence


def _move(target, x, power, rng):
    """Three Metropolis moves in log space that leave prior * likelihood**power alone."""
    old = target.log_prior(x) + power * target.log_likelihood(x)
    for proposal in (_walk_all, _walk_some, _trade):
        new_x = proposal(target, x, rng)
        new = target.log_prior(new_x) + power * target.log_likelihood(new_x)
        taken = np.log(rng.random(old.shape)) < new - old
        x = np.where(taken[..., None], new_x, x)
        old = np.where(taken, new, old)
    return x


def _walk_all(target, x, rng):
    scale = np.exp(rng.uniform(np.log(0.1), np.log(1.2), (*x.shape[:-1], 1)))
    return np.asarray(x + scale * rng.standard_normal(x.shape))


def _walk_some(target, x, rng):
    """Change about two coordinates by a lot."""
    chosen = rng.random(x.shape) < 2.0 / x.shape[-1]
    return np.asarray(x + chosen * 1.8 * rng.standard_normal(x.shape))


def _trade(target, x, rng):
    """Scale each component of W up and of H down: mu and the volume of x change little."""
    rows, columns = target.V.shape
    shift = 0.6 * rng.standard_normal((*x.shape[:-1], target.K))
    lead = (1,) * (x.ndim - 1)
    parts = [np.tile(shift, (*lead, rows)), np.tile(-shift, (*lead, columns))]
    return np.asarray(x + np.concatenate(parts, axis=-1))
