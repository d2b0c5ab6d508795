"""What the paper proves, checked numerically with the library's own terms, in float64.

Equations are numbered as in the paper and taken in their corrected forms (docs/deviations.md). Expectations are exact
wherever they can be: all 81 shifts are enumerated, actions are discrete, densities are integrated. Tables have n
transformations in rows and A actions in columns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from unmoved.agent import Agent, Batch, weigh
from unmoved.config import make_config
from unmoved.equations import (
    actor_bound,
    actor_loss,
    ddpg_actor_bound,
    discrete_kl,
    discrete_targets,
    expected_target,
    implicit_kl_terms,
    l_all,
    lemma_law,
    linear_excess,
    second_order_excess,
    soft_q,
    stationary_law,
    target_bound,
    target_variance_parts,
    variance_of_mean,
)
from unmoved.losses import (
    ActorPass,
    Bellman,
    CriticPass,
    Draw,
    Improve,
    Method,
    PolicyKL,
    QInvariance,
    TangentProp,
    Target,
    View,
    average_policy,
    gaussian_kl,
    original,
    policy_distance,
    samples,
)
from unmoved.methods import make_method
from unmoved.networks import ClippedNormal, LayerNorm, TanhNormal
from unmoved.transforms import Identity, Mixture, Overlay, Shift

TINY = {"image_size": 12, "strides": (2, 1), "filters": 3, "feature_dim": 5, "hidden_dim": 6}
SMALL = {"image_size": 24, "strides": (2, 1, 1, 1), "filters": 4, "feature_dim": 8, "hidden_dim": 16}
TWINS = ("min", "mean", "each")
pytestmark = pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")  # torch.func.jvp's


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def close(a: Tensor, b: Tensor | float, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b).expand_as(a), rtol=rtol, atol=atol)


def make_agent(recipe: Method | None = None, channels: int = 9, **changes: Any) -> Agent:
    """A small agent whose biases, norms and twins are all in general position."""
    config = make_config(**(TINY | changes))
    side = config.image_size
    agent = Agent(config, recipe or make_method(config), (channels, side, side), action_dim=2)
    with torch.no_grad():
        for p in agent.nets.parameters():
            p.add_(0.1 * torch.randn_like(p))
    agent.nets.target.encoder.load_state_dict(agent.nets.encoder.state_dict())  # DrQ-v2 shares it
    return agent


def make_batch(agent: Agent, B: int = 3) -> Batch:
    first = agent.nets.encoder.convs[0]
    shape = (2, B, first.in_channels, agent.config.image_size, agent.config.image_size)
    obs, next_obs = torch.randint(256, shape).double()
    discount = 0.9 * (torch.arange(B) > 0)  # the first transition terminates
    return Batch(obs, torch.rand(B, agent.action_dim) * 2 - 1, torch.randn(B), discount, next_obs)


def sample(agent: Agent, batch: Batch, seed: int = 0) -> Draw:
    torch.set_default_dtype(torch.float32)  # as in training; the fixture restores
    draw = Draw.sample(agent.method, len(batch.reward), agent.action_dim, Generator().manual_seed(seed))
    torch.set_default_dtype(torch.float64)
    return draw


def gradient(loss: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, params, retain_graph=True, materialize_grads=True))


def same(a: list[Tensor], b: list[Tensor], rtol: float = 1e-9) -> None:
    """Equal up to rtol of each tensor's largest entry."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        close(x, y, rtol=0, atol=rtol * (float(y.detach().abs().max()) + 1e-6))


def every_shift(view: View, B: int, prime: str = "") -> dict[str, Tensor]:
    """A draw's tau in which the view's i-th sample is the i-th of all shifts, for every state."""
    support = view.transform.support()
    assert support is not None and len(support) == view.samples
    return {s.key + prime: support[s.index].expand(B, 2) for s in samples(view)}


# ------------------------------------------------------------------------------------- discrete actions


def table(n: int, A: int) -> Tensor:
    """n random policies over A actions."""
    return torch.softmax(torch.randn(n, A), -1)


# ------------------------------------------------------------------------------------- critic: explicit and implicit


@pytest.mark.parametrize("a_Q", [0.0, 0.2, 1.7])
@pytest.mark.parametrize("law", ["uniform", "random"])
def test_lemma_1(a_Q: float, law: str) -> None:
    """Lemma 1 (Eqs. 5, 7): (Q(s) - y)^2 + a_Q E_nu (Q(f_nu(s)) - y)^2 = (a_Q + 1) E_nu^ (Q(f_nu^(s)) - y)^2 with
    P(nu^ = id) = (P(id) a_Q + 1) / (a_Q + 1), P(nu^ = tau) = P(tau) a_Q / (a_Q + 1), mu^ = id. Value and gradient."""
    nu, shift = View("nu", Shift(), 81), Shift()
    agent = make_agent(Method("lemma", Target(original), (Bellman(original), Bellman(nu)), (Improve(original),)))
    batch = make_batch(agent)
    B = len(batch.reward)
    support = shift.support()
    identity = [i for i in range(81) if torch.equal(support[i], shift.identity(1)[0])]
    assert identity == [40] and torch.equal(shift(batch.obs, shift.identity(B)), batch.obs)
    draw = Draw({"original0": torch.zeros(B, 0), "original0'": torch.zeros(B, 0)} | every_shift(nu, B), {}, {})
    draw.noise["original0'"] = torch.randn(B, 2)
    Y = agent.method.target(agent.target_pass(batch, draw, torch.zeros(())).y)
    with torch.no_grad():  # y(s', a') = r + gamma (min Q_bar - alpha log pi), written out
        nets, x = agent.nets, batch.next_obs
        action, log_pi = nets.actor(nets.encoder(x), torch.zeros(())).sample(draw.noise["original0'"])
        value = nets.target.critic(nets.target.encoder(x), action).amin(0) - nets.log_alpha.exp() * log_pi
    close(Y[0], batch.reward + batch.discount * value)
    critic = agent.critic_pass(batch, draw, Y)
    at = torch.stack([Bellman(s)(critic) for s in samples(nu)])  # (81, B)

    P = torch.full((81,), 1 / 81) if law == "uniform" else table(1, 81)[0]
    E_nu = P @ at
    if law == "uniform":
        close(E_nu, Bellman(nu)(critic))
    explicit = (Bellman(original)(critic) + a_Q * E_nu).mean()
    P_hat = lemma_law(P, 40, a_Q)
    close(P_hat.sum(), 1.0)
    close(P_hat[40], (P[40] * a_Q + 1) / (a_Q + 1))
    implicit = (a_Q + 1) * (P_hat @ at).mean()
    close(explicit, implicit)
    same(gradient(explicit, agent.critic_params), gradient(implicit, agent.critic_params))

    # mu^ = id: y at the shift's identity is y at s'.
    mu = View("mu", shift)
    agent.method = Method("mu hat", Target(mu), (Bellman(nu),), ())
    held = Draw({"mu0'": shift.identity(B)}, {}, {"mu0'": draw.noise["original0'"]})
    close(agent.method.target(agent.target_pass(batch, held, torch.zeros(())).y), Y)


