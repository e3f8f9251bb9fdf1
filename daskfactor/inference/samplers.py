"""Find samplers by name: the package's public names are the one list of them."""

from functools import cache
from typing import Any

import daskfactor
from daskfactor.errors import StoreFormatError
from daskfactor.inference.base import Sampler


@cache
def samplers() -> dict[str, type[Sampler]]:
    """Return all samplers by name; imports whatever the package has."""
    values = (getattr(daskfactor, name) for name in dir(daskfactor))
    kinds = (value for value in values if isinstance(value, type) and issubclass(value, Sampler))
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
