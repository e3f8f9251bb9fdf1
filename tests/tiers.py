"""Two tiers of tests: the quick one runs for every change, the full one has everything.

``DASKFACTOR_TIER=full`` asks for the full tier. A test marked ``full`` repeats at length what a
quicker test covers; of one marked ``quick("a", "b")`` only the cases with these ids are quick. The
quick tier leaves the others out, and one line at the end says how many it left.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

VARIABLE = "DASKFACTOR_TIER"
FULL = os.environ.get(VARIABLE) == "full"
"""Whether this session runs the full tier."""
LEFT_OUT = "tests_of_the_full_tier"


def tiered(cases: Iterable[Any], is_quick: Callable[[Any], bool]) -> list[Any]:
    """Return cases for ``parametrize``; those that are not quick are of the full tier."""
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=() if is_quick(case) else pytest.mark.full,
        )
        for case in cases
    ]


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get(VARIABLE, "") not in ("", "quick", "full"):
        raise pytest.UsageError(
            f"{VARIABLE} is {os.environ[VARIABLE]!r}. Use 'quick', which is the default, or 'full'."
        )
    config.stash[_COUNT] = 0


_COUNT = pytest.StashKey[int]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the count from worker processes, all of which collect the same tests."""
    count = getattr(node, "workeroutput", {}).get(LEFT_OUT, 0)
    node.config.stash[_COUNT] = max(count, node.config.stash[_COUNT])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests of the full tier out of the quick one."""
    if not any("::" in str(own) for own in config.args):
        _check_ids(items)
    left_out = [] if FULL else [item for item in items if not _is_quick(item)]
    if left_out:
        config.stash[_COUNT] = len(left_out)
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _is_quick(item)]


def _id(item: Any) -> str:
    """Return the id of a case among those of its test."""
    spec = getattr(item, "callspec", None)
    return "" if spec is None else str(spec.id)


def _is_quick(item: pytest.Item) -> bool:
    chosen = item.get_closest_marker("quick")
    return not item.get_closest_marker("full") and (chosen is None or _id(item) in chosen.args)


def _check_ids(items: Iterable[pytest.Item]) -> None:
    """Refuse a ``quick`` case that a test has not, where all of its cases were collected."""
    seen = dict[str, tuple[tuple[str, ...], set[str]]]()
    for item in items:
        if mark := item.get_closest_marker("quick"):
            name = item.nodeid.partition("[")[0]
            seen.setdefault(name, (mark.args, set()))[1].add(_id(item))
    for name, (wanted, found) in seen.items():
        unknown = {*wanted} - found
        if unknown and len(found) > 1:
            raise pytest.UsageError(f"{name} has no cases {', '.join(sorted(unknown))}")


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[LEFT_OUT] = session.config.stash[_COUNT]
    return (yield)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash[_COUNT]:
        tests = "1 test" if count == 1 else f"{count} tests"
        terminalreporter.write_line(f"{tests} of the full tier left out; {VARIABLE}=full runs all")
