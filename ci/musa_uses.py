"""Every use that code makes of torch_musa and of MUSA's libraries, compared with the recorded contract.

``python -m ci.musa_uses [FOLDER...]`` prints what does not agree with torch_musa 2.7.1 and exits 1 if anything does
not. It reads syntax trees and imports nothing. What it follows: ``torch_musa`` and ``torch.musa`` by any name they are
given, ``_MUSAC``, modules asked for by ``importlib`` and ``sys.modules``, ``getattr`` with a name, the shared code's
``family.module``, and objects made by or annotated with classes of the contract. What it cannot follow (an object that
came through an untyped variable) is still held to two rules: no name that only torch.cuda has, and no ``musa_*`` name
that the contract lacks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ci.musa_contract import dotted
from ci.musa_table import PACKAGE, Absent, Contract, Instance, Ref, Thing, contract

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("backends/musa", "backends/torch_device")
NOT_OURS = "backends/musa/simulator"
"""A stand-in defines the contract's names instead of using them; see ``musa_table.stand_in_differences``."""

HANDLES = ("family.module", "_family.module")
"""What the code shared with CUDA calls the family's module of torch."""

HINTS: Mapping[str, str] = {
    "DeviceStream.torch": "torch_musa.core.stream.Stream",
    "DeviceEvent.torch": "torch_musa.core.stream.Event",
    ".queue": "torch_musa.core.stream.Stream",
    ".stand_in": "torch_musa.core.stream.Stream",
}
"""Untyped attributes of the shared code: of ``self`` in a class, or of any object (with a leading dot)."""

ONLY_CUDA = frozenset({
    "cuda_stream", "cuda_event", "raw_cuda_graph", "raw_cuda_graph_exec", "keep_graph", "cudart", "nvtx", "nccl",
    "caching_allocator_alloc", "caching_allocator_delete", "get_stream_from_external", "set_sync_debug_mode",
    "get_sync_debug_mode", "list_gpu_processes", "host_memory_stats", "get_gencode_flags", "jiterator",
    "_get_device_index", "_is_compiled", "CUDAGraph", "warp_size", "shared_memory_per_block_optin", "L2_cache_size",
    "regs_per_multiprocessor", "max_threads_per_multi_processor", "gcnArchName", "pci_bus_id",
})  # fmt: skip
"""Attributes of torch.cuda's modules and objects that torch_musa 2.7.1 lacks."""

SEEN_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(
        ["musaMemset", "musaStreamCreateWithFlags", "musaDeviceGetAttribute"],
        "torchada 0.1.103 (PyPI) torchada/_mappings/cuda_runtime.py",
    ),
    "muFuncSetAttribute": "flagos-ai/FlagTree third_party/mthreads/backend/driver.c",
    "musaRuntimeGetVersion": "zml/xla xla/stream_executor/musa/musa_runtime.cc",
    "musaGetErrorName": "wudi0717/openxla xla/stream_executor/musa/musa_executor.cc",
    **dict.fromkeys(
        ["muInit", "muModuleLoadData", "muModuleGetFunction", "muFuncGetAttribute", "muPointerGetAttribute",
         "muLaunchKernel", "muGetErrorName", "muDriverGetVersion", "muModuleUnload"],
        "zml/xla xla/stream_executor/musa/musa_driver.cc",
    ),
}  # fmt: skip
"""Library functions that torch_musa's sources do not call, and the public source that does."""

_SYMBOL = re.compile(r"(?:musa|mu)[A-Z]\w*")
_CUDA_SYMBOL = re.compile(r"(?:cuda|cu)[A-Z]\w*")
_ENVIRONMENT = re.compile(r"(?:MUSA|MCCL|TORCH_MCCL|TORCH_MUSA|PYTORCH_MUSA)_[A-Z0-9_]+")
_MUSA_ATTRIBUTE = re.compile(r"_?musa_\w+|_MUSAC|MUSA[A-Z]\w+")
_Scope = dict[str, Thing]


