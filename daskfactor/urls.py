"""What a URL is, what may be told of it, how it is reached, how long one waits for it.

All that reads or writes at a path or URL asks here. A URL is one that fsspec knows; credentials
come from the environment, as fsspec, its file systems and Icechunk take them, or as
``storage_options``. What a network does is tried again for `patience` seconds; what will not
change is not. Messages of servers are looked through for anything secret before a word of them is
shown. No library that takes time to import is imported here before it is needed.
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
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from daskfactor.errors import DaskfactorError, DataError, OptionError, StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE: Final = "DASKFACTOR_STORE_PATIENCE"
"""Environment variable: seconds to wait for a server that does not do what it is asked."""
USUAL_PATIENCE: Final = 300.0
FIRST_PATIENCE: Final = 15.0
"""The same of a server that has never answered in this process: its name may be misspelt."""
ATTEMPT: Final = 60.0
"""Seconds until an answer that does not come is asked for again."""
QUIET: Final = 5.0
"""Seconds until somebody is told that it does not come."""
TOLD_EVERY: Final = 60.0
_answered: Final = set[str]()
"""Servers that have answered anything."""
LONGEST_PAUSE: Final = 5.0
REMOTE_BUFFER: Final = 2**22
CLOUD: Final = ("s3", "gs", "gcs", "az", "abfs", "abfss", "memory")
"""Schemes of the URLs that a run can be written to."""
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


# -- what and where -------------------------------------------------------------------------


class Url(str):
    """A URL as results, logs and errors may have it; how it is reached only `reached` tells.

    As a text it has neither password nor signature. ``storage_options`` go with it, also when it
    is pickled for a worker, and are never shown.
    """

    __slots__ = ("_options", "_url")

    _url: str
    _options: dict[str, Any]

    def __new__(cls, url: str, options: Mapping[str, Any] | None = None) -> "Url":
        """Hide what is secret in a URL."""
        made = super().__new__(cls, _bare(url))
        made._url, made._options = url, dict(options or {})
        return made

    def __reduce__(self) -> Any:
        return Url, (self._url, self._options)


def is_url(place: object) -> bool:
    """Whether a location is a URL rather than a path of this machine."""
    text = str(place)
    return "://" in text and not text.startswith("file://")


def scheme_of(location: str) -> str:
    """What a URL begins with; nothing of a path."""
    return location.partition("://")[0] if is_url(location) else ""


def placed(data: Any, options: Mapping[str, Any] | None = None) -> Any:
    """What the caller passed, a URL as a `Url` with its options.

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
        Url(reached(fspath(one))[0], options or reached(one)[1]) if url else one
        for one, url in zip(given, urls, strict=True)
    ]


def absolute(location: str | PathLike[str]) -> str:
    """A local path made absolute; a URL as a `Url`, but file:// as a path.

    Raises
    ------
    StoreError
        If it is a URL that a `pathlib.Path` has cut short.
    """
    text = fspath(location)
    if is_url(text):
        return text if isinstance(text, Url) else Url(text)
    if text.partition(":/")[0] in CLOUD:
        raise StoreError(f"a URL is passed as text, got the path {text}: a Path takes a slash away")
    return str(Path(text.removeprefix("file://")).expanduser().absolute())


def located(path: str | PathLike[str]) -> str:
    """The same of a place whose name is written down, so that it must tell nothing but where.

    Raises
    ------
    StoreError
        If it is a URL with credentials or a query.
    """
    found = absolute(path)
    if not is_url(found):
        return found
    url = reached(found)[0].rstrip("/")
    if "?" in url or (scheme_of(url) in CLOUD and url != _bare(url)):
        raise StoreError(
            f"a URL with credentials or with a query was passed ({_bare(url).partition('?')[0]}); "
            "leave them out: they are taken from the environment and are written nowhere"
        )
    return Url(url)


def along(text: str, location: str) -> str:
    """Another place, reached as one is."""
    return Url(text, reached(location)[1]) if is_url(location) else text


