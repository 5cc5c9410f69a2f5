"""What the ranks of an exchange agree on before anything is allocated: geometry, way and launch numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from halma.hal.collectives.common_terms import refuse_other_terms
from halma.hal.collectives.exchange_contract import GivesExchange
from halma.hal.collectives.exchange_geometry import Geometry
from halma.hal.collectives.exchange_tuning import Key, Tuning, choose_tuning, key_of
from halma.hal.collectives.group import Group
from halma.hal.errors import CollectiveError


@dataclass(frozen=True)
class Terms:
    """The same on every rank.

    Attributes:
        why_vendor: why torch.distributed makes the calls; empty where ranks share memory.
    """

    geometry: Geometry
    key: Key
    tuning: Tuning
    why_vendor: str


def agreed(
    group: Group, make: Callable[[], Geometry], limit: int, table: Mapping[Key, Tuning], first_epoch: int
) -> Terms:
    """See :meth:`halma.hal.collectives.exchange.Exchange.open`; all ranks come, and all hear of one that cannot.

    Raises:
        CollectiveError: as there.
        RankError: a rank did not come.
    """
    failure: CollectiveError | None = None
    geometry: Geometry | None = None
    reason, arch = "", str(group.backend.device.properties().get("arch", ""))
    try:
        geometry = make()
        geometry.need_within(limit)
        reason = _why_vendor(group, geometry)
    except CollectiveError as error:
        failure = error
    answers = group.ranks.exchange("an exchange", (str(failure or ""), geometry, reason, arch))
    if failure is not None:
        raise failure
    for rank, (said, *_) in enumerate(answers):
        if said:
            raise CollectiveError(
                f"rank {rank} ({group.ranks.names[rank]}) cannot open the exchange",
                found=said.splitlines(),
                do="mend that rank's arguments; nothing was allocated or sent",
            )
    assert geometry is not None
    refuse_other_terms(
        "ranks open exchanges of different geometry",
        [dict(one.named()) for one in (answer[1] for answer in answers)],
        group.ranks.names,
        do="give every rank the same arguments; nothing was allocated or sent",
    )
    why = next((f"rank {rank}: {one[2]}" for rank, one in enumerate(answers) if one[2]), "")
    key = key_of(group.hosts, answers[0][3])
    tuning, said = Tuning(2), ""
    if not why:
        gives = group.backend.collectives
        blocks = gives.exchange_blocks(group.size) if isinstance(gives, GivesExchange) else 2
        try:
            tuning = choose_tuning(key, geometry, blocks, table)
        except CollectiveError as error:
            failure, said = error, str(error)
    tunings = group.ranks.exchange("an exchange's launch numbers", (said, tuning, first_epoch))
    if failure is not None:
        raise failure
    for rank, other in enumerate(tunings):
        if other != tunings[0]:
            raise CollectiveError(
                f"ranks open exchanges with other launch numbers: rank {rank} differs from rank 0",
                found=(f"rank 0: {tunings[0]}", f"rank {rank}: {other}"),
                do="give every rank the same table, on devices of one kind",
            )
    return Terms(geometry, key, tuning, why)


def _why_vendor(group: Group, geometry: Geometry) -> str:
    if group.why_no_channel:
        return group.why_no_channel
    gives = group.backend.collectives
    if not isinstance(gives, GivesExchange):
        return f"the backend {group.backend.name} has no exchange over shared memory"
    return gives.no_exchange(geometry) or ""
