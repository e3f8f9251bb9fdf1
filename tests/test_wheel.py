"""What is handed out: the archive of sources has all that tests need, the wheel all that runs."""

import itertools
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import daskfactor

ROOT = Path(__file__).parents[1]
BUILT = {"__pycache__", "_build", "generated", "gallery", "jupyter_execute", ".git", ".venv"}
"""Folders that are made and never handed out."""


def build(kind, root, into):
    """Build an archive with the backend alone, which needs no network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = into.iterdir()
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names of files in an archive of sources, and files by name in a wheel built from it."""
    folder = tmp_path_factory.mktemp("built")
    archive = build("sdist", ROOT, folder / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "sources", filter="data")
    (sources,) = (folder / "sources").iterdir()
    names = {str(own.relative_to(sources)) for own in sources.rglob("*") if own.is_file()}
    with zipfile.ZipFile(build("wheel", sources, folder / "wheel")) as wheel:
        return names, {name: wheel.read(name) for name in wheel.namelist()}


def read(wheel, name):
    """A text among the wheel's metadata."""
    (found,) = (own for one, own in wheel.items() if one.endswith(f".dist-info/{name}"))
    return found.decode()


def kept(folder, suffixes=()):
    """Files of a folder of this checkout that are handed out, of some suffixes or all."""
    found = (own.relative_to(ROOT) for own in (ROOT / folder).rglob("*") if own.is_file())
    return {
        str(own)
        for own in found
        if not BUILT & set(own.parts) and (not suffixes or own.suffix in suffixes)
    }


def test_the_wheel_is_the_package_and_nothing_else(built):
    names = {name for name in built[1] if ".dist-info/" not in name}
    assert names == kept("daskfactor")
    assert {"daskfactor/py.typed", "daskfactor/__init__.pyi"} <= names


def test_the_wheel_says_what_the_project_says(built):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    _, wheel = built
    told = Parser().parsestr(read(wheel, "METADATA"))
    assert told["Name"] == "daskfactor"
    assert told["Version"] == daskfactor.__version__
    assert told["Requires-Python"] == project["requires-python"]
    assert told["License-Expression"] == project["license"]
    assert set(told.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    own = [one for one in told.get_all("Requires-Dist", []) if "extra ==" not in one]
    assert len(own) == len(project["dependencies"])
    assert str(told.get_payload()).startswith("# daskfactor")
    assert "daskfactor = daskfactor.cli.main:app" in read(wheel, "entry_points.txt")
    assert "Root-Is-Purelib: true" in read(wheel, "WHEEL")
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_the_archive_of_sources_has_what_tests_and_pages_need_and_nothing_built(built):
    names, _ = built
    assert kept("daskfactor") <= names
    for folder in (".ci", ".github", "benchmarks", "docs", "examples", "tests"):
        needed = kept(folder, ("", ".md", ".py", ".yml"))
        assert needed, folder
        assert needed <= names, folder
    pages = ("CHANGELOG", "CODE_OF_CONDUCT", "CONTRIBUTING", "README", "SECURITY")
    assert {f"{page}.md" for page in pages} | {"CITATION.cff", "LICENSE", "pyproject.toml"} <= names
    for name in itertools.chain(*built):
        assert not BUILT & set(Path(name).parts), name
        assert Path(name).suffix not in (".pyc", ".zarr", ".so"), name
