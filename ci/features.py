"""The table of supported features, from result files: ``python -m ci.features [docs/results/*.json]``.

A column is a backend on a device, with how its results were obtained; of several files of one the latest counts.
``--check`` compares docs/features.md instead of writing it. Status 1: it differs. Status 2: a file is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.results import Result, ResultError, read
from ci.schema import ROOT, Row, load

PAGE = ROOT / "docs" / "features.md"
RESULTS = ROOT / "docs" / "results"
GROUPS = {
    "G": "graph capture",
    "W": "workspace",
    "A": "arenas",
    "C": "collectives",
    "F": "exchange of experts' rows",
}
_PLAIN = str.maketrans("|<>[]`\\", "/()()'/")
_ORDER = ("cpu", "contract", "simulated", "cuda", "musa")
_HEAD = """\
# What each backend was seen to do

Written by `python -m ci.features` from the files `docs/results/*.json`, which `halma conformance --output` writes: edit
neither the table nor the files. A column says how its results were obtained: `cpu`, `simulated` (our code over a
stand-in), `cuda` (ran on an NVIDIA GPU) or `musa` (ran on a Moore Threads GPU). What one column shows is no
claim of another. Evidence `contract` is names and signatures alone: tests of a row, no column.
*Unknown* counts as off. How to add a column: [musa_hardware.md](musa_hardware.md).
"""


def latest(results: Iterable[Result]) -> list[Result]:
    """One result a backend, evidence and device: the latest; later files win on one day."""
    kept: dict[tuple[str, str, str], Result] = {}
    for one in sorted(results, key=lambda one: (one.date, one.name)):
        kept[one.backend, one.evidence, one.device_name] = one
    return sorted(kept.values(), key=lambda one: (_ORDER.index(one.evidence), one.backend, one.device_name))


def page(results: Sequence[Result], rows: Sequence[Row] = ()) -> str:
    """The page: facts of each column, its capabilities, its rules; then the rows of CI that nothing has run."""
    columns = latest(results)
    lines = [_HEAD]
    if columns:
        names = [f"{one.backend}, evidence {one.evidence}" for one in columns]
        lines += [f"| | {' | '.join(names)} |", "|---|" + "---|" * len(columns)]
        lines += [_line(label, columns, ask) for label, ask in _FACTS]
        lines += [_line(f"`{name}`", columns, _capability(name)) for name in _names(columns, "capabilities")]
        lines += [_line(_group_label(group), columns, _group(group)) for group in _groups(columns)]
        holes = [f"- {_cell(one.name)}: {said}" for one in columns for said in _holes(one)]
        lines += ["", *holes] if holes else []
    missing = [row for row in rows if not row.runs]
    if missing:
        lines += ["", "Nothing was run for these rows of `ci/matrix.toml`:", ""]
        lines += [f"- {row.id} (evidence {row.evidence}): {row.reason}" for row in missing]
    return "\n".join(lines).rstrip() + "\n"


def _line(label: str, columns: Sequence[Result], ask: Any) -> str:
    return f"| {label} | {' | '.join(_cell(ask(one)) for one in columns)} |"


def _cell(text: str) -> str:
    """A file is somebody else's: nothing in it ends a cell or a line, or is a link or a picture."""
    plain = text.translate(_PLAIN)
    return " ".join("".join(c if c.isprintable() else " " for c in plain).split()) or "-"


def _version(one: Result) -> str:
    return f"{one.halma} ({one.commit})" if one.commit else str(one.halma)


_FACTS = (
    ("device", lambda one: one.device_name),
    ("date", lambda one: str(one.date)),
    ("halma", _version),
    ("torch", lambda one: one.packages.get("torch", "unknown")),
    ("Python", lambda one: str(one.python)),
    ("conforms", lambda one: "yes" if one.conforms else "**no**"),
    ("file", lambda one: str(one.name)),
)


def _names(columns: Sequence[Result], key: str) -> list[str]:
    """Keys in the order of the first file that has them."""
    return list(dict.fromkeys(name for one in columns for name in one.document[key]))


def _capability(name: str) -> Any:
    def ask(one: Result) -> str:
        value = one.capabilities.get(name, "not recorded")
        return {True: "yes", False: "no", None: "none"}.get(value, str(value)) if _is_word(value) else str(value)

    return ask


def _is_word(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _groups(columns: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(name.rstrip("0123456789") for name in _names(columns, "rules")))


def _group_label(group: str) -> str:
    return f"rules {group}: {GROUPS[group]}" if group in GROUPS else f"rules {group}"


def _of_group(one: Result, group: str) -> Mapping[str, Any]:
    return {name: rule for name, rule in one.rules.items() if name.rstrip("0123456789") == group}


def _group(group: str) -> Any:
    def ask(one: Result) -> str:
        rules = _of_group(one, group)
        if not rules:
            return "not recorded"
        by: dict[str, list[str]] = {}
        for name, rule in rules.items():
            by.setdefault(rule["verdict"], []).append(name)
        said = [f"{len(by.get('passed', ()))} of {len(rules)} hold"]
        said += [f"**{verdict}: {' '.join(by[verdict])}**" for verdict in ("failed", "not covered") if verdict in by]
        said += [f"{verdict}: {' '.join(by[verdict])}" for verdict in ("skipped", "not applicable") if verdict in by]
        return "; ".join(said)

    return ask


def _holes(one: Result) -> Iterable[str]:
    """What a reader has to know besides the table."""
    if one.broken:
        yield f"**the suite did not run to its end**: {_cell(one.broken)}"
    if one.other_failures:
        yield f"**failed tests that name no rule**: {_cell(', '.join(one.other_failures))}"
    for name, rule in one.rules.items():
        if rule["verdict"] == "skipped":
            yield f"{name} skipped: {_cell(rule['why'])}"


def main(arguments: Sequence[str] | None = None, *, output: Path = PAGE) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m ci.features")
    parser.add_argument("files", nargs="*", type=Path, help="default: docs/results/*.json")
    parser.add_argument("--check", action="store_true", help="exit 1 if docs/features.md differs")
    options = parser.parse_args(arguments)
    results, refused = list[Result](), list[str]()
    for path in options.files or sorted(RESULTS.glob("*.json")):
        try:
            results.append(read(path))
        except ResultError as error:
            refused.append(str(error))
    if refused:
        print("\n".join(refused), file=sys.stderr)
        return 2
    text = page(results, load())
    if not options.check:
        output.write_text(text, encoding="utf-8")
    elif not output.exists() or output.read_text(encoding="utf-8") != text:
        print(f"{output.name} does not say what the result files say; run: python -m ci.features", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
