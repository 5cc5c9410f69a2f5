"""A step without a graph: the program itself, run once under the rules of a replay.

A switch, a budget or a failed capture decides how a step runs. Were other things legal in either case, a program
would break on the day that its graph comes or goes. So an eager step is the one user of its workspace, takes its
inputs, runs on the stream it was given, ends the life of earlier outputs, and is refused inside a capture, which
would record it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from halma.hal.backend import Backend, Stream
from halma.hal.graph.breakable import made_current
from halma.hal.graph.current import refuse_step_in_scope
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.inputs import InputSet
from halma.hal.graph.outputs import guard
from halma.hal.graph.retire import drain, follow_last_use, lease
from halma.hal.workspace import Workspace


def eager_step(
    program: Callable[[], Any],
    workspace: Workspace,
    backend: Backend,
    *,
    step: Descriptor,
    inputs: InputSet,
    stream: Stream | None = None,
) -> Any:
    """Run ``program`` from the start of ``workspace``. Returns its outputs, valid until the next step there.

    Raises:
        CaptureError: a capture is open on this thread; the workspace is in use (G22).
        StaleInputError: an input was not refreshed since its last step (G12).
    """
    refuse_step_in_scope(f"{step} cannot run")
    drain()
    stream = stream or backend.device.current_stream()
    inputs.check(step)
    with lease(workspace, f"an eager step of {step}"):
        follow_last_use(workspace, stream, backend.device)
        inputs.consume(stream)
        generation = workspace.generations.next(program)
        workspace.start()
        try:
            with made_current(stream, backend):
                outputs = program()
        except BaseException:
            workspace.reset()
            raise
    return guard(outputs, generation) if workspace.checked else outputs
