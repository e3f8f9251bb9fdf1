"""The public verb ``stein_discrepancy``: how far a set of factorizations is from a posterior."""

import json
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from daskfactor.checks import warn, whole_number
from daskfactor.errors import OptionError, SamplingWarning
from daskfactor.executors import Executor
from daskfactor.inference.session import session, verb
from daskfactor.progress import OnEvent
from daskfactor.results.trace import Trace, require_draws
from daskfactor.stein.kernel import IMQ, checked_weights, discrepancy, stein_weights
from daskfactor.stein.particles import Pair, Particles, Posterior, factors_of


def checked_kernel(model: Any, tangent: bool, kernel: object) -> IMQ:
    """The kernel, or the model's usual one; refuses what no data are needed to refuse."""
    if not getattr(model, "has_scores", False):
        raise OptionError(
            "a Stein discrepancy is known from the posterior of a SILFNMF(n_components=...) and "
            f"of a TweedieNMF(n_components=...), got {model!r}"
        )
    if tangent and not model.simplex:
        raise OptionError(
            "tangent=True takes scores along the simplex that the columns of W of a SILFNMF lie "
            "on; those of a TweedieNMF are free, so leave it out"
        )
    if kernel is None:
        return IMQ() if model.has_threshold else IMQ("median", "median")
    if not isinstance(kernel, IMQ):
        raise OptionError(
            f"kernel must be IMQ(...), got {kernel!r}; leave it out for the usual one"
        )
    return kernel


@verb
def stein_discrepancy(
    particles: Trace | Pair,
    V: Any,
    model: Any,
    *,
    weights: ArrayLike | None = None,
    tangent: bool = False,
    kernel: IMQ | None = None,
    most: int = 200,
    progressbar: bool = True,
    client: Any = None,
    blocks: int | None = None,
    unstored: str | None = None,
    executor: str | Executor = "auto",
    callback: OnEvent | None = None,
) -> xr.Dataset:
    r"""Kernelised Stein discrepancy of some factorizations from a posterior: smaller is nearer.

    .. math:: \mathrm{KSD} = \sqrt{w^\top K w}, \quad K_{mn} = k\, s_m^\top s_n
        + s_m^\top \nabla_{\theta_n} k + s_n^\top \nabla_{\theta_m} k
        + \mathrm{tr}\, \nabla_{\theta_m} \nabla_{\theta_n}^\top k

    with scores :math:`s = \nabla \log p(W, H | V)` and the kernel k of :class:`IMQ`. No
    normalising constant is needed, and nothing but the factorizations themselves: it also
    tells draws that a step has biased, which chains agree on, from better ones.

    Parameters
    ----------
    particles
        Result of :func:`sample` or the path of its store (its draws, chains one after the
        other), or a pair of arrays W (M, I, K) and H (M, K, J): NumPy, memory-mapped, zarr,
        dask or xarray. Non-negative.
    V : array (I, J)
        The data, as for :func:`sample`.
    model
        The posterior: a :class:`SILFNMF` with a threshold, or a :class:`TweedieNMF`. Settings
        that are ``"auto"`` are those of the run if a run is given; else a `TweedieNMF` has
        them chosen as for :func:`log_evidence`. Under a `SILFNMF` columns of W are first
        divided by their sums and rows of H multiplied with them, which leaves WH as it is.
    weights
        Probability masses (M,) whose discrepancy is wanted; left out, all are equal.
    tangent
        Take the score in W along the simplex only (`SILFNMF`): its column means are
        subtracted, and a column of W counts for I - 1 dimensions. The default, as far as
        the paper tells its own, is the score in all of space.
    kernel
        Left out: ``IMQ()``, the paper's, for a `SILFNMF`, and median distances for a
        `TweedieNMF`.
    most
        Largest number of draws of a run that is looked at: of more, one in two, in three
        and so on is. Time grows with their number, a matrix with its square.
    progressbar, client, blocks, unstored, executor, callback
        As for :func:`sample`.

    Returns
    -------
    Dataset
        ``discrepancy`` under ``weights``, ``discrepancy_equal`` and
        ``discrepancy_optimal``; ``weight`` (particle), the masses of the last, see
        :func:`daskfactor.stein.stein_weights`; ``stein_matrix`` (particle,
        other_particle); ``log_density`` (particle), up to a constant; ``objective``
        (particle) for a `SILFNMF`. The attributes ``scale_w`` and ``scale_h`` are the
        kernel's.

    Raises
    ------
    DataError, ModelError, OptionError
        If data, model or particles cannot be used.

    Notes
    -----
    Values rank sets of particles under one posterior and one kernel, and say nothing by
    themselves: the discrepancy of the posterior from itself is not zero here, for two
    reasons. Where its density is positive at the boundary of what is allowed, at W = 0 or
    H = 0, partial integration leaves a term there; so it is with exponential and Dirichlet
    priors, unless the likelihood vanishes at the boundary. And a score in all of space does
    not know that W cannot leave the simplex, which ``tangent=True`` puts right. Even without
    either, M independent draws would be at about :math:`\sqrt{\sum_m K_{mm}} / M`, and
    draws that hang together further off. So compare sets of equally many particles, and
    fix the kernel, for instance at ``IMQ(first.scale_w, first.scale_h)``.

    Masood and Doshi-Velez, equations 3, 4 and 7 and algorithm 5.
    """
    kernel = checked_kernel(model, tangent, kernel)
    whole_number("most", most, 1)
    (W, H), coords, decided = _given(particles, most, weights)
    model = _with_decided(model, decided)
    dtype = "float64" if np.dtype(W.dtype) == np.float64 else "float32"
    with session(
        V,
        model,
        blocks,
        unstored,
        reading={"dtype": dtype},
        progressbar=progressbar,
        client=client,
        executor=executor,
        callback=callback,
    ) as run:
        ours = Particles.of(W, H, run.data).loaded()
        if ours.width != model.n_components:
            raise OptionError(
                f"the particles have {ours.width} components, the model {model.n_components}; "
                "pass the model that they are factors of"
            )
        if weights is not None:
            weights = checked_weights(weights, ours.count)
        ours = ours.checked(run.executor, model.simplex)
        posterior = Posterior.of(run.executor, run.data, model, kernel, tangent)
        found = posterior.stein_matrix(ours)
    best = stein_weights(found.matrix)
    variables: dict[str, Any] = {
        "discrepancy": discrepancy(found.matrix, weights),
        "discrepancy_equal": discrepancy(found.matrix),
        "discrepancy_optimal": discrepancy(found.matrix, best),
        "weight": ("particle", best),
        "stein_matrix": (("particle", "other_particle"), found.matrix),
        "log_density": ("particle", found.log_density),
    }
    if model.has_threshold:
        variables["objective"] = ("particle", posterior.objectives(found.divergence))
    attrs = {
        **asdict(found.kernel),
        "tangent": int(tangent),
        "model": json.dumps(model.to_dict()),
        "inference_library": "daskfactor",
    }
    return xr.Dataset(variables, coords=coords, attrs=attrs)


