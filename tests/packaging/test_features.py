"""Result files and the table made of them: whole ones are shown, others refused with status 2."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci.features import PAGE, RESULTS, latest, main, page
from ci.results import ResultError, read
from ci.schema import load
from halma.cli import result as written
from halma.cli.conformance import conformance
from halma.cli.result import SCHEMA, digest, read_bench, result_document, write_result
from halma.hal.errors import RequestError
from halma.hal.testing.rules import Rule
from halma.hal.testing.suite import RuleResult, SuiteResult

pytestmark = pytest.mark.torchfree

Change = Callable[[dict[str, Any]], None]
HELD = {"verdict": "passed", "why": "", "passed": 3, "failed": 0, "skipped": 0}


def day(ahead: int) -> str:
    return (datetime.date.today() + datetime.timedelta(days=ahead)).isoformat()


def document(**changes: Any) -> dict[str, Any]:
    """A result that is in order, with its digest."""
    found: dict[str, Any] = {
        **{"schema": SCHEMA, "backend": "cpu", "evidence": "cpu", "simulated": False, "date": "2026-11-30"},
        **{"halma": "0.1.0", "commit": None, "python": "3.11.7", "machine": "Linux x86_64"},
        **{"packages": {"torch": "2.13.0"}, "settings": {}, "device": {"name": "a processor"}},
        **{"capabilities": {"graph_capture": True, "ipc": "unknown", "warp_width": 32, "triton_target": None}},
        **{"conforms": True, "broken": None, "other_failures": [], "rules": {"G1": HELD, "C1": HELD}, "bench": None},
        **changes,
    }
    return {**found, "digest": digest(found)}


SIMULATED: dict[str, Any] = {
    **{"backend": "musa", "evidence": "simulated", "simulated": True, "settings": {"HALMA_MUSA_SIM": "cpu"}},
    "device": {"name": "a stand-in", "simulated": "tensors of the CPU"},
}
HARDWARE: dict[str, Any] = {
    **{"backend": "musa", "evidence": "musa", "packages": {"torch": "2.7.1", "torch_musa": "2.7.1"}},
    "device": {"name": "MTT S5000"},
}


def put(folder: Path, data: Any, name: str = "one.json") -> Path:
    path = folder / name
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    return path


@pytest.mark.invariant("T5", control=True)
@pytest.mark.parametrize(
    "changes", [{}, SIMULATED, HARDWARE, {"date": day(1)}], ids=["cpu", "simulated", "musa", "where tomorrow has begun"]
)
def test_a_result_in_order_is_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = read(put(tmp_path, document(**changes)))
    assert found.evidence == changes.get("evidence", "cpu")


FALSE_CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "simulated marked musa": (
        {**SIMULATED, "evidence": "musa"},
        "simulated is true, HALMA_MUSA_SIM was set, the device",
    ),
    "the setting alone": ({**HARDWARE, "settings": {"HALMA_MUSA_SIM": "cuda"}}, "HALMA_MUSA_SIM was set"),
    "the device alone": ({**HARDWARE, "device": {"simulated": "yes"}}, "the device calls itself simulated"),
    "no torch_musa": ({**HARDWARE, "packages": {"torch": "2.7.1"}}, "torch_musa was not installed"),
    "cpu marked cuda": ({"evidence": "cuda"}, "evidence 'cuda' cannot come from the backend 'cpu'"),
    "cuda marked musa": ({**HARDWARE, "backend": "cuda"}, "evidence 'musa' cannot come from the backend 'cuda'"),
    "a stranger marked musa": ({**HARDWARE, "backend": "npu"}, "belongs to our own backends"),
    "hearsay": ({"evidence": "hearsay"}, "evidence 'hearsay' cannot come"),
    "not simulated": ({**HARDWARE, "evidence": "simulated"}, "does not say that it stands in"),
}


@pytest.mark.invariant("T5")
@pytest.mark.parametrize("name", list(FALSE_CLAIMS))
def test_evidence_that_the_backend_cannot_have_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, said = FALSE_CLAIMS[name]
    output = tmp_path / "features.md"
    assert main([str(put(tmp_path, document(**changes)))], output=output) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


WRONG: dict[str, tuple[Any, str]] = {
    "cut short": (json.dumps(document())[:-40], "no whole JSON document, perhaps cut short"),
    "empty": ("", "no whole JSON document"),
    "another version": (document(schema="halma.result/2"), "its schema is 'halma.result/2', this checkout reads"),
    "another document": ({"schema": "halma.bench/1"}, "its schema is 'halma.bench/1'"),
    "a list": ([1], "its schema is 'list'"),
    "incomplete": ({k: v for k, v in document().items() if k != "rules"}, "no 'rules': it is incomplete"),
    "unknown key": (document(more=1), "unknown key 'more'"),
    "changed": ({**document(), "date": "2026-12-01"}, "it was changed after it was written"),
    "no date": (document(date="yesterday"), "date must be a date like"),
    "a rule cut short": (document(rules={"G1": {"verdict": "passed"}}), "verdict, why, passed, failed and skipped"),
    "a verdict": (document(rules={"G1": {**HELD, "verdict": "fine"}}), "one of passed, failed"),
    "passed on nothing": (document(rules={"G1": {**HELD, "passed": 0}}), "passed without a test that passed"),
    "failed, and passed": (document(rules={"G1": {**HELD, "failed": 1}}), "verdict 'passed' with 1 failed"),
    "no rules": (document(rules={}), "rules is empty"),
    "no capabilities": (document(capabilities={}), "capabilities is empty"),
    "conforms": (document(broken="status 3"), "it says that the backend conforms"),
    "benchmark": (document(bench={"backend": "cuda", "evidence": "cpu"}), "its benchmark's backend is 'cuda'"),
    "conforms on nothing": (
        document(rules={"G1": {**HELD, "verdict": "skipped", "passed": 0, "skipped": 3}}),
        "no test of any rule passed",
    ),
    "another calendar": (document(date="20261201"), "date must be a date like"),
    "a capability's name": (document(capabilities={"a` |\n# b": True}), "keys are of the form"),
    "a rule's name": (document(rules={"G1|\n# b": HELD}), "keys are of the form"),
    "nested": ("[" * 200_000, "nested too deeply"),
    "half a character": (document(python="\ud800"), "no whole JSON document"),
    "said twice": ('{"schema": "halma.result/0", ' + json.dumps(document())[1:], "a key is there twice"),
    "a date to come": (document(date=day(2)), "is to come: it would stay the latest result"),
    "a number": (document(simulated=0), "simulated must be true or false"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_no_whole_result_of_this_version_is_refused(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, said = WRONG[name]
    path = put(tmp_path, data)
    with pytest.raises(ResultError, match="one.json"):
        read(path)
    good = put(tmp_path, document(), "good.json")
    output = tmp_path / "features.md"
    assert main([str(good), str(path)], output=output) == 2
    assert said in capsys.readouterr().err
    assert not output.exists(), "one bad file, no table"
    assert main([str(good)], output=output) == 0


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert main([str(tmp_path / "none.json")], output=tmp_path / "features.md") == 2


def test_columns_say_how_they_were_obtained_and_what_did_not_hold(tmp_path: Path) -> None:
    failed = {**HELD, "verdict": "failed", "failed": 1}
    skipped = {**HELD, "verdict": "skipped", "passed": 0, "skipped": 2, "why": "no | part\nhere"}
    files = {
        "a.json": document(),
        "b.json": document(**SIMULATED, rules={"G1": failed, "G2": skipped}, conforms=False),
        "c.json": document(**HARDWARE, capabilities={"ipc": False}),
    }
    results = [read(put(tmp_path, data, name)) for name, data in files.items()]
    lines = page(results, load()).splitlines()
    assert "| | cpu, evidence cpu | musa, evidence simulated | musa, evidence musa |" in lines
    assert "| device | a processor | a stand-in | MTT S5000 |" in lines
    assert "| conforms | yes | **no** | yes |" in lines
    assert "| `ipc` | unknown | unknown | no |" in lines
    assert "| `graph_capture` | yes | yes | not recorded |" in lines
    assert "| `triton_target` | none | none | not recorded |" in lines
    assert "| rules G: graph capture | 1 of 1 hold | 0 of 2 hold; **failed: G1**; skipped: G2 | 1 of 1 hold |" in lines
    assert "- b.json: G2 skipped: no / part here" in lines
    assert any(line.startswith("- musa-s5000 (evidence musa): no S5000") for line in lines)


def test_what_a_file_says_is_text_on_the_page(tmp_path: Path) -> None:
    hostile = "[a](http://b) ![c](http://d) `e` \x1b[31m\u2028# f\\ <img src=g>"
    skipped = {**HELD, "verdict": "skipped", "passed": 0, "skipped": 1, "why": hostile}
    one = read(put(tmp_path, document(device={"name": hostile}, python=hostile, rules={"G1": HELD, "G2": skipped})))
    lines = page([one]).splitlines()
    safe = "(a)(http://b) !(c)(http://d) 'e' (31m # f/ (img src=g)"
    assert f"| device | {safe} |" in lines and f"| Python | {safe} |" in lines
    assert f"- one.json: G2 skipped: {safe}" in lines


def test_of_one_device_the_latest_counts_and_others_stand_beside(tmp_path: Path) -> None:
    old = read(put(tmp_path, document(date="2026-11-29"), "old.json"))
    new = read(put(tmp_path, document(), "new.json"))
    other = read(put(tmp_path, document(date="2025-01-01", device={"name": "another"}), "other.json"))
    assert [one.name for one in latest([new, old, other])] == ["new.json", "other.json"]


def test_the_page_on_disk_is_what_the_files_say() -> None:
    assert sorted(RESULTS.glob("*.json")), "there is at least the CPU's own"
    assert main(["--check"]) == 0


@pytest.mark.mutant
def test_a_page_that_drifted_is_found_and_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "features.md"
    text = PAGE.read_text(encoding="utf-8")
    path.write_text(text.replace("evidence cpu", "evidence musa"), encoding="utf-8")
    assert main(["--check"], output=path) == 1
    assert main([], output=path) == 0
    assert path.read_text(encoding="utf-8") == text


# -- writing --------------------------------------------------------------------------------------------


def shown(evidence: str = "cpu") -> SuiteResult:
    one = RuleResult(
        Rule("G1", "a rule"), passed=2, tests=["t.py::a"], controls=["t.py::b"], held={"tests", "controls"}
    )
    return SuiteResult("cpu", evidence, [one], [], "", "")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a backend says when it is started, without starting one."""
    facts: dict[str, Any] = {"properties": {"name": "a processor"}, "capabilities": {"graph_capture": True}}
    monkeypatch.setattr(written.environment, "backend_report", lambda name: facts)
    return facts


