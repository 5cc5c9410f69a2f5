"""Result files of ``halma conformance --output``, read and checked before anything is said from them."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halma.cli.result import SCHEMA, digest

VERDICTS = ("passed", "failed", "not covered", "skipped", "not applicable")
_EVIDENCE_OF = {"cpu": ("cpu",), "cuda": ("cuda",), "musa": ("musa", "simulated")}
"""Evidence that our own backends can give; a stranger's gives what is none of ours' hardware."""
_AHEAD = datetime.timedelta(days=1)
"""By so much a date may be ahead of ours: where it was written, tomorrow has begun."""
_NEEDS_PACKAGE = {"musa": "torch_musa"}
"""A distribution without which nothing was obtained on that hardware."""


class ResultError(Exception):
    """A file that cannot be used, with every reason."""


@dataclass(frozen=True)
class Result:
    """A checked file. ``document`` is as written; see :mod:`halma.cli.result`."""

    name: str
    document: Mapping[str, Any]

    def __getattr__(self, key: str) -> Any:
        try:
            return self.document[key]
        except KeyError:
            raise AttributeError(key) from None

    @property
    def device_name(self) -> str:
        """What it ran on, by its own name."""
        return str(self.document["device"].get("name", "unnamed device"))


def read(path: Path) -> Result:
    """The result in a file.

    Raises:
        ResultError: it is cut short, of another version, incomplete, changed, or claims what cannot be.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
        json.dumps(found, ensure_ascii=False).encode()  # a half of a surrogate pair is JSON, and no text
    except OSError as error:
        raise ResultError(f"{path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ResultError(f"{path}: is no result: it is nested too deeply") from None
    except ValueError as error:
        raise ResultError(f"{path}: is no whole JSON document, perhaps cut short: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        version = found.get("schema") if isinstance(found, dict) else type(found).__name__
        raise ResultError(
            f"{path}: its schema is {version!r}, this checkout reads {SCHEMA!r}\n"
            "  do: write it again with this version (halma conformance --output FILE), or read it with its own"
        )
    problems = [*_shape_problems(found)] or [*_meaning_problems(found)]
    if problems:
        raise ResultError("\n".join(f"{path}: {problem}" for problem in problems))
    return Result(path.name, found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are there once: of two, a reader may see the one and we the other.

    Raises:
        ValueError: a key is there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


# -- shape ----------------------------------------------------------------------------------------------

Check = Callable[[Any], str | None]
"""What is wrong with a value, or None."""


def _is(kind: type, words: str) -> Check:
    return lambda value: None if type(value) is kind else words


def _map_of(inner: Check, names: str = "") -> Check:
    """An object of such values; ``names``: what its keys look like, where they are shown as they are."""

    def check(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "an object"
        odd = [key for key in value if names and not re.fullmatch(names, key)]
        if odd:
            return f"an object whose keys are of the form {names}, unlike {odd[0][:40]!r}"
        wrong = [f"{key!r} must be {said}" for key, one in value.items() if (said := inner(one)) is not None]
        return f"an object in which {'; '.join(wrong)}" if wrong else None

    return check


def _or_null(inner: Check) -> Check:
    return lambda value: None if value is None or inner(value) is None else f"{inner(value)}, or null"


def _date(value: Any) -> str | None:
    try:
        known = datetime.date.fromisoformat(value).isoformat()
    except (TypeError, ValueError):
        known = ""
    return None if known and known == value else "a date like 2026-11-30"  # files are put in order by their text


def _capability(value: Any) -> str | None:
    return None if value is None or isinstance(value, (bool, int, str)) else "true, false, a number, a string or null"


def _rule(value: Any) -> str | None:
    if not isinstance(value, dict) or set(value) != {"verdict", "why", "passed", "failed", "skipped"}:
        return "an object of verdict, why, passed, failed and skipped"
    counts = [value[key] for key in ("passed", "failed", "skipped")]
    if any(type(count) is not int or count < 0 for count in counts) or not isinstance(value["why"], str):
        return "counted in numbers from 0 up, with why as a string"
    return None if value["verdict"] in VERDICTS else f"one of {', '.join(VERDICTS)} as its verdict"


_STRING = _is(str, "a string")
_SHAPE: Mapping[str, Check] = {
    "schema": _STRING,
    "backend": lambda v: None if isinstance(v, str) and re.fullmatch(r"[a-z0-9][a-z0-9_-]*", v) else "a backend's name",
    "evidence": _STRING,
    "simulated": _is(bool, "true or false"),
    "date": _date,
    "halma": _STRING,
    "commit": _or_null(_STRING),
    "python": _STRING,
    "machine": _STRING,
    "packages": _map_of(_STRING),
    "settings": _map_of(_STRING),
    "device": _map_of(_STRING),
    "capabilities": _map_of(_capability, r"[a-z][a-z0-9_]*"),
    "conforms": _is(bool, "true or false"),
    "broken": _or_null(_STRING),
    "other_failures": lambda v: None if isinstance(v, list) and all(isinstance(i, str) for i in v) else "a list of ids",
    "rules": _map_of(_rule, r"[A-Z]+[0-9]+"),
    "bench": _or_null(_is(dict, "an object")),
    "digest": _STRING,
}


def _shape_problems(found: Mapping[str, Any]) -> Iterable[str]:
    for key in sorted(set(found) - set(_SHAPE)):
        yield f"unknown key {key!r}"
    for key, check in _SHAPE.items():
        if key not in found:
            yield f"no {key!r}: it is incomplete"
        elif (said := check(found[key])) is not None:
            yield f"{key} must be {said}"


# -- meaning --------------------------------------------------------------------------------------------


def _meaning_problems(found: Mapping[str, Any]) -> Iterable[str]:
    if found["digest"] != digest(found):
        yield "its digest is of other contents: it was changed after it was written"
    if found["date"] > (datetime.date.today() + _AHEAD).isoformat():
        yield f"its date, {found['date']}, is to come: it would stay the latest result until then"
    yield from _evidence_problems(found)
    yield from _verdict_problems(found)
    for key in ("capabilities", "rules", "device"):
        if not found[key]:
            yield f"{key} is empty: nothing was recorded"
    bench = found["bench"]
    if bench is not None:
        for key in ("backend", "evidence"):
            if bench.get(key) != found[key]:
                yield f"its benchmark's {key} is {bench.get(key)!r}, the result's {found[key]!r}"


def _evidence_problems(found: Mapping[str, Any]) -> Iterable[str]:
    backend, evidence = found["backend"], found["evidence"]
    hardware = {one for kinds in _EVIDENCE_OF.values() for one in kinds} - {"cpu", "simulated"}
    possible = _EVIDENCE_OF.get(backend, ("cpu", "simulated"))
    if evidence not in possible:
        whose = (
            f", hardware of {' and '.join(sorted(hardware))} belongs to our own backends"
            if (backend not in _EVIDENCE_OF)
            else ""
        )
        yield f"evidence {evidence!r} cannot come from the backend {backend!r}: {' or '.join(possible)}{whose}"
    traces = [
        *(["simulated is true"] if found["simulated"] else []),
        *(f"{name} was set" for name in found["settings"] if name.endswith("_SIM")),
        *(["the device calls itself simulated"] if "simulated" in found["device"] else []),
    ]
    if traces and evidence != "simulated":
        yield f"evidence is {evidence!r}, and {', '.join(traces)}: what a stand-in shows is called simulated"
    if evidence == "simulated" and not found["simulated"]:
        yield "evidence is 'simulated', and the backend does not say that it stands in for hardware"
    package = _NEEDS_PACKAGE.get(evidence)
    if package is not None and package not in found["packages"]:
        yield f"evidence is {evidence!r}, and {package} was not installed"


def _verdict_problems(found: Mapping[str, Any]) -> Iterable[str]:
    for name, one in found["rules"].items():
        if (one["verdict"] == "failed") != (one["failed"] > 0):
            yield f"rule {name}: verdict {one['verdict']!r} with {one['failed']} failed tests"
        if one["verdict"] == "passed" and not one["passed"]:
            yield f"rule {name}: passed without a test that passed"
    bad = [name for name, one in found["rules"].items() if one["verdict"] in ("failed", "not covered")]
    holds = not bad and not found["broken"] and not found["other_failures"]
    if found["conforms"] and not holds:
        yield f"it says that the backend conforms, and {', '.join(bad) or 'its run'} did not hold"
    if found["conforms"] and not any(one["passed"] for one in found["rules"].values()):
        yield "it says that the backend conforms, and no test of any rule passed"
