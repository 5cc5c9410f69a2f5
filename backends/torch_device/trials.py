"""What the device can do, tried out once: each trial gives its answer, or why it is unknown."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from halma.backends.torch_device.device import TorchDevice
from halma.backends.torch_device.graphs import TorchGraphs
from halma.backends.torch_device.memory import TorchMemory
from halma.hal.capabilities import UNKNOWN
from halma.hal.graph.current import open_captures
from halma.hal.workspace import Workspace


@dataclass
class Trials:
    """The answers so far, and for what failed, the error: ``halma doctor`` shows them."""

    device: TorchDevice
    graphs: TorchGraphs
    memory: TorchMemory
    notes: dict[str, str] = field(default_factory=dict[str, str])

    def ask(self, name: str, trial: Callable[[], Any]) -> Any:
        """The trial's answer; unknown, with the error kept, where it raises."""
        try:
            with torch.no_grad():
                return trial()
        except Exception as error:
            self.notes[name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return UNKNOWN

    # -- graphs -------------------------------------------------------------------------------------

    def _capture(self, work: Callable[[], Any], between: Callable[[], Any] | None = None) -> list[Any]:
        """Templates of ``work``, captured; twice, on one stream, where something comes ``between``."""
        stream, workspace = self.device.new_stream("trial"), Workspace(self.device.torch_device)
        workspace.seal()
        stream.queue.wait_stream(self.device.current_stream().queue)
        templates: list[Any] = []
        for part in range(1 if between is None else 2):
            try:
                self.graphs.begin(stream, workspace)
                work()
                templates.append(self.graphs.end(stream))
            finally:
                self.graphs.abandon(stream)
            if part == 0 and between is not None:
                with stream:
                    between()
        return templates

    def _replayed(self, templates: list[Any], times: int = 1) -> None:
        stream = self.device.current_stream()
        executables = [self.graphs.instantiate(template) for template in templates]
        for _ in range(times):
            for executable in executables:
                self.graphs.replay(executable, stream)
        self.device.synchronize()
        for executable in executables:
            self.graphs.destroy(executable)

    def graph_capture(self) -> bool:
        """A capture runs nothing, and each replay runs it once."""
        x = torch.zeros(4, device=self.device.torch_device)
        templates = self._capture(lambda: x.add_(1.0))
        before = float(x[0])
        self._replayed(templates, 2)
        return (before, float(x[0])) == (0.0, 2.0) and templates[0].counts.kernels == 1

    def graph_segments(self) -> bool:
        """end, eager work, begin on one stream with one pool."""
        x, y = torch.zeros(4, device=self.device.torch_device), torch.zeros(4, device=self.device.torch_device)
        templates = self._capture(lambda: x.add_(1.0), lambda: y.add_(5.0))
        before = float(x[0])
        self._replayed(templates, 3)
        return (before, float(x[0]), float(y[0])) == (0.0, 6.0, 5.0)

    def graph_reinstantiate(self) -> bool:
        """A template makes another executable after its first was destroyed."""
        x = torch.zeros(4, device=self.device.torch_device)
        templates = self._capture(lambda: x.add_(1.0))
        self._replayed(templates)
        self._replayed(templates)
        return float(x[0]) == 2.0

    def thread_local_capture(self) -> bool:
        """Another thread allocates and waits while this one captures."""
        x, failed = torch.zeros(4, device=self.device.torch_device), list[BaseException]()

        def elsewhere() -> None:
            try:
                family, index = self.device.family, self.device.index
                family.ensure_context(index)
                with family.module.stream(family.module.Stream(index)):
                    torch.empty(64 << 20, dtype=torch.uint8, device=self.device.torch_device).fill_(1)
                    family.module.current_stream(index).synchronize()
            except BaseException as error:
                failed.append(error)

        def work() -> None:
            x.add_(1.0)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            x.add_(1.0)

        self._replayed(self._capture(work))
        return not failed and float(x[0]) == 2.0 and not open_captures

    # -- the rest -----------------------------------------------------------------------------------

    def fp8_e4m3fn(self) -> bool:
        """0x80 is minus zero, 0x7e is 448, 0x7f is NaN (K3), both ways."""
        bits = torch.tensor([0x80, 0x7E, 0x7F], dtype=torch.uint8, device=self.device.torch_device)
        zero, largest, nan = bits.view(torch.float8_e4m3fn).to(torch.float32).tolist()
        back = torch.tensor([-0.0, 448.0], device=self.device.torch_device).to(torch.float8_e4m3fn)
        return str(zero) == "-0.0" and largest == 448.0 and nan != nan and back.view(torch.uint8).tolist() == [128, 126]

    def float64(self) -> bool:
        """A product that needs more than 32 bits."""
        one = torch.tensor([1.0 + 2.0**-40], dtype=torch.float64, device=self.device.torch_device)
        return float((one * one - 1.0)[0]) > 2.0**-40

    def ipc(self) -> bool:
        """Memory of the driver's can be exported; that a peer can map it is seen when one does."""
        shared, _ = self.memory.exportable(4096)
        shared.close()
        return True
