"""Serves requests: admits, steps, retires. The decode loop itself lives on the device.

A decode step reads each slot's newest token and length from device memory and writes the next; the host
sees tokens in a pinned ring, one step behind, and decides who stays from what it saw (so a request that
ends with ``eos`` computes one token too many, which nobody reads). Host decisions at step s use results up
to step s - 1, always (G27). They depend on requests and tokens alone, never on a clock or on what is ready, so the
ranks of a divided model, which have the same requests and get the same tokens, make the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from halma.hal.backend import Event
from halma.hal.errors import RequestError
from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.state import TOKEN_RING


@dataclass(frozen=True)
class Request:
    """What to generate.

    Args:
        prompt: token ids, at least one.
        max_tokens: most tokens to generate.
        temperature: 0 is greedy.
        top_p: nucleus; 1 keeps every token.
        seed: sampling with the same seed gives the same tokens at any batch size.
        stop: token ids that end the request; the stop token is the last one reported.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: frozenset[int] = frozenset()


@dataclass
class Generation:
    """A request in flight or done. ``finish``: ``length``, ``stop``, ``cancelled`` or ``failed`` (its prefill raised),
    and empty while it runs."""

    id: int
    request: Request
    tokens: list[int] = field(default_factory=list[int])
    finish: str = ""
    slot: int = 0
    pages: list[int] = field(default_factory=list[int])
    fed: int = 0
    issued: int = 0
    """Tokens that the device was told to generate; the host has seen ``len(tokens)`` of them."""

    @property
    def done(self) -> bool:
        """Whether all its tokens are known."""
        return bool(self.finish)


TokenCallback = Callable[[Generation, int], None]


@dataclass
class EngineCounters:
    """Steps by kind, and tokens committed."""

    decode_steps: int = 0
    prefill_steps: int = 0
    replayed: int = 0
    eager: int = 0
    tokens: int = 0


