"""The recorded contract of torch_musa, and how it is refreshed from a checkout.

``python -m ci.musa_contract --checkout DIR --output FILE`` writes what the tag of that checkout (``--revision``,
v2.7.1 by default) offers: the names of ``torch_musa`` and of the submodules in ``MODULES``, with parameter names and
defaults; the names bound from C++; the stubs that throw; environment variables; runtime symbols. ``--check FILE``
compares instead. ``--user VERSION NAME DIR`` adds a column of another version from a public package that is known to
run with it: what that package uses without asking first. Nothing else may fill such a column.

The file holds names and signatures, which are facts, and no text of torch_musa (BSD-3-Clause).
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ci import musa_sources as cpp

SCHEMA = "halma.torch-musa-contract/1"
REPOSITORY = "https://github.com/MooreThreads/torch_musa"
PACKAGE = "torch_musa"
EXTENSION = "torch_musa._MUSAC"
MODULES = (
    "torch_musa.core.device",
    "torch_musa.core.stream",
    "torch_musa.core.memory",
    "torch_musa.core.random",
    "torch_musa.core.mccl",
    "torch_musa.core._lazy_init",
    "torch_musa.core._utils",
    "torch_musa.musa_graph.graphs",
    "torch_musa.utils.musa_extension",
)
"""Submodules recorded whole, private names included; of the rest only what ``torch_musa`` itself shows."""

_TORCH_BASES = {
    # torch/csrc/Stream.cpp and Event.cpp of PyTorch 2.7: the bases of _MusaStreamBase and _MusaEventBase.
    "torch.Stream": ["stream_id", "device_index", "device_type", "device", "query", "synchronize", "wait_event",
                     "wait_stream", "record_event"],
    "torch.Event": ["device", "event_id", "from_ipc_handle", "record", "wait", "query", "elapsed_time", "synchronize",
                    "ipc_handle"],
}  # fmt: skip
_EXTENSION_BASES = {"_MusaStreamBase": "torch.Stream", "_MusaEventBase": "torch.Event"}

Entry = dict[str, Any]


class Checkout:
    """The files of one revision of a git checkout (a bare one will do)."""

    def __init__(self, folder: Path, revision: str) -> None:
        self._folder = folder
        self.commit = self._git("rev-parse", f"{revision}^{{commit}}").strip()
        self.files = frozenset(self._git("ls-tree", "-r", "--name-only", self.commit).splitlines())

    def text(self, path: str) -> str:
        """The text of a file."""
        return self._git("show", f"{self.commit}:{path}")

    def module_file(self, module: str) -> str | None:
        """The file of a Python module, or None for one that is not in the checkout."""
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if path in self.files), None)

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(self._folder), *arguments], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"git {' '.join(arguments)} in {self._folder}: {done.stderr.strip()}")
        return done.stdout


class Namespace:
    """What a module of the checkout binds at its top level: name to a dotted path, and the entries defined there."""

    def __init__(self, checkout: Checkout, module: str, seen: dict[str, Namespace]) -> None:
        self.names: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        seen[module] = self
        self._checkout, self._module, self._seen = checkout, module, seen
        self._file = checkout.module_file(module) or ""
        self._is_package = self._file.endswith("__init__.py")
        tree = ast.parse(checkout.text(self._file))
        self._all = next((found for node in tree.body if (found := _all_of(node)) is not None), None)
        for node in tree.body:
            self._read(node)

    @property
    def exported(self) -> dict[str, str]:
        """What ``import *`` takes."""
        if self._all is not None:
            return {name: path for name, path in self.names.items() if name in self._all}
        return {name: path for name, path in self.names.items() if not name.startswith("_")}

    def _read(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ImportFrom):
            self._import(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self.names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self._define(node.name, self._function(node) if isinstance(node, ast.FunctionDef) else self._class(node))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    self._assign(target.id, node.value)
        elif isinstance(node, (ast.If, ast.Try)):
            for inner in [*node.body, *node.orelse, *getattr(node, "finalbody", [])]:
                self._read(inner)

    def _define(self, name: str, entry: Entry) -> None:
        self.names[name] = f"{self._module}.{name}"
        self.entries[f"{self._module}.{name}"] = {**entry, "file": self._file}

    def _assign(self, name: str, value: ast.expr | None) -> None:
        path = dotted(value) if value is not None else None
        if path is not None and path.startswith(f"{PACKAGE}."):
            self.names[name] = path
        elif path in self.names:
            self.names[name] = self.names[path]
        else:
            self._define(name, {"kind": "value"})

    def _import(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            parts = self._module.split(".")
            kept = parts[: len(parts) - node.level + (1 if self._is_package else 0)]
            base = ".".join([*kept, base] if base else kept)
        for alias in node.names:
            if alias.name == "*":
                self.names.update(namespace(self._checkout, base, self._seen).exported)
            else:
                self.names[alias.asname or alias.name] = self._target(base, alias.name)
        if self._is_package and node.level == 1 and node.module:  # importing a submodule binds it in its package
            first = node.module.partition(".")[0]
            self.names.setdefault(first, f"{self._module}.{first}")

    def _target(self, base: str, name: str) -> str:
        if base == EXTENSION or self._checkout.module_file(f"{base}.{name}") or not self._checkout.module_file(base):
            return f"{base}.{name}"
        return namespace(self._checkout, base, self._seen).names.get(name, f"{base}.{name}")

    def _function(self, node: ast.FunctionDef) -> Entry:
        entry: Entry = {"kind": "function", "signature": signature(node.args)}
        returned = dotted(node.returns) if node.returns is not None else None
        if returned in self.names and self.names[returned].startswith(f"{PACKAGE}."):
            entry["returns"] = self.names[returned]
        return entry

    def _class(self, node: ast.ClassDef) -> Entry:
        bases = [path for base in node.bases if (path := dotted(base)) not in (None, "object")]
        members: dict[str, str] = {}
        for item in node.body:
            if isinstance(item, ast.FunctionDef):
                marks = {dotted(mark) for mark in item.decorator_list}
                static = "staticmethod" in marks
                members[item.name] = cpp.PROPERTY if "property" in marks else signature(item.args, bound=not static)
            elif isinstance(item, ast.Assign):
                members.update({target.id: cpp.PROPERTY for target in item.targets if isinstance(target, ast.Name)})
        members.update({name: cpp.PROPERTY for name in _set_on_self(node) if name not in members})
        return {"kind": "class", "bases": [self.names.get(base or "", base) for base in bases], "members": members}


def namespace(checkout: Checkout, module: str, seen: dict[str, Namespace]) -> Namespace:
    """The namespace of a module, read once."""
    return seen[module] if module in seen else Namespace(checkout, module, seen)


def dotted(node: ast.expr | None) -> str | None:
    """``a.b.c`` of names and attributes, else None."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else None
    return None


