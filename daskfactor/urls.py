"""Parse, redact and open URLs; retry policy.

All code that reads or writes at a path or URL uses this module. A URL is one that fsspec supports.
Credentials come from the environment, as fsspec, its file systems and Icechunk read them, or from
``storage_options``. Network failures are retried for `patience` seconds; permanent errors are not.
Secrets are removed from messages of servers before they are shown. Libraries that are slow to
import are imported only when they are needed.
"""

import errno
import io
import logging
import math
import os
import random
import re
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import Any, Final, NamedTuple, TypeVar

from daskfactor.errors import DaskfactorError, DataError, OptionError, StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE: Final = "DASKFACTOR_STORE_PATIENCE"
"""Environment variable: seconds to retry requests to a server that fails."""
DEFAULT_PATIENCE: Final = 300.0
FIRST_PATIENCE: Final = 15.0
"""Seconds to retry a server that has never answered in this process: its name may be wrong."""
ATTEMPT_TIMEOUT: Final = 60.0
"""Seconds after which an attempt without an answer is cancelled and repeated."""
FIRST_WARNING: Final = 5.0
"""Seconds without an answer before the first warning."""
WARNING_INTERVAL: Final = 60.0
_responding_servers: Final = set[str]()
"""Servers that have answered a request of this process."""
MAX_PAUSE: Final = 5.0
REMOTE_BUFFER: Final = 2**22
MAX_PATH_TEXT: Final = 100
"""Characters of a path that is too long, in its message."""
CLOUD: Final = ("s3", "gs", "gcs", "az", "abfs", "abfss", "memory")
"""Schemes of the URLs that a run can be written to."""
CONTAINER_SCHEMES: Final = ("abfs", "abfss", "adl", "az", "git", "github", "wasb", "wasbs")
"""Schemes in which the text before an @ names a container, not a user."""
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
"""Package to install for each scheme."""


# -- parse and open --------------------------------------------------------------------------


PACKINGS: Final = (".gz", ".bz2", ".xz", ".zip", ".zst", ".lz4")
"""Endings of compressed files that are read; an archive must hold a single file."""


def is_url(place: object) -> bool:
    """Check whether a location is a URL, not a local path."""
    text = str(place)
    return "://" in text and not text.startswith("file://")


class Location(str):
    """Absolute path or URL whose text is safe to show in results, logs and errors.

    The text has neither password nor signature. The full URL and its ``storage_options`` are kept
    when it is pickled for a worker and are never shown. What is found at a location is kept with
    it, so that servers are asked once.

    Parameters
    ----------
    place
        Path or URL; file:// becomes a path.
    options
        Options of fsspec for a URL.

    Raises
    ------
    StoreError
        If it cannot be a path, or is a URL that was converted to a `pathlib.Path`, which drops a
        slash.
    OptionError
        If there are options but no URL.
    """

    __slots__ = ("idle_files", "options", "place", "url")

    url: str
    options: dict[str, Any]
    idle_files: list[Any]
    place: Any
    """Content that `daskfactor.data.places.find_place` has found; None before."""

    def __new__(
        cls, place: str | PathLike[str], options: Mapping[str, Any] | None = None
    ) -> "Location":
        """Remove secrets from the text of a URL; make a path absolute."""
        url = place.url if isinstance(place, Location) else fspath(place)
        if options is None and isinstance(place, Location):
            options = place.options
        check_options(options, [place])
        if not is_url(url):
            if url.partition(":/")[0] in (*CLOUD, "http", "https"):
                raise StoreError(f"pass a URL as text, got the path {url}: a Path removes a slash")
            url = _absolute(url.removeprefix("file://"))
        location = super().__new__(cls, _without_credentials(url) if is_url(url) else url)
        location.url, location.options = url, dict(options or {})
        location.idle_files, location.place = [], None
        return location

    @classmethod
    def of(cls, place: str | PathLike[str], options: Mapping[str, Any] | None = None) -> "Location":
        """Return a location itself, with what is known of it; of other texts, their location."""
        return place if isinstance(place, Location) and not options else cls(place, options)

    def __reduce__(self) -> Any:
        return Location, (self.url, self.options)

    @property
    def is_url(self) -> bool:
        """Return whether it is a URL, not a local path."""
        return is_url(self)

    @property
    def scheme(self) -> str:
        """Return the scheme of a URL; the empty text for a path."""
        return self.partition("://")[0] if self.is_url else ""

    @property
    def suffix(self) -> str:
        """Return the ending of the file name, in lower case and without that of a compression."""
        name = self.lower().rstrip("/")
        for ending in PACKINGS:
            name = name.removesuffix(ending)
        return PurePosixPath(name).suffix

    def divide(self) -> "tuple[Location, str | None]":
        """Split ``file:name`` into a file and a name; a file with a colon in its name has priority.

        A URL is split only behind a file ending, because ports have colons, too.
        """
        head, _, name = self.rpartition(":")
        if self.is_url:
            if "/" in name or not PurePosixPath(head).suffix or head.count("/") < 3:
                return self, None
            return self.sibling(self.url.rpartition(":")[0]), name
        # Of x/y:z/w.csv the head is neither a file nor named like one.
        in_folder = "/" in name and not PurePosixPath(head).suffix and not Path(head).exists()
        if not head or in_folder or Path(self).exists():
            return self, None
        return Location(head), name

    def sibling(self, text: str) -> "Location":
        """Return another location with the same ``storage_options``."""
        return Location(text, self.options if is_url(text) else None)

    def child(self, name: str) -> "Location":
        """Return the location of a file in a folder."""
        head, mark, tail = self.url.partition("?" if self.is_url else "\0")
        return self.sibling(f"{head.rstrip('/')}/{name}{mark}{tail}")

    def file_system(self) -> tuple[Any, str]:
        """Return the fsspec file system, and the path in it."""
        from fsspec.core import url_to_fs

        with url_errors(self):
            system, path = url_to_fs(self.url, **self.options)
        return system, path

    def open(self) -> Any:
        """Open a local or remote file to read its bytes."""
        if not self.is_url:
            return open(self, "rb")  # noqa: PTH123
        return io.BufferedReader(_Remote(self), REMOTE_BUFFER)

    def path_or_file(self) -> Any:
        """Return the input of a reader: a local path unchanged, a URL as an open file."""
        return self.open() if self.is_url else str(self)


