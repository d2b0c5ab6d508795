"""`unmoved verify`: both sides of what the paper proves, in numbers, on given or random networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Generator, Tensor

from unmoved.agent import stream_seed
from unmoved.config import Config
from unmoved.equations import (
    actor_bound,
    actor_loss,
    ddpg_actor_bound,
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
from unmoved.log import console
from unmoved.losses import average_policy, gaussian_kl, policy_distance
from unmoved.networks import Policy, TanhNormal
from unmoved.subjects import Subject, random_subject, run_subject
from unmoved.transforms import as_float

Randn = Callable[..., Tensor]
Sides = Iterable[tuple[Tensor, Tensor]]
EXACT, SHARP = 1e-7, 1e-2  # relative: of an identity, of a limit


@dataclass(frozen=True)
class Check:
    name: str
    equations: str
    left: float
    relation: str  # "=", "<=" or "->", equal to second order
    right: float
    note: str = ""
    printed: bool = False  # a misprint: it must not hold

    @property
    def slack(self) -> float:
        return self.right - self.left

    @property
    def holds(self) -> bool:
        scale = max(abs(self.left), abs(self.right))
        if self.relation == "<=":
            return self.left <= self.right + EXACT * scale
        if self.relation == "=":
            return abs(self.slack) <= EXACT * scale + 1e-12  # both sides may cancel to nothing
        return abs(self.slack) <= SHARP * scale

    @property
    def passed(self) -> bool:
        return self.holds != self.printed


def tightest(name: str, equations: str, relation: str, sides: Sides, note: str = "") -> Check:
    """Of several instances, the one nearest to failing."""
    pairs = [(float(left), float(right)) for left, right in sides]

    def strain(pair: tuple[float, float]) -> float:
        left, right = pair
        scale = max(abs(left), abs(right))
        if scale < 1e-20:
            return -2.0  # nothing varies: it holds without saying anything
        return (left - right) / scale if relation == "<=" else abs(left - right) / (scale + 1e-5 * (relation == "="))

    left, right = max(pairs, key=strain)
    return Check(name, equations, left, relation, right, note)


# ------------------------------------------------------------------------------------------------ on the networks


def critic_checks(s: Subject, a_Q: float = 0.2) -> Iterator[Check]:
    Q, y = s.critic(), s.targets()
    n, _, B = Q.shape
    P = torch.softmax(torch.randn(n, generator=s.generator), -1)
    error = (Q - y[s.identity]).square().sum(1)  # (n, B)
    sides: Sides = zip(
        error[s.identity] + a_Q * P @ error, (a_Q + 1) * lemma_law(P, s.identity, a_Q) @ error, strict=True
    )
    yield tightest("Lemma 1: explicit = (1 + a_Q) implicit", "3, 5, 7, 45", "=", sides, "in expectation over nu")
    views, K = Q[:2, 0], y[:3]
    sides = ((l_all(views[:, b], K[:, b]) - (views[:, b] - K[:, b].mean()).square().mean(), K[:, b].var(correction=0))
             for b in range(B))  # fmt: skip
    yield tightest("all pairs - DrQ's loss = Var y_k", "55-58", "=", sides, "1/K sum y_k^2; printed (sum y_k)^2 / K")
    sides = ((variance_of_mean(y[:, b], 2), y[:, b].var(correction=0) / 2) for b in range(B))
    yield tightest("Var of the mean of 2 targets = Var / 2", "55-58", "=", sides)
    yield tightest("RAD+: two paired losses halve RAD's variance", "55-58", "=", paired(Q, y))
    yield tightest("non-linear critic, to second order", "40-41", "->", second_order(s), "kappa is not specified")
    yield from tangent_checks(s)


def paired(Q: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    few = min(5, len(Q))
    m, k = torch.cartesian_prod(torch.arange(few), torch.arange(few)).T
    for b in range(Q.shape[-1]):
        losses = (Q[m, :, b] - y[k, b, None]).square().sum(1)
        yield variance_of_mean(losses, 2), losses.var(correction=0) / 2


def second_order(s: Subject, eps: float = 1e-5) -> Iterator[tuple[Tensor, Tensor]]:
    """E (Q(f) - Q(E f))^2 against ||J H Lambda^(1/2)||_F^2 for states drawn together by eps, so that Var f -> 0."""
    mean = s.pixels.mean(0)
    near = mean + eps * (s.pixels - mean)
    x = mean.clone().requires_grad_()
    Q = s.agent.nets.critic(s.agent.nets.encoder(x), s.batch.action)[0]
    J = torch.autograd.grad(Q.sum(), x)[0]
    with torch.no_grad():
        n, B = near.shape[:2]
        at = s.agent.nets.critic(s.agent.nets.encoder(near.flatten(0, 1)), s.batch.action.repeat(n, 1))[0].reshape(n, B)
        for b in range(B):
            yield (at[:, b] - Q[b]).square().mean(), second_order_excess(J[b].flatten(), near[:, b].flatten(1))


@torch.no_grad()
def tangent_checks(s: Subject, h: float = 1e-6) -> Iterator[Check]:
    x, B = s.batch.obs.double(), len(s.batch.reward)
    tau, direction = s.family.sample(B, s.generator), s.family.direction(s.generator)
    try:
        t = s.family.tangent(x, tau, direction).double()
    except TypeError:
        return  # the family has no tangent
    view, nets = as_float(s.family(x, tau)).double(), s.agent.nets
    dQ = nets.critic(nets.encoder(view, t), s.batch.action, B)[0, B:]
    up, down = (nets.critic(nets.encoder(view + k * h * t), s.batch.action)[0] for k in (1, -1))
    yield tightest(
        "dQ/dtau by dual batch = central difference", "15", "->", zip(dQ, (up - down) / (2 * h), strict=True)
    )
    note = "printed without its square: turned round, the direction gives the negative"
    yield Check("tangent prop is at least 0", "11", 0.0, "<=", -float(dQ.mean().abs()), note, printed=True)


def actor_checks(s: Subject) -> Iterator[Check]:
    tables, alpha, gamma = s.tables(), s.agent.alpha(), 0.99
    if not s.agent.entropy_bonus:
        alpha = torch.tensor(0.1)  # DDPG has none: the propositions need one
    held = [(pi, Q[s.identity].expand_as(Q)) for pi, Q in tables]  # an invariant critic

    def prop_4_1(pi: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        terms = implicit_kl_terms(pi, pi[s.identity], Q, Q[s.identity], alpha)
        right = alpha * (torch.stack(terms).sum(0) - torch.logsumexp(Q / alpha, -1)).mean()
        return actor_loss(pi, Q, alpha).mean(), right

    yield tightest("Prop. 4.1: Eq. 6 holds a KL to pi(.|s)", "8, 24-31", "=", (prop_4_1(*t) for t in held),
                   "alpha and -alpha log Z are missing in print")  # fmt: skip
    yield tightest("the same, critic not invariant: third term", "8, 24-31", "=", (prop_4_1(*t) for t in tables))

    def prop_5_1(pi: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        g = torch.softmax(Q[0] / alpha, -1)
        return actor_loss(pi, Q, alpha).var(correction=0), alpha**2 * actor_bound(pi, g)

    yield tightest("Prop. 5.1: variance of the actor's loss", "13, 59-72", "<=", (prop_5_1(*t) for t in held),
                   "alpha^2 is missing in print")  # fmt: skip

    def prop_5_2(pi: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        y = discrete_targets(pi, Q, alpha, gamma, reward=0.5)
        bound = target_bound(pi, (y - 0.5).abs().amax(-1), alpha, gamma)
        return (pi * y).sum(-1).var(correction=0), bound

    yield tightest("Prop. 5.2: variance of the target", "14, 73-93", "<=", (prop_5_2(*t) for t in held),
                   "max |y - r|, printed max (y - r); entropy inside gamma")  # fmt: skip

    def split(pi: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        total, actions, transformations = target_variance_parts(pi, discrete_targets(pi, Q, alpha, gamma, 0.5))
        return total, actions + transformations

    yield tightest("Var y = E advantage^2 + Var_mu E_a y", "73-93", "=", (split(*t) for t in tables))
    yield from policy_checks(s)


def policy_checks(s: Subject) -> Iterator[Check]:
    policy = s.policies()
    n, B = s.pixels.shape[:2]
    mu, std = (v.reshape(n, B, -1) for v in (policy.mu, policy.std))

    def at(i: int) -> Policy:
        return replace(policy, mu=mu[i], std=std[i])

    last = at(n - 1)
    every = torch.stack([policy_distance(at(i), last, "exact") for i in range(n - 1)]).mean(0)
    matched = policy_distance(average_policy([at(i) for i in range(n - 1)]), last, "exact")
    yield tightest("KL to the averaged policy <= averaged KL", "9, 10, 46-51", "<=", zip(matched, every, strict=True),
                   "moments of the mixture; Eq. 10 prints those of a weighted sum")  # fmt: skip
    p, q = at(0), last
    scale = p.std.clone().requires_grad_()
    kl = gaussian_kl(p.mu, scale, q.mu, q.std).sum()
    cross = (0.5 * ((scale.square() + (p.mu - q.mu).square()) / q.std.square()) + q.std.log()).sum()
    slope, cross_slope, entropy_slope = (torch.autograd.grad(v, scale)[0] for v in (kl, cross, scale.log().sum()))
    sides = zip(slope.flatten(), (cross_slope - entropy_slope).flatten(), strict=True)
    yield tightest("gradient of KL(pi || sg) = cross-entropy's - entropy's", "52-54", "=", sides)


# ------------------------------------------------------------------------------------------------ on random tables


def random_checks(seed: int) -> Iterator[Check]:
    generator = Generator().manual_seed(stream_seed(seed, "verify tables"))

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    f, W, y = randn(12, 5), randn(1, 5), randn()
    left, right = (f @ W[0] - y).square().mean(), (f.mean(0) @ W[0] - y).square() + linear_excess(W, f)
    yield Check("linear critic: loss = loss at E f + Tr(W_s^T W_s Var f)", "32-39", float(left), "=", float(right),
                "W_a is printed in the trace")  # fmt: skip
    yield tightest("target's bias contracts by gamma^2", "42-44", "<=", (contraction(randn) for _ in range(20)),
                   "under the stationary law; off it, it can fail")  # fmt: skip

    def ddpg(dims: int) -> tuple[Tensor, Tensor]:
        root, M = randn(dims, dims), randn(6, dims)
        H = -root @ root.T
        return (0.5 * torch.einsum("ni,ij,nj->n", M, -H, M)).var(correction=0), ddpg_actor_bound(M, H)

    yield tightest("DDPG: variance of the actor's loss", "59-72", "<=", (ddpg(3) for _ in range(20)),
                   "corrected: the printed bound is not homogeneous in Q")  # fmt: skip
    root, cubic, d = randn(3, 3), randn(3), randn(3)

    def remainder(eps: float) -> Tensor:
        x = eps * d
        Q = -0.5 * (x @ root).square().sum() - (x**3) @ cubic
        return -Q - 0.5 * x @ root @ root.T @ x

    yield Check("DDPG: Taylor form's remainder falls as the cube", "appendix", float(remainder(1e-3)), "->",
                float(8 * remainder(5e-4)))  # fmt: skip
    yield squashed_kl(randn)
    yield from misprints(randn)


def contraction(randn: Randn, S: int = 4, A: int = 3, T: int = 5, gamma: float = 0.9) -> tuple[Tensor, Tensor]:
    alpha = torch.tensor(0.2)
    P, reward, pi = torch.softmax(randn(S, A, S), -1), randn(S, A), torch.softmax(randn(S, A), -1)
    Q_pi, law = soft_q(P, reward, pi, gamma, alpha), stationary_law(P, pi)
    Q = Q_pi + randn(T, S, A)
    bias = (law * (expected_target(P, reward, pi, Q, gamma, alpha) - Q_pi).square()).sum()
    return bias, gamma**2 * (law * (Q - Q_pi).square().mean(0)).sum()


def squashed_kl(randn: Randn) -> Check:
    """Integral of p log(p/q) over actions of two tanh policies against the Gaussians' KL."""
    u = torch.linspace(-9, 9, 100_001)[:, None]
    p, q = (TanhNormal(randn(1, 1), randn(1, 1).abs() + 0.4) for _ in range(2))

    def log_density(policy: TanhNormal) -> Tensor:
        full = TanhNormal(policy.mu.expand_as(u), policy.std.expand_as(u))
        return full.sample((u - policy.mu) / policy.std)[1]

    log_p, log_q = log_density(p), log_density(q)
    inside = log_p > -25
    left = torch.trapezoid((log_p.exp() * (log_p - log_q))[inside], torch.tanh(u[:, 0])[inside])
    right = policy_distance(p, q, "exact")[0]
    note = "exact units; the tables' are KL(N(tanh mu, std)), mean over dimensions"
    return Check("KL of tanh policies = KL before the tanh", "4, 9, 12", float(left), "->", float(right), note)


