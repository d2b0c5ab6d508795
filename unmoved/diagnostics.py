"""Why an augmentation helps, in numbers: the paper's statistics as functions of an agent and a batch.

Rows are transformations: n of them for each of B states, all of T where T is finite (`exact`), else independent draws,
with a actions of the policy at each. A spread over both is also split into what the transformation does to the mean
over actions and what the action does at one transformation: the paper's propositions speak of the first alone. Passes
run in the agent's precision without gradients, statistics are its outputs' (fp32). Nothing here reads the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from unmoved.agent import Agent, Batch
from unmoved.losses import (
    ActorPass,
    Bellman,
    CriticPass,
    Improve,
    Sample,
    TangentProp,
    original,
    policy_distance,
    samples,
    soft_target,
    unique,
    with_bases,
)
from unmoved.networks import Critic, Policy
from unmoved.transforms import Tau, Transformation

IMAGES = {"cuda": 4096, "cpu": 512}  # in one encoder pass: 81 shifts of 256 states do not fit at once


@dataclass(frozen=True)
class Estimate:
    value: Tensor  # ()
    error: Tensor  # (), standard error


Statistics = dict[str, Estimate]


def over_states(values: Tensor) -> Estimate:
    """Mean over states (B,) and its standard error."""
    return Estimate(values.mean(), values.std() / math.sqrt(len(values)))


def numbers(statistics: Statistics) -> dict[str, float]:
    """{name: value, name_se: standard error}, in one transfer."""
    if not statistics:
        return {}
    flat = torch.stack([t.double() for e in statistics.values() for t in (e.value, e.error)]).tolist()
    names = [n for name in statistics for n in (name, f"{name}_se")]
    return dict(zip(names, flat, strict=True))


# ------------------------------------------------------------------------------------------------ spreads


@dataclass(frozen=True)
class Spread:
    """Standard deviations per state (B,): over transformations and actions, and the part of each."""

    total: Tensor
    transformation: Tensor  # of E_a
    action: Tensor  # at one transformation

    def statistics(self, name: str) -> Statistics:
        parts = {"": self.total, "_transformation": self.transformation, "_action": self.action}
        return {name + part: over_states(values) for part, values in parts.items()}


def spread(values: Tensor, exact: bool) -> Spread:
    """Of values (n, a, B)."""
    return spread_of(values.mean(1), values.var(1), values.shape[1], exact)


def spread_of(mean: Tensor, variance: Tensor, actions: int, exact: bool) -> Spread:
    """From the mean and the variance over the actions of each row, (n, B). The variance of the means has 1/a of the
    actions' own in it, which is taken off: Var = Var_tau[E_a] + E_tau[Var_a] then holds for the parts."""
    n = len(mean)
    within = variance.mean(0)
    between = mean.var(0, correction=0) if exact or n == 1 else mean.var(0)
    share = (n - 1) / n if exact or n == 1 else 1.0
    transformation = (between - share * within / actions).clamp(min=0)
    total = between + within * (actions - 1) / actions
    return Spread(total.sqrt(), transformation.sqrt(), within.sqrt())


# ------------------------------------------------------------------------------------------------ passes


@dataclass(frozen=True)
class States:
    """What the networks make of s under n transformations."""

    exact: bool
    Q: Tensor  # (n, 2, B) at the replayed action
    policy: Policy  # of n B states, row by row
    improve: Tensor  # (n, a, B): alpha log pi - min Q, each with its own action
    unit: dict[str, Tensor]  # (n, B, d) features of the actor's and the critic's head, at length 1


@dataclass(frozen=True)
class Targets:
    """y of s' under n transformations."""

    exact: bool
    y: Tensor  # (n, a, B)


