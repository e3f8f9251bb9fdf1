"""Every public name has a page, an example that runs, and a docstring that says what it must."""

import doctest
import inspect
import re
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import daskfactor as dfac
from daskfactor.options import OnSampled

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "api"
PLOTS = [
    name
    for name, own in vars(dfac.plots).items()
    if inspect.isfunction(own) and not name.startswith("_")
]
NAMES = [
    *(f"daskfactor.{name}" for name in dir(dfac) if name != "plots"),
    *(f"daskfactor.plots.{name}" for name in PLOTS),
]


def found(name):
    """What a public name means."""
    own = dfac
    for part in name.split(".")[1:]:
        own = getattr(own, part)
    return own


def summarized(page):
    """Names that the tables of a page list."""
    for block in re.findall(r"^```\{eval-rst\}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        module = re.search(r"^\.\. currentmodule:: (\S+)$", block, re.MULTILINE)
        listed = block.partition(".. autosummary::")[2]
        for name in re.findall(r"^   (\w+)$", listed, re.MULTILINE):
            yield f"{module[1]}.{name}" if module else name


def test_every_public_name_is_on_one_page_and_every_page_in_the_navigation():
    listed = [name for page in PAGES.glob("*.md") for name in summarized(page.read_text("utf-8"))]
    assert sorted(listed) == sorted(NAMES)
    index = (PAGES / "index.md").read_text("utf-8")
    pages = {path.stem for path in PAGES.glob("*.md")} - {"index"}
    assert set(re.findall(r"^(\w+)$", index, re.MULTILINE)) == pages


def examples(docstring, name):
    """The examples of a docstring, those under its headline alone."""
    section = re.search(r"^Examples\n-{8}\n(.*)", docstring, re.MULTILINE | re.DOTALL)
    text = section[1] if section else ""
    return doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, name, None, 0)


def failures(test):
    """What is wrong with examples, or nothing."""
    if not any(not own.options.get(doctest.SKIP) for own in test.examples):
        return f"{test.name} has no example that runs"
    told = []
    doctest.DocTestRunner(verbose=False).run(test, out=told.append)
    return "".join(told)


@pytest.mark.parametrize("name", NAMES)
def test_its_example_runs(name, tmp_path, monkeypatch):
    import matplotlib as mpl

    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert failures(examples(inspect.getdoc(found(name)) or "", name)) == ""


def test_examples_that_are_missing_or_wrong_are_found():
    right = "Add.\n\nExamples\n--------\n>>> 1 + 1\n2\n"
    assert failures(examples(right, "right")) == ""
    assert "Expected:\n    3\nGot:\n    2" in failures(examples(right.replace("\n2", "\n3"), "x"))
    assert "no example" in failures(examples("Add.\n\n>>> 1 + 1\n2\n", "x"))
    assert "no example" in failures(examples(right.replace("1 +", "1 # doctest: +SKIP\n"), "x"))


def test_numpydoc_finds_nothing_that_pyproject_asks_for():
    from numpydoc.validate import ERROR_MSGS, validate

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    checks = project["tool"]["numpydoc_validation"]["checks"]
    assert checks[0] == "all"
    assert set(checks[1:]) < set(ERROR_MSGS)
    errors = [(name, *error) for name in NAMES for error in validate(name)["errors"]]
    assert [error for error in errors if error[1] not in checks] == []


def headed(docstring, section):
    """Names that a section of a docstring describes."""
    pattern = rf"^{section}\n-+\n(.*?)(?=^\S[^\n]*\n-{{3,}}$|\Z)"
    text = re.search(pattern, docstring, re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^(\S.*)$", text[1], re.MULTILINE) if text else []
    return {name.strip().lstrip("*") for line in lines for name in line.split(" : ")[0].split(",")}


def undocumented(own):
    """Parameters that neither a docstring nor, for options of many verbs, `sample` describes.

    Options that verbs share are described once; a docstring that has them says ``options``.
    """
    docstring = inspect.getdoc(own) or ""
    told = headed(docstring, "Parameters") | headed(docstring, "Attributes")
    asked = set(inspect.signature(own).parameters)
    if is_dataclass(own):
        asked -= {field.name for field in fields(own) if not field.repr}  # for our own use
    if "options" in told:
        asked -= set(OnSampled.__annotations__)
    if "All that :func:`sample` takes by name" in docstring:
        asked -= set(inspect.signature(dfac.sample).parameters)
        told |= set(re.findall(r"``(\w+)``", docstring))
    return asked - told


def test_every_parameter_is_described():
    assert {name: one for name in NAMES if (one := undocumented(found(name)))} == {}

    def documented(one, two):
        """Add.

        Parameters
        ----------
        one, two : int
            Numbers.

        Notes
        -----
        None.
        """

    def lacking(one, two, three): ...

    assert undocumented(documented) == set()
    lacking.__doc__ = documented.__doc__
    assert undocumented(lacking) == {"three"}


def test_what_is_wrong_with_a_site_is_found(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import check

    (tmp_path / "here.png").touch()
    (tmp_path / "other.html").write_text('<h1 id="there">')
    fine = '<a href="https://elsewhere.example">, <a href="other.html#there">, <img src="here.png">'
    for wrong in (
        "",
        '<script src="https://elsewhere.example/a.js"></script>',
        '<link rel="stylesheet" href="//elsewhere.example/a.css">',
        '<img src="here.png" srcset="http://elsewhere.example/b.png 2x">',
        '<p style="background: url(https://elsewhere.example/c.png)">',
        '<style>@import "https://elsewhere.example/d.css";</style>',
        '<script>fetch("https://elsewhere.example/e")</script>',
        '<img src="gone.png">',
        '<a href="gone.html">',
        '<a href="#gone">',
        '<a href="other.html#gone">',
    ):
        (tmp_path / "index.html").write_text(fine + wrong)
        assert len(check.check(tmp_path)) == bool(wrong), wrong
    (tmp_path / "index.html").write_text(fine)
    (tmp_path / "own.css").write_text("@font-face { src: url(//elsewhere.example/f.woff2) }")
    assert len(check.check(tmp_path)) == 1
    sys.modules.pop("check")