@dataclass(frozen=True)
class Finding:
    """One disagreement."""

    file: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what} (contract {contract().version})"


@dataclass
class _Reader:
    """Reads one file. Names are looked up in the function, then in the module; the order of statements is ignored."""

    tree: ast.Module
    file: str
    found: Contract
    findings: list[Finding] = field(default_factory=list)
    members: dict[str, Thing] = field(default_factory=dict)
    """``Class.attribute`` of self, and what it holds."""

    def read(self) -> list[Finding]:
        outer: _Scope = {}
        for _ in range(2):  # a second time, for names bound below their first use
            self._bind(self.tree, outer, None)
        self._visit(self.tree, outer, None, guarded=False)
        self._names()
        return sorted(set(self.findings), key=lambda one: (one.line, one.what))

    # -- what names stand for -----------------------------------------------------------------------

    def _bind(self, scope: ast.AST, names: _Scope, owner: str | None) -> None:
        for node in _own_nodes(scope):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == PACKAGE:
                        names[alias.asname or PACKAGE] = Ref(alias.name if alias.asname else PACKAGE)
            elif isinstance(node, ast.ImportFrom) and node.module and _is_musa(node.module):
                module = Ref(node.module.replace("torch.musa", PACKAGE, 1))
                for alias in node.names:
                    if (thing := self._attribute(module, alias.name, node)) is not None:
                        names[alias.asname or alias.name] = thing
            elif isinstance(node, ast.Assign):
                self._assign(node.targets, self.resolve(node.value, names, owner), names, owner)
            elif isinstance(node, ast.AnnAssign):
                thing = self._annotated(node.annotation, names, owner)
                self._assign(
                    [node.target], thing or (node.value and self.resolve(node.value, names, owner)), names, owner
                )
            elif isinstance(node, ast.arg) and node.annotation is not None:
                if (thing := self._annotated(node.annotation, names, owner)) is not None:
                    names[node.arg] = thing
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    if isinstance(item.optional_vars, ast.Name):
                        self._assign([item.optional_vars], self.resolve(item.context_expr, names, owner), names, owner)

    def _assign(self, targets: list[ast.expr], thing: Thing | None, names: _Scope, owner: str | None) -> None:
        for target in targets:
            if isinstance(target, ast.Name):
                if thing is not None:
                    names[target.id] = thing
            elif isinstance(target, ast.Attribute) and dotted(target.value) == "self" and owner and thing is not None:
                self.members[f"{owner}.{target.attr}"] = thing

    def _annotated(self, annotation: ast.expr, names: _Scope, owner: str | None) -> Thing | None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if isinstance(annotation, ast.BinOp):  # X | None
            return self._annotated(annotation.left, names, owner)
        thing = self.resolve(annotation, names, owner) if isinstance(annotation, (ast.Name, ast.Attribute)) else None
        return Instance(thing.path) if isinstance(thing, Ref) and self.found.kind(thing.path) == "class" else None

    def resolve(self, node: ast.expr | None, names: _Scope, owner: str | None) -> Thing | None:
        """What an expression is, as far as the contract can say; disagreements are noted on the way."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._resolve_attribute(node, names, owner)
        if isinstance(node, ast.Call):
            return self._resolve_call(node, names, owner)
        if isinstance(node, ast.Subscript) and dotted(node.value) == "sys.modules":
            return self._module_named(node.slice)
        if isinstance(node, ast.IfExp):
            return self.resolve(node.body, names, owner) or self.resolve(node.orelse, names, owner)
        if isinstance(node, ast.NamedExpr):
            return self.resolve(node.value, names, owner)
        return None

    def _resolve_attribute(self, node: ast.Attribute, names: _Scope, owner: str | None) -> Thing | None:
        whole = dotted(node) or ""
        if whole == "torch.musa" or any(whole == handle or whole.endswith(f".{handle}") for handle in HANDLES):
            return Ref(PACKAGE)
        if owner and dotted(node.value) == "self":
            known = self.members.get(f"{owner}.{node.attr}")
            if known is not None:
                return known
            if f"{owner}.{node.attr}" in HINTS:
                return Instance(HINTS[f"{owner}.{node.attr}"])
        base = self.resolve(node.value, names, owner)
        if base is not None:
            return self._attribute(base, node.attr, node)
        return Instance(HINTS[f".{node.attr}"]) if f".{node.attr}" in HINTS else None

    def _resolve_call(self, node: ast.Call, names: _Scope, owner: str | None) -> Thing | None:
        name = dotted(node.func)
        if name in ("importlib.import_module", "import_module", "__import__") and node.args:
            return self._module_named(node.args[0])
        if name in ("getattr", "hasattr") and len(node.args) >= 2:
            base = self.resolve(node.args[0], names, owner)
            asked = node.args[1]
            if base is not None and isinstance(asked, ast.Constant) and isinstance(asked.value, str):
                optional = name == "hasattr" or len(node.args) == 3
                return self._attribute(base, asked.value, node, quietly=optional)
            return None
        called = self.resolve(node.func, names, owner)
        if not isinstance(called, Ref):
            return None
        open_ended = any(isinstance(one, ast.Starred) for one in node.args) or any(
            one.arg is None for one in node.keywords
        )
        positional = sum(not isinstance(one, ast.Starred) for one in node.args)
        keywords = [one.arg for one in node.keywords if one.arg is not None]
        problems, gives = self.found.call(called, positional, keywords, open_ended=open_ended)
        for problem in problems:
            self._note(node, f"{called.path} {problem}")
        return gives

    def _module_named(self, node: ast.expr) -> Thing | None:
        if isinstance(node, ast.Name) and node.id == "NAME":
            return None
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_musa(node.value):
            return Ref(node.value.replace("torch.musa", PACKAGE, 1))
        return None

    def _attribute(self, base: Thing, name: str, node: ast.AST, *, quietly: bool = False) -> Thing | None:
        if name.startswith("__") and name != "__version__":
            return None
        try:
            return self.found.attribute(base, name)
        except Absent as error:
            if not quietly:
                self._note(node, str(error))
            return None

    # -- walking ------------------------------------------------------------------------------------

    def _visit(self, node: ast.AST, names: _Scope, owner: str | None, *, guarded: bool) -> None:
        if isinstance(node, ast.expr):
            self.resolve(node, names, owner)
            if isinstance(node, ast.Call):
                self._stub_called(node, names, owner, guarded)
        inner_names, inner_owner = names, owner
        if isinstance(node, ast.ClassDef):
            inner_owner = node.name
            self._bind(node, {}, inner_owner)
            for item in node.body:  # fields of a dataclass
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    thing = self._annotated(item.annotation, names, owner)
                    if thing is not None:
                        self.members[f"{node.name}.{item.target.id}"] = thing
            for item in node.body:
                if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self._bind(item, dict(names), inner_owner)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner_names = dict(names)
            for _ in range(2):
                self._bind(node, inner_names, inner_owner)
        for child, inside in _children(node):
            self._visit(child, inner_names, inner_owner, guarded=guarded or inside)

    def _stub_called(self, node: ast.Call, names: _Scope, owner: str | None, guarded: bool) -> None:
        called = self.resolve(node.func, names, owner)
        if isinstance(called, Ref) and (stub := self.found.throws(called.path)):
            self._stub(node, called.path, *stub, guarded=guarded)
        for given in node.args:
            if isinstance(given, ast.Constant) and isinstance(given.value, str):
                self._library_stub(node, given.value, guarded)
        if isinstance(node.func, ast.Attribute):
            self._library_stub(node, node.func.attr, guarded)

    def _library_stub(self, node: ast.AST, name: str, guarded: bool) -> None:
        if name in self.found.stubs:
            self._stub(node, f"a call of {name}", name, self.found.stubs[name]["when"], guarded=guarded)

    def _stub(self, node: ast.AST, what: str, stub: str, when: str, *, guarded: bool) -> None:
        if when == "always":
            self._note(node, f"{what}: {stub} is a stub that throws")
        elif not guarded:
            self._note(node, f"{what}: {stub} is a stub that throws with a {when}, so it belongs in a try")

    def _names(self) -> None:
        texts = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Expr)}
        keys = {id(key) for node in ast.walk(self.tree) if isinstance(node, ast.Dict) for key in node.keys if key}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                self._attribute_name(node)
            elif isinstance(node, ast.keyword) and node.arg in ONLY_CUDA:
                self._note(node.value, f"keyword {node.arg}: only torch.cuda has it")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                self._string(node, node.value, in_table=id(node) in keys)
            elif isinstance(node, ast.Call) and dotted(node.func) in ("attrgetter", "operator.attrgetter"):
                for one in node.args:
                    if isinstance(one, ast.Constant) and one.value not in self.found.attributes:
                        self._note(node, f"attribute {one.value}: nothing in torch_musa has it")

    def _attribute_name(self, node: ast.Attribute) -> None:
        if dotted(node) == "torch.cuda":
            self._note(node, "torch.cuda: this code runs on MUSA")
        elif node.attr in ONLY_CUDA:
            self._note(node, f"attribute {node.attr}: only torch.cuda has it")
        elif _SYMBOL.fullmatch(node.attr):
            self._string(node, node.attr, in_table=False)
        elif _MUSA_ATTRIBUTE.fullmatch(node.attr) and node.attr not in self.found.attributes | _OURS:
            self._note(node, f"attribute {node.attr}: nothing in torch_musa has it")

    def _string(self, node: ast.expr, text: str, *, in_table: bool) -> None:
        if _SYMBOL.fullmatch(text):
            if text in self.found.stubs and in_table and self.found.stubs[text]["when"] == "always":
                self._note(
                    node, f"{text} stands in a table of functions: torch_musa has a stub that throws in its place"
                )
            elif text not in self.found.symbols and text not in SEEN_ELSEWHERE:
                self._note(node, f"{text}: no public source that is recorded calls it")
        elif _CUDA_SYMBOL.fullmatch(text):
            self._note(node, f"{text}: CUDA's name, which MUSA's libraries do not have")
        elif _ENVIRONMENT.fullmatch(text) and text not in self.found.environment:
            self._note(node, f"{text}: torch_musa reads no such variable")

    def _note(self, node: ast.AST, what: str) -> None:
        self.findings.append(Finding(self.file, getattr(node, "lineno", 0), what))


_OURS = frozenset({"musa_sim"})
"""Attributes of our own that begin like torch_musa's: the setting HALMA_MUSA_SIM."""