def _absolute(path: str) -> str:
    """Return the absolute path; refuse a text that cannot be one."""
    if not path:
        raise StoreError("an empty text was passed as a path; pass a path or URL")
    try:
        absolute = str(Path(path).expanduser().absolute())
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.lstat(absolute)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        reason = (error.strerror if isinstance(error, OSError) else str(error)) or ""
        text = path if len(path) <= MAX_PATH_TEXT else f"{path[:MAX_PATH_TEXT]}..."
        raise StoreError(
            f"{text!r} cannot be a path ({reason.rstrip('.').lower()}); pass another one"
        ) from error
    return absolute


def check_options(options: Any, places: Sequence[Any]) -> None:
    """Refuse ``storage_options`` that are no dict, or where nothing is a URL."""
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(
            f"storage_options must be a dict, as fsspec takes it, got {type(options).__name__}"
        )
    if options and not any(
        isinstance(place, str | PathLike) and is_url(fspath(place)) for place in places
    ):
        path = isinstance(places[0], str | PathLike)
        what = "a path of this machine" if path else f"a {type(places[0]).__name__}"
        raise OptionError(f"storage_options are for URLs, not for {what}; leave them out")


def locate(data: Any, options: Mapping[str, Any] | None = None) -> Any:
    """Return a path or URL as a new `Location`, a URL with its options; other data unchanged."""
    if not isinstance(data, str | PathLike):
        return data
    return Location(data, options if is_url(fspath(data)) and options else None)


def public_location(path: str | PathLike[str]) -> Location:
    """Return an absolute location that is safe to store: without credentials and query.

    Raises
    ------
    StoreError
        If it is a URL with credentials or a query.
    """
    location = Location(path)
    if not location.is_url:
        return location
    url = location.url.rstrip("/")
    if "?" in url or (location.scheme in CLOUD and url != _without_credentials(url)):
        safe = _without_credentials(url).partition("?")[0]
        raise StoreError(
            f"a URL with credentials or with a query was passed ({safe}); "
            "leave them out: they are taken from the environment and are written nowhere"
        )
    return Location(url)


class _Remote(io.RawIOBase):
    """A file opened by fsspec whose reads are retried.

    The file of fsspec stays with its location, to be opened again without asking for its size. Of
    several one stays; the others, and one whose read has failed, are closed.
    """

    _file: Any = None  # `close` runs even if opening has failed
    _is_reusable = True

    def __init__(self, location: Location) -> None:
        self._location = location
        try:
            self._file = location.idle_files.pop()
            self._file.seek(0)
        except IndexError:
            system, path = location.file_system()
            self._file = retry(lambda: system.open(path, "rb", block_size=REMOTE_BUFFER), location)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer)
        try:
            data = retry(lambda: self._file.read(len(target)), self._location)
        except BaseException:
            self._is_reusable = False
            raise
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            idle_files = self._location.idle_files
            if self._is_reusable and not idle_files and self._file.seekable():
                idle_files.append(self._file)
            else:
                self._file.close()
        super().close()


