"""Encoders, twin critic, actor and policies of DrQ, DrQ-v2 and DMControl-GB, from one set of parts.

Dual batches. Tangent prop needs dQ/dtau, a directional derivative. Every layer here is linear or pointwise except
LayerNorm, so instead of automatic differentiation a batch may carry `t` extra rows: the last t rows of a dual batch are
the tangents of its first t rows, and each layer maps both in one call (forward-mode differentiation by hand). A plain
backward pass through it then gives the second-order gradient, and value and derivative share every convolution.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unmoved.config import Config
from unmoved.errors import UserError
from unmoved.kernels import Windows, conv_stack


def value_rows(x: Tensor, t: int, dim: int) -> Tensor:
    """1 for the rows that are values, 0 for the last t, which are tangents; broadcasts against x."""
    n = x.shape[dim]
    shape = [n if d == dim else 1 for d in range(x.ndim)]
    return (torch.arange(n, device=x.device) < n - t).to(x.dtype).view(shape)


def add_constant(x: Tensor, constant: Tensor | float, t: int, dim: int = 0) -> Tensor:
    """To the values only: a constant has derivative 0."""
    return x + constant * value_rows(x, t, dim) if t else x + constant


def relu(x: Tensor, t: int, dim: int = 0) -> Tensor:
    """A tangent passes where its value does. One product, so that it fuses with what stands before it."""
    if t == 0:
        return F.relu(x)
    n = x.shape[dim] - t
    own = torch.arange(x.shape[dim], device=x.device) % n  # the value row of each row
    return x * (x.detach().index_select(dim, own) > 0)


def orthogonal_(weight: Tensor, gain: float = 1.0) -> None:
    nn.init.orthogonal_(weight, gain)


def delta_orthogonal_(weight: Tensor, gain: float) -> None:
    """All taps 0 but the centre one, an orthogonal matrix: DMControl-GB's initialisation."""
    with torch.no_grad():
        weight.zero_()
        centre = torch.empty(weight.shape[:2])
        nn.init.orthogonal_(centre, gain)
        weight[:, :, weight.shape[2] // 2, weight.shape[3] // 2] = centre


class Encoder(nn.Module):
    """3x3 convolutions without padding; images in grey levels (n, c, h, w) -> flat features (n, h' w' filters).

    Activations are channels-last, and so are the flat features: row, column, filter.
    """

    def __init__(self, config: Config, channels: int) -> None:
        super().__init__()
        self.strides, self.last_relu, self.centre = config.strides, config.last_relu, config.centre
        self.dtype = compute_dtype(config)
        self.fused = False  # run as the kernels of kernels.cu: the agent decides, who knows the device
        self.channels_last = True  # False is the plain way, for comparison
        inputs = [channels] + [config.filters] * (len(self.strides) - 1)
        layers = zip(inputs, self.strides, strict=True)
        self.convs = nn.ModuleList(nn.Conv2d(i, config.filters, 3, stride=s) for i, s in layers)
        init = delta_orthogonal_ if config.conv_init == "delta" else orthogonal_
        for conv in self.convs:
            assert isinstance(conv, nn.Conv2d) and conv.bias is not None
            init(conv.weight, gain=math.sqrt(2))
            nn.init.zeros_(conv.bias)

    def forward(self, x: Tensor | Windows, dx: Tensor | None = None) -> Tensor:
        """Images (n, c, h, w), and tangents dx (t, c, h, w) of the first t, give a dual batch of features."""
        convs = [c for c in self.convs if isinstance(c, nn.Conv2d)]  # all of them, for the type checker
        weights, biases = [c.weight for c in convs], [c.bias for c in convs if c.bias is not None]
        centre = 127.5 if self.centre else 0.0
        if self.fused:
            return conv_stack(x, dx, weights, biases, self.strides[0], self.last_relu, centre)
        assert isinstance(x, Tensor)
        t = 0 if dx is None else len(dx)
        dtype = self.dtype or weights[0].dtype
        # Grey levels are exact even in bf16; the scale of 1 / 255 is the first convolution's.
        # Channels last before the conversion: moving bytes is cheaper than moving floats.
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        x = x.contiguous(memory_format=layout).to(dtype)
        if self.centre:
            x = x - centre
        if dx is not None:
            x = torch.cat([x, dx.to(dtype)])
        # 9 input channels take a slow kernel on a GPU; with 16 the tensor cores do it.
        idle = -x.shape[1] % 16 if x.is_cuda and dtype == torch.bfloat16 else 0
        if idle:
            x = F.pad(x, (0, 0, 0, 0, 0, idle)).contiguous(memory_format=layout)
        for i, (weight, bias, stride) in enumerate(zip(weights, biases, self.strides, strict=True)):
            weight = F.pad(weight / 255, (0, 0, 0, 0, 0, idle)) if i == 0 else weight
            weight, bias = weight.to(dtype), bias.to(dtype)
            x = F.conv2d(x, weight, bias if t == 0 else None, stride)
            if t:
                x = add_constant(x, bias[:, None, None], t)
            if i + 1 < len(weights) or self.last_relu:
                x = relu(x, t)
        return x.permute(0, 2, 3, 1).flatten(1)  # no copy if channels are last


class LayerNorm(nn.Module):
    """Written out: forward-mode AD through torch's own followed by backward gives wrong gradients in torch 2.13."""

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor, t: int = 0) -> Tensor:
        value = x[: len(x) - t]
        centred = value - value.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.eps)
        unit = centred * scale
        out = unit * self.weight + self.bias
        if t == 0:
            return out
        d, unit, scale = x[len(x) - t :], unit[:t], scale[:t]
        d = scale * (d - d.mean(-1, keepdim=True) - unit * (unit * d).mean(-1, keepdim=True))
        return torch.cat([out, d * self.weight])


