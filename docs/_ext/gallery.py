"""Write a page for each script of ``examples``: its docstring, its command, its text.

The scripts are shown and not executed here; ``tests/test_examples.py`` runs each of them.
"""

import ast
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

INDEX = """# Examples

Scripts that you can run as they are; `pip install 'daskfactor[examples]'` brings what they need.
Each makes its data up unless you give it a file, prints what it found, and draws a picture.

```{{toctree}}
:maxdepth: 1

{pages}
```
"""
PAGE = """# {title}

{description}

```{{literalinclude}} {script}
:language: python
:start-at: {start}
```
"""


def described(script: Path) -> tuple[str, str, str]:
    """Title and description in a script's docstring, and the first line of its code."""
    tree = ast.parse(script.read_text("utf-8"))
    first, _, text = (ast.get_docstring(tree) or script.stem).partition("\n")
    title = re.split(r"(?<=\?) |[:,(]", first.rstrip("."))[0].strip()  # short, for the navigation
    text = text if title == first.rstrip(".") else f"{first}\n{text}"
    # What is indented is a command; two backquotes are code in either language.
    text = re.sub(r"(?:^ {4,}.*\n?)+", fenced, text, flags=re.MULTILINE)
    lines = script.read_text("utf-8").splitlines()
    return title, text.strip(), lines[tree.body[1].lineno - 1]


def fenced(found: re.Match[str]) -> str:
    """Return an indented command as a shell block."""
    command = re.sub(r"^ {4}", "", found[0], flags=re.MULTILINE)
    return f"```sh\n{command.rstrip()}\n```\n"


def write(app: Sphinx) -> None:
    """Write the pages to ``gallery``, those that changed."""
    folder = Path(app.srcdir) / "gallery"
    folder.mkdir(exist_ok=True)
    scripts = sorted((Path(app.srcdir).parent / "examples").glob("*.py"))
    pages = {"index.md": INDEX.format(pages="\n".join(script.stem for script in scripts))}
    for script in scripts:
        title, description, start = described(script)
        pages[f"{script.stem}.md"] = PAGE.format(
            title=title,
            description=description,
            script=f"../../examples/{script.name}",
            start=start,
        )
    for page in folder.glob("*.md"):
        if page.name not in pages:
            page.unlink()
    for name, text in pages.items():
        page = folder / name
        if not page.exists() or page.read_text("utf-8") != text:
            page.write_text(text, "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Write before Sphinx looks for pages."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
