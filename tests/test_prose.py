"""Docstrings begin with what they are about, and names say what a thing is."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import daskfactor

ROOT = Path(daskfactor.__file__).parent
QUESTIONS = ["What", "Which", "Whether", "Where", "Who", "How", "Of", "When", "Why", "If"]
"""Words that begin a docstring which names no object and no action."""
VAGUE = re.compile(
    r"(^|_)(told|asked|held|own|taken|known|given|found|kept|beside|said|noted|judged|wanted|met"
    r"|meant|shown|begun|whole|once|here|there)(_|$)"
)
"""Words that say that something happened to a thing, and not what it is."""
ALLOWED = {
    "held_out": "held-out cells, rows and densities are the field's term",
    "held_out_coverage": "public name, of the same term",
    "whole_number": "a number without fraction",
    "whole_factors": "factors that are not cut into bands",
    "at_once": "how many chains run in parallel",
    "draws_kept": "public attribute of costs and of `info`",
    "names_given": "names that the user passed, in a sentence built of words",
}

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def is_text(node):
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def docstrings(tree):
    """Docstrings of modules, classes and functions, and texts under assignments."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text
        if isinstance(body := getattr(node, "body", None), list):
            for first, second in pairwise(body):
                if isinstance(first, ast.Assign | ast.AnnAssign) and is_text(second):
                    yield second.value.value.strip()


def names(tree):
    """Names of functions, classes, parameters and variables."""
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and not isinstance(node, ast.Module):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def riddles(tree):
    return [text.splitlines()[0] for text in docstrings(tree) if text.split()[0] in QUESTIONS]


def vague_names(tree):
    return {name for name in names(tree) if VAGUE.search(name)}


TREES = {path.relative_to(ROOT): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def test_docstrings_begin_with_an_action_or_an_object():
    assert {path: found for path, tree in TREES.items() if (found := riddles(tree))} == {}


def test_names_say_what_a_thing_is():
    vague = {path: vague_names(tree) - set(ALLOWED) for path, tree in TREES.items()}
    assert {path: found for path, found in vague.items() if found} == {}


def test_every_exception_is_used():
    used = set().union(*(vague_names(tree) for tree in TREES.values()))
    assert set(ALLOWED) <= used


def test_riddles_and_vague_names_are_seen():
    tree = ast.parse(
        'def told(own):\n    """What is known of it."""\n    kept = 1\n    """Where it is."""\n'
    )
    assert riddles(tree) == ["What is known of it.", "Where it is."]
    assert vague_names(tree) == {"told", "own", "kept"}
