"""Loading plugins: one entry point at a time, each failure kept as that plugin's reason (B3).

Whose plugin it is comes from the metadata of its distribution, not from what it says of itself, and is known
before anything is imported.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

from pluggy import PluginManager

from halma.hal import hookspecs
from halma.hal.backend import API_VERSION, BackendSpec
from halma.hal.errors import HalmaError, PluginError
from halma.hal.routes import OWN, RouteSpec

BACKENDS: Final = "halma.backends"
"""Entry points named after the backend that they register: a named backend is found without importing another (B1)."""

ROUTES: Final = "halma.routes"
"""Entry points that bring routes and no backend."""

_HOOKS: Final = tuple(name for name in vars(hookspecs) if name.startswith("halma_"))
_log = logging.getLogger(__name__)
T = TypeVar("T")


class DistributionLike(Protocol):
    """What is needed of ``importlib.metadata.Distribution``."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


class EntryPointLike(Protocol):
    """What is needed of ``importlib.metadata.EntryPoint``; tests make their own."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def dist(self) -> DistributionLike | None: ...
    def load(self) -> Any: ...


@dataclass(frozen=True)
class Plugin:
    """An entry point and whom it belongs to; equal where the same distribution says the same.

    Args:
        name, value, group: as in the distribution's metadata.
        distribution, version: where it comes from.
    """

    name: str
    value: str
    group: str
    distribution: str
    version: str

    @property
    def own(self) -> bool:
        """Whether it ships with us."""
        return self.distribution == OWN

    @property
    def origin(self) -> str:
        """Distribution and version, for people."""
        return f"{self.distribution} {self.version}".strip()


def normalise(distribution: str) -> str:
    """A distribution's name with case and punctuation folded, as package indexes compare them."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def installed_entry_points() -> list[EntryPointLike]:
    """The entry points of this environment.

    Raises:
        PluginError: our own are missing: halma is importable and not installed, or its installation is stale.
    """
    found: list[EntryPointLike] = []
    for group in (BACKENDS, ROUTES):
        members = cast("Sequence[EntryPointLike]", tuple(importlib.metadata.entry_points(group=group)))
        if not any(_plugin(entry).own for entry in members):
            raise PluginError(
                f"halma's own entry points in the group {group} are missing",
                found=", ".join(f"{e.name} of {_plugin(e).origin}" for e in members) or "the group is empty",
                do="install it, once more after an update: pip install -e . (in the checkout)",
            )
        found += members
    return found


def explain_failure(error: BaseException, doing: str) -> str:
    """A failure as a clause of one line."""
    if isinstance(error, HalmaError):
        return "; ".join((error.what, *error.found))
    text = " ".join(str(error).split())
    return f"{doing}: {type(error).__name__}" + (f": {text}" if text else "")


def guarded(action: Callable[[], T], doing: str, origin: str) -> T:
    """Run a plugin's code; whatever it raises becomes a :class:`PluginError` that carries it as its cause.

    ``SystemExit`` counts too: a plugin that calls ``sys.exit`` when its driver is missing must not end us.
    """
    try:
        return action()
    except PluginError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(explain_failure(error, doing), asked=f"a plugin of {origin}") from error


