"""Moves of entries: loops for processors and kernels for GPUs, made from functions of numbers.

A move is a function of numbers that returns what becomes of one entry of a factor. `entrywise`
makes the loop over all entries from it, compiled by numba;
:func:`daskfactor.kernels.cuda.source.steps` makes the kernel for GPUs. Both follow IEEE 754
exactly, so they give the same bits, however rows are split into bands.

The annotations of a move say what it takes, and its loop has one argument for each of these:

=========  =======================================================  ============================
           the move takes                                           the argument of the loop
=========  =======================================================  ============================
`Moving`   an entry that changes; the move returns its new value    (n, K), changed in place
`Entry`    an entry                                                 (n, K)
`Row`      the number of the entry's row                            (n, 1)
`Column`   a tuple of the four numbers of the entry's column        (4, K)
`Real`     a number in the dtype of the entries that change         a number
`Share`    the same                                                 a number; on GPUs also (n,)
`Double`   a number in double precision                             a number
=========  =======================================================  ============================

Random numbers come by address. A move that takes some has a loop with four more arguments at the
end, ``key, iteration, factor, row0`` (see :class:`daskfactor.kernels.philox.Address`):

=========  ====================================================================================
`Normal`   a standard normal number. The loop has one more argument, ``coarse``, by default
           False: True draws z = (z(2 iteration) + z(2 iteration + 1)) / sqrt 2.
`Stream`   room for a stream of numbers, not yet open
`Place`    the address of the entry's stream: all arguments of
           :func:`daskfactor.kernels.variates.start_entry` but the first
=========  ====================================================================================

Arrays are C-contiguous. All floats but those of `Entry` arrays have one dtype on processors; on
GPUs these have it, too.
"""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import numpy as np  # noqa: F401

# Loops name what they need of these.
from daskfactor.kernels.jit import inline, jit_exact, jit_exact_inner, stack_array
from daskfactor.kernels.philox import CHUNK, NUMBERS, Address, normal_chunk  # noqa: F401
from daskfactor.kernels.variates import STREAM  # noqa: F401

ROOT_HALF = 0.7071067811865476


class Role(NamedTuple):
    """Texts by which loops and kernels pass a parameter to a move; {0} is its name.

    Attributes
    ----------
    value
        The value in a loop.
    cuda_value
        The value in a kernel for GPUs.
    cuda_parameters
        Parameters of that kernel; empty if the loop has no argument for this.
    """

    value: str
    cuda_value: str
    cuda_parameters: str = ""


_COLUMN = "({0}[0, k], {0}[1, k], {0}[2, k], {0}[3, k])"
_CUDA_COLUMN = "pack({0}[k], {0}[K + k], {0}[2 * K + k], {0}[3 * K + k])"
_SHARE = Role("real({0})", "({0}_rows ? {0}_rows[row] : {0})", "REAL {0}, const REAL *{0}_rows")
# The key's words alone: a tuple with an array in it is counted anew for every entry.
_PLACE = "((key[0], key[1]), iteration, factor, row0 + i, k)"
_CUDA_PLACE = "pack((unsigned int *)noise.key, iteration, factor, row0 + row, (Word)k)"
Moving = Annotated[Any, Role("{0}{at}", "{0}[p]", "REAL *{0}")]
Entry = Annotated[Any, Role("real({0}{at})", "{0}[p]", "const REAL *{0}")]
Row = Annotated[Any, Role("{0}_of_row", "{0}[row]", "const REAL *{0}")]
Column = Annotated[Any, Role(_COLUMN, _CUDA_COLUMN, "const REAL *{0}")]
Real = Annotated[Any, Role("real({0})", "{0}", "REAL {0}")]
Share = Annotated[Any, _SHARE]
Double = Annotated[Any, Role("float({0})", "{0}", "double {0}")]
Normal = Annotated[Any, Role("z[p]", "z[k - 4 * quad]")]
Stream = Annotated[Any, Role("stream", "(Word *)stream")]
Place = Annotated[Any, Role(_PLACE, _CUDA_PLACE)]


