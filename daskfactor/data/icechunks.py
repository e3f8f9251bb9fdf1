"""Icechunk repositories: where a commit of one is, as a store that zarr reads."""

import os
import re
from pathlib import Path
from typing import Any

from daskfactor.checks import require
from daskfactor.data.places import Place, file_system, is_url, persistently, reached
from daskfactor.errors import DataError, OptionError
from daskfactor.results.cloud import storage_of

REPOSITORY = ("refs/branch.main", "repo")
"""What a repository has, in the two layouts that there are."""
MOST_ABOVE = 4
"""Folders in which a repository is looked for above an array of it."""


def repository_store(location: str) -> tuple[Any, str, str] | None:
    """A commit of the repository at a location or above it: store, what is meant in it, place.

    ``repository@commit/array`` names a commit, by its id, a branch or a tag; by default it is the
    latest one of ``main``. None if there is no repository. What is given out is pinned to a commit
    and so is its location: what is committed later is seen nowhere where that is read.

    Raises
    ------
    DataError
        If the repository has no such commit.
    """
    names: list[str] = []
    here, asked = _without_commit(location)
    while not is_repository(here):
        above, _, name = here.rstrip("/").rpartition("/")
        names.insert(0, name)
        if asked or len(names) > MOST_ABOVE or above.count("/") < (3 if is_url(location) else 1):
            return None
        here = Place(above, reached(location)[1]) if is_url(location) else above
    if asked is not None:
        names = [asked[1]] if asked[1] else []
    icechunk = require("icechunk", "cloud", "Icechunk repositories")
    repository = icechunk.Repository.open(icechunk_storage(here))
    session = _session(repository, here, "main" if asked is None else asked[0])
    inside = "/".join(names)
    found = "/".join([f"{here}@{session.snapshot_id}", *names])
    pinned = Place(found, reached(location)[1]) if is_url(location) else found
    return session.store, inside, pinned


def _without_commit(location: str) -> tuple[str, tuple[str, str] | None]:
    """A location without ``@commit``, and what that was, with what follows it."""
    found = re.fullmatch(r"(.+://[^/]+/|/)(.*)@([\w.-]+)(?:/(.*))?", location)
    if found is None:
        return location, None
    here = found[1] + found[2]
    place = Place(here, reached(location)[1]) if is_url(location) else here
    return place, (found[3], found[4] or "")


def _session(repository: Any, here: str, name: str) -> Any:
    """The session at a commit, a branch or a tag."""
    if name in repository.list_branches():
        return repository.readonly_session(name)
    if name in repository.list_tags():
        return repository.readonly_session(tag=name)
    try:
        return repository.readonly_session(snapshot_id=name)
    except Exception as error:  # every version of icechunk has errors of its own
        raise DataError(
            f"{here} has no branch, tag or snapshot {name!r}; its branches are "
            f"{', '.join(sorted(repository.list_branches()))}"
        ) from error


def is_repository(location: str) -> bool:
    """Whether the folder at a location is laid out as Icechunk does it."""
    if not is_url(location):
        return any((Path(location) / name).exists() for name in REPOSITORY)
    system, path = file_system(location)
    return bool(
        persistently(
            lambda: any(system.exists(f"{path}/{name}") for name in REPOSITORY),
            location,
        )
    )


def icechunk_storage(location: str) -> Any:
    """What Icechunk opens at a path or URL, as runs are opened, but for ``storage_options``.

    Raises
    ------
    OptionError
        If there are options that are not for S3.
    StoreError
        If the URL is none that Icechunk knows.
    """
    icechunk = require("icechunk", "cloud", "Icechunk repositories")
    url, options = reached(location)
    if not is_url(url):
        return icechunk.local_filesystem_storage(url)
    if not options:
        return storage_of(url)
    scheme, _, rest = url.partition("://")
    if scheme not in ("s3", "s3a"):
        raise OptionError(
            f"storage_options of a repository of Icechunk are for s3://, not for {scheme}://; "
            "leave them out, and set credentials in the environment"
        )
    bucket, _, prefix = rest.strip("/").partition("/")
    return _s3(icechunk, bucket, prefix, options)


def _s3(icechunk: Any, bucket: str, prefix: str, options: dict[str, Any]) -> Any:
    """A bucket, reached with the options that s3fs takes."""
    told = options.get("client_kwargs", {})
    address = options.get("endpoint_url") or told.get("endpoint_url")
    address = address or os.environ.get("AWS_ENDPOINT_URL")
    key, anonymous = options.get("key"), bool(options.get("anon"))
    return icechunk.s3_storage(
        bucket=bucket,
        prefix=prefix or None,
        region=told.get("region_name") or os.environ.get("AWS_REGION"),
        endpoint_url=address,
        allow_http=bool(address and address.startswith("http://")),
        force_path_style=address is not None,
        anonymous=anonymous or None,
        from_env=None if anonymous or key else True,
        access_key_id=key,
        secret_access_key=options.get("secret"),
        session_token=options.get("token"),
    )
