"""Self-contained HTML for notebooks, and text without control characters.

The HTML escapes all text, is legible on light and dark pages, whose text color it inherits, and
loads no resources.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

COLORS: Final = {"green": "#2f9e44", "amber": "#e08a00", "red": "#e03131", "none": "#868e96"}
"""Colors of lights, which stand out on white and on black; each light also names its status."""

LINE: Final = "1px solid rgba(128,128,128,.35)"
CELL: Final = "padding:.15em .8em .15em 0;vertical-align:top;background:none;text-align:"


CONTROLS: Final = {
    at: f"\\u{at:04x}" for at in (*range(32), *range(127, 160)) if chr(at) not in "\n\t"
}
"""Control characters and their escape sequences, which JSON reads, too."""


def visible(text: str) -> str:
    """Escape control characters, which labels from files may contain."""
    return text.translate(CONTROLS)


def table(
    rows: Iterable[Sequence[object]], head: Sequence[str] = (), numbers: Sequence[int] = ()
) -> str:
    """Return an HTML table; cells of `Markup` stay unchanged, all others are escaped.

    Parameters
    ----------
    rows
        Rows of cells: text, or `Markup`.
    head
        Titles of the columns.
    numbers
        Positions of the columns that are aligned right.
    """

    def line(cells: Sequence[object], tag: str, style: str = "") -> str:
        alignments = ("right" if n in numbers else "left" for n in range(len(cells)))
        columns = (
            f'<{tag} style="{CELL}{alignment}{style}">{to_html(cell)}</{tag}>'
            for alignment, cell in zip(alignments, cells, strict=True)
        )
        return f'<tr style="background:none">{"".join(columns)}</tr>'

    top = line(head, "th", f";border-bottom:{LINE}") if head else ""
    body = "".join(line(row, "td") for row in rows)
    return f'<table style="border-collapse:collapse;border:none;margin:.3em 0">{top}{body}</table>'


class Markup(str):
    """Text that is already HTML."""

    __slots__ = ()


def to_html(value: object) -> str:
    """Return a value as HTML."""
    return value if isinstance(value, Markup) else escape(str(value))


def light(status: str) -> Markup:
    """Return a colored dot followed by its status."""
    dot = f'<span style="color:{COLORS[status]}">&#9679;</span>'
    return Markup(f'<span style="white-space:nowrap">{dot} <b>{escape(status)}</b></span>')


def bar(share: float | None) -> Markup:
    """Return a bar that is filled to a share; an unknown share fills it faintly."""
    width = 100.0 if share is None else 100.0 * min(max(share, 0.0), 1.0)
    faint = ";opacity:.35" if share is None else ""
    inner = f"width:{width:.1f}%;height:100%;background:#3b82c4{faint}"
    outer = f"width:9em;height:.7em;margin-top:.35em;border:{LINE};border-radius:.2em"
    return Markup(f'<div style="{outer};overflow:hidden"><div style="{inner}"></div></div>')


def collapsible(title: str, inside: str) -> str:
    """Return a section that opens when its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def paragraphs(lines: Iterable[str]) -> str:
    """Return lines of text, one paragraph each."""
    return "".join(f'<div style="margin:.15em 0">{escape(line)}</div>' for line in lines)


def titled(title: str, *parts: str) -> str:
    """Return a box with a title."""
    return f"<div><b>{escape(title)}</b>{''.join(parts)}</div>"


def verbatim(text: str) -> str:
    """Return monospaced text that keeps its line breaks."""
    style = "font-family:monospace;background:none;color:inherit;margin:.3em 0"
    return f'<pre style="{style}">{escape(text)}</pre>'
