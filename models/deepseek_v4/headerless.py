"""An FFN rank without headers: one graph of the worst case serves whichever item comes, and the device finds it.

Each replay looks at the attention ranks by turns, so an idle one blocks nobody (F15). What an item is, its layer among
it, the device reads in the item's slot; weights come through the device's table of layers. The host enqueues replays
ahead and knows of each no more than that it has begun. A look without an item ends after a while with no rows,
which costs launches and no rows; so replays that nobody needs end by themselves, and the host can look for its peers,
for faults, and for the end: attention ranks are done when they have all replies.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final, cast

import torch

from halma.hal.backend import Backend
from halma.hal.collectives.ring_contract import COUNTED, RingNext, RingStaging
from halma.hal.collectives.rings import LOOKS_A_POLL, Rings
from halma.hal.decisions import Candidate, Decision, decisions
from halma.hal.errors import CaptureError
from halma.models.deepseek_v4.ffn.items import ItemInputs, descriptor_of
from halma.models.deepseek_v4.ffn.program import FfnProgram, Found
from halma.models.deepseek_v4.role_ranks import ITEMS, ItemsChoice
from halma.models.deepseek_v4.serving import NAP, SPIN_OTHERS, SPIN_SECONDS

AHEAD: Final = 4
"""Replays that a host may be ahead of the device: a launch takes longer than a look at an item that is there."""
PATIENCE: Final = {"cpu": 0.1}
"""Seconds of a look. An item that comes just behind one waits for a graph of no rows: tens of microseconds on a device,
milliseconds on a CPU, whose ranks share cores too."""
PATIENCE_OTHERS: Final = 0.002


def without_headers(program: FfnProgram, asked: ItemsChoice) -> tuple[bool, str]:
    """Whether a prepared program is to serve without headers, and why.

    Raises:
        CaptureError: it was asked to, and cannot.
    """
    refusal = program.session.off_reason("ffn") or program.by_layer
    if asked == "worst-case" and refusal:
        raise CaptureError(
            "one graph of the worst case cannot serve every item here",
            asked="--items worst-case",
            found=refusal,
            do="--items headers; or graphs on, and experts of one format in all layers",
        )
    if asked != "auto":
        chosen, why = asked == "worst-case", "asked for"
    elif refusal:
        chosen, why = False, refusal
    elif not program.costs.spans:
        chosen, why = False, "nothing was measured"
    else:
        dearer = program.costs.where_worst_case_is_dearer()
        chosen, why = not dearer, dearer or "the worst case was measured to cost no more at any size"
    ways = tuple(Candidate(way, way == ITEMS[chosen], why) for way in ITEMS[:2])
    decisions.record(Decision("ffn", "how items are learnt of", ITEMS[chosen], ways))
    return chosen, why


class NextItems:
    """Serves items until no attention rank asks any more. See the module; :class:`ExpertServer` reads headers instead.

    Args:
        rings: of an FFN rank, whose items nobody took yet.
        program: prepared, on ``staging``.
        why: it serves so, for the report.

    Raises:
        CaptureError: the graph cannot be captured.
    """

    def __init__(self, rings: Rings, program: FfnProgram, staging: RingStaging, backend: Backend, why: str) -> None:
        b = program.buffers
        counted = backend.memory.pinned((len(COUNTED),), torch.int64).zero_()
        self._counted: Any = counted.numpy()
        index = None if program.sizes.every_row_shared else b.shared_index
        self._seen = RingNext(b.layer, b.shared_count, index, backend.memory.on_device(counted))
        self._rings, self._program, self._staging, self._backend, self._why = rings, program, staging, backend, why
        kind = backend.device.torch_device.type
        self._spin, self._patience = SPIN_SECONDS.get(kind, SPIN_OTHERS), PATIENCE.get(kind, PATIENCE_OTHERS)
        largest = program.ladder.buckets[-1]
        rows = largest.routed // program.sizes.top_k
        worst = descriptor_of(rows, largest.shared)
        self._body = program.body_of(worst)
        self._descriptor = descriptor_of(rows, largest.shared, whoever=True)
        # Behind the ladder, so that its kernels have met real rows: what is run for this capture finds none.
        with torch.no_grad():
            program.session.capture_all([self._descriptor], lambda _: self._whole)
        self._inputs = cast("ItemInputs", program.session.inputs_of(self._descriptor))
        self._graph = program.session.find(self._descriptor)
        if self._graph is None:
            rows_ = program.session.report().rows
            raise CaptureError(
                "the graph that serves whichever item comes was not captured",
                asked=str(self._descriptor),
                found=next((row.why_not for row in rows_ if row.descriptor == self._descriptor), ""),
                do="--items headers, or more free memory",
            )

    def _whole(self) -> Found:
        self._rings.take_next(self._staging, self._seen, self._patience)
        found = self._body()
        out, beside = (found, None) if isinstance(found, torch.Tensor) else found
        self._rings.reply_next(out, beside)
        return found

    def step(self) -> None:
        """Queue one look for an item, and what is to be done with it."""
        assert self._graph is not None
        self._inputs.fresh = True  # the graph itself brings them
        with torch.no_grad():
            self._graph.replay()

    def serve(self) -> dict[str, Any]:
        """Until every attention rank is done, and then until all ranks are; what was served, for reports.

        Raises:
            RankError: a rank left, ended, or did not do its part in time.
        """
        since, items, enqueued, turns = time.monotonic(), 0, 0, 0
        began = int(self._counted[0])
        while not self._rings.all_done:
            turns += 1
            if turns % LOOKS_A_POLL == 0:
                self._rings.poll()
            if int(self._counted[1]) != items:
                items, since = int(self._counted[1]), time.monotonic()
            if enqueued - (int(self._counted[0]) - began) < AHEAD:
                self.step()
                enqueued += 1
            elif time.monotonic() - since > self._spin:
                time.sleep(NAP)
            else:
                os.sched_yield()
        self._rings.finish()  # looks that are under way find nothing, and end
        counted = dict(zip(COUNTED, self._counted.tolist(), strict=True))
        self._program.close()
        charged = counted["items"] * self._program.ladder.max_routed
        return {**counted, "charged_rows": charged, "way": {"chosen": "worst-case", "why": self._why}}