def _given(
    particles: Trace | Pair, most: int, weights: object
) -> tuple[Pair, dict[str, Any], dict[str, float]]:
    """Factors (M, I, K) and (M, K, J), their coordinates, and what their run decided.

    Of many draws every n-th is taken.
    """
    if isinstance(particles, tuple | list):
        if len(particles) != 2:
            raise OptionError(
                f"particles must be a run or a pair (W, H) of arrays, got {len(particles)} of them"
            )
        W, H = (one if hasattr(one, "dtype") else np.asarray(one) for one in particles)
        return (W, H), {}, {}
    tree = require_draws(particles, "a Stein discrepancy")
    W, H = factors_of(tree)
    total = W.shape[0] * W.shape[1]
    step = -(-total // most)
    if step > 1 and weights is not None:
        raise OptionError(
            f"weights are for all {total} draws, of which most={most} lets only some be looked "
            f"at; pass most={total} as well"
        )
    if step > 1:
        warn(
            f"of the {total} draws one in {step} is looked at; pass most={total} for all of them",
            SamplingWarning,
        )
    group = tree["posterior"].to_dataset()
    chains, draws = group["chain"].values, group["draw"].values
    coords = {
        "chain": ("particle", np.repeat(chains, len(draws))[::step]),
        "draw": ("particle", np.tile(draws, len(chains))[::step]),
    }
    decided = {}
    if "constant_data" in tree.children:
        constants = tree["constant_data"].to_dataset()
        decided = {str(name): float(value) for name, value in constants.data_vars.items()}
    W, H = (one.reshape(total, *one.shape[2:])[::step] for one in (W, H))
    return (W, H), coords, decided


def _with_decided(model: Any, decided: dict[str, float]) -> Any:
    """The model with what a run made of its ``"auto"`` settings."""
    open_ = [name for name in model.from_data if getattr(model, name) == "auto"]
    model = replace(model, **{name: decided[name] for name in open_ if name in decided})
    if model.has_threshold:
        assert model.eps > 0  # raises if it is still "auto"
    return model