# -- retry -----------------------------------------------------------------------------------


def patience() -> float:
    """Return the seconds to retry a server, from the environment variable `PATIENCE`."""
    text = os.environ.get(PATIENCE, "")
    try:
        seconds = float(text or DEFAULT_PATIENCE)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise OptionError(f"{PATIENCE} must be a number of seconds, got {text!r}")
    return seconds


def retry(attempt: Callable[[], T], location: str) -> T:
    """Return the result of ``attempt``, retried while the network or the server may recover.

    Raises
    ------
    DaskfactorError
        At a URL, see `unreachable_error`: after `patience` seconds, or at once if the error is
        permanent.
    """
    timer = _RetryTimer(location)
    while True:
        try:
            result = (
                attempt()
                if timer.is_responding
                else _run_with_timeout(attempt, timer.seconds_left())
            )
        except Exception as error:  # noqa: BLE001 - raised again, now or when time is up
            time.sleep(timer.pause(error))
        else:
            timer.mark_responding()
            return result


def _run_with_timeout(attempt: Callable[[], T], seconds: float) -> T:
    """Return the result of ``attempt``; raise TimeoutError if it takes too long.

    Libraries may wait minutes for a connection. Its thread is abandoned then, not stopped.
    """
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(attempt())
        except BaseException as error:  # noqa: BLE001 - raised by the caller's thread
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result.result(max(seconds, 1.0))


async def retry_async(attempt: Callable[[], Awaitable[T]], location: str) -> T:
    """Retry a coroutine as `retry` does; cancel each attempt after a minute."""
    import asyncio

    timer = _RetryTimer(location)
    while True:
        task = asyncio.ensure_future(attempt())
        limit = min(ATTEMPT_TIMEOUT, max(timer.seconds_left(), 1.0))
        first_wait = min(FIRST_WARNING, limit)
        try:
            done, _ = await asyncio.wait({task}, timeout=first_wait)
            if not done:
                timer.warn("no answer yet")
            result = await asyncio.wait_for(task, limit - first_wait)
            timer.mark_responding()
            return result
        except Exception as error:  # noqa: BLE001 - raised again, now or when time is up
            await asyncio.sleep(timer.pause(error))
        finally:
            task.cancel()