def rows_of(
    family: Transformation, B: int, n: int, generator: Generator, single: bool = False
) -> Iterator[tuple[int, Tau]]:
    """All of T, or n draws for each state: (rows r, tau of r B images) in parts that fit; or row by row."""
    support = family.support()
    total = n if support is None else len(support)
    # A family that draws on the host may use one parameter for a whole call: row by row it is independent all the same.
    fit = max(1, IMAGES.get(generator.device.type, 512) // B)
    most = fit if family.capturable and not single else 1
    for first in range(0, total, most):
        r = min(most, total - first)
        if support is None:
            yield r, family.sample(r * B, generator)
        else:
            yield r, support[first : first + r].to(generator.device).repeat_interleave(B, 0)


def q_values(critic: Critic, features: Tensor, action: Tensor) -> Tensor:
    """Q of several actions from the head's features, computed once: (N, d), (a N, |A|) -> (2, a N)."""
    repeated = features.repeat(len(action) // len(features), 1)
    return critic.q(torch.cat([repeated, action], -1)).squeeze(-1)


def act(policy: Policy, actions: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Actions (a N, |A|) and log densities (a N,) of N policies."""
    many = dataclasses.replace(policy, mu=policy.mu.repeat(actions, 1), std=policy.std.repeat(actions, 1))
    return many.sample(torch.randn(many.mu.shape, generator=generator, device=generator.device))


@torch.no_grad()
def at_states(
    agent: Agent, batch: Batch, family: Transformation, std: Tensor, generator: Generator, n: int, actions: int
) -> States:
    nets, B = agent.nets, len(batch.reward)
    Q, improve, mu, scale = [], [], [], []
    unit: dict[str, list[Tensor]] = {"actor": [], "critic": []}
    for r, tau in rows_of(family, B, n, generator):
        features = nets.encoder(family(batch.obs.repeat(r, 1, 1, 1), tau))
        of_critic = nets.critic.head(features)
        policy = nets.actor(features, std)
        action, log_pi = act(policy, actions, generator)
        values = ActorPass(
            {}, {"original0": log_pi}, {"original0": q_values(nets.critic, of_critic, action)}, agent.alpha()
        )
        Q.append(q_values(nets.critic, of_critic, batch.action.repeat(r, 1)).reshape(2, r, B).transpose(0, 1))
        improve.append(Improve(original)(values).reshape(actions, r, B).transpose(0, 1))
        mu.append(policy.mu)
        scale.append(policy.std)
        for name, part in (("actor", nets.actor.head(features)), ("critic", of_critic)):
            unit[name].append(F.normalize(part, dim=-1).reshape(r, B, -1))
    whole = dataclasses.replace(policy, mu=torch.cat(mu), std=torch.cat(scale))
    joined = {name: torch.cat(parts) for name, parts in unit.items()}
    return States(family.support() is not None, torch.cat(Q), whole, torch.cat(improve), joined)


@torch.no_grad()
def at_targets(
    agent: Agent, batch: Batch, family: Transformation, std: Tensor, generator: Generator, n: int, actions: int
) -> Targets:
    nets, B, y = agent.nets, len(batch.reward), []
    for r, tau in rows_of(family, B, n, generator):
        x = family(batch.next_obs.repeat(r, 1, 1, 1), tau)
        features = nets.encoder(x)
        held = features if agent.config.polyak_encoder == 1.0 else nets.target.encoder(x)
        action, log_pi = act(nets.actor(features, std), actions, generator)
        Q = q_values(nets.target.critic, nets.target.critic.head(held), action)
        reward, discount = (v.repeat(actions * r) for v in (batch.reward, batch.discount))
        y.append(soft_target(reward, discount, Q, agent.alpha(), log_pi).reshape(actions, r, B).transpose(0, 1))
    return Targets(family.support() is not None, torch.cat(y))


@torch.no_grad()
def unit_features(agent: Agent, obs: Tensor, family: Transformation, generator: Generator, n: int) -> dict[str, Tensor]:
    """As `States.unit`, for families of which nothing else is asked."""
    unit: dict[str, list[Tensor]] = {"actor": [], "critic": []}
    for r, tau in rows_of(family, len(obs), n, generator):
        features = agent.nets.encoder(family(obs.repeat(r, 1, 1, 1), tau))
        for name, head in (("actor", agent.nets.actor.head), ("critic", agent.nets.critic.head)):
            unit[name].append(F.normalize(head(features), dim=-1).reshape(r, len(obs), -1))
    return {name: torch.cat(parts) for name, parts in unit.items()}


# ------------------------------------------------------------------------------------------------ the critic's loss


@torch.no_grad()
def critic_tables(
    agent: Agent, batch: Batch, chosen: list[Sample], known: dict[int, Tensor], generator: Generator, n: int
) -> dict[str, Tensor]:
    """Q (n, 2, B) of what each sample may show, by `table`. A view that is taken on another one shows, in row i, the
    strong image of its base's row i (modulo the base's rows). `known`: Q of root families, by id."""
    tables: dict[str, Tensor] = {}
    nets, B = agent.nets, len(batch.reward)

    def Q(x: Tensor, r: int) -> Tensor:
        return nets.critic(nets.encoder(x), batch.action.repeat(r, 1)).reshape(2, r, B).transpose(0, 1)

    for root in {s.view.name: s.view for s in map(root_of, chosen)}.values():
        family, support = root.transform, root.transform.support()
        above = [s for s in with_bases(chosen) if root_of(s).view.name == root.name and s.view.on is not None]
        rounds = -(-n // len(support)) if above and support is not None else 1
        values: dict[str, list[Tensor]] = {key: [] for key in (root.name, *(s.key for s in above))}
        single = not all(s.view.transform.capturable for s in above)
        done = known.get(id(family)) if support is not None or not above else None
        for again in range(rounds if above or done is None else 0):
            for r, tau in rows_of(family, B, n, generator, single):
                pixels = {root.name: family(batch.obs.repeat(r, 1, 1, 1), tau)}
                if again == 0 and done is None:
                    values[root.name].append(Q(pixels[root.name], r))
                for s in above:
                    base = s.view.base(s.index)
                    assert base is not None
                    f = s.view.transform
                    pixels[s.key] = f(pixels[table(base)], f.sample(r * B, generator))
                    values[s.key].append(Q(pixels[s.key], r))
        tables |= {key: torch.cat(parts) for key, parts in values.items() if parts}
        if done is not None:
            tables[root.name] = done
    return tables


def root_of(s: Sample) -> Sample:
    return with_bases([s], all_of_them=True)[0]


def table(s: Sample) -> str:
    """Samples of a view are alike, unless they are taken on another one."""
    return s.view.name if s.view.on is None else s.key


@torch.no_grad()
def critic_loss_spread(
    agent: Agent,
    terms: Iterable[Bellman],
    tables: dict[str, Tensor],
    targets: dict[str, Targets],
    generator: Generator,
    draws: int,
    twin_mean: bool = False,
) -> Spread:
    """Of sum weight x term over draws of the samples in them and in the target. One sample of each, both finite: every
    pair; else `draws` random ones. twin_mean: the loss of (Q1 + Q2)/2 instead of both losses' sum."""
    terms, Y = list(terms), agent.method.target
    chosen, mu = unique(s for term in terms for s in term.needs), samples(Y.mu)
    roots = {s.key: root_of(s).key for s in chosen}
    sizes = {key: max(len(tables[table(s)]) for s in chosen if roots[s.key] == key) for key in roots.values()}
    B = tables[table(chosen[0])].shape[-1]
    y = [targets[s.view.name].y.transpose(0, 1).roll(k, 0) for k, s in enumerate(mu)]  # (a, n, B): no two alike
    finite = all(t.exact for t in targets.values()) and all(
        s.view.on is None and s.view.transform.support() is not None for s in chosen
    )
    exact = finite and len(sizes) == len(mu) == 1
    lengths = [*sizes.values(), *(v.shape[1] for v in y)]
    picked = every_pair(lengths, B, generator) if exact else random_rows(lengths, draws, B, generator)
    index, index_y = dict(zip(sizes, picked, strict=False)), picked[len(sizes) :]

    a = len(y[0])
    means, variances = [], []
    part = max(1, (1 << 22) // (a * B))
    for first in range(0, len(index_y[0]), part):
        rows = slice(first, first + part)
        R = len(index_y[0][rows])
        Q = {}
        for s in chosen:
            at = index[roots[s.key]][rows] % len(tables[table(s)])
            q = tables[table(s)].transpose(0, 1).gather(1, at.expand(2, R, B))  # (2, R, B)
            q = q.mean(0, keepdim=True).expand(2, R, B) if twin_mean else q
            Q[s.key] = q[:, None].expand(2, a, R, B).reshape(2, -1)
        Y_k = torch.stack([v.gather(1, i[rows].expand(a, R, B)).reshape(-1) for v, i in zip(y, index_y, strict=True)])
        passed = CriticPass(Q, {}, Y(Y_k))
        loss = torch.stack([term.weight * term(passed) for term in terms]).sum(0).reshape(a, R, B)
        loss = loss / 2 if twin_mean else loss
        means.append(loss.mean(0))
        variances.append(loss.var(0))
    return spread_of(torch.cat(means), torch.cat(variances), a, exact)


def every_pair(lengths: list[int], B: int, generator: Generator) -> list[Tensor]:
    """Row numbers (pairs, B) of two tables: all combinations, for every state."""
    pairs = torch.cartesian_prod(*(torch.arange(n, device=generator.device) for n in lengths))
    return [column[:, None].expand(-1, B) for column in pairs.T]


def random_rows(lengths: list[int], draws: int, B: int, generator: Generator) -> list[Tensor]:
    """Row numbers (draws, B) of several tables, independent."""
    return [torch.randint(n, (draws, B), generator=generator, device=generator.device) for n in lengths]


# ------------------------------------------------------------------------------------------------ single statistics


def over_pairs(total: Tensor, itself: Tensor | float, n: int, exact: bool) -> Tensor:
    """Mean over two independent transformations, from the mean over all n^2 pairs and over the n pairs with itself: as
    it is where the n are all of T, else without the latter."""
    return total if exact or n == 1 else (n * total - itself) / (n - 1)


def pair_cosine(unit: Tensor, exact: bool) -> Tensor:
    """E cos(E(f_1(s)), E(f_2(s))) of two independent transformations, (n, B, d) -> (B,): |mean of unit vectors|^2."""
    return over_pairs(unit.mean(0).square().sum(-1), 1.0, len(unit), exact)


def pair_kl(policy: Policy, n: int, units: str, exact: bool) -> Tensor:
    """E KL(pi(.|f_1(s)) || pi(.|f_2(s))) of two independent transformations, (B,)."""
    mu, std = (v.reshape(n, -1, v.shape[-1]) for v in (policy.mu, policy.std))
    total = torch.zeros_like(mu[0, :, 0])
    for j in range(n):
        other = dataclasses.replace(policy, mu=mu[j].repeat(n, 1), std=std[j].repeat(n, 1))
        total += policy_distance(policy, other, units).reshape(n, -1).mean(0) / n
    return over_pairs(total, 0.0, n, exact)


def std_across_batch(values: Tensor) -> Estimate:
    """Mean over rows of the standard deviation across states of values (rows, B). Error: that of one std, from the
    fourth moment; rows show the same states, so their number does not lower it."""
    centred = values - values.mean(-1, keepdim=True)
    variance, fourth = centred.square().mean(-1), centred.pow(4).mean(-1)
    error = ((fourth - variance.square()).clamp(min=0) / values.shape[-1]).sqrt() / (2 * variance.sqrt()).clamp(
        min=1e-12
    )
    return Estimate(variance.sqrt().mean(), error.mean())


@torch.no_grad()
def tangents(agent: Agent, batch: Batch, family: Transformation, generator: Generator, draws: int) -> Tensor | None:
    """dQ(f_tau(s), a)/dtau of the smaller twin (draws, B), at random tau and direction; None: T has no tangent."""
    B, out = len(batch.reward), []
    smaller = TangentProp(original)
    for _ in range(draws):
        tau, direction = family.sample(B, generator), family.direction(generator)
        try:
            t = family.tangent(batch.obs, tau, direction)
        except TypeError:
            return None
        features = agent.nets.encoder(family(batch.obs, tau), t)
        q = agent.nets.critic(features, batch.action, B)
        out.append(smaller.derivative(q[:, :B], q[:, B:])[0])
    return torch.stack(out)
