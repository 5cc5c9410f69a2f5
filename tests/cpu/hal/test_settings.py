"""HALMA_* variables."""

from __future__ import annotations

from dataclasses import fields

import pytest

from halma.hal.errors import SettingError
from halma.hal.settings import GRAPH_ROLES, Settings, describe, markdown_table, refuse_unknown, settings

pytestmark = pytest.mark.torchfree

GOOD = [
    ("HALMA_BACKEND", "cpu", "backend", "cpu"),
    ("HALMA_BACKEND", "  ", "backend", None),
    ("HALMA_PLUGINS", "a, b,", "plugins", ("a", "b")),
    ("HALMA_PLUGINS", "", "plugins", ()),
    ("HALMA_GRAPH", "0", "graph", False),
    ("HALMA_GRAPH", "1", "graph", True),
    ("HALMA_GRAPH", "", "graph", True),
    ("HALMA_GRAPH_DECODE", "0", "graph_decode", False),
    ("HALMA_GRAPH_FFN", "0", "graph_ffn", False),
    ("HALMA_CHECKED", "1", "checked", True),
    ("HALMA_STRICT", "1", "strict", True),
    ("HALMA_ROUTE", "a=x, b = y", "routes", {"a": "x", "b": "y"}),
    ("HALMA_ROUTE", "a=x,a=x", "routes", {"a": "x"}),
    ("HALMA_LOG", "DEBUG", "log", "debug"),
    ("HALMA_COLLECTIVE_BOUND", "2.5", "collective_bound", 2.5),
    ("HALMA_FFN_GRAPH_RESERVE", "800MiB", "ffn_graph_reserve", 800 << 20),
    ("HALMA_FFN_GRAPH_RESERVE", "1.5g", "ffn_graph_reserve", 3 << 29),
    ("HALMA_FFN_GRAPH_RESERVE", "0", "ffn_graph_reserve", 0),
]
BAD = [
    ("HALMA_GRAPH", "on", "0 or 1"),
    ("HALMA_CHECKED", "true", "0 or 1"),
    ("HALMA_STRICT", "2", "0 or 1"),
    ("HALMA_ROUTE", "rms_norm", "'rms_norm' is not op=route"),
    ("HALMA_ROUTE", "=x", "is not op=route"),
    ("HALMA_ROUTE", "a=", "is not op=route"),
    ("HALMA_ROUTE", "a=x,a=y", "'a' has 'x' and 'y'"),
    ("HALMA_LOG", "loud", "debug, info, warning, error"),
    ("HALMA_COLLECTIVE_BOUND", "0", "seconds above 0"),
    ("HALMA_COLLECTIVE_BOUND", "nan", "seconds above 0"),
    ("HALMA_COLLECTIVE_BOUND", "soon", "seconds above 0"),
    ("HALMA_FFN_GRAPH_RESERVE", "-1", "800MiB, 2G, 0"),
    ("HALMA_FFN_GRAPH_RESERVE", "8 GX", "800MiB, 2G, 0"),
]


def test_defaults() -> None:
    assert settings({}) == Settings()
    assert settings({}) == Settings(None, None, True, False, {}, False, "warning")


@pytest.mark.parametrize(("variable", "value", "name", "meaning"), GOOD)
def test_a_variable_is_read_and_changes_nothing_else(variable: str, value: str, name: str, meaning: object) -> None:
    found = settings({variable: value})
    assert getattr(found, name) == meaning
    others = {one.name for one in fields(Settings)} - {name}
    assert {other: getattr(found, other) for other in others} == {o: getattr(Settings(), o) for o in others}


@pytest.mark.parametrize(("variable", "value", "reason"), BAD)
def test_a_value_that_cannot_be_meant_is_refused(variable: str, value: str, reason: str) -> None:
    with pytest.raises(SettingError) as caught:
        settings({variable: value})
    assert caught.value.asked == (f"{variable}={value}",)
    assert reason in str(caught.value)
    assert f"unset {variable}" in str(caught.value)


def test_the_environment_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALMA_GRAPH", "0")
    assert not settings().graph
    monkeypatch.setenv("HALMA_GRAPH", "1")
    assert settings().graph


@pytest.mark.parametrize("role", GRAPH_ROLES)
def test_a_role_has_a_switch_of_its_own(role: str) -> None:
    switch = settings({f"HALMA_GRAPH_{role.upper()}": "0"}).graph_switch
    reasons = {other: switch.off_reason(other) for other in GRAPH_ROLES}
    assert reasons.pop(role) == f"capture of {role} is switched off"
    assert set(reasons.values()) == {None}


def test_the_switch_for_all_goes_before_those_by_role() -> None:
    switch = settings({"HALMA_GRAPH": "0", "HALMA_GRAPH_DRAFT": "0"}).graph_switch
    assert {switch.off_reason(role) for role in (*GRAPH_ROLES, "other")} == {"capture is switched off"}
    assert settings({}).graph_switch.off_reason("other") is None


def test_unknown_variables_are_refused_with_what_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALMA_GRAPHS", "0")
    monkeypatch.setenv("HALMA_XYZZY", "1")
    with pytest.raises(SettingError) as caught:
        refuse_unknown()
    assert caught.value.found == ("HALMA_GRAPHS=0 (did you mean HALMA_GRAPH?)", "HALMA_XYZZY=1")
    assert "unset HALMA_GRAPHS HALMA_XYZZY" in caught.value.do


def test_known_variables_and_other_peoples_pass() -> None:
    refuse_unknown({one.metadata["variable"]: "?" for one in fields(Settings)})
    refuse_unknown({"HALMARUT": "1", "PATH": "/bin"})


def test_every_setting_is_described_and_unchecked_values_are_shown() -> None:
    rows = {row.variable: row for row in describe({"HALMA_GRAPH": "maybe"})}
    assert len(rows) == len(fields(Settings))
    assert rows["HALMA_GRAPH"].value == "maybe"
    assert rows["HALMA_LOG"].value is None
    assert all(row.meaning and row.default for row in rows.values())
    table = markdown_table().splitlines()
    assert len(table) == 2 + len(rows)
    assert table[2].startswith("| `HALMA_BACKEND` | auto | ")
