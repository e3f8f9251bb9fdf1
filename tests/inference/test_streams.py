"""No two random streams coincide: by the table of their addresses, and in what runs draw."""

import ast
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

import daskfactor
from daskfactor.inference.block_hmc import CHANCE, WITHIN
from daskfactor.inference.fold_in import OF_RATES
from daskfactor.inference.program import factor_word
from daskfactor.inference.sghmc import ACROSS
from daskfactor.kernels.subsample import FIRST_STREAM, block_address
from daskfactor.kernels.variates import CELL, ENTRY, STREAM, start_cell, start_entry
from daskfactor.random import MAX_FACTORS, Stream, noise_key
from tests.inference.record_streams import runs
from tests.inner import called
from tests.tiers import FULL, tiered

KEY = np.array([5, 8], np.uint32)
SCRIPT = Path(__file__).with_name("record_streams.py")
PURPOSES = (0, ACROSS, CHANCE, WITHIN, OF_RATES)
QUICK = [name for name in runs() if not name.startswith(("4 axes", "5 axes"))]


def noise_words():
    """Return the words of the noise of all factors, for every purpose that there is or may be."""
    assert set(PURPOSES) <= {0, 2, 4, 6}
    return [factor_word(n) + stream for n in range(MAX_FACTORS) for stream in (0, 2, 4, 6)]


def test_normal_numbers_of_factors_have_addresses_of_their_own():
    """So have the entries that samplers of matrices draw from blocks, up to 2**31 of these."""
    words = noise_words()
    assert len(set(words)) == len(words)
    assert min(words) >= 0
    assert max(words) < 2**32
    first, last = (block_address(KEY, 0, block).factor for block in (0, 2**31))
    assert not any(first <= word <= last for word in words)


@numba.njit
def entry_counters(key, words, components, out):
    stream = np.empty(STREAM, np.uint64)
    for n in range(words.size):
        for k in range(components.size):
            start_entry(stream, key, 7, words[n], 11, components[k])
            out[n, k] = stream[5]


def test_numbers_by_rejection_have_addresses_of_their_own():
    """Of every factor, purpose and component; the last word of the counter tells them apart."""
    few, many = noise_words()[:32], np.arange(2**16)  # eight factors
    ends = np.unique([*range(2**9), *(2 ** np.arange(24) - 1), *range(2**24 - 2**9, 2**24)])
    for words, components in ((few, many), (noise_words(), ends)):
        found = np.zeros((len(words), components.size), np.uint64)
        entry_counters(KEY, np.array(words), components, found)
        assert np.unique(found).size == found.size
        assert found.max() < 2**32


def test_iterations_rows_kinds_chains_and_purposes_have_addresses_of_their_own():
    """A stream is its key and its counter; those of entries and cells are not the normals'."""
    out = np.zeros((7, STREAM), np.uint64)
    for own, (iteration, row) in zip(out, ((7, 11), (8, 11), (7, 12)), strict=False):
        called(start_entry)(own, KEY, iteration, 1, row, 5)
    for own, address in zip(out[3:], ((7, 11, 5), (8, 11, 5), (7, 12, 5), (7, 11, 6)), strict=True):
        called(start_cell)(own, KEY, *address)
    assert len({tuple(own[[0, 1, 3, 4, 5]]) for own in out}) == len(out)
    assert len({0, int(ENTRY), int(CELL)}) == 3
    seeds = (0, 1, 2**32, 2**64 - 1)
    keys = {noise_key(s, c, own).tobytes() for s in seeds for c in range(64) for own in Stream}
    assert len(keys) == 4 * 64 * len(Stream)
    assert len({int(stream) for stream in Stream}) == len(Stream.__members__)


def record(out, *arguments):
    """Return what runs drew in a process without the compiler."""
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "NUMBA_DISABLE_JIT": "1",
        "DASKFACTOR_JIT_CACHE": "0",
    }
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(out), *arguments]
    done = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    out = tmp_path_factory.mktemp("streams") / "found.json"
    return record(out, "", *([] if FULL else QUICK))


