"""Every ``HALMA_*`` variable: its type, its default and what it means. Nothing else reads them."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Final

from halma.hal.errors import SettingError

PREFIX: Final = "HALMA_"
OF_THE_MACHINE: Final = ("HALMA_MUSA_SIM",)
"""What says which devices there are, not how to use them: tests that take settings away leave these."""
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


def _text(value: str) -> str:
    return value


def _switch(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError("0 or 1")
    return value == "1"


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        raise ValueError("a number of seconds above 0") from None
    if not 0 < seconds < 1e9:  # nanoseconds of it fit 64 bits
        raise ValueError("a number of seconds above 0")
    return seconds


_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def _bytes(value: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", value, re.IGNORECASE)
    if found is None:
        raise ValueError("bytes, with or without a unit: 800MiB, 2G, 0")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _level(value: str) -> str:
    if value.lower() not in LOG_LEVELS:
        raise ValueError("one of " + ", ".join(LOG_LEVELS))
    return value.lower()


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for part in value.split(",") if (name := part.strip()))


def _routes(value: str) -> Mapping[str, str]:
    chosen: dict[str, str] = {}
    for part in _names(value):
        op, separator, route = (piece.strip() for piece in part.partition("="))
        if not (separator and op and route):
            raise ValueError(f"op=route,op=route; {part!r} is not op=route")
        if chosen.setdefault(op, route) != route:
            raise ValueError(f"one route an op; {op!r} has {chosen[op]!r} and {route!r}")
    return MappingProxyType(chosen)


def _setting(variable: str, parse: Callable[[str], Any], default: Any, shown: str, meaning: str) -> Any:
    """A field of :class:`Settings`; ``shown`` is the default as one would write it, or would have to."""
    facts = {"variable": variable, "parse": parse, "shown": shown, "meaning": meaning}
    return field(default_factory=lambda: default, metadata=facts)  # a mapping is not accepted as a plain default


GRAPH_ROLES: Final = ("decode", "draft", "verify", "prefill", "ffn")
"""Roles of descriptors that have a capture switch of their own."""


@dataclass(frozen=True)
class GraphSwitch:
    """Whether steps may be captured, for all roles and by role.

    Attributes:
        on: False: nothing is captured (``HALMA_GRAPH=0``).
        roles_off: roles that run eagerly while the others are captured (``HALMA_GRAPH_DECODE=0``, ...).
    """

    on: bool = True
    roles_off: frozenset[str] = frozenset()

    def off_reason(self, role: str) -> str | None:
        """Why steps of ``role`` are not captured, or None. Roles without a switch follow the one for all."""
        if not self.on:
            return "capture is switched off"
        if role in self.roles_off:
            return f"capture of {role} is switched off"
        return None


def _role_switch(role: str) -> Any:
    meaning = f"1: {role} steps are captured; 0: they run eagerly, other roles as HALMA_GRAPH says"
    return _setting(f"HALMA_GRAPH_{role.upper()}", _switch, True, "1", meaning)


@dataclass(frozen=True)
class Settings:
    """The settings in effect; see :func:`settings`. The meaning of a field is in its metadata and :func:`describe`."""

    backend: str | None = _setting(
        "HALMA_BACKEND", _text, None, "auto", "the backend to use; auto: the one accelerator that can be used"
    )
    plugins: tuple[str, ...] | None = _setting(
        "HALMA_PLUGINS",
        _names,
        None,
        "(all)",
        "distributions whose plugins may be loaded, apart from our own, separated by commas; empty: none",
    )
    graph: bool = _setting("HALMA_GRAPH", _switch, True, "1", "1: capture and replay; 0: every step runs eagerly")
    checked: bool = _setting(
        "HALMA_CHECKED",
        _switch,
        False,
        "0",
        "1: poison freed memory and padding, refuse stale outputs, compare the calls of ranks",
    )
    routes: Mapping[str, str] = _setting(
        "HALMA_ROUTE",
        _routes,
        MappingProxyType({}),
        "(none)",
        "routes to take, as op=route,op=route; one that does not apply is an error",
    )
    strict: bool = _setting(
        "HALMA_STRICT", _switch, False, "0", "1: what would only be reported (a fallback, a broken plugin) is an error"
    )
    log: str = _setting("HALMA_LOG", _level, "warning", "warning", "least level to log: " + ", ".join(LOG_LEVELS))
    collective_bound: float = _setting(
        "HALMA_COLLECTIVE_BOUND",
        _seconds,
        300.0,
        "300",
        "seconds that a collective waits for another rank before it gives up and names it",
    )
    graph_decode: bool = _role_switch("decode")
    graph_draft: bool = _role_switch("draft")
    graph_verify: bool = _role_switch("verify")
    graph_prefill: bool = _role_switch("prefill")
    graph_ffn: bool = _role_switch("ffn")
    ffn_graph_reserve: int = _setting(
        "HALMA_FFN_GRAPH_RESERVE",
        _bytes,
        1 << 30,
        "1GiB",
        "device memory that captures of ffn items leave free, beyond what the exchange of rows needs (KiB, MiB, GiB)",
    )
    musa_sim: str | None = _setting(
        "HALMA_MUSA_SIM",
        _text,
        None,
        "(off)",
        "cpu or cuda: the backend musa runs over a stand-in for its hardware there, and says simulated everywhere",
    )

    @property
    def graph_switch(self) -> GraphSwitch:
        """``HALMA_GRAPH`` and its switches by role, as one value."""
        return GraphSwitch(self.graph, frozenset(role for role in GRAPH_ROLES if not getattr(self, f"graph_{role}")))


@dataclass(frozen=True)
class SettingRow:
    """One setting for a person: ``value`` is what the environment holds, or None where it holds nothing."""

    variable: str
    default: str
    meaning: str
    value: str | None


_EMPTY_MEANS_SOMETHING: Final = ("HALMA_PLUGINS",)


def settings(environment: Mapping[str, str] | None = None) -> Settings:
    """The settings as the environment has them now; read anew at each call, so that tests and workers agree.

    An empty variable counts as unset, except ``HALMA_PLUGINS``, where it means that no plugin is wanted.

    Raises:
        SettingError: a variable holds something it cannot mean.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    for one in fields(Settings):
        raw = _given(one, environment)
        if raw is None:
            continue
        variable: str = one.metadata["variable"]
        try:
            values[one.name] = one.metadata["parse"](raw)
        except ValueError as error:
            raise SettingError(
                f"{variable} cannot be {raw!r}",
                asked=f"{variable}={raw}",
                found=f"it takes {error}",
                do=f"unset {variable} (default: {one.metadata['shown']}): {one.metadata['meaning']}",
            ) from None
    return Settings(**values)


