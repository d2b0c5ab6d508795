"""The CUDA kernels against their twins in torch. Without a GPU: the order of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unmoved import kernels
from unmoved.config import make_config
from unmoved.kernels import Windows, memory, pack_first, pack_inner, pack_weights, pixels_last, sizes
from unmoved.networks import Encoder
from unmoved.transforms import crop

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_weights_are_in_the_order_of_the_products() -> None:
    """mma: lane l of a warp holds columns n = l // 4 of B; the PTX manual numbers its rows 2 (l % 4) + {0, 1, 8, 9}."""
    w = torch.arange(32 * 32 * 9).reshape(32, 32, 3, 3) % 251.0  # exact in bf16
    packed = pack_inner(w).float().reshape(9, 2, 4, 2, 8, 8)  # wgmma: blocks of 8 filters x 8 channels
    for tap, k, n, r, g, c in [(0, 0, 0, 0, 0, 0), (5, 1, 2, 1, 3, 6), (8, 1, 3, 1, 7, 7), (2, 0, 1, 0, 6, 1)]:
        assert packed[tap, k, n, r, g, c] == w[8 * n + g, 16 * k + 8 * r + c, tap // 3, tap % 3]
    packed = pack_first(w[:, :9]).float().reshape(9, 32, 4, 2, 2)
    for tap, lane, n, r, h in [(0, 0, 0, 0, 0), (4, 17, 1, 1, 1), (8, 30, 3, 0, 1)]:
        channel = 4 * (lane % 4) + 2 * r + h
        assert packed[tap, lane, n, r, h] == (w[8 * n + lane // 4, channel, tap // 3, tap % 3] if channel < 9 else 0)


def test_sizes_and_memory() -> None:
    assert sizes(84, 84, 2, 4) == [(41, 41), (39, 39), (37, 37), (35, 35)]
    assert memory(41, 41) <= 227 * 1024  # of a Hopper block


def encoder(preset: str, precision: str, size: tuple[int, int] = (84, 84), **changes: object) -> Encoder:
    torch.manual_seed(0)
    config = make_config("walker_walk", preset=preset, precision=precision, **changes)
    net = Encoder(config, 9)
    for conv in net.convs:
        torch.nn.init.normal_(conv.bias, std=0.1)  # type: ignore[arg-type]
        conv.weight.data += 0.02 * torch.randn_like(conv.weight)  # type: ignore[operator, arg-type]
    return net.cuda()


def outcome(net: Encoder, x: Tensor | Windows, dx: Tensor | None, g: Tensor) -> list[Tensor]:
    features = net(x, dx)
    return [features, *torch.autograd.grad(features, list(net.parameters()), g.to(features.dtype))]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want.detach().double()).norm() / want.detach().double().norm())


@gpu
@pytest.mark.parametrize("preset", ["drq", "drqv2", "dmgb"])
@pytest.mark.parametrize("kind", ["bytes", "float"])
@pytest.mark.parametrize(
    ("n", "t", "size"), [(5, 0, (84, 84)), (7, 3, (84, 84)), (140, 140, (84, 84)), (3, 2, (76, 64))]
)
def test_kernels_agree_with_their_twin(preset: str, kind: str, n: int, t: int, size: tuple[int, int]) -> None:
    """About as close to float64 as the same layers through cuDNN in bf16; ReLUs near 0 make both of them noisy."""
    g = torch.Generator().manual_seed(n)
    x = torch.randint(256, (n, 9, *size), generator=g, dtype=torch.uint8).cuda()
    x = x if kind == "bytes" else x.float() * 0.7
    dx = torch.randint(-255, 256, (t, 9, *size), generator=g).float().cuda() if t else None
    nets = [encoder(preset, p) for p in ("fp32", "bf16", "bf16")]
    nets[0].double()
    nets[2].fused = True
    out = torch.randn(n + t, nets[1](x[:1]).shape[1], generator=g).cuda()
    exact, twin, kernels = (outcome(net, x, dx, out) for net in nets)
    for a, b, c in zip(exact, twin, kernels, strict=True):
        assert c.isfinite().all() and error(c, a) < max(2 * error(b, a), 2e-3), (error(b, a), error(c, a))
    again = outcome(nets[2], x, dx, out)
    assert all(torch.equal(a, b) for a, b in zip(kernels, again, strict=True))  # no race, no atomics


@gpu
def test_small_kernels_equal_their_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(0)
    weights = [torch.randn(32, c, 3, 3, generator=g) for c in (9, 32, 32)]
    for back in (False, True):
        assert torch.equal(pack_weights([w.cuda() for w in weights], back).cpu(), pack_weights(weights, back))
    x = torch.randint(256, (5, 9, 76, 64), generator=g, dtype=torch.uint8)
    offset = torch.randint(-9, 10, (5, 2), generator=g)
    monkeypatch.setattr(kernels, "built", True)
    for size in (64, 56):
        assert torch.equal(crop(x.cuda(), offset.cuda(), size).cpu(), crop(x, offset, size))
    assert torch.equal(pixels_last(x.cuda()).cpu(), pixels_last(x))


@gpu
def test_windows_equal_the_views_they_stand_for() -> None:
    g = torch.Generator().manual_seed(0)
    net = encoder("drqv2", "bf16")
    net.fused = True
    x = torch.randint(256, (5, 9, 84, 84), generator=g, dtype=torch.uint8).cuda()
    offsets = torch.randint(-9, 10, (15, 2), generator=g).cuda()
    views = torch.cat([crop(x, o, 84) for o in offsets.split(5)])
    dx = torch.randn(10, 9, 84, 84, generator=g).cuda()
    out = torch.randn(25, net(x[:1]).shape[1], generator=g).cuda()
    for a, b in zip(outcome(net, Windows(pixels_last(x), offsets), dx, out), outcome(net, views, dx, out), strict=True):
        assert torch.equal(a, b)


@gpu
@pytest.mark.parametrize("keep", [True, False])
def test_inference_gives_the_same_features(keep: bool) -> None:
    net = encoder("drq", "bf16")
    net.fused = True
    x = torch.randint(256, (9, 9, 84, 84), dtype=torch.uint8).cuda()
    with torch.set_grad_enabled(keep):
        features = net(x)
    with torch.no_grad():
        assert torch.equal(features, net(x))
