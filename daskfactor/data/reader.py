"""A reader of blocks for a worker: keeps decoded blocks in a budget, tries again what fails."""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable

from daskfactor.data.grid import Block, Grid
from daskfactor.data.storage import BlockView, FloatType, SparseBlock
from daskfactor.errors import DataError, StoreError, StoreFormatError

View = BlockView | SparseBlock
Load = Callable[[Block], View]
Pause = Callable[[float], None]

ATTEMPTS = 3
FIRST_PAUSE = 0.1


class BlockReader:
    """Blocks of shared data, for any number of threads. Not to be pickled: pickle its handle.

    Decoded blocks are kept as long as ``budget`` bytes allow it. One that is kept
    gives way to another only if none of the last 2 B^2 reads was for it: a worker
    visits its blocks again and again in turn, and throwing out the oldest for the
    newest would then throw out every block just before its next turn.
    """

    def __init__(
        self,
        grid: Grid,
        dtype: FloatType,
        token: str,
        load: Load,
        release: Callable[[], None],
        budget: int,
        pause: Pause = time.sleep,
    ) -> None:
        self.grid = grid
        self.dtype = dtype
        self.token = token
        self._load = load
        self._release = weakref.finalize(self, release)
        self._budget = budget
        self._pause = pause
        self._kept: OrderedDict[Block, tuple[View, int]] = OrderedDict()
        self._last_use: dict[Block, int] = {}
        self._reads = 0
        self._lock = threading.Lock()

    def view(self, row: int, col: int) -> View:
        """Block (row, col), for reading; never write to it.

        Raises
        ------
        StoreError
            If it cannot be read, three times in a row.
        """
        block = Block(row, col)
        with self._lock:
            self._reads += 1
            self._last_use[block] = self._reads
            if block in self._kept:
                self._kept.move_to_end(block)
                return self._kept[block][0]
        view = self._read(block)
        self._keep(block, view)
        return view

    def close(self) -> None:
        """Give the memory back. Views that are in use stay valid."""
        with self._lock:
            self._kept.clear()
        self._release()

    def __reduce__(self) -> str:
        raise TypeError("a BlockReader cannot be pickled; pickle the DataHandle and open it there")

    def _read(self, block: Block) -> View:
        for attempt in range(ATTEMPTS):
            try:
                return self._load(block)
            except (DataError, StoreFormatError, MemoryError):
                raise
            except Exception as error:
                if attempt + 1 == ATTEMPTS:
                    raise StoreError(
                        f"block ({block.row}, {block.col}) could not be read in {ATTEMPTS} "
                        f"attempts: {error}"
                    ) from error
            self._pause(FIRST_PAUSE * 4**attempt)
        raise AssertionError("not reached")

    def _keep(self, block: Block, view: View) -> None:
        size = view_bytes(view)
        with self._lock:
            if block in self._kept or size > self._budget:
                return
            oldest_allowed = self._reads - 2 * self.grid.blocks**2
            while self._used() + size > self._budget:
                oldest = next(iter(self._kept))
                if self._last_use[oldest] > oldest_allowed:
                    return
                del self._kept[oldest]
            self._kept[block] = view, size

    def _used(self) -> int:
        return sum(size for _, size in self._kept.values())


def view_bytes(view: View) -> int:
    """Bytes that a view keeps in memory."""
    if isinstance(view, SparseBlock):
        return view.indptr.nbytes + view.indices.nbytes + view.values.nbytes
    return view.array.nbytes
