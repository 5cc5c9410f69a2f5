"""Requests stepped by hand: what an engine does, without its schedule. For golden cases, tests and benchmarks.

All requests are admitted at once, in slots 1, 2, ...; the host looks at every step's tokens before the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.state import LOG_STEPS, MAX_STOPS, TOKEN_RING


@dataclass
class Text:
    """A request: its prompt, the most tokens of its answer, how they are drawn, and what the device made so far.

    Args:
        stop: at most ``MAX_STOPS`` tokens that end it.
        tokens: the answer.
        accepted: of each step that verified, how many drafts it accepted.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop: Sequence[int] = ()
    tokens: list[int] = field(default_factory=list[int])
    accepted: list[int] = field(default_factory=list[int])

    @property
    def done(self) -> bool:
        """Whether the device makes no more tokens of it."""
        return len(self.tokens) >= self.max_tokens or bool(self.tokens and self.tokens[-1] in self.stop)


class Stepper:
    """Texts on a runner that is prepared. Whatever it held before is given up.

    Args:
        runner: holds at least as many requests as there are texts.
        texts: their slots are 1, 2, ... in this order.
    """

    def __init__(self, runner: V4Runner, texts: Sequence[Text]) -> None:
        self.runner, self.texts = runner, list(texts)
        sampled = any(text.temperature > 0 for text in texts)
        self.variant = "sample" if sampled else "greedy"
        occupy(runner, len(texts))
        state = runner.model.state
        for slot, text in enumerate(texts, start=1):
            state.end[slot] = len(text.prompt) + text.max_tokens
            stops = [*text.stop, *[-1] * (MAX_STOPS - len(text.stop))]
            state.stops[slot].copy_(torch.tensor(stops, dtype=torch.int64))

    def run(self, drafts: int) -> list[Text]:
        """Feed the prompts, then step until all is done; with a runner without MTP, ``drafts`` is 0."""
        self.prefill()
        for _ in self.unfinished():
            self.step(drafts)
        return self.texts

    def unfinished(self) -> Iterator[None]:
        """Once for every step that is still needed; the caller makes it.

        Raises:
            RuntimeError: more steps than tokens: the device makes none.
        """
        for _ in range(sum(text.max_tokens for text in self.texts)):
            if all(text.done for text in self.texts):
                return
            yield
        if not all(text.done for text in self.texts):
            raise RuntimeError("the steps make no tokens: " + ", ".join(str(len(text.tokens)) for text in self.texts))

    def prefill(self) -> None:
        """Feed every prompt, in chunks, one request after another."""
        runner = self.runner
        for slot, text in enumerate(self.texts, start=1):
            fed = 0
            while fed < len(text.prompt):
                part = list(text.prompt[fed : fed + runner.options.chunk])
                fed += len(part)
                shape = runner.prefill_descriptor(len(part), fed, self.variant)
                part_and_padding = part + [0] * (shape.query_len - len(part))
                after = text.prompt[fed] if fed < len(text.prompt) else -1
                self._fill([slot], [len(part)], tokens=part_and_padding, after=[after])
                runner.step(shape)
                self._read([slot])

    def step(self, drafts: int, *, most: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of all texts that are not done: it verifies ``drafts`` tokens of each, or decodes without MTP.

        Args:
            most: tokens that a request may feed; 1 turns every draft down. All by default.

        Returns what the runner's step returned.
        """
        runner = self.runner
        slots = [slot for slot, text in enumerate(self.texts, start=1) if not text.done]
        texts = [self.texts[slot - 1] for slot in slots]
        context = max(
            min(len(text.prompt) + len(text.tokens) + drafts, len(text.prompt) + text.max_tokens) for text in texts
        )
        if runner.options.mtp:
            shape = runner.verify_descriptor(len(slots), drafts, context, self.variant)
        else:
            shape = runner.decode_descriptor(len(slots), context, self.variant)
        self._fill(slots, [drafts + 1 if most is None else most] * len(slots))
        found = runner.step(shape)
        for text, count in zip(texts, self._read(slots), strict=True):
            text.accepted.append(count - 1)
        return found

    def _fill(self, slots: Sequence[int], counts: Sequence[int], **tokens: Sequence[int]) -> None:
        texts = [self.texts[slot - 1] for slot in slots]
        self.runner.inputs.fill(
            slots,
            counts,
            temperature=[text.temperature for text in texts],
            top_p=[text.top_p for text in texts],
            seed=[text.seed for text in texts],
            **tokens,
        )

    def _read(self, slots: Sequence[int]) -> list[int]:
        """Take the newest step's tokens from the ring, by the log; returns how many each slot got."""
        runner = self.runner
        runner.backend.device.synchronize()
        counts: list[int] = runner.log[(runner.steps - 1) % LOG_STEPS, : len(slots)].tolist()
        for slot, count in zip(slots, counts, strict=True):
            text = self.texts[slot - 1]
            first = len(text.prompt) + len(text.tokens)
            text.tokens += [int(runner.ring[slot, place % TOKEN_RING]) for place in range(first, first + count)]
        return counts


def occupy(runner: V4Runner, requests: int) -> None:
    """Give each of the slots 1.. its pages, and forget what it held."""
    state, width = runner.model.state, runner.plan.pages_per_slot
    state.page_table[1 : requests + 1].copy_(torch.arange(1, requests * width + 1).view(requests, width))
    state.lengths.zero_()
    state.end.fill_(runner.plan.max_context)
    state.stops.fill_(-1)
    if state.draft is not None:
        state.draft.tokens.fill_(-1)
