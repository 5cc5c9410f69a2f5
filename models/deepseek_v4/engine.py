"""Serves requests: admits, steps, retires. The decode loop itself lives on the device.

A step reads each slot's newest token and length from device memory and writes the next ones; with MTP it verifies
drafts and makes new ones, so how many tokens it gives is known to the device alone. The host sees them in a pinned
ring, ``ahead`` steps late, and decides who stays from what it saw: when it issues step s, it has read the steps up to
s - 1 - ``ahead``, always (G27). Until then a request that has ended is a row without effect. The host's decisions
depend on requests, tokens and agreed step costs alone, never on a clock or on what is ready, so the ranks of a divided
model, which have the same requests and get the same tokens, make the same steps.

A step is either the prompt chunk of one request or goes on with all that run: no graph holds both, and the stream keeps
their order, so a request that joins changes nothing for those in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from halma.hal.errors import RequestError
from halma.hal.graph.descriptor import Descriptor
from halma.models.deepseek_v4.engine_costs import measured_costs
from halma.models.deepseek_v4.engine_drafts import AdaptiveDrafts, StepCosts, check_drafts, drafts_of
from halma.models.deepseek_v4.engine_reading import EngineCounters, Flight
from halma.models.deepseek_v4.engine_requests import Decoder, Places, TokenCallback, check_request
from halma.models.deepseek_v4.engine_requests import Generation as Generation
from halma.models.deepseek_v4.engine_requests import Request as Request
from halma.models.deepseek_v4.runner import V4Runner

MOST_AHEAD = 4
"""Steps that the host may run ahead: with 8 drafts five steps give 45 tokens, and the ring holds 64."""


class Engine:
    """Runs many requests on one runner.

    Args:
        runner: prepared or not; an unprepared runner is prepared at the first step.
        ahead: steps that stay in flight while the host goes on, 1 to 4. More keep the device busy where the host is
            slow; a stop that the host alone sees ends a request that many steps late.
        drafts: how many tokens to draft: one of the runner's ``draft_lengths``, or ``"auto"`` for the one of them that
            promises the most tokens a second, see :class:`AdaptiveDrafts`. None: the most that the runner was made
            for, which without MTP is none.
        costs: for ``"auto"``; measured by :meth:`start` if they are not given.
        decoder: for requests with stop texts.
        on_token: called for every new token, in order, ``ahead`` steps after the device made it. What it raises comes
            out of :meth:`step`; no token is lost, and the calls that were due come with the next step.

    Raises:
        RequestError: no such ``ahead``, or drafts that the runner has no steps for.
    """

    def __init__(
        self,
        runner: V4Runner,
        *,
        ahead: int = 1,
        drafts: int | str | None = None,
        costs: StepCosts | None = None,
        decoder: Decoder | None = None,
        on_token: TokenCallback | None = None,
    ) -> None:
        if not 1 <= ahead <= MOST_AHEAD:
            raise RequestError(
                "the host cannot run so far ahead", asked=f"ahead={ahead}", do=f"ahead=1 to {MOST_AHEAD}"
            )
        self.runner = runner
        self.ahead = ahead
        self.counters = EngineCounters()
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self._decoder = decoder
        lengths = runner.options.draft_lengths
        drafts = max(lengths, default=None) if drafts is None else drafts
        if drafts is not None:
            check_drafts(drafts, lengths)
        self._drafts = drafts_of(drafts, costs)
        self._places = Places(runner)
        self._flight = Flight(runner, self.counters, on_token=on_token, decoder=decoder, drafts=self._drafts)
        self._next_id = 0
        self._batch: tuple[object, ...] = ()
        self._inputs = runner.inputs.read_by(runner.prefill_descriptor(1, 1, "greedy"))  # which reads all there are
        self._waited = self._input_waits()

    # -- requests -----------------------------------------------------------------------------------

    def submit(self, request: Request) -> Generation:
        """Queue a request; it starts when a slot and its pages are free.

        Raises:
            RequestError: it could never run: empty, out of vocabulary, longer than the context, or in need
                of more pages than there are.
        """
        check_request(request, self.runner.config.vocab_size, self.runner.plan, self._decoder)
        generation = Generation(self._next_id, request)
        self._next_id += 1
        self.waiting.append(generation)
        return generation

    def run(self, requests: Iterable[Request] = ()) -> list[Generation]:
        """Submit ``requests`` and step until all is done; the generations in order of submission."""
        generations = [self.submit(request) for request in requests]
        while self.busy:
            self.step()
        return generations

    def cancel(self, generation: Generation) -> None:
        """End a request early; its slot comes back once no step in flight uses it."""
        if generation in self.waiting:
            self.waiting.remove(generation)
        generation.finish = generation.finish or "cancelled"

    @property
    def busy(self) -> bool:
        """Whether anything waits, runs or is yet to be read."""
        return bool(self.waiting or self.running or self._flight.steps or self._flight.untold)

    def why_waiting(self) -> str:
        """Why the first waiting request does not run yet; empty when none waits."""
        return self._places.why_not(self.waiting[0].request) if self.waiting else ""

    # -- steps --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Prepare the runner if it is not, and measure step costs where the choice of drafts needs them.

        The first step does it otherwise. Ranks of a divided model do it together.
        """
        if not self.runner.workspace.sealed:
            self.runner.prepare()
        if isinstance(self._drafts, AdaptiveDrafts) and self._drafts.costs is None:
            self._drafts.costs = measured_costs(self.runner)

    def step(self) -> None:
        """One step of everything that runs, after admitting and prefilling what fits."""
        self.start()
        while self.waiting and not self.why_waiting():
            self._admit(self.waiting.popleft())
        active = [g for g in self.running if not g.done and g.issued < g.request.max_tokens]
        if active:
            self._go_on(active)
        self._read(keep=self.ahead if active else 0)

    def drain(self) -> None:
        """Wait for all steps in flight and read them."""
        self._read(keep=0)

    def _read(self, keep: int) -> None:
        self._flight.land(keep)
        self._flight.tell()
        self._retire()

    def _admit(self, generation: Generation) -> None:
        self._places.take(generation)
        self.running.append(generation)
        try:
            self._prefill(generation)
        except BaseException:
            # It holds a part of its prompt at most; decoding on would read what earlier requests left behind.
            generation.finish = "failed"
            self._release(generation)
            raise

    def _prefill(self, generation: Generation) -> None:
        prompt, chunk = generation.request.prompt, self.runner.options.chunk
        self._batch = ()
        while generation.fed < len(prompt):
            part = prompt[generation.fed : generation.fed + chunk]
            generation.fed += len(part)
            descriptor = self.runner.prefill_descriptor(len(part), generation.fed, _variant([generation]))
            tokens = torch.zeros(descriptor.num_tokens, dtype=torch.int64)
            tokens[: len(part)] = torch.tensor(part, dtype=torch.int64)
            after = prompt[generation.fed] if generation.fed < len(prompt) else -1
            self._fill([generation], [len(part)], tokens, [after])
            self._flight.launched(self._run(descriptor), [generation] if after < 0 else [])
            self.counters.prefill_steps += 1
            # Long prompts, and many at once, are many steps: the log holds the newest ones alone.
            self._flight.land(keep=self.ahead)
        generation.drafted = self.runner.options.mtp

    def _go_on(self, active: list[Generation]) -> None:
        drafts = None if self._drafts is None else self._drafts.choose(len(active))
        width = 1 if drafts is None else drafts + 1
        # The step feeds up to ``width`` tokens from the newest on; the last token of a request is never fed.
        context = max(min(g.reach - 1 + width, g.request.end - 1) for g in active)
        variant = _variant(active)
        if drafts is None:
            descriptor = self.runner.decode_descriptor(len(active), context, variant)
        else:
            descriptor = self.runner.verify_descriptor(len(active), drafts, context, variant)
        batch = (descriptor.role, width, *(g.id for g in active))
        if batch == self._batch and self.runner.inputs.held:
            self.runner.inputs.keep()
        else:
            self._fill(active, [width] * len(active))
            self._batch = batch
        self._flight.launched(self._run(descriptor), active, drafts)
        self.counters.decode_steps += 1
        self.counters.verify_steps += drafts is not None
        for generation in active:
            generation.drafted = drafts or 0

    def _run(self, descriptor: Descriptor) -> int:
        """Issue a step; its number among the runner's."""
        replays, number = self.runner.session.replays, self.runner.steps
        self.runner.step(descriptor)
        if self.runner.session.replays > replays:
            self.counters.replayed += 1
        else:
            self.counters.eager += 1
        return number

    def _fill(
        self,
        generations: Sequence[Generation],
        counts: Sequence[int],
        tokens: torch.Tensor | None = None,
        after: Sequence[int] | None = None,
    ) -> None:
        requests = [generation.request for generation in generations]
        self.runner.inputs.fill(
            [generation.slot for generation in generations],
            counts,
            tokens=tokens,
            after=after,
            temperature=[request.temperature for request in requests],
            top_p=[request.top_p for request in requests],
            seed=[request.seed for request in requests],
        )

    def _retire(self) -> None:
        carried = self._flight.carries()
        for generation in [g for g in self.running if g.done and g.id not in carried]:
            self._release(generation)

    def _release(self, generation: Generation) -> None:
        self.running.remove(generation)
        self._places.give_back(generation)
        self._batch = ()

    # -- reports ------------------------------------------------------------------------------------

    @property
    def host_waits(self) -> int:
        """Times that the host waited for memory that the device still read; running ahead as far as it may
        (``counters.back_pressure``) is not among them."""
        return self._input_waits() - self._waited

    def _input_waits(self) -> int:
        return sum(one.counters.waits for one in self._inputs)

    def drafting(self) -> dict[str, Any] | None:
        """How drafts were chosen and what became of them, for reports; None without MTP."""
        if self._drafts is None:
            return None
        lengths = list(self.runner.options.draft_lengths)
        return {"lengths": lengths, **self._drafts.as_json(), **self._flight.acceptance.as_json()}


def _variant(generations: Sequence[Generation]) -> str:
    return "sample" if any(g.request.temperature > 0 for g in generations) else "greedy"
