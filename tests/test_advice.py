"""Advice works: what a warning or an error tells the reader to do is done, word for word."""

import ast
import re
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from scipy import sparse

import daskfactor as dfac
from daskfactor.executors.connection import check_versions
from daskfactor.stein.kernel import stein_weights
from tests.cli.shell import call, plain

QUIET = {"random_seed": 0, "progressbar": False}
RUN = {"draws": 4, "tune": 4} | QUIET
V = np.random.default_rng(0).poisson(3.0, (8, 6)) + 0.0
TWO = dfac.TweedieNMF(2)
COUNTS = dfac.AllocationModel.nmf(2)
READ = partial(dfac.as_blocks, blocks=1)


def sample(data=V, model=TWO, *options, **changes):
    return dfac.sample(data, model, *options, **RUN | changes)


def changed(value, row=0, column=0):
    values = V.copy()
    values[row, column] = value
    return values


def labelled(rows):
    return pd.DataFrame(V, index=rows, columns=[*"abcdef"])


def text(content, name="v.csv"):
    Path(name).write_text(content)
    return name


def numbers_in(said, before):
    """Return the number behind some words of a sentence."""
    return float(re.search(rf"{re.escape(before)}(-?[\d.]+(?:e[+-]?\d+)?)", said)[1])


def evidence(model, method, data=V):
    return dfac.log_evidence(data, model, method, **QUIET)


SLOW = patch("daskfactor.allocation.smc.LONG", 2e-5)
FEW = dfac.SequentialMonteCarlo(particles=2, islands=4, max_particles=8)
KEYS = pd.DataFrame({"user": [1, 1, 2, 3], "item": [4, 5, 4, 5], "rating": [1.0, 2.0, 3.0, 4.0]})
TWICE = pd.concat([KEYS, KEYS[:1]])
ENTRIES = {"rows": "user", "columns": "item", "values": "rating"}
PACKED = xr.DataArray(V, attrs={"scale_factor": 0.5})
SPARSE = sparse.csr_array(np.where(V > 3, V, 0))
LEVELS = pd.MultiIndex.from_product([["a", "b"], range(3)], names=["block", "part"])
SIDES = pd.DataFrame(V[:6], LEVELS, LEVELS)
BIG = np.full((3, 3), 2**24 + 1)
LARGE = np.broadcast_to(np.float32(1), (4096, 4608))
LADDER = partial(dfac.ThermodynamicIntegration, temperatures=4)
POISSON = dfac.TweedieNMF(2, dispersion=1.0)
OVER = np.random.default_rng(1).negative_binomial(1, 0.02, (30, 20)) + 0.0


def versions(numpy="2.0.0"):
    usual = {"daskfactor": "0.2.0", "python": "3.11.7.final.0", "numba": "0.60.0"}
    usual |= {"dask": "1", "distributed": "1", "numpy": "2.0.0"}
    told = [{"packages": own} for own in (usual, usual | {"numpy": numpy})]
    return {"client": told[0], "workers": {"tcp://b:1": told[1]}}


def started(sampler):
    """Run a chain whose warm start ends early."""
    with patch("daskfactor.inference.chain.FAR", 0.0):
        return sample(V, POISSON, sampler)


def empty_rows():
    counts = np.zeros((1500, 6))
    counts[:300] = 1
    return sparse.csr_array(counts)


def named(rows):
    return sample(labelled(rows), store="r.zarr", overwrite=True)


def predicted(name):
    named(["=1+1", *"bcdefgh"])
    done = call("predict", "r.zarr", "-o", name)
    assert done.exit_code == 0, done.stderr
    warnings.warn(plain(done.stderr), UserWarning, stacklevel=1)


def drawn(font):
    matplotlib = pytest.importorskip("matplotlib")
    data = xr.DataArray(V, {"row": ["\u2312", *"bcdefgh"]}, ("row", "column"))
    with matplotlib.rc_context({"font.family": font}):
        dfac.plots.components(sample(data)).savefig("p.png")


def silf(**options):
    return dfac.stein_posterior(V, dfac.SILFNMF(2, **options), particles=4, **QUIET)


def walked(**options):
    method = dfac.SimplexHMC(8, tune=options.pop("tune", 0), **options)
    return dfac.stein_posterior(V, TWO, method=method, particles=4, **QUIET)


def ranked(**options):
    rng = np.random.default_rng(0)
    data = rng.poisson(rng.exponential(20, (12, 3)) @ rng.exponential(20, (3, 9))) * 1.0
    method = dfac.ThermodynamicIntegration(**options)
    return dfac.select_rank(data, dfac.TweedieNMF(1), [1, 2], method, held_out=None, **QUIET)


def biased(sampler):
    rng = np.random.default_rng(5)
    data = rng.poisson(rng.gamma(1, 1, (20, 2)) @ rng.gamma(1, 1, (2, 15))) + 0.0
    model = dfac.TweedieNMF(2, dispersion=1.0, rate_w=1.0, rate_h=1.0)
    trace = dfac.sample(data, model, sampler, draws=100, tune=50, blocks=2, **QUIET)
    if sampler.biased:
        dfac.discretization_bias(trace, data, draws=100, cells=2, **QUIET)


NEGATIVE = np.diag([1.0, 1.0, 9.0])
NEGATIVE[0, 2] = NEGATIVE[2, 0] = NEGATIVE[1, 2] = NEGATIVE[2, 1] = 4.0