def refuse_unknown(environment: Mapping[str, str] | None = None) -> None:
    """Refuse variables that look like ours and are not: a misspelt one would change nothing, silently.

    Raises:
        SettingError: naming each of them, and the one that was probably meant.
    """
    environment = os.environ if environment is None else environment
    known = [one.metadata["variable"] for one in fields(Settings)]
    unknown = sorted(name for name in environment if name.startswith(PREFIX) and name not in known)
    if not unknown:
        return
    found: list[str] = []
    for name in unknown:
        # Compared without the prefix, which makes everything look alike.
        close = difflib.get_close_matches(name.removeprefix(PREFIX), [k.removeprefix(PREFIX) for k in known], n=1)
        found.append(f"{name}={environment[name]}" + (f" (did you mean {PREFIX}{close[0]}?)" if close else ""))
    raise SettingError(
        "no such setting" if len(unknown) == 1 else "no such settings",
        found=found,
        do=("unset " + " ".join(unknown), "known: " + ", ".join(known)),
    )


def describe(environment: Mapping[str, str] | None = None) -> list[SettingRow]:
    """Every setting with what the environment holds, unchecked: for reports on a broken environment too."""
    environment = os.environ if environment is None else environment
    return [
        SettingRow(one.metadata["variable"], one.metadata["shown"], one.metadata["meaning"], _given(one, environment))
        for one in fields(Settings)
    ]


def markdown_table() -> str:
    """The table of settings for the documentation."""
    rows = ["| variable | default | meaning |", "|---|---|---|"]
    rows += [f"| `{row.variable}` | {row.default} | {row.meaning} |" for row in describe({})]
    return "\n".join(rows) + "\n"


def _given(one: Field[Any], environment: Mapping[str, str]) -> str | None:
    variable: str = one.metadata["variable"]
    raw = environment.get(variable)
    if raw is None:
        return None
    raw = raw.strip()
    return raw if raw or variable in _EMPTY_MEANS_SOMETHING else None