class Engine:
    """Runs many requests on one runner.

    Args:
        runner: prepared or not; an unprepared runner is prepared at the first step.
        on_token: called for every new token, in order, one step after the device made it. What it raises comes out
            of :meth:`step`; no token is lost, and the calls that were due come with the next step.
    """

    def __init__(self, runner: V4Runner, *, on_token: TokenCallback | None = None) -> None:
        self.runner = runner
        self.on_token = on_token
        self.counters = EngineCounters()
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self._free_slots = list(range(runner.plan.slots, 0, -1))
        self._free_pages = list(range(runner.plan.pages, 0, -1))
        self._behind: deque[tuple[list[Generation], Event]] = deque()
        self._untold: deque[tuple[Generation, int]] = deque()
        self._next_id = 0
        self._batch: tuple[object, ...] = ()

    # -- requests -----------------------------------------------------------------------------------

    def submit(self, request: Request) -> Generation:
        """Queue a request; it starts when a slot and its pages are free.

        Raises:
            RequestError: it could never run: empty, out of vocabulary, longer than the context, or in need
                of more pages than there are.
        """
        config, plan = self.runner.config, self.runner.plan
        if not request.prompt:
            raise RequestError("the prompt is empty", found="0 tokens", do="give at least one token (bos will do)")
        if request.max_tokens < 1:
            raise RequestError("nothing to generate", asked=f"max_tokens={request.max_tokens}", do="ask for 1 or more")
        if not (request.temperature >= 0 and 0 < request.top_p <= 1):
            raise RequestError(
                "sampling parameters are out of range",
                found=f"temperature={request.temperature}, top_p={request.top_p}",
                do="temperature >= 0 and 0 < top_p <= 1",
            )
        wrong = [token for token in request.prompt if not 0 <= token < config.vocab_size]
        if wrong:
            raise RequestError(
                "the prompt holds token ids that the model does not know",
                found=f"{wrong[:5]}; the vocabulary has {config.vocab_size}",
                do="tokenise with the model's own tokenizer",
            )
        total = len(request.prompt) + request.max_tokens
        if total > plan.max_context:
            raise RequestError(
                "the request is longer than the context",
                asked=f"{len(request.prompt)} prompt tokens + {request.max_tokens} to generate = {total}",
                found=f"this engine holds {plan.max_context} tokens a request",
                do=f"shorten the prompt, ask for at most {max(plan.max_context - len(request.prompt), 0)} tokens, "
                "or raise the context",
            )
        if plan.pages_for(total) > plan.pages:
            raise RequestError(
                "the request needs more pages than the engine has",
                asked=f"{plan.pages_for(total)} pages of {plan.page_tokens} tokens",
                found=f"{plan.pages} pages in all",
                do="raise the number of pages, or shorten the request",
            )
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

    @property
    def busy(self) -> bool:
        """Whether anything waits, runs or is yet to be read."""
        return bool(self.waiting or self.running or self._behind or self._untold)

    def why_waiting(self) -> str:
        """Why the first waiting request does not run yet; empty when none waits."""
        if not self.waiting:
            return ""
        if not self._free_slots:
            return f"all {self.runner.plan.slots} slots are taken"
        need = self._pages_needed(self.waiting[0])
        return f"{need} pages needed, {len(self._free_pages)} free" if need > len(self._free_pages) else ""

    # -- steps --------------------------------------------------------------------------------------

    def step(self) -> None:
        """One decode step of everything that runs, after admitting and prefilling what fits."""
        if not self.runner.workspace.sealed:
            self.runner.prepare()
        while self.waiting and not self.why_waiting():
            self._admit(self.waiting.popleft())
        active = [g for g in self.running if g.issued < g.request.max_tokens and not g.done]
        if active:
            self._decode(active)
        self._read_behind(keep=1 if active else 0)

    def _pages_needed(self, generation: Generation) -> int:
        return self.runner.plan.pages_for(len(generation.request.prompt) + generation.request.max_tokens)

    def _admit(self, generation: Generation) -> None:
        state = self.runner.model.state
        generation.slot = self._free_slots.pop()
        generation.pages = [self._free_pages.pop() for _ in range(self._pages_needed(generation))]
        # All pages of the request's lifetime are reserved now, so a running request never runs out (M9).
        table = torch.zeros(state.page_table.shape[1], dtype=torch.int64)
        table[: len(generation.pages)] = torch.tensor(generation.pages, dtype=torch.int64)
        state.page_table[generation.slot].copy_(table)
        state.lengths[generation.slot].zero_()
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
            self._fill([generation], [len(part)], tokens)
            self._run(descriptor)
            self.counters.prefill_steps += 1
        generation.issued = 1
        self._mark([generation])

    def _decode(self, active: list[Generation]) -> None:
        context = max(len(g.request.prompt) + g.issued for g in active)
        descriptor = self.runner.decode_descriptor(len(active), context, _variant(active))
        batch = (descriptor.num_requests, *(g.id for g in active))
        if batch == self._batch and self.runner.inputs.held:
            self.runner.inputs.keep()
        else:
            self._fill(active, [1] * len(active))
            self._batch = batch
        self._run(descriptor)
        for generation in active:
            generation.issued += 1
        self.counters.decode_steps += 1
        self._mark(active)

    def _run(self, descriptor: object) -> None:
        replays = self.runner.session.replays
        self.runner.step(descriptor)  # type: ignore[arg-type]
        if self.runner.session.replays > replays:
            self.counters.replayed += 1
        else:
            self.counters.eager += 1

    def _fill(
        self, generations: Sequence[Generation], counts: Sequence[int], tokens: torch.Tensor | None = None
    ) -> None:
        requests = [generation.request for generation in generations]
        self.runner.inputs.fill(
            [generation.slot for generation in generations],
            counts,
            tokens=tokens,
            temperature=[request.temperature for request in requests],
            top_p=[request.top_p for request in requests],
            seed=[request.seed for request in requests],
        )

    # -- one step behind ----------------------------------------------------------------------------

    def _mark(self, generations: Sequence[Generation]) -> None:
        event = self.runner.backend.device.new_event("step")
        self.runner.backend.device.current_stream().record(event)
        self._behind.append((list(generations), event))

    def _read_behind(self, keep: int) -> None:
        """Read the ring for all steps but the newest ``keep``, report tokens, retire what ended."""
        while len(self._behind) > keep:
            generations, event = self._behind.popleft()
            event.synchronize()
            self.runner.model.ranks.poll()
            ring = self.runner.ring
            for generation in generations:
                if generation.done:
                    continue  # it ended a step ago: this token is the one too many
                position = len(generation.request.prompt) + len(generation.tokens)
                self._commit(generation, int(ring[generation.slot, position % TOKEN_RING]))
            self._tell()
        self._tell()
        self._retire()

    def _commit(self, generation: Generation, token: int) -> None:
        generation.tokens.append(token)
        self.counters.tokens += 1
        if token in generation.request.stop:
            generation.finish = "stop"
        elif len(generation.tokens) >= generation.request.max_tokens:
            generation.finish = "length"
        self._untold.append((generation, token))

    def _tell(self) -> None:
        """Call back, once all tokens of a step are committed: what a callback raises must not lose the others'."""
        while self._untold:
            generation, token = self._untold.popleft()
            if self.on_token is not None:
                self.on_token(generation, token)

    def _retire(self) -> None:
        in_flight = {g.id for generations, _ in self._behind for g in generations}
        for generation in [g for g in self.running if g.done and g.id not in in_flight]:
            self._release(generation)

    def _release(self, generation: Generation) -> None:
        self.running.remove(generation)
        self._free_slots.append(generation.slot)
        self._free_pages.extend(reversed(generation.pages))
        self.runner.model.state.page_table[generation.slot].zero_()
        self._batch = ()

    def cancel(self, generation: Generation) -> None:
        """End a request early; its slot comes back once no step in flight uses it."""
        if generation in self.waiting:
            self.waiting.remove(generation)
        generation.finish = generation.finish or "cancelled"


def _variant(generations: Sequence[Generation]) -> str:
    return "sample" if any(g.request.temperature > 0 for g in generations) else "greedy"
