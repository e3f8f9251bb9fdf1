"""One workspace per thread, for tasks that run in threads that are not ours."""

import threading

from daskfactor.kernels.workspace import Workspace

_local = threading.local()


def local_workspace() -> Workspace:
    """The calling thread's own workspace."""
    if not hasattr(_local, "workspace"):
        _local.workspace = Workspace()
    workspace: Workspace = _local.workspace
    return workspace
