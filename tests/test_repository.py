"""What the repository says of itself: versions, Pythons, links and paths in its pages."""

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import daskfactor

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FOLDERS = r"(?:\.ci|\.github|benchmarks|daskfactor|docs|examples|paper|tests)/"


def project():
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"])


def citation():
    return dict(yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8")))


def test_the_citation_is_of_this_version_which_has_types():
    found, told = citation(), project()
    assert found["version"] == told["version"] == daskfactor.__version__
    assert found["license"] == told["license"]
    assert found["authors"] == told["authors"]
    assert {"cff-version", "message", "title"} <= set(found)
    assert (resources.files("daskfactor") / "py.typed").is_file()
    assert "Typing :: Typed" in told["classifiers"]


def pythons(classifiers):
    """Minor versions of Python among classifiers."""
    return re.findall(r"^Programming Language :: Python :: (3\.\d+)$", "\n".join(classifiers), re.M)


def tried():
    """Minor versions in the table of docs/policies.md."""
    policies = (ROOT / "docs" / "policies.md").read_text("utf-8")
    return re.findall(r"^\| (3\.\d+) \|", policies, re.MULTILINE)


def contradictions(told, table, requires, newest):
    """What classifiers, the table of policies, requires-python and .ci/run do not agree in."""
    found = []
    if told != table:
        found.append(f"classifiers have {told}, docs/policies.md {table}")
    if requires != f">={table[0]}":
        found.append(f"requires-python is {requires}, the oldest Python tried {table[0]}")
    if newest != table[-1]:
        found.append(f".ci/run tries {newest}, docs/policies.md {table[-1]}")
    found += [f"{one} is not allowed" for one in told if Version(one) not in SpecifierSet(requires)]
    if table != sorted(table, key=Version):
        found.append("docs/policies.md is not in order")
    return found


def newest():
    """The Python that .ci/run tries beside the oldest one."""
    (found,) = re.findall(r"^newest=(\S+)$", (ROOT / ".ci" / "run").read_text("utf-8"), re.M)
    return found


def test_pythons_are_those_that_were_tried():
    told = ["3.11", "3.13"]
    assert contradictions(told, told, ">=3.11", "3.13") == []
    assert contradictions([*told, "3.14"], told, ">=3.11", "3.13")
    assert contradictions(told, told, ">=3.12", "3.13")
    assert contradictions(told, told, ">=3.11", "3.14")
    own, requires = pythons(project()["classifiers"]), project()["requires-python"]
    assert contradictions(own, tried(), requires, newest()) == []


def test_the_workflow_has_the_pythons_of_ci():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    for job in workflow["jobs"].values():
        settings = [step.get("with", {}) for step in job["steps"]]
        asked = [own["python-version"] for own in settings if "python-version" in own]
        commands = [step["run"] for step in job["steps"] if "run" in step]
        versions = " ".join(asked).split()
        assert versions[-1] == tried()[0]  # the last one is what `python3` is
        assert set(versions) <= {tried()[0], newest()}
        for path in re.findall(r"bash (\S+)", " ".join(commands)):
            assert (ROOT / path).is_file()


def anchors(page):
    """What a forge calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page):
    """Links of a page to files and headings that do not exist; those to other hosts are left."""
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text("utf-8")))
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        if not place.exists() or (anchor and anchor not in anchors(place)):
            found.append(target)
    return found


def missing_paths(page):
    """Files and folders of the repository that a page names as code, and that do not exist."""
    named = re.findall(rf"(?<![\w./])({FOLDERS}[\w./-]*[\w/])(?![\w*<])", page.read_text("utf-8"))
    return [name for name in named if not (ROOT / name).exists()]


def test_broken_links_and_missing_paths_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One (and two)\n[a](#one-and-two) [b](page.md) [c](page.md#one-and-two) [d](http://e.f)\n"
        "`x[0](y)` and `tests/conftest.py`, `docs/`, `/other/tests/no.py`, `daskfactor/<name>.py`\n"
    )
    assert broken_links(page) == []
    assert missing_paths(page) == []
    page.write_text("[a](#two) [b](gone.md) [c](page.md#no) `tests/gone.py` `.ci/gone`\n")
    assert broken_links(page) == ["#two", "gone.md", "page.md#no"]
    assert missing_paths(page) == ["tests/gone.py", ".ci/gone"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_point_at_what_exists(page):
    assert broken_links(page) == []
    assert missing_paths(page) == []
