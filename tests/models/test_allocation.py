"""Allocation models and their graphs: values that are read back, and what is refused."""

import copy
import itertools
import json
import pickle
from itertools import pairwise

import numpy as np
import pytest
import scipy.sparse as sp
import sparse
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import logsumexp

import daskfactor as dfac
from daskfactor.allocation.graph import Graph
from daskfactor.allocation.model import AllocationModel
from daskfactor.errors import DataError, ModelError
from tests.refusals import refused

NMF = AllocationModel.nmf(3)
SYMMETRIC = AllocationModel.symmetric_nmf(2, concentration_shared=0.5)
ODD = AllocationModel(
    "r -> s -> i; a, r -> i", {"s": 3, "r": 2}, {"i": 3, "a": 2}, 2.0, rate=0.5, shape=4.0
)
ALL = [NMF, SYMMETRIC, ODD, AllocationModel.cp(2, order=4)]
ALL += [AllocationModel.tucker((2, 3, 4)), AllocationModel.topics(5)]


def test_constructors():
    assert str(NMF.network) == "r -> i, r -> j"
    assert AllocationModel.cp(2, order=4).dims == ("i", "j", "k", "l")
    tucker = AllocationModel.tucker((2, 3, 4))
    assert tucker.graph == "r1 -> r2, r1 -> r3, r2 -> r3, r1 -> i, r2 -> j, r3 -> k"
    assert dict(tucker.hidden) == {"r1": 2, "r2": 3, "r3": 4}
    assert tucker.n_hidden_states == 24
    topics = AllocationModel.topics(5)
    assert topics.dims == ("d", "w")
    assert topics.pseudo_counts((10, 20)) == {"d": 1.0, "r": 0.1, "w": 0.01}
    assert SYMMETRIC.groups == (("r",), ("i", "j"))
    assert tuple(ODD.hidden) == ("r", "s")  # in the order of the graph
    assert ODD.dims == ("i", "a")
    assert ODD.sizes((3, 2)) == {"r": 2, "s": 3, "i": 3, "a": 2}


def test_one_concentration_is_contracted_to_every_table():
    model = AllocationModel("r -> i, i -> j, r -> j", {"r": 2}, concentration=3.0)
    assert model.pseudo_counts((4, 5)) == pytest.approx({"r": 3 / 2, "i": 3 / 8, "j": 3 / 40})
    assert model.total_shape == 3.0
    assert ODD.total_shape == 4.0
    assert AllocationModel.topics(2).total_shape == 1.0
    assert SYMMETRIC.pseudo_counts((4, 4)) == {"r": 0.5, "i": 0.5, "j": 0.5}


@pytest.mark.parametrize("model", ALL, ids=str)
def test_models_are_values(model):
    assert AllocationModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model
    assert pickle.loads(pickle.dumps(model)) == model
    assert hash(pickle.loads(pickle.dumps(model))) == hash(model)
    assert eval(repr(model)) == model
    assert len({*ALL, model}) == len(ALL)


