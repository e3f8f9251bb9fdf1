"""Checks of the settings of an `AllocationModel`, each with its one sentence."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from daskfactor.errors import ModelError
from daskfactor.models.frozen import Frozen
from daskfactor.models.graph import Graph

LARGEST_HIDDEN = 65_535
"""Joint configurations of the hidden variables: what two bytes a token can tell apart."""


SMALLEST, LARGEST = 1e-100, 1e100
"""Numbers between which products of pseudo-counts are neither 0 nor infinite."""


def positive(what: str, value: Any) -> float:
    """A positive number that arithmetic can cope with, as a plain float."""
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not SMALLEST <= number <= LARGEST:
        raise ModelError(
            f"{what} must be a positive, finite number from {SMALLEST:g} to {LARGEST:g}, got "
            f"{value!r}"
        )
    return number


def size(what: str, value: Any) -> int:
    """A whole number of at least 1, as a plain int."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ModelError(f"{what} must be a whole number of at least 1, got {value!r}")
    return number


def checked_hidden(given: Any, graph: Graph) -> Frozen[str, int]:
    """Sizes of the hidden variables, in the order of the graph."""
    if not isinstance(given, Mapping) or not given:
        raise ModelError(
            f"hidden must give the size of at least one hidden variable, such as {{'r': 3}}, "
            f"got {given!r}; a model without hidden ones is the same as with one of size 1"
        )
    _known("hidden", given, graph)
    sizes = {
        name: size(f"the size of the hidden variable {name!r}", given[name])
        for name in graph.in_order(given)
    }
    if (states := math.prod(sizes.values())) > LARGEST_HIDDEN:
        raise ModelError(
            f"the hidden variables have {states} joint configurations; at most {LARGEST_HIDDEN} "
            "are possible, so make them smaller"
        )
    return Frozen(sizes)


def checked_observed(
    given: Any, graph: Graph, hidden: Frozen[str, int]
) -> tuple[str, ...] | Frozen[str, int]:
    """The observed variables in the order of the data's dims, with sizes if there are any."""
    rest = tuple(name for name in graph.variables if name not in hidden)
    if given is None:
        given = rest
    if isinstance(given, str) or not isinstance(given, Sequence | Mapping):
        raise ModelError(
            "observed must be a list of names in the order of the data's dimensions, or a mapping "
            f"of names to sizes, got {given!r}"
        )
    _known("observed", given, graph)
    names = tuple(given)
    if len(set(names)) < len(names):
        raise ModelError(f"observed names a variable twice: {names}; name each once")
    if both := [name for name in names if name in hidden]:
        raise ModelError(f"{both[0]!r} is given as hidden and as observed; it can be only one")
    if lost := [name for name in rest if name not in names]:
        raise ModelError(
            f"{lost[0]!r} is in the graph, but neither hidden nor observed; give its size in "
            "hidden or its name in observed"
        )
    if not names:
        raise ModelError("every variable of the graph is hidden; at least one must be observed")
    if not isinstance(given, Mapping):
        return names
    return Frozen({name: size(f"the size of {name!r}", given[name]) for name in names})


def checked_tied(given: Any, graph: Graph) -> Frozen[tuple[str, ...], float]:
    """Groups of variables that draw from one table, with its pseudo-count per cell."""
    if not isinstance(given, Mapping):
        raise ModelError(
            "tied must map groups of variables to pseudo-counts per cell, such as "
            f"{{('i', 'j'): 0.5}}, got {given!r}"
        )
    tied: dict[tuple[str, ...], float] = {}
    for group, value in given.items():
        if isinstance(group, str) or not isinstance(group, Sequence) or len(group) < 2:
            raise ModelError(
                f"tied has the group {group!r}; a group is a tuple of two or more variables, such "
                "as ('i', 'j')"
            )
        names = tuple(group)
        _known("tied", names, graph)
        if len(set(names)) < len(names) or any(set(names) & set(other) for other in tied):
            raise ModelError(f"tied names a variable of {names} twice; name each once")
        if len({len(graph.parents[name]) for name in names}) > 1:
            told = ", ".join(f"{name}: {len(graph.parents[name])}" for name in names)
            raise ModelError(
                f"tied variables need equally many parents, got {told}; they draw from one table"
            )
        tied[names] = positive(f"the pseudo-count of the tied variables {names}", value)
    return Frozen(tied)


def checked_concentration(
    given: Any, graph: Graph, tied: Frozen[tuple[str, ...], float]
) -> float | Frozen[str, float]:
    """One total for all tables, or pseudo-counts per cell for each of them."""
    if not isinstance(given, Mapping):
        return positive("concentration", given)
    _known("concentration", given, graph)
    bound = {name for group in tied for name in group}
    if both := [name for name in given if name in bound]:
        raise ModelError(
            f"concentration has {both[0]!r}, whose table is tied; its pseudo-count stands in tied"
        )
    wanted = [name for name in graph.order if name not in bound]
    if lost := [name for name in wanted if name not in given]:
        raise ModelError(
            f"concentration lacks {', '.join(map(repr, lost))}; give a pseudo-count per cell for "
            f"every table ({', '.join(map(repr, wanted))}), or one number for all"
        )
    return Frozen({name: positive(f"the pseudo-count of {name!r}", given[name]) for name in wanted})


def check_equal_sizes(
    graph: Graph, tied: Iterable[tuple[str, ...]], sizes: Mapping[str, int]
) -> None:
    """Refuse tied variables whose tables have different sizes; unknown sizes are let pass."""
    for group in tied:
        first, *others = [graph.family(name) for name in group]
        for other in others:
            for one, two in zip(first, other, strict=True):
                if sizes.get(one, 0) != sizes.get(two, 0) and {one, two} <= sizes.keys():
                    raise ModelError(
                        f"the tied variables {group} draw from one table, but {one!r} has size "
                        f"{sizes[one]} and {two!r} has size {sizes[two]}; make them equal, or "
                        "untie the variables"
                    )


def _known(where: str, names: Any, graph: Graph) -> None:
    for name in names:
        if name not in graph.variables:
            raise ModelError(
                f"{where} has {name!r}, which is not in the graph; its variables are "
                f"{', '.join(graph.variables)}"
            )
