"""Icechunk repositories: at a URL, or where a commit of one is, as a store that zarr reads."""

import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from daskfactor.errors import OptionError, StoreError
from daskfactor.urls import (
    CLOUD,
    file_system,
    fsspec_args,
    is_url,
    retry,
    retry_async,
    scheme_of,
    sibling,
)

T = TypeVar("T")

REPOSITORY = ("refs/branch.main", "repo")
"""What a repository has, in the two layouts that there are."""
MOST_ABOVE = 4
"""Folders in which a repository is looked for above an array of it."""


def repository_store(location: str) -> tuple[Any, str] | None:
    """Return the store of the repository at a location or above it, and the path inside it.

    It is the latest commit of ``main``. None if there is no repository.
    """
    names: list[str] = []
    here = location
    while not is_repository(here):
        above, _, name = here.rstrip("/").rpartition("/")
        names.insert(0, name)
        if len(names) > MOST_ABOVE or above.count("/") < (3 if is_url(location) else 1):
            return None
        here = sibling(above, location)
    store = repository_at(here).readonly_session("main").store
    return store, "/".join(names)


def is_repository(location: str) -> bool:
    """Whether the folder at a location is laid out as Icechunk does it."""
    if not is_url(location):
        return any((Path(location) / name).exists() for name in REPOSITORY)
    system, path = file_system(location)
    return bool(
        retry(
            lambda: any(system.exists(f"{path}/{name}") for name in REPOSITORY),
            location,
        )
    )


# -- where they are -------------------------------------------------------------------------

_IN_MEMORY: dict[str, Any] = {}
"""Storages of this process, by their URLs."""


def ask(location: str, function: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
    """Call an asynchronous function from a thread that may wait, and retry it."""
    from zarr.core.sync import sync

    return sync(retry_async(partial(function, *args, **options), location))


def is_installed() -> bool:
    """Whether Icechunk is there."""
    from importlib.util import find_spec

    return find_spec("icechunk") is not None


def needed(location: str) -> StoreError:
    """Say that it is needed and is not."""
    where = "in an object store" if is_url(location) else "a repository"
    return StoreError(
        f"{location} is {where}, which needs Icechunk: run  "
        "pip install 'daskfactor[cloud]'  or pass a local path"
    )


def repository_at(location: str, make: bool = False) -> Any:
    """Open the repository at a path or URL; None if there is none and none is to be made."""
    if not is_installed():
        raise needed(location)
    import icechunk

    repository = icechunk.Repository
    if scheme_of(location) == "memory" and location not in _IN_MEMORY and not make:
        return None
    storage = icechunk_storage(location)
    if not ask(location, repository.exists_async, storage):
        if not make:
            return None
        ask(location, repository.create_async, storage)
    return ask(location, repository.open_async, storage)


def icechunk_storage(location: str) -> Any:
    """What Icechunk opens at a path or URL; credentials are in the environment, or its options.

    Raises
    ------
    OptionError
        If there are ``storage_options`` that are not for S3.
    StoreError
        If the URL names no bucket, nothing says which account it is in, or Icechunk knows none.
    """
    import icechunk

    url, options = fsspec_args(location)
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
    """A bucket, reached with the options that s3fs takes, or as the environment says."""
    import icechunk

    told = options.get("client_kwargs", {})
    endpoint = options.get("endpoint_url") or told.get("endpoint_url")
    endpoint = endpoint or _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    unsigned = os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes")
    key = options.get("key")
    anonymous = bool(options.get("anon", unsigned and not key))
    return icechunk.s3_storage(
        bucket=bucket,
        prefix=prefix or None,
        region=told.get("region_name") or _first("AWS_REGION", "AWS_DEFAULT_REGION"),
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
