"""Encoders, twin critic, actor and policies: sizes, initialisation, plain torch beside them, and the dual batches."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution

from unmoved.agent import Agent, Batch
from unmoved.config import Config, make_config
from unmoved.losses import Draw
from unmoved.methods import make_method
from unmoved.networks import ClippedNormal, LayerNorm, Networks, TanhNormal, TanhNormalDMGB

PRESETS = ("drq", "drqv2", "dmgb")
each = pytest.mark.parametrize("preset", PRESETS)


def gen(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@lru_cache
def full(preset: str) -> Networks:
    """As in the paper: 9 channels of 84 x 84, |A| = 6. Not to be changed."""
    torch.manual_seed(0)
    return Networks(make_config("cheetah_run", preset=preset), (9, 84, 84), 6)


def tiny(preset: str, **changes: Any) -> Config:
    strides = (2, 1, 1) if preset == "dmgb" else (2, 1)
    small = {"filters": 4, "hidden_dim": 16, "feature_dim": 8, "image_size": 32, "batch_size": 4, "strides": strides}
    return make_config("cheetah_run", preset=preset, **(small | changes))


def noisy(nets: nn.Module, seed: int = 0) -> None:
    """Biases and norms away from 0 and 1, so that a forgotten one shows."""
    g = gen(seed)
    with torch.no_grad():
        for p in nets.parameters():
            p += 0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype)


def make(preset: str, **changes: Any) -> tuple[Config, Networks]:
    config = tiny(preset, **changes)
    torch.manual_seed(1)
    nets = Networks(config, (9, 32, 32), 2)
    noisy(nets)
    return config, nets


def pictures(n: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (n, 9, 32, 32), generator=gen(seed), dtype=torch.uint8)


# ------------------------------------------------------------------------------------------------ sizes

COUNTS = {  # convolutions, head, actor's trunk, one Q
    "drq": (30_368, 1_960_150, 1_114_124, 1_108_993),
    "drqv2": (30_368, 1_960_150, 1_107_974, 1_108_993),
    "dmgb": (95_104, 1_411_500, 1_165_324, 1_160_193),
}


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@each
def test_parameter_counts(preset: str) -> None:
    nets, (convs, head, trunk, q) = full(preset), COUNTS[preset]
    assert count(nets.encoder) == convs
    assert count(nets.critic.head) == count(nets.actor.head) == head
    assert (count(nets.actor.trunk), count(nets.critic.q)) == (trunk, 2 * q)
    assert count(nets) == 2 * (convs + head + 2 * q) + head + trunk + 1  # online, target, actor, temperature


@each
def test_feature_sizes(preset: str) -> None:
    flat, size = {"drq": (39_200, 50), "drqv2": (39_200, 50), "dmgb": (14_112, 100)}[preset]
    nets = full(preset)
    features = nets.encoder(torch.zeros(1, 9, 84, 84, dtype=torch.uint8))
    assert features.shape == (1, flat) and nets.critic.head.linear.weight.shape == (size, flat)
    assert nets.critic(features, torch.zeros(1, 6)).shape == (2, 1)
    assert nets.actor(features, torch.tensor(0.1)).mu.shape == (1, 6)


# ------------------------------------------------------------------------------------------------ initialisation


def assert_orthogonal(matrix: Tensor, gain: float) -> None:
    short = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    assert torch.allclose(short @ short.T, gain**2 * torch.eye(len(short)), atol=1e-4)


@each
def test_linear_layers_are_orthogonal_and_biases_zero(preset: str) -> None:
    nets = full(preset)
    for head in (nets.critic.head, nets.actor.head):
        assert_orthogonal(head.linear.weight, 1.0)
        assert (head.norm.weight == 1).all()
    for mlp in (nets.critic.q, nets.actor.trunk):
        assert [len(w) for w in mlp.weights] == [2 if mlp is nets.critic.q else 1] * 3
        for weight in (copy for w in mlp.weights for copy in w):
            assert_orthogonal(weight, 1.0)
    assert not any(p.any() for name, p in nets.named_parameters() if "bias" in name)


@each
def test_nothing_is_tied_that_should_not_be(preset: str) -> None:
    nets = full(preset)
    assert not torch.equal(nets.critic.head.linear.weight, nets.actor.head.linear.weight)
    assert all(not torch.equal(w[0], w[1]) for w in nets.critic.q.weights)


@pytest.mark.parametrize("preset", ["drq", "drqv2"])
def test_convolutions_are_orthogonal_on_the_flat_kernel(preset: str) -> None:
    for conv in full(preset).encoder.convs:
        assert_orthogonal(conv.weight.flatten(1), math.sqrt(2))
        assert conv.weight[..., 0, 0].any()


def test_dmgbs_convolutions_are_delta_orthogonal() -> None:
    convs = full("dmgb").encoder.convs
    assert len(convs) == 11
    for conv in convs:
        off = torch.ones(3, 3, dtype=torch.bool)
        off[1, 1] = False
        assert not conv.weight[..., off].any()
        assert_orthogonal(conv.weight[..., 1, 1], math.sqrt(2))


@each
def test_the_target_starts_as_a_copy(preset: str) -> None:
    nets = full(preset)
    for held, online in ((nets.target.encoder, nets.encoder), (nets.target.critic, nets.critic)):
        for a, b in zip(held.parameters(), online.parameters(), strict=True):
            assert torch.equal(a, b) and a is not b and not a.requires_grad and b.requires_grad
    assert nets.log_alpha.exp().item() == pytest.approx(0.1)


# ------------------------------------------------------------------------------------------------ plain torch beside it


def plain_features(config: Config, nets: Networks, x: Tensor) -> Tensor:
    x = x / 255 - (0.5 if config.preset == "drqv2" else 0.0)
    for i, conv in enumerate(nets.encoder.convs):
        x = F.conv2d(x, conv.weight, conv.bias, stride=2 if i == 0 else 1)
        if config.preset != "dmgb" or i + 1 < len(nets.encoder.convs):  # dmgb: no ReLU before the projection
            x = F.relu(x)
    return x.permute(0, 2, 3, 1).flatten(1)  # row, column, filter


def plain_head(head: Any, features: Tensor) -> Tensor:
    y = F.linear(features, head.linear.weight, head.linear.bias)
    return torch.tanh(F.layer_norm(y, y.shape[-1:], head.norm.weight, head.norm.bias))


def plain_mlp(mlp: Any, copy: int, x: Tensor) -> Tensor:
    for i in range(3):
        x = F.linear(x, mlp.weights[i][copy], mlp.biases[i][copy, 0])
        x = F.relu(x) if i < 2 else x
    return x


@each
def test_forward_is_the_papers(preset: str) -> None:
    config, nets = make(preset)
    nets.double()
    x, action = pictures(3).double(), torch.rand(3, 2, generator=gen(), dtype=torch.float64)
    features = plain_features(config, nets, x)
    assert torch.allclose(nets.encoder(x), features)
    joined = torch.cat([plain_head(nets.critic.head, features), action], dim=1)
    want = torch.stack([plain_mlp(nets.critic.q, i, joined)[:, 0] for i in range(2)])
    assert torch.allclose(nets.critic(features, action), want)
    out = plain_mlp(nets.actor.trunk, 0, plain_head(nets.actor.head, features))
    policy = nets.actor(features, torch.tensor(0.4, dtype=torch.float64))
    if preset == "drqv2":
        assert isinstance(policy, ClippedNormal) and policy.clip == 0.3
        assert torch.allclose(policy.mu, out.tanh()) and (policy.std == 0.4).all() and policy.std.shape == (3, 2)
        assert nets.actor(features, torch.tensor(0.4), clip=7.0).clip == 7.0
    else:
        assert type(policy) is {"drq": TanhNormal, "dmgb": TanhNormalDMGB}[preset]
        assert torch.allclose(policy.mu, out[:, :2])
        assert torch.allclose(policy.std, torch.exp(-10 + 6 * (out[:, 2:].tanh() + 1)))  # bounds [-10, 2]


def test_uint8_and_float_images_are_the_same() -> None:
    _, nets = make("drq")
    assert torch.equal(nets.encoder(pictures(3)), nets.encoder(pictures(3).float()))


def test_layer_norm() -> None:
    norm, x = LayerNorm(7), torch.randn(5, 7, generator=gen()) * 3 + 1
    noisy(norm)
    assert torch.allclose(norm(x), F.layer_norm(x, (7,), norm.weight, norm.bias), atol=1e-6)


def test_twins_are_independent() -> None:
    _, nets = make("drq")
    q = nets.critic(nets.encoder(pictures(3)), torch.zeros(3, 2))
    grads = torch.autograd.grad(q[0].sum(), list(nets.critic.q.parameters()))
    assert all(g[0].any() and not g[1].any() for g in grads)


# ------------------------------------------------------------------------------------------------ dual batches


def value(nets: Networks, x: Tensor, action: Tensor, t: int = 0) -> Tensor:
    n = len(x) - t
    return nets.critic(nets.encoder(x[:n], x[n:] if t else None), action, t)


@each
def test_dual_rows_are_the_directional_derivative(preset: str) -> None:
    """The last t rows are <dQ/dimage, tangent> as the authors compute it, and have no effect on the values."""
    config, nets = make(preset)
    nets.double()
    g, n, t = gen(2), 5, 3
    x, tangent = pictures(n).double(), 20 * torch.randn(t, 9, 32, 32, generator=g, dtype=torch.float64)
    action = torch.rand(n, 2, generator=g, dtype=torch.float64)
    dual = value(nets, torch.cat([x, tangent]), action, t)
    assert dual.shape == (2, n + t)
    assert torch.allclose(dual[:, :n], value(nets, x, action), rtol=0, atol=1e-12)
    other = value(nets, torch.cat([x, 1e3 * tangent.flip(0)]), action, t)
    assert torch.equal(other[:, :n], dual[:, :n])

    images = x[:t].clone().requires_grad_()
    joined = torch.cat([plain_head(nets.critic.head, plain_features(config, nets, images)), action[:t]], dim=1)
    for i in range(2):
        J = torch.autograd.grad(plain_mlp(nets.critic.q, i, joined).sum(), images, retain_graph=True)[0]
        slope = (J * tangent).sum((1, 2, 3))
        assert slope.abs().min() > 1e-4 and torch.allclose(dual[i, n:], slope)


@each
def test_gradient_of_the_derivative(preset: str) -> None:
    """d/dtheta of the squared derivative, against a difference along a random direction in theta."""
    _, nets = make(preset)
    nets.double()
    g = gen(3)
    x = torch.cat([pictures(3).double(), 20 * torch.randn(3, 9, 32, 32, generator=g, dtype=torch.float64)])
    action = torch.rand(3, 2, generator=g, dtype=torch.float64)
    params = [*nets.encoder.parameters(), *nets.critic.parameters()]
    way = [torch.randn(p.shape, generator=g, dtype=torch.float64) for p in params]

    def loss() -> Tensor:
        return value(nets, x, action, 3)[:, 3:].square().mean()

    grads = torch.autograd.grad(loss(), params, allow_unused=True)  # the last biases do not enter
    slope = sum((gr * w).sum() for gr, w in zip(grads, way, strict=True) if gr is not None)

    def moved(h: float) -> Tensor:
        with torch.no_grad():
            for p, w in zip(params, way, strict=True):
                p += h * w
            out = loss()
            for p, w in zip(params, way, strict=True):
                p -= h * w
        return out

    h = 1e-7
    assert abs(slope) > 1e-3
    assert ((moved(h) - moved(-h)) / (2 * h)).item() == pytest.approx(float(slope), rel=1e-3)


def test_a_constant_shift_of_the_image_has_no_bias_in_its_tangent() -> None:
    """Rows of zeros as tangents stay zero through every bias and the centring."""
    for preset in PRESETS:
        _, nets = make(preset)
        out = value(nets, torch.cat([pictures(2).float(), torch.zeros(2, 9, 32, 32)]), torch.ones(2, 2), 2)
        assert not out[:, 2:].any() and out[:, :2].all()


# ------------------------------------------------------------------------------------------------ tied convolutions


def make_agent(preset: str, **changes: Any) -> tuple[Agent, Batch, Draw]:
    config = tiny(preset, method="rad", **changes)
    agent = Agent(config, make_method(config), (9, 32, 32), 2)
    g = gen(5)
    batch = Batch(pictures(4), torch.rand(4, 2, generator=g), torch.rand(4, generator=g), torch.full((4,), 0.99),
                  pictures(4, 1))  # fmt: skip
    return agent, batch, Draw.sample(agent.method, 4, 2, g)


def copies(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(module: nn.Module, before: list[Tensor]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


@each
def test_the_actors_step_leaves_encoder_and_critic_alone(preset: str) -> None:
    agent, batch, draw = make_agent(preset)
    nets = agent.nets
    assert not [m for m in nets.actor.modules() if isinstance(m, nn.Conv2d)]  # one encoder, read by both
    encoder, critic, actor = copies(nets.encoder), copies(nets.critic), copies(nets.actor)
    agent.update_actor(agent.actor_features(batch, draw), draw, torch.tensor(0.5))
    assert same(nets.encoder, encoder) and same(nets.critic, critic) and not same(nets.actor, actor)


@each
def test_the_critics_step_trains_the_encoder_and_nothing_else(preset: str) -> None:
    agent, batch, draw = make_agent(preset)
    nets = agent.nets
    before = {k: copies(nets.get_submodule(k)) for k in ("encoder", "critic", "actor", "target")}
    agent.update(batch, draw, torch.tensor(0.5), actor=False, target=False)
    changed = {k for k, v in before.items() if not same(nets.get_submodule(k), v)}
    assert changed == {"encoder", "critic"}


@each
def test_polyak_rates(preset: str) -> None:
    agent, _, _ = make_agent(preset)
    nets, held = agent.nets, agent.nets.target
    noisy(nets.encoder, 1), noisy(nets.critic, 2)
    parts = {"encoder": (held.encoder, nets.encoder), "head": (held.critic.head, nets.critic.head),
             "q": (held.critic.q, nets.critic.q)}  # fmt: skip
    before = {k: copies(old) for k, (old, _) in parts.items()}
    agent.follow()
    rates = {"drq": (0.01, 0.01, 0.01), "drqv2": (1.0, 0.01, 0.01), "dmgb": (0.05, 0.05, 0.01)}[preset]
    for rate, (k, (new, online)) in zip(rates, parts.items(), strict=True):
        for b, n, o in zip(before[k], new.parameters(), online.parameters(), strict=True):
            assert torch.allclose(n, (1 - rate) * b + rate * o, atol=1e-7)


# ------------------------------------------------------------------------------------------------ policies


def gaussian(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = gen(seed)
    mu, std, noise = (torch.randn(64, 3, generator=g, dtype=torch.float64) for _ in range(3))
    return mu, std.abs() + 0.05, noise


@pytest.mark.parametrize("kind", [TanhNormal, TanhNormalDMGB])
def test_tanh_normal_density(kind: type[TanhNormal]) -> None:
    mu, std, noise = gaussian()
    action, log_pi = kind(mu, std).sample(noise)
    u = mu + std * noise
    assert torch.equal(action, torch.tanh(u)) and torch.equal(kind(mu, std).mean, mu.tanh())
    law = TransformedDistribution(Independent(Normal(mu, std), 1), TanhTransform(cache_size=1))
    if kind is TanhNormal:
        assert torch.allclose(log_pi, law.log_prob(action), atol=1e-6)
    else:  # the floor under the Jacobian
        want = Normal(mu, std).log_prob(u) - torch.log((1 - u.tanh().square()).clamp(min=0) + 1e-6)
        assert torch.allclose(log_pi, want.sum(-1))
        inner = u.abs().amax(1) < 2
        assert torch.allclose(log_pi[inner], law.log_prob(action)[inner], atol=1e-4)


def test_tanh_normal_is_stable_far_out() -> None:
    far = TanhNormal(torch.full((1, 1), 40.0, requires_grad=True), torch.full((1, 1), 0.1))
    log_pi = far.sample(torch.zeros(1, 1))[1]
    # log N(40; 40, .1) - log|1 - tanh^2| with 1 - tanh^2(u) -> 4 exp(-2u)
    assert log_pi.item() == pytest.approx(-math.log(0.1) - 0.5 * math.log(2 * math.pi) - math.log(4) + 80, rel=1e-5)
    floored = TanhNormalDMGB(far.mu, far.std).sample(torch.zeros(1, 1))[1]
    assert floored.item() == pytest.approx(-math.log(0.1) - 0.5 * math.log(2 * math.pi) - math.log(1e-6), rel=1e-5)


def test_tanh_normal_is_reparameterised() -> None:
    mu, std, noise = gaussian()
    mu.requires_grad_(), std.requires_grad_()
    action, _ = TanhNormal(mu, std).sample(noise)
    slope = 1 - action.detach().square()
    grads = torch.autograd.grad(action.sum(), (mu, std))
    assert torch.allclose(grads[0], slope) and torch.allclose(grads[1], slope * noise)
    held = TanhNormal(mu, std).detach()
    assert not held.mu.requires_grad and not held.std.requires_grad
    assert type(TanhNormalDMGB(mu, std).detach()) is TanhNormalDMGB


def test_clipped_normal_clips_noise_and_passes_gradients() -> None:
    mu = torch.tensor([[0.0, 0.9, -0.95, 0.5]], dtype=torch.float64, requires_grad=True)
    noise = torch.tensor([[0.1, 5.0, -5.0, -5.0]], dtype=torch.float64)
    action, log_pi = ClippedNormal(mu, torch.ones_like(mu), clip=0.3).sample(noise)
    want = torch.tensor([[0.1, 1 - 1e-6, -1 + 1e-6, 0.2]], dtype=torch.float64)  # 0.9 + 0.3 and -0.95 - 0.3 are clamped
    assert torch.allclose(action, want, atol=1e-12) and torch.equal(log_pi, torch.zeros(1, dtype=torch.float64))
    assert torch.equal(torch.autograd.grad(action.sum(), mu)[0], torch.ones_like(mu))  # 1, also where clamped
    held = ClippedNormal(mu, torch.ones_like(mu), 0.3).detach()
    assert not held.mu.requires_grad and held.clip == 0.3 and torch.equal(held.mean, mu)


# ------------------------------------------------------------------------------------------------ precision


@each
def test_bf16_keeps_parameters_and_outputs_in_fp32(preset: str) -> None:
    _, nets = make(preset)
    _, half = make(preset, precision="bf16")
    half.load_state_dict(nets.state_dict())
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    x, action = pictures(16), torch.rand(16, 2, generator=gen())
    rows = torch.cat([x.float(), x.float() - x.float().roll(1, 3)])
    want, got = value(nets, rows, action, 16), value(half, rows, action, 16)
    assert got.dtype == torch.float32 and not torch.equal(got, want)  # it is in use
    assert (got - want)[:, :16].abs().max() < 0.03 * want[:, :16].abs().max()
    error = (got - want)[:, 16:].abs() / want[:, 16:].square().mean().sqrt()
    assert error.median() < 0.05  # in few rows more: a ReLU switches
    assert nets.encoder(x).dtype == torch.float32 and half.encoder(x).dtype == torch.bfloat16
    policies = [n.actor(n.encoder(x), torch.tensor(0.2)) for n in (nets, half)]
    assert policies[1].mu.dtype == policies[1].std.dtype == torch.float32
    assert (policies[0].mu - policies[1].mu).abs().max() < 0.05
    grads = torch.autograd.grad(got.square().mean(), [*half.encoder.parameters(), *half.critic.parameters()])
    assert {g.dtype for g in grads} == {torch.float32}


def test_images_too_small_for_the_encoder() -> None:
    from unmoved.errors import UserError

    with pytest.raises(UserError, match="12 pixels are too small for 11 convolutions"):
        Networks(make_config(preset="dmgb"), (9, 12, 12), 2)
