"""Threads of a command: what the process may use, what the user asks for, and a note about busy cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from radq.cli import main
from radq.commands.console import CoreTimes, describe_contention, limit_threads, read_quota, usable_cores


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_smallest_quota_of_nested_groups_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("1:name=systemd:/elsewhere\n0::/slice/job\n")
    root = tmp_path / "fs"
    assert read_quota(root, own) == float("inf")
    write(root / "slice/job/cpu.max", "max 100000\n")
    assert read_quota(root, own) == float("inf")
    write(root / "slice/cpu.max", "150000 100000\n")
    assert read_quota(root, own) == 1.5
    write(root / "cpu.max", "400000 100000\n")
    assert read_quota(root, own) == 1.5
    write(tmp_path / "cpu.max", "1 100000\n")  # outside the groups
    assert read_quota(root, own) == 1.5


def test_quotas_of_the_first_version_and_of_no_version(tmp_path: Path) -> None:
    root, missing = tmp_path / "fs", tmp_path / "none"
    assert read_quota(missing, missing) == float("inf")
    for quota, cores in (("-1", float("inf")), ("50000", 0.5), ("nonsense", float("inf"))):
        write(root / "cpu/cpu.cfs_quota_us", quota)
        write(root / "cpu/cpu.cfs_period_us", "100000")
        assert read_quota(root, missing) == cores


def test_who_decides_on_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radq.commands.console.read_quota", lambda: 1.9)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert usable_cores() == 1
    for asked, given, expected in ((None, None, "1"), (None, "6", "6"), ("3", "6", "3"), ("3", None, "3")):
        monkeypatch.delenv("RADQ_THREADS", raising=False)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if asked is not None:
            monkeypatch.setenv("RADQ_THREADS", asked)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        limit_threads()
        assert os.environ["OMP_NUM_THREADS"] == expected
    monkeypatch.setattr("radq.commands.console.read_quota", lambda: float("inf"))
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.delenv("RADQ_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    limit_threads()
    assert "OMP_NUM_THREADS" not in os.environ  # torch's own default is right


@pytest.mark.parametrize("number", ["0", "-1", "two", "1.5", "٣", "9999999"])
def test_numbers_that_are_none(
    number: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RADQ_THREADS", number)
    assert main(["report", "nowhere"]) == 2
    assert "RADQ_THREADS must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(("asked", "number"), [("1", 1), ("2", 2)])
def test_python_heeds_the_number_too(asked: str, number: int) -> None:
    program = "import torch; torch.set_num_threads(3); import radq; radq.load; print(torch.get_num_threads())"
    found = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"RADQ_THREADS": asked}, capture_output=True, text=True
    )
    assert (found.stdout.strip(), found.stderr) == (str(number), "")


def test_a_note_says_when_fewer_threads_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    before = CoreTimes(clock=10.0, idle=100.0, own=1.0)
    idle = CoreTimes(clock=12.0, idle=106.0, own=3.0)  # 3 idle cores, and the one of this process
    assert describe_contention(before, idle) is None
    busy = CoreTimes(clock=12.0, idle=102.0, own=3.0)  # 1 idle core
    assert "RADQ_THREADS=2 " in (describe_contention(before, busy) or "")
    full = CoreTimes(clock=12.0, idle=100.0, own=1.2)
    assert "RADQ_THREADS=1 " in (describe_contention(before, full) or "")
    assert describe_contention(None, full) is None
    assert describe_contention(before, before) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert describe_contention(before, full) is None