WARNINGS = {
    "few particles": (
        "raise max_particles beyond",
        lambda: evidence(COUNTS, FEW),
        lambda _: evidence(COUNTS, dfac.SequentialMonteCarlo(particles=64, islands=4)),
    ),
    "a slow evidence, thinned": (
        "would keep that share of the tokens",
        SLOW(lambda: evidence(COUNTS, FEW)),
        SLOW(
            lambda said: evidence(
                COUNTS,
                dfac.SequentialMonteCarlo(
                    particles=2, islands=4, max_particles=8, thin=numbers_in(said, "thin=")
                ),
            )
        ),
    ),
    "a bound that rises": (
        "raise max_iterations or tolerance",
        lambda: evidence(COUNTS, dfac.VariationalBayes(max_iterations=1)),
        lambda _: evidence(COUNTS, dfac.VariationalBayes(max_iterations=5000)),
        lambda _: evidence(COUNTS, dfac.VariationalBayes(max_iterations=2, tolerance=1e9)),
    ),
    "a formula": (
        "import that column as text, or write .parquet",
        lambda: predicted("p.csv"),
        lambda _: predicted("p.parquet"),
    ),
    "packed values": (
        "remove these attributes where they no longer hold",
        lambda: READ(PACKED),
        lambda _: READ(PACKED.drop_attrs()),
    ),
    "dimensions of one name": (
        "rename them to choose the names, for example with DataArray.rename",
        lambda: READ(SIDES),
        lambda _: READ(SIDES.rename_axis(columns=["other", "piece"])),
    ),
    "a coordinate with a name of results": (
        "rename it to keep it, for example with DataArray.rename",
        lambda: READ(xr.DataArray(np.ones((3, 2)), {"mean": ("a", np.arange(3))}, ("a", "b"))),
        lambda _: READ(xr.DataArray(np.ones((3, 2)), {"m": ("a", np.arange(3))}, ("a", "b"))),
    ),
    "a code for missing cells": (
        "if that stands for missing cells, set them to NaN",
        lambda: READ(changed(-9)),
        lambda _: READ(changed(np.nan)),
    ),
    "rounded integers": (
        " if that matters",
        lambda: READ(BIG),
        lambda _: READ(BIG, dtype="float64"),
    ),
    "tiny values": (
        'pass dtype="float64" to as_blocks or convert if that matters',
        lambda: READ(changed(1e-60)),
        lambda _: READ(changed(1e-60), dtype="float64"),
    ),
    "integers that no float holds": (
        "rescale the data if that matters",
        lambda: READ(np.full((3, 3), 2**53 + 1), dtype="float64"),
        lambda _: READ(np.full((3, 3), 2**53 + 1) / 1e6, dtype="float64"),
    ),
    "a large block": (
        ") need less",
        lambda: READ(LARGE, memory_limit="1 MB"),
        lambda _: dfac.as_blocks(LARGE, 64, memory_limit="1 MB"),
    ),
    "letters that a font lacks": (
        "to a font that has them",
        lambda: drawn("DejaVu Sans"),
        lambda _: drawn("STIXGeneral"),
    ),
    "what is not stored": (
        'unstored="zero" if they are zeros, unstored="missing" if they are unknown',
        lambda: READ(SPARSE, allow_empty=True),
        lambda _: READ(SPARSE, allow_empty=True, unstored="zero"),
        lambda _: READ(SPARSE, allow_empty=True, unstored="missing"),
    ),
    "entries of one cell": (
        '(with unstored="zero" they would be added up)',
        lambda: READ(TWICE, unstored="missing", table=True, allow_empty=True),
        lambda _: READ(TWICE, unstored="zero", table=True, allow_empty=True),
    ),
    "a first line that rises": (
        "if it is data, write NaN into that field",
        lambda: READ(text(",4,5,6\n1,2,4,3\n5,6,7,3\n")),
        lambda _: READ(text("NaN,4,5,6\n1,2,4,3\n5,6,7,3\n")),
    ),
    "a first line that counts": (
        "if it is data, write a line of names before it",
        lambda: READ(text("0,1,2,3,4\n1,2,4,3,1\n5,6,7,3,1\n")),
        lambda _: READ(text("a,b,c,d,e\n0,1,2,3,4\n1,2,4,3,1\n5,6,7,3,1\n")),
    ),
    "codes": (
        "if it is data, write its numbers without leading zeros",
        lambda: READ(text("01,1,2,3,4\n02,2,4,3,1\n05,6,7,3,1\n")),
        lambda _: READ(text("1,1,2,3,4\n2,2,4,3,1\n5,6,7,3,1\n")),
    ),
    "an estimate of few sweeps": (
        "take more draws, or use ThermodynamicIntegration()",
        lambda: evidence(POISSON, dfac.Chib(draws=50)),
        lambda _: evidence(POISSON, dfac.Chib(draws=5000)),
        lambda _: evidence(POISSON, dfac.ThermodynamicIntegration()),
    ),
    "ranks that errors do not tell apart": (
        "This does not decide between the ranks",
        lambda: ranked(temperatures=4, power=1, draws=50, tune=50),
        lambda _: ranked(temperatures=12, draws=50, tune=50),
    ),
    "chains that do not move": (
        "raise tune and draws, or pass another sampler",
        lambda: evidence(POISSON, LADDER(draws=50, tune=0, sampler=dfac.BlockHMC(step=1e-6))),
        lambda _: evidence(POISSON, LADDER(draws=50, tune=50, sampler=dfac.BlockHMC())),
    ),
    "few effective draws": (
        "raise draws and tune",
        lambda: evidence(POISSON, LADDER(draws=10, tune=0)),
        lambda _: evidence(POISSON, LADDER(draws=500, tune=50)),
    ),
    "a biased evidence": (
        "(), or leave sampler out",
        lambda: evidence(POISSON, LADDER(draws=200, tune=40, sampler=dfac.PSGLD())),
        lambda _: evidence(POISSON, LADDER(draws=200, tune=40, sampler=dfac.BlockHMC())),
        lambda _: evidence(POISSON, LADDER(draws=200, tune=40)),
    ),
    "workers with other libraries": (
        "install the same version everywhere",
        lambda: check_versions(versions("2.1.0")),
        lambda _: check_versions(versions()),
    ),
    "a bias": (
        "halve the step, or take an exact sampler",
        lambda: biased(dfac.PSGLD(step=0.5, transition="euler", warm_start=20)),
        lambda _: biased(dfac.PSGLD(step=0.0625, transition="euler", warm_start=20)),
        lambda _: biased(dfac.Gibbs()),
    ),
    "uneven weights": (
        "raise max_iter, or use ",
        lambda: dfac.optimize(V, TWO, dfac.DSGD(), weights=10 ** (V - 3), **QUIET),
        lambda _: dfac.optimize(
            V, TWO, dfac.MultiplicativeUpdates(), weights=10 ** (V - 3), **QUIET
        ),
    ),
    "no maximum": (
        "draw from the posterior with sample(), or take ",
        lambda: dfac.optimize(V, dfac.TweedieNMF(2, shape_w=0.5), **QUIET),
        lambda _: sample(V, dfac.TweedieNMF(2, shape_w=0.5)),
        lambda _: dfac.optimize(V, dfac.TweedieNMF(2, shape_w=1.0), **QUIET),
    ),
    "a run that still moves": (
        "tune longer",
        lambda: sample(50 * V, POISSON, dfac.PSGLD(warm_start=0, step=0.02), draws=100, tune=0),
        lambda _: sample(50 * V, POISSON, dfac.PSGLD(warm_start=0, step=0.02), draws=100, tune=900),
    ),
    "a step that diverges": (
        "choose a smaller step to avoid this",
        lambda: sample(V, TWO, dfac.PSGLD(step=1e3, preconditioner="identity"), tune=100),
        lambda said: sample(
            V,
            TWO,
            dfac.PSGLD(step=500 * numbers_in(said, "down to "), preconditioner="identity"),
            tune=100,
        ),
    ),
    "counts that vary": (
        "compare with a larger n_components, with NegativeBinomialNMF and with starts=5",
        lambda: sample(OVER, TWO),
        lambda _: sample(OVER, dfac.NegativeBinomialNMF(2)),
        lambda _: sample(OVER, POISSON),
    ),
    "a step too large": (
        "choose a smaller step or fewer blocks, or use BlockHMC() or LangevinDynamics()",
        lambda: sample(V, POISSON, dfac.PSGLD(step=1.0, preconditioner="identity"), tune=100),
        lambda _: sample(V, POISSON, dfac.PSGLD(step=0.03, preconditioner="identity"), tune=100),
        lambda _: sample(V, POISSON, dfac.BlockHMC(), tune=100),
        lambda _: sample(V, POISSON, dfac.LangevinDynamics(), tune=100),
    ),
    "a warm start that ends early": (
        "PSGLD(warm_start=",
        lambda: started(dfac.PSGLD()),
        lambda said: started(dfac.PSGLD(warm_start=int(numbers_in(said, "warm_start=")))),
    ),
    "fractions": (
        "law of counts; ",
        lambda: sample(V + 0.5, dfac.NegativeBinomialNMF(2)),
        lambda _: sample(V + 0.5, dfac.TweedieNMF(2, beta=0)),
        lambda _: sample(V + 0.5, dfac.TweedieNMF(2, beta=0.5)),
    ),
    "rows of zeros": (
        "leave them out, for example V[",
        lambda: sample(empty_rows(), POISSON, unstored="zero"),
        lambda said: sample(
            eval(said.rpartition("for example ")[2], {"V": empty_rows(), "np": np}),
            POISSON,
            unstored="zero",
        ),
    ),
    "draws that are passed over in distances": (
        "for all of them",
        lambda: dfac.pairwise_distances(sample(), most=2),
        lambda _: dfac.pairwise_distances(sample(), most=4),
    ),
    "draws that are passed over in a discrepancy": (
        "for all of them",
        lambda: dfac.stein_discrepancy(sample(), V, TWO, most=2),
        lambda _: dfac.stein_discrepancy(sample(), V, TWO, most=4),
    ),
    "a Stein matrix that lost its digits": (
        "leave out the particles with the largest entries on its diagonal",
        lambda: stein_weights(NEGATIVE),
        lambda _: stein_weights(NEGATIVE[:2, :2]),
    ),
    "particles that are not good enough": (
        "let them run longer, or pass a larger threshold",
        lambda: silf(threshold=1e-3, sharpness=1e6),
        lambda _: silf(threshold=100.0, sharpness=1e6),
    ),
    "a flat likelihood": (
        "pass a larger sharpness, such as",
        lambda: dfac.stein_posterior(1e-3 * V, dfac.SILFNMF(2), particles=4, **QUIET),
        lambda said: dfac.stein_posterior(
            1e-3 * V, dfac.SILFNMF(2, sharpness=numbers_in(said, "such as ")), particles=4, **QUIET
        ),
        lambda _: silf(),
    ),
    "proposals that are not taken": (
        "pass a smaller step, or step='auto' with more tune",
        lambda: walked(step=1e300),
        lambda _: walked(step=1e-3),
        lambda _: walked(tune=40),
    ),
}


