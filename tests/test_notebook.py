"""What a notebook shows: progress, results as HTML, figures once; with and without widgets."""

import re

import numpy as np
import pytest
import xarray as xr

import daskfactor as dfac
from daskfactor import markup
from tests.reports.test_page import Outline
from tests.results.test_summary import run
from tests.tiers import tiered

CELLS = """
import warnings
import numpy as np
import daskfactor as dfac
from tests.tiers import tiered
warnings.simplefilter("error", UserWarning)
{before}
---
V = np.random.default_rng(0).poisson(3.0, (20, 15)).astype("float32")
trace = dfac.sample(V, dfac.TweedieNMF(2), dfac.Gibbs(), draws=40, tune=20, random_seed=0)
---
dfac.summarize(trace)
---
dfac.plots.components(trace)
---
dfac.estimate_cost(V, dfac.TweedieNMF(2))
---
dfac.hold_out(V, 0.1, random_seed=0)
"""
WITH_WIDGETS = "import ipywidgets, matplotlib.pyplot"
WITHOUT_WIDGETS = "import sys; sys.modules['ipywidgets'] = None"


def executed(tmp_path, monkeypatch, before):
    """Outputs of every cell."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    if before == WITH_WIDGETS:
        pytest.importorskip("ipywidgets")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    texts = CELLS.format(before=before).strip().split("\n---\n")
    cells = [nbformat.v4.new_code_cell(text) for text in texts]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return [cell.outputs for cell in notebook.cells]


@pytest.mark.slow
@pytest.mark.parametrize("before", tiered([WITH_WIDGETS, WITHOUT_WIDGETS], WITH_WIDGETS.__eq__))
def test_a_notebook_shows_each_thing_once(tmp_path, monkeypatch, before):
    nothing, progress, *rest = executed(tmp_path, monkeypatch, before)
    assert nothing == []
    (shown,) = progress  # one display, no warnings
    assert re.findall(r"tune|draw", shown["data"]["text/plain"]) == ["tune", "draw"]
    assert shown["data"]["text/plain"].count("100 %") >= 2
    assert "width:100.0%" in shown["data"]["text/html"]
    texts = ("predictions", "", "Cost of the run", "30 cells")
    for (one,), text in zip(rest, texts, strict=True):
        assert text in one["data"]["text/html" if text else "image/png"]


def whole(text):
    """Check that HTML is closed, and that nothing is loaded or run."""
    seen = {name for tag, own in Outline(text).tags for name in (tag, *own)}
    assert not seen & {"script", "link", "img", "iframe", "src", "href", "onclick"}
    return text


def test_results_are_html_that_stands_alone():
    found = dfac.summarize(run(draws=100))
    text = whole(found._repr_html_())
    assert text.count("&#9679;") == 4  # a dot for each light, and its word
    assert all(f"<b>{light.status}</b>" in text for light in found.lights.values())
    assert "xr-" in found[["rhat"]]._repr_html_()
    V = np.random.default_rng(0).poisson(3.0, (20, 15)).astype("float32")
    assert "peak" in whole(dfac.estimate_cost(V, dfac.TweedieNMF(2))._repr_html_())
    held = dfac.hold_out(V, 0.1, random_seed=0)
    assert "30 cells" in whole(held._repr_html_())
    assert "train   ndarray 20 x 15" in repr(held)
    trace = xr.Dataset({"<b>": ("t", [1.0, 2.0])})
    assert "&lt;b&gt;" in whole(dfac.Evidence(-3.0, 0.1, 0.0, trace)._repr_html_())


def test_markup_escapes_what_it_did_not_make():
    text = whole(markup.table([("<i>", markup.light("red"))], head=("a & b", "")))
    assert "&lt;i&gt;" in text
    assert "a &amp; b" in text
    assert "<script>" not in markup.titled("<script>", markup.paragraphs(["<script>"]))
    assert "width:0.0%" in markup.bar(-1.0)
    assert "opacity" in markup.bar(None)