def _in_worker() -> bool:
    """Check whether this runs in a Dask worker, whose client has reached the server before."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return False
    try:
        return distributed.get_worker() is not None
    except ValueError:  # a thread started by a worker, or a client with workers in its process
        working = any(
            worker.status.name == "running" for worker in list(distributed.Worker._instances)
        )
        return working and not list(distributed.Client._instances)


class _RetryTimer:
    """Times the attempts at one location and keeps its last error."""

    def __init__(self, location: str) -> None:
        self._location, self._started, self._limit = location, time.monotonic(), patience()
        self._server = "/".join(location.split("/")[:3])
        self.is_responding = (
            not is_url(location) or self._server in _responding_servers or _in_worker()
        )
        if not self.is_responding and not os.environ.get(PATIENCE):
            self._limit = FIRST_PATIENCE
        self._pause, self._last_warning = 0.05, -math.inf
        self._last_error: Exception = TimeoutError()

    def mark_responding(self) -> None:
        """Record that the server responds, so that it is retried for the full `patience`."""
        if not self.is_responding:
            _responding_servers.add(self._server)
            self.is_responding, self._limit = True, patience()

    def seconds_left(self) -> float:
        """Return the seconds left for retries."""
        return self._started + self._limit - time.monotonic()

    def warn(self, reason: str) -> None:
        """Log a warning that it takes long, at most once a minute."""
        if time.monotonic() - self._last_warning < WARNING_INTERVAL:
            return
        self._last_warning = time.monotonic()
        logger.warning(
            "%s: %s; waiting up to %.0f seconds more", self._location, reason, self.seconds_left()
        )

    def pause(self, error: Exception) -> float:
        """Return the seconds until the next attempt, or raise the error."""
        if not is_url(self._location) or isinstance(error, DaskfactorError):
            raise error
        if not isinstance(error, TimeoutError):  # an answer says more than a timeout
            self._last_error = error
        if any(_server_answer(error)):
            self.mark_responding()
        diagnosis = classify_error(error, self._location)
        self._pause = min(2 * self._pause, MAX_PAUSE)
        if diagnosis.is_permanent or self.seconds_left() < self._pause:
            waited = None if diagnosis.is_permanent else time.monotonic() - self._started
            raise unreachable_error(self._location, self._last_error, waited) from safe_cause(
                self._last_error, self._location
            )
        self.warn(diagnosis.reason)
        return self._pause * random.uniform(0.5, 1)


# -- errors ----------------------------------------------------------------------------------


class Diagnosis(NamedTuple):
    """The reason why a location cannot be used, and the remedy.

    ``is_permanent``: retrying does not help.
    """

    reason: str
    remedy: str
    is_permanent: bool = True


_DIAGNOSES: Final = {
    "NoSuchBucket|ContainerNotFound|bucket does not exist":
        Diagnosis("there is no such bucket", "create it or check the URL"),
    "(?s)IcechunkError.*(NoSuchKey|BlobNotFound|Object at location|os error 2)":
        Diagnosis("this was of an earlier commit, which has expired", "open the run again"),
    "Expired|TokenRefreshRequired": Diagnosis("the credentials have expired", "renew them"),
    "no providers in chain provided credentials|CredentialsNotLoaded|NoCredentials"
    "|loading credentials|credentials provider was not enabled":
        Diagnosis(
            "there are no credentials in the environment",
            "set them, or pass storage_options if it is data",
        ),
    "AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|Forbidden|Bad Request"
    "|Unauthorized|AuthenticationFailed|AuthorizationFailure|PermissionError|edentialsError":
        Diagnosis(
            "the credentials are refused",
            "check that they may do this and have not expired",
        ),
}  # fmt: skip
"""Diagnoses of problems that the user can fix, by patterns in the errors of all libraries."""
_CHECK_CONNECTION: Final = "see that it can be reached"
_NO_ANSWER: Final = re.compile("dispatch failure|Connect|Timeout|timed out")
_PERMANENT_ERRORS: Final = (
    *(FileNotFoundError, IsADirectoryError, NotADirectoryError, MemoryError),
    *(ValueError, TypeError, LookupError, ImportError, NotImplementedError),
)
"""Errors that are not retried."""
_TEMPORARY_STATUSES: Final = (408, 425, 429)
"""Status codes of the 400s that are worth a retry."""


def classify_error(error: BaseException, location: str = "") -> Diagnosis:
    """Return the diagnosis of an error; its ``reason`` contains no secrets."""
    status, code = _server_answer(error)
    text = f"{type(error).__name__} {code} {error}".replace(location.partition("://")[2], "")
    for pattern, diagnosis in _DIAGNOSES.items():
        if re.search(pattern, text):
            return diagnosis
    message, library = _redacted_message(error, location), type(error).__module__
    if status or code:
        answer = " ".join(filter(None, (str(status or ""), code)))
        refused = 400 <= status < 500 and status not in _TEMPORARY_STATUSES
        return Diagnosis(f"it answers {answer}", "check the state of the server", refused)
    is_permanent = (
        isinstance(error, _PERMANENT_ERRORS) or getattr(error, "errno", None) == errno.EINVAL
    )
    if library.startswith("botocore."):
        kinds = {kind.__name__ for kind in type(error).__mro__}
        is_permanent = not kinds & {"HTTPClientError", "ConnectionError"}
    is_permanent |= library.startswith("google.auth")
    if isinstance(error, TimeoutError) and not str(error):  # libraries ask again by themselves
        return Diagnosis("it does not answer, or with errors only", _CHECK_CONNECTION, False)
    if not is_permanent and _NO_ANSWER.search(text):
        return Diagnosis(f"it does not answer ({message})", _CHECK_CONNECTION, False)
    return Diagnosis(f"it says: {message}", "see what it reports", is_permanent)


def _server_answer(error: BaseException) -> tuple[int, str]:
    """Return the status and the error code of a server's answer; 0 and "" if unknown."""
    cause: BaseException | None = error
    while cause is not None:
        response = getattr(cause, "response", None)
        if isinstance(response, dict) and "Error" in response:  # botocore
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(response["Error"].get("Code", ""))
            return int(status), "" if code == str(status) else code
        for name in ("status", "code", "status_code"):
            if isinstance(status := getattr(cause, name, None), int):
                return status, ""
        cause = cause.__cause__ or cause.__context__
    match = re.search(r'\bcode: "(\w+)"|<Code>(\w+)</Code>', str(error))
    return 0, "" if match is None else match[1] or match[2]


