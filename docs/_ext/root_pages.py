"""Let pages of the repository's root be pages of the site, and links between them stay links."""

import re
from typing import Any

from sphinx.application import Sphinx

PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
PAGES |= {"SECURITY.md": "security.md", "CODE_OF_CONDUCT.md": "conduct.md"}
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)*(?:docs/)?((?:[\w-]+/)*[\w.-]+\.md)(#[\w-]*)?\)")


def pointed(text: str, depth: int) -> str:
    """Point links at the pages of the site; what it has no page for becomes plain text."""

    def target(found: re.Match[str]) -> str:
        words, name, anchor = found[1], found[2], found[3] or ""
        if name == "README.md":
            return words
        return f"[{words}]({'../' * depth}{PAGES.get(name, name)}{anchor})"

    return LINK.sub(target, text)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Change what a page of the site itself says, where it names a page of the root."""
    if any(page in source[0] for page in (*PAGES, "README.md")) and "/" not in name:
        source[0] = pointed(source[0], 0)


def included(app: Sphinx, path: Any, name: str, source: list[str]) -> None:
    """Change what is included."""
    if str(path).endswith(tuple(PAGES)):
        source[0] = pointed(source[0], 0)


def setup(app: Sphinx) -> dict[str, Any]:
    """Listen to pages as they are read."""
    app.connect("source-read", read)
    app.connect("include-read", included)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
