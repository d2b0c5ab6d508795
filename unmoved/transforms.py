"""Image transformations f_tau with an explicit parameter tau.

A family never draws randomness when it is applied: `sample` draws the parameters, `family(x, tau)` is pure. Images are
(n, 3 * frames, h, w), uint8 or float, in grey levels 0-255; one tau serves the whole frame stack of a state. What only
moves pixels keeps the dtype; what computes new ones returns float. Everything is batched and stays on x's device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from unmoved import kernels

Tau = Any  # a tensor with the batch first, or a (nested) tuple of such tensors


def stack_taus(taus: Sequence[Tau]) -> Tau:
    """Concatenate parameters along the batch."""
    if isinstance(taus[0], Tensor):
        return torch.cat(list(taus))
    return tuple(stack_taus(part) for part in zip(*taus, strict=True))


def as_float(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.float()


def uniform(n: int, low: float, high: float, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, generator=generator, device=generator.device)


def integers(high: int, shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randint(high, shape, generator=generator, device=generator.device)


def column(values: Tensor, like: Tensor) -> Tensor:
    """(n,) -> (n, 1, 1, 1) in the dtype of the images."""
    return values.to(like.dtype)[:, None, None, None]


class Transformation:
    """A family f_tau. Subclasses give `sample` and `__call__`; the rest where it exists."""

    step: float = 1e-2  # of the finite difference behind `tangent`, in tau's units
    capturable: bool = True  # needs nothing from the host when applied, so that it can be part of a CUDA graph

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def sample(self, n: int, generator: Generator) -> Tau:
        """n independent parameters, one per state, on the generator's device."""
        raise TypeError(f"{self.name} does not say how its parameters are drawn")

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tau:
        """tau_0 with f_{tau_0}(x) = x."""
        raise TypeError(f"{self.name} has no identity")

    def __call__(self, x: Tensor, tau: Tau) -> Tensor:
        raise TypeError(f"{self.name} is not a transformation yet: write __call__")

    def direction(self, generator: Generator) -> Tensor:
        """The direction in tau in which `tangent` differentiates, one for the whole batch."""
        return torch.ones((), device=generator.device)

    def tangent(self, x: Tensor, tau: Tau, direction: Tensor) -> Tensor:
        """df_tau(x)/dtau along `direction`, as an image: here a central difference."""
        if not isinstance(tau, Tensor) or not tau.is_floating_point():
            raise TypeError(f"{self.name} has no continuous parameter, hence no tangent")
        h = self.step
        return (self(x, tau + h * direction) - self(x, tau - h * direction)) / (2 * h)

    def support(self) -> Tensor | None:
        """All parameters when there are finitely many (uniformly distributed), else None."""
        return None

    def window(self, tau: Tau) -> Tensor | None:
        """Where f_tau(x) is x seen through a window of its own size, borders repeated: the window's offset (n, 2)."""
        return None


class Identity(Transformation):
    def sample(self, n: int, generator: Generator) -> Tensor:
        return torch.zeros(n, 0, device=generator.device)

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(n, 0, device=device)

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        return x

    def window(self, tau: Tensor) -> Tensor:
        return torch.zeros(len(tau), 2, dtype=torch.long, device=tau.device)

    def tangent(self, x: Tensor, tau: Tensor, direction: Tensor) -> Tensor:
        return torch.zeros_like(as_float(x))

    def support(self) -> Tensor:
        return torch.zeros(1, 0)


class AtIdentity(Transformation):
    """A family held at its identity: its tangent is the one at the original state."""

    def __init__(self, family: Transformation) -> None:
        self.family, self.capturable = family, family.capturable

    @property
    def name(self) -> str:
        return f"{self.family.name} at identity"

    def sample(self, n: int, generator: Generator) -> Tau:
        return self.family.identity(n, generator.device)

    def __call__(self, x: Tensor, tau: Tau) -> Tensor:
        return self.family(x, tau)

    def direction(self, generator: Generator) -> Tensor:
        return self.family.direction(generator)

    def tangent(self, x: Tensor, tau: Tau, direction: Tensor) -> Tensor:
        return self.family.tangent(x, tau, direction)


