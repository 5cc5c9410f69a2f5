"""What a plugin says about an op's implementation: a route, its requirements and its reasons.

Apart from the dispatcher and without torch, so that a plugin can be registered and listed cheaply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

REFERENCE = "reference"
"""Name of the route that every op has: its meaning, in plain PyTorch."""

OWN = "halma"
"""Origin of our own routes; our tests admit them, a stranger's route passes the admission suite first."""


@dataclass(frozen=True)
class Call:
    """What a requirement sees: the op's name and the arguments of a call, by name, defaults included.

    The choice is kept for every later call with the same shapes, dtypes and formats, so a requirement may
    look at those and at plain values, never at contents, strides or addresses. ``facts`` are the program's
    (:mod:`halma.hal.policy`), the same for all its calls.
    """

    op: str
    arguments: Mapping[str, Any]
    backend: str
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


Requirement = Callable[[Call], "str | None"]
"""Returns None where it holds, else the reason, as a clause: ``"M=1 is below 8 (its tile)"``."""


class Launcher(Protocol):
    """An opaque route's factory: takes scratch, checks, and returns the launch that runs it.

    The launch may run many times (a graph replays it) and takes nothing from the workspace itself.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Callable[[], None]: ...


@dataclass(frozen=True)
class RouteSpec:
    """One implementation of an op, offered through the hook ``halma_register_routes``.

    Args:
        op: the op's name.
        name: the route's name: ``triton``, ``simt``, ``vendor``, or a backend's own.
        backends: names of the backends it is for; empty means any.
        needs: requirements, checked in order; each answers with a reason.
        factory: imports and returns the implementation; called when first chosen. A transparent
            implementation has the reference's signature and is made of ATen calls. An *opaque* one
            (compiled code, loops over rows) returns a launch: it is recorded as one node.
        priority: the larger is tried first.
        opaque: see factory.
        origin: the distribution that brought it, for reports.
    """

    op: str
    name: str
    factory: Callable[[], Callable[..., Any]]
    backends: tuple[str, ...] = ()
    needs: tuple[Requirement, ...] = ()
    priority: int = 0
    opaque: bool = False
    origin: str = OWN

    def refusal(self, call: Call) -> str | None:
        """Why this route does not apply to ``call``, or None."""
        if self.backends and call.backend not in self.backends:
            return f"is for {' and '.join(self.backends)}, the backend is {call.backend}"
        for need in self.needs:
            reason = need(call)
            if reason is not None:
                return reason
        return None

    def overlaps(self, other: RouteSpec) -> bool:
        """Whether one call could mean both by the same name."""
        if (self.op, self.name) != (other.op, other.name):
            return False
        return not self.backends or not other.backends or bool(set(self.backends) & set(other.backends))

    def same_as(self, other: RouteSpec) -> bool:
        """Whether ``other`` is this route registered once more (B7): a lambda is a new object each time."""
        return self._identity() == other._identity()

    def _identity(self) -> tuple[Any, ...]:
        needs = tuple(_code_of(need) for need in self.needs)
        return (
            self.op,
            self.name,
            _code_of(self.factory),
            self.backends,
            needs,
            self.priority,
            self.opaque,
            self.origin,
        )


def _code_of(function: Callable[..., Any]) -> Any:
    if isinstance(function, partial):
        bound = cast("partial[Any]", function)
        return (_code_of(bound.func), bound.args, tuple(bound.keywords.items()))
    return getattr(function, "__code__", function)