def test_what_is_written_is_read_back(tmp_path: Path, started: dict[str, Any]) -> None:
    path = tmp_path / "deep" / "result.json"
    write_result(result_document(shown()), path)
    assert [one.name for one in path.parent.iterdir()] == ["result.json"]
    found = read(path)
    assert found.rules == {"G1": {**HELD, "passed": 2}}
    assert (found.evidence, found.conforms, found.device_name) == ("cpu", True, "a processor")


@pytest.mark.invariant("T5")
def test_a_cpu_result_that_was_told_another_evidence_is_not_read_back(tmp_path: Path, started: dict[str, Any]) -> None:
    path = tmp_path / "result.json"
    write_result(result_document(shown("musa")), path)
    with pytest.raises(ResultError, match="cannot come from the backend 'cpu'"):
        read(path)


def test_a_backend_that_does_not_start_leaves_no_result(started: dict[str, Any]) -> None:
    started["failed"] = "no device"
    with pytest.raises(RequestError, match="no result can be written"):
        result_document(shown())


def test_a_benchmark_travels_only_with_its_own_backend(tmp_path: Path, started: dict[str, Any]) -> None:
    head = {"schema": "halma.bench/1", "backend": "cpu", "evidence": "cpu"}
    bench = read_bench(put(tmp_path, head, "bench.json"), "cpu", "cpu")
    assert result_document(shown(), bench)["bench"] == head
    with pytest.raises(RequestError, match="evidence is 'cpu', not 'musa'"):
        read_bench(tmp_path / "bench.json", "cpu", "musa")
    with pytest.raises(RequestError, match="cannot be read"):
        read_bench(put(tmp_path, "{", "half.json"), "cpu", "cpu")


@pytest.mark.parametrize("given", [{"rule": ["G1"], "output": Path("x")}, {"bench": Path("b.json")}])
def test_a_part_of_the_rules_makes_no_result(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="a result file holds all rules"):
        conformance(**given)
