"""Take a guard away, and the test that names its rule must go red.

``python -m ci.mutants`` runs every mutant of ``tests/mutants/*.toml``, each in a private copy of the checkout;
``--only G12`` or ``--only ID`` runs some, ``--jobs N`` so many at a time, ``--output FILE.md`` or ``FILE.json``
keeps the table. ``--backend cuda`` runs those of ``tests/mutants/gpu`` instead, on a GPU. A mutant counts as noticed
when a test that names its rule as its own fails; that something else fails is not enough. The tests run unchanged
first and must be green, so that red means the mutant.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "mutants"
COPIED = ("hal", "backends", "ops", "models", "src", "tests", "benchmarks", "ci", "docs")
FILES = ("pyproject.toml", "noxfile.py")
SECONDS = 600
T = TypeVar("T")


class MutantError(Exception):
    """The table says something that cannot be; the message lists every such thing."""


@dataclass(frozen=True)
class Mutant:
    """One entry of the table.

    Args:
        id: RULE-what-is-taken-away.
        file: the guard's file, from the top of the checkout.
        old: its exact text, there once.
        new: what stands there instead.
        tests: files, or node ids, for pytest.
    """

    id: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def rule(self) -> str:
        """The rule whose test must notice."""
        return self.id.split("-")[0]


@dataclass(frozen=True)
class Outcome:
    """What a mutant did to its tests.

    ``verdict``: noticed; survived: all stayed green; other tests: some failed, none of the rule's; broken: pytest
    did not run to its end.
    """

    mutant: str
    rule: str
    where: str
    verdict: str
    red: tuple[str, ...]
    controls_green: int
    controls: int
    seconds: float
    detail: str = ""


def load(folder: Path = TABLE, *, root: Path = ROOT) -> tuple[Mutant, ...]:
    """The mutants of all files of a folder, in order.

    Raises:
        MutantError: an entry that cannot be applied, or the same id twice.
    """
    found: list[Mutant] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*.toml")):
        with path.open("rb") as file:
            entries = tomllib.load(file).get("mutant", [])
        for number, entry in enumerate(entries):
            label = f"{path.name}: {entry.get('id', f'entry {number}')}"
            names = {f.name for f in fields(Mutant)}
            if set(entry) != names:
                problems.append(f"{label}: has {sorted(entry)}, wants {sorted(names)}")
                continue
            mutant = Mutant(**{**entry, "tests": tuple(entry["tests"])})
            found.append(mutant)
            problems += [f"{label}: {problem}" for problem in _problems(mutant, root)]
    ids = [mutant.id for mutant in found]
    problems += [f"{name}: two mutants have this id" for name in sorted({name for name in ids if ids.count(name) > 1})]
    if problems or not found:
        raise MutantError("\n".join(problems) or f"{folder}: no mutants")
    return tuple(found)


def _problems(mutant: Mutant, root: Path) -> Iterable[str]:
    if not re.fullmatch(r"[A-Z]+[0-9]+-[a-z0-9-]+", mutant.id):
        yield "an id is a rule, then what is taken away: G12-check"
    if not mutant.tests:
        yield "no tests"
    for test in mutant.tests:
        if not (root / test.split("::")[0]).exists():
            yield f"{test} is not there"
    path = root / mutant.file
    count = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
    if count != 1:
        yield f"{mutant.file} holds the guard's text {count} times; bring this table up to date"
        return
    if path.suffix != ".py":
        return
    try:
        ast.parse(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new))
    except SyntaxError as error:
        yield f"the mutated {mutant.file} is no Python: {error}"


class Copy:
    """A private copy of the checkout, mutated and mended again.

    Args:
        folder: where it goes; empty.
        green: what runs of unchanged tests gave, which all copies may share.
        backend: that the tests run on.
    """

    def __init__(
        self,
        folder: Path,
        root: Path = ROOT,
        green: dict[tuple[str, ...], dict[str, Any]] | None = None,
        backend: str = "cpu",
    ):
        self._folder = folder
        self._on = [] if backend == "cpu" else ["--halma-backend", backend, "--halma-require-backend", backend]
        self._green = {} if green is None else green
        skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
        for name in COPIED:
            if (root / name).exists():
                shutil.copytree(root / name, folder / name, symlinks=True, ignore=skip)
        for name in FILES:
            if (root / name).exists():
                shutil.copy2(root / name, folder)

    def try_out(self, mutant: Mutant) -> Outcome:
        """Run the mutant's tests as they are, then with its guard gone."""
        begin = time.monotonic()
        path = self._folder / mutant.file
        text = path.read_text(encoding="utf-8")
        where = f"{mutant.file}:{text[: text.index(mutant.old)].count(chr(10)) + 1}"

        def outcome(verdict: str, detail: str = "", red: Sequence[str] = (), green: int = 0, controls: int = 0):
            seconds = round(time.monotonic() - begin, 1)
            return Outcome(mutant.id, mutant.rule, where, verdict, tuple(red), green, controls, seconds, detail)

        before = self.untouched(mutant.tests)
        if before["exit"] != 0:
            return outcome("broken", f"its tests are not green without it: {before['tail']}")
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            after = self._pytest(mutant.tests)
        finally:
            path.write_text(text, encoding="utf-8")
        if after["exit"] not in (0, 1):
            return outcome("broken", after["tail"])
        failed = [test for test in after["tests"] if test["outcome"] in ("failed", "error")]
        red = sorted({test["id"].split("[")[0] for test in failed if mutant.rule in test["invariants"]})
        controls = [test for test in after["tests"] if mutant.rule in test["controls"]]
        green = sum(test["outcome"] == "passed" for test in controls)
        verdict = "noticed" if red else "other tests" if failed else "survived"
        detail = "" if red else ", ".join(sorted({test["id"] for test in failed})[:3])
        return outcome(verdict, detail, red, green, len(controls))

    def untouched(self, tests: tuple[str, ...]) -> dict[str, Any]:
        """What the tests give without any mutant; run once."""
        if tests not in self._green:
            self._green[tests] = self._pytest(tests)
        return self._green[tests]

    def _pytest(self, tests: Sequence[str]) -> dict[str, Any]:
        report = self._folder / "report.json"
        report.unlink(missing_ok=True)
        line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly", *self._on, *tests]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HALMA_", "PYTEST_"))}
        # No bytecode: what is compiled from a mutant must not outlive it.
        ours = {"PYTHONPATH": str(self._folder / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                [*line, "--halma-report", str(report)],
                cwd=self._folder,
                env={**kept, **ours},
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"exit": -1, "tests": [], "tail": f"no end after {SECONDS} s"}
        said = [text for text in (done.stdout + done.stderr).splitlines() if text.strip()] or ["it said nothing"]
        data: dict[str, Any] = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {"tests": []}
        return {"exit": done.returncode, "tests": data["tests"], "tail": said[-1].strip()}


def try_all(mutants: Sequence[Mutant], jobs: int, backend: str = "cpu") -> Iterator[Outcome]:
    """The outcomes in the order of the table, each as soon as it and those before it are known."""
    with tempfile.TemporaryDirectory(prefix="halma-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        green: dict[tuple[str, ...], dict[str, Any]] = {}
        idle: SimpleQueue[Copy] = SimpleQueue()
        for number in range(jobs):
            place = Path(folder) / str(number)
            place.mkdir()
            idle.put(Copy(place, green=green, backend=backend))

        def in_a_copy(work: Callable[[Copy], T]) -> T:
            copy = idle.get()
            try:
                return work(copy)
            finally:
                idle.put(copy)

        suites = dict.fromkeys(mutant.tests for mutant in mutants)
        list(pool.map(lambda tests: in_a_copy(lambda copy: copy.untouched(tests)), suites))
        yield from pool.map(lambda mutant: in_a_copy(lambda copy: copy.try_out(mutant)), mutants)


def uncovered(mutants: Iterable[Mutant]) -> list[str]:
    """Rules of the layer that the conformance suite shows and no mutant tests."""
    from halma.hal.testing.rules import RULES

    covered = {mutant.rule for mutant in mutants}
    return [rule.id for rule in RULES if not rule.elsewhere and rule.id not in covered]


def markdown(outcomes: Sequence[Outcome], missing: Sequence[str], backend: str = "cpu") -> str:
    """The table as committed."""
    noticed = sum(one.verdict == "noticed" for one in outcomes)
    lines = [
        "# Mutants: guards taken away, and the tests that noticed",
        "",
        f"`make mutants`: {noticed} of {len(outcomes)} noticed. Python {platform.python_version()}, backend {backend}, "
        f"evidence {backend}. A mutant is noticed when a test that names its rule fails; the last column says how many "
        "of the rule's control arms stayed green all the same.",
        "",
        "| mutant | guard | verdict | tests that went red | control arms green |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        red = "<br>".join(f"`{name.split('::')[-1]}`" for name in one.red) or one.detail or "none"
        lines.append(f"| {one.mutant} | {one.where} | {one.verdict} | {red} | {one.controls_green} of {one.controls} |")
    lines += ["", f"Rules without a mutant: {', '.join(missing) or 'none'}."]
    return "\n".join(lines) + "\n"


def _write(path: Path, outcomes: Sequence[Outcome], missing: Sequence[str], backend: str = "cpu") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        about = {"schema": "halma.mutants/1", "python": platform.python_version(), "backend": backend}
        data = {**about, "uncovered": list(missing)}
        path.write_text(json.dumps({**data, "mutants": [asdict(one) for one in outcomes]}, indent=1) + "\n")
    else:
        path.write_text(markdown(outcomes, missing, backend), encoding="utf-8")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of jobs")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every mutant was noticed and every rule has one. 1: not so. 2: the table or the request is wrong."""
    parser = argparse.ArgumentParser(prog="python -m ci.mutants")
    parser.add_argument("--only", action="append", default=[], metavar="RULE|ID", help="may be repeated")
    parser.add_argument("--output", action="append", default=[], type=Path, metavar="FILE", help=".md or .json; repeat")
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="so many at a time (1)")
    parser.add_argument("--backend", default="cpu", metavar="NAME", help="cpu, or whose device runs the GPU's table")
    options = parser.parse_args(arguments)
    on_a_device = options.backend != "cpu"
    try:
        mutants = load(TABLE / "gpu") if on_a_device else load()
    except MutantError as error:
        print(error, file=sys.stderr)
        return 2
    known = {name for mutant in mutants for name in (mutant.id, mutant.rule)}
    wrong = [name for name in options.only if name not in known]
    wrong += [str(path) for path in options.output if path.suffix not in (".md", ".json")]
    if wrong:
        print(f"no such rule or mutant, or no .md or .json file: {', '.join(wrong)}", file=sys.stderr)
        return 2
    chosen = [one for one in mutants if not options.only or {one.id, one.rule} & set(options.only)]
    outcomes: list[Outcome] = []
    for one in try_all(chosen, options.jobs, options.backend):
        outcomes.append(one)
        shown = f"{len(one.red)} red, {one.controls_green}/{one.controls} controls green"
        print(f"{one.verdict:<11}  {one.mutant:<36}  {shown}  {one.seconds:.0f} s  {one.detail}", flush=True)
    missing = [] if options.only or on_a_device else uncovered(mutants)
    for path in options.output:
        _write(path, outcomes, missing, options.backend)
    noticed = sum(one.verdict == "noticed" for one in outcomes)
    print(f"{noticed} of {len(outcomes)} noticed" + (f"; rules without a mutant: {', '.join(missing)}" * bool(missing)))
    return 0 if noticed == len(outcomes) and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
