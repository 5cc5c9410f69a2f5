"""Boards: host memory of one rank that all ranks write to. Headers of items, how far ranks are, what becomes of them.

Hosts read a board without a call of the device. A rank that has nothing more to ask says that it is done; one that
fails says why; one that ends without a word is seen by its process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from halma.hal.arena.consensus import together
from halma.hal.arena.sizes import up
from halma.hal.collectives.contract import Ranks
from halma.hal.collectives.ring_contract import RingItem
from halma.hal.collectives.ring_plan import HEADER_BYTES, HEADER_WORDS
from halma.hal.errors import RankError
from halma.hal.process import ProcessName
from halma.hal.shared_file import SharedFile

SAYING_BYTES: Final = 2048
"""Of one rank on a board: a state, the length of a text, a number, the text."""
TEXT: Final = 24
HERE: Final = 0
DONE: Final = 1
LEFT: Final = 2
LOOK_SECONDS: Final = 0.2
"""Between two looks at whether peers' processes are there; a look takes about 20 us a peer."""
NAP: Final = 0.001
_MOST_VALUE: Final = 0xFFFFFFFF
"""Of a header's word once its item's number is taken out: another number leaves a bit above."""


class Board:
    """One rank's board as it is mapped here.

    Args:
        ranks: that write to it.
        depth: slots of a ring, where it has headers.
    """

    def __init__(self, file: SharedFile, ranks: int, depth: int = 1) -> None:
        self.file = file
        self._depth = depth
        view = memoryview(file.mapping)
        self._bytes = view
        self._words = view.cast("Q")
        self._first = Board.headers(ranks) // 8

    @staticmethod
    def make(ranks: int, attention: int = 0, depth: int = 1) -> Board:
        """A board of this rank: whole pages, with headers of so many attention ranks' rings."""
        return Board(SharedFile.make(up(Board.headers(ranks) + attention * depth * HEADER_BYTES, 4096)), ranks, depth)

    @staticmethod
    def headers(ranks: int) -> int:
        """Where headers begin."""
        return up(SAYING_BYTES * ranks, 4096)

    def header(self, attention: int, sequence: int) -> RingItem | None:
        """The header of item ``sequence`` of an attention rank, once it is all there; 0.2 us where it is
        not, 1 us where it is."""
        at = self._first + (attention * self._depth + sequence % self._depth) * (HEADER_BYTES // 8)
        if self._words[at] >> 32 != sequence:
            return None
        number = sequence << 32
        values = [word ^ number for word in self._words[at : at + len(HEADER_WORDS)].tolist()]
        return None if max(values) > _MOST_VALUE else RingItem(attention, sequence, *values)

    def say(self, rank: int, state: int, text: str = "") -> None:
        """What ``rank``, this one, has to tell the board's owner."""
        at = rank * SAYING_BYTES
        told = text.encode()[: SAYING_BYTES - TEXT]
        self._bytes[at + TEXT : at + TEXT + len(told)] = told
        self._words[at // 8 + 1] = len(told)
        self._words[at // 8] = state  # last

    def heard(self, rank: int) -> int:
        """The state of ``rank``."""
        return self._words[rank * SAYING_BYTES // 8]

    def text(self, rank: int) -> str:
        """What ``rank`` said beside it."""
        at = rank * SAYING_BYTES
        return bytes(self._bytes[at + TEXT : at + TEXT + self._words[at // 8 + 1]]).decode(errors="replace")

    def count(self, rank: int, number: int) -> None:
        """How far ``rank``, this one, is."""
        self._words[rank * SAYING_BYTES // 8 + 2] = number

    def counted(self, rank: int) -> int:
        """How far ``rank`` is."""
        return self._words[rank * SAYING_BYTES // 8 + 2]

    def close(self) -> None:
        """Give up the mapping."""
        self._words.release()
        self._bytes.release()
        self.file.close()


class Peers:
    """The other ranks as this one's host sees them.

    Args:
        boards: by rank; this rank's own is what peers write to.
        processes: by rank.
        titles: how a rank is called in messages.
    """

    def __init__(
        self, ranks: Ranks, boards: Sequence[Board], processes: Sequence[ProcessName], titles: Sequence[str]
    ) -> None:
        self._rank = ranks.rank
        self._boards = boards
        self._own = boards[ranks.rank]
        self._titles = titles
        self._others = [rank for rank in range(ranks.size) if rank != ranks.rank]
        # In another process namespace a peer cannot be seen: then only the bound of a wait tells.
        self._watched = {rank: processes[rank] for rank in self._others if processes[rank].seen()}
        self._looked = 0.0
        self._said = False

    def check(self) -> None:
        """Look for peers that left or ended; waits for nothing.

        Raises:
            RankError: there is one; named, with its reason where it gave one.
        """
        self.check_left()
        now = time.monotonic()
        if now - self._looked > LOOK_SECONDS:
            self._looked = now
            for rank in self._watched:
                if self.gone(rank):
                    raise self.ended(rank)

    def check_left(self) -> None:
        """Look for peers that left alone: a read of host memory.

        Raises:
            RankError: there is one.
        """
        for rank in self._others:
            if self._own.heard(rank) == LEFT:
                raise RankError(
                    f"{self._titles[rank]} left",
                    asked=f"its part of the exchange between roles; this is {self._titles[self._rank]}",
                    found=self._own.text(rank).splitlines() or "it gave no reason",
                    do="mend that rank's error, and start all ranks again",
                )

    def gone(self, rank: int) -> bool:
        """Whether a peer's process ended before it was done."""
        watched = self._watched.get(rank)
        return watched is not None and not watched.seen() and self._own.heard(rank) == HERE

    def ended(self, rank: int) -> RankError:
        """The error of a peer whose process ended."""
        return RankError(
            f"{self._titles[rank]} ended without a word",
            asked=f"its part of the exchange between roles; this is {self._titles[self._rank]}",
            found=f"its process {self._watched[rank].pid} is gone" if rank in self._watched else "its process is gone",
            do="look at that rank's own output; start all ranks again",
        )

    def done(self, rank: int) -> bool:
        """Whether a peer asks nothing more."""
        return self._own.heard(rank) == DONE

    def say_done(self) -> None:
        """This rank asks nothing more."""
        self._say(DONE, "")

    def leave(self, reason: str) -> None:
        """This rank fails. Waits for nobody, and raises nothing (G26); what was said first stays said."""
        self._say(LEFT, reason)

    def _say(self, state: int, text: str) -> None:
        if not self._said:
            self._said = True
            for rank in self._others:
                self._boards[rank].say(self._rank, state, text)

    def count(self, number: int) -> None:
        """How far this rank is, for all to see."""
        for rank in self._others:
            self._boards[rank].count(self._rank, number)

    @property
    def furthest(self) -> int:
        """How far the peer is that is furthest."""
        return max((self._own.counted(rank) for rank in self._others), default=0)

    @property
    def all_done(self) -> bool:
        """Whether no peer asks anything more."""
        return all(self.done(rank) for rank in self._others)

    def wait_done(self) -> None:
        """Until every peer is done. No bound: some have more to do than others, and that they live is looked at.

        Raises:
            RankError: one left or ended.
        """
        while not self.all_done:
            self.check()
            time.sleep(NAP)


def open_boards(ranks: Ranks, attention: int = 0, depth: int = 1) -> tuple[list[Board], list[ProcessName]]:
    """Every rank's board, by rank, and the processes; all ranks come.

    Raises:
        ArenaError: a rank could make or map none; on every rank.
        RankError: a rank did not come.
    """
    own: list[Board] = []

    def make() -> tuple[bytes, ProcessName]:
        own.append(Board.make(ranks.size, attention, depth))
        return own[0].file.handle, ProcessName.own()

    made = together(ranks, "the ranks' boards", make)
    boards = [None if rank == ranks.rank else handle for rank, (handle, _) in enumerate(made)]

    def mapped() -> list[Board]:
        return [
            own[0] if handle is None else Board(SharedFile.open(handle, "the ranks' boards"), ranks.size, depth)
            for handle in boards
        ]

    held: list[Board] = []
    together(ranks, "the ranks' boards, mapped", lambda: held.extend(mapped()))
    return held, [process for _, process in made]