class Head(nn.Module):
    """Flat convolution features -> Linear, LayerNorm, tanh. The actor's and the critic's are separate."""

    def __init__(self, config: Config, inputs: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, config.feature_dim), LayerNorm(config.feature_dim)
        self.dtype = compute_dtype(config)
        orthogonal_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, t: int = 0) -> Tensor:
        weight = self.linear.weight
        size = len(weight)
        # 50 columns take a slow kernel on a GPU; with 64 the tensor cores do it.
        idle = -size % 64 if x.is_cuda and x.dtype == torch.bfloat16 else 0
        y = F.linear(x, F.pad(weight.to(x.dtype), (0, 0, 0, idle))).to(weight.dtype)[:, :size]
        y = self.norm(add_constant(y, self.linear.bias, t), t)
        if t == 0:
            return torch.tanh(y)
        value = torch.tanh(y[:-t])
        return torch.cat([value, (1 - value[:t].square()) * y[-t:]])


class MLP(nn.Module):
    """`copies` independent Linear-ReLU-Linear-ReLU-Linear networks in one batched product; last layer in fp32.

    (n, inputs) -> (copies, n, outputs). Twin critics are copies = 2, the actor's trunk is copies = 1.
    """

    def __init__(self, config: Config, inputs: int, outputs: int, copies: int) -> None:
        super().__init__()
        sizes = [inputs, config.hidden_dim, config.hidden_dim, outputs]
        self.weights = nn.ParameterList(torch.empty(copies, o, i) for i, o in pairwise(sizes))
        self.biases = nn.ParameterList(torch.zeros(copies, 1, o) for o in sizes[1:])
        self.dtype = compute_dtype(config)
        for weight in self.weights:
            for copy_ in weight.data:
                orthogonal_(copy_)

    def forward(self, x: Tensor, t: int = 0) -> Tensor:
        x = x.expand(len(self.weights[0]), *x.shape)
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            dtype = weight.dtype if i == last or self.dtype is None else self.dtype
            x = torch.bmm(x.to(dtype), weight.to(dtype).transpose(1, 2))
            x = add_constant(x, bias.to(dtype), t, dim=1)
            if i < last:
                x = relu(x, t, dim=1)
        return x


class Critic(nn.Module):
    """Twin Q on convolution features and action -> (2, n)."""

    def __init__(self, config: Config, inputs: int, action_dim: int) -> None:
        super().__init__()
        self.head = Head(config, inputs)
        self.q = MLP(config, config.feature_dim + action_dim, 1, copies=2)

    def forward(self, features: Tensor, action: Tensor, t: int = 0) -> Tensor:
        if t:
            action = torch.cat([action, torch.zeros_like(action[:t])])  # the action does not move with tau
        q: Tensor = self.q(torch.cat([self.head(features, t), action], dim=-1), t)
        return q.squeeze(-1)


