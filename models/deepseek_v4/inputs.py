"""What the host tells a step: persistent inputs at fixed addresses, and the views of them that a program takes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from halma.hal.backend import Backend
from halma.hal.errors import RequestError
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.inputs import InputSet, PersistentInput, persistent_input
from halma.models.deepseek_v4.program import StepInputs


class V4Inputs:
    """The inputs of one runner, sized by its largest step. Every step fills them, or keeps them, before it runs.

    Padding rows belong to slot 0, the null slot, with no tokens. While a step is warmed up and captured every row
    feeds one token to the null slot: work that a real step could have, and harmless.

    Args:
        backend: whose device they lie on.
        requests: most requests in a step.
        tokens: most tokens in a step.
    """

    def __init__(self, backend: Backend, requests: int, tokens: int) -> None:
        def integers(name: str, null: int = 0) -> PersistentInput:
            return persistent_input(backend, name, (requests,), torch.int64, pad=0, null=null, per="request")

        def floats(name: str, pad: float) -> PersistentInput:
            return persistent_input(backend, name, (requests,), torch.float32, pad=pad, per="request")

        self.tokens = persistent_input(backend, "tokens", (tokens,), torch.int64, pad=0)
        self.slot = integers("slot")
        self.count = integers("count", null=1)
        self.temperature, self.top_p = floats("temperature", 0.0), floats("top_p", 1.0)
        self.seed = integers("seed")
        self.after = persistent_input(backend, "after", (requests,), torch.int64, pad=-1, per="request")
        per_request = (self.slot, self.count, self.temperature, self.top_p, self.seed)
        generating = InputSet(per_request)
        prefill = InputSet((self.tokens, self.after, *per_request))
        self._sets = {"decode": generating, "verify": generating, "prefill": prefill}

    def read_by(self, descriptor: Descriptor) -> InputSet:
        """The inputs that steps of the descriptor's role read: but for prefill, tokens come from the device."""
        return self._sets[descriptor.role]

    def views(self, descriptor: Descriptor) -> StepInputs:
        """What the program of a descriptor takes: prefixes of the persistent buffers."""
        requests, tokens = descriptor.num_requests, descriptor.num_tokens
        return StepInputs(
            self.tokens.prefix(tokens).view(requests, descriptor.query_len),
            self.slot.prefix(requests),
            self.count.prefix(requests),
            self.temperature.prefix(requests),
            self.top_p.prefix(requests),
            self.seed.prefix(requests),
            self.after.prefix(requests),
        )

    def fill(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        *,
        tokens: Sequence[int] | torch.Tensor | None = None,
        after: Sequence[int] | None = None,
        temperature: Sequence[float] | None = None,
        top_p: Sequence[float] | None = None,
        seed: Sequence[int] | None = None,
    ) -> None:
        """This step's rows, one a request; the rest becomes padding.

        Args:
            slots, counts: the request's slot and its real tokens in this step; for a step that verifies the most that
                it may have, the newest token among them.
            tokens: request-major, ``query_len`` a request, for steps that read them.
            after: beside ``tokens``: the token of the prompt that follows this piece of it, -1 behind the last piece.
            temperature, top_p, seed: greedy where they are left out.

        Raises:
            RequestError: their numbers differ; nothing was taken then.
        """
        rows = len(slots)
        given = {"counts": counts, "after": after, "temperature": temperature, "top_p": top_p, "seed": seed}
        wrong = [f"{name} has {len(one)}" for name, one in given.items() if one is not None and len(one) != rows]
        if tokens is not None and (len(tokens) % rows if rows else len(tokens)):
            wrong.append(f"tokens has {len(tokens)}")
        if wrong:
            raise RequestError(
                "the inputs of a step are of unequal number",
                asked=f"{rows} requests, by their slots",
                found=wrong,
                do="give one of each a request, and as many tokens to each",
            )
        self.slot.refresh(torch.tensor(slots, dtype=torch.int64))
        self.count.refresh(torch.tensor(counts, dtype=torch.int64))
        self.temperature.refresh(torch.tensor(temperature or [0.0] * rows, dtype=torch.float32))
        self.top_p.refresh(torch.tensor(top_p or [1.0] * rows, dtype=torch.float32))
        self.seed.refresh(torch.tensor(seed or [0] * rows, dtype=torch.int64))
        if tokens is not None:
            self.tokens.refresh(torch.as_tensor(tokens, dtype=torch.int64).reshape(-1))
            self.after.refresh(torch.tensor([-1] * rows if after is None else after, dtype=torch.int64))

    @property
    def held(self) -> bool:
        """Whether they hold the rows of a step, which :meth:`keep` may use again; a capture leaves work of its own."""
        return all(one.rows is not None for one in self._sets["decode"])

    def keep(self) -> None:
        """A step that decodes or verifies the same requests as the last one."""
        for one in self._sets["decode"]:
            one.keep()