def _is_musa(module: str) -> bool:
    return module in (PACKAGE, "torch.musa") or module.startswith((f"{PACKAGE}.", "torch.musa."))


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield from _own_nodes(child)


def _children(node: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Children, each with whether it stands in the guarded part of a ``try`` with handlers."""
    guarded = {id(one) for one in node.body} if isinstance(node, ast.Try) and node.handlers else set()
    for child in ast.iter_child_nodes(node):
        yield child, id(child) in guarded


def check(source: str, file: str = "<source>", found: Contract | None = None) -> list[Finding]:
    """What a file's source does that the contract does not allow."""
    return _Reader(ast.parse(source), file, found or contract()).read()


def check_folders(root: Path = ROOT, folders: Sequence[str] = FOLDERS) -> tuple[list[Finding], int]:
    """Findings in the folders of a checkout, and the number of files read."""
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    ours = [path for path in paths if not path.relative_to(root).as_posix().startswith(NOT_OURS)]
    findings = [
        one for path in ours for one in check(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    ]
    return findings, len(ours)


def main(arguments: Sequence[str]) -> int:
    """The command; see the head of this file."""
    findings, files = check_folders(folders=tuple(arguments) or FOLDERS)
    for one in findings:
        print(one)
    print(f"{files} files, {len(findings)} disagreements with torch_musa {contract().version}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
