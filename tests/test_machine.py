"""How much memory blocks may take."""

from types import SimpleNamespace

import psutil

from daskfactor import machine


def test_limits_in_words_and_numbers_or_half_of_what_is_free(monkeypatch):
    assert machine.memory_budget("2 GiB") == 2**31
    assert machine.memory_budget("1.5 MB") == 1_500_000
    assert machine.memory_budget(12) == 12
    assert machine.available_memory() > 0
    monkeypatch.setattr(machine, "available_memory", lambda: 1001)
    assert machine.memory_budget(None) == 500


def test_a_control_group_counts_with_those_above_it(tmp_path, monkeypatch):
    (tmp_path / "cgroup").write_text("12:cpu:/other\n0::/outer/inner\n")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=800 * 1024))
    monkeypatch.setattr(machine, "PROCESS_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert machine.available_memory() == 800 * 1024
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    for group, limit, used in ((inner, "max", 10), (inner.parent, "700000", 300_000)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 5\ninactive_file 1000\n")
    assert machine.available_memory() == 700_000 - 300_000 + 1000


def test_without_control_groups_the_machine_alone_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PROCESS_CGROUP", tmp_path / "nothing")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12))
    assert machine.available_memory() == 12
