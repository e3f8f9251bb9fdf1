"""Short runs without the compiler, and every random number that they draw: its address, for what.

Run as a script by ``test_streams.py``, in a process of its own: whatever is compiled calls no
Python, so kernels have to be plain functions.
"""

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

import daskfactor as dfac
from daskfactor import random
from daskfactor.inference import gamma_parameters, parameters, program
from daskfactor.inference.block_hmc import CHANCE
from daskfactor.kernels import entrywise, langevin, philox, squares, variates

KERNELS = str(Path(philox.__file__).parent)
PACKAGE = str(Path(dfac.__file__).parent)
# A chunk of one quad: no counter is used up that no number comes from.
philox.CHUNK = entrywise.CHUNK = 1
philox.NUMBERS = entrywise.NUMBERS = 4

WARM = {"warm_start": 1}
COUNTS = dfac.TweedieNMF(3, dispersion=1.0)
LAWS = {law: dfac.Relation("row", law, law=law, dispersion=1.0) for law in ("poisson", "normal")}
VIEWS = dfac.Coupled(3, relations=LAWS)
LANGEVIN = {
    "PSGLD": dfac.PSGLD(**WARM),
    "PSGRRLD": dfac.PSGRRLD(**WARM),
    "LangevinDynamics": dfac.LangevinDynamics(**WARM),
    "SGHMC": dfac.SGHMC(**WARM),
    "BlockHMC": dfac.BlockHMC(steps=1, **WARM),
}
MORE = {"SGLD": dfac.SGLD(**WARM)}
OF_A_MATRIX = {
    "SGLD of half": dfac.SGLD(0.01, subsample=0.5, **WARM),
    "PSGRRLD moments": dfac.PSGRRLD(transition="moments", **WARM),
    "Gibbs": dfac.Gibbs(**WARM),
}
REAL = {"Gibbs": dfac.Gibbs(), "SGHMC": dfac.SGHMC()}


def counts(*shape):
    return np.random.default_rng(0).poisson(3.0, shape).astype(np.float64)


def runs():
    """Return data, model and sampler of every run by name."""
    V, views = counts(4, 3), {"poisson": counts(4, 3), "normal": counts(4, 2)}
    spiked = dfac.TweedieNMF(3, dispersion=1.0, shape_w=0.3, shape_h=0.3)
    steep = dfac.TweedieNMF(3, dispersion=1.0, shape_w=0.7, shape_h=0.7)
    learnt = dfac.TweedieNMF(3, dispersion=1.0, rate_w="row", rate_h="component")
    found = {}
    for name, own in (LANGEVIN | MORE | OF_A_MATRIX).items():
        found[f"matrix, {name}"] = V, COUNTS, own
    for name in ("PSGLD", "SGHMC", "BlockHMC"):
        model = dfac.NegativeBinomialNMF(3, dispersion="column")
        found[f"dispersions, {name}"] = V, model, LANGEVIN[name]
    for name, own in REAL.items():
        found[f"real matrix, {name}"] = V, dfac.GaussianMF(3), own
    for name in ("PSGLD", "SGHMC", "BlockHMC", "Gibbs"):
        sampler = (LANGEVIN | OF_A_MATRIX)[name]
        found[f"learnt rates, {name}"] = V, learnt, sampler
        found[f"spikes, {name}"] = V, steep if name == "SGHMC" else spiked, sampler
    found["spikes, PSGRRLD moments"] = V, spiked, OF_A_MATRIX["PSGRRLD moments"]
    for axes in (3, 4, 5):
        for name, own in LANGEVIN.items():
            tensor = counts(3, *[2] * (axes - 1))
            found[f"{axes} axes, {name}"] = tensor, dfac.CP(3, dispersion=1.0), own
    steep_tensor = dfac.CP(3, dispersion=1.0, shape_w=0.7, shape_h=0.7)
    found["3 axes, SGHMC steep"] = counts(3, 2, 2), steep_tensor, LANGEVIN["SGHMC"]
    for name, own in (LANGEVIN | MORE).items():
        found[f"coupled, {name}"] = views, VIEWS, own
    return found


