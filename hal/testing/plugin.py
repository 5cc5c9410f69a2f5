"""The pytest plugin: options that name a backend, markers that name a rule, and a report of what was shown.

Loaded through the entry point ``pytest11``, so it imports no torch and no backend until an option or a test
asks for one, and all its options start with ``--halma-``.

* T1: ``--halma-require-backend NAME`` ends the session, with the probe's reason, when NAME cannot be used.
* T2: with ``--halma-row`` a session that ran nothing, or skipped all, fails.
* T3, T4, T5: ``--halma-report FILE`` writes outcome, reason, rules, counted assertions and evidence of each test.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from halma.hal.testing.counting import count, count_wordlessly, held
from halma.hal.testing.report import EVIDENCE, SessionReport, TestResult

if TYPE_CHECKING:
    from halma.hal.backend import Backend
    from halma.hal.testing.ranks import RankPools

_MARKERS = (
    "invariant(id, control=False): guards that rule of the layer; control=True marks the arm that must stay green",
    "evidence(kind): how the test's result is obtained: " + ", ".join(EVIDENCE),
)
_PROPERTY = "halma"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("halma", "halma: backends and reports")
    group.addoption("--halma-backend", metavar="NAME", help="backend for the fixture halma_backend (default: cpu)")
    group.addoption("--halma-require-backend", metavar="NAME", help="fail the session if NAME cannot be used")
    group.addoption(
        "--halma-require-capability",
        metavar="NAME",
        action="append",
        default=[],
        help="fail the session if the backend does not have this capability; may be repeated",
    )
    group.addoption("--halma-row", metavar="ID", help="the CI row this session is: running no test is then a failure")
    group.addoption("--halma-report", metavar="FILE", help="write outcomes, rules and evidence as JSON")


def pytest_configure(config: pytest.Config) -> None:
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    on_controller = not hasattr(config, "workerinput")  # pytest-xdist's workers have one
    required = _option(config, "--halma-require-backend")
    if on_controller and required:
        _require_backend(required)
    if on_controller:
        capabilities = cast("list[str]", config.getoption("--halma-require-capability"))
        _require_capabilities(_option(config, "--halma-backend"), capabilities)
    if _option(config, "--halma-report"):
        stop = count_wordlessly()
        config.pluginmanager.register(_WordyCounter() if stop is None else _Counter(), "halma-counter")
        if stop is not None:
            config.add_cleanup(stop)
    if on_controller and (_option(config, "--halma-report") or _option(config, "--halma-row")):
        config.pluginmanager.register(_Recorder(config), "halma-recorder")


def pytest_report_header(config: pytest.Config) -> str | None:
    row = _option(config, "--halma-row")
    backend = _option(config, "--halma-backend")
    if row is None and backend is None:
        return None
    return f"halma: row {row or '-'}, backend {backend or 'cpu'}, evidence {_backend_evidence(backend)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("invariant"):
            if len(mark.args) != 1 or not isinstance(mark.args[0], str) or set(mark.kwargs) - {"control"}:
                raise pytest.UsageError(f"{item.nodeid}: invariant takes one id and control=, found {mark}")
        for mark in item.iter_markers("evidence"):
            if len(mark.args) != 1 or mark.args[0] not in EVIDENCE:
                raise pytest.UsageError(f"{item.nodeid}: evidence takes one of {', '.join(EVIDENCE)}, found {mark}")


@pytest.fixture(scope="session")
def halma_backend(request: pytest.FixtureRequest) -> Backend:
    """The backend that ``--halma-backend`` names, ready to use; the test is skipped, with the probe's own
    words, where it cannot be used."""
    from halma.hal.registry import default_registry

    name = _option(request.config, "--halma-backend") or "cpu"
    reason = _unusable(name)
    if reason is not None:
        pytest.skip(reason)
    return default_registry().select(name)


@pytest.fixture(scope="session")
def halma_rank_pools(halma_backend: Backend) -> Iterator[RankPools]:
    """Rank processes by world size, started when they are first asked for and shared by all tests of the run."""
    from halma.hal.testing.ranks import RankPools

    pools = RankPools(halma_backend.name)
    yield pools
    pools.close()


def _option(config: pytest.Config, name: str) -> str | None:
    return cast("str | None", config.getoption(name))


def _unusable(name: str) -> str | None:
    """Why the backend cannot be used, or None."""
    from halma.hal.errors import BackendError
    from halma.hal.registry import default_registry

    try:
        status = default_registry().status(name)
    except BackendError as error:
        return str(error)
    return None if status.usable else status.reason


def _require_backend(name: str) -> None:
    reason = _unusable(name)
    if reason is not None:
        raise pytest.UsageError(
            f"backend {name!r} is required and cannot be used\n"
            f"  found: {reason}\n"
            f"  do:    make it usable, or leave out --halma-require-backend={name} to skip its tests"
        )


def _require_capabilities(backend: str | None, names: list[str]) -> None:
    if not names:
        return
    from halma.hal.errors import HalmaError
    from halma.hal.registry import default_registry

    try:
        capabilities = default_registry().select(backend or "cpu").capabilities
        for name in names:
            if not hasattr(capabilities, name):
                raise pytest.UsageError(f"--halma-require-capability={name}: there is no such capability")
            capabilities.need(name, for_="this test session")
    except HalmaError as error:
        raise pytest.UsageError(str(error)) from None


def _backend_evidence(name: str | None) -> str:
    """The evidence of a backend's results; the CPU's own where none was named."""
    if name is None or name == "cpu":
        return "cpu"
    from halma.hal.errors import BackendError
    from halma.hal.registry import default_registry

    try:
        return default_registry().spec(name).evidence
    except BackendError:
        return "unknown"


class _Counter:
    """In the process that runs the tests: attaches rules, evidence and counted assertions to each report."""

    def __init__(self) -> None:
        self._before = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._before = held()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        marks = item.iter_markers("invariant")
        rules = [(str(mark.args[0]), bool(mark.kwargs.get("control", False))) for mark in marks]
        closest = item.get_closest_marker("evidence")
        facts = {
            "invariants": sorted({name for name, control in rules if not control}),
            "controls": sorted({name for name, control in rules if control}),
            "assertions": held() - self._before,
            "evidence": closest.args[0] if closest else _evidence_of(item),
        }
        # The only channel that pytest-xdist carries from its workers.
        report.user_properties = [pair for pair in report.user_properties if pair[0] != _PROPERTY]
        report.user_properties.append((_PROPERTY, facts))
        return report


class _WordyCounter(_Counter):
    """Where pytest cannot be asked to count alone."""

    def pytest_assertion_pass(self, item: pytest.Item, lineno: int, orig: str, expl: str) -> None:
        count()


def _evidence_of(item: pytest.Item) -> str:
    """A test that uses the named backend gets that backend's evidence; any other ran on the CPU."""
    uses_backend = "halma_backend" in getattr(item, "fixturenames", ())
    return _backend_evidence(_option(item.config, "--halma-backend")) if uses_backend else "cpu"


