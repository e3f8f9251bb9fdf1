"""A folder of things that tests compute once: kernels, libraries that g++ builds, posteriors.

It outlives sessions of pytest, and all processes share it: ``daskfactor/tests`` in the user's cache
folder, or where ``DASKFACTOR_TESTS_FOLDER`` points. A file's name is a digest of all that its
content follows from, and the file ends with a digest of its content: one that is damaged is as good
as missing. Files are unpickled and loaded, so the folder belongs to its user alone.
"""

import atexit
import os
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

FOLDER = "DASKFACTOR_TESTS_FOLDER"
KERNELS = "DASKFACTOR_JIT_CACHE"
DAY = 24 * 3600.0
UNUSED = 30 * DAY
DIGEST = 32


def set_up() -> None:
    """Name the folder, and that of the package's compiled kernels, to all processes to come."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = str(_of_user() or _of_session())
    Path(os.environ[FOLDER]).mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ.setdefault(KERNELS, str(Path(os.environ[FOLDER], "kernels")))


def _of_user() -> Path | None:
    """Return the user's folder; None where there is none that can be written."""
    with suppress(OSError, RuntimeError):  # a user without a home
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        base = base if base.is_absolute() else Path.home() / ".cache"
        folder = base / "daskfactor" / "tests"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return None


def _of_session() -> Path:
    """Return a folder that ends with this process."""
    made = TemporaryDirectory(prefix="daskfactor-tests-", ignore_cleanup_errors=True)
    atexit.register(made.cleanup)
    return Path(made.name)


def named(kind: str, *parts: str | bytes) -> Path:
    """Return the file for something of a kind that follows from ``parts``."""
    digest = sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "big") + content)
    set_up()  # scripts use this, too
    return Path(os.environ[FOLDER], kind, digest.hexdigest()[:32])


def is_whole(content: bytes) -> bool:
    return sha256(content[:-DIGEST]).digest() == content[-DIGEST:]


def read(file: Path) -> bytes | None:
    """Return the content of a file; None where there is no whole one."""
    with suppress(OSError):
        content = file.read_bytes()
        if is_whole(content):
            if time.time() - file.stat().st_mtime > DAY:
                os.utime(file)  # in use
            return content[:-DIGEST]
    return None


def write(file: Path, content: bytes) -> None:
    """Put a file into place at once: processes that do so together write the same."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    begun = file.with_suffix(f".{uuid4().hex}")
    begun.write_bytes(content + sha256(content).digest())
    begun.replace(file)


def kept(file: Path, make: Callable[[], bytes]) -> bytes:
    """Return the content of a file, which is made where there is no whole one."""
    content = read(file)
    if content is None:
        content = make()
        write(file, content)
    return content


def sweep(unused: float = UNUSED) -> None:
    """Remove files that nobody used for long; kernels also have a bound on what all take."""
    for file in Path(os.environ[FOLDER]).glob("*/*"):
        # Another session may sweep at the same time.
        with suppress(OSError):
            if file.is_file() and time.time() - file.stat().st_mtime > unused:
                file.unlink()
