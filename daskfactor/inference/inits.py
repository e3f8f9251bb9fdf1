"""Check the options of a start: its kind, the number of short starts, or a result."""

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import numpy as np
import xarray as xr

from daskfactor.checks import refuse_unknown, whole_number
from daskfactor.data.blocks import BlockedData
from daskfactor.errors import OptionError
from daskfactor.models.settings import Array, FactorModel
from daskfactor.runs.schema import component_labels, factor_dims
from daskfactor.runs.trace import Run, factors_of
from daskfactor.urls import is_url


class Kind(NamedTuple):
    """A kind of start.

    Attributes
    ----------
    climbs
        True if a sampler's warm start goes on from it where its length is ``"auto"``.
    varies
        True if another number gives another start.
    numbered
        True if `singular.prepare_starts` makes it, for chains and for particles.
    """

    climbs: bool = True
    varies: bool = True
    numbered: bool = False


POINT, DRAWS = "optimize", "sample"
KINDS: Final = {
    "auto": Kind(),
    "multiplicative": Kind(),
    "q_transform": Kind(numbered=True),
    "random": Kind(numbered=True),
    "nndsvdar": Kind(numbered=True),
    "nndsvd": Kind(varies=False, numbered=True),
    "prior": Kind(climbs=False),
    POINT: Kind(climbs=False, varies=False),
    DRAWS: Kind(climbs=False, varies=False),
}
"""All kinds of start, those that are results of the verbs of these names with them."""
SHORT: Final = 40
"""Iterations after which starts are compared: after 20 the best is often still behind."""
EQUAL: Final = 1e-5
"""Relative difference up to which frozen components are those of a result."""


@dataclass(frozen=True, eq=False)
class Init:
    """Start of the chains of a run.

    Attributes
    ----------
    kind
        One of `KINDS`; ``"auto"`` is the first that the model names.
    starts
        Short starts of each chain, of which the best goes on.
    drawn
        Of a result, (chain, draw) positions of what chains begin with, one after the other.
    W, H
        Its factors, (n, I, K) and (n, K, J) in the caller's order; None: it is no result, or
        they are no longer needed.
    """

    kind: str = "auto"
    starts: int = 1
    drawn: tuple[tuple[int, int], ...] = ()
    W: Array | None = None
    H: Array | None = None

    @property
    def made_by_bands(self) -> bool:
        """True if the bands of a non-negative model draw their rows where they are."""
        return self.W is None and not KINDS[self.kind].numbered

    @property
    def climbs(self) -> bool:
        """True if an automatic warm start goes on from it."""
        return KINDS[self.kind].climbs

    @property
    def iterations(self) -> int:
        """Multiplicative updates of all starts of a chain before the best goes on."""
        return self.starts * SHORT if self.starts > 1 else 0

    def factors(self, chain: int) -> tuple[Array, Array]:
        """Return W (I, K) and Hᵀ (J, K) of a result that a chain begins with."""
        assert self.W is not None and self.H is not None, "there is no result"  # noqa: PT018
        at = chain % len(self.W)
        return self.W[at], self.H[at].T

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, which are written into results."""
        return {"kind": self.kind, "starts": self.starts, "drawn": [list(at) for at in self.drawn]}

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that a run's store keeps beside `to_dict`."""
        return {} if self.W is None or self.H is None else {"init/W": self.W, "init/H": self.H}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], arrays: Mapping[str, Array]) -> Self:
        """Rebuild from `to_dict` and `arrays`; without either, the usual start."""
        refuse_unknown("the stored init", values, ("kind", "starts", "drawn"))
        refuse_unknown("the stored init", {str(values.get("kind", "auto")): None}, KINDS)
        whole_number("starts", values.get("starts", 1), 1)
        options = dict(values) | {"drawn": tuple((c, d) for c, d in values.get("drawn", ()))}
        return cls(**options, W=arrays.get("init/W"), H=arrays.get("init/H"))


USUAL: Final = Init()


