"""The table of what ran on an accelerator: parts that pass, fail, hang or cannot run, on a machine without one."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ci import gpu_parts, gpu_table
from ci.gpu_parts import Machine, Part, Result, Share, by_capture, by_report, by_sanitizer, by_status, by_verify

HERE = Machine("cpu", ["A device", "A device"], "1.2", "3.11", {"torch": "2.13"}, sanitizer=False, workers=False)
SLEEPER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"


def part(name: str, script: str, seconds: float = 60.0, **more) -> Part:
    return Part(name, "", seconds, lambda _: [[sys.executable, "-c", script]], by_status, **more)


PARTS = {
    one.name: one
    for one in (
        part("good", "print('all is well')"),
        part("bad", "print('it broke'); raise SystemExit(3)"),
        part("hangs", SLEEPER, seconds=1.0, share=Share.MACHINE),
        part("cannot", "raise SystemExit(4)", missing="no such tool"),
    )
}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(gpu_table, "machine", lambda backend, environment: HERE)
    monkeypatch.setattr(gpu_table, "parts", lambda here: PARTS)

    def run(*arguments: str) -> tuple[int, str, str]:
        file = tmp_path / "results" / "table.md"
        code = gpu_table.main(["--logs", str(tmp_path), "--output", str(file), "--commit", "abc", *arguments])
        return code, capsys.readouterr().out, file.read_text() if file.exists() else ""

    return run


def test_one_table_at_the_end_and_the_same_in_a_file(table) -> None:
    began = time.monotonic()
    code, said, file = table("--jobs", "2")
    assert code == 1 and time.monotonic() - began < 60, "what hangs is ended, with what it started"
    rows = [line.split() for line in said[said.index("suite") :].splitlines()[1:5]]
    assert [row[:4] for row in rows] == [
        ["good", "1", "0", "0"],
        ["bad", "0", "1", "0"],
        ["hangs", "0", "1", "0"],
        ["cannot", "0", "0", "0"],
    ]
    assert "2 x A device" in file and "commit abc" in file and "Driver 1.2" in file and "torch 2.13" in file
    assert [line.split()[1] for line in file.splitlines() if line.startswith("| ")][1:] == list(PARTS)
    assert "| good | 1 | 0 | 0 | " in file and "| all is well |" in file and "did not end within 1 s" in file
    assert "| cannot | 0 | 0 | 0 | 0 | not run: no such tool |" in file


def test_parts_are_chosen_by_name_and_a_good_one_is_enough(table) -> None:
    code, said, file = table("--only", "good,cannot")
    assert code == 0 and "| good |" in file and "| bad |" not in file and "it broke" not in said
    assert table("--only", "cannot")[0] == 1, "nothing ran: nothing was shown"
    assert table("--only", "gone")[0] == 2 and table("--jobs", "0")[0] == 2


def test_no_part_begins_behind_the_deadline(table) -> None:
    code, _, file = table("--only", "good", "--deadline", "0")
    assert code == 1 and "the deadline had passed" in file


def test_the_real_parts_say_why_they_cannot_run() -> None:
    alone = gpu_parts.parts(Machine("cuda", ["A"], "", "", {}, sanitizer=False, workers=True))
    two = gpu_parts.parts(HERE)
    assert list(alone) == list(two) and len(two) == 14
    assert "there are 1" in alone["ranks-verify"].missing and not two["ranks-verify"].missing
    assert "no compute-sanitizer" in alone["memcheck"].missing and "--virtual" in str(alone["stress"].commands(Path()))
    assert "--virtual" not in str(two["stress"].commands(Path())) and "cuda, not cpu" in two["probes"].missing
    assert not alone["verify-on"].missing and "-n" in alone["gpu"].commands(Path("r"))[0]


def test_ranks_of_the_suite_run_apart_from_the_rest() -> None:
    found = gpu_parts.parts(HERE)
    (ranked,) = found["conformance-ranks"].commands(Path("r"))
    files = [one for one in ranked if "conformance/" in one]
    assert len(files) >= 7 and all(re.search("/test_(collective|arena|exchange)_", one) for one in files)
    assert sum("--ignore-glob" in one for one in found["conformance"].commands(Path("r"))[0]) == 3


def test_parts_get_a_device_of_their_own_or_all(monkeypatch: pytest.MonkeyPatch, table) -> None:
    """Two parts that want a device each are given different ones at the same time; a third waits; a last sees both."""
    said = "import os; print(os.environ.get('CPU_VISIBLE_DEVICES'))"
    wanted = {"a": Share.DEVICE, "b": Share.DEVICE, "c": Share.SHARED, "d": Share.MACHINE}
    monkeypatch.setattr(gpu_table, "parts", lambda here: {n: part(n, said, share=share) for n, share in wanted.items()})
    code, _, file = table()
    rows = {cells[1]: cells[6] for line in file.splitlines()[6:] if (cells := [one.strip() for one in line.split("|")])}
    assert code == 0 and {rows["a"], rows["b"]} <= {"0", "1"} and rows["c"] == "0" and rows["d"] == "None"


def test_results_are_read_from_what_parts_leave(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert by_report("collected nothing", 4, report) == Result(
        0, 1, 0, 0.0, "left no report, ended with status 4: collected nothing"
    )
    report.write_text(json.dumps({"counts": {"passed": 5, "failed": 1, "error": 2, "skipped": 3}}))
    assert by_report("", 1, report) == Result(5, 3, 3, 0.0, "")
    report.write_text(json.dumps({"counts": {"passed": 5}}))
    assert by_report("internal error", 3, report).failed == 1
    assert by_sanitizer("========= ERROR SUMMARY: 0 errors", 0, report) == Result(5, 0, 0, 0.0, "0 errors")
    assert by_sanitizer("nothing", 0, report).failed == 1
    cases = {"cases": [{"case": "a", "passed": True}, {"case": "b", "passed": False}]}
    assert by_verify("warning\n" + json.dumps(cases, indent=2), 1, report) == Result(
        1, 1, 0, 0.0, "beyond tolerance: b"
    )
    assert by_verify("refused", 2, report).failed == 1
    captured = {"order": "descending", "captured": 1, "descriptors": [{}], "pool_growth": 0, "total_bytes": 7}
    assert by_capture(json.dumps(captured), 0, report) == Result(1, 0, 0, 0.0, "descending: 7 bytes")
    assert by_capture(json.dumps({**captured, "pool_growth": 1}), 0, report).failed == 1
    assert by_capture(json.dumps({**captured, "captured": 0}), 0, report).failed == 1
    assert by_status("fine\n", 0, report) == Result(1, 0, 0, 0.0, "fine")


def test_halma_that_is_only_on_the_path_has_its_entry_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = gpu_table.discoverable(tmp_path / "unused", {"A": "1"})
    assert installed == {"A": "1"} and not (tmp_path / "unused").exists()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    found = gpu_table.discoverable(tmp_path, {"PYTHONPATH": "/elsewhere"})
    script = (
        "import importlib.metadata as m, json, sys; "
        "print(json.dumps(sorted(e.value for d in m.distributions(path=[sys.argv[1]]) for e in d.entry_points)))"
    )
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert {"halma.backends.cpu", "halma.backends.cuda", "halma.hal.testing.plugin"} <= set(json.loads(run.stdout))
    assert str(tmp_path) in found["PYTHONPATH"].split(":") and found["PYTHONPATH"].endswith("/elsewhere")
