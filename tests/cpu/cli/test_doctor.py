"""``halma doctor``: a report that works where things are broken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from halma.cli import environment
from tests.cpu.cli.conftest import Halma
from tests.cpu.hal.plugins import Entry, entry, host

pytestmark = pytest.mark.torchfree

SECTIONS = {"python", "machine", "packages", "tools", "variables", "settings", "plugins", "backends", "torch"}


def _fails(*_: Any, **__: Any) -> Any:
    raise OSError("not today")


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "child", _fails)


@pytest.mark.usefixtures("no_children")
def test_every_section_is_there_and_a_failure_is_an_answer(halma: Halma, with_backends: Any) -> None:
    with_backends(host(), Entry("bad", _fails))
    document = json.loads(halma("doctor", "--json").out)
    assert document.pop("schema") == "halma.doctor/1"
    assert set(document) == SECTIONS
    assert document["torch"] == {"failed": "OSError: not today"}
    assert document["backends"]["cpu"]["started"] == {"failed": "OSError: not today"}
    assert document["backends"]["bad"]["reason"] == "importing halma.bad failed: OSError: not today"
    assert "started" not in document["backends"]["bad"]
    assert document["plugins"]["halma.backends:bad"]["not loaded"].endswith("OSError: not today")
    assert "halma_register_backends" in document["plugins"]["halma.backends:cpu"]["hooks"]


@pytest.mark.usefixtures("no_children")
@pytest.mark.parametrize("section", ["python_report", "machine_report", "packages_report", "tools_report"])
def test_a_section_that_raises_hides_no_other(
    halma: Halma, with_backends: Any, monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    monkeypatch.setattr(environment, section, _fails)
    with_backends(host())
    document = json.loads(halma("doctor", "--json").out)
    assert document[section.removesuffix("_report")] == {"failed": "OSError: not today"}
    assert document["backends"]["cpu"]["usable"]


@pytest.mark.usefixtures("no_children")
def test_wrong_settings_are_reported_not_refused(
    halma: Halma, with_backends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALMA_GRAPH", "maybe")
    monkeypatch.setenv("HALMA_GRAPHS", "1")
    monkeypatch.setenv("HALMA_LOG", "loud")
    with_backends(host())
    done = halma("doctor")
    assert (done.code, done.err) == (0, "")
    assert "HALMA_GRAPH cannot be 'maybe'; it takes 0 or 1" in done.out
    assert "did you mean HALMA_GRAPH?" in done.out


@pytest.mark.usefixtures("no_children")
def test_text_is_lines_of_question_and_answer(halma: Halma, with_backends: Any) -> None:
    with_backends(host(), entry("fake", dist="pkg"))
    lines = [" ".join(line.split()) for line in halma("doctor").out.splitlines()]
    assert [section for section in SECTIONS if section not in lines] == []
    assert "fake plugins pkg 1.0 (pkg.fake)" in lines
    assert "HALMA_GRAPH 1 (default)" in lines


def test_a_child_that_crashes_hangs_or_talks_is_understood() -> None:
    assert environment.child("print('noise'); print('{\"a\": 1}')") == {"a": 1}
    with pytest.raises(RuntimeError, match="exit code 1: ValueError: broken"):
        environment.child("raise ValueError('broken')")
    with pytest.raises(RuntimeError, match="exit code -"):
        environment.child("import os; os.abort()")
    with pytest.raises(RuntimeError, match="no answer within"):
        environment.child("import threading; threading.Event().wait()", seconds=0.2)


def test_several_copies_of_a_library_show() -> None:
    paths = ["/a/libgomp.so.1", "/b/libgomp-24e2.so.1", "/a/libnccl.so.2", "/a/libcurious.so"]
    assert environment.library_copies(paths) == {"gomp": paths[:2], "nccl": paths[2:3]}


def test_a_report_becomes_lines() -> None:
    report = {"a": {"b": 1, "c": {"failed": "why"}}, "d": ["x", "y"], "e": None, "f": ""}
    assert environment.flatten(report) == [("a b", "1"), ("a c", "failed: why"), ("d", "x"), ("d", "y")]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("max", "none"),
        ("-1", "none"),
        ("9223372036854771712", "none"),
        ("8589934592", "8.0 GiB"),
        ("max 100000", "none"),
        ("150000 100000", "1.5 cores"),
    ],
)
def test_limits_of_a_control_group(text: str, shown: str) -> None:
    assert environment._limit(text) == shown
