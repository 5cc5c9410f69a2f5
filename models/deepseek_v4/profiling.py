"""What a runner's ladder costs, found out in scratch sessions: nothing stays, and the runner is not prepared by it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.session import CaptureSession
from halma.hal.graph.session_report import SessionReport
from halma.models.deepseek_v4.runner import V4Runner

Progress = Callable[[Descriptor], None]


def scratch(runner: V4Runner) -> CaptureSession:
    """A scratch session as the runner's own one is."""
    options = runner.options
    return CaptureSession(
        runner.backend,
        runner.workspace,
        "scratch",
        switch=options.switch,
        strict=options.strict,
        budget=options.budget,
        reserve=runner.reserve,
        agreement=runner.model.ranks.agreement,
        arenas=runner.model.ranks.arenas,
        inputs=runner.inputs.read_by,  # a warm-up that runs must feed the null slot, not the requests of the last step
    )


def profile(
    runner: V4Runner, descriptors: Sequence[Descriptor], *, order: str = "descending", progress: Progress | None = None
) -> SessionReport:
    """Capture a ladder, report, give everything back."""
    with scratch(runner) as session:
        runner.capture_into(session, descriptors, progress, order)
    return session.report()


def unshared(
    runner: V4Runner, descriptors: Sequence[Descriptor], *, progress: Progress | None = None
) -> list[SessionReport]:
    """The same ladder with a workspace for each graph, all of them alive at once: what sharing saves.

    Returns one report a descriptor.
    """
    reports: list[SessionReport] = []
    with contextlib.ExitStack() as alive:
        for descriptor in descriptors:
            session = alive.enter_context(scratch(runner))
            runner.capture_into(session, [descriptor], progress)
            reports.append(session.report())
    return reports