def misprints(randn: Randn) -> Iterator[Check]:
    """Forms that the paper prints and that do not hold; each has its corrected row above."""
    pi, g, alpha = torch.softmax(randn(5, 4), -1), torch.softmax(randn(1, 4), -1), torch.tensor(100.0)
    left, right = actor_loss(pi, (alpha * g.log()).expand(5, 4), alpha).var(correction=0), actor_bound(pi, g)
    yield Check("Prop. 5.1 without alpha^2, alpha = 100", "13", float(left), "<=", float(right), printed=True)
    pi, zero = torch.softmax(randn(5, 2), -1), torch.zeros(())
    y = discrete_targets(pi, torch.tensor([0.0, -10.0]).expand(5, 2), zero, 0.9, reward=1.0)
    left, right = (pi * y).sum(-1).var(correction=0), target_bound(pi, (y - 1).amax(-1), zero, 0.9)
    yield Check("Prop. 5.2 with max (y - r), Q = (0, -10)", "14", float(left), "<=", float(right), printed=True)
    n, one = 4, torch.ones(())
    printed = gaussian_kl(torch.zeros(()), one / math.sqrt(n), torch.zeros(()), one)
    yield Check(
        "averaged policy N(sum P l, sum P^2 s^2), 4 x N(0, 1)", "10, 46-51", float(printed), "<=", 0.0, printed=True
    )
    Q_m, y_k = randn(2), randn(3) + 1
    left = l_all(Q_m, y_k) - (Q_m - y_k.mean()).square().mean()
    right = y_k.sum().square() / 3 - y_k.mean().square()
    yield Check("all pairs - DrQ's loss with (sum y_k)^2 / K", "55-58", float(left), "=", float(right), printed=True)
    pi, Q, alpha = torch.softmax(randn(5, 4), -1), randn(1, 4).expand(5, 4), torch.tensor(0.3)
    right = torch.stack(implicit_kl_terms(pi, pi[0], Q, Q[0], alpha)).sum(0).mean()
    left = actor_loss(pi, Q, alpha).mean()
    yield Check("Prop. 4.1 without alpha and log Z", "8", float(left), "=", float(right), printed=True)


