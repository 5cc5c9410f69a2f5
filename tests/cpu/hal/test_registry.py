"""Finding and choosing backends, and the routes that come with them (B1-B4)."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType
from typing import Any, cast

import pytest

from halma.hal.backend import Probe
from halma.hal.decisions import decisions
from halma.hal.errors import HalmaError, PluginError, SettingError
from halma.hal.hookspecs import hookimpl
from halma.hal.registry import Registry, SelectionError
from halma.hal.routes import RouteSpec
from tests.cpu.hal.plugins import (
    Distribution,
    Entry,
    absent,
    entry,
    host,
    plugin,
    raising,
    routes_entry,
    spec,
)

pytestmark = pytest.mark.torchfree


# -- B1: a named backend imports its own plugin only ------------------------------------------------------


@pytest.mark.invariant("B1")
@pytest.mark.parametrize("how", ["argument", "HALMA_BACKEND", "status", "spec"])
def test_a_named_backend_imports_no_other_plugin(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other, named = Entry("other", raising(AssertionError("imported"))), entry("named")
    registry = Registry([host(), other, named])
    if how == "HALMA_BACKEND":
        monkeypatch.setenv("HALMA_BACKEND", "named")
        assert registry.select().name == "named"
    elif how == "argument":
        assert registry.select("named").name == "named"
    else:
        assert getattr(registry, how)("named").name == "named"
    assert (named.loads, other.loads) == (1, 0)


@pytest.mark.invariant("B1", control=True)
def test_auto_looks_at_every_plugin() -> None:
    entries = [host(), entry("other", absent), entry("named")]
    assert Registry(entries).select().name == "named"
    assert [one.loads for one in entries] == [1, 1, 1]


@pytest.mark.invariant("B1")
def test_an_unusable_named_backend_imports_no_other_either() -> None:
    other = entry("other")
    with pytest.raises(SelectionError, match="no driver answered"):
        Registry([host(), other, entry("named", absent)]).select("named")
    assert other.loads == 0


@pytest.mark.invariant("B1")
def test_probing_our_own_backends_imports_no_torch() -> None:
    code = (
        "import sys\nfrom halma.hal.registry import default_registry\n"
        "print(len(default_registry().statuses()), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    number, torch = done.stdout.split()
    assert int(number) >= 1
    assert torch == "False"


def test_a_plugin_that_drags_torch_into_a_listing_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)

    def probe() -> Probe:
        sys.modules["torch"] = ModuleType("torch")
        return Probe(True, "yes")

    with caplog.at_level(logging.WARNING, logger="halma"):
        Registry([entry("quiet")]).statuses()
        assert not caplog.messages
        Registry([entry("heavy", probe)]).statuses()
    assert caplog.messages == ["the probe of backend heavy imported torch, which a listing must not wait for"]


# -- B2: auto wants exactly one accelerator ---------------------------------------------------------------


@pytest.mark.invariant("B2")
def test_no_usable_accelerator_is_an_error_with_every_reason_and_never_the_cpu() -> None:
    with pytest.raises(SelectionError) as caught:
        Registry([host(), entry("one", absent), Entry("two", raising(ImportError("no libtwo")))]).select()
    assert str(caught.value) == (
        "no accelerator can be used, and no backend was named\n"
        "  cpu   usable\n"
        "  one   not usable: no driver answered\n"
        "  two   not usable: importing halma.two failed: ImportError: no libtwo\n"
        "  to run without a GPU: --backend cpu"
    )


@pytest.mark.invariant("B2")
def test_several_usable_accelerators_are_an_error_that_names_them() -> None:
    with pytest.raises(SelectionError, match=r"several accelerators can be used \(one and two\)") as caught:
        Registry([host(), entry("one"), entry("two"), entry("three", absent)]).select("auto")
    assert [status.name for status in caught.value.statuses] == ["cpu", "one", "three", "two"]
    assert "HALMA_BACKEND=one" in str(caught.value)


@pytest.mark.invariant("B2", control=True)
def test_the_one_usable_accelerator_is_chosen_and_the_choice_recorded() -> None:
    decisions.clear()
    assert Registry([host(), entry("one", absent), entry("two")]).select().name == "two"
    ((decision, count),) = decisions.all("backend")
    assert (decision.chosen, decision.asked, count) == ("two", "auto", 1)
    assert {c.name: c.reason for c in decision.candidates} == {
        "cpu": "not an accelerator: has to be named",
        "one": "no driver answered",
        "two": "the one accelerator that can be used",
    }


def test_the_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALMA_BACKEND", "one")
    registry = Registry([host(), entry("one"), entry("two")])
    decisions.clear()
    assert [registry.select().name, registry.select("two").name, registry.select("cpu").name] == ["one", "two", "cpu"]
    assert [d.reason for d, _ in decisions.all("backend")] == [
        "named by HALMA_BACKEND",
        "named by argument",
        "named by argument",
    ]


def test_a_misspelt_name_looks_as_the_design_shows_it() -> None:
    def no_driver() -> Probe:
        return Probe(False, "no NVIDIA driver answered (nvidia-ml-py: NVML shared library not found)")

    def no_package() -> Probe:
        return Probe(False, "torch_musa is not installed")

    registry = Registry([host(), entry("cuda", no_driver), entry("musa", no_package)])
    with pytest.raises(SelectionError) as caught:
        registry.select("cude")
    assert f"halma: {caught.value}" == (
        'halma: no backend called "cude" (did you mean "cuda"?)\n'
        "  cpu    usable\n"
        "  cuda   not usable: no NVIDIA driver answered (nvidia-ml-py: NVML shared library not found)\n"
        "  musa   not usable: torch_musa is not installed\n"
        "  to run without a GPU: --backend cpu"
    )


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(SelectionError) as caught:
        Registry([host()]).spec("something")
    assert "did you mean" not in str(caught.value)


# -- B3: a plugin's failure is its reason -----------------------------------------------------------------


def _failing_hook() -> ModuleType:
    module = ModuleType("failing")

    @hookimpl
    def halma_register_backends(register: Any) -> None:
        raise KeyError("table")

    vars(module)["halma_register_backends"] = halma_register_backends
    return module


FAILURES = {
    "import": (
        Entry("bad", raising(ImportError("libbad.so.3"))),
        "importing halma.bad failed: ImportError: libbad.so.3",
    ),
    "exit": (Entry("bad", raising(SystemExit("no card"))), "importing halma.bad failed: SystemExit: no card"),
    "hook": (Entry("bad", _failing_hook), "halma_register_backends failed: KeyError: 'table'"),
    "probe": (entry("bad", raising(OSError("bus\n error"))), "its probe failed: OSError: bus error"),
    "answer": (entry("bad", lambda: cast(Probe, True)), "its probe answered with a bool, not a Probe"),
}


@pytest.mark.invariant("B3")
@pytest.mark.parametrize("how", FAILURES)
def test_a_failure_is_kept_as_the_reason_and_hides_no_other_backend(how: str) -> None:
    bad, reason = FAILURES[how]
    registry = Registry([host(), bad, entry("good")])
    found = {status.name: status for status in registry.statuses()}
    assert (found["bad"].usable, found["bad"].reason) == (False, reason)
    assert found["bad"].error is not None
    assert found["good"].usable and found["cpu"].usable
    assert registry.select().name == "good"
    with pytest.raises(SelectionError, match="cannot be used"):
        registry.select("bad")


@pytest.mark.invariant("B3", control=True)
def test_a_plugin_that_works_has_no_error() -> None:
    (status,) = Registry([entry("good")]).statuses()
    assert (status.usable, status.error, status.reason) == (True, None, "one device")


def test_the_exception_itself_is_kept_and_the_import_is_not_tried_again() -> None:
    error = ImportError("once")
    bad = Entry("bad", raising(error))
    registry = Registry([bad])
    assert registry.status("bad").error is error
    assert registry.status("bad").error is error
    assert bad.loads == 1


def test_an_interrupt_is_no_reason() -> None:
    with pytest.raises(KeyboardInterrupt):
        Registry([Entry("bad", raising(KeyboardInterrupt()))]).statuses()


# -- B4: one name, one plugin -----------------------------------------------------------------------------


@pytest.mark.invariant("B4")
@pytest.mark.parametrize("name", ["twice", None])
def test_two_distributions_with_one_name_are_refused_naming_both(name: str | None) -> None:
    one, two = entry("twice", dist="first"), entry("twice", dist="Second_Dist")
    registry = Registry([host(), one, two])
    with pytest.raises(PluginError) as caught:
        registry.select(name)
    assert "claimed by first 1.0 and by second-dist 1.0" in str(caught.value)
    assert (one.loads, two.loads) == (0, 0), "refused before either could run"
    assert registry.select("cpu").name == "cpu", "other names still work"


@pytest.mark.invariant("B4", control=True)
def test_the_same_entry_point_seen_twice_is_one() -> None:
    assert Registry([host(), entry("once"), entry("once")]).select().name == "once"


def test_a_plugin_may_not_take_a_name_that_is_not_its_entry_points() -> None:
    thief = Entry("thief", lambda: plugin(spec("cpu")), Distribution("thief"))
    registry = Registry([host(), thief])
    assert not registry.status("thief").usable
    assert "registers cpu, its entry point is called 'thief'" in registry.status("thief").reason
    assert registry.spec("cpu").accelerator is False


def test_one_plugin_registers_a_name_once() -> None:
    same = spec("x")
    assert Registry([Entry("x", lambda: plugin(same, same))]).status("x").usable
    twice = Registry([Entry("x", lambda: plugin(spec("x"), spec("x", absent)))]).status("x")
    assert "registers two backends called 'x'" in twice.reason


def test_one_module_may_bring_two_backends() -> None:
    module = plugin(spec("x"), spec("y"))
    registry = Registry([Entry("x", lambda: module), Entry("y", lambda: module)])
    assert [status.usable for status in registry.statuses()] == [True, True]


# -- HALMA_PLUGINS ----------------------------------------------------------------------------------------


def test_the_allow_list_leaves_strangers_out_and_keeps_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [host(), entry("a", dist="pkg-a"), entry("b", dist="pkg.B")]
    monkeypatch.setenv("HALMA_PLUGINS", "PKG_b")
    registry = Registry(entries)
    assert {s.name: s.reason for s in registry.statuses() if not s.usable} == {"a": "left out by HALMA_PLUGINS"}
    assert registry.select().name == "b"
    assert entries[1].loads == 0
    monkeypatch.setenv("HALMA_PLUGINS", "")
    assert [s.name for s in registry.statuses() if s.usable] == ["cpu"]
    assert [reason for _, _, reason in registry.plugins()] == ["", *["left out by HALMA_PLUGINS"] * 2]


def test_the_allow_list_settles_a_doubled_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALMA_PLUGINS", "second")
    registry = Registry([entry("x", absent, dist="first"), entry("x", dist="second")])
    assert registry.select("x").name == "x"


def test_the_allow_list_refuses_names_without_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALMA_PLUGINS", "pkg-aa")
    with pytest.raises(SettingError, match="did you mean 'pkg-a'"):
        Registry([entry("a", dist="pkg-a")]).statuses()


# -- routes -----------------------------------------------------------------------------------------------


def _route(op: str, origin: str = "halma") -> RouteSpec:
    return RouteSpec(op, "fast", lambda: print, origin=origin)


def _load(registry: Registry, **options: Any) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    added: list[tuple[str, str]] = []
    reasons = registry.load_routes(lambda route: added.append((route.op, route.origin)), **options)
    return added, reasons


def test_routes_come_from_us_from_route_plugins_and_from_the_selected_backend_only() -> None:
    registry = Registry(
        [
            routes_entry("ours", lambda: plugin(routes=[_route("ours")]), "halma"),
            routes_entry("theirs", lambda: plugin(routes=[_route("theirs")]), "pkg"),
            Entry("x", lambda: plugin(spec("x"), routes=[_route("of_x")]), Distribution("pkg-x")),
            Entry("y", lambda: plugin(spec("y"), routes=[_route("of_y")]), Distribution("pkg-y")),
        ]
    )
    assert _load(registry) == ([("ours", "halma"), ("theirs", "pkg")], ())
    registry.select("x")
    assert _load(registry)[0] == [("ours", "halma"), ("theirs", "pkg"), ("of_x", "pkg-x")]
    assert _load(registry, backend="y")[0][2:] == [("of_x", "pkg-x"), ("of_y", "pkg-y")]


def test_a_stranger_cannot_pass_a_route_off_as_ours() -> None:
    registry = Registry([routes_entry("theirs", lambda: plugin(routes=[_route("op", origin="halma")]), "pkg")])
    assert _load(registry)[0] == [("op", "pkg")]


def test_a_broken_route_plugin_is_reported_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(
        [
            routes_entry("bad", raising(ImportError("no compiler")), "a-bad"),
            routes_entry("odd", lambda: plugin(routes=[cast(RouteSpec, "no route")]), "b-odd"),
            routes_entry("good", lambda: plugin(routes=[_route("op")]), "pkg"),
        ]
    )
    added, reasons = _load(registry)
    assert added == [("op", "pkg")]
    assert ["no compiler" in reasons[0], "registers a str as a route" in reasons[1]] == [True, True]
    monkeypatch.setenv("HALMA_STRICT", "1")
    with pytest.raises(PluginError, match="no compiler"):
        _load(registry)


@pytest.mark.parametrize("whose", ["ours", "the backend's"])
def test_routes_that_must_be_there_are_not_skipped(whose: str) -> None:
    bad = (
        routes_entry("ours", raising(ImportError("broken")), "halma")
        if whose == "ours"
        else Entry("x", lambda: plugin(spec("x"), routes=[cast(RouteSpec, 0)]), Distribution("pkg"))
    )
    with pytest.raises(HalmaError, match="broken|registers a int as a route"):
        _load(Registry([bad, entry("other")]), backend="other" if whose == "ours" else "x")
