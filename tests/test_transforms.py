"""The families f_tau: what all of them owe, then each against an explicit computation."""

from __future__ import annotations

import colorsys
import math
from typing import Any

import numpy as np
import pytest
import scipy.ndimage
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from unmoved.transforms import (
    AtIdentity,
    Blur,
    ColorJitter,
    Compose,
    Conv,
    Crop,
    Cutout,
    Flip,
    FromModule,
    Grayscale,
    Identity,
    Mixture,
    Overlay,
    Rotate,
    Shift,
    Transformation,
    Translate,
    hsv_to_rgb,
    random_resized_crop,
    rgb_to_hsv,
    stack_taus,
)

SIZE = 12


class Noise(nn.Module):
    """An augmentation that draws one number per image from the global generator, as kornia's do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(len(x), 1, 1, 1)


def gen(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def pictures(n: int = 5, channels: int = 9, size: int = SIZE, seed: int = 7) -> Tensor:
    return torch.randint(256, (n, channels, size, size), generator=gen(seed), dtype=torch.uint8)


def smooth(n: int = 5, size: int = 40) -> Tensor:
    """Float64 images with a derivative: waves under a window, orange of hue 1/12 (far from where hue has its kinks)."""
    grid = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    phase = torch.arange(n * 3, dtype=torch.float64).reshape(n, 3, 1, 1, 1)
    wave = 3 + torch.sin(3 * grid[:, None] + phase) * torch.cos(4 * grid + 2 * phase)
    window = torch.sin(math.pi * grid[:, None]).square() * torch.sin(math.pi * grid).square()
    colour = torch.tensor([50.0, 35.0, 20.0], dtype=torch.float64)[:, None, None]
    return (wave * window * colour).flatten(1, 2)


def bank() -> Tensor:
    return pictures(6, 3, 20, seed=3)


FAMILIES: dict[str, Transformation] = {
    "identity": Identity(),
    "still": AtIdentity(Shift(2)),
    "shift": Shift(),
    "crop": Crop(8, SIZE),
    "translate": Translate(16, SIZE),
    "overlay": Overlay(bank(), size=SIZE),
    "mix": Overlay(bank(), (0.0, 0.5), size=SIZE),
    "conv": Conv(),
    "rotate": Rotate(),
    "blur": Blur(),
    "cutout": Cutout(2, 5, size=SIZE),
    "cutout_colour": Cutout(2, 5, colour=True, size=SIZE),
    "grayscale": Grayscale(0.5),
    "flip": Flip(),
    "jitter": ColorJitter(),
    "compose": Compose(Shift(2), Conv(), Flip()),
    "mixture": Mixture((Identity(), 0.3), (Shift(2), 0.3), (Rotate(), 0.4)),
    "module": FromModule(Noise(), per_sample=True),
}
KEEPS_DTYPE = {"identity", "still", "shift", "crop", "translate", "cutout", "cutout_colour", "flip"}
SIDE = {"crop": 8, "translate": 16}
every = pytest.mark.parametrize("name", FAMILIES)


def leaves(tau: Any) -> list[Tensor]:
    return [tau] if isinstance(tau, Tensor) else [leaf for part in tau for leaf in leaves(part)]


def pick(tau: Any, i: int) -> Any:
    return tau[i : i + 1] if isinstance(tau, Tensor) else tuple(pick(part, i) for part in tau)


# ------------------------------------------------------------------------------------------------ what all families owe


@every
def test_shapes_and_dtypes(name: str) -> None:
    family, x = FAMILIES[name], pictures()
    tau = family.sample(len(x), gen())
    out, side = family(x, tau), SIDE.get(name, SIZE)
    assert out.shape == (5, 9, side, side)
    assert out.dtype == (torch.uint8 if name in KEEPS_DTYPE else torch.float32)
    assert torch.equal(out.float(), family(x.float(), tau))
    double = family(x.double(), tau)
    assert double.dtype == torch.float64 and torch.allclose(double, out.double(), atol=2e-2)


@every
def test_a_call_is_pure(name: str) -> None:
    family, x = FAMILIES[name], pictures()
    tau = family.sample(len(x), gen())
    kept, parts, state = x.clone(), [t.clone() for t in leaves(tau)], torch.get_rng_state()
    first = family(x, tau)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)  # another global state must not matter
    assert torch.equal(first, family(x, tau))
    assert torch.equal(x, kept) and all(torch.equal(a, b) for a, b in zip(leaves(tau), parts, strict=True))


@every
def test_every_frame_sees_the_same_tau(name: str) -> None:
    family, x = FAMILIES[name], pictures()
    tau = family.sample(len(x), gen())
    out = family(x, tau)
    for k in range(0, 9, 3):
        assert torch.allclose(out[:, k : k + 3].float(), family(x[:, k : k + 3], tau).float(), atol=1e-3)


@every
def test_a_batch_is_its_images_one_by_one(name: str) -> None:
    family, x = FAMILIES[name], pictures()
    tau = family.sample(len(x), gen())
    single = [family(x[i : i + 1], pick(tau, i)) for i in range(len(x))]
    assert torch.allclose(family(x, tau).float(), torch.cat(single).float(), atol=1e-3)
    again = stack_taus([pick(tau, i) for i in range(len(x))])
    assert all(torch.equal(a, b) for a, b in zip(leaves(tau), leaves(again), strict=True))


@every
def test_sampling_uses_only_the_generator(name: str) -> None:
    family, state = FAMILIES[name], torch.get_rng_state()
    a, b, other = (leaves(family.sample(50, gen(s))) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(len(t) == 50 for t in a)
    assert all(torch.equal(s, t) for s, t in zip(a, b, strict=True))
    if name not in ("identity", "still"):
        assert not all(torch.equal(s, t) for s, t in zip(a, other, strict=True))


@every
def test_the_identity_is_the_identity(name: str) -> None:
    family, x = FAMILIES[name], pictures()
    if name in ("still", "conv", "compose", "mixture", "module"):
        with pytest.raises(TypeError, match="no identity"):
            family.identity(5)
        return
    out = family(x, family.identity(5)).float()
    want = {"crop": x[..., 2:10, 2:10], "translate": F.pad(x, (2, 2, 2, 2))}.get(name, x)
    atol = {"rotate": 2e-2, "jitter": 1e-3}.get(name, 0.0)
    assert torch.allclose(out, want.float(), rtol=0, atol=atol)


def test_compose_of_identities_is_the_identity() -> None:
    family, x = Compose(Shift(), Flip()), pictures()
    assert torch.equal(family(x, family.identity(5)), x)


@every
def test_samples_lie_in_range_and_reach_its_ends(name: str) -> None:
    family = FAMILIES[name]
    tau = family.sample(2000, gen())
    integral = {"shift": 8, "crop": 4, "translate": 4, "flip": 1, "grayscale": 1}
    if name in integral:
        assert (int(tau.min()), int(tau.max())) == (0, integral[name])
    elif name in ("rotate", "blur", "overlay", "mix"):
        values = tau[1] if name in ("overlay", "mix") else tau
        low, high = {"rotate": (-180, 180), "blur": (0.1, 2.0), "overlay": (0.5, 0.5), "mix": (0, 0.5)}[name]
        assert low <= values.min() and values.max() <= high
        if name in ("rotate", "blur"):  # 2000 uniform numbers come near both ends
            assert values.min() < low + 0.01 * (high - low) and values.max() > high - 0.01 * (high - low)
    elif name == "jitter":
        hue = 0.5 * 255 / 360
        low, high = torch.tensor([0.6, 0.6, 0.6, -hue, 0.0]), torch.tensor([1.4, 1.4, 1.4, hue, 1.0])
        assert (tau >= low).all() and (tau <= high).all()
        assert ((tau.amax(0) - tau.amin(0)) > 0.99 * (high - low)).all()
    elif name == "still":
        assert torch.equal(tau, torch.full((2000, 2), 2))


def test_a_family_without_its_parts_says_so() -> None:
    class Half(Transformation):
        pass

    for call in (lambda: Half().sample(1, gen()), lambda: Half().identity(1), lambda: Half()(pictures(), None)):
        with pytest.raises(TypeError, match="half"):
            call()


@pytest.mark.parametrize("name", ["crop", "translate", "cutout", "grayscale", "flip", "module"])
def test_no_tangent_without_a_continuous_parameter(name: str) -> None:
    family, x = FAMILIES[name], pictures()
    with pytest.raises(TypeError, match="no continuous parameter"):
        family.tangent(x, family.sample(5, gen()), family.direction(gen()))


# ------------------------------------------------------------------------------------------------ shift


def shifted(x: Tensor, tau: Tensor, pad: int = 4) -> Tensor:
    """One tau for all: pad by repeating the border, then slice."""
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (pad, pad), (pad, pad)), mode="edge")
    row, col = tau.tolist()
    return torch.from_numpy(padded[:, :, row : row + x.shape[2], col : col + x.shape[3]])


def test_shift_is_pad_and_slice_for_all_81() -> None:
    x, support = pictures(3), Shift().support()
    assert support.shape == (81, 2) and len({tuple(t) for t in support.tolist()}) == 81
    for tau in support:
        assert torch.equal(Shift()(x, tau.expand(3, 2)), shifted(x, tau))
    assert torch.equal(Shift(2)(x, torch.tensor([[0, 0], [2, 2], [4, 1]]))[2:], shifted(x[2:], torch.tensor([4, 1]), 2))


def test_shift_is_uniform_over_the_81() -> None:
    tau = Shift().sample(81 * 200, gen(5))
    counts = torch.bincount(tau[:, 0] * 9 + tau[:, 1], minlength=81)
    assert len(counts) == 81 and counts.min() > 0
    assert scipy.stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_drqv2s_grid_sample_is_the_same_shift() -> None:
    """RandomShiftsAug of DrQ-v2, at its 84 pixels, for all 81 offsets: 0.0030 grey levels apart on white noise."""
    x, tau, size = pictures(1, 3, 84).float().expand(81, -1, -1, -1), Shift().support(), 84 + 8
    line = torch.linspace(-1 + 1 / size, 1 - 1 / size, size)[:84]
    base = torch.stack([line.expand(84, 84), line[:, None].expand(84, 84)], dim=-1)  # (x, y) at each pixel
    grid = base + (tau.flip(1) * (2 / size))[:, None, None]
    theirs = F.grid_sample(F.pad(x, (4, 4, 4, 4), mode="replicate"), grid, padding_mode="zeros", align_corners=False)
    assert (theirs - Shift()(x, tau)).abs().max() < 3.1e-3


def test_shift_tangent_by_hand() -> None:
    """A 4-pixel row 10 20 40 80, seen one pixel to the left of itself: 10 10 20 40. Then it moves left."""
    x = torch.tensor([10.0, 20.0, 40.0, 80.0]).expand(1, 3, 4, 4)
    tau, left = torch.tensor([[1, 0]]), torch.tensor(0)
    assert Shift(1)(x, tau)[0, 0, 0].tolist() == [10, 10, 20, 40]
    assert Shift(1).tangent(x, tau, left)[0, 0, 0].tolist() == [0, 10, 20, 0]  # the border 40 is repeated
    assert Shift(1, "printed").tangent(x, tau, left)[0, 0, 0].tolist() == [0, 10, 20, 40]  # the 80 comes in
    right = Shift(1).tangent(x, tau, torch.tensor(1))[0, 0, 0].tolist()
    assert right == [0, 0, -10, -20]
    up = Shift(1).tangent(x.transpose(2, 3), torch.tensor([[1, 1]]), torch.tensor(2))[0, 0, :, 0].tolist()
    assert up == [10, 20, 40, 0]
    down = Shift(1).tangent(x.transpose(2, 3), torch.tensor([[1, 1]]), torch.tensor(3))[0, 0, :, 0].tolist()
    assert down == [0, -10, -20, -40]


def test_the_two_shift_tangents_differ_only_where_pixels_enter() -> None:
    support = Shift().support()
    x = pictures(1, 3).expand(81, -1, -1, -1)
    for direction, entering in enumerate([(..., -1), (..., 0), (..., -1, slice(None)), (..., 0, slice(None))]):
        way = torch.tensor(direction)
        author, printed = Shift().tangent(x, support, way), Shift(4, "printed").tangent(x, support, way)
        assert author.dtype == torch.float32 and not author[entering].any()
        move = torch.tensor([(0, 1), (0, -1), (1, 0), (-1, 0)][direction])
        wide = F.pad(x.float(), (5, 5, 5, 5), mode="replicate")  # f_{tau+1} needs pad 5 at the edge of the support
        for i in (0, 8, 40, 72, 80):
            (a, b), (c, d) = (support[i] + 1).tolist(), (support[i] + 1 + move).tolist()
            want = wide[i, :, c : c + SIZE, d : d + SIZE] - wide[i, :, a : a + SIZE, b : b + SIZE]
            assert torch.equal(printed[i], want)
        assert printed[entering].any()
        author[entering] = printed[entering]
        assert torch.equal(author, printed)


def test_shift_directions_are_the_four_uniformly() -> None:
    g = gen()
    counts = torch.bincount(torch.stack([Shift().direction(g) for _ in range(1000)]))
    assert len(counts) == 4 and scipy.stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_at_identity_has_the_tangent_of_the_original_state() -> None:
    x, family = pictures(), AtIdentity(Shift())
    way = family.direction(gen())
    assert torch.equal(family(x, family.sample(5, gen())), x)
    assert torch.equal(family.tangent(x, family.sample(5, gen()), way), Shift().tangent(x, Shift().identity(5), way))


# ------------------------------------------------------------------------------------------------ tangents


@pytest.mark.parametrize("family", [Rotate(), Blur(), ColorJitter(), Conv()], ids=lambda f: f.name)
def test_tangents_are_derivatives(family: Transformation) -> None:
    """Against a one-sided difference of another step."""
    x, tau, g = smooth(), family.sample(5, gen()).double(), gen(4)
    if isinstance(family, ColorJitter):
        tau[:, 1], tau[:, 3] = 0.9 + 0.05 * tau[:, 1], 0.1 * tau[:, 3]  # away from clamps and kinks
    for _ in range(4):
        way = family.direction(g).double()
        h = family.step / 50
        want = (family(x, tau + h * way) - family(x, tau)) / h
        got = family.tangent(x, tau, way)
        assert got.shape == x.shape and want.norm() > 1
        assert (got - want).norm() < (0.1 if isinstance(family, Rotate) else 0.02) * want.norm()  # bilinear has kinks


def test_directions() -> None:
    g = gen()
    assert torch.allclose(Conv().direction(g).norm(), torch.tensor(1.0)) and Conv().direction(g).shape == (3, 3, 3, 3)
    jitter = torch.stack([ColorJitter().direction(g) for _ in range(100)])
    assert (jitter.sum(1) == 1).all() and (jitter.sum(0)[:4] > 0).all() and jitter[:, 4].sum() == 0
    assert Rotate().direction(g) == 1 and Blur().direction(g) == 1


def test_overlay_tangent_is_exact() -> None:
    family, x = Overlay(bank(), (0.0, 0.5), size=SIZE), pictures().double()
    image, w = family.sample(5, gen())
    got = family.tangent(x, (image, w), torch.tensor(1.0))
    want = (family(x, (image, w.double() + 0.25)) - family(x, (image, w.double()))) / 0.25
    assert torch.allclose(got, want, atol=1e-9) and torch.allclose(got[:, 3:6], image.double() - x[:, 3:6])
    assert torch.equal(family.tangent(x, (image, w), torch.tensor(-1.0)), -got)
    assert family.tangent(x.to(torch.uint8), (image, w), torch.tensor(1.0)).dtype == torch.float32


# ------------------------------------------------------------------------------------------------ geometry


def test_crop_at_all_289_offsets() -> None:
    x, family = pictures(1, 3, 100), Crop()
    support = family.support()
    assert support.shape == (289, 2) and support.max() == 16
    out = family(x.expand(289, -1, -1, -1), support)
    for image, (row, col) in zip(out, support.tolist(), strict=True):
        assert torch.equal(image, x[0, :, row : row + 84, col : col + 84])
    tau = family.sample(20_000, gen())
    assert scipy.stats.chisquare(torch.bincount(tau[:, 0] * 17 + tau[:, 1], minlength=289).numpy()).pvalue > 1e-3
    with pytest.raises(AssertionError, match="expects 100 pixels"):
        family(pictures(1, 3, 84), support[:1])


def test_translate_at_all_offsets() -> None:
    x, family = pictures(1, 3, 20) | 1, Translate(24, 20)  # no black pixel in the image
    support = family.support()
    assert support.shape == (25, 2)
    out = family(x.expand(25, -1, -1, -1), support)
    for image, (row, col) in zip(out, support.tolist(), strict=True):
        canvas = torch.zeros(3, 24, 24, dtype=torch.uint8)
        canvas[:, row : row + 20, col : col + 20] = x[0]
        assert torch.equal(image, canvas)
    assert Translate().sample(500, gen()).max() == 8
    with pytest.raises(AssertionError, match="expects 20 pixels"):
        family(pictures(), support[:5])


def test_rotation_by_right_angles() -> None:
    """A positive angle turns the picture against the clock, as torch.rot90(k=1) over (rows, columns) does."""
    x = pictures(3)
    for quarter in (-1, 1, 2, 3):
        out = Rotate()(x, torch.full((3,), 90.0 * quarter))
        assert (out - torch.rot90(x.float(), quarter, (2, 3))).abs().max() < 0.02


def test_rotation_leaves_corners_black_and_the_centre_in_place() -> None:
    out = Rotate()(torch.full((1, 3, 13, 13), 100.0), torch.tensor([45.0]))
    assert not out[..., 0, 0].any() and not out[..., -1, 0].any()
    assert torch.allclose(out[..., 4:9, 4:9], torch.tensor(100.0))


def test_rotations_probability() -> None:
    tau = Rotate(30, p=0.25).sample(4000, gen())
    assert tau.abs().max() <= 30 and abs((tau != 0).float().mean() - 0.25) < 0.03


def test_blur_keeps_constants_and_is_the_gaussian() -> None:
    sigma = torch.tensor([0.3, 1.0, 2.0])
    assert torch.allclose(Blur()(torch.full((3, 3, 9, 9), 77.0), sigma), torch.tensor(77.0))
    x = pictures(3, 3)
    for kernel in (3, 5, 9):
        out, r = Blur(kernel)(x, sigma).numpy(), kernel // 2
        for i in range(3):
            for c in range(3):
                want = scipy.ndimage.gaussian_filter(x[i, c].double().numpy(), float(sigma[i]), radius=r, mode="mirror")
                np.testing.assert_allclose(out[i, c], want, atol=1e-3)
    dot = torch.zeros(1, 3, 5, 5)
    dot[..., 2, 2] = 1
    one = [math.exp(-0.5 * k * k / 0.64) for k in (-1, 0, 1)]
    want = torch.tensor(one)[:, None] * torch.tensor(one) / sum(one) ** 2
    assert torch.allclose(Blur(3)(dot, torch.tensor([0.8]))[0, 0, 1:4, 1:4], want)
    with pytest.raises(AssertionError, match="odd"):
        Blur(4)


def test_cutout_box() -> None:
    box, paint = Cutout().sample(20_000, gen())
    top, left, height, width = box.unbind(1)
    assert not paint.any() and (box >= 0).all() and (top + height <= 84).all() and (left + width <= 84).all()
    assert (top + height == 84).any() and (top == 0).any()
    for side in (height, width):
        assert (side.min(), side.max()) == (10, 29)
        assert scipy.stats.chisquare(torch.bincount(side - 10).numpy()).pvalue > 1e-3
    assert abs(np.corrcoef(height, width)[0, 1]) < 0.03 and abs(np.corrcoef(top, left)[0, 1]) < 0.03
    for start, side in ((top, height), (left, width)):  # where the box lies in its room does not depend on its size
        place = (start + 0.5) / (84 - side + 1)
        assert abs(np.corrcoef(place, side)[0, 1]) < 0.03 and abs(place.mean() - 0.5) < 0.01
        assert scipy.stats.kstest(place[side == 20], "uniform").statistic < 0.06


def test_cutout_by_hand() -> None:
    x = pictures(2) | 1
    tau = (torch.tensor([[1, 2, 3, 4], [0, 0, 12, 1]]), torch.tensor([[9, 8, 7], [0, 0, 0]]))
    want = x.clone()
    want[0, :, 1:4, 2:6] = torch.tensor([9, 8, 7] * 3, dtype=torch.uint8)[:, None, None]
    want[1, :, :, 0] = 0
    assert torch.equal(Cutout(size=SIZE)(x, tau), want)


def test_cutout_colours() -> None:
    paint = Cutout(colour=True).sample(5000, gen())[1]
    assert paint.shape == (5000, 3) and (paint.min(), paint.max()) == (0, 255)
    assert abs(np.corrcoef(paint[:, 0], paint[:, 1])[0, 1]) < 0.05


def test_flip() -> None:
    x, coin = pictures(2), torch.tensor([1, 0])
    out = Flip()(x, coin)
    assert torch.equal(out[0], torch.from_numpy(x[0].numpy()[:, :, ::-1].copy())) and torch.equal(out[1], x[1])
    assert abs(Flip(0.2).sample(4000, gen()).float().mean() - 0.2) < 0.03


# ------------------------------------------------------------------------------------------------ colour


def test_grayscale() -> None:
    x = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    for colour in range(3):
        x[colour, colour] = 200
    x[3] = 50
    out = Grayscale()(x, torch.tensor([1, 1, 1, 0]))
    for i, weight in enumerate((0.2989, 0.587, 0.114)):
        assert torch.allclose(out[i], torch.tensor(200 * weight))
    assert torch.equal(out[3], x[3].float())
    assert abs(Grayscale().sample(4000, gen()).float().mean() - 0.3) < 0.03


def jitter(x: Tensor, **changes: float) -> Tensor:
    names = ["brightness", "contrast", "saturation", "hue", "order"]
    tau = ColorJitter().identity(len(x)).clone()
    for name, value in changes.items():
        tau[:, names.index(name)] = value
    return ColorJitter()(x, tau)


def test_jitter_brightness_contrast_saturation() -> None:
    x = pictures(3).float()
    assert torch.allclose(jitter(x, brightness=0.7), 0.7 * x, atol=1e-3)
    assert torch.allclose(jitter(x, brightness=1.5).unflatten(1, (3, 3)).amax(2),
                          (1.5 * x.unflatten(1, (3, 3)).amax(2)).clamp(max=255), atol=1e-3)  # fmt: skip
    mean = x.mean((2, 3), keepdim=True)
    contrast = ((x - mean) * 1.4 + mean).clamp(0, 255)
    for order in (0.0, 1.0):
        assert torch.allclose(jitter(x, contrast=1.4, order=order), contrast, atol=1e-3)
    value = x.unflatten(1, (3, 3)).amax(2, keepdim=True)
    half = (value - 0.5 * (value - x.unflatten(1, (3, 3)))).flatten(1, 2)  # half way to the grey of the same value
    assert torch.allclose(jitter(x, saturation=0.5), half, atol=1e-3)


def test_jitter_order() -> None:
    x = pictures(3).float()
    first = jitter(jitter(x, contrast=1.4), brightness=0.6)
    last = jitter(jitter(x, brightness=0.6), contrast=1.4)
    assert torch.allclose(jitter(x, brightness=0.6, contrast=1.4, order=1.0), first, atol=1e-3)
    assert torch.allclose(jitter(x, brightness=0.6, contrast=1.4, order=0.0), last, atol=1e-3)
    assert (first - last).abs().max() > 1


def test_hue_turns_pure_colours_into_each_other() -> None:
    x = torch.zeros(1, 9, 2, 2)
    for frame in range(3):
        x[:, 3 * frame + frame] = 240.0  # red, green, blue frames
    out = jitter(x, hue=1 / 3).unflatten(1, (3, 3))
    assert torch.allclose(out, x.unflatten(1, (3, 3)).roll(1, 2), atol=1e-3)  # red to green, green to blue, blue to red
    assert torch.allclose(jitter(x, hue=-1 / 3).unflatten(1, (3, 3)), x.unflatten(1, (3, 3)).roll(-1, 2), atol=1e-3)
    assert torch.allclose(jitter(x, hue=1.0), x, atol=1e-3)


def test_hsv_agrees_with_colorsys_and_round_trips() -> None:
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 0.25, 1.0], dtype=torch.float64)] * 3)  # greys and pure colours
    rgb = torch.cat([corners, torch.rand(200, 3, generator=gen(), dtype=torch.float64)])
    h, s, v = rgb_to_hsv(rgb.T[None, None, :, :, None])
    ours = torch.stack([h, s, v], -1)[0, 0, :, 0]
    want = torch.tensor([colorsys.rgb_to_hsv(*row) for row in rgb.tolist()], dtype=torch.float64)
    turn = (ours[:, 0] - want[:, 0]).abs()
    assert (torch.minimum(turn, 1 - turn) < 1e-9).all() and torch.allclose(ours[:, 1:], want[:, 1:])
    assert torch.allclose(hsv_to_rgb(h, s, v)[0, 0, :, :, 0].T, rgb, atol=1e-9)
    back = torch.tensor([colorsys.hsv_to_rgb(*row) for row in rgb.tolist()], dtype=torch.float64)
    made = hsv_to_rgb(*(c.reshape(1, 1, -1, 1) for c in rgb.unbind(1)))
    assert torch.allclose(made[0, 0, :, :, 0].T, back, atol=1e-9)


def test_conv_by_hand() -> None:
    x, tau = pictures(2), torch.zeros(2, 3, 3, 3, 3)
    for c in range(3):
        tau[0, c, (c + 1) % 3, 1, 1] = 2.0  # each colour from the next one, doubled
        tau[1, c, c, 1, 2] = 1.0  # each pixel from its right neighbour
    out, unit = Conv()(x, tau), x.float() / 255
    assert torch.allclose(out[0, 3], 255 * torch.sigmoid(2 * unit[0, 4]))
    assert torch.allclose(out[0, 8], 255 * torch.sigmoid(2 * unit[0, 6]))
    right = torch.cat([unit[1, :, :, 1:], unit[1, :, :, -1:]], dim=-1)  # the border repeats
    assert torch.allclose(out[1], 255 * torch.sigmoid(right), atol=1e-4)
    kernels = Conv().sample(4000, gen())
    assert kernels.shape == (4000, 3, 3, 3, 3)
    assert kernels.mean().abs() < 0.01 and abs(kernels.std() - 1) < 0.01


# ------------------------------------------------------------------------------------------------ overlay


def test_overlay_by_hand() -> None:
    x, image = pictures(2).float(), pictures(2, 3, seed=9).float()
    out = Overlay(bank(), size=SIZE)(x, (image, torch.tensor([0.5, 0.2])))
    assert torch.allclose(out[0, 6:], 0.5 * x[0, 6:] + 0.5 * image[0])
    assert torch.allclose(out[1, :3], 0.8 * x[1, :3] + 0.2 * image[1])


def test_overlay_draws_one_weight_for_the_batch_and_an_image_for_each_state() -> None:
    image, w = Overlay(bank(), (0.0, 0.5), SIZE).sample(6, gen())
    assert image.shape == (6, 3, SIZE, SIZE) and len(w.unique()) == 1
    assert all(not torch.equal(image[i], image[j]) for i in range(6) for j in range(i))
    g = gen()
    drawn = torch.stack([Overlay(bank(), (0.0, 0.5), SIZE).sample(1, g)[1][0] for _ in range(200)])
    assert scipy.stats.kstest(drawn.numpy(), "uniform", (0, 0.5)).pvalue > 1e-3
    with pytest.raises(AssertionError, match="bank"):
        Overlay(torch.zeros(3, 8, 8))


def test_random_resized_crop_statistics() -> None:
    """A bank whose colours are x, y and the image's number tells where each crop was taken."""
    side, n, size = 64, 6000, 8
    place = (torch.arange(side) + 0.5) / side
    maps = torch.stack([place.expand(side, side), place[:, None].expand(side, side)]).expand(4, 2, side, side)
    number = torch.arange(4.0)[:, None, None, None].expand(4, 1, side, side)
    out = random_resized_crop(torch.cat([maps, number], dim=1), n, size, gen(2))
    assert out.shape == (n, 3, size, size)
    x, y, index = out[:, 0, 4], out[:, 1, :, 4], out[:, 2, 0, 0].round().long()
    width, height = (x[:, 4] - x[:, 3]) * size, (y[:, 4] - y[:, 3]) * size  # from the middle, off the clamped border
    assert abs((width < 0).float().mean() - 0.5) < 0.03 and (height > 0).all()  # flipped left-right, never upside down
    assert scipy.stats.chisquare(torch.bincount(index, minlength=4).numpy()).pvalue > 1e-3
    width, middle = width.abs(), torch.stack([(x[:, 3] + x[:, 4]) / 2, (y[:, 3] + y[:, 4]) / 2], 1)
    area, ratio = width * height, width / height
    assert area.min() > 0.0799 and area.max() < 1.001 and area.max() > 0.97
    assert ratio.min() > 0.7499 and ratio.max() < 1.3341
    low = middle - torch.stack([width, height], 1) / 2
    assert low.min() > -1e-3 and (middle + torch.stack([width, height], 1) / 2).max() < 1 + 1e-3
    free = area < 0.75  # no ratio sticks out there: uniform in area and in the ratio's logarithm
    assert scipy.stats.kstest(area[free].numpy(), "uniform", (0.08, 0.67)).pvalue > 1e-3
    wide = (math.log(3 / 4), 2 * math.log(4 / 3))
    assert scipy.stats.kstest(ratio[free].log().numpy(), "uniform", wide).pvalue > 1e-3
    room = (low / (1 - torch.stack([width, height], 1)))[free]
    assert all(scipy.stats.kstest(room[:, k].numpy(), "uniform").pvalue > 1e-3 for k in range(2))


