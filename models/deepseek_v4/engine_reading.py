"""Steps in flight, and what the host reads of them when they are done.

A step writes how many tokens each of its rows emitted into the log, and the tokens into the ring, both in pinned
memory; an event behind the step says when they are there. The host reads a step only when a fixed number of newer
ones is in flight, so it waits for a step just where it runs ahead of the device by more than that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from halma.hal.backend import Event
from halma.models.deepseek_v4.engine_drafts import Acceptance, Drafts
from halma.models.deepseek_v4.engine_requests import Decoder, Generation, TokenCallback
from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.state import LOG_STEPS, TOKEN_RING


@dataclass
class EngineCounters:
    """Steps by kind, tokens committed, and what the host waited for.

    Attributes:
        decode_steps: steps that go on with requests, verify steps included.
        back_pressure: steps that were not done yet when the host had run ahead of them as far as it may.
    """

    decode_steps: int = 0
    verify_steps: int = 0
    prefill_steps: int = 0
    replayed: int = 0
    eager: int = 0
    tokens: int = 0
    back_pressure: int = 0


@dataclass(frozen=True)
class Flown:
    """A step that was issued.

    Attributes:
        number: of the runner's committing steps; where its row of the log is.
        rows: the requests in it, in order.
        most: tokens that it may give each of them.
        verified: drafts that it verifies; None: no verify step.
        judged: of those, how many were drafted at all, by row.
    """

    number: int
    rows: tuple[Generation, ...]
    most: int
    verified: int | None
    judged: tuple[int, ...]
    event: Event


class Flight:
    """The steps in flight, oldest first.

    Args:
        on_token: called by :meth:`tell` for every new token, in order.
        decoder: for requests with stop texts.
        drafts: told what became of drafts; None where there are none.
    """

    def __init__(
        self,
        runner: V4Runner,
        counters: EngineCounters,
        *,
        on_token: TokenCallback | None,
        decoder: Decoder | None,
        drafts: Drafts | None,
    ) -> None:
        self.acceptance = Acceptance()
        self.steps: deque[Flown] = deque()
        self.untold: deque[tuple[Generation, int]] = deque()
        self._runner = runner
        self._counters = counters
        self._on_token = on_token
        self._decoder = decoder
        self._drafts = drafts
        # One more than can be in flight: a step's event is recorded again only after it was read.
        self._events: deque[Event] = deque()

    def launched(self, number: int, rows: Sequence[Generation], verified: int | None = None) -> None:
        """A step was issued.

        Args:
            rows: the requests that it gives tokens; none of a prompt's chunk before the last.
            verified: how many drafts it verifies, where it does.
        """
        device = self._runner.backend.device
        event = self._events.popleft() if self._events else device.new_event("step")
        device.current_stream().record(event)
        most = 1 if verified is None else verified + 1
        judged = tuple(min(one.drafted, most - 1) for one in rows)
        self.steps.append(Flown(number, tuple(rows), most, verified, judged, event))
        for one in rows:
            one.flying += 1
            one.flying_most += most

    def land(self, keep: int) -> None:
        """Read all steps but the newest ``keep``.

        Raises:
            RankError: a rank is lost; the tokens of the step that was to be read mean nothing.
        """
        while len(self.steps) > keep:
            self._read(self.steps.popleft())

    def tell(self) -> None:
        """Call back for what was read: what a callback raises must not lose the others' tokens."""
        while self.untold:
            generation, token = self.untold.popleft()
            if self._on_token is not None:
                self._on_token(generation, token)

    def carries(self) -> set[int]:
        """Ids of the requests that a step in flight holds."""
        return {one.id for step in self.steps for one in step.rows}

    def _read(self, step: Flown) -> None:
        if not step.event.query():
            self._counters.back_pressure += 1
            step.event.synchronize()
        self._events.append(step.event)
        self._runner.model.ranks.poll()
        self._runner.model.experts.poll()
        emitted = self._runner.log[step.number % LOG_STEPS, : len(step.rows)].tolist()
        for generation, count, judged in zip(step.rows, emitted, step.judged, strict=True):
            generation.flying -= 1
            generation.flying_most -= step.most
            if generation.done:
                continue  # it ended before this step; what the device made of it since is dropped
            if not 0 < count <= step.most:
                # Host and device count alike, so this is a defect; going on would wait for the request for ever.
                raise RuntimeError(
                    f"step {step.number}: {count} tokens of 1 to {step.most} for request {generation.id}"
                )
            self._commit(generation, count, step.verified, judged)

    def _commit(self, generation: Generation, count: int, verified: int | None, judged: int) -> None:
        request, known = generation.request, len(generation.tokens)
        cells = self._runner.ring[generation.slot]
        first = len(request.prompt) + known
        for position in range(first, first + count):
            token = int(cells[position % TOKEN_RING])
            generation.tokens.append(token)
            self._counters.tokens += 1
            self.untold.append((generation, token))
            if token in request.stop or self._text_stops(generation):
                generation.finish = "stop"
                break  # what the device made behind a stop that it does not know of is dropped
            if len(generation.tokens) >= request.max_tokens:
                generation.finish = "length"
        if verified is not None:
            judged = min(judged, request.max_tokens - known - 1)
            if generation.finish == "stop":
                judged = min(judged, len(generation.tokens) - known - 1)
            self._count(generation, verified, judged, min(count - 1, judged))

    def _count(self, generation: Generation, verified: int, judged: int, accepted: int) -> None:
        self.acceptance.count(verified=verified, judged=judged, accepted=accepted)
        generation.accepted.append(accepted)
        if self._drafts is not None:
            self._drafts.seen(judged, accepted)

    def _text_stops(self, generation: Generation) -> bool:
        texts = generation.request.stop_text
        if not texts or self._decoder is None:
            return False
        # Every token but a control token is one byte at least; four more may complete a character cut at the front.
        tail = max(len(text.encode()) for text in texts) + 4
        shown = self._decoder(generation.tokens[-tail:])
        return any(text in shown for text in texts)
