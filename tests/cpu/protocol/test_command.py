"""``python -m halma.hal.testing.protocol``: the table, the run of one refutation, the exit code."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from halma.hal.testing.protocol import report
from halma.hal.testing.protocol.cases import HOLDS
from halma.hal.testing.protocol.proved import PROVED
from halma.hal.testing.protocol.refuted import REFUTED
from halma.hal.testing.protocol.report import main
from halma.hal.testing.protocol.variants import variant

pytestmark = pytest.mark.torchfree


def test_one_variant_is_told_move_by_move() -> None:
    line = [sys.executable, "-m", "halma.hal.testing.protocol", "--variant", "block-epochs"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "wrong value" in done.stdout
    assert "<-- wrong" in done.stdout
    assert "in place of rank" in done.stdout
    assert "1 of 1 as expected" in done.stdout


def test_a_hang_says_who_waits_for_what(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--variant", "one-buffer"]) == 0
    told = capsys.readouterr().out
    assert "from here on, all stores visible:" in told
    assert "waits for flag 1 at 0>1 header buffer 0: it holds flag 2 of call 1" in told


def test_the_table_has_a_row_for_each_variant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = tuple(one for one in PROVED + REFUTED if one.name in ("wrap", "at-least", "sticky-4", "odd-graph"))
    assert len(few) == 4
    monkeypatch.setattr(report, "VARIANTS", few)
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "3 of 3 as expected" in shown
    assert "sticky-4" not in shown, "a nightly one has to be asked for"
    for word in ("wrap", "at-least", "odd-graph", "2-3 ranks", "holds", "hang", "wrong value"):
        assert word in shown


def test_an_unexpected_verdict_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = variant("one-buffer")
    assert one is not None
    monkeypatch.setattr(report, "VARIANTS", (replace(one, verdict=HOLDS),))
    assert main([]) == 1
    shown = capsys.readouterr().out
    assert "NO: holds" in shown
    assert "0 of 1 as expected" in shown


def test_an_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--variant", "two-buffer"]) == 2
    shown = capsys.readouterr()
    assert "there is no variant 'two-buffer'" in shown.err
    assert "one-buffer" in shown.err
    assert shown.out == ""
