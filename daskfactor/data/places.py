"""Where data lie: what is a URL, what may be told of it, how it is reached, how long one waits.

All that reads or writes at a path or URL asks here. A URL is one that fsspec knows; credentials
come from the environment, as fsspec and its file systems take them, or as ``storage_options``.
What a network does is tried again for `patience` seconds; what will not change is not.
"""

import errno
import io
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, TypeVar

from daskfactor.errors import DaskfactorError, DataError, OptionError, StoreError
from daskfactor.results.cloud import PATIENCE, patience, without_secrets

T = TypeVar("T")

ATTEMPT: Final = 60.0
"""Seconds that one request may take."""
LONGEST_PAUSE: Final = 5.0
REMOTE_BUFFER: Final = 2**22
OWN_USERS: Final = ("abfs", "abfss", "adl", "az", "git", "github", "wasb", "wasbs")
"""Schemes in which what stands before an @ is a part of the place."""
DRIVERS: Final = {
    "s3": "daskfactor[cloud]",
    "s3a": "daskfactor[cloud]",
    "http": "aiohttp",
    "https": "aiohttp",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
}
"""What is installed for a scheme."""
LASTING: Final = (
    *(FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError),
    *(ValueError, TypeError, LookupError, ImportError, NotImplementedError, MemoryError),
    DaskfactorError,
)
"""Errors that trying again does not mend."""
SOON_OVER: Final = (408, 425, 429)
"""Answers of a server to a request that it may grant later, although they count as refusals."""


class Place(str):
    """A URL as results, logs and errors may have it; how it is reached only `reached` tells.

    As a text it has neither password nor signature. ``storage_options`` go with it, also when it
    is pickled for a worker, and are never shown.
    """

    __slots__ = ("_options", "_url")

    _url: str
    _options: dict[str, Any]

    def __new__(cls, url: str, options: Mapping[str, Any] | None = None) -> "Place":
        """Hide what is secret in a URL."""
        made = super().__new__(cls, _bare(url))
        made._url, made._options = url, dict(options or {})
        return made

    def __reduce__(self) -> Any:
        return Place, (self._url, self._options)

    def inside(self, name: str) -> "Place":
        """What has a name in a folder that is here."""
        head, mark, tail = self._url.partition("?")
        return Place(f"{head.rstrip('/')}/{name}{mark}{tail}", self._options)


def is_url(place: object) -> bool:
    """Whether a location is a URL rather than a path of this machine."""
    text = str(place)
    return "://" in text and not text.startswith("file://")


def placed(data: Any, options: Mapping[str, Any] | None = None) -> Any:
    """What the caller passed, a URL as a `Place` with its options.

    Raises
    ------
    OptionError
        If there are options and no URL.
    """
    return all_placed([data], options)[0]


def all_placed(given: Sequence[Any], options: Mapping[str, Any] | None = None) -> list[Any]:
    """The same of several things, one of which at least is at a URL if there are options."""
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(
            f"storage_options must be a dict, as fsspec takes it, got {type(options).__name__}"
        )
    urls = [isinstance(one, str | PathLike) and is_url(fspath(one)) for one in given]
    if options and not any(urls):
        path = isinstance(given[0], str | PathLike)
        what = "a path of this machine" if path else f"a {type(given[0]).__name__}"
        raise OptionError(f"storage_options are for URLs, not for {what}; leave them out")
    return [
        Place(reached(fspath(one))[0], options or reached(one)[1]) if url else one
        for one, url in zip(given, urls, strict=True)
    ]


def absolute(location: str) -> str:
    """A local path made absolute; a URL as a `Place`, but file:// as a path."""
    if is_url(location):
        return location if isinstance(location, Place) else Place(location)
    return str(Path(location.removeprefix("file://")).expanduser().absolute())


def reached(location: str) -> tuple[str, dict[str, Any]]:
    """The whole URL of a location and the options with which fsspec opens it."""
    if isinstance(location, Place):
        return location._url, dict(location._options)
    return str(location), {}


def file_system(location: str) -> tuple[Any, str]:
    """The file system of a location, and the path in it."""
    from fsspec.core import url_to_fs

    url, options = reached(location)
    with reaching(location):
        system, path = url_to_fs(url, **options)
    return system, path


def opened(location: str) -> Any:
    """What a reader takes: a local path as it is, anything else as an open file."""
    return binary(location) if is_url(location) else location


def binary(location: str | PathLike[str]) -> Any:
    """A file open for reading, local or not, as its bytes are."""
    location = fspath(location)
    if not is_url(location):
        return open(location.removeprefix("file://"), "rb")  # noqa: PTH123
    system, path = file_system(location)
    return io.BufferedReader(_Remote(location, system, path), REMOTE_BUFFER)


def holds(location: str) -> str | None:
    """Whether there is a ``"file"`` or a ``"folder"`` at a location."""
    if not is_url(location):
        here = Path(location)
        return "folder" if here.is_dir() else "file" if here.exists() else None
    system, path = file_system(location)

    def look() -> str | None:
        if not system.exists(path):
            return None
        return "folder" if system.isdir(path) else "file"

    with reaching(location):
        return persistently(look, location)


