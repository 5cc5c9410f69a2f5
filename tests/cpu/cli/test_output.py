"""Tables, progress and JSON."""

from __future__ import annotations

import io
import json
import sys

import pytest

from halma.cli.output import emit_json, plain_table, print_table, progress_bar

pytestmark = pytest.mark.torchfree

ROWS = [("a", "one"), ("[M, D]", "two\nlines")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_plain_row_is_one_line_and_columns_are_aligned() -> None:
    assert plain_table(("x", "y"), ROWS, title="t") == ["t", "x       y", "a       one", "[M, D]  two lines"]
    assert plain_table(("", ""), ROWS) == ["a       one", "[M, D]  two lines"]
    assert plain_table(("x",), []) == ["x"]
    assert plain_table(("", ""), []) == []


def test_piped_tables_are_plain_and_do_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich.table", None)
    print_table(("", ""), ROWS)
    assert capsys.readouterr().out == "a       one\n[M, D]  two lines\n"


def test_tables_on_a_terminal_keep_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    print_table(("x", "y"), ROWS, title="[t]")
    assert all(text in terminal.getvalue() for text in ("[M, D]", "[t]", "two"))


def test_progress_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal, disable, seen in ((True, False, True), (True, True, False), (False, False, False)):
        stream = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar("loading", disable=disable) as advance:
            advance(1, 2, "w")
            advance(2, 2, "w")
        assert bool(stream.getvalue()) == seen


def test_json_carries_a_schema_and_only_words_that_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    emit_json({"schema": "halma.x/1", "v": [float("nan"), float("inf"), 1.5], "t": (1, {"a": -float("inf")})})
    document = json.loads(capsys.readouterr().out)
    assert (document["v"], document["t"]) == (["nan", "inf", 1.5], [1, {"a": "-inf"}])


@pytest.mark.parametrize("document", [{}, {"schema": "x/1"}, {"schema": "halma.x"}, {"schema": "halma.x/0"}])
def test_json_without_a_schema_is_refused(document: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs a schema"):
        emit_json(document)
