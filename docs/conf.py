"""Build the site: ``sphinx-build -W -b html docs docs/_build/html``, without a network."""

import re
import sys
from pathlib import Path
from typing import Any

import daskfactor

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "daskfactor"
author = "daskfactor developers"
copyright = "daskfactor developers"  # noqa: A001 -- Sphinx's own name
release = version = daskfactor.__version__

extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
    "gallery",
    "mathml",
    "root_pages",
]
exclude_patterns = ["_build", "**/generated/*.ipynb"]
templates_path = ["_templates"]
default_role = "py:obj"

# -- pages in Markdown -----------------------------------------------------------------------
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_update_mathjax = False
nb_execution_in_temp = True  # pages write files, and find nothing of an earlier build
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
copybutton_exclude = ".linenos, .gp, .go"

# -- pages of the API ------------------------------------------------------------------------
autosummary_generate = True
autodoc_typehints = "signature"
toc_object_entries_show_parents = "hide"
python_maximum_signature_line_length = 80
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
METHODS = {
    "AllocationModel": ["cp", "nmf", "symmetric_nmf", "topics", "tucker"],
    "BayesianNMF": [
        *("fit", "fit_transform", "inverse_transform", "sample_transform", "score", "transform"),
        "get_feature_names_out",
    ],
}
"""Methods that users call, of the classes that have such."""
autosummary_context = {"methods_of": METHODS}

# -- what it looks like ----------------------------------------------------------------------
html_math_renderer = "mathml"
html_theme = "pydata_sphinx_theme"
html_title = "daskfactor"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "show_prev_next": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
html_sidebars = {"*": []}  # pages outside of folders have no section of their own


def plain_types(
    app: Any, what: str, name: str, own: Any, options: Any, signature: str | None, returned: Any
) -> tuple[str | None, Any]:
    """Give back its name to a type that is only known by its parts by now."""
    parts = r"_Buffer \|.*?_NestedSequence\[complex \| bytes \| str\]"
    return signature and re.sub(parts, "ArrayLike", signature), returned


def setup(app: Any) -> None:
    """Listen to signatures as they are written."""
    app.connect("autodoc-process-signature", plain_types)
