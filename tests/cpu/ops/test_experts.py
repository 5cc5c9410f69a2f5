"""SwiGLU, the routed experts by reference and by rows, and the sum with the shared expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halma.hal.dispatch import Ops, table
from halma.hal.errors import DispatchError
from halma.hal.graph.current import set_current_recorder
from halma.hal.workspace import Workspace
from halma.ops import experts as _family  # noqa: F401  (defines the ops)
from halma.ops import linear as _products  # noqa: F401
from halma.ops.quant import accumulator, round_fp8_blocks
from halma.ops.routes import register_routes
from halma.ops.weight import Weight, dequantise
from tests.cpu.ops.checks import check_contract, no_allocation, poisoned, rows_are_invariant, run, same_bits

LIMIT = 1.0
"""Small, so that the clamp bites on random inputs."""

ROUTES = ("reference", "rows")


@pytest.fixture(autouse=True, scope="module")
def own_routes() -> None:
    register_routes(table.add_route)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def case(
    count: int,
    *,
    width: int = 64,
    inner: int = 48,
    experts: int = 8,
    k: int = 4,
    dtype: torch.dtype = torch.float32,
    activation: str | None = None,
) -> tuple[Any, ...]:
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    ids = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:k] for i in range(count)])
    weights = normal(count, k, seed=3, dtype=acc).abs()
    gate_up = Weight(normal(experts, 2 * inner, width, seed=1, dtype=dtype, scale=0.3), activation=activation)
    down = Weight(normal(experts, width, inner, seed=2, dtype=dtype, scale=0.3), activation=activation)
    return normal(count, width, dtype=dtype), ids, weights, gate_up, down, LIMIT


def rounded(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    round_fp8_blocks(x, 128, out, Workspace())
    return out


def plainly(x: Any, ids: Any, weights: Any, gate_up: Weight, down: Weight, limit: float) -> torch.Tensor:
    """The same sum, token by token and expert by expert, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            e = int(ids[row, slot])
            source = rounded(x[row].to(weights.dtype)) if gate_up.activation else x[row]
            gate, up = (gate_up.data[e].double() @ source.double()).chunk(2)
            inner = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weights[row, slot]
            inner = rounded(inner.to(weights.dtype)).double() if down.activation else inner.double()
            out[row] += down.data[e].double() @ inner
    return out


def by(route: str, *args: Any) -> torch.Tensor:
    return Ops(Workspace(checked=True), routes={"expert_ffn": route}).expert_ffn(*args).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5])
def test_swiglu_clamps_before_the_product_and_the_gate_from_above_only(count: int, dtype: torch.dtype) -> None:
    x = normal(count, 26, dtype=dtype, scale=4.0)
    found = run("swiglu", x, 2.0)
    gate, up = x.double().chunk(2, 1)
    expected = torch.nn.functional.silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0)
    assert found.dtype is dtype
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 5e-3}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_swiglu_at_the_ends_of_the_range() -> None:
    gate = torch.tensor([0.0, -3e38, -100.0, -88.0, 3e38, 5.0])
    up = torch.tensor([3e38, 2.0, -3e38, 1.0, 3e38, -3e38])
    found = run("swiglu", torch.cat([gate, up]).unsqueeze(0), 10.0)[0]
    expected = torch.nn.functional.silu(gate.double().clamp(max=10)) * up.double().clamp(-10, 10)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "k"), [(1, 4), (1, 1), (3, 2), (9, 4), (17, 3)])
def test_the_sum_of_the_chosen_experts(route: str, dtype: torch.dtype, count: int, k: int) -> None:
    args = case(count, k=k, dtype=dtype)
    expected = plainly(*args)
    found = by(route, *args)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 if dtype is torch.float32 else 1e-13)


def test_bfloat16_carriers_accumulate_in_float32() -> None:
    args = case(3, dtype=torch.bfloat16)
    found = by("reference", *args)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), plainly(*args), rtol=0, atol=1e-5)


@pytest.mark.parametrize("route", ROUTES)
def test_float64_carriers_with_rounded_activations(route: str) -> None:
    args = case(4, width=256, inner=160, dtype=torch.float64, activation="fp8")
    expected = plainly(*args)
    torch.testing.assert_close(by(route, *args), expected, rtol=0, atol=1e-12)
    exact = plainly(*case(4, width=256, inner=160, dtype=torch.float64))
    assert (expected - exact).abs().max() > 1e-3, "the rounding must show"


@pytest.mark.parametrize("route", ROUTES)
def test_float32_carriers_with_rounded_activations_agree_but_for_flips(route: str) -> None:
    args = case(6, width=256, inner=160, activation="fp8")
    wrong = (by(route, *args).double() - plainly(*args)).abs() > 1e-4
    assert wrong.float().mean() < 0.2