# ------------------------------------------------------------------------------------------------ combinations


def test_compose_applies_its_families_in_order() -> None:
    x, family = pictures(), Compose(Shift(), Flip())
    tau = (torch.tensor([[0, 1]]).expand(5, 2), torch.ones(5, dtype=torch.long))
    assert torch.equal(family(x, tau), Shift()(x, tau[0]).flip(-1))
    assert not torch.equal(family(x, tau), Shift()(x.flip(-1), tau[0]))
    assert family.name == "shift+flip"


def test_compose_differentiates_the_last_family() -> None:
    x, family = smooth(), Compose(Shift(), Blur(), Rotate())
    tau = family.sample(5, gen())
    inner = Blur()(Shift()(x, tau[0]), tau[1])
    way = family.direction(gen())
    assert torch.equal(family.tangent(x, tau, way), Rotate().tangent(inner, tau[2], torch.tensor(1.0)))
    assert torch.equal(Compose(Rotate()).tangent(x, tau[2:], way), Rotate().tangent(x, tau[2], torch.tensor(1.0)))


def test_mixture_frequencies() -> None:
    which, parts = Mixture((Identity(), 0.2), (Shift(), 0.5), (Conv(), 0.3)).sample(5000, gen())
    counts = torch.bincount(which, minlength=3)
    assert scipy.stats.chisquare(counts.numpy(), [1000, 2500, 1500]).pvalue > 1e-3
    assert [len(p) for p in parts] == [5000] * 3
    with pytest.raises(AssertionError, match="sum to 1"):
        Mixture((Identity(), 0.2), (Shift(), 0.5))


