"""One BLAS thread while dask's own threads are at work."""

from threading import Lock
from types import TracebackType
from typing import Any, Final

from threadpoolctl import ThreadpoolController


class _OneBlasThread:
    """Context in which BLAS uses one thread.

    The many small products of a prediction already run on all of dask's threads;
    with BLAS threads on top they took ten times as long. The setting belongs to the
    process, so the first to enter makes it and the last to leave undoes it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._inside = 0
        self._limiter: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._limiter = ThreadpoolController().limit(limits=1, user_api="blas")
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._limiter.restore_original_limits()


ONE_BLAS_THREAD: Final = _OneBlasThread()
