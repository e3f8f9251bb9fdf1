"""Object stores: found by a URL, asked with patience, and what they refuse told in a sentence.

Credentials are found by Icechunk in the environment. Messages of object stores are looked through
for anything that the environment keeps secret before a word of them is shown.
"""

import asyncio
import logging
import math
import os
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from daskfactor.errors import OptionError, StoreError

logger = logging.getLogger(__name__)

PATIENCE: Final = "DASKFACTOR_STORE_PATIENCE"
"""Environment variable: seconds to wait for an object store that does not do what it is asked."""
USUAL_PATIENCE: Final = 300.0
ATTEMPT: Final = 60.0
"""Seconds until an answer that does not come is asked for again."""
QUIET: Final = 5.0
"""Seconds until somebody is told that it does not come."""

T = TypeVar("T")


# -- asking ---------------------------------------------------------------------------------


class Trouble(NamedTuple):
    """Why an object store refuses, and what to do; ``lasting`` if waiting does not help."""

    signs: str
    what: str
    remedy: str
    lasting: bool = True


_TROUBLES: Final = (
    Trouble("NoSuchBucket|ContainerNotFound|bucket does not exist",
            "there is no such bucket", "create it or check the URL"),
    Trouble("Expired|TokenRefreshRequired", "the credentials have expired", "renew them"),
    Trouble("no providers in chain provided credentials|CredentialsNotLoaded|NoCredentials"
            "|loading credentials|credentials provider was not enabled",
            "there are no credentials in the environment", "set them"),
    Trouble("AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|InvalidToken|Forbidden"
            "|Unauthorized|AuthenticationFailed|AuthorizationFailure",
            "the credentials are refused", "check them"),
    Trouble("dispatch failure|Connect|Timeout|timed out", "it does not answer",
            "see that it can be reached", lasting=False),
)  # fmt: skip
_SECRET: Final = re.compile("KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|SAS", re.IGNORECASE)


def trouble_of(error: BaseException) -> Trouble:
    """Find out why an object store refuses; ``what`` says it without anything secret."""
    text = f"{type(error).__name__} {error}"
    for known in _TROUBLES:
        if re.search(known.signs, text):
            return known
    last = [line.strip(" |`->x") for line in str(error).splitlines() if line.strip(" |`->x")]
    said = without_secrets(last[-1] if last else type(error).__name__)[:200]
    return Trouble("", f"it says: {said}", "see what it reports", lasting=False)


def without_secrets(text: str) -> str:
    """Take values that the environment keeps secret out of a text."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "***")
    return text


def patience() -> float:
    """Seconds to wait for an object store, as the environment says."""
    told = os.environ.get(PATIENCE, "")
    try:
        found = float(told or USUAL_PATIENCE)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf:
        raise OptionError(f"{PATIENCE} must be a number of seconds, got {told!r}")
    return found


async def patiently(name: str, ask: Callable[[], Awaitable[T]]) -> T:
    """Ask an object store until it answers, or until patience is at its end.

    Raises
    ------
    StoreError
        If it does not, or if waiting does not help.
    """
    from icechunk import ConflictError, IcechunkError

    begun, limit, pause = time.monotonic(), patience(), 0.25
    while True:
        left = begun + limit - time.monotonic()
        try:
            return await _attempt(name, ask, min(ATTEMPT, max(left, 1.0)), left)
        except ConflictError:
            raise
        except (IcechunkError, TimeoutError) as error:
            why = trouble_of(error)
        left = begun + limit - time.monotonic()
        if why.lasting or left <= pause:
            waited = "" if why.lasting else f" for {time.monotonic() - begun:.0f} seconds"
            # Without the cause: its text may hold what nobody should read.
            raise StoreError(f"{name} cannot be used{waited}: {why.what}; {why.remedy}") from None
        logger.warning("%s: %s; waiting up to %.0f seconds more", name, why.what, left)
        await asyncio.sleep(pause)
        pause = min(2 * pause, 10.0)


async def _attempt(
    name: str, ask: Callable[[], Awaitable[T]], seconds: float, patience: float
) -> T:
    """Ask once, for some seconds; say so when it takes long."""
    task = asyncio.ensure_future(ask())
    try:
        done, _ = await asyncio.wait({task}, timeout=min(QUIET, seconds))
        if not done:
            logger.warning("%s: no answer yet; waiting up to %.0f seconds more", name, patience)
        return await asyncio.wait_for(task, seconds)
    finally:
        task.cancel()


def ask(name: str, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
    """Ask an object store, patiently, from a thread that may wait."""
    from zarr.core.sync import sync

    return sync(patiently(name, partial(function, *args, **options)))


# -- where ----------------------------------------------------------------------------------

_IN_MEMORY: dict[str, Any] = {}
"""Storages of this process, by their URLs."""


def storage_of(url: str) -> Any:
    """Make Icechunk's storage for a URL; credentials and addresses are found in the environment.

    Raises
    ------
    StoreError
        If the URL names no bucket, or nothing says which account it is in.
    """
    import icechunk

    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme == "memory":
        return _IN_MEMORY.setdefault(url, icechunk.in_memory_storage())
    if not bucket:
        raise StoreError(f"{url} names no bucket; a run is at {scheme}://bucket/run")
    if scheme == "s3":
        return _s3(bucket, prefix)
    if scheme in ("gs", "gcs"):
        return icechunk.gcs_storage(bucket=bucket, prefix=prefix, from_env=True)
    container, _, host = bucket.partition("@")
    account = host.partition(".")[0] or _first(
        "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"
    )
    if not account:
        raise StoreError(
            f"{url} does not say which account it is in; set AZURE_STORAGE_ACCOUNT_NAME, or pass "
            "abfs://container@account.dfs.core.windows.net/run"
        )
    return icechunk.azure_storage(
        account=account, container=container, prefix=prefix, from_env=True
    )


def _s3(bucket: str, prefix: str) -> Any:
    import icechunk

    endpoint = _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    unsigned = os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes")
    return icechunk.s3_storage(
        bucket=bucket,
        prefix=prefix,
        region=_first("AWS_REGION", "AWS_DEFAULT_REGION"),
        endpoint_url=endpoint,
        allow_http=bool(endpoint and endpoint.startswith("http://")),
        force_path_style=bool(endpoint),
        anonymous=unsigned or None,
        from_env=None if unsigned else True,
    )


def _first(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _config() -> Any:
    """Few attempts of its own: `patiently` knows when to stop and says that it waits."""
    import icechunk

    retries = icechunk.StorageRetriesSettings(
        max_tries=3, initial_backoff_ms=100, max_backoff_ms=1000
    )
    return icechunk.RepositoryConfig(storage=icechunk.StorageSettings(retries=retries))


def is_installed() -> bool:
    """Whether Icechunk is there."""
    from importlib.util import find_spec

    return find_spec("icechunk") is not None


def needed(url: str) -> StoreError:
    """Say that it is needed and is not."""
    return StoreError(
        f"{url} is in an object store, which needs Icechunk: run  "
        "pip install 'daskfactor[cloud]'  or pass a local path"
    )


def repository_at(url: str, make: bool) -> Any:
    """Open the repository at a URL; None if there is none and none is to be made."""
    if not is_installed():
        raise needed(url)
    import icechunk

    repository = icechunk.Repository
    if url.startswith("memory://") and url not in _IN_MEMORY and not make:
        return None
    # One storage for each: it keeps the settings that it was first used with.
    if not ask(url, repository.exists_async, storage_of(url)):
        if not make:
            return None
        ask(url, repository.create_async, storage_of(url), _config())
    return ask(url, repository.open_async, storage_of(url), _config())