def crop(x: Tensor, offset: Tensor, size: int) -> Tensor:
    """Per sample, the size x size window at (row, column) = offset (n, 2); beyond the border, the border repeats."""
    if kernels.built and x.is_cuda and x.dtype == torch.uint8 and size % 4 == 0:
        return kernels.crop_bytes(x, offset, size)
    n, c, h, w = x.shape
    rows = (torch.arange(size, device=x.device) + offset[:, :1]).clamp(0, h - 1)  # (n, size)
    columns = (torch.arange(size, device=x.device) + offset[:, 1:]).clamp(0, w - 1)
    index = (rows[:, :, None] * w + columns[:, None, :]).reshape(n, 1, -1).expand(n, c, -1)
    return x.reshape(n, c, -1).gather(2, index).reshape(n, c, size, size)


def one_pixel(direction: Tensor) -> Tensor:
    """0, 1, 2, 3 -> (row, column) offset (0, 1), (0, -1), (1, 0), (-1, 0): the content moves left, right, up, down."""
    # Arithmetic instead of a table: a table would be copied to the GPU each time, which a CUDA graph does not allow.
    row = (direction == 2).long() - (direction == 3).long()
    return torch.stack([row, (direction == 0).long() - (direction == 1).long()])


class Shift(Transformation):
    """Replicate-pad by `pad` and crop at an integer offset in {0..2 pad}^2: 81 shifts for pad 4, identity (4, 4)."""

    def __init__(self, pad: int = 4, tangent_form: str = "author") -> None:
        assert tangent_form in ("author", "printed")
        self.pad, self.tangent_form = pad, tangent_form

    def sample(self, n: int, generator: Generator) -> Tensor:
        return integers(2 * self.pad + 1, (n, 2), generator)

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.full((n, 2), self.pad, device=device)

    def window(self, tau: Tensor) -> Tensor:
        return tau - self.pad

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        return crop(x, self.window(tau), x.shape[-1])

    def direction(self, generator: Generator) -> Tensor:
        return integers(4, (), generator)

    def tangent(self, x: Tensor, tau: Tensor, direction: Tensor) -> Tensor:
        """`author`: the view, moved by one more pixel, minus the view. `printed`: f_{tau+1}(x) - f_tau(x), which
        differs in the row or column that enters, where it shows pixels of x instead of a repeated border."""
        move = one_pixel(direction).expand(len(x), 2)
        view = self(x, tau)
        moved = crop(view, move, view.shape[-1]) if self.tangent_form == "author" else self(x, tau + move)
        return as_float(moved) - as_float(view)

    def support(self) -> Tensor:
        side = torch.arange(2 * self.pad + 1)
        return torch.cartesian_prod(side, side)


