"""What a graph was captured for: a frozen value, compared whole (G15)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Descriptor:
    """The shapes of one step of a program.

    Two descriptors that differ in any field are different graphs; nothing is packed, hashed down or
    defaulted when they are compared.

    Args:
        role: what the step does: ``decode``, ``prefill``, later ``draft``, ``verify``, ``ffn``.
        num_requests: requests in the step, padding included.
        query_len: tokens per request, padding included.
        context_capacity: tokens of context that the step's shapes can hold; 0 where it has none.
        variant: anything else that changes the program, such as ``greedy`` or ``sample``.
    """

    role: str
    num_requests: int
    query_len: int = 1
    context_capacity: int = 0
    variant: str = ""

    @property
    def num_tokens(self) -> int:
        """Rows of the step, padding included."""
        return self.num_requests * self.query_len

    def __str__(self) -> str:
        extra = f", context {self.context_capacity}" if self.context_capacity else ""
        return f"{self.role}({self.num_tokens} tokens, {self.num_requests} requests{extra}" + (
            f", {self.variant})" if self.variant else ")"
        )
