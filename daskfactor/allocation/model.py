"""The Bayesian allocation model: counts that a Poisson process thins by a Bayesian network."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from daskfactor.allocation.graph import Graph
from daskfactor.errors import ModelError
from daskfactor.models.settings import StoredModel, as_number, checked_count

LARGEST_HIDDEN = 65_535
"""Joint configurations of the hidden variables that two bytes a token can tell apart."""
SMALLEST, LARGEST = 1e-100, 1e100
"""Numbers between which products of pseudo-counts are neither 0 nor infinite."""
OBSERVED = "ijklmnopq"


class _Frozen(dict[Any, Any]):
    """Immutable dict, because the model that has it is hashed."""

    def _refuse(self, *args: Any, **settings: Any) -> Any:
        raise TypeError("settings of a model do not change; use dataclasses.replace for another")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> Any:  # a dict is otherwise filled item by item
        return type(self), (dict(self),)


@dataclass(frozen=True, eq=False, repr=False)
class AllocationModel(StoredModel):
    r"""Tokens of a Poisson process, each a draw from a Bayesian network that is seen in part.

    .. math:: \lambda \sim \mathrm{Gamma}(a, b), \quad T \sim \mathrm{Poisson}(\lambda), \quad
        i_n^\tau \sim \theta_n(\cdot \mid i_{\mathrm{pa}(n)}^\tau), \quad
        \theta_n(\cdot \mid i_{\mathrm{pa}(n)}) \sim \mathrm{Dirichlet}(\alpha_n)

    for the tokens :math:`\tau = 1 \dots T` and the variables n of the graph. The data X
    count the tokens by their observed variables. Non-negative factorizations of
    matrices and tensors, topic models and discrete Bayesian networks are of this kind:
    :meth:`nmf`, :meth:`cp`, :meth:`tucker`, :meth:`symmetric_nmf`, :meth:`topics`.

    Parameters
    ----------
    graph
        Edges as text, such as ``"r -> i, r -> j"``; see :meth:`Graph.parse`.
    hidden
        Size of each hidden variable.
    observed
        The other variables in the order of the data's dimensions (default: as they
        appear in the graph); a mapping also fixes their sizes.
    concentration
        A number a stands for all tables: :math:`\alpha_n = a / (I_n \prod I_{pa(n)})`, so
        that the pseudo-counts of every table sum to a, and λ has the shape a. A mapping
        gives the pseudo-count per cell of every variable that is not tied.
    rate
        Rate b of λ.
    shape
        Shape of λ; left out, it is the number in ``concentration``, or 1 under a mapping.
    tied
        Groups of variables that draw from one table, with the pseudo-count per cell of
        that table. Their parents correspond in the order of their edges.

    Raises
    ------
    ModelError
        If one of them is not allowed, or they do not fit together.

    References
    ----------
    Kurutmaz et al., "Bayesian learning of non-negative matrix/tensor factorizations by
    simulating Pólya urns", the Bayesian allocation model.

    Examples
    --------
    >>> import daskfactor as dfac
    >>> model = dfac.AllocationModel("r -> i, r -> j, r -> k", hidden={"r": 2})
    >>> model == dfac.AllocationModel.cp(2)
    True
    >>> dfac.simulate(model, (6, 5, 4), total=60, random_seed=0).counts.shape
    (6, 5, 4)
    """

    graph: str
    hidden: Mapping[str, int]
    observed: Sequence[str] | Mapping[str, int] | None = None
    concentration: float | Mapping[str, float] = 1.0
    rate: float = 1.0
    shape: float | None = None
    tied: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    evidence_data = "counts"
    default_evidence = "SequentialMonteCarlo"

    def __post_init__(self) -> None:
        network = self.graph if isinstance(self.graph, Graph) else Graph.parse(self.graph)
        hidden = _checked_hidden(self.hidden, network)
        observed = _checked_observed(self.observed, network, hidden)
        tied = _checked_tied(self.tied, network)
        _check_equal_sizes(
            network, tied, hidden | dict(observed if isinstance(observed, dict) else {})
        )
        settings = {
            "graph": str(network),
            "hidden": hidden,
            "observed": observed,
            "concentration": _checked_concentration(self.concentration, network, tied),
            "rate": _positive("rate", self.rate),
            "shape": None if self.shape is None else _positive("shape", self.shape),
            "tied": tied,
        }
        self._put(**{n: _Frozen(v) if isinstance(v, dict) else v for n, v in settings.items()})

    @classmethod
    def nmf(cls, n_components: int, **settings: Any) -> Self:
        """Return a non-negative factorization of a matrix i x j: ``"r -> i, r -> j"``."""
        return cls.cp(n_components, order=2, **settings)

    @classmethod
    def cp(
        cls,
        n_components: int,
        order: int = 3,
        *,
        observed: Sequence[str] | Mapping[str, int] | None = None,
        **settings: Any,
    ) -> Self:
        """Return a non-negative CP (PARAFAC) of a tensor i x j x ...: ``"r -> i, r -> j, ..."``.

        ``observed`` are other names, or names with sizes; then ``order`` is their number.
        """
        names = _observed_names(order) if observed is None else tuple(observed)
        edges = ", ".join(f"r -> {name}" for name in names)
        return cls(edges, {"r": n_components}, observed or names, **settings)

    @classmethod
    def tucker(cls, n_components: Any, **settings: Any) -> Self:
        """Return a non-negative Tucker model: an unstructured core r1 x r2 ..., ``r1 -> i`` etc."""
        if not isinstance(n_components, Sequence):
            raise ModelError(
                f"n_components must be a list of numbers, one for each dimension, got "
                f"{n_components!r}"
            )
        names = _observed_names(len(n_components))
        roots = [f"r{n + 1}" for n in range(len(names))]
        core = [f"{parent} -> {child}" for n, child in enumerate(roots) for parent in roots[:n]]
        loadings = [f"{root} -> {name}" for root, name in zip(roots, names, strict=True)]
        hidden = dict(zip(roots, n_components, strict=True))
        return cls(", ".join(core + loadings), hidden, names, **settings)

    @classmethod
    def symmetric_nmf(
        cls, n_components: int, *, concentration_shared: float, **settings: Any
    ) -> Self:
        """Return a model of a square matrix whose rows and columns draw from one table.

        ``concentration_shared`` is that table's pseudo-count per cell; the law of both
        indices is symmetric, the data need not be.
        """
        tied: Mapping[tuple[str, ...], float] = {("i", "j"): concentration_shared}
        return cls("r -> i, r -> j", {"r": n_components}, ("i", "j"), tied=tied, **settings)

    @classmethod
    def topics(
        cls,
        n_components: int,
        *,
        document: float = 0.1,
        word: float = 0.01,
        length: float = 1.0,
        **settings: Any,
    ) -> Self:
        """Return latent Dirichlet allocation of documents d x words w: ``"d -> r, r -> w"``.

        ``document`` is the pseudo-count of a topic in a document, ``word`` that of a word in
        a topic, ``length`` that of a document in the table that tokens draw their document
        from, which says nothing about topics.
        """
        concentration = {"d": length, "r": document, "w": word}
        graph = "d -> r, r -> w"
        return cls(graph, {"r": n_components}, ("d", "w"), concentration, **settings)

    @cached_property
    def network(self) -> Graph:
        """Graph of the variables."""
        return Graph.parse(self.graph)

    @property
    def dims(self) -> tuple[str, ...]:
        """Observed variables in the order of the data's dimensions."""
        return tuple(self.observed or ())

    @property
    def n_components(self) -> int:
        """Size of the hidden variable, of which there must be only one."""
        return self.hidden[self._only_hidden()]

    @property
    def n_hidden_states(self) -> int:
        """Joint configurations of the hidden variables, H."""
        return math.prod(self.hidden.values())

    @property
    def total_shape(self) -> float:
        """Shape a of the gamma prior on the mean total λ."""
        if self.shape is not None:
            return self.shape
        return 1.0 if isinstance(self.concentration, Mapping) else self.concentration

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Variables by the table that they draw from, parents before children."""
        shared = {name: group for group in self.tied for name in group}
        order = self.network.order
        return tuple(dict.fromkeys(self.network.in_order(shared.get(n, (n,))) for n in order))

    def sizes(self, shape: Sequence[int]) -> dict[str, int]:
        """Return the size of every variable for data of a shape, which is checked."""
        self.check_shape(shape)
        sizes = dict(zip(self.dims, map(int, shape), strict=True)) | dict(self.hidden)
        return {name: sizes[name] for name in self.network.order}

    def pseudo_counts(self, shape: Sequence[int]) -> dict[str, float]:
        r"""Return the pseudo-count :math:`\alpha_n` of one cell of every variable's table."""
        sizes, network, total = self.sizes(shape), self.network, self.concentration
        if isinstance(total, Mapping):
            counts = dict(total)
        else:
            counts = {
                name: total / math.prod(sizes[axis] for axis in network.family(name))
                for name in network.order
            }
        counts |= {name: value for group, value in self.tied.items() for name in group}
        return {name: counts[name] for name in network.order}

    def check_shape(self, shape: Sequence[int]) -> None:
        """Refuse data whose shape the model does not fit.

        Raises
        ------
        ModelError
            If the data have another number of dimensions, other sizes than ``observed``
            says, or sizes that differ among tied variables.
        """
        dims, observed = self.dims, self.observed
        if len(shape) != len(dims):
            raise ModelError(
                f"the data have {len(shape)} dimensions, shape {tuple(shape)}, but the model has "
                f"{len(dims)} observed variables ({', '.join(dims)}); they must be as many"
            )
        for name, side in zip(dims, shape, strict=True):
            if isinstance(observed, Mapping) and observed[name] != side:
                raise ModelError(
                    f"the data have size {side} along {name!r}, but the model has "
                    f"{observed[name]}; change one of them, or pass observed as a list of names"
                )
        sizes = dict(zip(dims, shape, strict=True)) | dict(self.hidden)
        _check_equal_sizes(self.network, self.tied, sizes)

    def with_components(self, n_components: int) -> Self:
        """Return the model with another size of its hidden variable.

        Raises
        ------
        ModelError
            If it has several hidden variables.
        """
        return replace(
            self, hidden={self._only_hidden(): checked_count("n_components", n_components)}
        )

    def with_thinning(self, share: float) -> Self:
        r"""Return the model of data of which each token was kept with probability p.

        :math:`\lambda \to p\lambda \sim \mathrm{Gamma}(a, b / p)`, and the tables stay.
        """
        if not 0.0 < share <= 1.0:
            raise ModelError(f"share must be in (0, 1], got {share!r}")
        return replace(self, rate=self.rate / share)

    def to_dict(self) -> dict[str, Any]:
        """Return the model as plain JSON values, with its class under ``"type"``."""
        sides = self.observed.items() if isinstance(self.observed, Mapping) else None
        return super().to_dict() | {
            # JSON objects have no order.
            "observed": [list(item) for item in sides] if sides else list(self.dims),
            "tied": [[list(group), value] for group, value in self.tied.items()],
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild a model from `to_dict`."""
        settings = dict(values)
        observed = settings.get("observed")
        if observed and not isinstance(observed[0], str):
            settings["observed"] = dict(observed)
        settings["tied"] = {tuple(group): value for group, value in settings.get("tied", ())}
        return super().from_dict(settings)

    def __repr__(self) -> str:
        plain: dict[str, Any] = {"concentration": 1.0, "rate": 1.0, "shape": None, "tied": {}}
        words = [repr(self.graph)]
        for name in ("hidden", "observed", *plain):
            value = getattr(self, name)
            if name not in plain or value != plain[name]:
                words.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def _only_hidden(self) -> str:
        if len(self.hidden) > 1:
            raise ModelError(
                f"the model has {len(self.hidden)} hidden variables ({', '.join(self.hidden)}), so "
                "no single number of components; make a model for each choice of sizes"
            )
        return next(iter(self.hidden))


def _observed_names(order: Any) -> tuple[str, ...]:
    if not 1 <= checked_count("the order of the data", order) <= len(OBSERVED):
        raise ModelError(
            f"the order of the data must be 1 to {len(OBSERVED)}, got {order}; write the graph "
            "yourself for more"
        )
    return tuple(OBSERVED[:order])


def _positive(what: str, value: Any) -> float:
    """Return a positive number within the range of the arithmetic, as a plain float."""
    number = as_number(value)
    if not SMALLEST <= number <= LARGEST or isinstance(value, str):
        raise ModelError(
            f"{what} must be a positive, finite number from {SMALLEST:g} to {LARGEST:g}, got "
            f"{value!r}"
        )
    return number


def _checked_hidden(hidden: Any, graph: Graph) -> dict[str, int]:
    """Return the sizes of the hidden variables, in the order of the graph."""
    if not isinstance(hidden, Mapping) or not hidden:
        raise ModelError(
            f"hidden must give the size of at least one hidden variable, such as {{'r': 3}}, "
            f"got {hidden!r}; a model without hidden ones is the same as with one of size 1"
        )
    _check_names("hidden", hidden, graph)
    sizes = {
        name: checked_count(f"the size of the hidden variable {name!r}", hidden[name])
        for name in graph.in_order(hidden)
    }
    if (states := math.prod(sizes.values())) > LARGEST_HIDDEN:
        raise ModelError(
            f"the hidden variables have {states} joint configurations; at most {LARGEST_HIDDEN} "
            "are possible, so make them smaller"
        )
    return sizes


def _checked_observed(
    observed: Any, graph: Graph, hidden: Mapping[str, int]
) -> tuple[str, ...] | dict[str, int]:
    """Return the observed variables in the order of the data's dims, with sizes if given."""
    rest = tuple(name for name in graph.variables if name not in hidden)
    observed = rest if observed is None else observed
    if isinstance(observed, str) or not isinstance(observed, Sequence | Mapping):
        raise ModelError(
            "observed must be a list of names in the order of the data's dimensions, or a mapping "
            f"of names to sizes, got {observed!r}"
        )
    _check_names("observed", observed, graph)
    names = tuple(observed)
    if len(set(names)) < len(names):
        raise ModelError(f"observed names a variable twice: {names}; name each once")
    if both := [name for name in names if name in hidden]:
        raise ModelError(f"{both[0]!r} is hidden and observed; pass it as one of them")
    if lost := [name for name in rest if name not in names]:
        raise ModelError(
            f"{lost[0]!r} is in the graph, but neither hidden nor observed; pass its size in "
            "hidden or its name in observed"
        )
    if not names:
        raise ModelError("every variable of the graph is hidden; at least one must be observed")
    if not isinstance(observed, Mapping):
        return names
    return {name: checked_count(f"the size of {name!r}", observed[name]) for name in names}


def _checked_tied(tied: Any, graph: Graph) -> dict[tuple[str, ...], float]:
    """Return the groups of variables that draw from one table, with its pseudo-count per cell."""
    if not isinstance(tied, Mapping):
        raise ModelError(
            "tied must map groups of variables to pseudo-counts per cell, such as "
            f"{{('i', 'j'): 0.5}}, got {tied!r}"
        )
    groups: dict[tuple[str, ...], float] = {}
    for group, value in tied.items():
        if isinstance(group, str) or not isinstance(group, Sequence) or len(group) < 2:
            raise ModelError(
                f"tied has the group {group!r}; a group is a tuple of two or more variables, such "
                "as ('i', 'j')"
            )
        names = tuple(group)
        _check_names("tied", names, graph)
        if len(set(names)) < len(names) or any(set(names) & set(other) for other in groups):
            raise ModelError(f"tied names a variable of {names} twice; name each once")
        if len({len(graph.parents[name]) for name in names}) > 1:
            counts = ", ".join(f"{name}: {len(graph.parents[name])}" for name in names)
            raise ModelError(
                f"tied variables need equally many parents, got {counts}; they draw from one table"
            )
        groups[names] = _positive(f"the pseudo-count of the tied variables {names}", value)
    return dict(sorted(groups.items()))


def _checked_concentration(
    concentration: Any, graph: Graph, tied: Iterable[tuple[str, ...]]
) -> float | dict[str, float]:
    """Return one total for all tables, or pseudo-counts per cell for each of them."""
    if not isinstance(concentration, Mapping):
        return _positive("concentration", concentration)
    _check_names("concentration", concentration, graph)
    bound = {name for group in tied for name in group}
    if both := [name for name in concentration if name in bound]:
        raise ModelError(
            f"concentration has {both[0]!r}, whose table is tied; pass its pseudo-count in tied"
        )
    free = [name for name in graph.order if name not in bound]
    if lost := [name for name in free if name not in concentration]:
        raise ModelError(
            f"concentration lacks {', '.join(map(repr, lost))}; pass a pseudo-count per cell for "
            f"every table ({', '.join(map(repr, free))}), or one number for all"
        )
    return {name: _positive(f"the pseudo-count of {name!r}", concentration[name]) for name in free}


def _check_equal_sizes(
    graph: Graph, tied: Iterable[tuple[str, ...]], sizes: Mapping[str, int]
) -> None:
    """Refuse tied variables whose tables have different sizes, as far as sizes are fixed."""
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


def _check_names(where: str, names: Any, graph: Graph) -> None:
    for name in names:
        if name not in graph.variables:
            raise ModelError(
                f"{where} has {name!r}, which is not in the graph; its variables are "
                f"{', '.join(graph.variables)}"
            )
