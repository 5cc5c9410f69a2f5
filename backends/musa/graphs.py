"""Captures of MUSA, by ``torch_musa.MUSAGraph`` of 2.7.1, and what differs from torch.cuda.

* ``capture_end()`` makes the executable at once, and template and executable live until ``reset()``: a template has
  one executable in its life, so none can be recycled, and every finished capture counts against the driver's ceiling.
* ``reset()`` does not give the private pool back (the call is commented out in torch_musa's MUSAGraph.cpp), so it is
  given back here, once a capture.
* There is no handle of the template: what a graph does is counted from what the dispatcher saw.
* The exchange of a thread's capture mode is a stub that throws, so the allocator cannot relax the mode around its
  own allocations: which modes allow them is tried out (:func:`halma.backends.musa.trials.choose_mode`).
* ``debug_dump()`` destroys the template, and ``reset()`` then destroys it again, so it is never called; the layer
  shows nodes from the dispatcher.
"""

from __future__ import annotations

import threading
from typing import Any, Final, cast

from halma.backends.musa.seam import torch_musa
from halma.backends.torch_device.graphs import Template
from halma.backends.torch_device.pools import GraphPool
from halma.backends.torch_device.watch import CaptureWatch
from halma.hal.backend import GraphCounts
from halma.hal.errors import CaptureError

EXECUTABLES: Final = 2000
"""Most finished captures that may live in a process. The driver fails at the 2,044th to 2,049th, by an illegal access
(sgl-project/sglang#27537), and other libraries' graphs count too."""

MODES: Final = ("thread_local", "global", "relaxed")
"""Capture modes in the order of preference. In the last the driver refuses nothing; the layer's own watch still
refuses host reads and waits, so it is better than not to capture."""

_COPIES: Final = ("aten.copy_.", "aten.clone.", "aten._to_copy.")


class LiveGraphs:
    """Finished captures of this process that were not reset (G21).

    Args:
        limit: most of them; None: they are counted, nothing more.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.count = 0
        self._lock = threading.Lock()

    def change(self, by: int) -> None:
        """One more or one less."""
        with self._lock:
            self.count += by

    def refuse_another(self) -> None:
        """Before a capture.

        Raises:
            CaptureError: there is no room for one more.
        """
        if self.limit is not None and self.count >= self.limit:
            raise CaptureError(
                "no more graphs can be captured",
                found=f"{self.count:,} finished captures live, and the driver fails at about 2,048 executables",
                do="reset graphs that are done, capture fewer descriptors, or programs with fewer breaks",
            )


live_graphs = LiveGraphs(EXECUTABLES)
"""The driver counts for the process, and so does this."""


class MusaPool:
    """A private pool of torch_musa's allocator, known by its id. Counts the captures that use it, as the allocator
    does: at none the allocator forgets the pool, and the next capture gets another."""

    def __init__(self) -> None:
        self._id: Any = None
        self.uses = 0

    @property
    def id(self) -> Any:
        """What ``capture_begin`` takes."""
        if self._id is None:
            self._id = torch_musa().graph_pool_handle()
        return self._id

    def hold(self) -> None:
        """Nothing: captures themselves hold it."""

    def give_back(self, device: int, pool_id: Any) -> None:
        """One capture less, as ``reset()`` should have told the allocator."""
        torch_musa()._MUSAC._musa_releasePool(device, pool_id)
        self.uses -= 1
        if self.uses == 0 and self._id == pool_id:
            self._id = None

    def nbytes(self) -> int:
        """Bytes of device memory that the pool holds, used or not."""
        pool_id = self._id
        if pool_id is None:
            return 0
        segments = torch_musa().memory_snapshot()  # may collect garbage, and with a dropped graph its pool
        return sum(int(one["total_size"]) for one in segments if tuple(one["segment_pool_id"]) == tuple(pool_id))


class MusaGraph:
    """A ``MUSAGraph`` whose ``reset()`` leaves nothing behind.

    Args:
        device: torch's number of it.
        pool: where the capture allocates.
    """

    def __init__(self, device: int, pool: MusaPool) -> None:
        self._graph: Any = torch_musa().MUSAGraph()
        self._device = device
        self._pool = pool
        self._pool_id: Any = None
        self._finished = False
        self.taken = False
        """Its executable was given out."""

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        """On the current stream, which must not be the default one."""
        self._graph.capture_begin(pool=pool, capture_error_mode=capture_error_mode)
        _under_way.add(id(self))
        self._pool_id = pool
        self._pool.uses += 1

    def capture_end(self) -> None:
        """Also makes the executable."""
        try:
            self._graph.capture_end()
        finally:  # until then another thread may drop a graph, whose reset would make this capture invalid
            _under_way.discard(id(self))
        self._finished = True
        live_graphs.change(+1)

    def replay(self) -> None:
        """On the current stream."""
        self._graph.replay()

    def stop_recording(self) -> None:
        """Stop the allocator's recording, which a failed ``capture_end()`` left on."""
        if self._pool_id is not None:
            torch_musa()._MUSAC._musa_endAllocateCurrentStreamToPool(self._device, self._pool_id)

    def reset(self) -> None:
        """Destroy template and executable, and give the pool back; twice is once. Never amid a capture."""
        _under_way.discard(id(self))
        self._graph.reset()
        if self._finished:
            self._finished = False
            live_graphs.change(-1)
        if self._pool_id is not None:
            pool_id, self._pool_id = self._pool_id, None
            self._pool.give_back(self._device, pool_id)

    def __del__(self) -> None:
        try:
            if _under_way - {id(self)}:
                _dropped.append(self)  # destroying an executable would make that capture invalid
            else:
                self.reset()
        except Exception:
            pass  # at the interpreter's end torch_musa, and the standard library, may be gone


