"""What a plugin promises and is held to: hooks, versions, evidence, factories (B5-B7, B10)."""

from __future__ import annotations

import multiprocessing
from types import ModuleType
from typing import Any, cast

import pytest

from halma.hal.backend import API_VERSION, Backend
from halma.hal.errors import BackendError, PluginError
from halma.hal.hookspecs import hookimpl
from halma.hal.plugins import Plugins
from halma.hal.registry import Registry, SelectionError
from tests.cpu.hal.plugins import (
    Entry,
    FakeBackend,
    entry,
    host,
    raising,
    select_in_a_worker,
    spec,
)

pytestmark = pytest.mark.torchfree


# -- B5: hooks are spelt right ----------------------------------------------------------------------------


def _misspelt_name() -> ModuleType:
    module = ModuleType("misspelt")

    @hookimpl
    def halma_register_backend(register: Any) -> None:
        register(spec("bad"))

    vars(module)["halma_register_backend"] = halma_register_backend
    return module


def _misspelt_argument() -> ModuleType:
    module = ModuleType("misspelt")

    @hookimpl
    def halma_register_backends(registry: Any) -> None:
        registry(spec("bad"))

    vars(module)["halma_register_backends"] = halma_register_backends
    return module


def _unmarked() -> ModuleType:
    module = ModuleType("unmarked")
    vars(module)["halma_register_backends"] = lambda register: register(spec("bad"))
    return module


@pytest.mark.invariant("B5")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_misspelt_name, "halma_register_backend"),
        (_misspelt_argument, "registry"),
        (_unmarked, "does not mark halma_register_backends with hookimpl"),
        (lambda: ModuleType("empty"), "answers no hook"),
    ],
    ids=["name", "argument", "marker", "nothing"],
)
def test_a_misspelt_hook_is_refused(make: Any, reason: str) -> None:
    registry = Registry([host(), Entry("bad", make)])
    assert registry.status("cpu").usable
    for _ in range(2):
        status = registry.status("bad")
        assert not status.usable
        assert reason in status.reason
    assert registry.status("cpu").usable, "what was refused is gone from the manager"


@pytest.mark.invariant("B5", control=True)
def test_hooks_spelt_right_are_listed() -> None:
    entries = [entry("good")]
    assert Registry(entries).status("good").usable
    plugins = Plugins(entries)
    (one,) = plugins.of_group("halma.backends")
    assert plugins.hooks(one) == ("halma_register_backends", "halma_register_routes")


# -- B6: versions of the contract -------------------------------------------------------------------------


@pytest.mark.invariant("B6")
@pytest.mark.parametrize("version", [API_VERSION + 1, API_VERSION - 2])
def test_other_versions_are_refused_with_both_named(version: int) -> None:
    status = Registry([entry("old", api_version=version)]).status("old")
    assert not status.usable
    assert f"api_version {version}; this halma speaks {API_VERSION} and {API_VERSION - 1}" in status.reason


@pytest.mark.invariant("B6", control=True)
@pytest.mark.parametrize("version", [API_VERSION, API_VERSION - 1])
def test_this_version_and_the_one_before_are_accepted(version: int) -> None:
    assert Registry([entry("fine", api_version=version)]).select("fine").name == "fine"


# -- B7: again, and elsewhere -----------------------------------------------------------------------------


@pytest.mark.invariant("B7")
def test_registering_again_changes_nothing() -> None:
    built: list[str] = []

    def factory() -> Backend:
        built.append("x")
        return cast(Backend, FakeBackend("x"))

    one = entry("x", factory=factory)
    registry = Registry([one])
    first = registry.select()
    assert [registry.select("x"), registry.select()] == [first, first]
    assert len(registry.statuses()) == 1
    assert (one.loads, built) == (1, ["x"])


@pytest.mark.invariant("B7")
def test_it_works_in_a_spawned_worker() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(select_in_a_worker, ("fake",)) == ("fake", "cpu")
        assert pool.apply(select_in_a_worker, ("fake",)) == ("fake", "cpu")


@pytest.mark.invariant("B7", control=True)
def test_two_registries_share_nothing() -> None:
    entries = [entry("x")]
    assert Registry(entries).select("x") is not Registry(entries).select("x")


# -- B10: simulated backends ------------------------------------------------------------------------------


@pytest.mark.invariant("B10")
def test_a_simulated_backend_is_not_chosen_by_auto() -> None:
    simulated = entry("pretend", simulated=True)
    with pytest.raises(SelectionError, match="no accelerator") as caught:
        Registry([host(), simulated]).select()
    assert "usable (simulated: has to be named)" in str(caught.value)
    assert Registry([simulated, entry("real")]).select().name == "real", "nor does it stand in the way of one"


@pytest.mark.invariant("B10")
@pytest.mark.parametrize(
    "changes",
    [{"simulated": True, "evidence": "cuda"}, {"simulated": False, "evidence": "simulated"}],
    ids=["unmarked", "undeclared"],
)
def test_a_simulated_backend_that_does_not_say_so_is_refused(changes: dict[str, Any]) -> None:
    status = Registry([entry("pretend", **changes)]).status("pretend")
    assert not status.usable
    assert "simulated" in status.reason


@pytest.mark.invariant("B10")
@pytest.mark.parametrize(("promised", "said"), [("simulated", "cuda"), ("unknown", "simulated"), ("cuda", "musa")])
def test_a_backend_cannot_claim_other_evidence_than_was_registered(promised: str, said: str) -> None:
    lying = entry(
        "pretend",
        simulated=promised == "simulated",
        evidence=promised,
        factory=lambda: cast(Backend, FakeBackend("pretend", said)),
    )
    with pytest.raises(PluginError, match="is not what was registered"):
        Registry([lying]).select("pretend")


@pytest.mark.invariant("B10", control=True)
def test_a_simulated_backend_can_be_named_and_marks_what_it_shows() -> None:
    registry = Registry([host(), entry("pretend", simulated=True)])
    assert registry.select("pretend").evidence == "simulated"
    assert registry.status("pretend").verdict == "usable (simulated: has to be named)"


# -- factories --------------------------------------------------------------------------------------------


def test_a_factory_that_fails_is_reported_with_its_cause() -> None:
    with pytest.raises(PluginError, match='backend "x" could not be started') as caught:
        Registry([entry("x", factory=raising(OSError("the device fell off")))]).select("x")
    assert "OSError: the device fell off" in str(caught.value)


def test_a_factorys_own_message_is_left_alone() -> None:
    message = BackendError("wants a newer driver", found="driver 1", do="install driver 2")
    with pytest.raises(BackendError) as caught:
        Registry([entry("x", factory=raising(message))]).select("x")
    assert caught.value is message
