"""Where a run without a store puts its results."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from daskfactor.results.layout import planned_draws
from daskfactor.results.schema import STEIN
from daskfactor.results.spec import RunSpec
from daskfactor.results.trace import build_tree
from daskfactor.results.weights import weighted_values

Array = NDArray[Any]


class MemorySink:
    """Collects what a run writes; draws in the arrays that the results will be.

    Parameters
    ----------
    spec
        The run's results; without it there can be no draws.
    """

    keeps_checkpoints: ClassVar[bool] = False

    def __init__(self, spec: RunSpec | None = None) -> None:
        self.spec = spec
        self.draws: dict[str, tuple[Array, Array]] = {}
        self.stats: dict[str, dict[int, list[dict[str, Array]]]] = {}
        self.moments: dict[int, dict[str, Any]] = {}
        self.monitor: dict[int, dict[str, Any]] = {}
        self.weighted: dict[str, dict[str, Any]] = {}
        self.weighted_attrs: dict[str, Any] = {}

    def write_draws(
        self, chain: int, start: int, W: Array, Ht: Array, group: str = "posterior"
    ) -> None:
        if group not in self.draws:
            assert self.spec is not None
            size = self.spec.chains, planned_draws(group, self.spec.draws)
            self.draws[group] = tuple(  # type: ignore[assignment]  # of two
                np.empty((*size, *piece.shape[1:]), piece.dtype) for piece in (W, Ht)
            )
        for whole, piece in zip(self.draws[group], (W, Ht), strict=True):
            whole[chain, start : start + len(piece)] = piece

    def write_stats(
        self, chain: int, start: int, stats: dict[str, Array], group: str = "sample_stats"
    ) -> None:
        del start
        self.stats.setdefault(group, {}).setdefault(chain, []).append(stats)

    def write_moments(self, chain: int, **moments: Any) -> None:
        self.moments[chain] = moments

    def write_monitor(self, chain: int, **moments: Any) -> None:
        self.monitor[chain] = moments

    def write_weights(
        self,
        *,
        weight: Array,
        lp: Array,
        stein_matrix: Array,
        discrepancy: float,
        discrepancy_equal: float,
        attrs: Mapping[str, Any],
    ) -> None:
        """As `RunStore.write_weights`."""
        assert self.spec is not None
        done, both = self.spec.draws, (discrepancy, discrepancy_equal)
        self.weighted = weighted_values(done, done, weight, lp, stein_matrix, both, attrs)
        self.weighted_attrs = dict(attrs)

    def update_attrs(self, attrs: dict[str, Any]) -> None:
        """Nothing to do: attributes are written with the tree."""

    def checkpoint(self, arrays: dict[str, Array], meta: dict[str, Any]) -> None:
        """Nothing to save: what is in memory goes with the process."""

    def tree(self, spec: RunSpec, attrs: Mapping[str, Any]) -> xr.DataTree:
        """The results as a store of the same run would give them."""
        groups = {group: {"W": W, "H": Ht} for group, (W, Ht) in self.draws.items()}
        for group, statistics in self.stats.items():
            own = [pieces for _, pieces in sorted(statistics.items())]
            groups[group] = {
                name: np.stack([np.concatenate([piece[name] for piece in one]) for one in own])
                for name in own[0][0]
            }
        for group, moments in (("posterior_moments", self.moments), ("monitor", self.monitor)):
            if moments:
                found = [values for _, values in sorted(moments.items())]
                groups[group] = {
                    name.replace("Ht", "H"): np.stack([values[name] for values in found])
                    for name in found[0]
                }
        for group, values in self.weighted.items():
            groups[group] = groups.get(group, {}) | values
        whole = replace(spec, attrs={**spec.attrs, **attrs})
        return build_tree(whole, groups, {STEIN: self.weighted_attrs})
