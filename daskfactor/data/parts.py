"""Parts: sets of blocks that share no row band and no column band.

Şimşekli et al. 2017, definition 1; Şimşekli et al. 2015, definition 2. A part
is told by one number, its diagonal ``p``: it holds the blocks
``(b, (b + p) mod B)``. The B diagonals visit every block exactly once.
"""

from daskfactor.data.bands import Block
from daskfactor.errors import GridError


def diagonal(part: int, blocks: int) -> tuple[Block, ...]:
    """The blocks of diagonal ``part`` of a ``blocks`` x ``blocks`` grid."""
    if not 0 <= part < blocks:
        raise GridError(f"a grid of {blocks} x {blocks} blocks has no part {part}")
    return tuple(Block(row, (row + part) % blocks) for row in range(blocks))


def nested(outer: int, inner: int, groups: int, blocks: int) -> tuple[Block, ...]:
    """Diagonal ``inner`` inside every super-block on diagonal ``outer``.

    The B = groups * m bands are taken as ``groups`` super-bands of m bands. All
    m parts of one outer diagonal touch the same super-blocks, so that one task
    can do m * m block updates before a super-band has to move.
    """
    if groups < 1 or blocks % groups:
        raise GridError(f"{blocks} bands cannot be grouped into {groups} super-bands of equal size")
    size = blocks // groups
    return tuple(
        Block(upper * size + row, ((upper + outer) % groups) * size + (row + inner) % size)
        for upper in range(groups)
        for row in range(size)
    )
