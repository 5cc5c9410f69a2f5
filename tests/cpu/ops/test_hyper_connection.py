"""Hyper-connections against a plain fp64 transcription of the formulas, in the official order."""

from __future__ import annotations

import pytest
import torch

from halma.hal.errors import DispatchError
from halma.ops import hyper_connection as _family  # noqa: F401  (defines the ops)
from tests.cpu.ops.checks import check_contract, poisoned, rows_are_invariant, run, same_bits

CARRIERS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1.5e-2}
EPS = 1e-6


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def mixing(count: int, width: int, dtype: torch.dtype, *, head: bool = False) -> tuple[torch.Tensor, ...]:
    rows = count if head else 2 * count + count * count
    fn = random(rows, count * width, seed=1, dtype=wide(dtype)) / width**0.5
    return fn, random(rows, seed=2, dtype=wide(dtype)), random(1 if head else 3, seed=3, dtype=wide(dtype)) * 2


def mixes(streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    flat = streams.double().flatten(1)
    return (flat / (flat.square().mean(1, keepdim=True) + EPS).sqrt()) @ fn.double().t()


def pre_by_formula(
    streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor, eps: float, iterations: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, n, _ = streams.shape
    u, b, s = mixes(streams, fn), base.double(), scale.double()
    pre = torch.sigmoid(u[:, :n] * s[0] + b[:n]) + eps
    post = 2 * torch.sigmoid(u[:, n : 2 * n] * s[1] + b[n : 2 * n])
    comb = torch.softmax((u[:, 2 * n :] * s[2] + b[2 * n :]).view(rows, n, n), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return torch.einsum("mj,mjd->md", pre, streams.double()), post, comb


@pytest.mark.parametrize(("dtype", "tolerance"), CARRIERS.items())
@pytest.mark.parametrize("count", [2, 4])
# A large eps makes its place in every division visible; one iteration is the columns alone.
@pytest.mark.parametrize(("eps", "iterations"), [(EPS, 20), (0.03, 20), (0.03, 1), (0.03, 2)])
def test_pre_is_the_formula(dtype: torch.dtype, tolerance: float, count: int, eps: float, iterations: int) -> None:
    streams, weights = random(6, count, 48, dtype=dtype), mixing(count, 48, dtype)
    x, post, comb = run("hc_pre", streams, *weights, EPS, eps, iterations)
    expected = pre_by_formula(streams, *weights, eps, iterations)
    assert (x.dtype, post.dtype, comb.dtype) == (dtype, wide(dtype), wide(dtype))
    torch.testing.assert_close(x.double(), expected[0], rtol=tolerance, atol=tolerance)
    for found, formula in ((post, expected[1]), (comb, expected[2])):
        torch.testing.assert_close(found.double(), formula, rtol=min(tolerance, 2e-5), atol=min(tolerance, 1e-6))


def test_sharp_choices_stay_exact() -> None:
    # Logits of some hundreds: the softmax is zero but for one entry a row, and eps carries the rest.
    streams, (fn, base, scale) = random(5, 4, 32), mixing(4, 32, torch.float32)
    weights = (fn, base, scale * 50)
    comb = run("hc_pre", streams, *weights, EPS, EPS, 20)[2]
    expected = pre_by_formula(streams, *weights, EPS, 20)[2]
    assert comb.isfinite().all()
    torch.testing.assert_close(comb.double(), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), CARRIERS.items())
def test_post_sums_over_the_first_index(dtype: torch.dtype, tolerance: float) -> None:
    y, streams = random(6, 48, dtype=dtype), random(6, 4, 48, seed=1, dtype=dtype)
    post, comb = random(6, 4, seed=2, dtype=wide(dtype)), random(6, 4, 4, seed=3, dtype=wide(dtype))
    expected = post.double().unsqueeze(2) * y.double().unsqueeze(1)
    expected = expected + torch.einsum("mjk,mjd->mkd", comb.double(), streams.double())
    found = run("hc_post", y, streams, post, comb)
    assert found.dtype is dtype
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert check_contract("hc_post", lambda: (y.clone(), streams.clone(), post.clone(), comb.clone())) <= 6


@pytest.mark.parametrize(("dtype", "tolerance"), CARRIERS.items())
def test_head_is_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    streams, (fn, base, scale) = random(6, 4, 48, dtype=dtype), mixing(4, 48, dtype, head=True)
    weights = torch.sigmoid(mixes(streams, fn) * scale.double() + base.double()) + 0.01
    expected = torch.einsum("mj,mjd->md", weights, streams.double())
    found = run("hc_head", streams, fn, base, scale, EPS, 0.01)
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    check_contract("hc_head", lambda: (streams.clone(), fn, base, scale, EPS, 0.01))


@pytest.mark.parametrize("dtype", CARRIERS)
def test_pre_keeps_its_contract_in_a_hundred_calls(dtype: torch.dtype) -> None:
    streams, weights = random(5, 4, 48, dtype=dtype), mixing(4, 48, dtype)
    assert check_contract("hc_pre", lambda: (streams.clone(), *weights, EPS, EPS, 20)) <= 100


@pytest.mark.invariant("K7")
@pytest.mark.parametrize("dtype", CARRIERS)
@pytest.mark.parametrize(("count", "width"), [(4, 256), (4, 33), (2, 96)])
def test_rows_do_not_feel_one_another(count: int, width: int, dtype: torch.dtype) -> None:
    streams, weights, head = (
        random(64, count, width, dtype=dtype),
        mixing(count, width, dtype),
        mixing(count, width, dtype, head=True),
    )
    rows_are_invariant(lambda s: run("hc_pre", s, *weights, EPS, EPS, 4), streams)
    rows_are_invariant(lambda s: run("hc_head", s, *head, EPS, EPS), streams)
    _, post, comb = run("hc_pre", streams, *weights, EPS, EPS, 20)
    y = random(64, width, seed=9, dtype=dtype)
    rows_are_invariant(lambda *rows: run("hc_post", *rows), y, streams, post, comb)


def test_padding_rows_do_no_harm() -> None:
    streams, weights = random(6, 4, 48), mixing(4, 48, torch.float32)
    alone = run("hc_pre", streams[:4].clone(), *weights, EPS, EPS, 20)
    streams[4:] = poisoned((2, 4, 48), torch.float32)
    for found, expected in zip(run("hc_pre", streams, *weights, EPS, EPS, 20), alone, strict=True):
        assert same_bits(found[:4], expected)


def test_weights_that_do_not_fit_are_refused() -> None:
    streams, (fn, base, scale) = random(2, 4, 16), mixing(4, 16, torch.float32)
    for bad in ((fn[:23], base, scale), (fn.double(), base, scale), (fn, base[:4], scale)):
        with pytest.raises(DispatchError, match="do not fit the streams"):
            run("hc_pre", streams, *bad, EPS, EPS, 20)
    with pytest.raises(DispatchError, match="do not fit the streams"):
        run("hc_head", streams, fn, base, scale, EPS, EPS)
    with pytest.raises(DispatchError, match="do not fit"):
        run("hc_post", random(2, 15), streams, random(2, 4), random(2, 4, 4))


def test_no_iterations_are_refused() -> None:
    with pytest.raises(DispatchError, match="0 iterations"):
        run("hc_pre", random(2, 4, 16), *mixing(4, 16, torch.float32), EPS, EPS, 0)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), CARRIERS.items())
def test_two_halves_are_the_whole(rows: int, dtype: torch.dtype, tolerance: float) -> None:
    """Where a collective does the rest of a boundary, the first and the last of a step are made of these."""
    streams, weights = random(rows, 4, 64, seed=rows, dtype=dtype), mixing(4, 64, dtype)
    x, post, comb = run("hc_pre", streams, *weights, EPS, EPS, 20)
    half, raw = run("hc_read", streams, *weights, EPS, EPS)
    assert raw.shape == (rows, 20) and raw.dtype == wide(dtype)
    near = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(half, x, **near)
    for found, expected in zip(run("hc_gates", raw, *weights[1:], EPS, 20), (post, comb), strict=True):
        torch.testing.assert_close(found, expected, **near)


def test_halves_refuse_what_does_not_fit() -> None:
    base, scale = random(24), random(3)
    with pytest.raises(DispatchError, match="do not fit their weights"):
        run("hc_gates", random(2, 19), base, scale, EPS, 20)
    with pytest.raises(DispatchError, match="0 iterations"):
        run("hc_gates", random(2, 20), base, scale, EPS, 0)
