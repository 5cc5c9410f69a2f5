"""Plugins, distributions and entry points made for a test; nothing is installed, no torch is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, cast

from halma.hal.backend import API_VERSION, Backend, BackendSpec, Probe
from halma.hal.capabilities import Capabilities
from halma.hal.hookspecs import hookimpl
from halma.hal.plugins import BACKENDS, ROUTES
from halma.hal.registry import Registry
from halma.hal.routes import RouteSpec


@dataclass(frozen=True)
class Distribution:
    name: str
    version: str = "1.0"


@dataclass
class Entry:
    """An entry point that counts how often it was loaded; ``make`` may raise."""

    name: str
    make: Callable[[], Any]
    dist: Distribution = Distribution("halma")
    group: str = BACKENDS
    value: str = ""
    loads: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.value = self.value or f"{self.dist.name}.{self.name}"

    def load(self) -> Any:
        self.loads += 1
        return self.make()


@dataclass
class FakeBackend:
    name: str
    evidence: str = "cpu"
    capabilities: Capabilities = field(default_factory=Capabilities)


def usable() -> Probe:
    return Probe(True, "one device")


def absent() -> Probe:
    return Probe(False, "no driver answered")


def spec(name: str, probe: Callable[[], Probe] = usable, **changes: Any) -> BackendSpec:
    evidence = "simulated" if changes.get("simulated") else "cpu"
    facts: dict[str, Any] = {
        "api_version": API_VERSION,
        "factory": lambda: cast(Backend, FakeBackend(name, evidence)),
        "evidence": evidence,
    }
    return BackendSpec(name, probe=probe, **{**facts, **changes})


def plugin(*specs: BackendSpec, routes: Iterable[RouteSpec] = ()) -> ModuleType:
    """A module with both hooks."""
    module = ModuleType("a_plugin")

    @hookimpl
    def halma_register_backends(register: Callable[[BackendSpec], None]) -> None:
        for one in specs:
            register(one)

    @hookimpl
    def halma_register_routes(register: Callable[[RouteSpec], None]) -> None:
        for route in routes:
            register(route)

    vars(module).update(halma_register_backends=halma_register_backends, halma_register_routes=halma_register_routes)
    return module


def entry(name: str, probe: Callable[[], Probe] = usable, dist: str = "halma", **changes: Any) -> Entry:
    """An entry point whose plugin registers the one backend it is named after."""
    return Entry(name, lambda: plugin(spec(name, probe, **changes)), Distribution(dist))


def host() -> Entry:
    return entry("cpu", accelerator=False)


def routes_entry(name: str, make: Callable[[], Any], dist: str) -> Entry:
    return Entry(name, make, Distribution(dist), ROUTES)


def select_in_a_worker(name: str) -> tuple[str, str]:
    """For a spawned process: a registry of its own, twice, before any device is bound."""
    registry = Registry([host(), entry("fake")])
    registry.statuses()
    return registry.select(name).name, registry.select(name).evidence


def raising(error: BaseException) -> Any:
    """A factory that fails."""

    def make() -> Any:
        raise error

    return make