def test_lemma_1_as_a_mixture() -> None:
    """Lemma 1: nu^ is Mixture(Identity, Shift) with weights 1 : a_Q."""
    a_Q, n = 0.2, 100_000
    nu_hat = Mixture((Identity(), 1 / (a_Q + 1)), (Shift(), a_Q / (a_Q + 1)))
    which, (_, tau) = nu_hat.sample(n, Generator().manual_seed(0))
    effective = torch.where(which[:, None] == 0, 4, tau)
    frequency = (effective == 4).all(1).double().mean()
    p = (a_Q / 81 + 1) / (a_Q + 1)
    assert abs(frequency - p) < 4 * math.sqrt(p * (1 - p) / n)
    counts = torch.bincount(9 * effective[:, 0] + effective[:, 1], minlength=81)
    others = torch.cat([counts[:40], counts[41:]]) / n
    q = a_Q / 81 / (a_Q + 1)
    assert ((others - q).abs() < 5 * math.sqrt(q * (1 - q) / n)).all()
    x = torch.rand(50, 3, 9, 9)
    assert torch.equal(nu_hat(x, (which[:50], (torch.zeros(50, 0), tau[:50]))), Shift()(x, effective[:50]))


def test_explicit_forms_coincide_where_the_critic_is_right() -> None:
    """Eqs. 3 and 7 differ by what the views are pulled to, sg Q(s, a) or y: nothing where Q(s, a) = y; elsewhere
    E_nu (Q_nu - y)^2 - E_nu (Q_nu - Q)^2 = (Q - y)^2 + 2 (Q - y) (E_nu Q_nu - Q), and Eq. 3's anchor is constant."""
    nu = View("nu", Shift(), 81)
    Q = torch.randn(81, 2, 5)
    anchor = torch.randn(5).expand(2, 5).clone().requires_grad_()
    critic = CriticPass({s.key: Q[s.index] for s in samples(nu)} | {"original0": anchor}, {}, anchor[:1].detach())
    close(QInvariance(nu)(critic), Bellman(nu)(critic))
    assert not QInvariance(nu)(critic).requires_grad
    critic.Y = critic.Y + torch.randn(1, 5)
    gap = (anchor - critic.Y).square() + 2 * (anchor - critic.Y) * (Q.mean(0) - anchor)
    close(Bellman(nu)(critic) - QInvariance(nu)(critic), gap.sum(0))


def test_l_all_has_drq_s_gradient() -> None:
    """Eqs. 55-58 (with 1/K sum y_k^2): 1/(MK) sum_mk (Q_m - y_k)^2 - l_DrQ = population variance of y_k, per twin."""
    agent = make_agent(method="drq", M=2, K=3)
    batch = make_batch(agent)
    draw, (term,) = sample(agent, batch), agent.method.critic
    y = agent.target_pass(batch, draw, torch.zeros(())).y  # (3, B)
    critic = agent.critic_pass(batch, draw, agent.method.target(y))
    l_drq = term(critic)
    every = torch.stack([term(dataclasses.replace(critic, Y=y_k[None])) for y_k in y]).mean(0)
    close(every - l_drq, 2 * y.var(0, correction=0), atol=1e-9)
    Q = torch.stack(list(critic.Q.values()))  # (2 views, 2 twins, B)
    close(every[0], torch.stack([l_all(Q[:, twin, 0], y[:, 0]) for twin in range(2)]).sum())
    assert y[:, 1:].var(0).min() > 1e-6
    same(gradient(every.mean(), agent.critic_params), gradient(l_drq.mean(), agent.critic_params))


def test_linear_critic() -> None:
    """Eqs. 32-39, all 81 shifts: Q = W_s f + W_a a has E_nu (Q(f_nu) - y)^2 = (Q(E f) - y)^2 + Tr(W_s^T W_s Var f)."""
    x = torch.randint(256, (1, 3, 7, 7)).double()
    f = Shift()(x.expand(81, -1, -1, -1), Shift().support()).flatten(1) / 255
    W_s, W_a, a, y = torch.randn(2, 1, f.shape[1]), torch.randn(2, 4), torch.randn(4), torch.randn(1, 1)
    nu = View("nu", Shift(), 81)
    Q = (W_s[:, 0] @ f.T + (W_a @ a)[:, None]).T  # (81, 2)
    loss = Bellman(nu)(CriticPass({s.key: Q[s.index, :, None] for s in samples(nu)}, {}, y))
    at_mean = (W_s[:, 0] @ f.mean(0) + W_a @ a - y[0]).square().sum()
    trace = torch.stack([linear_excess(W, f) for W in W_s]).sum()
    close(loss[0], at_mean + trace)
    assert trace > 0.01 * at_mean


@pytest.mark.parametrize("form", ["author", "printed"])
@pytest.mark.parametrize("direction", range(4))
def test_tangent_of_a_linear_critic(form: str, direction: int) -> None:
    """Eq. 15: for Q linear in the pixels the squared tangent is (Q(f_{tau+1}(s)) - Q(f_tau(s)))^2, at all 81 shifts.
    `author` moves the view by one more pixel, `printed` moves the state by tau + 1."""
    family, nu = Shift(4, form), View("nu", Shift())
    x, tau = torch.randint(256, (1, 3, 8, 8)).double().expand(81, -1, -1, -1), Shift().support()
    W, move = torch.randn(2, 3, 8, 8) / 255, torch.tensor([(0, 1), (0, -1), (1, 0), (-1, 0)][direction])

    def Q(images: Tensor) -> Tensor:
        return torch.einsum("tchw,nchw->tn", W, images)

    view = family(x, tau)
    moved = family(view, family.identity(81) + move) if form == "author" else family(x, tau + move)
    rows = CriticPass({"nu0": Q(view)}, {"nu0": Q(family.tangent(x, tau, torch.tensor(direction)))}, torch.zeros(1, 81))
    change = Q(moved) - Q(view)
    assert change.abs().min() > 0
    close(TangentProp(nu, twins="each")(rows), change.square().mean(0), atol=1e-10)
    close(TangentProp(nu, twins="mean")(rows), change.mean(0).square(), atol=1e-10)
    smaller = Q(view).argmin(0, keepdim=True)
    close(TangentProp(nu, twins="min")(rows), change.gather(0, smaller)[0].square(), atol=1e-10)


