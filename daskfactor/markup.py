"""Small self-contained HTML for notebooks: legible on light and on dark, everything escaped.

And text for people, without characters that a terminal obeys.

Text has the page's own colour, and lines are shades of it; nothing is loaded from anywhere.
"""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

COLORS: Final = {"green": "#2f9e44", "amber": "#e08a00", "red": "#e03131", "none": "#868e96"}
"""Of lights; each stands out on white and on black, and its word is written beside it."""

LINE: Final = "1px solid rgba(128,128,128,.35)"
CELL: Final = "padding:.15em .8em .15em 0;vertical-align:top;background:none;text-align:"


CONTROLS: Final = {
    at: f"\\u{at:04x}" for at in (*range(32), *range(127, 160)) if chr(at) not in "\n\t"
}
"""Characters that a terminal obeys, and how they are written; JSON reads the same."""


def visible(text: str) -> str:
    """Write control characters, which labels of files may have, as their numbers."""
    return text.translate(CONTROLS)


def table(
    rows: Iterable[Sequence[object]], head: Sequence[str] = (), numbers: Sequence[int] = ()
) -> str:
    """Lay cells out; markup made here stays as it is, all else is escaped.

    Parameters
    ----------
    rows
        Of cells: text, or `Markup`.
    head
        Titles of columns.
    numbers
        Positions of columns that are set to the right.
    """

    def line(cells: Sequence[object], tag: str, style: str = "") -> str:
        sides = ("right" if n in numbers else "left" for n in range(len(cells)))
        drawn = (
            f'<{tag} style="{CELL}{side}{style}">{marked(cell)}</{tag}>'
            for side, cell in zip(sides, cells, strict=True)
        )
        return f'<tr style="background:none">{"".join(drawn)}</tr>'

    top = line(head, "th", f";border-bottom:{LINE}") if head else ""
    body = "".join(line(row, "td") for row in rows)
    return f'<table style="border-collapse:collapse;border:none;margin:.3em 0">{top}{body}</table>'


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def marked(value: object) -> str:
    """HTML of a value."""
    return value if isinstance(value, Markup) else escape(str(value))


def light(status: str) -> Markup:
    """A coloured dot, and the word for it."""
    dot = f'<span style="color:{COLORS[status]}">&#9679;</span>'
    return Markup(f'<span style="white-space:nowrap">{dot} <b>{escape(status)}</b></span>')


def bar(share: float | None) -> Markup:
    """A bar that is filled to a share; of an unknown one, a line without end."""
    width = 100.0 if share is None else 100.0 * min(max(share, 0.0), 1.0)
    faint = ";opacity:.35" if share is None else ""
    inner = f"width:{width:.1f}%;height:100%;background:#3b82c4{faint}"
    outer = f"width:9em;height:.7em;margin-top:.35em;border:{LINE};border-radius:.2em"
    return Markup(f'<div style="{outer};overflow:hidden"><div style="{inner}"></div></div>')


def folded(title: str, inside: str) -> str:
    """What opens when its title is clicked on."""
    return f"<details><summary>{escape(title)}</summary>{inside}</details>"


def paragraphs(lines: Iterable[str]) -> str:
    """Sentences, a line each."""
    return "".join(f'<div style="margin:.15em 0">{escape(line)}</div>' for line in lines)


def titled(title: str, *parts: str) -> str:
    """All of it in one box under a title."""
    return f"<div><b>{escape(title)}</b>{''.join(parts)}</div>"


def verbatim(text: str) -> str:
    """Text whose columns stay where they are."""
    style = "font-family:monospace;background:none;color:inherit;margin:.3em 0"
    return f'<pre style="{style}">{escape(text)}</pre>'