def checked_init(
    init: Any, starts: Any, model: FactorModel, data: BlockedData, chains: int = 1
) -> Init:
    """Return the start that ``init`` and ``starts`` of a verb describe.

    Parameters
    ----------
    init
        Name of a kind of start, result of ``optimize`` or of ``sample``, or path of a run store.
    starts
        Short starts of each chain.
    chains
        Number of chains; each begins with another draw as long as a result has so many.

    Raises
    ------
    OptionError
        If the model does not start so, a result does not fit the data and the model, or starts
        would all be the same.
    """
    count, kinds = whole_number("starts", starts, 1), ("auto", *model.inits)
    name = init.replace("-", "_") if isinstance(init, str) else None
    path = isinstance(init, str) and (is_url(init) or Path(init).exists())
    if name in kinds:
        start = Init(str(name), count)
    elif path or isinstance(init, xr.Dataset | xr.DataTree | PathLike):
        start = _of_result(init, model, data, chains)
    else:
        names = ", ".join(f'"{kind.replace("_", "-")}"' for kind in kinds)
        raise OptionError(
            f"init of a {type(model).__name__} must be {names}, a Dataset of W (row, component) "
            f"and H (component, column), a result, or the path of a run's store, got {init!r:.60}"
        )
    kind = model.inits[0] if start.kind == "auto" else start.kind
    if count > 1 and not (KINDS[kind].climbs and KINDS[kind].varies):
        other = f'take init="{model.inits[0]}", or ' if KINDS[model.inits[0]].climbs else ""
        raise OptionError(
            f"starts={count} are short fits by multiplicative updates from different factors, and "
            f'there are none where init is "{kind}"; {other}leave starts out'
        )
    return start


def _of_result(result: Any, model: FactorModel, data: BlockedData, chains: int) -> Init:
    """Read the factors of a result that chains begin with, and check them."""
    run = Run.of(result, "a start from it", point=True)
    group, places = run.posterior, [(0, 0)] if run.is_point else _picked(run, chains)
    _check_fit(group, factor_dims(group), model, data)
    W, H = (
        np.stack([factor[at].compute(scheduler="threads").values for at in places])
        for factor in factors_of(group)
    )
    _check_values(W, H, model)
    return Init(POINT, 1, (), W, H) if run.is_point else Init(DRAWS, 1, tuple(places), W, H)


def _picked(run: Run, chains: int) -> list[tuple[int, int]]:
    """Choose draws to begin with: the last of each chain, then evenly back; heavy particles."""
    weights, sizes = run.weights, run.posterior.sizes
    count, draws = sizes["chain"], sizes["draw"]
    if weights is not None:
        order = np.argsort(-weights, axis=None, kind="stable")
        heavy = order[: min(chains, int(np.count_nonzero(weights)))]
        return [(int(at) // draws, int(at) % draws) for at in heavy]
    apart = draws // -(-chains // count)
    return [(new % count, draws - 1 - new // count * apart) for new in range(chains)]


def _check_fit(
    factors: xr.Dataset, dims: tuple[str, str], model: FactorModel, data: BlockedData
) -> None:
    """Refuse factors of other data, or with other components."""
    labels, sizes = data.labels, factors.sizes
    shape = sizes[dims[0]], sizes["component"], sizes[dims[1]]
    expected = data.shape[0], model.width, data.shape[1]
    if shape != expected:
        raise OptionError(
            "init has factors of {} x {} x {} (rows, components, columns)".format(*shape)
            + ", data and model need {} x {} x {}; pass a result of such a fit".format(*expected)
        )
    if dims == (labels.col_dim, labels.row_dim) and dims[0] != dims[1]:
        raise OptionError(
            f"init has {dims[0]} as rows and {dims[1]} as columns, the data the other way round; "
            "transpose one of them"
        )
    names = model.component_names()
    components = list(map(str, component_labels(factors)))
    if names is not None and components != list(names):
        raise OptionError(
            f"init has components {components}, those of a "
            f"{type(model).__name__} are {list(names)}; pass a result of this model"
        )
    sides = (dims[0], labels.row_coords), (dims[1], labels.col_coords)
    for dim, coords in sides:
        for name, values in coords.items():
            if name not in factors.coords or factors[name].dims != (dim,):
                continue
            if not np.array_equal(factors[name].values, np.asarray(values)):
                raise OptionError(
                    f"init and the data have different labels {name!r}; pass a result of these "
                    "data, with rows and columns in this order"
                )


def _check_values(W: Array, H: Array, model: FactorModel) -> None:
    """Refuse values that the model does not have; frozen components are as the model has them."""
    for name, values in (("W", W), ("H", H)):
        if not np.isfinite(values).all() or (model.nonnegative and values.min() < 0):
            least = "finite and at least 0" if model.nonnegative else "finite"
            raise OptionError(
                f"{name} of init must be {least}, got values from {values.min():g} to "
                f"{values.max():g}; pass a result of this model"
            )
    sides = ("fixed_w", W), ("fixed_h", H.swapaxes(1, 2))
    for (name, values), fixed in zip(sides, model.fixed, strict=True):
        if fixed is None or fixed.values is None:
            continue
        expected, frozen = fixed.values.T, values[:, :, list(fixed.frozen)]
        if not np.allclose(frozen, expected, rtol=EQUAL, atol=EQUAL * expected.max()):
            raise OptionError(
                f"init has other values in the components that {name} of the model freezes; pass "
                f"a result of this model, or leave {name} out"
            )