class Move(NamedTuple):
    """A move of entries.

    Attributes
    ----------
    name
        Name of the loop, and of the kernel for GPUs.
    entry
        The function of numbers.
    kinds
        Its parameters and their annotations.
    """

    name: str
    entry: Callable[..., Any]
    kinds: dict[str, Any]

    @property
    def arguments(self) -> list[str]:
        """Names of the loop's arguments, but for the address of random numbers."""
        drawn = self.named(Normal, Stream, Place)
        return [name for name in self.kinds if name not in drawn]

    def named(self, *kinds: Any) -> list[str]:
        """Return the names of the parameters of some kinds."""
        return [name for name, kind in self.kinds.items() if kind in kinds]

    def texts(self, part: str, at: str = "") -> list[str]:
        """Return one of the texts of each parameter's `Role`, if it is not empty."""
        roles = {name: kind.__metadata__[0] for name, kind in self.kinds.items()}
        texts = (getattr(role, part).format(name, at=at) for name, role in roles.items())
        return [text for text in texts if text]


@jit_exact_inner
def noise_chunk(start: int, components: int, address: Address, coarse: bool, z: Any) -> int:
    """Fill ``z`` as `normal_chunk` does; the coarse chain sums the two fine chains' numbers.

    Source: Şimşekli et al. 2017, eq. 11.
    """
    if not coarse:
        return normal_chunk(start, components, address, z)
    key, iteration, factor, row0 = address
    second = stack_array(NUMBERS, z.dtype)
    normal_chunk(start, components, Address(key, 2 * iteration + 1, factor, row0), second)
    count = normal_chunk(start, components, Address(key, 2 * iteration, factor, row0), z)
    half = z.dtype.type(ROOT_HALF)
    for i in range(NUMBERS):
        z[i] = (z[i] + second[i]) * half
    return count


FLAT = """
        {flat}
        for p in range({first}.size):
            {call}
"""
"""A loop that knows neither rows nor columns: it vectorises best."""
GRID = """
        for i in range({first}.shape[0]):
            {rows}
            for k in range({first}.shape[1]):
                {call}
"""
NOISY = """
        K = {first}.shape[1]
        z = stack_array(NUMBERS, {moving}.dtype)
        {flat}
        begin = start = 0
        while begin < {first}.size:
            count = noise_chunk(start, K, Address(key, iteration, factor, row0), coarse, z)
            count = min(count, {first}.size - begin)
            {chunks}
            for p in range(count):
                {place}
                {call}
            begin += count
            start += CHUNK
"""
LOOP = """
def make(entry):
    def {name}({parameters}):
        real = {moving}.dtype.type
        {stream}
        {body}
    return {name}
"""


def _text(move: Move) -> str:
    """Return the Python of a loop."""
    moving, arrays, normal = move.named(Moving), move.named(Moving, Entry), move.named(Normal)
    place, rows = move.named(Place), move.named(Row)
    grid = not normal and (place or rows)
    at = "_chunk[p]" if normal else "[i, k]" if grid else "[p]"
    address = ["key", "iteration", "factor", "row0"] if normal or place else []
    changed, values = (f"{name}{at}" for name in moving), move.texts("value", at)
    parts = {
        "name": move.name,
        "parameters": ", ".join([*move.arguments, *address, *("coarse=False" for _ in normal)]),
        "first": arrays[0],
        "moving": moving[0],
        "stream": "stream = stack_array(STREAM, np.uint64)" if place else "",
        "flat": "; ".join(f"{name} = {name}.reshape({name}.size)" for name in arrays),
        "chunks": "; ".join(f"{name}_chunk = {name}[begin : begin + count]" for name in arrays),
        "rows": "; ".join(f"{name}_of_row = {name}[i, 0]" for name in rows),
        "place": "i, k = (begin + p) // K, (begin + p) % K" if place else "",
        "call": f"{', '.join(changed)} = entry({', '.join(values)})",
    }
    body = NOISY if normal else GRID if grid else FLAT
    return LOOP.format(body=body.format(**parts), **parts)


def entrywise(function: Callable[..., Any]) -> Any:
    """Make the loop of a move, whose annotations say what it takes (see the module).

    The loop is compiled by numba and has the attribute ``move``.
    """
    parameters = inspect.signature(function).parameters.items()
    kinds = {name: parameter.annotation for name, parameter in parameters}
    move = Move(function.__name__, inline(function), kinds)
    scope: dict[str, Any] = {}
    exec(compile(_text(move), f"<loop of {move.name}>", "exec"), globals(), scope)
    loop = scope["make"](move.entry)
    loop.__doc__ = function.__doc__
    loop = jit_exact(loop)
    loop.move = move
    return loop


def moves_of(module: ModuleType) -> list[Move]:
    """Return the moves that a module defines."""
    return [value.move for value in vars(module).values() if hasattr(value, "move")]