@pytest.mark.parametrize("name", tiered(runs(), QUICK.__contains__))
def test_no_run_uses_a_stream_for_two_purposes(name, records):
    """And none has an address that the table above does not know."""
    found = records[name]
    assert found["blocks"] > 20
    assert found["generators"] > 2
    assert found["repeated"] == []
    assert found["shared"] == []
    words, entry = set(noise_words()), found["key"] ^ int(ENTRY)
    low = {word & 255 for word in words}
    for key, word in found["words"]:
        if key == entry:
            assert word % 256 in low
            assert word // 256 < 3
        elif key == found["key"]:
            assert word in words or FIRST_STREAM <= word < FIRST_STREAM + 4


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "name", "end"),
    [
        # The third factor of a tensor once had the numbers of the first one's components.
        (
            *("without a byte", "3 axes, SGHMC steep"),
            f"['SquaresKernel._refresh', 'SquaresKernel._refresh']: the last word is {2 * 256}",
        ),
        ("two steps", "matrix, LangevinDynamics", ""),
    ],
)
def test_streams_that_coincide_are_found(fault, name, end, tmp_path):
    (found,) = record(tmp_path / "found.json", fault, name).values()
    assert found["repeated"]
    assert found["repeated"][0].endswith(end)


APART = {
    (
        "HYPER",
        "chain",
        "gamma_parameters",
    ): "the dispersion has a further word",
    ("SCALE", "gamma_parameters", "normal_parameters"): "models of real or of positive factors",
    ("SCHEDULE", "batches", "dsgd"): "allocation models, or an optimizer",
    ("SIMULATION", "calibration", "counts"): "calibration, or counts that are made up",
    ("START", "chib", "normal_parameters"): "positive factors, or real ones",
    ("START", "chib", "multiplicative"): "matrices, or the third factor of a tensor",
    ("START", "chib", "singular"): "names of components, or the first vector of an iteration",
    ("START", "chib", "variational"): "factors, or allocation models",
    ("START", "multiplicative", "normal_parameters"): "real or positive factors",
    ("START", "normal_parameters", "singular"): "real or positive factors",
    ("START", "normal_parameters", "variational"): "factors, or allocation models",
    ("START", "multiplicative", "singular"): "any number of factors, or starts of matrices alone",
    ("START", "multiplicative", "variational"): "factors, or allocation models",
    ("START", "singular", "variational"): "factors, or allocation models",
    ("TEMPERATURE", "gamma_parameters", "tempered"): "seeds a generator, or keys noise",
    ("TRANSFORM", "fold_in", "posterior_draws"): "seeds a generator, or keys noise",
}
"""Files whose generators may have one address, and why no run has both."""


def generators():
    """Return purpose, file and the rest of the address of every generator or key in the package."""
    package = Path(daskfactor.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = []
            if isinstance(node, ast.Call):
                parts = node.args
            elif isinstance(node, ast.Tuple):
                parts = node.elts
            for n, part in enumerate(parts):
                if ast.unparse(part).startswith("Stream."):
                    rest = tuple(map(ast.unparse, parts[n + 1 :]))
                    found.append((ast.unparse(part).removeprefix("Stream."), path.stem, rest))
    return found


def lengths(address):
    """Return how many numbers an address has, at least and at most."""
    starred = sum(own.startswith("*") for own in address)
    return len(address) - starred, math.inf if starred else len(address)


def may_be_equal(one, other):
    """Tell whether two addresses may be the same: not where lengths or whole numbers differ."""
    least, most = zip(*map(lengths, (one, other)), strict=True)
    if max(least) > min(most):
        return False
    pairs = [(a, b) for a, b in zip(one, other, strict=False) if a.isdigit() and b.isdigit()]
    return all(a == b for a, b in pairs)


def test_generators_that_may_have_one_address_are_never_in_one_run():
    uses = generators()
    assert len(uses) > 20
    assert {purpose for purpose, _, _ in uses} <= set(Stream.__members__)
    shared = set()
    for (purpose, file, rest), (other_purpose, other, its) in itertools.combinations(uses, 2):
        if purpose == other_purpose and file != other and may_be_equal(rest, its):
            shared.add((purpose, *sorted((file, other))))
    assert shared == set(APART)
    assert not {"nndsvd", "random", "q_transform"} & set(daskfactor.CP.inits)