class _Recorder:
    """Gathers the session's outcomes, fails an empty row, writes the report."""

    def __init__(self, config: pytest.Config) -> None:
        backend = _option(config, "--halma-backend")
        self._row = _option(config, "--halma-row")
        self._path = _option(config, "--halma-report")
        self._empty = False
        self.report = SessionReport(self._row or "", backend or "cpu", _backend_evidence(backend))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        result = self.report.tests.setdefault(report.nodeid, TestResult(report.nodeid))
        result.seconds = round(result.seconds + report.duration, 4)
        facts = cast("dict[str, Any]", dict(report.user_properties).get(_PROPERTY, {}))
        for name, value in facts.items():
            setattr(result, name, value)
        _settle(result, report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self._empty = self._row is not None and self.report.executed() == 0
        if self._empty and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._path is not None:
            self.report.exit = int(session.exitstatus)
            self.report.write(Path(self._path))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = self.report.counts().get("skipped", 0)
        if self._empty:
            terminalreporter.section("halma")
            terminalreporter.line(
                f"row {self._row!r} ran no test ({skipped} skipped, {len(self.report.tests)} collected): that is a "
                "failure, not a pass",
                red=True,
            )


def _settle(result: TestResult, report: pytest.TestReport) -> None:
    """Fold one phase of a test into its outcome; the worst phase wins."""
    expected_failure = hasattr(report, "wasxfail")
    if report.failed:
        result.outcome = "failed" if report.when == "call" else "error"
    elif report.skipped:
        result.outcome = "xfailed" if expected_failure else "skipped"
        result.reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    elif expected_failure and report.when == "call":
        result.outcome = "xpassed"
