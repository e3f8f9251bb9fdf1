"""Rules of the package's structure that the import contracts cannot state."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

import daskfactor
from daskfactor.evidence.base import EvidenceMethod
from daskfactor.inference import registry
from daskfactor.inference.base import Sampler
from daskfactor.inference.multiplicative import Optimizer
from daskfactor.inference.registry import ALGORITHMS, algorithms
from daskfactor.stein.ensemble import ParticleMethod

ROOT = Path(daskfactor.__file__).parent
PATHS = {path.relative_to(ROOT.parent): path for path in sorted(ROOT.rglob("*.py"))}
MODULES = {
    ".".join(own.with_suffix("").parts).removesuffix(".__init__"): path
    for own, path in PATHS.items()
}


def parsed(path):
    return ast.parse(path.read_text())


def imports_of(tree, types):
    """Modules of the package that are loaded along with this one, with or without those that are
    imported for type checkers alone."""
    found = set()
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If):
            if types or "TYPE_CHECKING" not in ast.dump(node.test):
                pending += node.body
            pending += node.orelse
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found & set(MODULES)


def circles(graph):
    """Groups of modules that lead to each other, or one to itself, by imports."""
    names = sorted(graph)
    edges = csr_array([[other in graph[name] for other in names] for name in names])
    count, group = connected_components(edges, connection="strong")
    found = [[names[at] for at in np.flatnonzero(group == n)] for n in range(count)]
    return [own for own in found if len(own) > 1 or own[0] in graph[own[0]]]


FOR_TYPES = [
    ["daskfactor.executors.cluster", "daskfactor.executors.remote_state"],
    ["daskfactor.results.backends", "daskfactor.results.files", "daskfactor.results.writer"],
]
"""Circles that only type checkers see: there may be fewer, and no others."""


def test_no_modules_import_each_other_in_a_circle():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    loaded, typed = (
        {name: imports_of(parsed(path), types) - {name} for name, path in MODULES.items()}
        for types in (False, True)
    )
    assert sum(map(len, loaded.values())) > 100  # the imports were read
    assert sum(map(len, typed.values())) > sum(map(len, loaded.values()))
    assert circles(loaded) == []
    assert [own for own in circles(typed) if own not in FOR_TYPES] == []


FEATURES = tuple(
    f"daskfactor.{name}"
    for name in ("data.axes", "data.coupled", "data.tensor", "recommender", "stein")
)


def test_the_core_imports_no_feature():
    """Data and results know no coupled matrices, tensors, recommendations and particles."""
    assert all(any(name.startswith(feature) for name in MODULES) for feature in FEATURES)
    core = [name for name in MODULES if name.split(".")[1:2] in (["data"], ["results"])]
    for name in core:
        if not name.startswith(FEATURES):
            imports = imports_of(parsed(MODULES[name]), types=True)
            assert not [other for other in imports if other.startswith(FEATURES)], name


def models():
    """Names of the classes of models."""
    return {
        name
        for name in daskfactor.__all__
        if getattr(getattr(daskfactor, name), "__module__", "").startswith("daskfactor.models.")
    }


def class_checks(tree, names):
    """Lines that ask whether something is an instance of one of some classes."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("isinstance", "issubclass")
        and names & {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
    ]


def test_only_models_ask_for_the_class_of_a_model():
    names = models()
    assert {"TweedieNMF", "GaussianMF", "Coupled", "CP"} <= names
    assert class_checks(ast.parse("isinstance(x, A | TweedieNMF)"), names) == [1]
    for name, path in MODULES.items():
        lines = class_checks(parsed(path), names)
        assert not lines or name.startswith("daskfactor.models"), (name, lines)


def named(tree):
    """Names and strings of one word in the code of a module; annotations do not count."""
    for node in ast.walk(tree):
        for place in ("annotation", "returns"):
            if getattr(node, place, None) is not None:
                setattr(node, place, None)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    values = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return names | {own for own in values if isinstance(own, str) and re.fullmatch(r"\w+", own)}


def test_no_list_of_algorithms_but_the_registry():
    """A default may name a single algorithm."""
    samplers = {name: f"daskfactor.{home}" for name, home in ALGORITHMS["Sampler"].items()}
    assert {"PSGLD", "Gibbs", "SGHMC"} <= set(samplers)
    for name, path in MODULES.items():
        if name == registry.__name__:
            continue
        others = {kind for kind, home in samplers.items() if home != name}
        assert len(named(parsed(path)) & others) < 2, name


@pytest.mark.parametrize("base", [Sampler, Optimizer, EvidenceMethod, ParticleMethod])
def test_the_registry_has_all_public_algorithms_and_no_others(base):
    public = (getattr(daskfactor, name) for name in daskfactor.__all__)
    kinds = [kind for kind in public if isinstance(kind, type) and issubclass(kind, base)]
    assert list(algorithms(base).values()) == sorted(kinds, key=lambda kind: kind.__name__)
    homes = {kind.__name__: kind.__module__.partition(".")[2] for kind in kinds}
    assert ALGORITHMS[base.__name__] == homes


SIDES = {"rows", "cols"}
NOT_OF_STATES = {"grid", "mass", "cells", "part"}
"""Whose rows and columns are no bands: of grids, sums and monitored cells, of parts of sums."""


def touched_bands(tree):
    """Lines that reach for the bands of a state, or for what may be one."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = getattr(node.value, "attr", getattr(node.value, "id", ""))
        sides = node.attr in SIDES and owner not in NOT_OF_STATES
        if sides or (node.attr in {"factors", "bands", "local"} and owner.endswith("state")):
            found.append(node.lineno)
    return sorted(found)


TOUCHING = """
for band in chain.tracks[0].state.rows:
    data.grid.rows, cells.cols, own.grid.cols.offsets
one, other = self.state.bands(), fill.cols[0]
state.each(sum_columns)
run().rows
for band in run.state.factors[1]:
    band.factors
"""


def test_only_executors_touch_the_bands_of_a_state():
    """They may lie in other processes: `ChainState.each` goes there."""
    assert touched_bands(ast.parse(TOUCHING)) == [2, 4, 4, 6, 7]
    above = tuple(f"daskfactor.{folder}." for folder in ("inference", "evidence", "stein"))
    for name, path in MODULES.items():
        lines = touched_bands(parsed(path))
        assert not lines or not name.startswith(above), (name, lines)


FIRST_ANSWER = """
import sys
import numpy as np
import daskfactor as dfac
V = np.random.default_rng(0).poisson(3.0, (20, 10))
dfac.sample(V, dfac.TweedieNMF(2, beta=1.0), draws=2, tune=2, progressbar=False)
print(*sorted({name for name in sys.modules if name.count(".") < 2}))
"""
SLOW_TO_LOAD = {"distributed", "matplotlib", "scipy.optimize", "scipy.stats", "sklearn", "zarr"}


def test_a_run_in_memory_loads_no_library_that_it_does_not_need():
    command = [sys.executable, "-W", "ignore", "-c", FIRST_ANSWER]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT.parent)
    loaded = set(done.stdout.split())
    assert {"numba", "xarray"} <= loaded
    assert not SLOW_TO_LOAD & loaded


@pytest.mark.libraries
def test_the_package_shows_its_public_names_and_nothing_else():
    names = dir(daskfactor)
    assert {"sample", "PSGLD", "TweedieNMF", "open_run", "plots"} <= set(names)
    assert not {"Any", "import_module", "TYPE_CHECKING", "lazy_loader"} & set(names)
    assert all(getattr(daskfactor, name) is not None for name in names)
    assert names == sorted(daskfactor.__all__)
