"""What torch_musa's C++ binds to Python, read as text: no compiler is needed, and none of its text is kept.

Signatures are written the way Python writes them. A binding that names its parameters gives their names; a lambda or a
cast gives their number, ``(a0, a1, /)``: pybind11 takes such arguments by position only. Where the source says neither,
the signature is ``(*unknown)``, which accepts any positional arguments and no keyword.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_TABLE = re.compile(r"static (?:struct )?(PyMethodDef|PyGetSetDef|PyMemberDef) (\w+)\[\] = \{")
_ENTRY = re.compile(r'\{\s*(?:\(char\*\))?\s*"(\w+)"\s*,([^{}]*)\}')
_ADDED = re.compile(r'PyModule_AddObject\(\s*\w+,\s*"(\w+)",\s*\(PyObject\*\)&(\w+?)Type\)')
_CLASS = re.compile(r"(?:(\w+)\s*=\s*)?(?:py::)?\w*class_<")
_SUBMODULE = re.compile(r'(\w+)\s*=\s*\w+\.def_submodule\(\s*"(\w+)"')
_ON_VARIABLE = re.compile(r"\b(\w+)\s*\.\s*(def\w*)\s*\(")
_CHAINED = re.compile(r"\s*\.\s*(def\w*|value)\s*\(")
_ATTRIBUTE = re.compile(r'\b(?:m|module|py_module)\.attr\("(\w+)"\)\s*=|set_module_attr\("(\w+)"')
_ENVIRONMENT = re.compile(r'"((?:PYTORCH_|TORCH_|MUSA_|MCCL_)[A-Z0-9_]*(?:MUSA|MCCL)?[A-Z0-9_]*)"')
_STUB = re.compile(r"musaError_t\s+(\w+)\(", re.DOTALL)
_RUNTIME = re.compile(r"\bmusa[A-Z]\w*(?=\s*\()")
_DRIVER = re.compile(
    r"\b(mu(?:Mem|Get|Device|Module|Launch|Ctx|Event|Stream|Graph|Pointer|Ipc|Func|Init|Driver)\w*?)_?\b(?!\w)"
)
_CONDITION = re.compile(r"#if[^\n]*REAL_MUSA_VERSION[^\n]*< *(\d+)")

ANY = "(*unknown)"
PROPERTY = "property"


@dataclass(frozen=True)
class Bound:
    """One Python name that C++ binds: ``owner`` is a class of the extension or "" for the extension itself."""

    owner: str
    name: str
    signature: str


def without_comments(text: str) -> str:
    """``text`` with C++ comments blanked; strings stay."""
    return _COMMENT.sub(lambda found: found.group() if found.group().startswith('"') else " ", text)


def bound_names(text: str) -> Iterator[Bound]:
    """Every name bound by a C++ file: method tables, property tables, pybind11 definitions, module attributes."""
    text = without_comments(text)
    yield from _tables(text)
    yield from _pybind(text)
    for found in _ATTRIBUTE.finditer(text):
        yield Bound("", found.group(1) or found.group(2), PROPERTY)


def throwing_stubs(text: str) -> dict[str, str]:
    """Runtime functions that a file defines only to throw, with the condition ("always" or a toolkit's version)."""
    stubs: dict[str, str] = {}
    condition = ""
    pieces = re.split(r"(#if[^\n]*\n|#endif[^\n]*\n)", without_comments(text))
    for piece in pieces:
        if piece.startswith("#if"):
            below = _CONDITION.search(piece)
            condition = (
                f"toolkit older than {int(below.group(1)) // 1000}.{int(below.group(1)) % 1000 // 10}"
                if below
                else piece
            )
        elif piece.startswith("#endif"):
            condition = ""
        else:
            for found in _STUB.finditer(piece):
                stubs[found.group(1)] = condition or "always"
    return stubs


def methods_that_call(text: str, owner: str, names: frozenset[str]) -> dict[str, str]:
    """Methods of the C++ class ``owner`` whose bodies call one of ``names``: method to the name that it calls."""
    parts = re.split(rf"\b{owner}::(\w+)\(", without_comments(text))
    found: dict[str, str] = {}
    for method, body in zip(parts[1::2], parts[2::2], strict=True):
        called = sorted(name for name in names if re.search(rf"(?<![\w\"]){name}\(", body))
        if called:
            found[method] = called[0]
    return found


def environment_names(text: str) -> set[str]:
    """Names of environment variables that stand in strings of a C++ or Python file."""
    return {name for name in _ENVIRONMENT.findall(text) if not name.endswith("_")}


def runtime_symbols(text: str) -> tuple[set[str], set[str]]:
    """Names with the prefixes of the runtime (musaX) and of the driver (muX) in a C++ file."""
    text = without_comments(text)
    return set(_RUNTIME.findall(text)), set(_DRIVER.findall(text))


def _tables(text: str) -> Iterator[Bound]:
    classes = {prefix: name for name, prefix in _ADDED.findall(text)}
    for table in _TABLE.finditer(text):
        owner = next((name for prefix, name in classes.items() if table.group(2).startswith(prefix + "_")), "")
        body = text[table.end() : text.find("};", table.end())]
        for name, rest in _ENTRY.findall(body):
            if table.group(1) == "PyMethodDef":
                yield Bound(owner, name, _flags(rest))
            else:
                yield Bound(owner, name, PROPERTY)


def _flags(rest: str) -> str:
    if "METH_NOARGS" in rest:
        return "()"
    if "METH_O" in rest:
        return "(argument, /)"
    return "(*unknown, **keywords)" if "METH_KEYWORDS" in rest else ANY


def _pybind(text: str) -> Iterator[Bound]:
    owners = {name: submodule for name, submodule in _SUBMODULE.findall(text)}
    modules = {"", *owners.values()}
    yield from (Bound("", submodule, PROPERTY) for submodule in owners.values())
    for declared in _CLASS.finditer(text):
        opening = _balanced(text, declared.end() - 1, "<>")
        call = re.match(r"\s*\(", text[opening:])
        if not call:
            continue  # the definition of an alias
        end = _balanced(text, opening + call.end() - 1, "()")
        arguments = _split(text[opening + call.end() : end - 1])
        name = next((one.strip('"') for one in arguments if one.startswith('"')), "")
        outer = owners.get(arguments[0], "")
        path = f"{outer}.{name}" if outer else name
        if declared.group(1):
            owners[declared.group(1)] = path
        yield Bound(outer, name, PROPERTY)
        yield from _chain(text, end, path, self=True)
    for found in _ON_VARIABLE.finditer(text):
        owner = owners.get(found.group(1), "")
        if found.group(2) == "def_submodule":
            continue
        end = _balanced(text, found.end() - 1, "()")
        yield from _definition(owner, found.group(2), text[found.end() : end - 1], self=owner not in modules)
        yield from _chain(text, end, owner, self=owner not in modules)


def _chain(text: str, position: int, owner: str, *, self: bool) -> Iterator[Bound]:
    while following := _CHAINED.match(text, position):
        position = _balanced(text, following.end() - 1, "()")
        yield from _definition(owner, following.group(1), text[following.end() : position - 1], self=self)


def _definition(owner: str, kind: str, body: str, *, self: bool) -> Iterator[Bound]:
    arguments = _split(body)
    if arguments[0].startswith("py::init"):
        yield Bound(owner, "__init__", _signature(arguments, drop=0))
        return
    name = arguments[0].strip('"')
    if not re.fullmatch(r"\w+", name):
        return
    if kind in ("def", "def_static"):
        yield Bound(owner, name, _signature(arguments[1:], drop=1 if self and kind == "def" else 0))
    else:
        yield Bound(owner, name, PROPERTY)


def _signature(arguments: list[str], *, drop: int) -> str:
    """The signature of a definition's arguments after its name; ``drop`` leading parameters are ``self``."""
    named = [re.match(r'py::arg\("(\w+)"\)\s*(=)?', one) for one in arguments]
    if any(named):
        return f"({', '.join(found.group(1) + ('=...' if found.group(2) else '') for found in named if found)})"
    target = arguments[0] if arguments else ""
    for opening, pair in (
        (r"\[[^\]]*\]\s*\(", "()"),
        (r"static_cast<[\w:<>\s]+\(\*\)\s*\(", "()"),
        (r"py::init<", "<>"),
    ):
        if found := re.match(opening, target):
            inner = target[found.end() : _balanced(target, found.end() - 1, pair) - 1]
            count = (
                max(len(_split(inner)) - (drop if pair == "()" and opening[0] == "\\" else 0), 0)
                if inner.strip()
                else 0
            )
            return f"({', '.join(f'a{index}' for index in range(count))}, /)" if count else "()"
    return ANY


def _balanced(text: str, opening: int, pair: str) -> int:
    """The position behind the bracket that closes the one at ``opening``; strings are stepped over."""
    depth, position = 0, opening
    while position < len(text):
        letter = text[position]
        if letter == '"':
            quoted = re.compile(r'"(?:\\.|[^"\\])*"').match(text, position)
            position = quoted.end() if quoted else position + 1
            continue
        depth += (letter == pair[0]) - (letter == pair[1] and text[position - 1] != "-")
        position += 1
        if depth == 0:
            return position
    raise ValueError(f"a bracket {pair[0]} at {opening} is never closed: the file is not the C++ that this reads")


def _split(text: str) -> list[str]:
    """``text`` split at the commas outside every bracket and string, trimmed."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        letter = text[position]
        if letter == '"':
            quoted = re.compile(r'"(?:\\.|[^"\\])*"').match(text, position)
            position = quoted.end() if quoted else position + 1
            continue
        closes = letter in ")]}" or (letter == ">" and text[position - 1] != "-")
        depth += (letter in "([{<") - closes
        if letter == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
        position += 1
    return [*parts, text[start:].strip()]
