"""What all ranks of an exchange or of roles must have in common: compared field by field, by name (F14), and the one
rule by which experts are split among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halma.hal.errors import CollectiveError


def split_experts(experts: int, parts: int, whose: str = "ranks") -> tuple[int, ...]:
    """Bounds of as even parts as there are: part p is bounds[p] .. bounds[p + 1], and the first ``experts % parts``
    have one more than the others.

    Args:
        whose: the parts are, in the message.

    Raises:
        CollectiveError: there are more parts than experts.
    """
    if parts > experts:
        raise CollectiveError(
            f"there are more {whose} than experts",
            asked=f"{parts} {whose}",
            found=f"the model has {experts} experts a layer",
            do=f"at most {experts} {whose}",
        )
    share, rest = divmod(experts, parts)
    return tuple(part * share + min(part, rest) for part in range(parts + 1))


def refuse_other_terms(what: str, terms: Sequence[Mapping[str, object]], names: Sequence[str], *, do: str) -> None:
    """Refuse terms, one mapping a rank, that are not all equal. Values are compared as they are shown.

    Args:
        what: the headline.
        names: of the ranks.

    Raises:
        CollectiveError: every field that differs, by name, with the first rank that differs from rank 0.
    """
    shown = [{name: repr(value) for name, value in one.items()} for one in terms]
    found: list[str] = []
    for name in dict.fromkeys(name for one in shown for name in one):
        values = [one.get(name, "not said") for one in shown]
        for rank, value in enumerate(values):
            if value != values[0]:
                found.append(f"{name}: rank 0 ({names[0]}) has {values[0]}, rank {rank} ({names[rank]}) has {value}")
                break
    if found:
        raise CollectiveError(what, asked=f"the same on {len(terms)} ranks", found=found, do=do)