def inside(location: str, name: str) -> str:
    """What has a name in a folder that is at a location."""
    head, mark, tail = reached(location)[0].partition("?" if is_url(location) else "\0")
    return along(f"{head.rstrip('/')}/{name}{mark}{tail}", location)


def reached(location: str) -> tuple[str, dict[str, Any]]:
    """The whole URL of a location and the options with which fsspec opens it."""
    if isinstance(location, Url):
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

    return persistently(look, location)


class _Remote(io.RawIOBase):
    """A file that fsspec opens, whose reads are tried again."""

    _file: Any = None  # one that could not be opened is closed, too

    def __init__(self, location: str, system: Any, path: str) -> None:
        self._location = location
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
        found = persistently(lambda: self._file.read(len(wanted)), self._location)
        wanted[: len(found)] = found
        return len(found)

    def close(self) -> None:
        if not self.closed and self._file is not None:
            self._file.close()
        super().close()


# -- asking ---------------------------------------------------------------------------------


def patience() -> float:
    """Seconds to wait for a server, as the environment says."""
    told = os.environ.get(PATIENCE, "")
    try:
        found = float(told or USUAL_PATIENCE)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise OptionError(f"{PATIENCE} must be a number of seconds, got {told!r}")
    return found


def persistently(attempt: Callable[[], T], location: str) -> T:
    """What ``attempt`` gives, tried again while the network or the server may recover.

    Raises
    ------
    DaskfactorError
        At a URL, see `unreachable`: after `patience` seconds, or at once if waiting does not help.
    """
    waiting = _Waiting(location)
    while True:
        try:
            found = attempt() if waiting.known else _within(attempt, waiting.left())
        except Exception as error:  # noqa: BLE001 - raised again, now or when time is up
            time.sleep(waiting.pause(error))
        else:
            waiting.answered()
            return found


def _within(attempt: Callable[[], T], seconds: float) -> T:
    """What ``attempt`` gives; after so many seconds it is left to itself, with a TimeoutError.

    Libraries wait for minutes for a connection.
    """
    result: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            result.append(attempt())
        except Exception as error:  # noqa: BLE001 - raised by the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(seconds, 1.0))
    if errors:
        raise errors[0]
    if not result:
        raise TimeoutError
    return result[0]


async def patiently(attempt: Callable[[], Awaitable[T]], location: str) -> T:
    """The same for a coroutine, each attempt ended after a minute."""
    import asyncio

    waiting = _Waiting(location)
    while True:
        task = asyncio.ensure_future(attempt())
        limit = min(ATTEMPT, max(waiting.left(), 1.0))
        first = min(QUIET, limit)
        try:
            done, _ = await asyncio.wait({task}, timeout=first)
            if not done:
                waiting.tell("no answer yet")
            found = await asyncio.wait_for(task, limit - first)
            waiting.answered()
            return found
        except Exception as error:  # noqa: BLE001 - raised again, now or when time is up
            await asyncio.sleep(waiting.pause(error))
        finally:
            task.cancel()