def test_mixture_selects_per_state() -> None:
    family, x = Mixture((Identity(), 0.2), (Shift(), 0.5), (Rotate(), 0.3)), pictures(3)
    parts = family.sample(3, gen())[1]
    tau, way = (torch.tensor([2, 0, 1]), parts), family.direction(gen())
    want = [Rotate()(x, parts[2])[0], x[1].float(), Shift()(x, parts[1])[2].float()]
    assert torch.equal(family(x, tau), torch.stack(want))
    turn, move = Rotate().tangent(x, parts[2], way[2]), Shift().tangent(x, parts[1], way[1])
    assert torch.equal(family.tangent(x, tau, way), torch.stack([turn[0], torch.zeros(9, SIZE, SIZE), move[2]]))
    assert family.name == "identity|shift|rotate" and family.support() is None


def test_a_mixture_may_name_one_family_twice() -> None:
    shift = Shift()
    family, x = Mixture((shift, 0.5), (shift, 0.5)), pictures(2)
    tau = (torch.tensor([0, 1]), (torch.tensor([[4, 4], [0, 0]]), torch.tensor([[0, 0], [4, 4]])))
    assert torch.equal(family(x, tau), x.float())
    left, down = torch.tensor(0), torch.tensor(3)
    want = [shift.tangent(x, shift.identity(2), way)[i] for i, way in enumerate((left, down))]
    assert torch.equal(family.tangent(x, tau, (left, down)), torch.stack(want))


def test_a_module_becomes_a_function_of_its_seeds() -> None:
    family, x = FromModule(Noise(), per_sample=True), torch.zeros(4, 9, 3, 3)
    tau, state = torch.tensor([11, 12, 11, 13]), torch.get_rng_state()
    out = family(x, tau)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(out, family(x, tau))
    assert torch.equal(out[0], out[2]) and not torch.equal(out[0], out[1])
    assert all(len(image.unique()) == 1 for image in out)  # all frames share the number
    drawn = torch.rand(1, generator=gen(11))
    assert torch.allclose(out[0], 255 * drawn)  # the module sees 0-1
    assert family.name == "noise" and len(family.sample(1000, gen()).unique()) == 1000


def test_a_module_that_draws_per_sample_is_called_once_per_frame() -> None:
    calls: list[int] = []

    class Counting(Noise):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return super().forward(x)

    family, x = FromModule(Counting()), torch.zeros(4, 9, 3, 3)
    out = family(x, torch.tensor([11, 12, 13, 14]))
    assert calls == [4, 4, 4]
    assert torch.allclose(out[:, 0, 0, 0], 255 * torch.rand(4, generator=gen(11)))
    assert all(len(image.unique()) == 1 for image in out)