def overlay_agent(views: int) -> tuple[Agent, View, Batch]:
    """An agent with equal twins and a view that overlays images."""
    side = TINY["image_size"]
    mix = View("mix", Overlay(torch.zeros(1, 3, side, side), size=side), views)
    agent = make_agent(Method("mix", Target(original), (Bellman(mix), TangentProp(mix[0])), ()), last_relu=False)
    for p in (*agent.nets.critic.q.weights, *agent.nets.critic.q.biases):
        p.data[1] = p.data[0]
    return agent, mix, make_batch(agent, B=2)


def test_non_linear_critic_along_a_parameter() -> None:
    """Eqs. 40-41 to second order, l = (Q - y)^2, along overlay's mixing weight: E l(Q(f_w)) - l(Q(E f_w)) =
    Var[w] ((dQ/dw)^2 + (Q - y) d2Q/dw2) + o(Var[w]). Where Q(E f) = y it is Var[w] times tangent prop. The ratio of the
    two sides goes to 1 with Var[w] -> 0."""
    agent, mix, batch = overlay_agent(9)
    B, images = len(batch.reward), torch.randint(256, (len(batch.reward), 3, 12, 12)).double()

    def at(w: Tensor, Y: Tensor) -> CriticPass:
        draw = Draw({s.key: (images, w[s.index].expand(B)) for s in samples(mix)}, {"mix0": torch.ones(())}, {})
        return agent.critic_pass(batch, draw, Y)

    u = torch.arange(-4, 5) / 4
    middle = at(torch.full((9,), 0.3), torch.zeros(1, B))
    Q, dQ = middle.Q["mix0"][0].detach(), middle.dQ["mix0"][0].detach()
    h = 1e-5
    d2Q = (at(torch.full((9,), 0.3 + h), Q).dQ["mix0"] - at(torch.full((9,), 0.3 - h), Q).dQ["mix0"])[0] / (2 * h)
    for gap in (torch.zeros(B), 0.5 * d2Q.detach().sign()):
        Y = (Q - gap)[None]
        tangent = TangentProp(mix[0])(dataclasses.replace(middle, Y=Y))
        close(tangent, dQ.square())
        predicted = 2 * (tangent + gap * d2Q)  # two equal twins
        ratios = []
        for eps in (1e-2, 1e-4):
            w = 0.3 + eps * u
            excess = Bellman(mix)(at(w, Y)) - 2 * gap**2
            ratios.append(excess / (w.var(correction=0) * predicted))
        assert (ratios[1] - 1).abs().max() < 1e-5, ratios
        assert (ratios[1] - 1).abs().max() < (ratios[0] - 1).abs().max()
    assert (0.5 * d2Q.abs() > 0.05 * dQ.square()).all()  # the second term is not negligible where Q != y


def test_non_linear_critic_over_many_images() -> None:
    """Eqs. 40-41 to second order, Var f = H Lambda H^T of several dimensions: where Q(E f) = y,
    E l(Q(f)) = ||J_Q(E f) H Lambda^(1/2)||_F^2 + o(Var f). Ratio -> 1 as overlay's weight -> 0."""
    n = 8
    agent, mix, batch = overlay_agent(n)
    B, images = len(batch.reward), torch.randint(256, (n, 3, 12, 12)).double()
    gaps = []
    for eps in (1e-2, 1e-4):
        tau = {s.key: (images[s.index].expand(B, -1, -1, -1), torch.full((B,), eps)) for s in samples(mix)}
        draw = Draw(tau, {"mix0": torch.ones(())}, {})
        f = torch.stack([draw.image(batch.obs, s) for s in samples(mix)])  # (n, B, C, H, W)
        mean = f.mean(0).requires_grad_()
        Q = agent.nets.critic(agent.nets.encoder(mean), batch.action)[0]
        J = torch.autograd.grad(Q.sum(), mean)[0].flatten(1)
        loss = Bellman(mix)(agent.critic_pass(batch, draw, Q.detach()[None])) / 2  # two equal twins
        for b in range(B):
            frobenius = second_order_excess(J[b], f[:, b].detach().flatten(1))
            gaps.append(abs(float(loss[b].detach() / frobenius) - 1))
    assert max(gaps[B:]) < 1e-3 and max(gaps[B:]) < max(gaps[:B]) / 10, gaps


# ------------------------------------------------------------------------------------- actor: the implicit KL


def test_proposition_4_1() -> None:
    """Prop. 4.1 (Eqs. 8, 24-31) with its missing alpha and log Z: I2 = alpha E_mu [sum_a pi_mu log(pi_s/g_s) +
    KL(pi_mu || pi_s) + sum_a pi_mu log(g_s/g_mu)] - alpha E_mu log Z_mu; an invariant critic has no third term."""
    for seed in range(20):
        torch.manual_seed(seed)
        n, A, alpha = 6, 5, torch.rand(()) * 2 + 0.05
        logits = torch.randn(n, A, requires_grad=True)
        pi, pi_s = torch.softmax(logits, -1), table(1, A)
        for invariant in (True, False):
            Q_s = torch.randn(1, A)
            Q = Q_s.expand(n, A) if invariant else torch.randn(n, A)
            g_s = torch.softmax(Q_s / alpha, -1)
            log_Z = torch.logsumexp(Q / alpha, -1)
            I2 = actor_loss(pi, Q, alpha).mean()
            first, kl, third = implicit_kl_terms(pi, pi_s, Q, Q_s, alpha)
            close(kl, discrete_kl(pi, pi_s))
            right = (first + kl + third).mean()
            close(I2, alpha * right - alpha * log_Z.mean())
            close(torch.autograd.grad(I2, logits, retain_graph=True)[0],
                  alpha * torch.autograd.grad(right, logits, retain_graph=True)[0])  # fmt: skip
            if invariant:
                close(third, 0.0)
                only = discrete_kl(pi, g_s).mean()  # pi(.|s) = g(.|s)
                close(I2, alpha * only - alpha * log_Z.mean())
            else:
                assert (I2 - (alpha * (first + kl - log_Z).mean())).abs() > 1e-3
            assert (I2 - right).abs() > 1e-3  # as printed