NOTES = (
    "differences between models are smaller about in that",
    "are left out; in maps they are",
    "which no store keeps; they are kept as texts",
    "they are kept as times in UTC, without zone",
    "describe its genes, and are left out",
    "are not genes but summaries of HTSeq or STAR",
    "are used as rows, because the file",
    "draws have the same law, and other bits than there",
    "nothing is monitored",
    "of the result; their rows of",
    "equal weights or the best single particle are returned",
)
"""Words of warnings that inform, and ask for nothing."""


def shell(*arguments):
    """Run a command; raise what it prints if it fails."""
    done = call(*arguments)
    if done.exit_code:
        raise RuntimeError(plain(re.sub("[│╭╮╰╯─]", "", done.stderr)))
    return done.stdout


def fit(*options, data="v.csv"):
    """Fit a file with a command, and no other run of that name."""
    return shell(
        "fit", data, "-k", "1", "--draws", "4", "--tune", "4", "--store", "r.zarr", *options
    )


def numbers(name="v.csv", values=V):
    np.savetxt(name, values, delimiter=",", fmt="%g")
    return name


def stored(**changes):
    sample(store="r.zarr", overwrite=True)
    return sample(store="r.zarr", **changes)


def tensor():
    return sample(np.random.default_rng(0).poisson(3.0, (4, 5, 6)) + 0.0, dfac.CP(2))


