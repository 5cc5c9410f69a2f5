"""The rows of ``matrix.toml`` as checked data. A row that cannot mean anything is refused when it is read."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
MATRIX = ROOT / "ci" / "matrix.toml"

Tier = Literal["pr", "nightly", "manual"]
Gate = Literal["blocking", "informational"]
Evidence = Literal["cpu", "contract", "simulated", "cuda", "musa"]
TIERS: tuple[str, ...] = get_args(Tier)
GATES: tuple[str, ...] = get_args(Gate)
EVIDENCE: tuple[str, ...] = get_args(Evidence)
ON_DEVICE = frozenset({"cuda", "musa"})
"""Evidence that only hardware gives."""

_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_SETTING = re.compile(r"HALMA_[A-Z_0-9]+=\S+")
_OPERATORS = frozenset({"and", "or", "not", "True", "False", "None"})
HOSTED = "ubuntu-24.04"
"""The runner that everybody has."""


class MatrixError(Exception):
    """The matrix says something that cannot be; the message lists every such thing."""


@dataclass(frozen=True)
class Row:
    """One row: see the head of ``matrix.toml`` for what each field means."""

    id: str
    tier: str
    backend: str
    evidence: str
    python: tuple[str, ...]
    torch: str
    runner: str
    gate: str
    select: tuple[str, ...]
    markers: str = ""
    session: str = ""
    paths: tuple[str, ...] = ()
    require: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    devices: int = 0
    assertions: int = 0
    reason: str = ""

    @property
    def runs(self) -> bool:
        """False for a row that is declared so that its absence shows, and has no machine to run on."""
        return self.runner != "none"

    @property
    def variables(self) -> dict[str, str]:
        """The settings of its own that it runs with."""
        return dict(one.split("=", 1) for one in self.environment)


def _field_types() -> dict[str, str]:
    return {f.name: str(f.type) for f in fields(Row)}


def _row(number: int, data: Mapping[str, Any], problems: list[str]) -> Row | None:
    label = f"row {number} ({data.get('id', 'no id')})"
    types = _field_types()
    unknown = sorted(set(data) - set(types))
    missing = [f.name for f in fields(Row) if f.name not in data and f.default.__class__.__name__ == "_MISSING_TYPE"]
    found = [f"{label}: unknown key {key!r}" for key in unknown] + [f"{label}: no {key!r}" for key in missing]
    values: dict[str, Any] = {}
    for key, value in data.items():
        want = types.get(key)
        if want == "str" and not isinstance(value, str):
            found.append(f"{label}: {key} must be a string, found {value!r}")
        elif want == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            found.append(f"{label}: {key} must be a number from 0 up, found {value!r}")
        elif want and want.startswith("tuple"):
            if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
                found.append(f"{label}: {key} must be a list of strings, found {value!r}")
            else:
                value = tuple(value)
        values[key] = value
    problems.extend(found)
    return None if found else Row(**values)


def _meaning(row: Row, markers: frozenset[str], root: Path) -> Iterable[str]:
    for key, allowed in (("tier", TIERS), ("gate", GATES), ("evidence", EVIDENCE)):
        if getattr(row, key) not in allowed:
            yield f"{row.id}: {key} is {getattr(row, key)!r}, not one of {', '.join(allowed)}"
    if not _ID.fullmatch(row.id):
        yield f"{row.id!r}: an id is lower-case words joined by '-'"
    if not row.python:
        yield f"{row.id}: no Python version"
    if not row.reason and (not row.runs or row.gate == "informational"):
        yield f"{row.id}: needs a reason (it has no runner or is informational)"
    if not row.runs and row.gate == "blocking":
        yield f"{row.id}: cannot block, no runner will run it"
    for word in sorted(set(_WORD.findall(row.markers)) - _OPERATORS - markers):
        yield f"{row.id}: unknown marker {word!r}"
    for one in row.environment:
        if not _SETTING.fullmatch(one):
            yield f"{row.id}: environment takes HALMA_NAME=value, found {one!r}"
    yield from _claims(row)
    if row.session and row.session not in nox_sessions(root):
        yield f"{row.id}: noxfile.py has no session {row.session!r}"
    for path in row.select:
        if not (root / path).exists():
            yield f"{row.id}: selects {path!r}, which is not there"


def _claims(row: Row) -> Iterable[str]:
    """A row's evidence has to follow from what it runs on (T5)."""
    simulated = any(one.startswith("HALMA_MUSA_SIM=") for one in row.environment)
    if simulated != (row.evidence == "simulated"):
        yield f"{row.id}: evidence is {row.evidence!r}, and a simulator is {'' if simulated else 'not '}switched on"
    if row.evidence in ON_DEVICE and (row.backend != row.evidence or not row.devices):
        yield f"{row.id}: evidence {row.evidence} wants the backend {row.evidence} and devices from 1 up"
    if row.devices and row.runner == HOSTED:
        yield f"{row.id}: {HOSTED} has no devices, the row needs {row.devices}"


def nox_sessions(root: Path = ROOT) -> frozenset[str]:
    """The sessions of noxfile.py, read from its source; none where there is no such file."""
    file = root / "noxfile.py"
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else ():
        if not isinstance(node, ast.FunctionDef):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "nox.session":
                given = [word.value for word in mark.keywords if word.arg == "name"]
                names.add(str(ast.literal_eval(given[0])) if given else node.name)
    return frozenset(names)


def declared_markers(root: Path = ROOT) -> frozenset[str]:
    """The markers that pyproject.toml and the pytest plugin declare."""
    with (root / "pyproject.toml").open("rb") as file:
        lines = tomllib.load(file)["tool"]["pytest"]["ini_options"]["markers"]
    plugin = {"invariant", "evidence", "parametrize", "skip", "skipif", "xfail"}
    return frozenset(re.split(r"[(:]", line, maxsplit=1)[0] for line in lines) | plugin


def load(path: Path = MATRIX, *, root: Path = ROOT) -> tuple[Row, ...]:
    """The rows of a matrix file.

    Raises:
        MatrixError: unknown or missing keys, duplicate ids, unknown markers, selections that do not exist,
            rows out of order: all of them in one message.
    """
    with path.open("rb") as file:
        data = tomllib.load(file)
    problems = [f"unknown table {key!r}" for key in data if key != "row"]
    rows = [_row(number, item, problems) for number, item in enumerate(data.get("row", []), start=1)]
    good = [row for row in rows if row is not None]
    markers = declared_markers(root)
    for row in good:
        problems.extend(_meaning(row, markers, root))
    seen: set[str] = set()
    for row in good:
        if row.id in seen:
            problems.append(f"two rows are called {row.id!r}")
        seen.add(row.id)
    order = [(TIERS.index(row.tier), row.id) for row in good if row.tier in TIERS]
    if order != sorted(order):
        problems.append("rows are not sorted by tier, then id: " + ", ".join(row.id for row in good))
    if not good and not problems:
        problems.append("no rows")
    if problems:
        raise MatrixError("\n".join(f"{path.name}: {problem}" for problem in problems))
    return tuple(good)


def of_tier(rows: Iterable[Row], tier: str) -> tuple[Row, ...]:
    """The rows of one tier, in the matrix's order."""
    if tier not in TIERS:
        raise MatrixError(f"tier is {tier!r}, not one of {', '.join(TIERS)}")
    return tuple(row for row in rows if row.tier == tier)
