"""A graph driver that writes down what it is asked and fails where a test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from halma.hal.backend import GraphCounts, GraphNode, PoolUse
from halma.hal.capabilities import Capabilities


class Failure(RuntimeError):
    """What a scripted driver raises."""


class ScriptedGraphs:
    """Logs every call; ``fail`` names the calls that raise."""

    def __init__(self, *, unsupported: str | None = None, fail: Sequence[str] = ()) -> None:
        self.log: list[str] = []
        self.fail = set(fail)
        self._unsupported = unsupported
        self.live = 0

    def _note(self, name: str) -> None:
        self.log.append(name)
        if name in self.fail:
            raise Failure(name)

    def unsupported(self) -> str | None:
        return self._unsupported

    def is_capturing(self) -> bool:
        return False

    def dry_run(self, program: Callable[[], Any], workspace: Any) -> None:
        self._note("dry_run")
        program()

    def begin(self, stream: Any, workspace: Any) -> None:
        self._note("begin")

    def end(self, stream: Any) -> str:
        self._note("end")
        return "template"

    def abandon(self, stream: Any) -> None:
        self.log.append("abandon")

    def instantiate(self, template: Any) -> str:
        self._note("instantiate")
        self.live += 1
        return "executable"

    def replay(self, executable: Any, stream: Any) -> None:
        self._note("replay")

    def destroy(self, executable: Any) -> None:
        self._note("destroy")
        self.live -= 1

    def nodes(self, template: Any) -> list[GraphNode]:
        return [GraphNode("node", ())]

    def counts(self, template: Any) -> GraphCounts:
        return GraphCounts(kernels=1)

    def pool_bytes(self, workspace: Any) -> int | None:
        return None

    def pool_uses(self, template: Any) -> list[PoolUse]:
        return []

    @contextmanager
    def counting(self) -> Iterator[Callable[[], GraphCounts]]:
        yield GraphCounts


def scripted_backend(**kwargs: Any) -> Any:
    """A backend of which only graphs and the current stream exist."""
    graphs = ScriptedGraphs(**kwargs)
    return SimpleNamespace(
        name="scripted",
        graphs=graphs,
        device=SimpleNamespace(current_stream=lambda: "stream"),
        capabilities=Capabilities(graph_segments=True),
    )
