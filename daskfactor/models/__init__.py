"""Models: densities, gradients and predictive intervals, in plain NumPy and SciPy.

Here are all that there are, by the name of their class, and where stored ones are read back.
"""

from collections.abc import Mapping
from typing import Any, Final

from daskfactor.errors import ModelError, OptionError
from daskfactor.models.allocation import AllocationModel
from daskfactor.models.coupled import Coupled
from daskfactor.models.cp import CP
from daskfactor.models.gaussian import GaussianAdditive, GaussianMF
from daskfactor.models.negative_binomial import NegativeBinomialNMF
from daskfactor.models.settings import FactorModel, StoredModel
from daskfactor.models.silf import SILFNMF
from daskfactor.models.tweedie import TweedieNMF

MODELS: dict[str, type[StoredModel]] = {
    model.__name__: model
    for model in (
        TweedieNMF,
        NegativeBinomialNMF,
        GaussianMF,
        Coupled,
        CP,
        SILFNMF,
        AllocationModel,
        GaussianAdditive,
    )
}


ELSEWHERE: Final = {
    "SILFNMF": "stein_posterior(V, model)",
    "AllocationModel": "log_evidence(X, model)",
    "GaussianAdditive": "log_evidence(x, model)",
}
"""What takes models whose factors are not sampled."""


def model_from_dict(values: Mapping[str, Any]) -> Any:
    """Rebuild a model from its ``to_dict``.

    Raises
    ------
    ModelError
        If no model has that name, or it has other settings.
    """
    kind = values.get("type")
    if kind not in MODELS:
        raise ModelError(
            f"the stored model is of type {kind!r}, which this version does not know; it knows "
            f"{', '.join(MODELS)}"
        )
    return MODELS[kind].from_dict(values)


def check_model(model: object) -> None:
    """Refuse anything but a model whose factors can be sampled."""
    if not (isinstance(model, FactorModel) and model.has_observations):
        verb = ELSEWHERE.get(type(model).__name__)
        if verb is not None:
            raise OptionError(
                f"{type(model).__name__} is a model of another verb: pass it to {verb}"
            )
        raise OptionError(
            "model must be a model such as TweedieNMF(n_components=20) or "
            f"GaussianMF(n_components=20), got {model!r}"
        )
