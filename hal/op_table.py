"""Every op by name, with its reference and its routes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch

from halma.hal.errors import DispatchError
from halma.hal.routes import OWN, REFERENCE, RouteSpec


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def like(tensor: torch.Tensor) -> Spec:
    """The spec of a tensor like this one."""
    return Spec(tuple(tensor.shape), tensor.dtype)


OutRule = Callable[..., Spec | tuple[Spec, ...]]


@dataclass
class OpSpec:
    """An op: see :mod:`halma.hal.dispatch`. ``out`` maps the arguments to the spec(s) of what it writes.

    ``padded``: it works beside rows that are not real, so a route is used by default only where poison in them,
    in scratch and in staging changes no bit (:mod:`halma.hal.testing.poison`).
    """

    name: str
    reference: Callable[..., None]
    out: OutRule | None
    signature: inspect.Signature
    routes: list[RouteSpec] = field(default_factory=list[RouteSpec])
    padded: bool = False


class OpTable:
    """Every op by name, with its routes. There is one global table; tests make their own."""

    def __init__(self) -> None:
        self.ops: dict[str, OpSpec] = {}
        self._early: dict[str, list[RouteSpec]] = {}
        self._admitted: set[tuple[str, str, str]] = set()

    def define(self, name: str, *, out: OutRule | None, padded: bool = False) -> Callable[[Any], OpSpec]:
        """Decorator: the function below is the reference of op ``name``.

        Raises:
            DispatchError: the name is taken, or the reference lacks the keyword-only ``ws`` (and ``out``).
        """

        def decorate(reference: Callable[..., None]) -> OpSpec:
            signature = inspect.signature(reference)
            for keyword in ("out", "ws") if out is not None else ("ws",):
                parameter = signature.parameters.get(keyword)
                if parameter is None or parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                    raise DispatchError(f"the reference of op {name!r} must take {keyword!r} as a keyword argument")
            if name in self.ops:
                raise DispatchError(
                    f"two ops are called {name!r}",
                    found=(self.ops[name].reference.__module__, reference.__module__),
                    do="rename one of them",
                )
            self.ops[name] = OpSpec(name, reference, out, signature, self._early.pop(name, []), padded)
            return self.ops[name]

        return decorate

    def add_route(self, route: RouteSpec) -> None:
        """Register a route; its op may be defined later. The same route once more changes nothing (B7).

        Raises:
            DispatchError: another route of the op has this name on a common backend, or it is ``reference``.
        """
        if route.name == REFERENCE:
            raise DispatchError(f"a route of {route.op!r} may not be called {REFERENCE!r}: that is the op's meaning")
        known = self.ops[route.op].routes if route.op in self.ops else self._early.setdefault(route.op, [])
        for other in known:
            if other.overlaps(route):
                if other.same_as(route):
                    return
                raise DispatchError(
                    f"two routes of {route.op!r} are called {route.name!r}",
                    found=(f"one from {other.origin}", f"one from {route.origin}"),
                    do="uninstall or rename one of them",
                )
        known.append(route)
        known.sort(key=lambda r: -r.priority)

    def get(self, name: str) -> OpSpec:
        """The op called ``name``.

        Raises:
            DispatchError: there is none; the message lists those there are.
        """
        if name not in self.ops:
            near = get_close_matches(name, self.ops, n=1)
            raise DispatchError(
                f"no op is called {name!r}" + (f" (did you mean {near[0]}?)" if near else ""),
                found="known: " + ", ".join(sorted(self.ops)),
                do="halma explain lists the ops with their routes",
            )
        return self.ops[name]

    def unclaimed(self) -> Sequence[RouteSpec]:
        """Routes of ops that nobody defined: a misspelt name, or an op module that was not imported."""
        return [route for routes in self._early.values() for route in routes]

    def admit(self, route: RouteSpec) -> None:
        """Let a stranger's route be chosen by default from now on: it passed the op's admission suite."""
        self._admitted.add((route.op, route.name, route.origin))

    def why_not_admitted(self, route: RouteSpec) -> str | None:
        """The reason why ``route`` is not chosen by default, or None where it may be."""
        if route.origin == OWN or (route.op, route.name, route.origin) in self._admitted:
            return None
        return f"of {route.origin}, has not passed the admission suite of {route.op!r} here"


table = OpTable()


def op(name: str, *, out: OutRule | None = None, padded: bool = False) -> Callable[[Any], OpSpec]:
    """Define an op in the global table; see :meth:`OpTable.define`.

    An op with ``out=None`` works in place on its arguments (state, streams) and returns nothing.
    """
    return table.define(name, out=out, padded=padded)