def test_mappings_of_a_model_do_not_change():
    sizes = {"i": 3, "j": 3}
    model = AllocationModel("r -> i, r -> j", {"r": 2}, sizes, {"r": 1.0}, tied={("i", "j"): 0.5})
    before = hash(model)
    for name in ("hidden", "observed", "concentration", "tied"):
        found = getattr(model, name)
        key = next(iter(found))
        changes = ("__setitem__", key, 99), ("__delitem__", key), ("__ior__", {key: 99}), ("clear",)
        changes += ("update", {key: 99}), ("setdefault", "x", 99), ("pop", key), ("popitem",)
        for change, *values in changes:
            refused(TypeError, "do not change", getattr(found, change), *values)
    copies = [copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in copies:
        assert one == model
        assert hash(one) == before
        refused(TypeError, "do not change", one.hidden.__setitem__, "r", 99)
    assert copy.deepcopy(model.hidden) == {"r": 2}


def test_the_order_of_the_data_is_a_part_of_the_model():
    one = AllocationModel("r -> i, r -> j", {"r": 2}, {"i": 3, "j": 4})
    assert one != AllocationModel("r -> i, r -> j", {"r": 2}, {"j": 4, "i": 3})
    assert one == AllocationModel("r->i,r->j", {"r": 2}, {"i": 3, "j": 4})
    assert repr(NMF) == "AllocationModel('r -> i, r -> j', hidden={'r': 3}, observed=('i', 'j'))"


def test_other_ranks_and_thinned_data():
    assert NMF.with_components(5) == AllocationModel.nmf(5)
    assert NMF.n_components == 3
    assert SYMMETRIC.with_components(4).tied == SYMMETRIC.tied
    assert AllocationModel.nmf(2, rate=0.5).with_thinning(0.25).rate == 2.0
    for call in (lambda: ODD.with_components(2), lambda: ODD.n_components):
        refused(ModelError, r"2 hidden variables \(r, s\), so no single number", call)
    refused(ModelError, "n_components must be a whole number", NMF.with_components, 0)
    refused(ModelError, r"must be in \(0, 1\], got 0", NMF.with_thinning, 0)


PAIR = {("i", "j"): 1.0}


def test_errors():
    for settings, message in (
        ({"hidden": {}}, "the size of at least one hidden variable"),
        ({"hidden": 3}, "the size of at least one hidden variable"),
        ({"hidden": {"x": 2}}, "hidden has 'x', which is not in the graph; its variables are"),
        ({"hidden": {"r": 0}}, "size of the hidden variable 'r' must be a whole number of at"),
        ({"hidden": {"r": True}}, "whole number of at least 1, got True"),
        ({"hidden": {"r": 70_000}}, "70000 joint configurations; at most 65535"),
        ({"hidden": {"r": 2, "i": 2, "j": 2}}, "every variable of the graph is hidden"),
        ({"observed": ["i", "x"]}, "observed has 'x', which is not in the graph"),
        ({"observed": "ij"}, "observed must be a list of names"),
        ({"observed": ["i"]}, "'j' is in the graph, but neither hidden nor observed"),
        ({"observed": ["i", "j", "r"]}, "'r' is hidden and observed"),
        ({"observed": ["i", "i", "j"]}, "observed names a variable twice"),
        ({"observed": {"i": 0, "j": 1}}, "size of 'i' must be a whole number"),
        ({"concentration": 0}, "concentration must be a positive, finite number from .* got 0"),
        *(({"concentration": x}, r"from 1e-100 to 1e\+100") for x in (1e-310, 1e-101, 1e101)),
        (
            {"graph": "r -> i, s -> j", "hidden": {"r": 2, "s": 3}, "tied": PAIR},
            "'r' has size 2 and 's' has size 3",
        ),
        ({"concentration": "auto"}, "concentration must be a positive, finite number"),
        ({"concentration": {"r": 1, "i": 1}}, "concentration lacks 'j'; pass a pseudo-count per"),
        ({"concentration": {"x": 1}}, "concentration has 'x', which is not in the graph"),
        ({"concentration": {"r": 1, "i": -1, "j": 1}}, "pseudo-count of 'i' must be a positive"),
        ({"rate": float("inf")}, "rate must be a positive, finite number"),
        ({"shape": 0.0}, "shape must be a positive"),
        ({"tied": {("i", "x"): 1.0}}, "tied has 'x', which is not in the graph"),
        ({"tied": {"ij": 1.0}}, "tied has the group 'ij'; a group is a tuple"),
        ({"tied": [("i", "j")]}, "tied must map groups of variables to pseudo-counts"),
        ({"tied": {("i", "i"): 1.0}}, "twice; name each once"),
        ({"tied": {("r", "i"): 1.0}}, "need equally many parents, got r: 0, i: 1"),
        ({"tied": {("i", "j"): None}}, "pseudo-count of the tied variables .* got None"),
        ({"tied": PAIR, "concentration": {"r": 1, "i": 1}}, "has 'i', whose table is tied"),
        (
            {"tied": PAIR, "observed": {"i": 2, "j": 3}},
            "draw from one table, but 'i' has size 2 and 'j' has size 3",
        ),
    ):
        given = {"graph": "r -> i, r -> j", "hidden": {"r": 2}} | settings
        refused(ModelError, message, AllocationModel, **given)


def test_shapes():
    NMF.check_shape((4, 9))
    SYMMETRIC.check_shape((4, 4))
    with pytest.raises(ModelError, match=r"3 dimensions, shape \(2, 2, 2\), but the model has 2"):
        NMF.check_shape((2, 2, 2))
    refused(ModelError, "size 4 along 'i', but the model has 3", ODD.check_shape, (4, 2))
    refused(ModelError, "'i' has size 4 and 'j' has size 5", SYMMETRIC.check_shape, (4, 5))
    refused(ModelError, "order of the data must be 1 to 9, got 12", AllocationModel.cp, 2, order=12)


def test_tensors_may_have_other_names_and_sizes():
    model = AllocationModel.nmf(2, observed={"cell": 3, "gene": 4})
    assert model == AllocationModel("r -> cell, r -> gene", {"r": 2}, {"cell": 3, "gene": 4})
    assert AllocationModel.cp(2, observed=("a", "b", "c")).dims == ("a", "b", "c")
    refused(ModelError, "n_components must be a list of numbers", AllocationModel.tucker, 3)


# -- graphs --------------------------------------------------------------------------------


def test_edges_chains_and_lone_names():
    graph = Graph.parse("r -> s->i, r -> j\n a; b -> j,")
    assert graph.variables == ("r", "s", "i", "j", "a", "b")
    assert graph.edges == (("r", "s"), ("s", "i"), ("r", "j"), ("b", "j"))
    assert graph.parents["j"] == ("r", "b")
    assert graph.family("j") == ("r", "b", "j")
    assert graph.parents["a"] == ()


def test_parents_come_first_and_else_the_order_of_appearance():
    assert Graph.parse("i, r -> i, r -> j").order == ("r", "i", "j")
    assert Graph.parse("c -> d, a -> b").order == ("c", "d", "a", "b")
    assert Graph.parse("a -> c, b -> a").order == ("b", "a", "c")
    assert Graph.parse("x -> y -> z").in_order({"z", "x"}) == ("x", "z")
    assert Graph.parse("r -> i, r -> i -> j") == Graph.parse("r->i->j")  # an edge said twice


def test_texts_that_are_no_graph():
    for text, message in (
        ("", "the graph is empty; write edges"),
        (" ,;\n", "the graph is empty"),
        ("r -> r", "an edge from 'r' to itself"),
        ("a -> r -> i -> s -> r", "has the cycle r -> i -> s -> r;"),
        ("a -> b, b -> a, b -> c", "has the cycle a -> b -> a;"),
        ("r -> 2i", "has '2i' in 'r -> 2i'; a name must be letters"),
        ("r -> i, j ->", "has '' in 'j ->'"),
        ("r - i", "has 'r - i' in 'r - i'"),
        ("(r, s) -> i", r"has '\(r' in '\(r'"),
        (3, "must be a text, got 3"),
    ):
        refused(ModelError, message, Graph.parse, text)


NAMES = st.sampled_from(["a", "b", "c", "d", "e"])


def is_acyclic(edges):
    reached = set(edges)
    for middle, one, other in itertools.product("abcde", repeat=3):
        if {(one, middle), (middle, other)} <= reached:
            reached.add((one, other))
    return all(one != other for one, other in reached)


@given(st.lists(st.lists(NAMES, min_size=1, max_size=3), min_size=1, max_size=6))
def test_text_is_read_back(statements):
    edges = [edge for names in statements for edge in pairwise(names)]
    text = ", ".join(" -> ".join(names) for names in statements)
    if not is_acyclic(edges):
        refused(ModelError, r"the cycle|to itself", Graph.parse, text)
        return
    graph = Graph.parse(text)
    again = Graph.parse(str(graph))
    assert again == graph
    assert again.order == graph.order
    for parent, child in graph.edges:
        assert graph.order.index(parent) < graph.order.index(child)


# -- sums of normal components -------------------------------------------------------------

MODEL = dfac.GaussianAdditive(3, mean=0.5, scale=0.8, noise=1.5)


def test_evidence_is_the_integral_over_the_sum():
    x = MODEL.generate(np.random.default_rng(0), 40)
    total = np.linspace(-20, 20, 200001)
    prior = stats.norm(1.5, 0.8 * np.sqrt(3)).logpdf(total)
    integral = logsumexp(prior + MODEL.log_likelihood(x, total)) + np.log(total[1] - total[0])
    assert MODEL.log_evidence(x) == pytest.approx(integral, abs=1e-8)

    x = np.array([0.3, -1.0, 2.0])  # the likelihood is a product
    expected = stats.norm(1.1, 1.5).logpdf(x).sum()
    np.testing.assert_allclose(MODEL.log_likelihood(x, [1.1]), [expected])


def test_it_is_stored_and_checked():
    assert dfac.GaussianAdditive.from_dict(MODEL.to_dict()) == MODEL
    refused(ModelError, "scale must be", dfac.GaussianAdditive, 2, scale=-1)
    refused(DataError, "vector", MODEL.log_evidence, np.ones((2, 2)))
    refused(DataError, "finite", MODEL.log_evidence, [1.0, np.nan])


def test_what_is_no_vector_of_numbers():
    for x, said in (
        (sparse.COO(np.arange(3.0)), "real numbers, got COO of dtype float64; .* with .todense()"),
        (sp.csr_matrix(np.eye(3)), "real numbers, got csr_matrix of dtype float64; .* .toarray()"),
        (np.array([1 + 2j]), "real numbers, got ndarray of dtype complex128"),
        (np.array(["a"]), "real numbers, got ndarray of dtype <U1"),
        (np.array(["2020-01-01"], "M8[D]"), r"got ndarray of dtype datetime64\[D\]"),
        ([[1.0], [1.0, 2.0]], "real numbers, got list"),
        (None, "real numbers, got NoneType"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "1 of 2 are masked or not finite"),
        ([], r"at least one observation, got shape \(0,\)"),
    ):
        for verb in (dfac.log_evidence, dfac.select_rank):
            refused(DataError, said, verb, x, MODEL, progressbar=False)
