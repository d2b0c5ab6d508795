"""Every term, the target and the draw against numbers worked out by hand or by torch.distributions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.distributions import Independent, Normal, TanhTransform, TransformedDistribution, kl_divergence

from unmoved.errors import UserError
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
    names,
    original,
    policy_distance,
    samples,
    soft_target,
    with_bases,
)
from unmoved.networks import ClippedNormal, TanhNormal, TanhNormalDMGB
from unmoved.transforms import Blur, Compose, Conv, Flip, Identity, Shift, Transformation


def gen(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


nu = View("nu", Shift(), 2)
# Two states, twins along the first axis.
Q = {"nu0": tensor([1, 2], [3, 5]), "nu1": tensor([0, 4], [2, 2]), "original0": tensor([2, 2], [1, 7])}
dQ = {"nu0": tensor([2, -1], [4, 3]), "nu1": tensor([1, -5], [6, 2])}


def critic(*Y: list[float], **changes: Tensor) -> CriticPass:
    return CriticPass(Q=Q | changes, dQ=dQ, Y=tensor(*Y))


# ------------------------------------------------------------------------------------------------ the target


def test_soft_target_by_hand() -> None:
    y = soft_target(tensor(1, 1), tensor(0.5, 0.5), tensor([4, 6], [8, 2]), tensor(0.1)[0], tensor(-10, 20))
    assert y.tolist() == [1 + 0.5 * (4 + 1), 1 + 0.5 * (2 - 2)]  # the smaller twin, the entropy inside gamma


def test_soft_target_of_a_termination_is_the_reward() -> None:
    y = soft_target(tensor(3, -2), tensor(0, 0.99), torch.full((2, 2), 1e6), tensor(0.1)[0], tensor(50, 50))
    assert y[0] == 3 and y[1] > 1e5


def test_soft_target_refuses_a_missing_axis() -> None:
    with pytest.raises(AssertionError):
        soft_target(tensor(1, 1)[:, None], tensor(1, 1), torch.ones(2, 2), tensor(0.1)[0], tensor(1, 1))
    with pytest.raises(AssertionError):
        soft_target(tensor(1, 1), tensor(1, 1), torch.ones(2), tensor(0.1)[0], tensor(1, 1))


def test_target_averages_or_pairs() -> None:
    y = tensor([1, 2], [3, 8])
    assert Target(nu)(y).tolist() == [[2, 5]]
    assert torch.equal(Target(nu, "paired")(y), y)
    with pytest.raises(AssertionError):
        Target(nu, "min")


# ------------------------------------------------------------------------------------------------ the critic's terms


@pytest.mark.parametrize(("reduce", "divide"), [("mean", 2), ("sum", 1)])
def test_bellman_on_a_shared_target(reduce: str, divide: int) -> None:
    # nu0: (1-1)^2 + (3-1)^2 = 4, (2-2)^2 + (5-2)^2 = 9; nu1: (0-1)^2 + (2-1)^2 = 2, (4-2)^2 + (2-2)^2 = 4
    assert Bellman(nu, reduce=reduce)(critic([1, 2])).tolist() == [6 / divide, 13 / divide]


def test_bellman_on_paired_targets() -> None:
    # nu0 on (1, 2): 4, 9 as above; nu1 on (2, 0): (0-2)^2 + (2-2)^2 = 4, 4^2 + 2^2 = 20
    assert Bellman(nu)(critic([1, 2], [2, 0])).tolist() == [4, 14.5]
    assert Bellman(nu[1])(critic([2, 0])).tolist() == [4, 20]
    assert Bellman((nu[1], original))(critic([2, 0])).tolist() == [(4 + 1) / 2, (20 + 4 + 49) / 2]
    with pytest.raises(AssertionError, match="paired"):
        Bellman(nu)(critic([1, 2], [2, 0], [3, 3]))


def test_bellman_gradient() -> None:
    """d/dQ (Q - Y)^2 / M = 2 (Q - Y) / M, for each twin."""
    q = Q["nu0"].clone().requires_grad_()
    Bellman(nu)(critic([1, 2], nu0=q)).sum().backward()
    assert q.grad is not None and torch.equal(q.grad, q.detach() - tensor(1, 2))


def test_q_invariance_pulls_the_view_not_the_anchor() -> None:
    view, anchor = Q["nu0"].clone().requires_grad_(), Q["original0"].clone().requires_grad_()
    value = QInvariance(nu)(critic([0, 0], nu0=view, original0=anchor))
    # nu0: (1-2)^2 + (3-1)^2 = 5, 0 + (5-7)^2 = 4; nu1: 4 + 1 = 5, 4 + 25 = 29
    assert value.tolist() == [5, 16.5]
    value.sum().backward()
    assert anchor.grad is None and view.grad is not None
    assert torch.equal(view.grad, (view - anchor).detach())
    assert {s.key for s in QInvariance(nu).needs} == {"nu0", "nu1", "original0"}


@pytest.mark.parametrize(
    ("twins", "first", "second"),
    [
        ("min", [4, 1], [1, 4]),  # nu0: Q1 is smaller in both states; nu1: Q1, then Q2
        ("mean", [9, 1], [12.25, 2.25]),
        ("each", [10, 5], [18.5, 14.5]),
    ],
)
def test_tangent_prop_twins(twins: str, first: list[float], second: list[float]) -> None:
    assert TangentProp(nu[0], twins=twins)(critic([0, 0])).tolist() == first
    both = TangentProp(nu, twins=twins)(critic([0, 0]))
    assert both.tolist() == [a + b for a, b in zip(first, second, strict=True)]  # the authors' sum
    mean = TangentProp(nu, twins=twins, reduce="mean")(critic([0, 0]))
    assert torch.equal(mean, both / 2)


def test_tangent_prop_as_printed_has_no_square() -> None:
    assert TangentProp(nu, square=False)(critic([0, 0])).tolist() == [2 + 1, -1 + 2]


def test_min_follows_the_first_twin_on_a_tie() -> None:
    tie = critic([0, 0], nu0=torch.zeros(2, 2))
    assert TangentProp(nu[0])(tie).tolist() == [4, 1]


# ------------------------------------------------------------------------------------------------ the actor's terms


def test_improve_by_hand() -> None:
    log_pi = {"nu0": tensor(1, 2), "nu1": tensor(-2, 0)}
    actor = ActorPass({}, log_pi, Q, alpha=tensor(0.5)[0])
    assert Improve(nu[0])(actor).tolist() == [0.5 - 1, 1 - 2]
    assert Improve(nu)(actor).tolist() == [(-0.5 + (-1 - 0)) / 2, (-1 + (0 - 2)) / 2]
    ddpg = ActorPass({}, log_pi, Q, alpha=tensor(0.0)[0])
    assert Improve(nu[1])(ddpg).tolist() == [0, -2]
    assert [s.key for s in Improve(nu).acting] == [s.key for s in Improve(nu).needs] == ["nu0", "nu1"]


def policy(seed: int, kind: type = TanhNormal, B: int = 4, dims: int = 3, grad: bool = False) -> Any:
    g = gen(seed)
    mu = torch.randn(B, dims, generator=g, dtype=torch.float64)
    std = torch.rand(B, dims, generator=g, dtype=torch.float64) + 0.2
    mu, std = mu.requires_grad_(grad), std.requires_grad_(grad)
    return ClippedNormal(mu, std, 0.3) if kind is ClippedNormal else kind(mu, std)


def actor_pass(**policies: Any) -> ActorPass:
    return ActorPass(policies, {}, {}, tensor(0.1)[0])


def test_policy_distance_units() -> None:
    p, q = policy(1), policy(2)
    exact = kl_divergence(Independent(Normal(p.mu, p.std), 1), Independent(Normal(q.mu, q.std), 1))
    assert torch.allclose(policy_distance(p, q, "exact"), exact)
    author = kl_divergence(Normal(p.mu.tanh(), p.std), Normal(q.mu.tanh(), q.std)).mean(-1)
    assert torch.allclose(policy_distance(p, q, "author"), author)
    squared = torch.nn.functional.mse_loss(p.mu.tanh(), q.mu.tanh(), reduction="none").mean(1)
    assert torch.allclose(policy_distance(p, q, "squared"), squared)
    for units in ("exact", "author", "squared"):
        assert not policy_distance(p, p, units).abs().gt(1e-12).any()
        assert (policy_distance(p, q, units) > 0).all()
    with pytest.raises(AssertionError):
        policy_distance(p, q, "nats")


def test_exact_kl_is_that_of_the_squashed_policies() -> None:
    """E_p [log p(a) - log q(a)] over actions a = tanh(u), by Monte Carlo."""
    p, q = policy(1, B=1, dims=2), policy(2, B=1, dims=2)
    P, R = (TransformedDistribution(Normal(d.mu, d.std), TanhTransform()) for d in (p, q))
    a = torch.tanh(p.mu + p.std * torch.randn(100_000, 1, 2, generator=gen(), dtype=torch.float64))
    ratio = (P.log_prob(a) - R.log_prob(a)).sum(-1)
    assert torch.allclose(ratio.mean(0), policy_distance(p, q, "exact"), rtol=0.02)


def test_ddpgs_kl_is_the_squared_distance_over_the_variance() -> None:
    """With one std for both, KL = (mu1 - mu2)^2 / (2 std^2)."""
    p = policy(1, ClippedNormal)
    q = ClippedNormal(policy(2).mu, p.std, 0.3)
    want = ((p.mu - q.mu).square() / (2 * p.std.square())).mean(-1)
    assert torch.allclose(policy_distance(p, q, "author"), want)  # the mean is an action already: no tanh
    assert torch.allclose(policy_distance(p, q, "squared"), (p.mu - q.mu).square().mean(-1))


@pytest.mark.parametrize("units", ["author", "exact"])
@pytest.mark.parametrize(("stop", "first", "second"), [("first", 0, 1), ("second", 1, 0), ("none", 1, 1)])
def test_kl_stops_the_gradient_of_its_side(units: str, stop: str, first: int, second: int) -> None:
    p, q = policy(1, grad=True), policy(2, grad=True)
    value = PolicyKL(nu[0], nu[1], stop=stop, units=units)(actor_pass(nu0=p, nu1=q))
    assert torch.allclose(value, policy_distance(p, q, units))  # the value does not depend on it
    value.sum().backward()
    for side, flows in ((p, first), (q, second)):
        for part in (side.mu, side.std):
            assert (part.grad is not None and part.grad.abs().min() > 0) == bool(flows)


def test_kl_is_the_mean_over_all_pairs() -> None:
    parts = {"eta0": policy(1), "eta1": policy(2), "nu0": policy(3), "nu1": policy(4)}
    eta = View("eta", Shift(), 2)
    pairs = [policy_distance(parts[a], parts[b], "exact") for a in ("eta0", "eta1") for b in ("nu0", "nu1")]
    assert torch.allclose(PolicyKL(eta, nu, units="exact")(actor_pass(**parts)), torch.stack(pairs).mean(0))
    mixed = average_policy([parts["eta0"], parts["eta1"]])
    pairs = [policy_distance(mixed, parts[b], "exact") for b in ("nu0", "nu1")]
    averaged = PolicyKL(eta, nu, units="exact", average=True)(actor_pass(**parts))
    assert torch.allclose(averaged, torch.stack(pairs).mean(0))


def test_the_sampled_kl_bounds_that_to_the_mixture() -> None:
    """E_eta KL(pi_eta || pi_mu) >= KL(mixture || pi_mu), and the moment-matched average does no worse (6.19)."""
    eta, parts = View("eta", Shift(), 3), {f"eta{i}": policy(i, B=50) for i in range(3)} | {"nu0": policy(9, B=50)}
    sampled = PolicyKL(eta, nu[0], units="exact")(actor_pass(**parts))
    averaged = PolicyKL(eta, nu[0], units="exact", average=True)(actor_pass(**parts))
    assert (sampled >= averaged).all() and (sampled - averaged).max() > 0.1


def test_average_of_identical_policies_is_the_policy() -> None:
    """The printed Eq. 10 has variance 1/n here."""
    p = policy(1)
    mean = average_policy([p, p, p])
    assert torch.allclose(mean.mu, p.mu) and torch.allclose(mean.std, p.std)


def test_average_policy_has_the_mixtures_moments() -> None:
    parts = [policy(i, B=2) for i in range(3)]
    mean = average_policy(parts)
    which = torch.randint(3, (300_000,), generator=gen())
    noise = torch.randn(300_000, 2, 3, generator=gen(1), dtype=torch.float64)
    u = torch.stack([p.mu for p in parts])[which] + torch.stack([p.std for p in parts])[which] * noise
    assert torch.allclose(u.mean(0), mean.mu, atol=0.01)
    assert torch.allclose(u.std(0), mean.std, atol=0.01)


@pytest.mark.parametrize("kind", [TanhNormal, TanhNormalDMGB, ClippedNormal])
def test_average_policy_keeps_its_kind(kind: type) -> None:
    mean = average_policy([policy(1, kind), policy(2, kind)])
    assert type(mean) is kind and getattr(mean, "clip", 0.3) == 0.3


def test_kl_options_are_checked() -> None:
    for wrong in ({"stop": "third"}, {"units": "bits"}):
        with pytest.raises(AssertionError):
            PolicyKL(nu[0], nu[1], **wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ views and draws


def test_a_views_samples() -> None:
    assert [s.key for s in samples(nu)] == ["nu0", "nu1"] and nu[1].key == "nu1"
    assert [s.key for s in samples((nu[1], original, nu))] == ["nu1", "original0", "nu0", "nu1"]
    assert names((nu, original)) == "nu,original" and names(nu[0]) == "nu1"  # printed from 1
    for index in (2, -1):
        with pytest.raises(IndexError, match=rf"view nu has 2 sample\(s\), asked for number {index}"):
            nu[index]


class Add(Transformation):
    """f_tau(x) = x + tau: the pixels tell what happened to them."""

    def sample(self, n: int, generator: Generator) -> Tensor:
        return torch.rand(n, generator=generator)

    def __call__(self, x: Tensor, tau: Tensor) -> Tensor:
        return x + tau[:, None, None, None]


def make(critic_views: Any, mu: Any = original, actor: Any = original, extra: tuple[Any, ...] = ()) -> Method:
    return Method("test", Target(mu), (Bellman(critic_views), *extra), (Improve(actor),))


def test_a_view_named_twice_is_the_same_pixels() -> None:
    twice = View("nu", Add(), 2)  # another object of the same name: the name is the identity
    method = make(View("nu", Add(), 2), actor=twice[0], extra=(TangentProp(twice[0]),))
    x = torch.zeros(3, 3, 4, 4)
    draw = Draw.sample(method, 3, 2, gen())
    first = draw.image(x, method.critic[0].needs[0])
    assert draw.image(x, method.actor[0].needs[0]) is first
    assert draw.image(x, twice[1]) is not first and not torch.equal(draw.image(x, twice[1]), first)
    assert set(draw.tau) == {"nu0", "nu1", "original0'"}


def test_views_of_the_next_state_are_drawn_apart() -> None:
    view = View("nu", Add(), 2)
    draw = Draw.sample(make(view, mu=view, actor=view[0]), 3, 2, gen())
    assert set(draw.tau) == {"nu0", "nu1", "nu0'", "nu1'"}
    assert len({tuple(t.tolist()) for t in draw.tau.values()}) == 4
    x = torch.zeros(3, 3, 4, 4)
    assert not torch.equal(draw.image(x, view[0]), draw.image(x, view[0], "'"))
    assert torch.equal(draw.image(x, view[0], "'")[:, 0, 0, 0], draw.tau["nu0'"])


def test_a_view_on_another_takes_its_pixels() -> None:
    base = View("nu", Add(), 2)
    strong = View("strong", Add(), 3, on=base)  # the samples of the base in turn
    first = View("first", Add(), 1, on=base[1])
    draw = Draw.sample(make((strong, first), mu=strong), 3, 2, gen())
    x, t = torch.zeros(3, 3, 4, 4), draw.tau
    for i, j in ((0, 0), (1, 1), (2, 0)):
        assert torch.allclose(draw.image(x, strong[i])[:, 0, 0, 0], t[f"nu{j}"] + t[f"strong{i}"])
        assert torch.allclose(draw.image(x, strong[i], "'")[:, 0, 0, 0], t[f"nu{j}'"] + t[f"strong{i}'"])
    assert torch.allclose(draw.image(x, first[0])[:, 0, 0, 0], t["nu1"] + t["first0"])
    assert draw.image(x, base[0]) is draw.pixels["nu0"]
    assert [s.key for s in with_bases([strong[2], first[0]])] == ["nu0", "strong2", "nu1", "first0"]


def test_a_chain_of_views() -> None:
    a = View("a", Add())
    b = View("b", Add(), on=a)
    c = View("c", Add(), on=b[0])
    draw = Draw.sample(make(c), 2, 1, gen())
    total = draw.tau["a0"] + draw.tau["b0"] + draw.tau["c0"]
    assert torch.allclose(draw.image(torch.zeros(2, 3, 2, 2), c[0])[:, 0, 0, 0], total)


def test_tangents_are_taken_on_the_bases_pixels() -> None:
    base = View("nu", Flip(1.0))
    moved = View("moved", Shift(), on=base)
    method = make(moved, extra=(TangentProp(moved),))
    draw = Draw.sample(method, 3, 2, gen())
    x = torch.randint(256, (3, 9, 12, 12), generator=gen(), dtype=torch.uint8)
    assert set(draw.direction) == {"moved0"}
    want = Shift().tangent(x.flip(-1), draw.tau["moved0"], draw.direction["moved0"])
    assert torch.equal(draw.tangent(x, moved[0]), want)


def test_a_draw_is_decided_by_its_generator() -> None:
    method = make(nu, mu=View("mu", Compose(Shift(), Conv()), 2), actor=nu[0], extra=(TangentProp(nu),))
    state = torch.get_rng_state()
    a, b, c = (Draw.sample(method, 4, 2, gen(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(a.tau["mu1'"][1], b.tau["mu1'"][1]) and not torch.equal(a.tau["mu1'"][1], c.tau["mu1'"][1])
    assert set(a.noise) == {"mu0'", "mu1'", "nu0"} and set(a.direction) == {"nu0", "nu1"}
    assert all(torch.equal(a.noise[k], b.noise[k]) and a.noise[k].shape == (4, 2) for k in a.noise)
    assert not torch.equal(a.noise["mu0'"], a.noise["mu1'"])
    assert a.tau["nu0"].shape == (4, 2) and not a.pixels


def test_the_original_view_is_the_state_itself() -> None:
    x = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    draw = Draw.sample(make(original), 2, 1, gen())
    assert draw.image(x, original[0]) is x and isinstance(original.transform, Identity)


def test_a_view_that_was_not_drawn_is_an_error() -> None:
    draw = Draw.sample(make(nu[0]), 2, 1, gen())
    with pytest.raises(KeyError, match="nu1"):
        draw.image(torch.zeros(2, 3, 8, 8), nu[1])


def test_a_method_prints_its_losses() -> None:
    kl = PolicyKL(nu[0], nu[1], 0.25, units="exact")
    method = Method("m", Target(nu), (Bellman(nu), TangentProp(nu, 0.125)), (Improve(nu[0]), kl))
    text = str(method)
    for part in ("1/2 sum_k y(f_nuk(s'))", "1 mean_nu[2] (Q(f_nu(s), a) - Y)^2", "0.125 sum_nu[2] (d/dtau min(Q1,Q2)",
                 "0.25 KL_exact(sg pi(.|f_nu1(s)) || pi(.|f_nu2(s)))", "alpha log pi"):  # fmt: skip
        assert part in text, text
    assert "paired" in str(Target(nu, "paired")) and str(Target(original)) == "Y = y(f_original(s'))"
    assert "avg" in str(PolicyKL(nu, nu, average=True)) and "|^2" in str(PolicyKL(nu, nu, units="squared"))
    assert "^2" not in str(TangentProp(nu, square=False)) and "sg Q(s, a)" in str(QInvariance(nu))


def test_every_term_gives_one_value_per_state() -> None:
    for term in (Bellman(nu), QInvariance(nu), TangentProp(nu), TangentProp(nu, twins="each")):
        assert term(critic([0, 0])).shape == (2,)
    assert PolicyKL(nu[0], nu[1])(actor_pass(nu0=policy(1), nu1=policy(2))).shape == (4,)


@pytest.mark.parametrize(
    "other",
    [View("nu", Shift(8)), View("nu", Shift(4), 2), View("nu", Shift(4), on=original), View("nu", Blur())],
    ids=["settings", "samples", "base", "family"],
)
def test_one_name_is_one_view(other: View) -> None:
    with pytest.raises(UserError, match="two different views of mine are called nu"):
        Method("mine", Target(original), (Bellman(View("nu", Shift(4))),), (Improve(other),))
    Method("mine", Target(other), (Bellman(View("nu", Shift(4))),), (Improve(View("nu", Shift(4))),))  # s' is apart