class _Remote(io.RawIOBase):
    """A file that fsspec opens, whose reads are tried again."""

    _file: Any = None  # one that could not be opened is closed, too

    def __init__(self, location: str, system: Any, path: str) -> None:
        self._location = location
        with reaching(location):
            self._file = persistently(
                lambda: system.open(path, "rb", block_size=REMOTE_BUFFER), location
            )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)
        with reaching(self._location):
            found = persistently(lambda: self._file.read(len(wanted)), self._location)
        wanted[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()


def persistently(attempt: Callable[[], T], location: str) -> T:
    """What ``attempt`` gives, tried again while the network or the server may recover.

    Raises
    ------
    StoreError
        After `patience` seconds without success, its ``errno`` being ETIMEDOUT.
    """
    pauses = _pauses(location)
    while True:
        try:
            return attempt()
        except Exception as error:  # noqa: BLE001 - raised again, now or when time is up
            time.sleep(pauses(error))


async def patiently(attempt: Callable[[], Awaitable[T]], location: str) -> T:
    """The same for a coroutine, each attempt ended after a minute."""
    import asyncio

    pauses = _pauses(location)
    while True:
        try:
            return await asyncio.wait_for(attempt(), min(ATTEMPT, patience()))
        except Exception as error:  # noqa: BLE001 - raised again, now or when time is up
            await asyncio.sleep(pauses(error))


def _pauses(location: str) -> Callable[[Exception], float]:
    """Gives the pause after an error, or raises it if it will stay or time is up."""
    begun, limit, pause = time.monotonic(), patience(), 0.05

    def after(error: Exception) -> float:
        nonlocal pause
        if not is_url(location) or _lasting(error):
            raise error
        pause = min(2 * pause, LONGEST_PAUSE)
        if time.monotonic() - begun + pause > limit:
            failed = StoreError(
                f"{location} has not answered for {limit:.0f} seconds ({why(error, location)}); "
                f"see that its server can be reached and begin again, or set {PATIENCE} to more "
                "seconds"
            )
            failed.errno = errno.ETIMEDOUT
            raise failed from shown(error, location)
        return pause * random.uniform(0.5, 1)

    return after


def _lasting(error: Exception) -> bool:
    """Whether an error would be the same at the next attempt."""
    if isinstance(error, LASTING) or getattr(error, "errno", None) == errno.EINVAL:
        return True  # S3 calls a request with credentials that have expired a bad one
    library = type(error).__module__.partition(".")[0]
    if library == "botocore":
        kinds = {kind.__name__ for kind in type(error).__mro__}
        return not kinds & {"HTTPClientError", "ConnectionError"}
    if type(error).__module__.startswith("google.auth"):
        return True
    found = (getattr(error, name, None) for name in ("status", "code", "status_code"))
    status = next((one for one in found if isinstance(one, int)), 0)
    return 400 <= status < 500 and status not in SOON_OVER


@contextmanager
def reaching(location: str) -> Iterator[None]:
    """Trouble on the way to a URL as one sentence; errors of local files stay what they are.

    Raises
    ------
    DataError
        If nothing is there, or there is no such scheme.
    OptionError
        If a library is not installed, or does not take the options.
    StoreError
        If it cannot be read.
    """
    try:
        yield
    except DaskfactorError:
        raise
    except Exception as error:
        if not is_url(location):
            raise
        raise unreachable(location, error) from shown(error, location)


def unreachable(location: str, error: Exception) -> DaskfactorError:
    """The sentence for an error on the way to a URL."""
    scheme, reason = location.partition("://")[0].rpartition("::")[2], why(error, location)
    if isinstance(error, FileNotFoundError):
        return DataError(f"there is nothing at {location}; check the URL")
    if isinstance(error, ImportError):
        driver = DRIVERS.get(scheme)
        get = f"run  pip install '{driver}'" if driver else "install what it names"
        return OptionError(f"{scheme}:// is read with a library that is missing ({reason}): {get}")
    if isinstance(error, ValueError) and "not known" in str(error):
        return DataError(f"{scheme}:// is no kind of URL that fsspec knows; check {location}")
    if isinstance(error, TypeError) and reached(location)[1]:
        return OptionError(f"storage_options do not suit {location} ({reason}); correct them")
    named = type(error).__name__ + str(error)
    signs = "redential", "403", "Bad Request"
    refused = isinstance(error, PermissionError) or any(sign in named for sign in signs)
    advice = (
        "give credentials that may do so and have not expired, in the environment or as "
        "storage_options"
        if refused
        else "see that it can be reached, and begin again"
    )
    return StoreError(f"{location} cannot be read ({reason}); {advice}")


def why(error: BaseException, location: str = "") -> str:
    """What an error says, in one line, without anything that must not be told."""
    text = without_secrets(" ".join(str(error).split()))
    for secret in _secrets(location):
        text = text.replace(secret, "***")
    text = text[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(error: BaseException, location: str) -> BaseException | None:
    """An error as the cause of another one, unless its text has something secret."""
    chain: BaseException | None = error
    secrets = _secrets(location)
    while chain is not None:
        text = str(chain)
        if without_secrets(text) != text or any(secret in text for secret in secrets):
            return None
        chain = chain.__cause__ or chain.__context__
    return error


def _secrets(location: str) -> list[str]:
    """Texts that belong to a location and must not be told."""
    url, options = reached(location)
    found = [url[at:] for at in (url.find("?") + 1,) if at and _bare(url) != url]
    found += [
        user.rstrip("@") for user in re.findall(r"(?<=://)[^/@]*@", url) if user not in location
    ]
    waiting: list[Any] = [options]
    while waiting:
        one = waiting.pop()
        waiting += one.values() if isinstance(one, Mapping) else ()
        waiting += one if isinstance(one, list | tuple) else ()
        # The address of a server is no secret, and of use in a message.
        if isinstance(one, str) and len(one) > 3 and "://" not in one and one not in location:
            found.append(one)
    return sorted(found, key=len, reverse=True)


def _bare(url: str) -> str:
    """A URL without name and password of a user, and without what follows a question mark."""

    def without_user(match: re.Match[str]) -> str:
        return match[0] if match[1] in OWN_USERS else f"{match[1]}://"

    url = re.sub(r"(\w+)://[^/@]*@", without_user, url)
    return url.partition("?")[0] if "http" in url else url
