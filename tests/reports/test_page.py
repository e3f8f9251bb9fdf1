"""The page about a run: whole, true to its numbers, safe, and alone in the world."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import xarray as xr

import daskfactor as dfac
from daskfactor.errors import OptionError
from tests.fake_run import fake_run
from tests.refusals import refused
from tests.results.particle_tree import particle_tree

NASTY = [f'<b>row & "{i}"</b><script>alert({i})</script>' for i in range(12)]


class Outline(HTMLParser):
    """Tags, attributes and text of a page; a tag that is left open or closed twice fails."""

    VOID = frozenset({"meta", "link", "img", "source", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.open = [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [tag] if tag not in self.VOID else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += [data.strip()] if data.strip() and self.open[-1] != "style" else []

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


@pytest.fixture(scope="module")
def trace():
    rng = np.random.default_rng(0)
    W, H = rng.gamma(0.5, 2.0, (30, 2)), rng.gamma(0.5, 2.0, (2, 14))
    V = xr.DataArray(
        rng.poisson(W @ H).astype(float),
        {"wave": ("wave", np.linspace(0.4, 2.5, 14), {"units": "nm"})},
        ("site", "wave"),
        attrs={"long_name": "radiance", "units": "W m-2"},
    )
    held = dfac.hold_out(V, random_seed=0)
    options = {"draws": 30, "tune": 30, "chains": 2, "random_seed": 0, "progressbar": False}
    return dfac.sample(held.train, dfac.TweedieNMF(2), monitor=held.cells, **options), held


@pytest.fixture(scope="module")
def page(trace):
    numbers = {"log_evidence": [-9.5, -4.25], "standard_error": [0.1, 0.2]}
    numbers["discretization_error"] = [0.0, 0.0]
    table = xr.Dataset({name: ("rank", own) for name, own in numbers.items()}, {"rank": [1, 2]})
    table.attrs = {"best": 2, "not_distinguishable": [], "at_edge": "highest"}
    return dfac.report(trace[0], held_out=trace[1], evidence=table, title="Spectra").html


def test_the_page_asks_no_server_and_runs_nothing(page):
    outline = Outline(page)
    assert not outline.of("script")
    keys = ("src", "href", "srcset")
    linked = [own[key] for _, own in outline.tags for key in keys if key in own]
    assert linked
    assert all(re.match(r"data:|#", one) for one in linked)
    assert not any(word in page for word in ("http:", "https:", "url(", "@import"))
    assert not any(key.startswith("on") for _, own in outline.tags for key in own)


def test_the_page_is_accessible(page):
    outline = Outline(page)
    assert outline.of("html")[0]["lang"] == "en"
    assert all(len(own["alt"]) > 20 for own in outline.of("img"))
    levels = [int(tag[1]) for tag, _ in outline.tags if re.fullmatch(r"h[1-6]", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert (np.diff(levels) <= 1).all()
    ids = [own["id"] for _, own in outline.tags if "id" in own]
    assert len(set(ids)) == len(ids)
    assert {own["href"][1:] for own in outline.of("a")} <= set(ids)
    assert len(outline.of("source")) == len(outline.of("img"))
    assert all("scope" in own for own in outline.of("th"))


def luminance(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_letters_stand_out_from_both_grounds(page):
    """WCAG 2.2, 1.4.3: 4.5 to 1."""
    sets = [dict(re.findall(r"--(\w+): (#\w+)", part)) for part in page.split(":root")[1:3]]
    assert len(sets) == 2
    for colors in sets:
        colors = {
            name: one if len(one) == 7 else "#" + "".join(2 * c for c in one[1:])
            for name, one in colors.items()
        }
        for ground in ("ground", "card"):
            for name in ("ink", "soft", "link", "green", "amber", "red", "none"):
                pair = sorted(luminance(colors[one]) for one in (name, ground))
                assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (name, ground)


def test_the_page_says_what_summaries_and_tables_say(trace, page):
    text, (tree, held) = " ".join(Outline(page).text), trace
    coverage = dfac.held_out_coverage(tree, held.cells, held.values)
    expected = ["30 site x 14 wave", "radiance [W m-2]", "wave [nm]: 0.4 to 2.5", "-4.25"]
    expected += [f"{float(coverage['inside'].sel(level=0.9)):.1%}", "try ranks beyond it"]
    expected += [f"{float(dfac.component_swaps(tree)['matched'][0, 0]):.1%}"]
    for light in dfac.summarize(tree).lights.values():
        expected += [*light.reasons, light.advice]
    assert [words for words in expected if words not in text] == []


def test_labels_are_text_whatever_they_look_like():
    def labelled(group):
        return group.assign_coords(row=NASTY) if "row" in group.dims else group

    tree = fake_run().map_over_datasets(labelled)
    tree.attrs["data"] = json.dumps(json.loads(tree.attrs["data"]) | {"long_name": "a < b & c"})
    found = dfac.report(tree, title="<i>x</i>")
    outline = Outline(found.html)
    assert not any(outline.of(tag) for tag in ("script", "b", "i"))
    text = " ".join(outline.text)
    assert NASTY[3] in text
    assert "a < b & c" in text
    assert "<script>" not in re.sub(r'srcdoc="[^"]*"', "", found._repr_html_())


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        (fake_run(keep="moments"), 'run again with keep="draws"'),
        (fake_run(chains=1), "of the draws"),
        (particle_tree(), "particles have positive weight"),
    ],
    ids=["moments", "chain", "particles"],
)
def test_every_kind_of_run_has_a_page_that_is_written_as_a_page(tree, told, tmp_path):
    path = tmp_path / "run.html"
    made = dfac.report(tree, path)
    text = " ".join(Outline(made.html).text)
    assert told in text
    assert "Held-out values" not in text
    assert path.read_text(encoding="utf-8") == made.html
    refused(OptionError, r"must end in \.html, got .*run\.pdf", made.save, tmp_path / "run.pdf")
    assert "MB" in repr(made)


def test_what_a_report_refuses():
    for options, told in (
        ({"held_out": 3}, "a result of hold_out"),
        ({"held_out": (([0], [1, 2]), [3.0])}, "1 rows, 2 columns and 1 values"),
        ({"evidence": 3}, "select_rank"),
    ):
        refused(OptionError, told, dfac.report, fake_run(chains=1), **options)
