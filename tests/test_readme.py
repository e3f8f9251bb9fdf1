"""Every Python block of README.md runs, one after another, in one namespace."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.libraries

README = Path(__file__).parents[1] / "README.md"


BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


def python_blocks() -> list[tuple[int, str, str | None]]:
    """Return line number and text of every block marked ``python``, and what it says it prints."""
    text = README.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(1)) + 1, match[1], match[2])
        for match in BLOCK.finditer(text)
    ]


def test_python_blocks_run_in_order_and_print_what_stands_below(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks()
    assert blocks
    namespace: dict[str, object] = {"__name__": "readme"}
    assert any(printed for *_, printed in blocks)
    for line, block, printed in blocks:
        # Blank lines put the block on the line it has in README.md, so tracebacks point there.
        exec(compile("\n" * (line - 1) + block, str(README), "exec"), namespace)
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed is None or lines == printed.splitlines()
