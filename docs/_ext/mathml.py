"""Write formulas as MathML, which browsers show by themselves, without a script.

The font, which has roots and braces of all sizes, is a copy of the one that ziamath ships.
Docutils has the converter. It knows no old commands for fonts and sizes: those that our pages
use are put in words that it knows.
"""

import re
import shutil
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

WORDS = [
    (r"\\dots(?![a-z])", r"\\ldots"),
    (r"\\textstyle\s*", ""),
    (r"\{\\rm\s+([^{}]*)\}", r"\\mathrm{\1}"),
    (r"_\\rm\s+(\w+)", r"_{\\mathrm{\1}}"),
    (r"\\([Bb]igg?)(?![a-z])", r"\\\1l"),
    (r"\\dfrac(\d)(\d)", r"\\frac{\1}{\2}"),
    (r"\\dfrac", r"\\frac"),
    (r"\\(begin|end)\{(?:align|equation|gather)\*?\}", r"\\\1{aligned}"),
]
"""What is written for what, in this order."""
BAR = re.compile(r"<mo( class=.\w+.)?>([‖∥∣])</mo>")
"""A bar that browsers would stretch, on one side of what it encloses and not on the other."""
FONT = "STIXTwoMath-Regular.ttf"
log = logging.getLogger(__name__)


def converted(node: nodes.Element, display: bool) -> str:
    """MathML of a formula; of one that is wrong its text, with a warning."""
    latex = node.astext()
    for old, new in WORDS:
        latex = re.sub(old, new, latex)
    if display and r"\\" in latex and r"\begin" not in latex:
        latex = rf"\begin{{aligned}}{latex}\end{{aligned}}"
    try:
        return BAR.sub(r"<mo stretchy='false'\1>\2</mo>", tex2mathml(latex, as_block=display))
    except MathError as error:
        log.warning("formula %r: %s", node.astext(), error, location=node, type="mathml")
        return f"<code>{escape(node.astext())}</code>"


def inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Put a formula into its line."""
    translator.body.append(converted(node, display=False))
    raise nodes.SkipNode


def display(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Give a formula lines of its own, and its number, if it has one."""
    anchor = f' id="{node["ids"][0]}"' if node.get("ids") else ""
    number = f'<span class="eqno">({node["number"]})</span>' if node.get("number") else ""
    formula = converted(node, display=True)
    translator.body.append(f'<div class="math"{anchor}>{formula}{number}</div>\n')
    raise nodes.SkipNode


def copy_font(app: Sphinx, error: Exception | None) -> None:
    """Put the font of formulas beside the styles, which name it."""
    if error is None and app.builder.format == "html":
        font = files("ziamath") / "fonts" / FONT
        shutil.copyfile(str(font), Path(app.outdir) / "_static" / FONT)


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer under the name ``mathml``."""
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    app.connect("build-finished", copy_font)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