class Record:
    """Counters of Philox blocks under their keys, addresses of generators, and who used them."""

    def __init__(self):
        self.blocks = defaultdict(list)
        self.generators = defaultdict(set)

    def watch(self):
        """Note what every block and every generator is made for, from now on."""
        rounds, sequence = philox.rounds, random._sequence

        def noted_rounds(words, k0, k1):
            address = int(k0), int(k1), *map(int, words)
            self.blocks[address].append(self.user())
            return rounds(words, k0, k1)

        def noted_sequence(*address):
            self.generators[tuple(map(int, address))].add(self.user())
            return sequence(*address)

        philox.rounds = variates.rounds = noted_rounds
        random._sequence = noted_sequence

    @staticmethod
    def user():
        """Return the first function that is neither a kernel nor a maker of addresses. The two
        draws of an entry that share a block have its first words and its last ones."""
        frame = sys._getframe(2)
        half = ""
        while frame is not None:
            code, own = frame.f_code, frame.f_locals
            if code.co_name == "candidate":
                half = f", {('even', 'odd')[own['draw'] % 2]} draw"
            if code.co_filename.startswith(PACKAGE) and not (
                code.co_filename.startswith(KERNELS) or code.co_filename == random.__file__
            ):
                made = own.get("program")
                coarse = " (coarse)" if getattr(made, "coarse", False) else ""
                return f"{code.co_qualname}{coarse}{half}"
            frame = frame.f_back
        return "?"

    def repeated(self):
        """Return the blocks that were used more than once, but for those that are meant to be."""
        found = Counter[str]()
        for address, users in self.blocks.items():
            if len(users) > 1 and not meant(address, users):
                found[f"{sorted(users)}: the last word is {address[-1]}"] += 1
        return [f"{count} x {users}" for users, count in found.items()]

    def shared(self):
        """Return the addresses of generators that several functions made."""
        return [f"{a}: {sorted(u)}" for a, u in self.generators.items() if len(u) > 1]


def meant(address, users):
    """Tell what is used twice by design. A path of `BlockHMC` takes the first of a block's numbers
    where it begins and the rest where it ends; two draws of entries share a block; the coarse chain
    of a pair has the noise of the fine one."""
    if users == ["Path.numbers"] * 2:
        chances = {program.factor_word(factor) + CHANCE for factor in range(8)}
        return address[-1] in chances
    return sorted(users) in (
        ["LangevinKernel._move", "LangevinKernel._move (coarse)"],
        ["SubsampleKernel._add, even draw", "SubsampleKernel._add, odd draw"],
    )


def without_a_byte():
    """Put the words back with which the third factor had streams of the first one's components."""

    def word(factor):
        return factor if factor < 2 else 256 * factor

    def start(stream, key, iteration, factor, row, component):
        stream[0], stream[1], stream[2] = np.uint64(key[0]) ^ variates.ENTRY, key[1], 0
        stream[3], stream[4], stream[5], stream[7] = row, iteration, component * 256 + factor, 0

    for module in (variates, langevin, squares):
        module.start_entry = start
    program.factor_word = parameters.factor_word = gamma_parameters.factor_word = word


def two_steps():
    """Give every second iteration the streams of the one before."""
    address = program.Program.address
    program.Program.address = lambda own, band, iteration, *rest: address(
        own, band, iteration // 2, *rest
    )


FAULTS = {"": lambda: None, "without a byte": without_a_byte, "two steps": two_steps}


def recorded(V, model, sampler):
    """Run a sampler and return what was used twice, and the last words of all counters."""
    record = Record()
    kept = philox.rounds, random._sequence
    record.watch()
    try:
        options = {"draws": 2, "tune": 2, "blocks": 2, "random_seed": 1, "executor": "serial"}
        dfac.sample(V, model, sampler, progressbar=False, **options)
    finally:
        philox.rounds = variates.rounds = kept[0]
        random._sequence = kept[1]
    return {
        "blocks": len(record.blocks),
        "generators": len(record.generators),
        "repeated": record.repeated(),
        "shared": record.shared(),
        "words": sorted({(address[0], address[-1]) for address in record.blocks}),
        "key": int(random.noise_key(1, 0)[0]),
    }


if __name__ == "__main__":
    out, fault, *names = sys.argv[1:]
    FAULTS[fault]()
    every = runs()
    found = {name: recorded(*every[name]) for name in names or every}
    Path(out).write_text(json.dumps(found))