def policies(n: int, dims: int) -> list[TanhNormal]:
    return [TanhNormal(torch.randn(1, dims), torch.rand(1, dims) + 0.3) for _ in range(n)]


def passed(**by_key: Any) -> ActorPass:
    return ActorPass(by_key, {}, {}, torch.zeros(()))


def test_kl_direction() -> None:
    """Eqs. 52-54: the gradient of KL(pi || sg) is that of the cross-entropy minus that of the entropy; KL(sg || pi) has
    the cross-entropy's alone. Integrals by Gauss-Hermite; log densities are sums over dimensions, which share nodes."""
    nodes, weights = (torch.as_tensor(v) for v in np.polynomial.hermite_e.hermegauss(60))
    weights = weights / weights.sum()
    p, q = policies(2, 3)
    leaves = [t.requires_grad_() for t in (p.mu, p.std, q.mu, q.std)]
    eta, mu = View("eta", Identity()), View("mu", Identity())

    def expected_log(at: TanhNormal, of: TanhNormal) -> Tensor:
        u = at.mu + at.std * nodes[:, None]  # (nodes, dims)
        full = TanhNormal(of.mu.expand_as(u), of.std.expand_as(u))
        return weights @ full.sample((u - of.mu) / of.std)[1]

    def grads(loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, leaves, materialize_grads=True))

    actor, zero = passed(eta0=p, mu0=q), torch.zeros(1, 3)
    cross, entropy = grads(-expected_log(p, q.detach())), grads(-expected_log(p, p))
    assert entropy[1].abs().min() > 0.1
    second = grads(PolicyKL(eta, mu, stop="second", units="exact")(actor).sum())
    for k in range(2):
        close(second[k], cross[k] - entropy[k], rtol=1e-9, atol=1e-9)
    same(second[2:], [zero, zero])
    first = grads(PolicyKL(eta, mu, stop="first", units="exact")(actor).sum())
    same(first[:2], [zero, zero])
    cross = grads(-expected_log(p.detach(), q))
    for k in (2, 3):
        close(first[k], cross[k], rtol=1e-9, atol=1e-9)
    both = grads(PolicyKL(eta, mu, stop="none", units="exact")(actor).sum())
    same(both, [a + b for a, b in zip(first, second, strict=True)])


def density(p: TanhNormal, u: Tensor) -> Tensor:
    """Of the action tanh(u) under a one-dimensional policy."""
    full = TanhNormal(p.mu.expand_as(u), p.std.expand_as(u))
    return full.sample((u - p.mu) / p.std)[1].exp()


def test_kl_of_squashed_policies() -> None:
    """tanh is a bijection: the integral of p log(p/q) over actions is the Gaussians' KL before it (`exact`); `author`
    is the mean over dimensions of the KL of N(tanh mu, std)."""
    u = torch.linspace(-9, 9, 200_001)[:, None]
    p, q = policies(2, 1)
    a, density_p, density_q = torch.tanh(u[:, 0]), density(p, u), density(q, u)
    inside = density_p > 1e-12
    ratio = (density_p[inside] / density_q[inside]).log()
    close(torch.trapezoid(density_p, a), 1.0, rtol=1e-5)
    close(torch.trapezoid(density_p[inside] * ratio, a[inside]), policy_distance(p, q, "exact")[0], rtol=1e-4)
    p, q = policies(2, 4)
    author = gaussian_kl(torch.tanh(p.mu), p.std, torch.tanh(q.mu), q.std).mean(-1)
    close(policy_distance(p, q, "author"), author)
    assert not torch.allclose(author, policy_distance(p, q, "exact") / 4)


def test_kl_to_the_averaged_policy() -> None:
    """Eqs. 9, 10, 46-51, for the mixture instead of the printed Gaussian: E_eta KL(pi_eta || pi_mu) >=
    KL(mixture || pi_mu) >= KL(moment-matched || pi_mu), whose mean and variance are the mixture's."""
    u, n = torch.linspace(-14, 14, 20_001), 4
    eta, mu = View("eta", Identity(), n), View("mu", Identity())

    def normal(p: TanhNormal) -> Tensor:
        return torch.exp(-0.5 * ((u - p.mu[0]) / p.std[0]).square()) / p.std[0] / math.sqrt(2 * math.pi)

    for seed in range(20):
        torch.manual_seed(seed)
        *many, last = policies(n + 1, 1)
        actor = passed(**{f"eta{i}": p for i, p in enumerate(many)}, mu0=last)
        left = PolicyKL(eta, mu, units="exact")(actor)[0]
        close(left, torch.stack([gaussian_kl(p.mu, p.std, last.mu, last.std) for p in many]).mean())
        mixture = torch.stack([normal(p) for p in many]).mean(0)
        log_ratio = (mixture.clamp(min=1e-300) / normal(last).clamp(min=1e-300)).log()
        middle = torch.trapezoid(mixture * log_ratio, u)
        right = PolicyKL(eta, mu, units="exact", average=True)(actor)[0]
        assert left > middle > right > 0
        matched, mean = average_policy(many), torch.trapezoid(mixture * u, u)
        close(matched.mu[0, 0], mean, rtol=1e-8, atol=1e-8)
        close(matched.std[0, 0].square(), torch.trapezoid(mixture * (u - mean).square(), u), rtol=1e-8)


@pytest.mark.parametrize("n", [2, 5])
def test_printed_averaged_policy_is_not_a_lower_bound(n: int) -> None:
    """Eq. 10 prints N(sum P l, sum P^2 s^2). For n identical N(0, 1) the averaged KL is 0 and the printed average's is
    (1/n - 1 + log n)/2 > 0; the library's average is the policy itself."""
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    for policy in (TanhNormal(zero, one), ClippedNormal(zero, one, 0.3)):
        eta, mu = View("eta", Identity(), n), View("mu", Identity())
        actor = passed(**{f"eta{i}": policy for i in range(n)}, mu0=policy)
        close(PolicyKL(eta, mu, units="exact")(actor), 0.0)
        close(PolicyKL(eta, mu, units="exact", average=True)(actor), 0.0)
        assert type(average_policy([policy] * n)) is type(policy)
    printed = gaussian_kl(zero, one / math.sqrt(n), zero, one)
    close(printed, 0.5 * (1 / n - 1 + math.log(n)))
    assert printed > 0


# ------------------------------------------------------------------------------------- variances


