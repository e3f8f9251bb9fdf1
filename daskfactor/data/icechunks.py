"""Icechunk repositories, at a URL or as the parent of a path, opened as zarr stores."""

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from daskfactor.errors import OptionError, StoreError
from daskfactor.urls import CLOUD, Location, is_url, retry, retry_async

T = TypeVar("T")

REPOSITORY = ("refs/branch.main", "repo")
"""Files that identify a repository, in either of its two layouts."""
MAX_PARENTS = 4
"""Number of parent folders that are searched for a repository."""


def repository_store(location: str) -> tuple[Any, str] | None:
    """Return the store of the repository at or above a location, and the path inside it.

    The store is the latest commit of ``main``. Return None if there is no repository.
    """
    names: list[str] = []
    folder = Location.of(location)
    while not is_repository(folder):
        parent, _, name = folder.url.rstrip("/").rpartition("/")
        names.insert(0, name)
        if len(names) > MAX_PARENTS or parent.count("/") < (3 if folder.is_url else 1):
            return None
        folder = folder.sibling(parent)
    store = repository_at(folder).readonly_session("main").store
    return store, "/".join(names)


def is_repository(location: str) -> bool:
    """Return whether the folder at a location has the layout of an Icechunk repository."""
    if not is_url(location):
        return any((Path(location) / name).exists() for name in REPOSITORY)
    system, path = Location.of(location).file_system()
    return bool(
        retry(
            lambda: any(system.exists(f"{path}/{name}") for name in REPOSITORY),
            location,
        )
    )


# -- where they are -------------------------------------------------------------------------

_IN_MEMORY: dict[str, Any] = {}
"""In-memory storages of this process, by URL."""


def ask(location: str, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
    """Run an asynchronous function, with retries, and wait for its result."""
    from zarr.core.sync import sync

    return sync(retry_async(partial(function, *args, **options), location))


def is_installed() -> bool:
    """Return whether Icechunk is installed."""
    from importlib.util import find_spec

    return find_spec("icechunk") is not None


def icechunk_missing(location: str) -> StoreError:
    """Return the error for a location that requires Icechunk, which is not installed."""
    kind = "in an object store" if is_url(location) else "a repository"
    return StoreError(
        f"{location} is {kind}, which needs Icechunk: run  "
        "pip install 'daskfactor[cloud]'  or pass a local path"
    )


def repository_at(location: str, make: bool = False) -> Any:
    """Open the repository at a path or URL; None if it does not exist and is not to be made."""
    if not is_installed():
        raise icechunk_missing(location)
    import icechunk

    repository = icechunk.Repository
    if location.startswith("memory://") and location not in _IN_MEMORY and not make:
        return None
    storage = icechunk_storage(location)
    if not ask(location, repository.exists_async, storage):
        if not make:
            return None
        ask(location, repository.create_async, storage)
    return ask(location, repository.open_async, storage)


def icechunk_storage(location: str) -> Any:
    """Return the Icechunk storage of a path or URL.

    Credentials come from the environment, or from the storage options of the URL.

    Raises
    ------
    OptionError
        If there are ``storage_options`` that are not for S3.
    StoreError
        If the URL names no bucket, nothing says which account it is in, or Icechunk knows none.
    """
    import icechunk

    place = Location.of(location)
    url, options = place.url, place.options
    if not is_url(url):
        return icechunk.local_filesystem_storage(url)
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if options and scheme not in ("s3", "s3a"):
        raise OptionError(
            f"storage_options of a repository of Icechunk are for s3://, not for {scheme}://; "
            "leave them out, and set credentials in the environment"
        )
    if scheme == "memory":
        return _IN_MEMORY.setdefault(url, icechunk.in_memory_storage())
    if scheme not in (*CLOUD, "s3a"):
        raise StoreError(f"Icechunk repositories are at s3://, gs:// or az://, got {location}")
    if not bucket:
        raise StoreError(f"{location} names no bucket; a run is at {scheme}://bucket/run")
    if scheme in ("s3", "s3a"):
        return _s3(bucket, prefix, options)
    if scheme in ("gs", "gcs"):
        return icechunk.gcs_storage(bucket=bucket, prefix=prefix, from_env=True)
    container, _, host = bucket.partition("@")
    account = host.partition(".")[0] or _first(
        "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"
    )
    if not account:
        raise StoreError(
            f"{location} does not say which account it is in; set AZURE_STORAGE_ACCOUNT_NAME, or "
            "pass abfs://container@account.dfs.core.windows.net/run"
        )
    return icechunk.azure_storage(
        account=account, container=container, prefix=prefix, from_env=True
    )


def _s3(bucket: str, prefix: str, options: dict[str, Any]) -> Any:
    """Return the storage of an S3 bucket, configured by s3fs options or the environment."""
    import icechunk

    client = options.get("client_kwargs", {})
    endpoint = options.get("endpoint_url") or client.get("endpoint_url")
    endpoint = endpoint or _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    unsigned = os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes")
    key = options.get("key")
    anonymous = bool(options.get("anon", unsigned and not key))
    return icechunk.s3_storage(
        bucket=bucket,
        prefix=prefix or None,
        region=client.get("region_name") or _first("AWS_REGION", "AWS_DEFAULT_REGION"),
        endpoint_url=endpoint,
        allow_http=bool(endpoint and endpoint.startswith("http://")),
        force_path_style=bool(endpoint),
        anonymous=anonymous or None,
        from_env=None if anonymous or key else True,
        access_key_id=key,
        secret_access_key=options.get("secret"),
        session_token=options.get("token"),
    )


def _first(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)