class Crop(Transformation):
    """A size x size window of a larger image (RAD: 84 of 100). The identity is the centre, as at evaluation."""

    def __init__(self, size: int = 84, source: int = 100) -> None:
        self.size, self.source = size, source

    def sample(self, n: int, generator: Generator) -> Tensor:
        return integers(self.source - self.size + 1, (n, 2), generator)

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.full((n, 2), (self.source - self.size) // 2, device=device)

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        assert x.shape[-1] == self.source, f"Crop expects {self.source} pixels, got {x.shape[-1]}"
        return crop(x, tau, self.size)

    def support(self) -> Tensor:
        side = torch.arange(self.source - self.size + 1)
        return torch.cartesian_prod(side, side)


class Translate(Transformation):
    """The image at a random place of a larger black canvas (RAD: 100 in 108). The identity is the centre."""

    def __init__(self, size: int = 108, source: int = 100) -> None:
        self.size, self.source = size, source

    def sample(self, n: int, generator: Generator) -> Tensor:
        return integers(self.size - self.source + 1, (n, 2), generator)

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.full((n, 2), (self.size - self.source) // 2, device=device)

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        assert x.shape[-1] == self.source, f"Translate expects {self.source} pixels, got {x.shape[-1]}"
        room = self.size - self.source
        return crop(F.pad(x, (room, room, room, room)), room - tau, self.size)

    def support(self) -> Tensor:
        side = torch.arange(self.size - self.source + 1)
        return torch.cartesian_prod(side, side)


class Overlay(Transformation):
    """(1 - w) x + w image, tau = (image (n, 3, h, w) in 0-255, w (n,)). One image for the whole frame stack.

    Images come from a bank (N, 3, h, w) by random resized crop (area .08-1, ratio 3/4-4/3) and flip. A fixed weight is
    the benchmark's; a range (low, high) draws one weight for the batch, the point where the mixing weight's tangent is
    taken. The tangent is df/dw = image - x.
    """

    def __init__(self, bank: Tensor, weight: float | tuple[float, float] = 0.5, size: int = 84) -> None:
        assert bank.ndim == 4 and bank.shape[1] == 3, "the bank is (N, 3, h, w)"
        self.bank, self.weight, self.size = bank, weight, size

    def sample(self, n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        low, high = self.weight if isinstance(self.weight, tuple) else (self.weight, self.weight)
        self.bank = self.bank.to(generator.device)  # moved once
        images = random_resized_crop(self.bank, n, self.size, generator)
        return images, uniform(1, low, high, generator).expand(n)

    def identity(self, n: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        return torch.zeros(n, 3, self.size, self.size, device=device), torch.zeros(n, device=device)

    def __call__(self, x: Tensor, tau: tuple[Tensor, Tensor]) -> Tensor:
        x = as_float(x)
        w = column(tau[1], x)
        return (1 - w) * x + w * self._image(x, tau)

    def tangent(self, x: Tensor, tau: tuple[Tensor, Tensor], direction: Tensor) -> Tensor:
        x = as_float(x)
        return direction.to(x.dtype) * (self._image(x, tau) - x)

    @staticmethod
    def _image(x: Tensor, tau: tuple[Tensor, Tensor]) -> Tensor:
        return tau[0].to(x.dtype).repeat(1, x.shape[1] // 3, 1, 1)


def random_resized_crop(bank: Tensor, n: int, size: int, generator: Generator) -> Tensor:
    """n images of the bank, cropped to a random box, resized and flipped at random: (n, 3, size, size) float."""
    tries = 10  # boxes that stick out are drawn again, at most so often; then the whole image is taken
    area = uniform(n * tries, 0.08, 1.0, generator).reshape(n, tries)
    ratio = uniform(n * tries, math.log(3 / 4), math.log(4 / 3), generator).reshape(n, tries).exp()
    box = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], dim=-1)  # (n, tries, 2): width, height in 0..1
    inside = (box <= 1).all(-1)
    first = inside.float().argmax(1)  # 0 where none is inside
    box = box.gather(1, first[:, None, None].expand(n, 1, 2)).squeeze(1)
    box = torch.where(inside.any(1, keepdim=True), box, torch.ones_like(box))
    place = torch.rand(n, 2, generator=generator, device=generator.device)
    centre = (2 * place - 1) * (1 - box)  # of the box, in grid_sample's [-1, 1]
    flip = 1.0 - 2.0 * integers(2, (n,), generator)
    zero = torch.zeros_like(flip)
    theta = torch.stack([box[:, 0] * flip, zero, centre[:, 0], zero, box[:, 1], centre[:, 1]], dim=1).reshape(n, 2, 3)
    index = integers(len(bank), (n,), generator)
    grid = F.affine_grid(theta, [n, 3, size, size], align_corners=False)
    return F.grid_sample(bank[index].to(grid.dtype), grid, align_corners=False, padding_mode="border")


class Conv(Transformation):
    """Random convolution as in DMControl-GB: a 3x3 kernel N(0, 1) per state, replicate border, sigmoid. No identity."""

    def sample(self, n: int, generator: Generator) -> Tensor:
        return torch.randn(n, 3, 3, 3, 3, generator=generator, device=generator.device)  # n, out, in, row, column

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        x = as_float(x)
        n, c, h, w = x.shape
        frames = c // 3
        padded = F.pad(x / 255, (1, 1, 1, 1), mode="replicate")
        # One grouped convolution: a group per (state, frame), its kernel repeated over the frames.
        kernels = tau.to(x.dtype)[:, None].expand(n, frames, 3, 3, 3, 3).reshape(n * c, 3, 3, 3)
        out = F.conv2d(padded.reshape(1, n * c, h + 2, w + 2), kernels, groups=n * frames)
        return out.reshape(n, c, h, w).sigmoid() * 255

    def direction(self, generator: Generator) -> Tensor:
        kernel = torch.randn(3, 3, 3, 3, generator=generator, device=generator.device)
        return kernel / kernel.norm()


class Rotate(Transformation):
    """Rotation by an angle U[-degrees, degrees] with probability p, bilinear, black outside. tau in degrees."""

    step = 0.5

    def __init__(self, degrees: float = 180.0, p: float = 1.0) -> None:
        self.degrees, self.p = degrees, p

    def sample(self, n: int, generator: Generator) -> Tensor:
        angle = uniform(n, -self.degrees, self.degrees, generator)
        return angle * (uniform(n, 0, 1, generator) < self.p)

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(n, device=device)

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        x = as_float(x)
        angle = tau.to(x.dtype) * (math.pi / 180)
        cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        theta = torch.stack([cos, -sin, zero, sin, cos, zero], dim=1).reshape(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


class Blur(Transformation):
    """Gaussian blur, sigma U[low, high] per state, odd kernel, reflecting border. tau = sigma in pixels."""

    def __init__(self, kernel: int = 5, sigma: tuple[float, float] = (0.1, 2.0)) -> None:
        assert kernel % 2 == 1, "the blur's kernel is odd"
        self.kernel, self.sigma = kernel, sigma

    def sample(self, n: int, generator: Generator) -> Tensor:
        return uniform(n, *self.sigma, generator)

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(n, device=device)

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        x, r = as_float(x), self.kernel // 2
        h, w = x.shape[-2:]
        distance = torch.arange(-r, r + 1, device=x.device, dtype=x.dtype)
        weight = torch.exp(-0.5 * (distance / tau.to(x.dtype)[:, None].clamp(min=1e-2)) ** 2)
        weight = weight / weight.sum(1, keepdim=True)  # (n, kernel)
        x = F.pad(x, (r, r, r, r), mode="reflect")
        x = sum(column(weight[:, k], x) * x[..., k : k + h, :] for k in range(self.kernel))  # type: ignore[assignment]
        return sum(column(weight[:, k], x) * x[..., k : k + w] for k in range(self.kernel))  # type: ignore[return-value]


class Cutout(Transformation):
    """A box of low..high pixels a side, black or of one random colour. tau = (top, left, height, width), colour."""

    def __init__(self, low: int = 10, high: int = 29, colour: bool = False, size: int = 84) -> None:
        self.low, self.high, self.colour, self.size = low, high, colour, size

    def sample(self, n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        side = self.low + integers(self.high - self.low + 1, (n, 2), generator)
        place = torch.rand(n, 2, generator=generator, device=generator.device)
        corner = (place * (self.size - side + 1)).floor().long()
        paint = integers(256, (n, 3), generator) if self.colour else torch.zeros_like(side).repeat(1, 2)[:, :3]
        return torch.cat([corner, side], dim=1), paint

    def identity(self, n: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        return torch.zeros(n, 4, dtype=torch.long, device=device), torch.zeros(n, 3, dtype=torch.long, device=device)

    def __call__(self, x: Tensor, tau: tuple[Tensor, Tensor]) -> Tensor:
        top, left, height, width = (t[:, None, None, None] for t in tau[0].unbind(1))
        row = torch.arange(x.shape[-2], device=x.device)[:, None]
        col = torch.arange(x.shape[-1], device=x.device)
        box = (row >= top) & (row < top + height) & (col >= left) & (col < left + width)
        paint = tau[1].to(x.dtype).repeat(1, x.shape[1] // 3)[:, :, None, None]
        return torch.where(box, paint, x)


def frames(x: Tensor) -> Tensor:
    """(n, 3 f, h, w) -> (n, f, 3, h, w): colours apart from frames."""
    return x.unflatten(1, (-1, 3))


def luma(x: Tensor) -> Tensor:
    """(n, f, 3, h, w) -> (n, f, 1, h, w)."""
    r, g, b = x.split(1, dim=2)
    return 0.2989 * r + 0.587 * g + 0.114 * b


class Coin(Transformation):
    """A family of two elements: tau = 1 with probability p, else the identity 0."""

    def __init__(self, p: float) -> None:
        self.p = p

    def sample(self, n: int, generator: Generator) -> Tensor:
        return (uniform(n, 0, 1, generator) < self.p).long()

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.zeros(n, dtype=torch.long, device=device)


class Grayscale(Coin):
    def __init__(self, p: float = 0.3) -> None:
        super().__init__(p)

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        x = as_float(x)
        grey = luma(frames(x)).expand_as(frames(x)).flatten(1, 2)
        return torch.where(tau[:, None, None, None] > 0, grey, x)


class Flip(Coin):
    """Left-right mirror. It changes the optimal policy of most control tasks."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(p)

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        return torch.where(tau[:, None, None, None] > 0, x.flip(-1), x)


class ColorJitter(Transformation):
    """Brightness, contrast, saturation factors U[1-s, 1+s] and a hue shift U[-h, h] of the circle, per state.

    tau (n, 5) = brightness, contrast, saturation, hue, order; order > .5 adjusts the contrast first, else last.
    """

    def __init__(self, strength: float = 0.4, hue: float = 0.5 * 255 / 360) -> None:
        self.strength, self.hue = strength, hue

    def sample(self, n: int, generator: Generator) -> Tensor:
        factors = uniform(3 * n, 1 - self.strength, 1 + self.strength, generator).reshape(n, 3)
        hue = uniform(n, -self.hue, self.hue, generator)
        return torch.cat([factors, hue[:, None], integers(2, (n, 1), generator).float()], dim=1)

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tensor:
        return torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], device=device).expand(n, 5)

    def direction(self, generator: Generator) -> Tensor:
        return F.one_hot(integers(4, (), generator), 5).float()

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        x = as_float(x)
        rgb = frames(x / 255)  # (n, f, 3, h, w)
        brightness, contrast, saturation, hue, order = (t.to(x.dtype)[:, None, None, None, None] for t in tau.unbind(1))

        def adjust_contrast(y: Tensor) -> Tensor:
            mean = y.mean((-2, -1), keepdim=True)
            return ((y - mean) * contrast + mean).clamp(0, 1)

        def adjust_hsv(y: Tensor) -> Tensor:
            h, s, v = rgb_to_hsv(y)
            h = (h + hue.squeeze(2)) % 1
            return hsv_to_rgb(h, (s * saturation.squeeze(2)).clamp(0, 1), (v * brightness.squeeze(2)).clamp(0, 1))

        out = torch.where(order > 0.5, adjust_hsv(adjust_contrast(rgb)), adjust_contrast(adjust_hsv(rgb)))
        return out.flatten(1, 2) * 255


def rgb_to_hsv(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(n, f, 3, h, w) in 0-1 -> hue in turns, saturation, value, each (n, f, h, w)."""
    r, g, b = x.unbind(2)
    high, low = x.amax(2), x.amin(2)
    span = (high - low).clamp(min=1e-12)
    hue = torch.where(high == r, (g - b) / span, torch.where(high == g, 2 + (b - r) / span, 4 + (r - g) / span))
    return (hue / 6) % 1, (high - low) / high.clamp(min=1e-12), high


def hsv_to_rgb(h: Tensor, s: Tensor, v: Tensor) -> Tensor:
    def channel(offset: float) -> Tensor:
        k = (offset + 6 * h) % 6
        return v - v * s * torch.minimum(k, 4 - k).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], dim=2)


class Compose(Transformation):
    """One family after the other; tau is the tuple of theirs. The tangent is taken in the last family's parameter."""

    def __init__(self, *families: Transformation) -> None:
        assert families, "Compose needs at least one family"
        self.families = families
        self.capturable = all(f.capturable for f in families)

    @property
    def name(self) -> str:
        return "+".join(f.name for f in self.families)

    def sample(self, n: int, generator: Generator) -> Tau:
        return tuple(f.sample(n, generator) for f in self.families)

    def identity(self, n: int, device: torch.device | str = "cpu") -> Tau:
        return tuple(f.identity(n, device) for f in self.families)

    def __call__(self, x: Tensor, tau: Tau) -> Tensor:
        for family, part in zip(self.families, tau, strict=True):
            x = family(x, part)
        return x

    def direction(self, generator: Generator) -> Tensor:
        return self.families[-1].direction(generator)

    def tangent(self, x: Tensor, tau: Tau, direction: Tensor) -> Tensor:
        inner = Compose(*self.families[:-1])(x, tau[:-1]) if len(self.families) > 1 else x
        return self.families[-1].tangent(inner, tau[-1], direction)


class Mixture(Transformation):
    """One of several families per state, with given probabilities: Mixture((Identity(), .2), (Shift(), .8)).

    tau = (which (n,), a parameter of every family). Every family is evaluated and one is kept.
    """

    def __init__(self, *parts: tuple[Transformation, float]) -> None:
        self.families = tuple(f for f, _ in parts)
        self.probabilities = tuple(p for _, p in parts)
        self.capturable = all(f.capturable for f in self.families)
        assert parts and abs(sum(self.probabilities) - 1) < 1e-6, "a mixture's probabilities sum to 1"

    @property
    def name(self) -> str:
        return "|".join(f.name for f in self.families)

    def sample(self, n: int, generator: Generator) -> Tau:
        u, which = uniform(n, 0, 1, generator), torch.zeros(n, dtype=torch.long, device=generator.device)
        for bound in itertools.accumulate(self.probabilities[:-1]):
            which += u >= bound
        return which, tuple(f.sample(n, generator) for f in self.families)

    def _select(self, tau: Tau, images: Callable[[int], Tensor]) -> Tensor:
        out = images(0)
        for i in range(1, len(self.families)):
            candidate = images(i)
            out = torch.where(tau[0][:, None, None, None] == i, candidate, out.to(candidate.dtype))
        return out

    def __call__(self, x: Tensor, tau: Tau) -> Tensor:
        return self._select(tau, lambda i: self.families[i](as_float(x), tau[1][i]))

    def direction(self, generator: Generator) -> Tau:
        return tuple(f.direction(generator) for f in self.families)

    def tangent(self, x: Tensor, tau: Tau, direction: Tau) -> Tensor:
        return self._select(tau, lambda i: self.families[i].tangent(x, tau[1][i], direction[i]))


class FromModule(Transformation):
    """Any nn.Module augmentation of (n, 3, h, w) images in 0-1 (kornia, torchvision), made a function of tau = seeds.

    Such a module draws from the global generator: each call seeds it (and restores it after), and each frame of a stack
    is passed with the same seed. `per_sample` calls the module once per state, for modules that draw one parameter for
    a whole batch; otherwise the batch's first seed decides. Reading the seed waits for the GPU: slower than a family.
    """

    capturable = False

    def __init__(self, module: nn.Module, per_sample: bool = False) -> None:
        self.module, self.per_sample = module, per_sample

    @property
    def name(self) -> str:
        return type(self.module).__name__.lower()

    def sample(self, n: int, generator: Generator) -> Tensor:
        return integers(2**31, (n,), generator)

    @torch.no_grad()
    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        x = as_float(x)
        if self.per_sample:
            return torch.cat([self._apply(x[i : i + 1], int(tau[i])) for i in range(len(x))])
        return self._apply(x, int(tau[0]))

    def _apply(self, x: Tensor, seed: int) -> Tensor:
        out = []
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            for frame in frames(x / 255).unbind(1):
                torch.manual_seed(seed)
                out.append(self.module(frame))
        return torch.cat(out, dim=1) * 255
