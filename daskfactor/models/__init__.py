"""Models: densities, gradients and predictive intervals, in plain NumPy and SciPy.

Here is where all of them are, also those of other folders, and where stored ones are read back.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from daskfactor.errors import ModelError, OptionError
from daskfactor.models.settings import FactorModel

MODELS: Final = {
    "TweedieNMF": "models.tweedie",
    "NegativeBinomialNMF": "models.negative_binomial",
    "GaussianMF": "models.gaussian",
    "Coupled": "models.coupled",
    "CP": "models.cp",
    "SILFNMF": "stein.silf",
    "AllocationModel": "allocation.model",
    "GaussianAdditive": "evidence.gaussian_additive",
}
"""The module of every model, loaded where one is read back."""
ELSEWHERE: Final = {
    "SILFNMF": "stein_posterior(V, model)",
    "AllocationModel": "log_evidence(X, model)",
    "GaussianAdditive": "log_evidence(x, model)",
}
"""Verbs that take models whose factors are not sampled."""


def model_from_dict(values: Mapping[str, Any]) -> Any:
    """Rebuild a model from its ``to_dict``.

    Raises
    ------
    ModelError
        If no model has that name, or it has other settings.
    """
    kind = values.get("type")
    if not isinstance(kind, str) or kind not in MODELS:
        raise ModelError(
            f"the stored model is of type {kind!r}, which this version does not know; it knows "
            f"{', '.join(MODELS)}"
        )
    return getattr(import_module(f"daskfactor.{MODELS[kind]}"), kind).from_dict(values)


def check_model(model: object) -> None:
    """Refuse anything but a model whose factors can be sampled."""
    if not (isinstance(model, FactorModel) and model.has_observations):
        name = type(model).__name__
        if verb := ELSEWHERE.get(name):
            raise OptionError(f"{name} is a model of another verb: pass it to {verb}")
        raise OptionError(
            "model must be a model such as TweedieNMF(n_components=20) or "
            f"GaussianMF(n_components=20), got {model!r}"
        )
