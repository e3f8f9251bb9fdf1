"""Find algorithms by name: the package's public names are the one list of them."""

from functools import cache
from typing import Any

import daskfactor
from daskfactor.errors import OptionError, StoreFormatError
from daskfactor.inference.base import Optimizer, Sampler
from daskfactor.models import check_model
from daskfactor.models.settings import FactorModel


@cache
def samplers() -> dict[str, type[Sampler]]:
    """Return all samplers by name."""
    return _known(Sampler)


@cache
def optimizers() -> dict[str, type[Optimizer]]:
    """Return all optimisers by name."""
    return _known(Optimizer)


def _known(base: type[Any]) -> dict[str, type[Any]]:
    """Return the public classes of a kind by name; imports whatever the package has."""
    values = (getattr(daskfactor, name) for name in dir(daskfactor))
    kinds = (value for value in values if isinstance(value, type) and issubclass(value, base))
    return {kind.__name__: kind for kind in kinds}


def sampler_from_dict(values: dict[str, Any]) -> Sampler:
    """Make the sampler that ``to_dict`` described."""
    name = values.get("type")
    kind = getattr(daskfactor, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Sampler)):
        raise StoreFormatError(
            f"the run was made by a sampler called {name!r}, which this version does not have; it "
            f"knows {', '.join(samplers())}"
        )
    return kind.from_dict(values)


def checked_sampler(model: FactorModel, sampler: object) -> Sampler:
    """Give the sampler, or a model's own; refuse what does not go together."""
    check_model(model)
    if sampler is None:
        usual: Sampler = getattr(daskfactor, model.default_sampler)()
        return usual
    if not isinstance(sampler, Sampler):
        known = ", ".join(f"{kind}(...)" for kind in samplers())
        raise OptionError(f"sampler must be one of {known}, got {sampler!r}")
    kind = type(model).__name__
    if model.nonnegative != sampler.nonnegative:
        right = [name for name, own in samplers().items() if own.nonnegative != sampler.nonnegative]
        raise OptionError(
            f"{kind} cannot be sampled by {sampler.name}: it takes "
            f"{' or '.join(f'{name}()' for name in right)}; leave sampler out for the right one"
        )
    sampler.check_model(model)
    return sampler