def new_rows(trace, data, **options):
    return dfac.transform(trace, data, **options, **QUIET)


EMPTY = V.copy()
EMPTY[:, 2] = np.nan
CUBE = xr.DataArray(np.ones((3, 4, 5)), dims=("time", "y", "x"))
NORMAL = dfac.TweedieNMF(2, beta=2)
ERROR = np.full(V.shape, 0.5)
MASK = V > 4
CELLS = [xr.DataArray(at, dims="cell") for at in np.nonzero(MASK)]
LETTERS = pd.DataFrame(V, columns=[*"abcdef"])
THREE = "1,2,3\n4,5,6\n7,8,9\n"
WHICH = (
    "pass rows=0, columns=1, values=2 (or table=True) if it has a line for each entry, table=False"
)


ERRORS = {
    "negative values": (
        "mask or shift the negative values, or use beta=2",
        lambda: sample(changed(-1)),
        lambda _: sample(np.ma.masked_less(changed(-1), 0)),
        lambda _: sample(changed(-1) + 1),
        lambda _: sample(changed(-1), NORMAL),
    ),
    "negative counts": (
        "mask the negative values, or pass counts that are neither centred nor transformed",
        lambda: sample(changed(-1), dfac.NegativeBinomialNMF(2)),
        lambda _: sample(np.ma.masked_less(changed(-1), 0), dfac.NegativeBinomialNMF(2)),
        lambda _: sample(V, dfac.NegativeBinomialNMF(2)),
    ),
    "zeros under a law of positive values": (
        "mark the zeros as missing, add a small offset, or use 0 < beta <= 1",
        lambda: sample(changed(0), dfac.TweedieNMF(2, beta=0)),
        lambda _: sample(np.where(changed(0) == 0, np.nan, V), dfac.TweedieNMF(2, beta=0)),
        lambda _: sample(changed(0) + 0.1, dfac.TweedieNMF(2, beta=0)),
        lambda _: sample(changed(0), dfac.TweedieNMF(2, beta=0.5)),
    ),
    "a column of NaN": (
        "drop it from the matrix, or pass as_blocks(V, allow_empty=True)",
        lambda: sample(EMPTY),
        lambda _: sample(np.delete(EMPTY, 2, axis=1)),
        lambda _: sample(dfac.as_blocks(EMPTY, allow_empty=True)),
    ),
    "an option of as_blocks": (
        "sample(as_blocks(V, allow_empty=True), ...)",
        lambda: sample(EMPTY, allow_empty=True),
        lambda _: sample(dfac.as_blocks(EMPTY, allow_empty=True)),
    ),
    "a slice of NaN": (
        "or pass as_tensor(V, allow_empty=True) to leave them to the prior",
        lambda: sample(CUBE.where(CUBE["time"] > 0).values, dfac.CP(2)),
        lambda _: sample(
            dfac.as_tensor(CUBE.where(CUBE["time"] > 0).values, allow_empty=True), dfac.CP(2)
        ),
    ),
    "an infinite entry": (
        "correct it, or set it to NaN",
        lambda: sample(changed(np.inf)),
        lambda _: sample(changed(2.0)),
        lambda _: sample(changed(np.nan)),
    ),
    "a value out of range": (
        'pass dtype="float64" to as_blocks or convert, or rescale the data',
        lambda: sample(changed(1e39)),
        lambda _: sample(dfac.as_blocks(changed(1e39), dtype="float64"), dfac.TweedieNMF(1)),
        lambda _: sample(changed(1e39) / 1e30, dfac.TweedieNMF(1)),
    ),
    "nothing but zeros": (
        "check that the data are not all zero, or pass rate_w and rate_h as numbers",
        lambda: sample(0 * V),
        lambda _: sample(0 * V, dfac.TweedieNMF(2, rate_w=1.0, rate_h=1.0)),
    ),
    "a vector": (
        "a matrix with rows and columns is needed, so select or reshape to two dimensions",
        lambda: sample(V[0]),
        lambda _: sample(V[0].reshape(2, 3)),
    ),
    "three axes": (
        "pass CP(...) to factor them as a tensor",
        lambda: sample(CUBE.values),
        lambda _: sample(CUBE.values, dfac.CP(2)),
        lambda _: sample(CUBE.values.reshape(3, 20)),
    ),
    "three dimensions with names": (
        "as in sample(V, model, rows='time') or as_blocks(V, rows='time')",
        lambda: sample(CUBE),
        lambda _: sample(CUBE, rows="time"),
        lambda _: sample(dfac.as_blocks(CUBE, rows="time")),
    ),
    "a matrix for a tensor": (
        "use TweedieNMF for a matrix",
        lambda: sample(V, dfac.CP(2)),
        lambda _: sample(V, dfac.TweedieNMF(2)),
    ),
    "lists": (
        "here pass numpy.array(V)",
        lambda: sample(V.tolist()),
        lambda _: sample(np.array(V.tolist())),
    ),
    "a series": (
        "here pass V.to_frame()",
        lambda: sample(pd.Series(V[0]), dfac.TweedieNMF(1)),
        lambda _: sample(pd.Series(V[0]).to_frame(), dfac.TweedieNMF(1)),
    ),
    "texts": (
        "convert them, for example with .astype('float64')",
        lambda: sample(V.astype(str)),
        lambda _: sample(V.astype(str).astype("float64")),
    ),
    "a column of names": (
        "drop it, convert it, or make it the index with set_index",
        lambda: sample(LETTERS.assign(name=[*"stuvwxyz"])),
        lambda _: sample(LETTERS.assign(name=[*"stuvwxyz"]).drop(columns="name")),
        lambda _: sample(LETTERS.assign(name=[*"stuvwxyz"]).set_index("name")),
    ),
    "keys of floats": (
        "keys must be whole numbers, texts or dates; convert it, or choose others",
        lambda: READ(KEYS.astype({"user": float}) / 2, unstored="zero", **ENTRIES),
        lambda _: READ((KEYS / 2).astype({"user": str, "item": str}), unstored="zero", **ENTRIES),
    ),
    "a table or a matrix": (
        WHICH,
        lambda: READ(text(THREE)),
        lambda _: READ(text(THREE), rows=0, columns=1, values=2, unstored="zero"),
        lambda _: READ(text(THREE), table=True, unstored="zero"),
        lambda _: READ(text(THREE), table=False),
    ),
    "a table or a matrix, in the shell": (
        "pass --rows 0, --columns 1, --values 2 (or --table) if it has a line for each entry, --",
        lambda: fit(data=text(THREE)),
        lambda _: fit("--matrix", data=text(THREE)),
        lambda _: fit("--table", "--unstored", "zero", "--overwrite", data=text(THREE)),
    ),
    "an infinite field of a file": (
        "line 2, field 2 is 'inf': correct it, or write NaN",
        lambda: READ(text(THREE.replace("5", "inf"))),
        lambda _: READ(text(THREE.replace("5", "NaN")), table=False),
    ),
    "a ragged line of a file": (
        "line 2 has 2 fields, the lines before it 3; write 3 on every line, with nothing in one",
        lambda: READ(text(THREE.replace("5,6", "5"))),
        lambda _: READ(text(THREE.replace("5,6", "5,")), table=False),
    ),
    "a ragged line of a wider file": (
        "line 2 has 4 fields, the lines before it 5; write 5 on every line, with nothing in one",
        lambda: READ(text("1,2,3,4,1\n5,6,7,1\n8,9,1,2,1\n")),
        lambda _: READ(text("1,2,3,4,1\n5,6,7,,1\n8,9,1,2,1\n")),
    ),
    "decimal commas": (
        "pass what pandas.read_csv(..., sep=';', decimal=',') reads",
        lambda: READ(text("a;b\n1,5;2,5\n3,5;1,5\n")),
        lambda _: READ(pd.read_csv("v.csv", sep=";", decimal=",")),
    ),
    "a file that there is not": (
        "v.csv does not exist",
        lambda: sample("v.csv"),
        lambda _: sample(numbers()),
    ),
    "a folder that there is not": (
        "check the path, or pass that of an array or a blocked store",
        lambda: sample("v.zarr"),
        lambda _: (pytest.importorskip("zarr").save_array("v.zarr", V), sample("v.zarr")),
    ),
    "a model that is a number": (
        "such as TweedieNMF(n_components=20) or GaussianMF(n_components=20)",
        lambda: sample(V, 2),
        lambda _: sample(V, dfac.TweedieNMF(n_components=20)),
    ),
    "components for a verb": (
        "did you mean 'model'?",
        lambda: dfac.sample(V, n_components=2),
        lambda _: sample(V, model=TWO),
    ),
    "draws by another name": (
        "did you mean 'draws'?",
        lambda: dfac.sample(V, TWO, n_samples=4),
        lambda _: dfac.sample(V, TWO, draws=4, **QUIET),
    ),
    "tuning by another name": (
        "did you mean 'tune'?",
        lambda: dfac.sample(V, TWO, draws=4, warmup=4),
        lambda _: dfac.sample(V, TWO, draws=4, tune=4, **QUIET),
    ),
    "a seed by another name": (
        "did you mean 'random_seed'?",
        lambda: dfac.sample(V, TWO, seed=1),
        lambda _: sample(V, TWO, random_seed=1),
    ),
    "a law by its name": (
        "beta must be a number (2: Gaussian, 1: Poisson)",
        lambda: dfac.TweedieNMF(2, beta="poisson"),
        lambda _: sample(V, dfac.TweedieNMF(2, beta=1)),
    ),
    "a law that there is not": (
        "choose beta <= 1 (1 is Poisson, 0 is gamma) or beta >= 2 (2 is Gaussian)",
        lambda: dfac.TweedieNMF(2, beta=1.5),
        lambda _: sample(V, dfac.TweedieNMF(2, beta=1)),
    ),
    "a sampler by its name": (
        'sampler must be "auto" or one of BlockHMC(), Gibbs(), Langevin',
        lambda: sample(V, TWO, "Gibbs"),
        lambda _: sample(V, TWO, dfac.Gibbs()),
    ),
    "a sampler of another model": (
        "it takes Gibbs() or SGHMC(); leave sampler out for the right one",
        lambda: sample(V, dfac.GaussianMF(2), dfac.PSGLD()),
        lambda _: sample(V, dfac.GaussianMF(2), dfac.SGHMC()),
        lambda _: sample(V, dfac.GaussianMF(2)),
    ),
    "Gibbs of fractions": (
        "round or rescale them to counts, or use PSGLD()",
        lambda: sample(V + 0.5, TWO, dfac.Gibbs()),
        lambda _: sample(np.rint(V + 0.5), TWO, dfac.Gibbs()),
        lambda _: sample(2 * (V + 0.5), TWO, dfac.Gibbs()),
        lambda _: sample(V + 0.5, TWO, dfac.PSGLD()),
    ),
    "Gibbs of another law": (
        "use PSGLD() or BlockHMC() for any other law",
        lambda: sample(V, NORMAL, dfac.Gibbs()),
        lambda _: sample(V, NORMAL, dfac.PSGLD()),
        lambda _: sample(V, NORMAL, dfac.BlockHMC()),
    ),
    "Gibbs with weights": (
        "pass data without, or leave sampler out",
        lambda: sample(V, TWO, dfac.Gibbs(), weights=2.0),
        lambda _: sample(V, TWO, dfac.Gibbs()),
        lambda _: sample(V, TWO, weights=2.0),
    ),
    "a plain step": (
        'pass a number such as step=1e-5, or use preconditioner="majorizer"',
        lambda: sample(V, TWO, dfac.PSGLD(preconditioner="identity")),
        lambda _: sample(V, TWO, dfac.PSGLD(preconditioner="identity", step=1e-5)),
        lambda _: sample(V, TWO, dfac.PSGLD(preconditioner="majorizer")),
    ),
    "an unknown choice": (
        'keep must be "auto", "draws" or "moments"',
        lambda: sample(keep="all"),
        lambda _: sample(keep="auto"),
        lambda _: sample(keep="draws"),
        lambda _: sample(keep="moments"),
    ),
    "dense data with a meaning of gaps": (
        "mark missing entries with NaN or a mask, or pass a sparse matrix",
        lambda: sample(V, unstored="missing"),
        lambda _: sample(changed(np.nan)),
        lambda _: sample(sparse.csr_array(V), unstored="missing"),
    ),
    "a store that exists": (
        "pass another path, overwrite=True to replace it, or continue it with daskfactor.resume",
        stored,
        lambda _: sample(store="other.zarr"),
        lambda _: stored(overwrite=True),
        lambda _: dfac.resume("r.zarr", draws=4, progressbar=False),
    ),
    "a store that exists, in the shell": (
        "pass another path, --overwrite to replace it, or continue it with daskfactor resume",
        lambda: (fit("--overwrite", data=numbers()), fit()),
        lambda _: fit("--store", "other.zarr"),
        lambda _: fit("--overwrite"),
        lambda _: shell("resume", "r.zarr", "--draws", "4"),
    ),
    "a folder that is no run": (
        "not a run store that can be replaced; pass another path",
        lambda: (Path("x").mkdir(), text("", "x/y"), sample(store="x", overwrite=True)),
        lambda _: sample(store="other.zarr", overwrite=True),
    ),
    "a run in memory": (
        "pass store= when it starts",
        lambda: dfac.resume(sample(), draws=4),
        lambda _: (sample(store="r.zarr"), dfac.resume("r.zarr", draws=4, progressbar=False)),
    ),
    "other data for a run": (
        "pass the run's data",
        lambda: (
            sample(store="r.zarr", overwrite=True),
            dfac.resume("r.zarr", draws=4, V=V + 1, progressbar=False),
        ),
        lambda _: dfac.resume("r.zarr", draws=4, V=V, progressbar=False),
    ),
    "starts of a Gaussian model": (
        "leave starts out",
        lambda: sample(V, dfac.GaussianMF(2), starts=4),
        lambda _: sample(V, dfac.GaussianMF(2)),
    ),
    "starts of a start that never varies": (
        'take init="multiplicative", or leave starts out',
        lambda: sample(starts=4, init="nndsvd"),
        lambda _: sample(starts=4, init="multiplicative"),
        lambda _: sample(init="nndsvd"),
    ),
    "a pair of arrays to begin with": (
        "a Dataset of W (row, component) and H (component, column), a result, or the path of",
        lambda: sample(init=(V[:, :2] + 1, V[:2] + 1)),
        lambda _: sample(
            init=xr.Dataset(
                {
                    "W": (("row", "component"), V[:, :2] + 1),
                    "H": (("component", "column"), V[:2] + 1),
                }
            )
        ),
    ),
    "pairs of positions": (
        'monitor takes None, "missing", a boolean mask of the shape of V, or a pair (rows, ',
        lambda: sample(monitor=[(0, 1), (1, 2), (2, 3)]),
        lambda _: sample(monitor=MASK),
        lambda _: sample(monitor=([0, 1, 2], [1, 2, 3])),
    ),
    "cells that were not monitored": (
        "the run monitored no cells; run again with monitor=(rows, columns)",
        lambda: dfac.monitored(sample()),
        lambda _: dfac.monitored(sample(monitor=MASK)),
    ),
    "an uncertainty under a law of counts": (
        "take beta=2 or GaussianMF, or pass weights to as_blocks",
        lambda: sample(V, dfac.NegativeBinomialNMF(2), uncertainty=ERROR),
        lambda _: sample(V, NORMAL, uncertainty=ERROR),
        lambda _: sample(dfac.as_blocks(V, weights=ERROR), dfac.NegativeBinomialNMF(2)),
    ),
    "an uncertainty of another shape": (
        "uncertainty must have the shape of V, (8, 6), or be a DataArray with dimensions among",
        lambda: sample(V, NORMAL, uncertainty=ERROR[:, 0]),
        lambda _: sample(V, NORMAL, uncertainty=ERROR),
        lambda _: sample(V, NORMAL, uncertainty=xr.DataArray(ERROR[:, 0], dims="row")),
        lambda _: sample(V, NORMAL, uncertainty=(ERROR[:, 0], ERROR[0])),
        lambda _: sample(V, NORMAL, uncertainty=0.5),
    ),
    "an uncertainty of zero": (
        "it must be a positive number, in the range of float32; infinity makes a cell missing",
        lambda: sample(V, NORMAL, uncertainty=changed(0) * ERROR),
        lambda _: sample(V, NORMAL, uncertainty=(V + 1) * ERROR),
        lambda _: sample(V, NORMAL, uncertainty=np.where(MASK, np.inf, ERROR)),
    ),
    "an uncertainty of zeros that are not stored": (
        'pass unstored="missing" (if unknown), a dense matrix, or weights=',
        lambda: sample(sparse.csr_array(V), NORMAL, unstored="zero", uncertainty=ERROR),
        lambda _: sample(
            sparse.csr_array(V + 1), NORMAL, unstored="missing", uncertainty=sparse.csr_array(ERROR)
        ),
        lambda _: sample(sparse.csr_array(V).toarray(), NORMAL, uncertainty=ERROR),
        lambda _: sample(sparse.csr_array(V), NORMAL, unstored="zero", weights=4.0),
    ),
    "a negative weight": (
        "it must be a finite number of at least 0, in the range of float32; 0 makes a cell missing",
        lambda: sample(weights=-ERROR),
        lambda _: sample(weights=ERROR),
        lambda _: sample(weights=np.where(V == 9, 0, ERROR)),
    ),
    "both of them": (
        "pass one of them: an uncertainty of sigma is a weight of 1 / sigma**2 at dispersion 1",
        lambda: sample(V, NORMAL, uncertainty=ERROR, weights=ERROR),
        lambda _: sample(V, NORMAL, uncertainty=ERROR),
        lambda _: sample(V, dfac.TweedieNMF(2, beta=2, dispersion=1.0), weights=1 / ERROR**2),
    ),
    "a prediction of moments": (
        'run again with keep="draws", or with monitor=(rows, columns) for a few',
        lambda: dfac.predict(sample(keep="moments")),
        lambda _: dfac.predict(sample(keep="draws")),
        lambda _: dfac.monitored(sample(keep="moments", monitor=([0, 1], [2, 3]))),
    ),
    "a mask for a prediction": (
        "[xarray.DataArray(at, dims='cell') for at in numpy.nonzero(mask)]",
        lambda: dfac.predict(sample(), MASK),
        lambda _: dfac.predict(sample(), *CELLS),
    ),
    "a prediction of a point": (
        "its prediction is point['W'] @ point['H']; for intervals and alignment pass the result",
        lambda: dfac.predict(dfac.optimize(V, TWO, **QUIET)),
        lambda _: (point := dfac.optimize(V, TWO, **QUIET))["W"] @ point["H"],
        lambda _: dfac.predict(sample()),
    ),
    "an interval in percent": (
        "90 % is 0.9",
        lambda: dfac.predict(sample(), interval=90),
        lambda _: dfac.predict(sample(), interval=0.9),
    ),
    "a position among labels": (
        "for positions select from the trace, trace.isel({'column': ...})",
        lambda: dfac.predict(sample(LETTERS), columns=[0]),
        lambda _: dfac.predict(sample(LETTERS), columns=["a"]),
        lambda _: dfac.predict(sample(LETTERS).isel({"column": [0]})),
    ),
    "new rows with other columns": (
        "the run has 6 columns, and the new rows have 3; pass data with the same columns",
        lambda: new_rows(sample(), V[:, :3]),
        lambda _: new_rows(sample(), V[:3]),
    ),
    "new rows with another label": (
        "drop these columns, or drop the labels to match by position",
        lambda: new_rows(sample(LETTERS), LETTERS.assign(g=1.0)),
        lambda _: new_rows(sample(LETTERS), LETTERS.assign(g=1.0).drop(columns="g")),
        lambda _: new_rows(sample(LETTERS), LETTERS.to_numpy()),
    ),
    "new rows of a weighted run": (
        "new rows need theirs: pass weights=, of the shape of V",
        lambda: new_rows(sample(weights=2.0), V),
        lambda _: new_rows(sample(weights=2.0), V, weights=np.full(V.shape, 2.0)),
    ),
    "too many draws": (
        "take fewer, or leave draws out for all",
        lambda: new_rows(sample(), V, draws=100),
        lambda _: new_rows(sample(), V, draws=2),
        lambda _: new_rows(sample(), V),
    ),
    "a recommendation of a tensor": (
        "pass view(run, axis), which has all other axes in row-major order as columns, with one of",
        lambda: dfac.recommend(tensor()),
        lambda _: dfac.recommend(dfac.view(tensor(), "axis_0"), exclude=None),
    ),
    "nothing left to recommend": (
        "pass a sparse matrix, a table, or an array with NaN at cells that may be recommended",
        lambda: dfac.recommend(sample(), exclude=V),
        lambda _: dfac.recommend(sample(), exclude=sparse.csr_array(np.where(MASK, V, 0))),
        lambda _: dfac.recommend(sample(), exclude=np.where(MASK, V, np.nan)),
    ),
    "a recommendation of moments": (
        'run again with keep="draws"',
        lambda: dfac.recommend(sample(keep="moments"), exclude=None),
        lambda _: dfac.recommend(sample(keep="draws"), exclude=None),
    ),
    "matrices of other sizes": (
        "give all of them labels (xarray, pandas, AnnData), or one size",
        lambda: sample({"a": V, "b": V[:4]}, dfac.Coupled(2)),
        lambda _: sample(
            {"a": labelled([*"stuvwxyz"]), "b": labelled([*"stuvwxyz"])[:4]}, dfac.Coupled(2)
        ),
        lambda _: sample({"a": V[:4], "b": V[:4]}, dfac.Coupled(2)),
    ),
    "several matrices for one": (
        'sample({"rna": V1, "adt": V2}, Coupled(10))',
        lambda: sample({"rna": V, "adt": V}),
        lambda _: sample({"rna": V, "adt": V}, dfac.Coupled(10)),
    ),
    "an evidence of a Gaussian model": (
        "compare others by hold_out() and predict()",
        lambda: dfac.log_evidence(V, dfac.GaussianMF(2)),
        lambda _: dfac.predict(
            sample(dfac.hold_out(V, 0.2, random_seed=0).train, dfac.GaussianMF(2))
        ),
    ),
    "one rank": (
        "ranks must be a list of numbers such as [1, 2, 3]",
        lambda: dfac.select_rank(V, TWO, 3),
        lambda _: dfac.select_rank(
            V, TWO, [1, 2, 3], LADDER(draws=20, tune=5), held_out=None, **QUIET
        ),
    ),
    "a share in percent": (
        "20 % is 0.2",
        lambda: dfac.hold_out(V, 20),
        lambda _: dfac.hold_out(V, 0.2, random_seed=0),
    ),
    "a sampler of the shell": (
        "must be one of BlockHMC, Gibbs, LangevinDynamics",
        lambda: fit("--sampler", "nuts", data=numbers()),
        lambda _: fit("--sampler", "BlockHMC"),
    ),
    "a law and a sampler of the shell": (
        "use --sampler psgld or --sampler blockhmc for any other law",
        lambda: fit("--sampler", "gibbs", "--beta", "2", data=numbers()),
        lambda _: fit("--sampler", "psgld", "--beta", "2"),
        lambda _: fit("--sampler", "blockhmc", "--beta", "2", "--overwrite"),
    ),
    "a ranking of moments in the shell": (
        "run daskfactor fit again with --keep draws",
        lambda: (fit("--keep", "moments", data=numbers()), shell("recommend", "r.zarr")),
        lambda _: (fit("--keep", "draws", "--overwrite"), shell("recommend", "r.zarr")),
    ),
    "an option of another model": (
        "--beta belongs to --model tweedie, got 2.0 with --model gaussian; leave one of them out",
        lambda: fit("--model", "gaussian", "--beta", "2", data=numbers()),
        lambda _: fit("--model", "gaussian"),
        lambda _: fit("--beta", "2", "--overwrite"),
    ),
    "negative values in the shell": (
        "mask or shift the negative values, or use --beta 2",
        lambda: fit(data=numbers(values=V - 3)),
        lambda _: fit("--beta", "2"),
    ),
    "a column of gaps in the shell": (
        "drop it from the matrix, or pass --allow-empty to leave them to the prior",
        lambda: fit(data=numbers(values=EMPTY)),
        lambda _: fit("--allow-empty"),
    ),
    "cells to monitor in the shell": (
        "--monitor must be 'missing', got 'all'",
        lambda: fit("--monitor", "all", data=numbers(values=changed(np.nan))),
        lambda _: fit("--monitor", "missing"),
    ),
    "no number of components in the shell": (
        "Missing option '-k' / '--components'",
        lambda: shell("fit", numbers(), "--store", "r.zarr"),
        lambda _: fit(),
    ),
    "rows in the shell": (
        "--rows must lie within 0:8",
        lambda: (fit(data=numbers()), shell("predict", "r.zarr", "--rows", "8")),
        lambda _: shell("predict", "r.zarr", "--rows", "0:8"),
    ),
    "an interval in the shell": (
        "--interval must lie strictly between 0 and 1, got 90.0; 90 % is 0.9",
        lambda: (fit(data=numbers()), shell("predict", "r.zarr", "--interval", "90")),
        lambda _: shell("predict", "r.zarr", "--interval", "0.9"),
    ),
    "a table for a run in the shell": (
        "pass the path given as --store",
        lambda: (fit(data=numbers()), shell("info", "v.csv")),
        lambda _: shell("info", "r.zarr"),
    ),
    "a dense file to convert": (
        "pass the data to daskfactor fit",
        lambda: (np.save("v.npy", V), shell("convert", "v.npy", "s.zarr")),
        lambda _: fit(data="v.npy"),
    ),
    "ranks in the shell": (
        "--ranks must be FIRST:LAST or a list such as 2,4,8",
        lambda: shell("select-rank", numbers(), "--ranks", "0:2"),
        lambda _: shell(
            "select-rank",
            "v.csv",
            "--ranks",
            "1:2",
            "--draws",
            "10",
            "--tune",
            "4",
            "--held-out",
            "0",
        ),
    ),
    "a prediction as a spreadsheet": (
        "--output must be a .csv, .parquet, .nc or .zarr file, or -",
        lambda: (fit(data=numbers()), shell("predict", "r.zarr", "-o", "p.xls")),
        lambda _: shell("predict", "r.zarr", "-o", "p.csv"),
    ),
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def warned(call, *told):
    """Return the texts of the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*told)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("name", WARNINGS)
def test_the_advice_of_a_warning_works(name):
    words, before, *ways = WARNINGS[name]
    said = [one for one in warned(before) if words in one]
    assert said, f"no such warning: {warned(before)}"
    for number, way in enumerate(ways):
        again = [one for one in warned(way, said[0]) if words in one]
        assert not again, (number, again)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ERRORS)
def test_the_advice_of_an_error_works(name):
    words, before, *ways = ERRORS[name]
    with pytest.raises(Exception, match=re.escape(words)) as caught:
        before()
    for way in ways:
        way(str(caught.value))


def texts_of(*nodes):
    """Return the texts in some nodes, with 7 for what is put into them."""
    parts = [own for node in nodes for own in ast.walk(node) if isinstance(own, ast.JoinedStr)]
    inner = {own for node in parts for own in node.values}
    parts += [own for node in nodes for own in ast.walk(node) if own not in inner]
    for node in parts:
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                own.value if isinstance(own, ast.Constant) else "7" for own in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_warning_advises_something_that_is_tried_here_or_only_informs():
    known, lacking = [*NOTES, *(words for words, *_ in WARNINGS.values())], []
    for file in sorted(Path(dfac.__file__).parent.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or file.name == "checks.py" or not node.args:
                continue
            if ast.unparse(node.func) not in ("warn", "warnings.warn"):
                continue
            # A text that was put together before is somewhere in the module.
            fixed = isinstance(node.args[0], ast.JoinedStr | ast.Constant)
            said = "\n".join(texts_of(node.args[0] if fixed else tree))
            if not any(words in said for words in known):
                lacking.append(f"{file.name}:{node.lineno} {said[:200]}")
    assert not lacking, "\n".join(lacking)
