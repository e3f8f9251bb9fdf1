"""Build the site: ``sphinx-build -W -b html docs docs/_build/html``, without a network."""

import daskfactor

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
]
exclude_patterns = ["_build", "**/generated/*.ipynb"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "amsmath"]
myst_heading_anchors = 3
nb_execution_mode = "cache"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
html_theme = "pydata_sphinx_theme"
html_title = "daskfactor"
html_static_path = ["_static"]
templates_path = ["_templates"]