# ------------------------------------------------------------------------------------------------ the command


@contextmanager
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def checks(run: Path | None = None, transform: str = "", states: int = 4, seed: int = 0) -> list[Check]:
    with float64():
        if run is None:
            subject = random_subject(transform, states, seed)
        else:
            subject = run_subject(run, transform, states, seed)
        every = [*critic_checks(subject), *actor_checks(subject), *random_checks(seed)]
    return sorted(every, key=lambda check: check.printed)


def verify(*, run: Path | None = None, transform: str = "", states: int = 4, seed: int = 0) -> bool:
    """Print the table; whether everything is as it should be."""
    from rich.table import Table

    what = f"the networks of {run}" if run else "random networks"
    with console.status("evaluating both sides"):
        every = checks(run, transform, states, seed)
    family = transform or (Config.load(run).weak if run else "shift")
    for printed in (False, True):
        title = "As printed: these must fail" if printed else f"On {what}, {family}, and on random tables"
        table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
        for column in ("result", "equations", "left", "", "right", "slack", "", "note"):
            table.add_column(
                column, header_style="bold", justify="right" if column in ("left", "right", "slack") else "left"
            )
        for c in (c for c in every if c.printed == printed):
            word = ("fails, as it must" if c.printed else "pass") if c.passed else "FAIL"
            verdict = f"[green]{word}[/]" if c.passed else f"[bold red]{word}[/]"
            numbers = f"{c.left:.6g}", c.relation, f"{c.right:.6g}", f"{c.slack:.2g}"
            table.add_row(c.name, c.equations, *numbers, verdict, c.note)
        console.print(table)
    failed = [c.name for c in every if not c.passed]
    console.print(
        f"{len(every) - len(failed)} of {len(every)} as they should be" + (f"; not: {failed}" if failed else "")
    )
    return not failed