def signature(arguments: ast.arguments, *, bound: bool = False) -> str:
    """Parameter names and defaults, without annotations; ``bound`` drops the first parameter."""
    copy = ast.parse(f"def f({ast.unparse(arguments)}): pass").body[0]
    if not isinstance(copy, ast.FunctionDef):
        raise TypeError("a signature did not parse as one")
    for argument in [*copy.args.posonlyargs, *copy.args.args, *copy.args.kwonlyargs, copy.args.vararg, copy.args.kwarg]:
        if argument is not None:
            argument.annotation = None
    if bound and (copy.args.posonlyargs or copy.args.args):
        (copy.args.posonlyargs or copy.args.args).pop(0)
    return f"({ast.unparse(copy.args)})"


def _all_of(node: ast.stmt) -> list[str] | None:
    if isinstance(node, ast.Assign) and [dotted(target) for target in node.targets] == ["__all__"]:
        return list(ast.literal_eval(node.value))
    return None


def _set_on_self(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and dotted(inner.value) == "self":
            yield inner.attr


def extension(checkout: Checkout) -> tuple[dict[str, str], dict[str, Entry]]:
    """The names of ``torch_musa._MUSAC``, and its functions and classes."""
    names: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    for path in sorted(checkout.files):
        parts = path.split("/")
        if not (path.startswith("torch_musa/csrc/") and path.endswith(".cpp") and parts[2] in ("core", "distributed")):
            continue
        for bound in cpp.bound_names(checkout.text(path)):
            whole = f"{EXTENSION}.{bound.owner}.{bound.name}" if bound.owner else f"{EXTENSION}.{bound.name}"
            if not bound.owner:
                names[bound.name] = whole
                if bound.signature != cpp.PROPERTY:
                    entries[whole] = {"kind": "function", "signature": bound.signature, "file": path}
                else:
                    entries.setdefault(whole, {"kind": "value", "file": path})
                continue
            base = _EXTENSION_BASES.get(bound.owner)
            owner = entries.setdefault(f"{EXTENSION}.{bound.owner}", {"kind": "class", "file": path})
            owner.update(kind="class", bases=[base] if base else [])
            owner.setdefault("members", {})[bound.name] = bound.signature
    return names, entries


def record(checkout: Checkout, version: str) -> Entry:
    """The table of one checkout."""
    seen: dict[str, Namespace] = {}
    package = namespace(checkout, PACKAGE, seen)
    modules = {PACKAGE: dict(package.names)}
    for module in MODULES:
        modules[module] = {
            name: path for name, path in namespace(checkout, module, seen).names.items() if path.startswith(PACKAGE)
        }
    modules[PACKAGE] = {name: path for name, path in modules[PACKAGE].items() if path.startswith(PACKAGE)}
    modules[EXTENSION], entries = extension(checkout)
    modules[PACKAGE]["_MUSAC"] = EXTENSION
    # Module.cpp adds this one to torch_musa itself, and _lazy_init.py sets the next one there.
    modules[PACKAGE]["_get_device_properties"] = f"{EXTENSION}._get_device_properties"
    wanted = {path for names in modules.values() for path in names.values()}
    for scope in seen.values():
        entries.update({path: entry for path, entry in scope.entries.items() if path in wanted})
    for base, members in _TORCH_BASES.items():
        entries[base] = {
            "kind": "class",
            "file": "torch 2.7",
            "bases": [],
            "members": dict.fromkeys(members, cpp.PROPERTY),
        }
    sources = {path: checkout.text(path) for path in checkout.files if _is_source(path)}
    return {
        "schema": SCHEMA,
        "contract": version,
        "source": {
            "repository": REPOSITORY,
            "tag": f"v{version}",
            "commit": checkout.commit,
            "licence": "BSD-3-Clause",
        },
        "modules": {module: dict(sorted(names.items())) for module, names in sorted(modules.items())},
        "entries": dict(sorted(entries.items())),
        **_from_text(sources),
    }


def _is_source(path: str) -> bool:
    return path.startswith("torch_musa/") and path.endswith((".py", ".cpp", ".h", ".mu", ".muh"))


def _from_text(sources: dict[str, str]) -> Entry:
    stubs = {
        name: {"when": when, "file": path}
        for path, text in sorted(sources.items())
        if path.endswith("unimplemented_functions.cpp")
        for name, when in cpp.throwing_stubs(text).items()
    }
    reached = {
        f"{EXTENSION}._MUSAGraph.{method}": {"stub": stub, "when": stubs[stub]["when"], "file": path}
        for path, text in sorted(sources.items())
        if path.endswith("/MUSAGraph.cpp")
        for method, stub in cpp.methods_that_call(text, "MUSAGraph", frozenset(stubs)).items()
    }
    symbols = [cpp.runtime_symbols(text) for path, text in sources.items() if not path.endswith(".py")]
    environment = {name for text in sources.values() for name in cpp.environment_names(text)}
    if any("MUSA_VISIBLE_DEVICES" in text for text in sources.values()):
        environment.add("MUSA_VISIBLE_DEVICES")  # read by the driver; torch_musa names it in texts
    return {
        "stubs": stubs,
        "reaches_stub": reached,
        "environment": sorted(environment),
        "runtime_symbols": sorted({name for runtime, _ in symbols for name in runtime}),
        "driver_symbols": sorted({name for _, driver in symbols for name in driver}),
        "distributed_backend": "mccl",
    }


def used_names(folder: Path) -> dict[str, str]:
    """Names of ``torch_musa`` that a package reads as attributes and does not set itself, with a file that does."""
    used: dict[str, str] = {}
    own: set[str] = set()
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            whole = dotted(node) if isinstance(node, ast.Attribute) else None
            name = next(
                (whole[len(one) :] for one in ("torch.musa.", "torch_musa.") if whole and whole.startswith(one)), ""
            )
            if not name or name.startswith("__"):
                continue
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                used.setdefault(name, path.relative_to(folder).as_posix())
            else:
                own.add(name)
    return {name: file for name, file in sorted(used.items()) if name not in own}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the head of this file."""
    parser = argparse.ArgumentParser(prog="python -m ci.musa_contract", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkout", type=Path, required=True, help="a git checkout of torch_musa")
    parser.add_argument("--revision", default="v2.7.1", help="the tag to record (v2.7.1)")
    parser.add_argument("--user", nargs=3, action="append", default=[], metavar=("VERSION", "NAME", "DIR"))
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--output", type=Path, help="where the table goes")
    target.add_argument("--check", type=Path, help="a recorded table to compare with; exits 1 when it differs")
    asked = parser.parse_args(arguments)
    table = record(Checkout(asked.checkout, asked.revision), asked.revision.removeprefix("v"))
    table["other_versions"] = {
        version: {"source": name, "used": used_names(Path(folder)), "rest": "unknown"}
        for version, name, folder in asked.user
    }
    text = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
    if asked.output:
        asked.output.write_text(text, encoding="utf-8")
        return 0
    recorded = json.loads(asked.check.read_text(encoding="utf-8"))
    changed = [part for part in table if part != "other_versions" and table[part] != recorded.get(part)]
    print(f"{asked.check} differs in: {', '.join(changed)}" if changed else f"{asked.check} is what the checkout says")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