_under_way: Final[set[int]] = set()
"""Graphs whose captures have begun and not ended, by identity."""
_dropped: Final[list[MusaGraph]] = []
"""Graphs that nobody holds any more and that were found amid somebody's capture, which a garbage collection can be."""


def destroy_dropped() -> None:
    """Reset what was dropped amid a capture, if none is under way."""
    while not _under_way:
        try:
            graph = _dropped.pop()  # threads may do this at once
        except IndexError:
            return
        graph.reset()


class MusaRecipe:
    """See :class:`halma.backends.torch_device.graphs.Recipe`.

    Args:
        device: torch's number of it.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self.mode = MODES[0]

    def new_graph(self, pool: GraphPool) -> MusaGraph:
        """One more capture, if there is room.

        Raises:
            CaptureError: too many finished captures live.
        """
        destroy_dropped()
        live_graphs.refuse_another()
        return MusaGraph(self._device, cast(MusaPool, pool))

    def new_pool(self) -> MusaPool:
        """A pool by its id."""
        return MusaPool()

    def stop_recording(self, graph: MusaGraph, pool: GraphPool) -> None:
        """What ``capture_end()`` would have done."""
        graph.stop_recording()

    def counts(self, graph: MusaGraph, watch: CaptureWatch) -> GraphCounts:
        """Counted from the calls that were recorded: an opaque call is one kernel."""
        copies = sum(node.name.startswith(_COPIES) for node in watch.nodes)
        return GraphCounts(kernels=len(watch.nodes) - copies, copies=copies, allocations=len(watch.uses))

    def instantiate(self, template: Template) -> None:
        """The executable that ``capture_end()`` made; torch_musa launches it.

        Raises:
            CaptureError: it was given out before.
        """
        if template.graph.taken:
            raise CaptureError(
                "a captured graph has one executable on MUSA",
                found="torch_musa makes it when the capture ends, and it lives as long as its template",
                do="capture the program again",
            )
        template.graph.taken = True

    def launch(self, handle: Any, stream: int) -> None:
        """Never called: torch_musa launches."""
        raise CaptureError("torch_musa launches graphs itself", asked=f"a launch on stream {stream:#x}")

    def destroy(self, handle: Any) -> None:
        """Never called: the executable is the graph's."""
        raise CaptureError("torch_musa destroys executables itself")

    def retire(self, template: Template) -> None:
        """The executable goes with its template, and so does its share of the pool."""
        template.graph.reset()
