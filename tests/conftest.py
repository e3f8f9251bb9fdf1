import atexit
import os
from tempfile import TemporaryDirectory

from hypothesis import settings

# Derandomized in CI: a run there fails because of a change, never because of luck.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# What processes of a session keep for each other, such as exact posteriors.
if "DASKFACTOR_TESTS_FOLDER" not in os.environ:
    kept = TemporaryDirectory(prefix="daskfactor-tests-", ignore_cleanup_errors=True)
    atexit.register(kept.cleanup)
    os.environ["DASKFACTOR_TESTS_FOLDER"] = kept.name

# Every kernel is compiled once for all processes of a session, workers and those that tests
# start: compiling it in each of them takes longer than all that is tested.
os.environ.setdefault("DASKFACTOR_JIT_CACHE", "1")
if "NUMBA_CACHE_DIR" not in os.environ:
    compiled = TemporaryDirectory(prefix="daskfactor-kernels-", ignore_cleanup_errors=True)
    atexit.register(compiled.cleanup)
    os.environ["NUMBA_CACHE_DIR"] = compiled.name
