"""The FFN program on the GPU: replays equal eager runs, padding changes no bit, nothing grows after capture.

python -m pytest tests/gpu/test_cuda_ffn.py --halma-backend cuda --halma-require-backend cuda
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from halma.hal.backend import Backend
from halma.hal.dispatch import table
from halma.hal.registry import default_registry
from halma.hal.testing.admission import admit
from halma.hal.testing.poison import Fill, check_real_rows
from halma.models.deepseek_v4.ffn.items import Item, ItemSizes
from halma.models.deepseek_v4.ffn.ladder import Bucket
from halma.models.deepseek_v4.ffn.program import FfnProgram
from halma.ops import examples as _examples  # noqa: F401  (offers the examples)
from halma.ops.weight import FP4_BLOCK32, FP8_BLOCK128, PLAIN
from tests.cpu.ffn.small import Layer, layers_of, payload, program_of, wanted
from tests.cpu.ops.checks import same_bits

SIZES = ItemSizes(max_tokens=96, hidden=512, top_k=6, experts=16, layers=3, max_shared=96, every_row_shared=True)
FORMATS = {"bf16": PLAIN, "fp8": FP8_BLOCK128, "fp4": FP4_BLOCK32}
BF16 = torch.bfloat16
ROUNDED = 3e-2
"""Largest difference to the reference as a part of the largest value: another order of sums moves roundings."""


def layers(backend: Backend, format: str, sizes: ItemSizes = SIZES) -> list[Layer]:
    return layers_of(sizes, backend, inner=256, format=FORMATS[format], dtype=BF16)


def program(backend: Backend, format: str, sizes: ItemSizes = SIZES, *, measure: bool = False) -> FfnProgram:
    reply = BF16 if sizes.every_row_shared else torch.float32
    made = program_of(backend, sizes, layers=layers(backend, format, sizes), carrier=BF16, reply=reply)
    made.prepare(measure=measure)
    return made


def bucket_for(made: FfnProgram, rows: int, shared: int) -> Bucket:
    found = made.ladder.pick(rows * made.sizes.top_k, shared)
    assert found is not None
    return found


def cpu(layer: Layer) -> Layer:
    def moved(weight: object) -> object:
        if weight is None:
            return None
        parts = {f.name: getattr(weight, f.name) for f in dataclasses.fields(weight) if f.init}  # type: ignore[arg-type]
        return type(weight)(**{n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in parts.items()})

    return Layer(*(moved(getattr(layer, f.name)) for f in dataclasses.fields(layer)))  # type: ignore[arg-type]


@pytest.mark.invariant("F13")
@pytest.mark.parametrize("half", [False, True], ids=["one rank", "two ranks"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_replay_equals_an_eager_run_of_the_same_routing(backend: Backend, format: str, half: bool) -> None:
    sizes = dataclasses.replace(SIZES, max_shared=48, every_row_shared=False) if half else SIZES
    made = program(backend, format, sizes)
    chooser = random.Random(4)
    for turn in range(60):
        rows = chooser.choice((1, 2, 7, 33, 64, 95, 96))
        shared = min(rows, sizes.max_shared)
        item = Item(turn % sizes.layers, rows, shared, chooser.randint(0, rows - shared))
        payload(sizes, rows, turn, BF16).put(made)
        exact = made.run_eagerly(item).clone()
        for bucket in (bucket_for(made, rows, shared), made.ladder.buckets[-1]):
            replayed = made.replay_in(item, bucket).clone()
            eager = made.run_eagerly(item, bucket).clone()  # no wait between them
            again = made.replay_in(item, bucket).clone()
            assert same_bits(replayed.cpu(), eager.cpu()), f"{item} in {bucket}"
            assert same_bits(replayed.cpu(), again.cpu()), f"{item} in {bucket}, behind an eager run"
            # On other rows a route may cut its products another way.
            assert (replayed.float() - exact.float()).abs().max() <= ROUNDED * exact.float().abs().max()
    made.close()


@pytest.mark.parametrize("format", FORMATS)
def test_items_are_what_the_reference_says(backend: Backend, format: str) -> None:
    made = program(backend, format)
    for layer, rows in ((0, 1), (1, 8), (2, 96)):
        given, item = payload(SIZES, rows, rows, BF16), Item(layer, rows, rows)
        given.put(made)
        found = made.replay_in(item, bucket_for(made, rows, rows)).float().cpu()
        expected = wanted(cpu(layers(backend, format)[layer]), given, item).float()
        assert (found - expected).abs().max() <= ROUNDED * expected.abs().max()
    made.close()


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("format", FORMATS)
def test_real_rows_are_the_same_bits_beside_any_poison(backend: Backend, format: str) -> None:
    made = program(backend, format)
    item = Item(1, 37, 37)
    given = payload(SIZES, 37, 3, BF16)

    def make(fill: Fill) -> None:
        b = made.buffers
        fill(b.rows)
        fill(b.weights)
        b.ids.fill_(SIZES.experts - 1)  # what another item left
        given.put(made)

    def run(_: None, fill: Fill) -> list[torch.Tensor]:
        bucket = bucket_for(made, 37, 37)
        return [made.replay_in(item, one).clone() for one in (bucket, made.ladder.buckets[-1])]

    assert check_real_rows(make, run) >= 10
    made.close()


@pytest.mark.invariant("F3")
@pytest.mark.parametrize("op", ["expert_layout", "grouped_ffn", "expert_sum", "expert_ffn", "round_activation"])
def test_every_route_for_this_backend_is_admitted(backend: Backend, op: str) -> None:
    """Numbers, replays, poison in gaps, tails, scales and scratch: as a stranger's route would have to."""
    default_registry().load_routes()
    for route in table.get(op).routes:
        if not route.backends or backend.name in route.backends:
            report = admit(op, route, backend)
            assert report.admitted, f"{route.name}: {report.reason}"


@pytest.mark.invariant("F8")
@pytest.mark.invariant("F9")
@pytest.mark.parametrize("format", FORMATS)
def test_nothing_grows_after_capture_and_one_place_serves_all(backend: Backend, format: str) -> None:
    made = program(backend, format)
    payload(SIZES, 96, 0, BF16).put(made)
    made.run_eagerly(Item(0, 96, 96))
    backend.device.synchronize()
    report, pool = made.workspace.report(), backend.graphs.pool_bytes(made.workspace)
    free = backend.device.memory_info().free
    places = set()
    for turn in range(200):
        bucket = made.ladder.buckets[turn % len(made.ladder.buckets)]
        rows = bucket.routed // SIZES.top_k
        places.add(made.replay_in(Item(turn % 3, rows, rows), bucket).data_ptr())
    backend.device.synchronize()
    assert len(places) == 1
    assert made.workspace.report() == report
    assert backend.graphs.pool_bytes(made.workspace) == pool
    assert free - backend.device.memory_info().free < 8 << 20
    made.close()


@pytest.mark.invariant("F5")
def test_costs_are_measured_and_decide(backend: Backend) -> None:
    made = program(backend, "fp4", measure=True)
    assert sorted(made.costs.spans) == [bucket.routed for bucket in made.ladder.buckets]
    for rows in (1, 8, 50, 96):
        payload(SIZES, rows, rows, BF16).put(made)
        made.run(Item(0, rows, rows))
    counted = made.statistics
    assert counted.replays + counted.eager_items == 4
    assert counted.charged_rows >= counted.real_rows
    made.close()
