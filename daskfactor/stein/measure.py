"""Particles against a posterior: what the verbs that weigh or judge them share."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.executors import Executor
from daskfactor.inference.point import chosen_dispersion
from daskfactor.models.silf import SILFNMF
from daskfactor.models.tweedie import TweedieNMF
from daskfactor.stein.kernel import IMQ
from daskfactor.stein.scores import divergences
from daskfactor.stein.source import Particles, check_values, survey
from daskfactor.stein.stein import Stein, stein_matrix
from daskfactor.stein.targets import make_target

Array = NDArray[Any]
AnyModel = SILFNMF | TweedieNMF


class Measured(NamedTuple):
    """The Stein matrix of particles, and their objectives (M,) where the model has one."""

    stein: Stein
    objective: NDArray[np.float64] | None


def check_model(model: object) -> None:
    """Refuse what is not a model that particles can be weighed under."""
    if not isinstance(model, AnyModel):
        raise OptionError(
            "a Stein discrepancy is known from the posterior of a SILFNMF(n_components=...) and "
            f"of a TweedieNMF(n_components=...), got {model!r}"
        )


def checked_kernel(model: AnyModel, tangent: bool, kernel: object) -> IMQ:
    """The kernel, or the model's usual one; refuses what no data are needed to refuse."""
    check_model(model)
    if tangent and not isinstance(model, SILFNMF):
        raise OptionError(
            "tangent=True takes scores along the simplex that the columns of W of a SILFNMF lie "
            "on; those of a TweedieNMF are free, so leave it out"
        )
    if kernel is None:
        return IMQ() if isinstance(model, SILFNMF) else IMQ("median", "median")
    if not isinstance(kernel, IMQ):
        raise OptionError(
            f"kernel must be IMQ(...), got {kernel!r}; leave it out for the usual one"
        )
    return kernel


def law_of_data(model: AnyModel) -> TweedieNMF:
    """The law that checks of values, and trials of an executor, go by."""
    return TweedieNMF(model.n_components, beta=model.beta)


def check_width(particles: Particles, model: AnyModel) -> None:
    """Refuse particles of another number of components than the model's."""
    if particles.width != model.n_components:
        raise OptionError(
            f"the particles have {particles.width} components, the model {model.n_components}; "
            "pass the model that they are factors of"
        )


def measure(
    runner: Executor,
    data: BlockedData,
    model: AnyModel,
    particles: Particles,
    kernel: IMQ,
    tangent: bool,
) -> Measured:
    """The Stein matrix, and objectives where the model has one."""
    seen = survey(runner, particles)
    check_values(seen)
    phi = float("nan")
    if isinstance(model, SILFNMF):
        particles = particles.on_simplex(np.asarray(seen["rows"].sums, dtype=np.float64))
    else:
        phi = dispersion_of(runner, data, model)
    target = make_target(data, model, phi)
    divergence = divergences(runner, data, target, particles)
    found = stein_matrix(runner, data, target, particles, divergence, kernel, tangent)
    if not isinstance(model, SILFNMF):
        return Measured(found, None)
    return Measured(found, model.factor * divergence + 0.0)  # no -0.0


def dispersion_of(runner: Executor, data: BlockedData, model: TweedieNMF, seed: int = 0) -> float:
    """The model's; of ``"auto"`` what an evidence takes, which may need a fit."""
    if model.dispersion != "auto":
        return float(model.dispersion)
    return chosen_dispersion(data, model, seed, runner)
