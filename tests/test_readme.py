"""Every Python block of README.md runs, one after another, in one namespace."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.libraries

README = Path(__file__).parents[1] / "README.md"


def python_blocks() -> list[tuple[int, str]]:
    """Line number and text of every fenced block marked ``python``."""
    text = README.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(1)) + 1, match[1])
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]


def test_python_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks()
    assert blocks
    namespace: dict[str, object] = {"__name__": "readme"}
    for line, block in blocks:
        # Blank lines put the block on the line it has in README.md, so tracebacks point there.
        exec(compile("\n" * (line - 1) + block, str(README), "exec"), namespace)