@dataclass(frozen=True)
class TanhNormal:
    """DrQ's policy: action = tanh(mu + std * noise). mu is before the tanh; shapes (n, |A|)."""

    mu: Tensor
    std: Tensor

    def sample(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Action (n, |A|) and its log density (n,), from standard-normal noise."""
        u = self.mu + self.std * noise
        return torch.tanh(u), (self._normal(noise) - self._log_det(u)).sum(-1)

    def _normal(self, noise: Tensor) -> Tensor:
        return -0.5 * noise.square() - self.std.log() - 0.5 * math.log(2 * math.pi)

    def _log_det(self, u: Tensor) -> Tensor:
        return 2 * (math.log(2) - u - F.softplus(-2 * u))

    @property
    def mean(self) -> Tensor:
        return torch.tanh(self.mu)

    def detach(self) -> TanhNormal:
        return type(self)(self.mu.detach(), self.std.detach())


class TanhNormalDMGB(TanhNormal):
    """DMControl-GB's: the same but for a floor of 1e-6 under the Jacobian."""

    def _log_det(self, u: Tensor) -> Tensor:
        return torch.log(F.relu(1 - torch.tanh(u).square()) + 1e-6)


@dataclass(frozen=True)
class ClippedNormal:
    """DrQ-v2's policy: mu is an action already; noise is clipped to +-clip, the clamp is straight-through."""

    mu: Tensor
    std: Tensor
    clip: float
    eps: float = 1e-6

    def sample(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        action = self.mu + (self.std * noise).clamp(-self.clip, self.clip)
        inside = action.clamp(-1 + self.eps, 1 - self.eps)
        return action + (inside - action).detach(), torch.zeros_like(self.mu[:, 0])  # no entropy bonus in DDPG

    @property
    def mean(self) -> Tensor:
        return self.mu

    def detach(self) -> ClippedNormal:
        return ClippedNormal(self.mu.detach(), self.std, self.clip, self.eps)


Policy = TanhNormal | ClippedNormal


class Actor(nn.Module):
    """Convolution features -> policy."""

    def __init__(self, config: Config, inputs: int, action_dim: int) -> None:
        super().__init__()
        self.kind, self.bounds, self.clip = config.policy, config.log_std_bounds, config.std_clip
        outputs = action_dim if self.kind == "clipped" else 2 * action_dim
        self.head = Head(config, inputs)
        self.trunk = MLP(config, config.feature_dim, outputs, copies=1)

    def forward(self, features: Tensor, std: Tensor, clip: float | None = None) -> Policy:
        """`std` is the scheduled exploration scale () of DDPG; SAC learns its own."""
        out = self.trunk(self.head(features)).squeeze(0)
        if self.kind == "clipped":
            mu = torch.tanh(out)
            return ClippedNormal(mu, std.expand_as(mu), self.clip if clip is None else clip)
        mu, raw = out.chunk(2, dim=-1)
        low, high = self.bounds
        log_std = low + 0.5 * (high - low) * (torch.tanh(raw) + 1)
        return (TanhNormalDMGB if self.kind == "tanh_dmgb" else TanhNormal)(mu, log_std.exp())


class Target(nn.Module):
    """The target critic: a copy of encoder and critic that follows them by Polyak averaging."""

    def __init__(self, encoder: Encoder, critic: Critic) -> None:
        super().__init__()
        self.encoder, self.critic = copy.deepcopy(encoder), copy.deepcopy(critic)
        self.requires_grad_(False)


class Networks(nn.Module):
    """Everything that is learnt. The convolutions are one module, trained by the critic and read by the actor."""

    def __init__(self, config: Config, obs_shape: tuple[int, ...], action_dim: int) -> None:
        super().__init__()
        self.encoder = Encoder(config, obs_shape[0])
        try:
            with torch.no_grad():
                inputs = self.encoder(torch.zeros(1, *obs_shape)).shape[1]
        except RuntimeError:
            sentence = f"images of {obs_shape[-1]} pixels are too small for {len(config.strides)} convolutions"
            raise UserError(sentence) from None
        self.critic = Critic(config, inputs, action_dim)
        self.actor = Actor(config, inputs, action_dim)
        self.target = Target(self.encoder, self.critic)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.init_temperature)))


def compute_dtype(config: Config) -> torch.dtype | None:
    """The dtype of convolutions and hidden products; None: that of the parameters."""
    return torch.bfloat16 if config.precision == "bf16" else None