class Plugins:
    """The plugins of one registry over a pluggy manager of its own. Not thread-safe: the registry locks.

    Args:
        entry_points: of both groups; what else is among them is ignored.
    """

    def __init__(self, entry_points: Iterable[EntryPointLike]) -> None:
        self.manager = PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        self._entries: dict[Plugin, EntryPointLike] = {}
        for entry in entry_points:
            if entry.group in (BACKENDS, ROUTES):
                self._entries.setdefault(_plugin(entry), entry)
        self._loaded: dict[Plugin, Any] = {}
        self._failed: dict[Plugin, PluginError] = {}

    def of_group(self, group: str) -> list[Plugin]:
        """Plugins of a group, ours first, then by distribution and name: never in the order of installation."""
        return sorted(
            (plugin for plugin in self._entries if plugin.group == group),
            key=lambda p: (not p.own, p.distribution, p.name),
        )

    def hooks(self, plugin: Plugin) -> tuple[str, ...]:
        """Names of the hooks that a plugin answers.

        Raises:
            PluginError: it cannot be loaded.
        """
        callers = self.manager.get_hookcallers(self._load(plugin)) or []
        return tuple(sorted(caller.name for caller in callers))

    def backends(self, plugin: Plugin) -> dict[str, BackendSpec]:
        """What a plugin registers through ``halma_register_backends``, by name.

        Raises:
            PluginError: it cannot be loaded, raises, or offers what the contract does not allow.
        """
        specs: dict[str, BackendSpec] = {}

        def register(spec: BackendSpec) -> None:
            _check_spec(spec, plugin)
            if specs.setdefault(spec.name, spec) != spec:
                raise PluginError(f"registers two backends called {spec.name!r}", asked=f"a plugin of {plugin.origin}")

        self._call("halma_register_backends", plugin, register)
        return specs

    def routes(self, plugin: Plugin) -> list[RouteSpec]:
        """What a plugin registers through ``halma_register_routes``, in its order.

        Raises:
            PluginError: it cannot be loaded, or raises.
        """
        routes: list[RouteSpec] = []

        def register(route: RouteSpec) -> None:
            if not isinstance(route, RouteSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise PluginError(f"registers a {type(route).__name__} as a route", do="register a RouteSpec")
            routes.append(route)

        self._call("halma_register_routes", plugin, register)
        return routes

    def _call(self, hook: str, plugin: Plugin, register: Callable[[Any], None]) -> None:
        module = self._load(plugin)
        # Not subset_hook_caller: in pluggy 1.6 it leaves in whoever answers under another name (specname), and one
        # plugin's routes were then taken for another's.
        for answer in getattr(self.manager.hook, hook).get_hookimpls():
            if answer.plugin is module:
                given = [register] if "register" in answer.argnames else []
                guarded(lambda answer=answer, given=given: answer.function(*given), f"{hook} failed", plugin.origin)

    def _load(self, plugin: Plugin) -> Any:
        """The plugin's object; imported once, and its failure kept."""
        if plugin in self._failed:
            raise self._failed[plugin].with_traceback(None)
        if plugin not in self._loaded:
            _log.debug("loading plugin %s of %s (%s)", plugin.name, plugin.origin, plugin.value)
            try:
                module = guarded(self._entries[plugin].load, f"importing {plugin.value} failed", plugin.origin)
                self._register(module, plugin)
            except PluginError as error:
                self._failed[plugin] = error
                raise
            self._loaded[plugin] = module
        return self._loaded[plugin]

    def _register(self, module: Any, plugin: Plugin) -> None:
        if self.manager.is_registered(module):
            return  # several entry points may lead to one module
        unmarked = [
            name
            for name in _HOOKS
            if callable(function := getattr(module, name, None)) and not hasattr(function, hookspecs.PROJECT + "_impl")
        ]
        if unmarked:
            raise PluginError(f"{plugin.value} does not mark {' and '.join(unmarked)} with hookimpl")
        try:
            self.manager.register(module, name=f"{plugin.distribution}:{plugin.value}")
            self.manager.check_pending()
            if not self.manager.get_hookcallers(module):
                raise PluginError(f"{plugin.value} answers no hook", do="mark a function with hookimpl")
        except Exception as error:
            if self.manager.is_registered(module):
                self.manager.unregister(module)
            if isinstance(error, PluginError):
                raise
            raise PluginError(
                explain_failure(error, f"{plugin.value} does not fit the hooks"),
                asked=f"a plugin of {plugin.origin}",
                do="hooks: " + ", ".join(_HOOKS),
            ) from error


def _plugin(entry: EntryPointLike) -> Plugin:
    distribution = entry.dist
    name, version = ("unknown", "") if distribution is None else (normalise(distribution.name), distribution.version)
    return Plugin(entry.name, entry.value, entry.group, name, version)


def _check_spec(spec: BackendSpec, plugin: Plugin) -> None:
    if not isinstance(spec, BackendSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PluginError(f"registers a {type(spec).__name__} as a backend", do="register a BackendSpec")
    accepted = (API_VERSION, API_VERSION - 1)
    if spec.api_version not in accepted:
        raise PluginError(
            f"backend {spec.name!r} is written for api_version {spec.api_version}; "
            f"this halma speaks {accepted[0]} and {accepted[1]}",
            asked=f"a plugin of {plugin.origin}",
            do="upgrade halma" if spec.api_version > API_VERSION else f"upgrade {plugin.distribution}",
        )
    if spec.simulated != (spec.evidence == "simulated"):
        raise PluginError(
            f"backend {spec.name!r} has simulated={spec.simulated} and evidence={spec.evidence!r}",
            asked=f"a plugin of {plugin.origin}",
            do="a stand-in for hardware says both simulated=True and evidence='simulated'; anything else neither",
        )