def test_variance_of_the_target_falls_as_1_over_K() -> None:
    """Eqs. 55-58: Var of Y = mean_k y(f_mu_k(s')) is Var[y]/K. All K-tuples of the 9 shifts by up to one pixel."""
    mu = View("mu", Shift(1), 9)
    agent = make_agent(Method("K", Target(mu), (Bellman(original),), ()), pad=1)
    batch = make_batch(agent)
    noise = torch.randn(3, 2)
    draw = Draw(every_shift(mu, 3, "'"), {}, {f"mu{k}'": noise for k in range(9)})
    y = agent.target_pass(batch, draw, torch.zeros(())).y[:, 2]  # (9,)
    assert y.var() > 1e-6
    for K in (1, 2, 3, 4):
        tuples = torch.cartesian_prod(*[y] * K).reshape(-1, K).T  # (K, 9^K)
        Y = Target(View("mu", Shift(1), K))(tuples)
        assert Y.shape == (1, 9**K)
        close(Y.mean(), y.mean())
        close(Y.var(correction=0), y.var(correction=0) / K)
        close(Target(View("mu", Shift(1), K), "paired")(tuples), tuples)


def test_variance_of_the_critic_loss() -> None:
    """Eqs. 55-58, critic: two paired terms (RAD+ as run) have exactly half of RAD's variance, two views with one shared
    target lie between; all keep its mean, and the averaged target lowers the mean by Var[y]/2 per twin."""
    Q, y, nu = torch.randn(2, 5), torch.randn(5), View("nu", Identity(), 2)
    m, k, n, l = torch.cartesian_prod(*[torch.arange(5)] * 4).T  # two pairs (m, k), (n, l)

    def loss(Y: Tensor) -> Tensor:
        return Bellman(nu)(CriticPass({"nu0": Q[:, m], "nu1": Q[:, n]}, {}, Y))

    rad = Bellman(nu[0])(CriticPass({"nu0": Q[:, m]}, {}, y[k][None]))
    paired = loss(Target(nu, "paired")(torch.stack([y[k], y[l]])))
    shared, drq = loss(y[k][None]), loss(Target(nu)(torch.stack([y[k], y[l]])))
    close(paired.var(correction=0), rad.var(correction=0) / 2)
    assert paired.var() < shared.var() < rad.var()
    close(paired.mean(), rad.mean())
    close(shared.mean(), rad.mean())
    close(drq.mean(), rad.mean() - y.var(correction=0))  # 2 twins x Var/2


def test_actor_variance_bound() -> None:
    """Prop. 5.1 (Eqs. 13, 59-72) times alpha^2: Var[I2] <= alpha^2/n E_mu (E_eta [D + c sqrt(2 D)])^2 for an invariant
    critic. Without alpha^2 it fails for alpha > 1; without invariance it fails."""
    ratios = []
    for seed in range(200):
        torch.manual_seed(seed)
        T, A, alpha, spread = 5, 4, torch.rand(()) * 3 + 0.01, 10 ** (-2 * torch.rand(()))
        pi = torch.softmax(torch.randn(1, A) + spread * torch.randn(T, A), -1)
        Q = torch.randn(1, A) * 2
        losses, bound = actor_loss(pi, Q.expand(T, A), alpha), alpha**2 * actor_bound(pi, torch.softmax(Q / alpha, -1))
        for n in (1, 3):
            variance = variance_of_mean(losses, n)
            assert 0 < variance <= bound / n and bound.isfinite()
            ratios.append(variance * n / bound)
    assert max(ratios) > 0.05  # not vacuous

    pi, g = table(5, 4), table(1, 4)
    alpha = torch.tensor(100.0)
    assert actor_loss(pi, (alpha * g.log()).expand(5, 4), alpha).var(correction=0) > actor_bound(pi, g)  # as printed
    still = pi[:1].expand(5, 4)  # an invariant policy: nothing left to vary, and the bound says so
    close(actor_loss(still, (alpha * g.log()).expand(5, 4), alpha).var(correction=0), 0.0, atol=1e-20)
    close(actor_bound(still, g), 0.0)
    assert actor_loss(still, torch.randn(5, 4), alpha).var() > 0  # a critic that is not invariant


@pytest.mark.parametrize("alpha", [0.0, 0.3, 2.0])  # 0: DDPG, gamma^2 (max|Q| sqrt(2 D))^2
def test_target_variance_bound(alpha: float) -> None:
    """Prop. 5.2 (Eqs. 14, 73-93) with max|y - r| and gamma alpha D: Var[E_a' y] <= 1/n E_mu (E_eta [max|y - r|
    sqrt(2 D) + gamma alpha D])^2 for an invariant target critic."""
    ratios, heat, gamma = [], torch.tensor(alpha), 0.9
    for seed in range(200):
        torch.manual_seed(seed)
        T, A, spread = 5, 4, 10 ** (-2 * torch.rand(()))
        pi = torch.softmax(torch.randn(1, A) + spread * torch.randn(T, A), -1)
        Q, reward = (torch.randn(1, A) * 2).expand(T, A), float(torch.randn(()))
        y = discrete_targets(pi, Q, heat, gamma, reward)
        size = (y - reward).abs().amax(-1)
        if alpha == 0:
            close(size, gamma * Q.abs().amax(-1))
        bound = target_bound(pi, size, heat, gamma)
        for n in (1, 3):
            variance = variance_of_mean((pi * y).sum(-1), n)
            assert 0 < variance <= bound / n and bound.isfinite()
            ratios.append(variance * n / bound)
        still = pi[:1].expand(T, A)
        y = discrete_targets(still, Q, heat, gamma, reward)
        close((still * y).sum(-1).var(correction=0), 0.0, atol=1e-20)
        close(target_bound(still, size, heat, gamma), 0.0)
    assert max(ratios) > 0.05


def test_target_variance_bound_needs_the_absolute_value() -> None:
    """Prop. 5.2 as printed, max(y - r): with Q = (0, -10) and alpha = 0 it bounds a positive variance by 0."""
    pi, Q, zero = table(5, 2), torch.tensor([0.0, -10.0]).expand(5, 2), torch.zeros(())
    y = discrete_targets(pi, Q, zero, 0.9, reward=1.0)
    close(target_bound(pi, (y - 1.0).amax(-1), zero, 0.9), 0.0)
    assert (pi * y).sum(-1).var() > 0.1