@contextmanager
def url_errors(location: str) -> Iterator[None]:
    """Turn errors at a URL into one sentence; errors of local files pass unchanged.

    Raises
    ------
    DaskfactorError
        At a URL, see `unreachable_error`.
    """
    try:
        yield
    except DaskfactorError:
        raise
    except Exception as error:
        if not is_url(location):
            raise
        raise unreachable_error(location, error) from safe_cause(error, location)


def _clear_credentials(scheme: str) -> None:
    """Clear cached file systems, so that the next attempt reads credentials anew."""
    registry = sys.modules.get("fsspec.registry")
    if registry is not None and scheme in registry.registry:
        registry.registry[scheme].clear_instance_cache()


def unreachable_error(
    location: str, error: Exception, waited: float | None = None
) -> DaskfactorError:
    """Return the exception to raise for an error at a URL.

    A DataError if nothing exists there or the scheme is unknown; an OptionError if a library is
    missing or rejects the options; otherwise a StoreError. Its ``errno`` is ETIMEDOUT after
    ``waited`` seconds of retries, EIO if the error is permanent.
    """
    scheme, reason = location.partition("://")[0], error_summary(error, location)
    scheme = scheme.rpartition("::")[2]
    if isinstance(error, FileNotFoundError):
        return DataError(f"there is nothing at {location}; check the URL")
    if isinstance(error, ImportError):
        driver = DRIVERS.get(scheme)
        install = f"run  pip install '{driver}'" if driver else "install what it names"
        return OptionError(
            f"{scheme}:// needs a library that is not installed ({reason}): {install}"
        )
    if isinstance(error, ValueError) and "not known" in str(error):
        return DataError(f"{scheme}:// is no kind of URL that fsspec knows; check {location}")
    if isinstance(error, TypeError) and getattr(location, "options", None):
        return OptionError(f"storage_options do not suit {location} ({reason}); correct them")
    problem, remedy, _ = classify_error(error, location)
    _clear_credentials(scheme)
    since = patience_hint = ""
    if waited is not None:
        since, patience_hint = f" for {waited:.0f} seconds", f", or set {PATIENCE} to more seconds"
    failure = StoreError(f"{location} cannot be used{since}: {problem}; {remedy}{patience_hint}")
    failure.errno = errno.EIO if waited is None else errno.ETIMEDOUT
    return failure


def error_summary(error: BaseException, location: str = "") -> str:
    """Return the type and the message of an error in one line, without secrets."""
    message = _redacted_message(error, location)
    return f"{type(error).__name__}: {message}" if str(error).strip() else message


def _redacted_message(error: BaseException, location: str) -> str:
    """Return the message of an error without secrets; of Icechunk's trees, the last line."""
    lines = [line.strip(" |`->") for line in str(error).splitlines()]
    tree = any(line.strip().startswith(("|->", "`->")) for line in str(error).splitlines())
    text = " ".join(" ".join(lines[-1:] if tree else lines).split())
    for secret in _secrets(location):
        text = text.replace(secret, "***")
    return text[:300] or type(error).__name__


def safe_cause(error: BaseException, location: str) -> BaseException | None:
    """Return an error for ``raise ... from``; None if its messages contain a secret."""
    chain: BaseException | None = error
    secrets = _secrets(location)
    while chain is not None:
        if any(secret in str(chain) for secret in secrets):
            return None
        chain = chain.__cause__ or chain.__context__
    return error


def _secrets(location: str) -> list[str]:
    """Return the secret texts of a location."""
    url, options = getattr(location, "url", location), getattr(location, "options", {})
    secrets = [url[at:] for at in (url.find("?") + 1,) if at and _without_credentials(url) != url]
    secrets += [
        user.rstrip("@") for user in re.findall(r"(?<=://)[^/@]*@", url) if user not in location
    ]
    pending: list[Any] = [options]
    while pending:
        value = pending.pop()
        pending += value.values() if isinstance(value, Mapping) else ()
        pending += value if isinstance(value, list | tuple) else ()
        # The address of a server is not secret and is useful in a message.
        if (
            isinstance(value, str)
            and len(value) > 3
            and "://" not in value
            and value not in location
        ):
            secrets.append(value)
    return sorted(secrets, key=len, reverse=True)


def _without_credentials(url: str) -> str:
    """Return a URL without user name, password and query."""

    def without_user(match: re.Match[str]) -> str:
        return match[0] if match[1] in CONTAINER_SCHEMES else f"{match[1]}://"

    url = re.sub(r"(\w+)://[^/@]*@", without_user, url)
    return url.partition("?")[0] if "http" in url else url
