"""Requests: what may be asked, and the slots and pages that those in flight hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from halma.hal.errors import RequestError
from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.state import StatePlan


@dataclass(frozen=True)
class Request:
    """What to generate.

    Args:
        prompt: token ids, at least one.
        max_tokens: most tokens to generate.
        temperature: 0 is greedy, whatever ``top_p`` is.
        top_p: nucleus; 1 keeps every token.
        seed: sampling with the same seed gives the same tokens at any batch size.
        stop: token ids that end the request; the stop token is the last one reported.
        stop_text: texts that end the request where they first appear in what it generates; the token that completes
            one is the last reported. The engine must have been given the decoder.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    stop_text: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """The position one behind its last possible token."""
        return len(self.prompt) + self.max_tokens


@dataclass
class Generation:
    """A request in flight or done.

    ``finish``: ``length``, ``stop``, ``cancelled`` or ``failed`` (its prefill raised), and empty while it runs.
    """

    id: int
    request: Request
    tokens: list[int] = field(default_factory=list[int])
    finish: str = ""
    slot: int = 0
    pages: list[int] = field(default_factory=list[int])
    fed: int = 0
    """Prompt tokens that the device was given."""
    flying: int = 0
    """Steps in flight that carry it: each gives it a token at least, unless it has ended on the device."""
    flying_most: int = 0
    """The most tokens that those steps may give it."""
    drafted: int = 0
    """Drafts that its newest step leaves for the next one."""
    accepted: list[int] = field(default_factory=list[int])
    """Drafts accepted in each of its verify steps that were read."""

    @property
    def done(self) -> bool:
        """Whether all its tokens are known."""
        return bool(self.finish)

    @property
    def issued(self) -> int:
        """Tokens that it has for certain once all steps in flight are done, if no stop token ends it before."""
        return len(self.tokens) + self.flying

    @property
    def reach(self) -> int:
        """The most tokens that it may hold once all steps in flight are done, prompt included."""
        return min(len(self.request.prompt) + len(self.tokens) + self.flying_most, self.request.end)


TokenCallback = Callable[[Generation, int], None]
Decoder = Callable[[list[int]], str]
"""Token ids -> text; what is no whole character yet may come out as anything."""


def check_request(request: Request, vocabulary: int, plan: StatePlan, decoder: Decoder | None) -> None:
    """Whether the request could run on an engine that serves nobody else.

    Raises:
        RequestError: it is empty, out of vocabulary or of range, longer than the context, in need of more pages than
            there are, or has stop texts where nobody can decode.
    """
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
    wrong = [token for token in request.prompt if not 0 <= token < vocabulary]
    if wrong:
        raise RequestError(
            "the prompt holds token ids that the model does not know",
            found=f"{wrong[:5]}; the vocabulary has {vocabulary}",
            do="tokenise with the model's own tokenizer",
        )
    if "" in request.stop_text or (request.stop_text and decoder is None):
        raise RequestError(
            "a stop text cannot be looked for",
            asked=f"stop_text={request.stop_text!r}",
            found="an empty text" if "" in request.stop_text else "the engine was given no decoder",
            do="texts of one character or more, and Engine(decoder=...)",
        )
    if request.end > plan.max_context:
        left = max(plan.max_context - len(request.prompt), 0)
        raise RequestError(
            "the request is longer than the context",
            asked=f"{len(request.prompt)} prompt tokens + {request.max_tokens} to generate = {request.end}",
            found=f"this engine holds {plan.max_context} tokens a request",
            do=f"shorten the prompt, ask for at most {left} tokens, or raise the context",
        )
    if plan.pages_for(request.end) > plan.pages:
        raise RequestError(
            "the request needs more pages than the engine has",
            asked=f"{plan.pages_for(request.end)} pages of {plan.page_tokens} tokens",
            found=f"{plan.pages} pages in all",
            do="raise the number of pages, or shorten the request",
        )


class Places:
    """Slots and pages of one runner: who has them, and what the device knows of it.

    What the device is told goes through pinned memory of the slot's own, in the order of the stream: the host waits
    for nothing. A slot's memory is written anew only once no step in flight uses the slot, so its copies are done.
    """

    def __init__(self, runner: V4Runner) -> None:
        self._plan = runner.plan
        self._state = runner.model.state
        self._slots = list(range(runner.plan.slots, 0, -1))
        self._pages = list(range(runner.plan.pages, 0, -1))
        pinned = runner.backend.memory.pinned
        self._tables = pinned(self._state.page_table.shape, torch.int64)
        self._stops = pinned(self._state.stops.shape, torch.int64)

    @property
    def free(self) -> tuple[int, int]:
        """Slots and pages that nobody has."""
        return len(self._slots), len(self._pages)

    def why_not(self, request: Request) -> str:
        """Why the request cannot be given a place now; empty if it can."""
        if not self._slots:
            return f"all {self._plan.slots} slots are taken"
        need = self._plan.pages_for(request.end)
        return f"{need} pages needed, {len(self._pages)} free" if need > len(self._pages) else ""

    def take(self, generation: Generation) -> None:
        """Give it a slot and all pages of its lifetime, so that a running request never runs out (M9)."""
        state, request = self._state, generation.request
        slot = generation.slot = self._slots.pop()
        generation.pages = [self._pages.pop() for _ in range(self._plan.pages_for(request.end))]
        table, stops = self._tables[slot], self._stops[slot]
        table.zero_()
        table[: len(generation.pages)] = torch.tensor(generation.pages, dtype=torch.int64)
        stops.fill_(-1)
        known = sorted(request.stop)[: len(stops)]
        stops[: len(known)] = torch.tensor(known, dtype=torch.int64)
        state.page_table[slot].copy_(table, non_blocking=True)
        state.stops[slot].copy_(stops, non_blocking=True)
        state.lengths[slot].zero_()
        state.end[slot].fill_(request.end)

    def give_back(self, generation: Generation) -> None:
        """Take slot and pages back; no step in flight uses them."""
        self._slots.append(generation.slot)
        self._pages.extend(reversed(generation.pages))
        self._state.page_table[generation.slot].zero_()
        self._state.end[generation.slot].zero_()