def test_split_of_the_target_s_variance() -> None:
    """Eqs. 73-93: Var_{mu,a'}[y] = E[(gamma advantage)^2] + Var_mu[E_a' y], the cross term is 0; the critic need not be
    invariant. Advantage: Q - alpha log pi minus its mean under pi."""
    pi, Q, alpha, gamma = table(6, 4), torch.randn(6, 4), torch.tensor(0.3), 0.9
    y = discrete_targets(pi, Q, alpha, gamma, reward=0.7)
    P = pi / 6  # of (mu, a')
    of_mu, mean = (pi * y).sum(-1, keepdim=True), (P * y).sum()
    total, actions, transformations = target_variance_parts(pi, y)
    close(total, (P * y.square()).sum() - mean.square())
    soft = Q - alpha * pi.log()
    advantage = soft - (pi * soft).sum(-1, keepdim=True)
    close(actions, (P * (gamma * advantage).square()).sum())
    close(total, actions + transformations)
    close((P * (y - of_mu) * (of_mu - mean)).sum(), 0.0)
    assert min(actions, transformations) > 0.01 * total


# ------------------------------------------------------------------------------------- the target's bias


def test_target_bias_contracts_under_the_stationary_law() -> None:
    """Eqs. 42-44: E[(E y - Q^pi)^2] <= gamma^2 E[(Q(f_mu(.)) - Q^pi)^2] over (s, a) of the stationary law, for an
    invariant policy and any critic. Off that law it can fail."""
    S, A, T, gamma, alpha = 4, 3, 5, 0.9, torch.tensor(0.2)

    for seed in range(30):
        torch.manual_seed(seed)
        P, reward, pi = torch.softmax(torch.randn(S, A, S), -1), torch.randn(S, A), table(S, A)
        Q_pi, law = soft_q(P, reward, pi, gamma, alpha), stationary_law(P, pi)
        close(expected_target(P, reward, pi, Q_pi[None], gamma, alpha), Q_pi)  # known exactly: a fixed point
        close(torch.einsum("ij,ijt,tk->tk", law, P, pi), law)
        close(law.sum(), 1.0)
        Q = Q_pi + torch.randn(T, S, A)
        bias = (law * (expected_target(P, reward, pi, Q, gamma, alpha) - Q_pi).square()).sum()
        assert bias <= gamma**2 * (law * (Q - Q_pi).square().mean(0)).sum()
        # A constant error makes it an equality: the factor gamma^2 is the best.
        bias = (law * (expected_target(P, reward, pi, Q_pi[None] + 3.0, gamma, alpha) - Q_pi).square()).sum()
        close(bias, gamma**2 * 9.0)

    # A state that is always left, where the critic is right, for one where it is wrong.
    P, pi, Q_pi = torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]]), torch.ones(2, 1), torch.zeros(2, 1)
    Q = torch.tensor([[[0.0], [1.0]]])
    error = (expected_target(P, torch.zeros(2, 1), pi, Q, gamma, alpha) - Q_pi).square()
    off = torch.tensor([[1.0], [0.0]])
    assert (off * error).sum() > gamma**2 * (off * (Q[0] - Q_pi).square()).sum()


# ------------------------------------------------------------------------------------- DDPG


def test_ddpg_kl_is_a_squared_distance() -> None:
    """Two policies with one std: KL = |mu_1 - mu_2|^2 / (2 std^2), mean over dimensions (author), sum (exact)."""
    for std in (1.0, 0.1):
        p, q = (ClippedNormal(torch.tanh(torch.randn(5, 3)), torch.tensor(std).expand(5, 3), 0.3) for _ in range(2))
        square = (p.mu - q.mu).square()
        close(policy_distance(p, q, "squared"), square.mean(-1))
        close(policy_distance(p, q, "author"), square.mean(-1) / (2 * std**2), atol=1e-10)
        close(policy_distance(p, q, "exact"), square.sum(-1) / (2 * std**2), atol=1e-10)


def ddpg_losses(Q: Tensor) -> Tensor:
    """Improve without temperature, (n,): the batch is the transformations."""
    actor = ActorPass({}, {"mu0": torch.zeros(len(Q))}, {"mu0": torch.stack([Q + 1, Q])}, torch.zeros(()))
    return Improve(View("mu", Identity()))(actor)


def test_ddpg_actor_variance_bound() -> None:
    """The DDPG actor's variance, corrected (the printed one is not homogeneous in Q): l = 1/2 M^T (-H) M + const with
    M = pi(f_mu(s)) - pi*, L = |H| has Var <= L^2/(8n) E |pi(f_nu) - pi(f_eta)|^2 |M_nu + M_eta|^2. Sharp in 1-D."""
    for dims in (1, 3):
        for seed in range(50):
            torch.manual_seed(seed)
            root, M = torch.randn(dims, dims), torch.randn(6, dims)
            H = -root @ root.T
            losses = ddpg_losses(1.3 + 0.5 * torch.einsum("ni,ij,nj->n", M, H, M))
            bound = ddpg_actor_bound(M, H)
            for n in (1, 2):
                variance = variance_of_mean(losses, n)
                if dims == 1:
                    close(variance, bound / n)
                assert 0 < variance <= bound / n * (1 + 1e-9)


def test_ddpg_taylor_form() -> None:
    """The implicit DDPG actor loss around the greedy action a*: -Q(s, pi(f_mu(s))) = -Q(a*) + 1/2 d^T (-H) d +
    1/2 m^T (-H) m + d^T (-H) m + O(3), d = pi(f_mu(s)) - pi(s), m = pi(s) - a*. The remainder falls as the cube."""
    dims = 3
    root, greedy, cubic = torch.randn(dims, dims), torch.randn(dims), torch.randn(dims)
    d, m = torch.randn(5, dims), torch.randn(dims)

    def Q(a: Tensor) -> Tensor:
        x = a - greedy
        return 0.7 - 0.5 * (x @ root).square().sum(-1) - (x.square() * x) @ cubic - x.pow(4).sum(-1)

    H = torch.func.hessian(Q)(greedy)
    close(torch.func.grad(Q)(greedy), 0.0)
    assert torch.linalg.eigvalsh(H).max() < 0

    def remainder(eps: float) -> Tensor:
        N = -H * eps**2
        second = 0.5 * ((d @ N) * d).sum(-1) + 0.5 * m @ N @ m + d @ N @ m
        return ddpg_losses(Q(greedy + eps * (m + d))) - (second - Q(greedy))

    close(remainder(1e-3) / remainder(5e-4), 8.0, rtol=2e-2)


# ------------------------------------------------------------------------------------- tangent prop


