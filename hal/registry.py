"""Which backends there are, whether they can be used, and which one is.

Selection: the argument, else ``HALMA_BACKEND``, else the one accelerator that can be used. A named backend
imports its own plugin and no other; ``auto`` looks at all of them and takes an accelerator only if there is exactly
one. The CPU is used when it is asked for by name, and never because nothing else worked.
"""

from __future__ import annotations

import difflib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from halma.hal.backend import Backend, BackendSpec, Probe
from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.errors import BackendError, HalmaError, PluginError, SettingError
from halma.hal.patches import replaced_modules
from halma.hal.plugins import (
    BACKENDS,
    ROUTES,
    EntryPointLike,
    Plugin,
    Plugins,
    explain_failure,
    guarded,
    installed_entry_points,
    normalise,
)
from halma.hal.routes import RouteSpec
from halma.hal.settings import settings

AUTO: Final = "auto"
HOST: Final = "cpu"
"""The backend that runs everywhere: offered as a way out in messages, never taken."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Status:
    """A backend as found here.

    Args:
        name: its name.
        usable: whether it can be selected.
        reason: why (not), word for word what the plugin or its probe said.
        plugins: where it comes from; more than one means that the name is refused.
        spec: what the plugin registered; None where it could not be loaded.
        detail: the probe's details.
        error: the exception behind the reason (B3), or None.
    """

    name: str
    usable: bool
    reason: str
    plugins: tuple[Plugin, ...]
    spec: BackendSpec | None = None
    detail: Mapping[str, str] = field(default_factory=dict[str, str])
    error: BaseException | None = None

    @property
    def doubled(self) -> bool:
        """Whether several distributions claim the name."""
        return len(self.plugins) > 1

    @property
    def eligible(self) -> bool:
        """Whether ``auto`` may take it: a usable accelerator that is not simulated (B10)."""
        return self.usable and self.spec is not None and self.spec.accelerator and not self.spec.simulated

    @property
    def verdict(self) -> str:
        """``usable``, or ``not usable`` with the reason."""
        if not self.usable:
            return f"not usable: {self.reason}"
        simulated = self.spec is not None and self.spec.simulated
        return "usable (simulated: has to be named)" if simulated else "usable"


class SelectionError(BackendError):
    """No backend for this request; ``statuses`` holds every backend that was looked at."""

    def __init__(self, what: str, statuses: Iterable[Status], *, asked: str, do: str) -> None:
        self.statuses = tuple(statuses)
        width = max((len(status.name) for status in self.statuses), default=0)
        lines = [f"{status.name:<{width}}   {status.verdict}" for status in self.statuses]
        super().__init__(what, asked=asked, found=lines, do=do)

    def render(self) -> str:
        """A headline, one line a backend, and the way out."""
        return "\n  ".join((self.what, *self.found, *self.do))


class Registry:
    """Backends and routes by entry point. Thread-safe; every registry loads plugins for itself.

    Args:
        entry_points: where plugins are; :func:`default_registry` takes those of the environment.
    """

    def __init__(self, entry_points: Iterable[EntryPointLike]) -> None:
        self._plugins = Plugins(entry_points)
        self._backends: dict[str, Backend] = {}
        self._lock = threading.RLock()

    def names(self) -> list[str]:
        """Names of all backends, read from metadata: nothing is imported."""
        return sorted({plugin.name for plugin in self._plugins.of_group(BACKENDS)})

    def status(self, name: str) -> Status:
        """Load the plugin of ``name``, and no other, and ask its probe.

        Raises:
            SelectionError: there is no backend of this name; every backend is listed with its reason.
            SettingError: ``HALMA_PLUGINS`` names a distribution without plugins.
        """
        plugins = self._claims(name)
        if not plugins:
            close = difflib.get_close_matches(name, [*self.names(), AUTO], n=1)
            hint = f' (did you mean "{close[0]}"?)' if close else ""
            raise SelectionError(
                f'no backend called "{name}"{hint}', self.statuses(), asked=name, do=self._way_out(except_for=name)
            )
        try:
            spec = self._spec(name, plugins)
        except PluginError as error:
            return Status(name, False, explain_failure(error, ""), plugins, error=error.__cause__ or error)
        try:
            probe = self._probe(spec, plugins[0])
        except PluginError as error:
            return Status(name, False, error.what, plugins, spec, error=error.__cause__ or error)
        return Status(name, probe.ok, probe.reason, plugins, spec, probe.detail)

    def statuses(self) -> list[Status]:
        """Every backend, by name. Loads and probes all of them; imports no torch if their plugins keep the rule."""
        return [self.status(name) for name in self.names()]

    def spec(self, name: str) -> BackendSpec:
        """What the plugin of ``name`` registered, whether or not it can be used here.

        Raises:
            BackendError: there is no such backend, or its plugin cannot be loaded.
        """
        plugins = self._claims(name)
        if not plugins:
            self.status(name)
        return self._spec(name, plugins)

    def choose(self, name: str | None = None) -> tuple[Status, Decision]:
        """The backend that :meth:`select` would build, and why; nothing is built or recorded.

        Raises:
            BackendError: see :meth:`select`.
        """
        source = "argument"
        if name is None:
            name, source = settings().backend or AUTO, "HALMA_BACKEND"
        if name == AUTO:
            return self._choose_automatically()
        status = self.status(name)
        if status.doubled:
            raise PluginError(
                f'backend "{name}" is refused',
                found=status.reason,
                do="uninstall one of them, or leave it out of HALMA_PLUGINS",
            )
        if not status.usable:
            raise SelectionError(
                f'backend "{name}" cannot be used', [status], asked=name, do=self._way_out(except_for=name)
            )
        why = f"named by {source}"
        return status, Decision("backend", "backend", name, (Candidate(name, True, why),), asked=name)

    def select(self, name: str | None = None) -> Backend:
        """The backend called ``name``, else ``HALMA_BACKEND``, else the one accelerator that can be used.

        Built on first use and kept for the life of the registry. The choice is recorded as a decision.

        Raises:
            SelectionError: unknown, unusable, or for ``auto`` none or several; every reason is in the message.
            PluginError: the plugin broke the contract, or its backend could not be started.
        """
        status, decision = self.choose(name)
        assert status.spec is not None
        with self._lock:
            backend = self._backends.get(status.name)
            if backend is None:
                backend = self._backends[status.name] = _build(status.spec, status.plugins[0])
        decisions.record(decision)
        _log.info("backend %s: %s", status.name, decision.reason)
        for line in replaced_modules():
            _log.warning("torch was patched: %s; what it answers may be of another device", line)
        return backend

    def load_routes(
        self, add: Callable[[RouteSpec], None] | None = None, *, backend: str | None = None
    ) -> tuple[str, ...]:
        """Register the routes of halma, of the selected backends' plugins and of plugins that bring routes only.

        Safe to call again. Routes carry the distribution they come from, whatever they claim.

        Args:
            add: takes each route; default: the global op table (imports torch).
            backend: also the routes of this backend's plugin, selected or not.

        Returns:
            Why plugins that bring routes only could not be taken; with ``HALMA_STRICT=1`` that is an error.

        Raises:
            PluginError: our own routes, or those of a selected backend's plugin, cannot be loaded.
            BackendError: there is no such backend.
        """
        if add is None:
            from halma.hal.op_table import table

            add = table.add_route
        if backend is not None:
            self.spec(backend)
        names = set(self._backends) if backend is None else {*self._backends, backend}
        wanted = [self._claims(name)[0] for name in sorted(names)]
        reasons: list[str] = []
        strict = settings().strict
        for plugin in [*self._allowed(self._plugins.of_group(ROUTES)), *wanted]:
            try:
                with self._lock:
                    routes = self._plugins.routes(plugin)
                for route in routes:
                    add(replace(route, origin=plugin.distribution))
            except HalmaError as error:
                if strict or plugin.own or plugin in wanted:
                    raise
                reasons.append(f"{plugin.origin}: {explain_failure(error, '')}")
                _log.warning("no routes from %s", reasons[-1])
        return tuple(reasons)

    def plugins(self) -> list[tuple[Plugin, tuple[str, ...], str]]:
        """Every plugin with the hooks it answers and, where it was not loaded, the reason. Loads all that may be."""
        rows: list[tuple[Plugin, tuple[str, ...], str]] = []
        everything = [*self._plugins.of_group(BACKENDS), *self._plugins.of_group(ROUTES)]
        allowed = self._allowed(everything)
        for plugin in everything:
            if plugin not in allowed:
                rows.append((plugin, (), _NOT_ALLOWED))
                continue
            try:
                with self._lock:
                    rows.append((plugin, self._plugins.hooks(plugin), ""))
            except PluginError as error:
                rows.append((plugin, (), explain_failure(error, "")))
        return rows

    def _choose_automatically(self) -> tuple[Status, Decision]:
        statuses = self.statuses()
        doubled = [status for status in statuses if status.doubled]
        if doubled:
            raise PluginError(
                "auto cannot choose: " + " and ".join(f'"{status.name}"' for status in doubled) + " is claimed twice",
                found=[f"{status.name}: {status.reason}" for status in doubled],
                do="uninstall one of them, leave it out of HALMA_PLUGINS, or name a backend",
            )
        eligible = [status for status in statuses if status.eligible]
        if len(eligible) == 1:
            chosen = eligible[0]
            why = "the one accelerator that can be used"
            candidates = [Candidate(s.name, s is chosen, why if s is chosen else _why_not_auto(s)) for s in statuses]
            return chosen, Decision("backend", "backend", chosen.name, tuple(candidates), asked=AUTO)
        if eligible:
            names = " and ".join(status.name for status in eligible)
            raise SelectionError(
                f"several accelerators can be used ({names}), and none was named",
                statuses,
                asked=AUTO,
                do=f"name one: --backend {eligible[0].name}, or HALMA_BACKEND={eligible[0].name}",
            )
        raise SelectionError(
            "no accelerator can be used, and no backend was named", statuses, asked=AUTO, do=self._way_out()
        )

    def _claims(self, name: str) -> tuple[Plugin, ...]:
        """The plugins that claim ``name``; those that HALMA_PLUGINS leaves out count only where no other does."""
        plugins = [plugin for plugin in self._plugins.of_group(BACKENDS) if plugin.name == name]
        return tuple(self._allowed(plugins) or plugins[:1])

    def _allowed(self, plugins: list[Plugin]) -> list[Plugin]:
        wanted = settings().plugins
        if wanted is None:
            return plugins
        everything = [*self._plugins.of_group(BACKENDS), *self._plugins.of_group(ROUTES)]
        known = sorted({plugin.distribution for plugin in everything})
        for name in wanted:
            if normalise(name) not in known:
                close = difflib.get_close_matches(normalise(name), known, n=1)
                raise SettingError(
                    f"HALMA_PLUGINS names {name!r}, which brings no plugin"
                    + (f" (did you mean {close[0]!r}?)" if close else ""),
                    found="distributions with plugins: " + ", ".join(known),
                    do="pip list shows what is installed",
                )
        listed = {normalise(name) for name in wanted}
        return [plugin for plugin in plugins if plugin.own or plugin.distribution in listed]

    def _spec(self, name: str, plugins: tuple[Plugin, ...]) -> BackendSpec:
        plugin, *rivals = plugins
        if rivals:
            raise PluginError("claimed by " + " and by ".join(claimant.origin for claimant in plugins))
        if not self._allowed([plugin]):
            raise PluginError(_NOT_ALLOWED)
        torch_before = "torch" in sys.modules
        with self._lock:
            specs = self._plugins.backends(plugin)
        _note_torch(torch_before, f"the plugin of backend {name}")
        if name not in specs:
            others = " and ".join(sorted(specs)) or "no backend"
            raise PluginError(f"the plugin {plugin.value} registers {others}, its entry point is called {name!r}")
        return specs[name]

    def _probe(self, spec: BackendSpec, plugin: Plugin) -> Probe:
        torch_before = "torch" in sys.modules
        probe = guarded(spec.probe, "its probe failed", plugin.origin)
        _note_torch(torch_before, f"the probe of backend {spec.name}")
        if not isinstance(probe, Probe):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PluginError(f"its probe answered with a {type(probe).__name__}, not a Probe")
        return probe

    def _way_out(self, *, except_for: str = "") -> str:
        if HOST in self.names() and except_for != HOST:
            return f"to run without a GPU: --backend {HOST}"
        return "halma doctor shows what was looked at"


_NOT_ALLOWED: Final = "left out by HALMA_PLUGINS"


def _build(spec: BackendSpec, plugin: Plugin) -> Backend:
    try:
        backend = spec.factory()
    except HalmaError:
        raise  # says more than we could
    except Exception as error:
        reason = explain_failure(error, "its factory failed")
        raise PluginError(f'backend "{spec.name}" could not be started', asked=plugin.origin, found=reason) from error
    said = (backend.name, backend.evidence)
    promised = (spec.name, backend.evidence if spec.evidence == "unknown" else spec.evidence)
    if said != promised or (backend.evidence == "simulated" and not spec.simulated):
        raise PluginError(
            f'backend "{spec.name}" is not what was registered',
            asked=f"name {promised[0]!r}, evidence {promised[1]!r}, simulated={spec.simulated}",
            found=f"name {said[0]!r}, evidence {said[1]!r}",
            do=f"report it to the authors of {plugin.distribution}",
        )
    return backend


def _why_not_auto(status: Status) -> str:
    if not status.usable:
        return status.reason
    simulated = status.spec is not None and status.spec.simulated
    return "simulated: has to be named" if simulated else "not an accelerator: has to be named"


def _note_torch(before: bool, who: str) -> None:
    if not before and "torch" in sys.modules:
        _log.warning("%s imported torch, which a listing must not wait for", who)


_default: Registry | None = None
_default_lock = threading.Lock()


def default_registry() -> Registry:
    """The registry of this process, over the entry points of the environment; made on first use, in every process.

    Raises:
        PluginError: halma's own entry points are missing.
    """
    global _default
    with _default_lock:
        if _default is None:
            _default = Registry(installed_entry_points())
        return _default
