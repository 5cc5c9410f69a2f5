"""The recorded contract of torch_musa as questions: does this name exist, may it be called like this, does it throw."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from ci.musa_sources import PROPERTY

FILE = Path(__file__).resolve().parent.parent / "tests" / "contract" / "torch_musa-2.7.1.json"
PACKAGE = "torch_musa"


@dataclass(frozen=True)
class Ref:
    """A module, function or class of torch_musa by its dotted path; ``signature`` where it is a bound method."""

    path: str
    signature: str | None = None


@dataclass(frozen=True)
class Instance:
    """An object of the class at ``path``."""

    path: str


Thing = Ref | Instance


class Absent(Exception):
    """The contract has no such name; the text says where it was looked for."""


class Contract:
    """One table.

    Args:
        table: what ``python -m ci.musa_contract`` wrote.
    """

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.version: str = table["contract"]
        self.modules: Mapping[str, Mapping[str, str]] = table["modules"]
        self.entries: Mapping[str, Mapping[str, Any]] = table["entries"]
        self.stubs: Mapping[str, Mapping[str, str]] = table["stubs"]
        self.reaches_stub: Mapping[str, Mapping[str, str]] = table["reaches_stub"]
        self.environment = frozenset(table["environment"])
        self.symbols = frozenset([*table["runtime_symbols"], *table["driver_symbols"]])
        self.attributes = frozenset(self._every_attribute())

    def attribute(self, owner: Thing, name: str) -> Thing | None:
        """``owner.name``; None where the contract says nothing of what it is.

        Raises:
            Absent: there is no such name.
        """
        if isinstance(owner, Instance) or self.kind(owner.path) == "class":
            return self._member(owner, name)
        names = self.modules.get(owner.path)
        if names is not None and name in names:
            return Ref(names[name])
        inner = f"{owner.path}.{name}"
        if inner in self.modules or inner in self.entries:
            return Ref(inner)
        if names is None and any(path.startswith(f"{inner}.") for path in self.modules):
            return Ref(inner)  # a package on the way to a recorded module
        if names is None and self.kind(owner.path) in ("value", "function"):
            return None
        raise Absent(f"{owner.path} has no {name}" + ("" if names is not None else " that is recorded"))

    def kind(self, path: str) -> str:
        """ "class", "function", "value", or "module"."""
        return self.entries[path]["kind"] if path in self.entries else "module"

    def call(
        self, called: Ref, positional: int, keywords: Iterable[str], *, open_ended: bool
    ) -> tuple[list[str], Thing | None]:
        """What is wrong with a call, and what it gives.

        Args:
            positional: number of positional arguments.
            keywords: names of keyword arguments.
            open_ended: the call also has ``*args`` or ``**kwargs``, so missing arguments cannot be seen.
        """
        entry = self.entries.get(called.path, {})
        if entry.get("kind") == "class" and called.signature is None:
            text = self._constructor(called.path)
            gives: Thing | None = Instance(called.path)
        else:
            text = called.signature or entry.get("signature")
            gives = Instance(entry["returns"]) if entry.get("returns") else None
        if text is None:
            return [], gives
        return mismatches(text, positional, list(keywords), open_ended=open_ended), gives

    def throws(self, path: str) -> tuple[str, str] | None:
        """(the stub, when) for a method that ends in a stub, given as ``class path.method``; else None."""
        owner, _, name = path.rpartition(".")
        for base in self.lineage(owner):
            found = self.reaches_stub.get(f"{base}.{name}")
            if found:
                return found["stub"], found["when"]
        return None

    def lineage(self, path: str) -> list[str]:
        """A class and its bases, as far as they are recorded."""
        found, left = [], [path]
        while left:
            one = left.pop(0)
            if one in self.entries and one not in found:
                found.append(one)
                left.extend(self.entries[one].get("bases", []))
        return found

    def members(self, path: str) -> dict[str, str]:
        """Members of a class with those of its bases: name to a signature, or ``property``."""
        return {
            name: kind
            for base in reversed(self.lineage(path))
            for name, kind in self.entries[base].get("members", {}).items()
        }

    def _member(self, owner: Thing, name: str) -> Thing | None:
        members = self.members(owner.path)
        if name not in members:
            raise Absent(f"{owner.path} has no {name}")
        if members[name] == PROPERTY:
            return None
        return Ref(f"{owner.path}.{name}", members[name] if isinstance(owner, Instance) else None)

    def _constructor(self, path: str) -> str | None:
        members = self.members(path)
        return members.get("__new__", members.get("__init__")) if "__new__" in members else members.get("__init__")

    def _every_attribute(self) -> Iterable[str]:
        for names in self.modules.values():
            yield from names
        for entry in self.entries.values():
            yield from entry.get("members", {})


@cache
def contract() -> Contract:
    """The recorded contract of torch_musa 2.7.1."""
    return Contract(json.loads(FILE.read_text(encoding="utf-8")))


def mismatches(signature: str, positional: int, keywords: list[str], *, open_ended: bool = False) -> list[str]:
    """What a call does that ``signature`` does not allow."""
    parsed = ast.parse(f"def f{signature}: pass").body[0]
    if not isinstance(parsed, ast.FunctionDef):
        raise TypeError(f"{signature} is no signature")
    args = parsed.args
    places = [argument.arg for argument in [*args.posonlyargs, *args.args]]
    named = {argument.arg for argument in [*args.args, *args.kwonlyargs]}
    problems: list[str] = []
    if args.vararg is None and positional > len(places):
        problems.append(f"takes {len(places)} positional arguments, gets {positional}")
    for keyword in keywords:
        if keyword not in named and args.kwarg is None:
            problems.append(f"has no parameter {keyword}: {signature}")
        elif keyword in places[:positional]:
            problems.append(f"gets {keyword} twice")
    needed = places[positional : len(places) - len(args.defaults)]
    needed += [one.arg for one, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None]
    missing = [name for name in needed if name not in keywords]
    if missing and not open_ended:
        problems.append(f"needs {', '.join(missing)}: {signature}")
    return problems


def stand_in_differences(module: ModuleType, found: Contract | None = None) -> list[str]:
    """How a stand-in for ``torch_musa`` differs from the contract: names that it must not have, and signatures.

    What the stand-in leaves out is no difference: using it fails. Names that start with ``__`` are Python's own.
    """
    found = found or contract()
    problems: list[str] = []
    for name, value in vars(module).items():
        if name.startswith("__") or isinstance(value, ModuleType):
            continue
        try:
            meant = found.attribute(Ref(PACKAGE), name)
        except Absent as error:
            if not name.startswith("_halma"):
                problems.append(str(error))
            continue
        if isinstance(value, type) and meant is not None and found.kind(meant.path) == "class":
            problems.extend(_class_differences(value, meant.path, found))
        elif callable(value) and meant is not None:
            recorded = found.entries.get(meant.path, {}).get("signature")
            problems.extend(_signature_differences(f"torch_musa.{name}", value, recorded, bound=False))
    return problems


def _class_differences(made: type, path: str, found: Contract) -> list[str]:
    members, problems = found.members(path), []
    for name, value in vars(made).items():
        if name.startswith("_") and name not in ("__init__", "__new__"):
            continue
        if name not in members:
            if name not in ("__init__", "__new__"):
                problems.append(f"{path} has no {name}")
            continue
        inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        if callable(inner) and members[name] != PROPERTY:
            static = isinstance(value, staticmethod) and name != "__new__"
            problems.extend(_signature_differences(f"{path}.{name}", inner, members[name], bound=not static))
    return problems


def _signature_differences(name: str, value: Any, recorded: str | None, *, bound: bool) -> list[str]:
    if recorded is None or "*unknown" in recorded or "a0" in recorded or "argument, /" in recorded:
        return []  # bound from C++: the source has no names to compare with
    parameters = list(inspect.signature(value).parameters.values())[1 if bound else 0 :]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    text = (
        ast.unparse(ast.parse(f"def f{inspect.Signature(plain)}: pass")).removeprefix("def f").partition("):")[0] + ")"
    )
    return [] if text == recorded else [f"{name}{text} stands in for {recorded}"]