def tangent_agent(channels: int = 3, **changes: Any) -> tuple[Agent, list[TangentProp], Batch, Draw]:
    """Shift's tangent at two views and the mixing weight's on the first of them, for the three kinds of twins."""
    side = changes.get("image_size", TINY["image_size"])
    nu = View("nu", Shift(), 2)
    mix = View("mix", Overlay(torch.randint(256, (4, 3, side, side)), (0.0, 0.5), side), on=nu[0])
    terms = [TangentProp(v, twins=w) for v in (nu, mix) for w in TWINS]
    method = Method("tangent", Target(original), (*terms, Bellman((nu, original))), (Improve(original),))
    agent = make_agent(method, channels, **changes)
    batch = make_batch(agent, B=2)
    return agent, terms, batch, sample(agent, batch)


def tangent_values(agent: Agent, terms: list[TangentProp], batch: Batch, draw: Draw) -> Tensor:
    critic = agent.critic_pass(batch, draw, torch.zeros(1, 2))
    return torch.stack([term(critic).mean() for term in terms])


ENCODERS = [{"last_relu": r, "centre": c} for r in (True, False) for c in (True, False)]


@pytest.mark.parametrize("encoder", ENCODERS, ids=str)
def test_tangent_s_gradient_by_finite_differences(encoder: dict[str, bool]) -> None:
    """Eqs. 11, 15: the gradient of the squared tangent through the dual batch, for every parameter, is the central
    difference of its value. (Forward-mode AD through torch's layer_norm followed by backward would fail here.)"""
    agent, terms, batch, draw = tangent_agent(**encoder)
    values = tangent_values(agent, terms, batch, draw)
    assert values.min() > 1e-6
    exact = [gradient(v, agent.critic_params) for v in values]
    h = 1e-7
    with torch.no_grad():
        for k, p in enumerate(agent.critic_params):
            numeric, flat = torch.zeros(len(terms), p.numel()), p.view(-1)
            for i in range(p.numel()):
                here = flat[i].item()
                flat[i] = here + h
                up = tangent_values(agent, terms, batch, draw)
                flat[i] = here - h
                numeric[:, i] = (up - tangent_values(agent, terms, batch, draw)) / (2 * h)
                flat[i] = here
            for j in range(len(terms)):
                scale = max(float(g.abs().max()) for g in exact[j])
                close(exact[j][k].flatten(), numeric[j], rtol=1e-5, atol=1e-6 * scale)


NETWORKS = [
    dict(TINY, channels=3, last_relu=True, centre=True),
    dict(SMALL, channels=9),
    dict(SMALL, channels=9, preset="drqv2"),
    dict(SMALL, channels=9, preset="dmgb"),
]


@pytest.mark.parametrize("changes", NETWORKS, ids=lambda c: f"{c.get('preset', 'drq')}-{c['image_size']}")
def test_tangent_by_double_backward_and_jvp(changes: dict[str, Any]) -> None:
    """Eqs. 11, 15: the dual batch's dQ is torch.func.jvp's and the pixels' gradient times the tangent; its squared
    term's gradient, for every parameter, is double backward's."""
    agent, terms, batch, draw = tangent_agent(**changes)
    critic = agent.critic_pass(batch, draw, torch.zeros(1, 2))

    def Q(x: Tensor) -> Tensor:
        return agent.nets.critic(agent.nets.encoder(x), batch.action)

    for term in terms:
        value = torch.zeros(())
        for s in samples(term.nu):
            x, t = draw.image(batch.obs, s).clone().requires_grad_(), draw.tangent(batch.obs, s)
            primal, derivative = (v.detach() for v in torch.func.jvp(Q, (x.detach(),), (t,)))
            close(critic.Q[s.key], primal, rtol=1e-9)
            close(critic.dQ[s.key], derivative, rtol=1e-8, atol=1e-11)
            h = 1e-5
            numeric = (Q(x + h * t) - Q(x - h * t)) / (2 * h)
            close(critic.dQ[s.key], numeric, rtol=1e-4, atol=1e-4 * float(derivative.abs().max()))
            q = Q(x)
            chosen = {"min": [q.amin(0)], "mean": [q.mean(0)], "each": list(q)}[term.twins]
            J = [torch.autograd.grad(c.sum(), x, create_graph=True)[0] for c in chosen]
            value = value + torch.stack([(j * t).sum((1, 2, 3)).square() for j in J]).mean()
        ours = term(critic).mean()
        close(ours, value, rtol=1e-9)
        same(gradient(ours, agent.critic_params), gradient(value, agent.critic_params))


def test_tangent_of_the_mixing_weight() -> None:
    """Eq. 15 for overlay: dQ is the derivative of Q((1 - w) x + w image) in w itself, on the shifted view."""
    agent, _, batch, draw = tangent_agent()
    critic, h = agent.critic_pass(batch, draw, torch.zeros(1, 2)), 1e-6
    image, w = draw.tau["mix0"]
    w = w.double()

    def Q(weight: Tensor) -> Tensor:
        moved = Draw(draw.tau | {"mix0": (image, weight)}, draw.direction, draw.noise)
        return agent.critic_pass(batch, moved, torch.zeros(1, 2)).Q["mix0"]

    close(critic.dQ["mix0"], (Q(w + h) - Q(w - h)) / (2 * h), rtol=1e-6, atol=1e-7)
    assert critic.dQ["mix0"].abs().min() > 1e-3


