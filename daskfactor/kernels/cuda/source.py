"""The CUDA C++ of kernels, put together: a prelude, translated arithmetic, and kernels on it.

Texts are the same for every machine and every build; numbers that a compiler should know, such
as types and the number of components, are macros among the options.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import numpy as np

from daskfactor.kernels import langevin, philox, squares, subsample, variates
from daskfactor.kernels.cuda.translate import TYPES, Translation
from daskfactor.kernels.entries import entry_rules
from daskfactor.kernels.entrywise import ROOT_HALF, Move, Moving, Normal, Place, moves_of
from daskfactor.models.likelihood import Likelihood

NAMES = {"f": "float32", "d": "float64"}
"""Names of dtypes by their letters: NumPy puts a name together anew each time."""
VALUES = {np.dtype(kind).name: name for kind, name in TYPES.items()}
"""Types of numbers in C++, by the name of their dtype."""
CHUNK = 256
"""Rows that one thread adds up."""


@dataclass(frozen=True, eq=False)
class Source:
    """A text and the options that it is compiled with; equal to itself alone.

    There is one of each, and texts are long to hash.
    """

    text: str
    options: tuple[str, ...]


def _file(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def _defined(**macros: object) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in macros.items())


OVER_ENTRIES = """{{
  for (Size p = THREAD; p < rows * K; p += THREADS) {{
    const Size row = p / K, k = p % K;
    {body}
  }}
}}
"""
OVER_QUADS = """{{
  NOISE;
  const Size quads = (K + 3) / 4;
  for (Size q = THREAD; q < rows * quads; q += THREADS) {{
    const Size row = q / quads, quad = q % quads;
    REAL z[4];
    noise_of(z, quad, row, noise, coarse);
    for (Size k = 4 * quad; k < 4 * quad + 4 && k < K; ++k) {{
      const Size p = row * K + k;
      {body}
    }}
  }}
}}
"""


def _kernel(move: Move, entry: str) -> str:
    """Return the kernel of a move, whose function of numbers is ``entry`` in C++."""
    moving, normal, place = move.named(Moving), move.named(Normal), move.named(Place)
    parameters = ["Size rows", "Size K", *move.texts("cuda_parameters")]
    body = f"auto moved = {entry}({', '.join(move.texts('cuda_value'))});"
    for n, name in enumerate(moving):
        body += f" {name}[p] = {f'at<{n}>(moved)' if len(moving) > 1 else 'moved'};"
    if normal or place:
        parameters += ["NOISE_ARGUMENTS", *("int coarse" for _ in normal)]
    if place:
        body = f"{'' if normal else 'NOISE; '}Word stream[{variates.STREAM}]; {body}"
    loop = (OVER_QUADS if normal else OVER_ENTRIES).format(body=body)
    return f'extern "C" __global__ void {move.name}({", ".join(parameters)}) {loop}'


@lru_cache(maxsize=2)
def steps(dtype: str) -> Source:
    """Make kernels of bands: all moves and ``steps.cu``, without fused multiply-adds."""
    scalars = Translation()
    for function in (philox.rounds, philox.radius, philox.direction):
        scalars.add(function, function.__name__)
    moves = [*moves_of(langevin), *moves_of(squares)]
    kernels = [_kernel(move, scalars.add(move.entry)) for move in moves]
    texts = _file("prelude.h"), scalars.text, _file("steps.cu"), *kernels
    macros = _defined(REAL=VALUES[dtype], ROOT_HALF=ROOT_HALF.hex())
    return Source("\n".join(texts), (*macros, "-fmad=false"))


@lru_cache(maxsize=2)
def bands(dtype: str) -> Source:
    """Make kernels of blocks that know no law."""
    text = "\n".join((_file("prelude.h"), _file("blocks.cu")))
    return Source(text, _defined(REAL=VALUES[dtype], CHUNK=CHUNK, SEEN=langevin.SEEN))


@lru_cache(maxsize=64)
def blocks(
    likelihood: Likelihood, dtype: str, values: str | None, zeros: bool, weighed: bool, K: int
) -> Source:
    """Make kernels of the blocks of a law: dense ones with ``values`` of a dtype, or sparse ones.

    ``zeros`` says of a sparse block whether what it does not store are zeros, and ``weighed``
    whether cells have weights.
    """
    count = len(likelihood.numbers)
    scalars = Translation(count)
    rules = entry_rules(likelihood, zeros, weighed)
    step, ratio, fit = map(scalars.add, rules, rules._fields)
    weight = ", weight" if weighed else ""
    places = ", ".join(f"numbers[{n} + j * stride]" for n in range(count))
    glue = f"""
#define RULES
DEVICE auto law_of(double floor, const double *numbers, Size stride, Size j) {{
  return pack(floor, pack({places}));
}}
template <class L>
DEVICE Pack2<REAL, REAL> step_rule(REAL v, REAL mu, L law, REAL scale, REAL weight) {{
  auto pair = {step}(v, mu, law, scale{weight});
  return {{(REAL)at<0>(pair), (REAL)at<1>(pair)}};
}}
template <class L> DEVICE Pack2<REAL, REAL> ratio_rule(REAL v, REAL mu, L law, REAL weight) {{
  auto pair = {ratio}(v, mu, law{weight});
  return {{(REAL)at<0>(pair), (REAL)at<1>(pair)}};
}}
template <class L> DEVICE auto fit_rule(REAL v, REAL mu, L law, REAL weight) {{
  return {fit}(v, mu, law{weight});
}}
"""
    text = "\n".join((_file("prelude.h"), scalars.text, glue, _file("blocks.cu")))
    kind = {"SPARSE": 1} if values is None else {"DENSE": 1, "VALUE": VALUES[values]}
    macros = {"REAL": VALUES[dtype], "CHUNK": CHUNK, "SEEN": langevin.SEEN, "COMPONENTS": K}
    return Source(text, _defined(**(macros | kind)))


@lru_cache(maxsize=16)
def draws(dtype: str, values: str | None, zeros: bool) -> Source:
    """Make kernels that draw entries of blocks; arguments are those of `blocks`."""
    scalars = Translation()
    scalars.add(philox.rounds, "philox_rounds")
    scalars.add(subsample.place_among, "place_among")
    text = "\n".join((_file("prelude.h"), scalars.text, _file("draws.cu")))
    kind = {"ZEROS": int(zeros)} if values is None else {"DENSE": 1, "VALUE": VALUES[values]}
    return Source(text, (*_defined(REAL=VALUES[dtype], **kind), "-fmad=false"))


def is_value_type(dtype: np.dtype) -> bool:
    """Return True if kernels read dense data of a dtype; others are converted."""
    return dtype.name in VALUES
