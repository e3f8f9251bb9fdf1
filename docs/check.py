"""Check the built site: nothing in it is asked of another host, and all links lead somewhere.

    python docs/check.py [docs/_build/html]

Links that a reader may click lead where they like; what a browser loads by itself has to be here.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = dict.fromkeys(("audio", "embed", "iframe", "img", "script", "source", "video"), ("src",))
LOADED |= dict.fromkeys(("image", "use"), ("href", "xlink:href")) | {"object": ("data",)}
"""Attributes by which an element loads something."""
NOT_LOADED = {"alternate", "author", "canonical", "license", "next", "prev", "search"}
"""Kinds of ``<link>`` that load nothing."""
REMOTE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?\s*((?:https?:)?//[^\s"')]+)""", re.IGNORECASE)
IN_SCRIPT = re.compile(
    r"""(?:\.src\s*=|\.href\s*=|\bfetch\(|\bimport\(|\bfrom|\bimport|importScripts\(|\.open\("GET",|\bload\()"""
    r"""\s*["'`]\s*((?:https?:)?//[^\s"'`]+)"""
)


class Page(HTMLParser):
    """What a page loads, where it links to, and what in it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors = {"", "top"}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what this element loads, links to, and is called."""
        given = {name: value or "" for name, value in attrs}
        self._inside = tag
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.loads += [given[name] for name in LOADED.get(tag, ()) if name in given]
        self.loads += [one.split()[0] for one in given.get("srcset", "").split(",") if one.strip()]
        self.loads += IN_STYLE.findall(given.get("style", ""))
        if tag == "link" and not set(given.get("rel", "").split()) & NOT_LOADED:
            self.loads.append(given.get("href", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        """Forget which element this was."""
        self._inside = ""

    def handle_data(self, data: str) -> None:
        """Look at styles and scripts within the page."""
        if self._inside == "style":
            self.loads += IN_STYLE.findall(data)
        if self._inside == "script":
            self.loads += IN_SCRIPT.findall(data)


def check(root: Path) -> list[str]:
    """Everything that is wrong with the site in a folder, a line each."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    # The theme leaves a template among its files.
    html = [one for one in files if one.suffix == ".html" and one.parent.name != "_static"]
    pages = {path: Page(path.read_text("utf-8")) for path in html}
    found = []
    for path in files:
        if path.suffix in (".css", ".js", ".mjs", ".svg"):
            pattern = IN_SCRIPT if path.suffix in (".js", ".mjs") else IN_STYLE
            loads = pattern.findall(path.read_text("utf-8"))
            found += [f"{path.relative_to(root)}: loads {one}" for one in loads]
    for path, page in pages.items():
        name = path.relative_to(root)
        found += [f"{name}: loads {one}" for one in page.loads if REMOTE.match(one)]
        local = [one for one in page.loads if one and not re.match(r"\s*(\w+:|//)", one)]
        found += [f"{name}: no {one}" for one in local if not target(root, path, one).exists()]
        found += [f"{name}: {why}" for one in page.links if (why := broken(root, path, one, pages))]
    return found


def target(root: Path, page: Path, link: str) -> Path:
    """Return the file that a link of a page points to."""
    path = unquote(urlsplit(link).path)
    place = root / path.lstrip("/") if path.startswith("/") else page.parent / path
    place = place.resolve() if path else page
    return place / "index.html" if place.is_dir() else place


def broken(root: Path, page: Path, link: str, pages: dict[Path, Page]) -> str:
    """Describe what is wrong with a link; the empty text if nothing is."""
    if re.match(r"\s*(\w+:|//)", link):
        return ""
    place, anchor = target(root, page, link), unquote(urlsplit(link).fragment)
    if not place.exists():
        return f"leads to {link}, which does not exist"
    if place in pages and anchor not in pages[place].anchors:
        return f"leads to {link}, where nothing has that name"
    return ""


if __name__ == "__main__":
    site = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "_build" / "html")
    if not (site / "index.html").exists():
        sys.exit(f"{site} has no index.html: build the site first")
    wrong = check(site.resolve())
    print("\n".join(wrong) or f"{site}: nothing is loaded from elsewhere, all links lead somewhere")
    sys.exit(bool(wrong))