def _in_worker() -> bool:
    """Return whether a worker of a cluster runs this: its client has asked the server before."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return False
    try:
        return distributed.get_worker() is not None
    except ValueError:  # a thread that a worker began, or a client beside workers in its process
        working = any(own.status.name == "running" for own in list(distributed.Worker._instances))
        return working and not list(distributed.Client._instances)


class _Waiting:
    """For how long a location has been asked in vain, and what it answered last."""

    def __init__(self, location: str) -> None:
        self._location, self._begun, self._limit = location, time.monotonic(), patience()
        self._server = "/".join(location.split("/")[:3])
        self.known = not is_url(location) or self._server in _answered or _in_worker()
        if not self.known and not os.environ.get(PATIENCE):
            self._limit = FIRST_PATIENCE
        self._pause, self._told = 0.05, -math.inf
        self._answer: Exception = TimeoutError()

    def answered(self) -> None:
        """Note that the server is there, so that it is waited for from now on."""
        if not self.known:
            _answered.add(self._server)
            self.known, self._limit = True, patience()

    def left(self) -> float:
        """Seconds of patience."""
        return self._begun + self._limit - time.monotonic()

    def tell(self, what: str) -> None:
        """Log that it takes long, once a minute."""
        if time.monotonic() - self._told < TOLD_EVERY:
            return
        self._told = time.monotonic()
        logger.warning("%s: %s; waiting up to %.0f seconds more", self._location, what, self.left())

    def pause(self, error: Exception) -> float:
        """Give the seconds until the next attempt, or raise what is the matter."""
        if not is_url(self._location) or isinstance(error, DaskfactorError):
            raise error
        if not isinstance(error, TimeoutError):  # what it answered says more than its silence
            self._answer = error
        if any(_answer(error)):
            self.answered()
        trouble = trouble_of(error, self._location)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        if trouble.lasting or self.left() < self._pause:
            waited = None if trouble.lasting else time.monotonic() - self._begun
            raise unreachable(self._location, self._answer, waited) from shown(
                self._answer, self._location
            )
        self.tell(trouble.what)
        return self._pause * random.uniform(0.5, 1)


# -- what goes wrong ------------------------------------------------------------------------


class Trouble(NamedTuple):
    """Why a place cannot be used, and what to do; ``lasting`` if waiting does not help."""

    what: str
    remedy: str
    lasting: bool = True


_KNOWN: Final = {
    "NoSuchBucket|ContainerNotFound|bucket does not exist":
        Trouble("there is no such bucket", "create it or check the URL"),
    "(?s)IcechunkError.*(NoSuchKey|BlobNotFound|Object at location|os error 2)":
        Trouble("this was of an earlier commit, which has expired", "open the run again"),
    "Expired|TokenRefreshRequired": Trouble("the credentials have expired", "renew them"),
    "no providers in chain provided credentials|CredentialsNotLoaded|NoCredentials"
    "|loading credentials|credentials provider was not enabled":
        Trouble(
            "there are no credentials in the environment",
            "set them, or pass storage_options if it is data",
        ),
    "AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|Forbidden|Bad Request"
    "|Unauthorized|AuthenticationFailed|AuthorizationFailure|PermissionError|edentialsError":
        Trouble("the credentials are refused", "check that they may do this and have not expired"),
}  # fmt: skip
"""What errors of all libraries say of what the user can mend."""
_REACH: Final = "see that it can be reached"
_SILENCE: Final = re.compile("dispatch failure|Connect|Timeout|timed out")
_LASTING: Final = (
    *(FileNotFoundError, IsADirectoryError, NotADirectoryError, MemoryError),
    *(ValueError, TypeError, LookupError, ImportError, NotImplementedError),
)
"""Errors that trying again does not mend."""
_SOON_OVER: Final = (408, 425, 429)
"""Answers of a server to a request that it may grant later, although they count as refusals."""
_SECRET: Final = re.compile(
    "(KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS)S?[0-9]*(_|$)", re.IGNORECASE
)
"""Names of variables that are secret: words at an end, as TOKENIZERS_PARALLELISM is none."""
_NO_SECRET: Final = ("true", "false", "none", "null", "auto")


def trouble_of(error: BaseException, location: str = "") -> Trouble:
    """Find out why a place cannot be used; ``what`` says it without anything secret."""
    status, code = _answer(error)
    text = f"{type(error).__name__} {code} {error}".replace(location.partition("://")[2], "")
    for signs, known in _KNOWN.items():
        if re.search(signs, text):
            return known
    said, library = _said(error, location), type(error).__module__
    if status or code:
        answer = " ".join(filter(None, (str(status or ""), code)))
        refused = 400 <= status < 500 and status not in _SOON_OVER
        return Trouble(f"it answers {answer}", "see what is the matter with it", refused)
    lasting = isinstance(error, _LASTING) or getattr(error, "errno", None) == errno.EINVAL
    if library.startswith("botocore."):
        kinds = {kind.__name__ for kind in type(error).__mro__}
        lasting = not kinds & {"HTTPClientError", "ConnectionError"}
    lasting |= library.startswith("google.auth")
    if isinstance(error, TimeoutError) and not str(error):  # libraries ask again by themselves
        return Trouble("it does not answer, or with errors only", _REACH, False)
    if not lasting and _SILENCE.search(text):
        return Trouble(f"it does not answer ({said})", _REACH, False)
    return Trouble(f"it says: {said}", "see what it reports", lasting)


def _answer(error: BaseException) -> tuple[int, str]:
    """Status and code of what a server answered, as far as its library tells."""
    cause: BaseException | None = error
    while cause is not None:
        found = getattr(cause, "response", None)
        if isinstance(found, dict) and "Error" in found:  # of botocore
            status = found.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            code = str(found["Error"].get("Code", ""))
            return int(status), "" if code == str(status) else code
        for name in ("status", "code", "status_code"):
            if isinstance(status := getattr(cause, name, None), int):
                return status, ""
        cause = cause.__cause__ or cause.__context__
    found = re.search(r'\bcode: "(\w+)"|<Code>(\w+)</Code>', str(error))
    return 0, "" if found is None else found[1] or found[2]


@contextmanager
def reaching(location: str) -> Iterator[None]:
    """Trouble on the way to a URL as one sentence; errors of local files stay what they are.

    Raises
    ------
    DaskfactorError
        At a URL, see `unreachable`.
    """
    try:
        yield
    except DaskfactorError:
        raise
    except Exception as error:
        if not is_url(location):
            raise
        raise unreachable(location, error) from shown(error, location)


def _forget(scheme: str) -> None:
    """Have the next attempt take its credentials from the environment as it is then."""
    registry = sys.modules.get("fsspec.registry")
    if registry is not None and scheme in registry.registry:
        registry.registry[scheme].clear_instance_cache()


def unreachable(location: str, error: Exception, waited: float | None = None) -> DaskfactorError:
    """The sentence for an error on the way to a URL, where so many seconds were waited.

    A DataError if nothing is there, or there is no such scheme; an OptionError if a library is not
    installed, or does not take the options; a StoreError if it cannot be used, its ``errno``
    being ETIMEDOUT if one has waited long enough, EIO if waiting does not help.
    """
    scheme, reason = scheme_of(location).rpartition("::")[2], why(error, location)
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
    what, remedy, _ = trouble_of(error, location)
    _forget(scheme)
    since = more = ""
    if waited is not None:
        since, more = f" for {waited:.0f} seconds", f", or set {PATIENCE} to more seconds"
    failed = StoreError(f"{location} cannot be used{since}: {what}; {remedy}{more}")
    failed.errno = errno.EIO if waited is None else errno.ETIMEDOUT
    return failed


def why(error: BaseException, location: str = "") -> str:
    """What an error is and says, in one line, without anything that must not be told."""
    said = _said(error, location)
    return f"{type(error).__name__}: {said}" if str(error).strip() else said


def _said(error: BaseException, location: str) -> str:
    """What an error says; of Icechunk's, which are trees, the last line."""
    lines = [line.strip(" |`->") for line in str(error).splitlines()]
    tree = any(line.strip().startswith(("|->", "`->")) for line in str(error).splitlines())
    text = without_secrets(" ".join(" ".join(lines[-1:] if tree else lines).split()))
    for secret in _secrets(location):
        text = text.replace(secret, "***")
    return text[:300] or type(error).__name__


def without_secrets(text: str) -> str:
    """Take values that the environment keeps secret out of a text."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) > 3 and value.lower() not in _NO_SECRET:
            text = text.replace(value, "***")
    return text


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
