"""The result file of ``halma conformance --output``: what a backend showed on a machine, as one JSON document.

Everything that the supported-features table says of a backend comes from such files (``python -m ci.features``), which
refuses one that was cut short, changed afterwards, or claims evidence that its backend cannot have.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import halma
from halma.cli import environment
from halma.hal.errors import RequestError
from halma.hal.registry import default_registry
from halma.hal.settings import describe
from halma.hal.testing.suite import SuiteResult

SCHEMA = "halma.result/1"


def digest(document: Mapping[str, Any]) -> str:
    """sha256 of the document without its digest, in one spelling. Finds slips, and keeps out nobody who means it."""
    rest = {key: value for key, value in document.items() if key != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def result_document(shown: SuiteResult, bench: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The document of a finished suite.

    Args:
        shown: of all rules; its tests ran on this machine just now.
        bench: an answer of ``halma bench --json`` of the same backend, to send along.

    Raises:
        RequestError: the backend cannot be started, so that nothing can be said of it.
    """
    spec = default_registry().spec(shown.backend)
    facts = environment.backend_report(shown.backend)
    if "failed" in facts:
        raise RequestError(
            "no result can be written", found=f"{shown.backend} does not start: {facts['failed']}", do="halma doctor"
        )
    answer = shown.as_json()
    rules = {
        name: {key: one[key] for key in ("verdict", "why", "passed", "failed", "skipped")}
        for name, one in answer["rules"].items()
    }
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "backend": shown.backend,
        "evidence": shown.evidence,
        "simulated": spec.simulated,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "halma": halma.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": _packages(),
        "settings": {row.variable: str(row.value) for row in describe() if row.value is not None},
        "device": {str(name): str(value) for name, value in facts["properties"].items()},
        "capabilities": facts["capabilities"],
        "conforms": answer["passed"],
        "broken": answer["broken"],
        "other_failures": answer["other_failures"],
        "rules": rules,
        "bench": None if bench is None else dict(bench),
    }
    return {**document, "digest": digest(document)}


def read_bench(path: Path, backend: str, evidence: str) -> dict[str, Any]:
    """An answer of ``halma bench --json``, of this backend.

    Raises:
        RequestError: it is none.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"{path} cannot be read", found=str(error), do="halma bench decode --json > FILE") from None
    head = {"schema": "halma.bench/1", "backend": backend, "evidence": evidence}
    wrong = [
        f"{key} is {value!r}, not {wanted!r}"
        for key, wanted in head.items()
        if (value := found.get(key) if isinstance(found, dict) else None) != wanted
    ]
    if wrong:
        raise RequestError(
            f"{path} is no benchmark of this backend", found=wrong, do="halma bench decode --json > FILE"
        )
    return found


def refuse_unwritable(path: Path) -> None:
    """Before minutes of tests: whether :func:`write_result` will find its place.

    Raises:
        RequestError: it will not.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = _part(path)
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise RequestError(
            f"{path} cannot be written", found=str(error), do="--output FILE, in a folder of yours"
        ) from None


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def write_result(document: Mapping[str, Any], path: Path) -> None:
    """Write it whole or not at all; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = _part(path)
    scratch.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    scratch.replace(path)


def _packages() -> dict[str, str]:
    return {name: version for name, version in environment.packages_report().items() if version != "not installed"}


def _commit() -> str | None:
    """Of the checkout that halma runs from; None where it was installed from a wheel."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return None
    asked = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None
