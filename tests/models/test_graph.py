import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daskfactor.errors import ModelError
from daskfactor.models.graph import Graph


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


def test_an_edge_that_is_said_twice_is_one_edge():
    assert Graph.parse("r -> i, r -> i -> j") == Graph.parse("r->i->j")


@pytest.mark.parametrize(
    ("text", "message"),
    [
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
    ],
)
def test_errors(text, message):
    with pytest.raises(ModelError, match=message):
        Graph.parse(text)


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
        with pytest.raises(ModelError, match=r"the cycle|to itself"):
            Graph.parse(text)
        return
    graph = Graph.parse(text)
    again = Graph.parse(str(graph))
    assert again == graph
    assert again.order == graph.order
    for parent, child in graph.edges:
        assert graph.order.index(parent) < graph.order.index(child)