def test_quantised_stacks_are_decoded_on_the_way() -> None:
    experts, inner, width = 4, 64, 128
    x, ids, weights, *_ = case(3, width=width, experts=experts, k=2)
    generator = torch.Generator().manual_seed(5)

    def fp4(rows: int, columns: int) -> Weight:
        data = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=generator)
        scale = torch.randint(122, 126, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
        return Weight(data, scale.view(torch.float8_e8m0fnu), "fp4_block32")

    def fp8(rows: int, columns: int) -> Weight:
        data = torch.randn(experts, rows, columns, generator=generator).to(torch.float8_e4m3fn)
        shape = Weight.scale_shape((experts, rows, columns), "fp8_block128")
        scale = torch.randint(122, 126, shape, dtype=torch.uint8, generator=generator)
        return Weight(data, scale.view(torch.float8_e8m0fnu), "fp8_block128")

    for make in (fp4, fp8):
        gate_up, down = make(2 * inner, width), make(width, inner)
        plain = [dequantise(w, torch.float32) for w in (gate_up, down)]
        assert same_bits(
            by("reference", x, ids, weights, gate_up, down, LIMIT), by("reference", x, ids, weights, *plain, LIMIT)
        )
        with pytest.raises(DispatchError, match="multiplies plain float32"):
            by("rows", x, ids, weights, gate_up, down, LIMIT)


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "sizes",
    [{"width": 64, "inner": 48}, {"width": 37, "inner": 13, "k": 3}, {"width": 256, "inner": 128, "activation": "fp8"}],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_does_not_depend_on_its_neighbours(route: str, sizes: dict[str, Any], dtype: torch.dtype) -> None:
    x, ids, weights, *rest = case(17, dtype=dtype, **sizes)
    rows_are_invariant(lambda x, i, w: by(route, x, i, w, *rest), x, ids, weights, counts=(1, 2, 3, 5, 8, 16, 17))


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("width", [128, 13, 24])
def test_swiglu_of_a_row_does_not_depend_on_its_neighbours(width: int) -> None:
    rows_are_invariant(lambda x: run("swiglu", x, 1.5), normal(64, 2 * width))


@pytest.mark.invariant("K7", control=True)
def test_the_library_silu_does_depend_on_the_place_so_the_check_can_see_it() -> None:
    x = normal(64, 13, scale=3.0)
    silu = torch.nn.functional.silu
    if same_bits(silu(x), torch.cat([silu(row) for row in x.split(1)])):
        pytest.skip("this build's silu is the same everywhere")
    with pytest.raises(AssertionError, match="other bits"):
        rows_are_invariant(silu, x, poison=False)


def test_contracts() -> None:
    assert check_contract("swiglu", lambda: (normal(2, 32), 1.0)) <= 8
    assert check_contract("expert_ffn", lambda: case(3)) <= 3 * 4 * 2 + 24


@pytest.mark.parametrize("activation", [None, "fp8"])
@pytest.mark.parametrize("count", [1, 20])
def test_the_reference_allocates_nothing(count: int, activation: str | None) -> None:
    args = case(count, width=128, activation=activation)
    ops = Ops(Workspace(checked=True), routes={"expert_ffn": "reference"})
    first = ops.expert_ffn(*args).clone()
    ops.workspace.seal()
    ops.workspace.start()
    with no_allocation():
        second = ops.expert_ffn(*args)
    assert same_bits(first, second)


class Nodes:
    def __init__(self) -> None:
        self.launches: list[Any] = []

    def record_node(self, name: str, launch: Any, *, reads: Any, writes: Any, parameters: Any = ()) -> None:
        self.launches.append(launch)


@pytest.mark.parametrize("activation", [None, "fp8"])
def test_a_recorded_launch_follows_new_inputs_and_new_choices(activation: str | None) -> None:
    args = case(3, width=128, activation=activation)
    other = case(3, width=128, activation=activation)
    other[0].mul_(-0.7)
    other[1].copy_((args[1] + 1) % 8)
    expected = [by("rows", *args), by("rows", *other)]
    nodes = Nodes()
    set_current_recorder(nodes)
    try:
        out = Ops(Workspace(), routes={"expert_ffn": "rows"}).expert_ffn(*args)
    finally:
        set_current_recorder(None)
    [launch] = nodes.launches
    for wanted, source in ((expected[0], args), (expected[1], other), (expected[1], other)):
        for mine, theirs in zip(args[:3], source[:3], strict=True):
            mine.copy_(theirs.clone())
        launch()
        assert same_bits(out, wanted)


@pytest.mark.parametrize("route", ROUTES)
def test_poisoned_padding_rows_neither_raise_nor_show(route: str) -> None:
    x, ids, weights, *rest = case(6)
    alone = by(route, x[:4].clone(), ids[:4].clone(), weights[:4].clone(), *rest)
    x[4:], weights[4:] = poisoned((2, 64), x.dtype), poisoned((2, 4), x.dtype)
    assert same_bits(by(route, x, ids, weights, *rest)[:4], alone)


def test_one_expert_may_take_everything() -> None:
    x, ids, weights, *rest = case(5, k=1)
    ids.fill_(7)
    for route in ROUTES:
        torch.testing.assert_close(
            by(route, x, ids, weights, *rest).double(), plainly(x, ids, weights, *rest), rtol=0, atol=1e-5
        )


def test_a_replay_of_rows_makes_no_call_of_torch() -> None:
    args = case(1, width=256, inner=128, experts=16)
    nodes = Nodes()
    set_current_recorder(nodes)
    try:
        Ops(Workspace(), routes={"expert_ffn": "rows"}).expert_ffn(*args)
    finally:
        set_current_recorder(None)
    nodes.launches[0]()  # the first run makes the views
    with Calls() as calls:
        nodes.launches[0]()
    assert calls.names == []


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("pair", [("float32", "float32"), ("float32", "bfloat16"), ("float64", "float64")])
def test_add_rows_sums_in_the_accumulator_and_casts_once(pair: tuple[str, str]) -> None:
    a, b = normal(3, 10, dtype=getattr(torch, pair[0])), normal(3, 10, seed=1, dtype=getattr(torch, pair[1]))
    dtype = b.dtype
    found = run("add_rows", a, b, dtype)
    assert same_bits(found, (a.double() + b.double()).to(a.dtype).to(dtype))
    check_contract("add_rows", lambda: (a, b, dtype))


# -- SwiGLU with its rounding, and the product of codes ---------------------------------------------------------


def pair_of(dtype: torch.dtype, packed: bool, inner: int = 256, rows: int = 5) -> tuple[torch.Tensor, Weight]:
    both, values = normal(rows, 2 * inner, dtype=dtype, scale=6.0), normal(40, inner)
    both[0, 128:inner] *= 2.0**-9  # its groups have scales of their own
    if not packed:
        return both, Weight(values.to(accumulator(dtype)), activation="fp8")
    scale = torch.full((1, -(-inner // 128)), 121, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return both, Weight(values.to(torch.float8_e4m3fn), scale, "fp8_block128", "fp8")


@pytest.mark.parametrize("route", ["reference", "auto"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("inner", [256, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_of_swiglus_codes_has_the_bits_of_the_pair(
    dtype: torch.dtype, inner: int, packed: bool, route: str
) -> None:
    both, down = pair_of(dtype, packed, inner)
    both[2, 7], both[3] = float("inf"), float("nan")
    names = ("swiglu", "swiglu_fp8", "linear", "linear_fp8")
    ops = Ops(Workspace(checked=True), routes={} if route == "auto" else dict.fromkeys(names, route))
    codes, scales = ops.swiglu_fp8(both, 5.0)
    assert (codes.dtype, scales.dtype, tuple(scales.shape)) == (torch.float8_e4m3fn, torch.float32, (5, 2))
    found = ops.linear_fp8(codes, scales, down, dtype)
    apart = ops.linear(ops.swiglu(both, 5.0), down)
    assert found.dtype is apart.dtype is dtype
    real = [0, 1, 2, 4]
    assert torch.equal(found[real], apart[real]), "the same factors, in the same order"
    assert bool(found[3].isnan().all()) and bool(apart[3].isnan().all())


def test_the_scales_of_a_row_lie_side_by_side_and_are_powers_of_two() -> None:
    codes, scales = run("swiglu_fp8", normal(3, 512, scale=8.0), 10.0)
    assert scales.stride() == (2, 1) and codes.stride() == (256, 1)
    assert torch.equal(scales.frexp().mantissa, torch.full_like(scales, 0.5))


def test_a_product_that_rounds_nothing_takes_no_codes() -> None:
    codes, scales = run("swiglu_fp8", normal(2, 512), 10.0)
    with pytest.raises(DispatchError, match="does not round its input"):
        run("linear_fp8", codes, scales, Weight(normal(8, 256)), torch.float32)
    with pytest.raises(DispatchError, match="do not contract"):
        run("linear_fp8", codes, scales[:, :1], Weight(normal(8, 256), activation="fp8"), torch.float32)


def test_the_rounded_pair_allocates_nothing() -> None:
    weight = Weight(normal(8, 256), activation="fp8")
    codes, scales = (one.clone() for one in run("swiglu_fp8", normal(2, 512), 10.0))
    assert check_contract("swiglu_fp8", lambda: (normal(2, 512), 1.0)) <= 17
    assert check_contract("linear_fp8", lambda: (codes, scales, weight, torch.float32)) <= 3
