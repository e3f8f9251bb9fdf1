"""Directed acyclic graphs of discrete variables, written as text: ``"r -> i, r -> j"``."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Self

from daskfactor.errors import ModelError

_SEPARATORS = re.compile(r"[,;\n]")
_EXAMPLE = 'write edges such as "r -> i, r -> j"'

Edge = tuple[str, str]


@dataclass(frozen=True)
class Graph:
    r"""A Bayesian network: every variable draws from a table given its parents.

    .. math:: p(i_{1:N}) = \prod_n \theta_n(i_n \mid i_{\mathrm{pa}(n)})

    Make one from text with :meth:`parse`.

    Attributes
    ----------
    variables
        Names, by their first appearance in the text.
    edges
        (parent, child), as written, each once.

    Raises
    ------
    ModelError
        If an edge leads from a variable to itself, or edges form a cycle.

    References
    ----------
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", the Bayesian allocation model.
    """

    variables: tuple[str, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        for parent, child in self.edges:
            if parent == child:
                raise ModelError(
                    f"the graph has an edge from {parent!r} to itself; a variable cannot be its "
                    "own parent, so leave that edge out"
                )
        self._sorted()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a graph from text.

        Edges ``r -> i`` and chains ``r -> i -> j`` are separated by commas, semicolons or
        newlines; a name alone is a variable without edges. A variable with several parents
        has one table given all of them.

        Raises
        ------
        ModelError
            If the text is empty, a name is not a Python identifier, or the edges are not
            those of an acyclic graph.
        """
        if not isinstance(text, str):
            raise ModelError(f"the graph must be a text, got {text!r}; {_EXAMPLE}")
        variables: dict[str, None] = {}
        edges: dict[Edge, None] = {}
        for statement in filter(None, (part.strip() for part in _SEPARATORS.split(text))):
            names = [name.strip() for name in statement.split("->")]
            for name in names:
                if not name.isidentifier():
                    raise ModelError(
                        f"the graph has {name!r} in {statement!r}; a name must be letters, digits "
                        f"and underscores, and not begin with a digit: {_EXAMPLE}"
                    )
                variables[name] = None
            edges |= dict.fromkeys(pairwise(names))
        if not variables:
            raise ModelError(f"the graph is empty; {_EXAMPLE}")
        return cls(tuple(variables), tuple(edges))

    @cached_property
    def parents(self) -> Mapping[str, tuple[str, ...]]:
        """Parents of each variable, in the order of their edges."""
        return {
            name: tuple(parent for parent, child in self.edges if child == name)
            for name in self.variables
        }

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Variables with parents before children, else by appearance."""
        return self._sorted()

    def family(self, name: str) -> tuple[str, ...]:
        """Return the axes of a variable's table: its parents, then itself."""
        return (*self.parents[name], name)

    def in_order(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return some of the variables, parents before children."""
        chosen = set(names)
        return tuple(name for name in self.order if name in chosen)

    def _sorted(self) -> tuple[str, ...]:
        try:
            TopologicalSorter(self.parents).prepare()
        except CycleError as error:
            raise ModelError(
                f"the graph has the cycle {' -> '.join(error.args[1])}; a Bayesian "
                "network must not have any, so turn or leave out one of these edges"
            ) from None
        done: list[str] = []
        waiting = list(self.variables)
        while waiting:
            done.append(next(name for name in waiting if set(self.parents[name]) <= set(done)))
            waiting.remove(done[-1])
        return tuple(done)

    def __str__(self) -> str:
        """Return text that :meth:`parse` reads back as an equal graph."""
        unseen = list(self.variables)
        words: list[str] = []
        for edge in self.edges:
            while (new := [name for name in edge if name in unseen]) != unseen[: len(new)]:
                words.append(unseen.pop(0))
            unseen = unseen[len(new) :]
            words.append(" -> ".join(edge))
        return ", ".join(words + unseen)