def test_layer_norm_is_torch_s() -> None:
    """The written-out normalisation: torch's values and first derivative; its own derivatives by finite differences."""
    norm, x, v = LayerNorm(7), torch.randn(4, 7), torch.randn(4, 7)
    w, b = torch.randn(2, 7)

    def dual(x: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.func.functional_call(norm, {"weight": w, "bias": b}, (torch.cat([x, v]), 4))

    value, derivative = torch.func.jvp(lambda x: F.layer_norm(x, (7,), w, b), (x,), (v,))
    close(dual(x, v, w, b), torch.cat([value, derivative]))
    assert torch.autograd.gradcheck(dual, [t.requires_grad_() for t in (x, v, w.clone(), b.clone())])


@pytest.mark.parametrize("preset", ["drq", "drqv2", "dmgb"])
def test_a_network_that_ignores_its_image(preset: str) -> None:
    """Eqs. 1, 2: Q(f_tau(s), a) = Q(s, a) and pi(.|f_tau(s)) = pi(.|s) give zero tangent and zero KL, without
    gradients; a network that looks has neither."""
    agent = make_agent(preset=preset, method="ours", overlay_tangent_weight=0.1)
    batch, std = make_batch(agent), torch.tensor(0.5)
    draw = sample(agent, batch)
    tangents = [t for t in agent.method.critic if isinstance(t, TangentProp)]
    (kl,) = (t for t in agent.method.actor if isinstance(t, PolicyKL))
    assert len(tangents) == (2 if preset == "dmgb" else 1)

    def evaluate() -> tuple[list[Tensor], list[Tensor]]:
        critic = agent.critic_pass(batch, draw, torch.zeros(1, 3))
        actor = agent.actor_pass(agent.actor_features(batch, draw), draw, std)
        return [t(critic) for t in tangents], [kl.distance(actor, u) for u in ("author", "exact", "squared")]

    for value in (*evaluate()[0], *evaluate()[1]):
        assert value.min() > 0
    agent.nets.critic.head.linear.weight.data.zero_()
    agent.nets.actor.head.linear.weight.data.zero_()
    derivative, distance = evaluate()
    for value in derivative:
        close(value, 0.0)
        same(gradient(value.sum(), agent.critic_params), [torch.zeros_like(p) for p in agent.critic_params])
    for value in distance:
        close(value, 0.0)
        assert max(float(g.abs().max()) for g in gradient(value.sum(), agent.actor_params)) < 1e-12


# ------------------------------------------------------------------------------------- recipes


def losses(agent: Agent, batch: Batch, draw: Draw) -> tuple[list[Tensor], list[Tensor]]:
    """The critic's loss with its gradients, the actor's with its."""
    std = torch.tensor(0.5)
    Y = agent.method.target(agent.target_pass(batch, draw, std).y)
    critic = weigh(agent.method.critic, agent.critic_pass(batch, draw, Y))[0]
    actor = weigh(agent.method.actor, agent.actor_pass(agent.actor_features(batch, draw), draw, std))[0]
    return [critic, *gradient(critic, agent.critic_params)], [actor, *gradient(actor, agent.actor_params)]


PLAIN = {"kl_weight": 0.0, "tangent_weight": 0.0}
BARE = {"explicit_weight": 0.0, "kl_weight": 0.0}

# preset, recipe and the changes that reduce it, what it then is, factor of the critic's loss
REDUCTIONS: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    ("drq", {"method": "ours", **PLAIN}, {"method": "drq"}, 1.0),
    ("drq", {"method": "drq_kl", "kl_weight": 0.0}, {"method": "drq"}, 1.0),
    ("drq", {"method": "drq_kl_fixed", "kl_weight": 0.0}, {"method": "drq"}, 1.0),
    ("drq", {"method": "drq_tp", "tangent_weight": 0.0}, {"method": "drq"}, 1.0),
    ("drq", {"method": "drq_tp_original", "tangent_weight": 0.0}, {"method": "drq"}, 1.0),
    ("drq", {"method": "drq", "M": 1, "K": 1}, {"method": "rad"}, 1.0),
    ("drq", {"method": "drq", "bellman_reduce": "sum"}, {"method": "drq"}, 2.0),  # DrQ's release
    ("drq", {"method": "rad_plus", "M": 1}, {"method": "rad"}, 1.0),
    ("drq", {"method": "rad_plus_shared", "M": 1}, {"method": "rad"}, 1.0),
    ("drq", {"method": "rad", "weak": "identity"}, {"method": "sac"}, 1.0),
    ("drq", {"method": "svea", "strong_weight": 0.0}, {"method": "rad"}, 1.0),
    ("dmgb", {"method": "svea", "strong_weight": 0.0}, {"method": "rad"}, 1.0),
    ("dmgb", {"method": "ours", "strong_weight": 0.0, **PLAIN}, {"method": "drq"}, 1.0),
    ("drq", {"method": "drac_printed", **BARE}, {"method": "sac"}, 1.0),
    ("drq", {"method": "drac", **BARE}, {"method": "sac"}, 0.5),
    ("drqv2", {"method": "drqv2"}, {"method": "rad"}, 1.0),
    ("drqv2", {"method": "ours", **PLAIN}, {"method": "drqv2", "M": 2, "K": 2}, 1.0),
]


@pytest.mark.parametrize(
    ("preset", "changes", "base", "factor"), REDUCTIONS, ids=lambda v: v.get("method") if isinstance(v, dict) else None
)
def test_recipes_reduce(preset: str, changes: dict[str, Any], base: dict[str, Any], factor: float) -> None:
    """Eqs. 3-7, 11, 12: a recipe without its extra weights or samples is the simpler one. Same seed, same draw."""
    one, two = (make_agent(preset=preset, **c) for c in (changes, base))
    for p, q in zip(one.nets.parameters(), two.nets.parameters(), strict=True):
        assert torch.equal(p, q)
    batch = make_batch(one)
    ours, theirs = losses(one, batch, sample(one, batch)), losses(two, batch, sample(two, batch))
    assert theirs[0][0] > 0.01 and max(float(g.abs().max()) for g in theirs[1][1:]) > 1e-6
    same(ours[0], [factor * v for v in theirs[0]])
    same(ours[1], theirs[1])
    other = losses(two, batch, sample(two, batch, seed=1))
    assert other[0][0] != theirs[0][0]  # the draw matters


@pytest.mark.parametrize(
    ("preset", "method", "base"),
    [
        ("drq", "ours", "drq"),
        ("drq", "drq_kl_fixed", "drq"),
        ("drq", "drq_tp_original", "drq"),
        ("drq", "drac", "sac"),
        ("drq", "drac_printed", "sac"),
        ("drq", "svea", "rad"),
        ("dmgb", "ours", "drq"),
        ("dmgb", "ours_pda", "drq"),
    ],
)
def test_recipes_contain_the_simpler_one(preset: str, method: str, base: str) -> None:
    """Eqs. 3-7, 11, 12: on one draw, the shared summands are the simpler recipe's, whatever else the encoder pass
    carries (more views, tangent rows); the further ones, with their weights, change the loss."""
    one, two = (make_agent(preset=preset, method=m) for m in (method, base))
    batch = make_batch(one)
    draw = sample(one, batch)
    full, want = losses(one, batch, draw), losses(two, batch, draw)
    weights = {t.name: t.weight for t in (*two.method.critic, *two.method.actor)}

    def without(terms: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(dataclasses.replace(t, weight=weights.get(t.name, 0.0)) for t in terms)

    one.method = dataclasses.replace(one.method, critic=without(one.method.critic), actor=without(one.method.actor))
    assert len(one.method.critic) + len(one.method.actor) > len(weights)
    reduced = losses(one, batch, draw)
    same(reduced[0], want[0])
    same(reduced[1], want[1])
    assert (full[0][0] - want[0][0]).abs() + (full[1][0] - want[1][0]).abs() > 1e-6
