"""M3: a rejected draft leaves no trace in anything that a later step may read.

Of a request with L tokens fed, a later step reads, and nothing else:

* its length, newest token, end and stop tokens;
* of every window, the module's too: the rows of the last ``sliding_window - 1`` positions below L;
* the compressed rows and index keys of the blocks that are complete: numbers below L // ratio;
* the partial state of the tokens behind those blocks, and where blocks overlap of the last complete one.

The first half of the tests compares all of that byte by byte with a run that drafts nothing; the second poisons
everything else and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from halma.models.deepseek_v4.runner import V4Runner
from halma.models.deepseek_v4.state import RowFormats, StatePlan, build_state
from halma.models.deepseek_v4.stepper import Stepper, Text
from halma.models.deepseek_v4.synthetic import small_config
from halma.ops.row_store import PLAIN, RowStore
from tests.cpu.model.mtp import RANDOM, forced, plain, runner, texts
from tests.cpu.model.small import poison

PROMPTS, MORE = (3, 37, 18), 6
DRAFTS = 4
PATTERNS: dict[str, Callable[[int, int], bool]] = {
    "reject all": lambda number, place: False,
    "accept all": lambda number, place: True,
    "at random": lambda number, place: (place * 7 + number * 3) % 5 > 1,
}

Rows = Iterator[tuple[str, torch.Tensor, list[int]]]


def rows_of(store: RowStore, name: str, places: list[tuple[int, int]]) -> Rows:
    """Rows (page, row) of a store, as tables of rows with the numbers of those rows."""
    yield name, store.rows, [page * store.row_pitch + row for page, row in places]
    if store.format != PLAIN:
        yield f"{name} scales", store.scales, [page * store.scale_pitch + row for page, row in places]


def meaningful(served: V4Runner) -> Rows:
    """Every table of rows in the state, and the rows that a later step may read."""
    state, config = served.model.state, served.config
    assert state.draft is not None
    slots = range(1, len(PROMPTS) + 1)
    lengths = {slot: int(state.lengths[slot]) for slot in slots}
    layers = [
        (f"layer {number}", layer, kind)
        for number, (layer, kind) in enumerate(zip(state.layers, config.layers, strict=True))
    ]
    layers.append(("module", state.draft.layer, config.mtp_layers[0]))
    for name, layer, kind in layers:
        near = [
            (slot, place % layer.window.page_rows)
            for slot in slots
            for place in range(max(0, lengths[slot] - config.sliding_window + 1), lengths[slot])
        ]
        yield from rows_of(layer.window, f"{name} window", near)
        for what, store in (("compressed", layer.compressed), ("index", layer.index)):
            if store is not None:
                blocks = [(slot, block) for slot in slots for block in range(lengths[slot] // kind.ratio)]
                places = [
                    (int(state.page_table[slot, block // store.page_rows]), block % store.page_rows)
                    for slot, block in blocks
                ]
                yield from rows_of(store, f"{name} {what}", places)
        for what, partial in (("compressor", layer.compressor), ("index compressor", layer.index_compressor)):
            if partial is not None:
                kept = [
                    slot * partial.ring + place % partial.ring
                    for slot in slots
                    for place in range(max(0, (lengths[slot] // kind.ratio - kind.overlap) * kind.ratio), lengths[slot])
                ]
                for part, table in (("values", partial.values), ("gates", partial.gates)):
                    yield f"{name} {what} {part}", table.flatten(0, 1), kept
    for what in ("lengths", "last_token", "end", "stops"):
        yield what, getattr(state, what), list(slots)


def snapshot(served: V4Runner) -> dict[str, torch.Tensor]:
    return {name: table[numbers].clone() for name, table, numbers in meaningful(served)}


def poison_the_rest(served: V4Runner) -> int:
    """Everything that is not meaningful becomes the worst there is; returns how many rows that were."""
    tables = [one for one in meaningful(served) if one[0] not in ("lengths", "last_token", "end", "stops")]
    kept = [table[numbers].clone() for _, table, numbers in tables]
    for _, table, _ in tables:  # a packed page is two tables over one memory: all is poisoned before any is restored
        if table.dtype == torch.uint8:
            table.fill_(255)  # the NaN of e4m3 and of e8m0
        else:
            poison(table)
    for (_, table, numbers), rows in zip(tables, kept, strict=True):
        table[numbers] = rows
    return sum(len(table) - len(numbers) for _, table, numbers in tables)


def generate(arithmetic: str, count: int, drafts: int, pattern: str = "") -> tuple[Stepper, V4Runner]:
    """``count`` tokens of each prompt, and the wreck of rejected drafts behind the last of them."""
    served = runner(RANDOM, arithmetic, max_requests=3, mtp=DRAFTS, mtp_lengths=(0, DRAFTS), graph=False)
    for store in (served.model.state.draft, *served.model.state.layers):
        _clear(store)
    given = [Text(text.prompt, count + MORE) for text in texts(RANDOM, PROMPTS, 1)]
    expected = [plain(RANDOM, text, arithmetic) for text in given]
    stepper = Stepper(served, given)
    for text in given:
        text.max_tokens = count  # for the host: on the device there is room for more, so every step has all its drafts
    if drafts:
        right = PATTERNS[pattern]
        proposed = forced(
            expected, served.config.vocab_size, lambda number, place: place < count - 1 and right(number, place)
        )
    stepper.prefill()
    state = served.model.state
    assert state.draft is not None
    for _ in stepper.unfinished():
        if drafts:
            for number, text in enumerate(given):
                wanted = proposed(number, len(text.tokens))[:drafts]
                state.draft.tokens[number + 1] = torch.tensor(wanted)
        stepper.step(drafts)
    assert [text.tokens for text in given] == [tokens[:count] for tokens in expected]
    return stepper, served


def _clear(part: object) -> None:
    """Fresh stores, so that what one run left is not taken for what the next one wrote."""
    for value in vars(part).values():
        if isinstance(value, RowStore):
            value.data.zero_()
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            value.zero_()
        elif hasattr(value, "__dataclass_fields__"):
            _clear(value)


@pytest.mark.invariant("M3")
@pytest.mark.parametrize(
    ("arithmetic", "count", "pattern"),
    [
        ("exact", 14, "reject all"),
        ("shipping", 13, "accept all"),
        ("exact", 15, "at random"),
        ("exact", 14, "accept all"),
    ],
)
def test_no_meaningful_byte_differs_from_a_run_without_drafts(arithmetic, count, pattern):
    without = snapshot(generate(arithmetic, count, 0)[1])
    stepper, served = generate(arithmetic, count, DRAFTS, pattern)
    found = snapshot(served)
    assert found.keys() == without.keys() and len(found) > 20
    other = [name for name in found if not torch.equal(found[name].view(torch.uint8), without[name].view(torch.uint8))]
    assert not other, other
    assert all(text.accepted[-1] < DRAFTS for text in stepper.texts), "every text ends in a rejected draft"


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arithmetic", ["exact", "shipping"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("count", [9, 10, 12, 13, 14, 15, 17, 18])  # at 11 and 16 the last draft would be right
def test_no_meaningful_byte_differs_at_any_length(arithmetic, count, pattern):
    test_no_meaningful_byte_differs_from_a_run_without_drafts(arithmetic, count, pattern)


@pytest.mark.invariant("M3")
@pytest.mark.parametrize(("arithmetic", "count"), [("exact", 14), ("shipping", 11)])
def test_what_is_not_meaningful_is_read_by_nobody(arithmetic, count):
    followed: list[list[list[int]]] = []
    for poisoned in (False, True):
        stepper, served = generate(arithmetic, count, DRAFTS, "reject all")
        if poisoned:
            assert poison_the_rest(served) > 500
        state = served.model.state
        assert state.draft is not None
        for text in stepper.texts:
            text.max_tokens = count + MORE
        drafted = [state.draft.tokens[1:].tolist()]
        for _ in stepper.unfinished():
            stepper.step(DRAFTS)
            drafted.append(state.draft.tokens[1:].tolist())
        assert [text.tokens for text in stepper.texts] == [plain(RANDOM, text, arithmetic) for text in stepper.texts]
        followed.append([token for step in drafted for token in step])
    assert followed[0] == followed[1], "the drafts are the same too"


@pytest.mark.invariant("M3", control=True)
def test_another_token_is_seen_in_the_state():
    one, other = (snapshot(generate("exact", count, 0)[1]) for count in (14, 15))
    assert not torch.equal(one["lengths"], other["lengths"])
    assert one["layer 0 window"].shape != other["layer 0 window"].shape or not torch.equal(
        one["layer 0 window"], other["layer 0 window"]
    )


def windows(drafts: int, chunk: int) -> tuple[set[int], int | None]:
    """Rows of the target's windows, and of the module's."""
    config = small_config()
    plan = StatePlan.of(config, slots=2, max_context=64, max_query_len=chunk, drafts=drafts)
    state = build_state(config, plan, RowFormats(), dtype=torch.float32, device=torch.device("meta"))
    module = None if state.draft is None else state.draft.layer.window.page_rows
    return {layer.window.page_rows for layer in state.layers}, module


@pytest.mark.invariant("M4")
@pytest.mark.parametrize(("drafts", "chunk", "longest"), [(8, 4, 9), (4, 16, 16), (1, 1, 2)])
def test_a_window_holds_all_that_a_step_of_drafts_needs(drafts, chunk, longest):
    needed = small_config().sliding_window + longest - 1
    assert windows(drafts, chunk) == ({needed}, needed + drafts)


@pytest.mark.invariant("M4", control=True)
def test_without_drafts_a_window_holds_what_a_chunk_needs():
    assert windows(0, 4) == ({small_config().sliding_window + 3}, None)
