"""How much memory blocks may take."""

from pathlib import Path

import pytest

from daskfactor.data import memory


def test_limits_in_words_and_numbers() -> None:
    assert memory.memory_budget("2 GiB") == 2**31
    assert memory.memory_budget("1.5 MB") == 1_500_000
    assert memory.memory_budget(12) == 12


def test_the_default_is_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memory.available_memory() > 0
    monkeypatch.setattr(memory, "available_memory", lambda: 1001)
    assert memory.memory_budget(None) == 500


def test_a_control_group_counts_with_those_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cgroup").write_text("12:cpu:/other\n0::/outer/inner\n")
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    monkeypatch.setattr(memory, "OWN_GROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.available_memory() == 800 * 1024
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for group, limit, used in ((inner, "max", 10), (inner.parent, "700000", 300_000)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    assert memory.available_memory() == 700_000 - 300_000 + 1000


def test_systems_without_proc_are_asked_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OWN_GROUP", "MEMINFO"):
        monkeypatch.setattr(memory, name, tmp_path / "nothing")
    assert memory.available_memory() > 2**20
