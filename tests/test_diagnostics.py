"""Every statistic against a brute-force or a hand-computed value, in float64 on tiny networks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Generator, Tensor, nn

from unmoved import checkpoint, diagnostics, measure
from unmoved.agent import Agent, Batch
from unmoved.config import make_config
from unmoved.diagnostics import (
    Targets,
    at_states,
    at_targets,
    critic_loss_spread,
    critic_tables,
    numbers,
    over_states,
    pair_cosine,
    pair_kl,
    spread,
    std_across_batch,
    tangents,
    unit_features,
)
from unmoved.gradients import critic_gradient, gradient_noise
from unmoved.log import read_rows
from unmoved.losses import Bellman, Draw, Improve, Method, Target, View, gaussian_kl, original, unique
from unmoved.methods import make_method
from unmoved.networks import TanhNormal
from unmoved.train import Trainer, train
from unmoved.transforms import Blur, FromModule, Identity, Shift

TINY: dict[str, Any] = {"image_size": 12, "strides": (2, 1), "filters": 3, "feature_dim": 5, "hidden_dim": 6, "pad": 1}
ZERO = torch.zeros((), dtype=torch.float64)


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def close(a: Tensor, b: Any, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    torch.testing.assert_close(a, torch.as_tensor(b).expand_as(a), rtol=rtol, atol=atol)


def make_agent(**changes: Any) -> Agent:
    config = make_config(**(TINY | changes))
    agent = Agent(config, make_method(config), (9, 12, 12), action_dim=2)
    with torch.no_grad():
        for p in agent.nets.parameters():
            p.add_(0.3 * torch.randn_like(p))
    if config.polyak_encoder == 1.0:
        agent.nets.target.encoder.load_state_dict(agent.nets.encoder.state_dict())
    return agent


def make_batch(B: int = 3) -> Batch:
    obs, next_obs = torch.randint(256, (2, B, 9, 12, 12), dtype=torch.uint8)
    discount = 0.9 * (torch.arange(B) > 0)  # the first transition terminates
    return Batch(obs, torch.rand(B, 2) * 2 - 1, torch.randn(B), discount, next_obs)


def seeded(seed: int = 1) -> Generator:
    return Generator().manual_seed(seed)


# ------------------------------------------------------------------------------------- spreads and pairs


def test_spread_by_hand() -> None:
    """Two transformations with means 0 and 4, actions at -1 and +1 of them: Var = 4 + 1; unbiased within = 2, so the
    action's part of the two means' variance, (n - 1)/n x 2/2 = 1/2, is taken off."""
    values = torch.tensor([[-1.0, 1.0], [3.0, 5.0]])[:, :, None]
    got = spread(values, exact=True)
    close(got.total, math.sqrt(5))
    close(got.action, math.sqrt(2))
    close(got.transformation, math.sqrt(4 - 0.5))


def test_spread_is_unbiased() -> None:
    """Known Gaussians: rows N(m_i, 3), 20,000 states; the mean of the squared parts is Var[m] and 9."""
    m = torch.tensor([0.0, 1.0, 2.0, 7.0])
    noise = 3 * torch.randn(4, 16, 20_000)
    got = spread(m[:, None, None] + noise, exact=True)
    close(got.transformation.square().mean(), m.var(correction=0), rtol=0.02)
    close(got.action.square().mean(), 9.0, rtol=0.01)
    close(got.total.square().mean(), 9.0 + m.var(correction=0), rtol=0.01)
    rows = 2 * torch.randn(40, 1, 20_000)  # a sample of an infinite family N(0, 2)
    got = spread(rows + 3 * torch.randn(40, 16, 20_000), exact=False)
    close(got.transformation.square().mean(), 4.0, rtol=0.01)


def test_one_transformation_has_no_transformation_part() -> None:
    close(spread(torch.randn(1, 16, 5), exact=True).transformation, 0.0)
    assert (spread(torch.zeros(3, 4, 2), exact=True).total == 0).all()


def test_errors_are_the_mean_s() -> None:
    got = over_states(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    close(got.value, 3.0)
    close(got.error, math.sqrt(14 / 3 / 4))
    assert numbers({"x": got}) == {"x": 3.0, "x_se": pytest.approx(1.0801234)}


def test_pair_cosine() -> None:
    """Unit vectors at 0, 60 and 90 degrees: all 9 pairs, or the 6 of different draws."""
    angle = torch.tensor([0.0, 60.0, 90.0]) * math.pi / 180
    unit = torch.stack([angle.cos(), angle.sin()], -1)[:, None]
    pairs = [math.cos(a - b) for a, b in product(angle.tolist(), repeat=2)]
    close(pair_cosine(unit, exact=True), sum(pairs) / 9)
    close(pair_cosine(unit, exact=False), (sum(pairs) - 3) / 6)


@pytest.mark.parametrize("units", ["exact", "author"])
def test_pair_kl(units: str) -> None:
    mu, std = torch.randn(3, 2, 2), torch.rand(3, 2, 2) + 0.5  # 3 rows, 2 states, 2 dimensions
    policy = TanhNormal(mu.reshape(6, 2), std.reshape(6, 2))
    pairs = []
    for i, j in product(range(3), repeat=2):
        if units == "exact":
            pairs.append(gaussian_kl(mu[i], std[i], mu[j], std[j]).sum(-1))
        else:
            pairs.append(gaussian_kl(mu[i].tanh(), std[i], mu[j].tanh(), std[j]).mean(-1))
    close(pair_kl(policy, 3, units, exact=True), torch.stack(pairs).mean(0))
    close(pair_kl(policy, 3, units, exact=False), torch.stack(pairs).sum(0) / 6)


def test_pair_kl_of_known_gaussians() -> None:
    """N(0, 1) and N(1, 1): KL 1/2 both ways, so 1/4 over all pairs and 1/2 over two different draws."""
    policy = TanhNormal(torch.tensor([[0.0], [1.0]]), torch.ones(2, 1))
    close(pair_kl(policy, 2, "exact", exact=True), 0.25)
    close(pair_kl(policy, 2, "exact", exact=False), 0.5)


def test_std_across_batch() -> None:
    got = std_across_batch(torch.tensor([[0.0, 2.0], [1.0, 7.0]]))
    close(got.value, (1 + 3) / 2)
    many = std_across_batch(2 * torch.randn(3, 50_000))
    close(many.value, 2.0, rtol=0.01)
    close(many.error, 2 / math.sqrt(2 * 50_000), rtol=0.03)  # of a Gaussian's std


# ------------------------------------------------------------------------------------- passes, one image at a time


@pytest.mark.parametrize("preset", ["drq", "drqv2", "dmgb"])
def test_states_and_targets_by_brute_force(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, batch, shift = make_agent(preset=preset, method="rad"), make_batch(), Shift(1)
    std, n, a, B = torch.tensor(0.4), 9, 4, 3
    states = at_states(agent, batch, shift, std, seeded(), 99, a)
    targets = at_targets(agent, batch, shift, std, seeded(), 99, a)
    noise = torch.randn(a, n, B, 2, generator=seeded())
    assert states.exact and targets.exact and states.Q.shape == (n, 2, B) and targets.y.shape == (n, a, B)
    nets, alpha = agent.nets, agent.alpha()
    with torch.no_grad():
        for i, tau in enumerate(shift.support()):
            for b in range(B):
                x = nets.encoder(shift(batch.obs[b : b + 1], tau[None]))
                close(states.Q[i, :, b], nets.critic(x, batch.action[b : b + 1])[:, 0])
                for name, head in (("actor", nets.actor.head), ("critic", nets.critic.head)):
                    close(states.unit[name][i, b], head(x)[0] / head(x)[0].norm())
                close(states.policy.mu[i * B + b], nets.actor(x, std).mu[0])
                image = shift(batch.next_obs[b : b + 1], tau[None])
                for k in range(a):
                    z = noise[k, i, b][None]
                    action, log_pi = nets.actor(x, std).sample(z)
                    close(states.improve[i, k, b], (alpha * log_pi - nets.critic(x, action).amin(0))[0])
                    action, log_pi = nets.actor(nets.encoder(image), std).sample(z)
                    Q = nets.target.critic(nets.target.encoder(image), action).amin(0)
                    y = batch.reward[b] + batch.discount[b] * (Q - alpha * log_pi)[0]
                    close(targets.y[i, k, b], y)
    monkeypatch.setitem(diagnostics.IMAGES, "cpu", 2 * B)  # two rows at a time
    close(at_states(agent, batch, shift, std, seeded(), 99, a).Q, states.Q)


def test_families_that_are_not_finite_are_sampled() -> None:
    agent, batch, blur = make_agent(), make_batch(), Blur()
    states = at_states(agent, batch, blur, ZERO, seeded(), 5, 2)
    assert not states.exact and len(states.Q) == 5
    tau = blur.sample(15, seeded())
    with torch.no_grad():
        x = blur(batch.obs.repeat(5, 1, 1, 1), tau)
        close(states.Q[4, :, 2], agent.nets.critic(agent.nets.encoder(x), batch.action.repeat(5, 1))[:, 14])
    unit = unit_features(agent, batch.obs, blur, seeded(), 5)
    close(unit["actor"], states.unit["actor"])


def test_a_module_with_one_draw_per_call_still_varies_by_row() -> None:
    class Darken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rand(())  # one number for the whole batch

    agent, batch, dark = make_agent(), make_batch(), FromModule(Darken())
    unit = unit_features(agent, batch.obs, dark, seeded(), 4)
    assert len({round(float(v), 9) for v in unit["critic"][:, 0, 0]}) == 4
    strong = View("strong", dark, on=View("nu", Shift(1)))
    tables = critic_tables(agent, batch, [strong[0]], {}, seeded(), 9)
    shifted = at_states(agent, batch, Shift(1), ZERO, seeded(), 9, 2).Q
    close(tables["nu"], shifted)
    assert len({round(float(v), 9) for v in tables["strong0"][:, 0, 0]}) == 9


# ------------------------------------------------------------------------------------- the critic's loss


def two_shift(method: str) -> tuple[Any, list[Bellman]]:
    nu, mu = View("nu", Identity(), 1 if method == "rad" else 2), View("mu", Identity(), 1 if method == "rad" else 2)
    target = Target(mu, "paired" if method == "rad_plus" else "average")
    recipe = Method(method, target, (Bellman(nu),), (Improve(original),))
    return SimpleNamespace(method=recipe), list(recipe.critic)  # type: ignore[arg-type]


Q_TWO = torch.tensor([1.0, 3.0], dtype=torch.float64)  # at the two transformations of s, both twins
Y_TWO = torch.tensor([0.0, 2.0], dtype=torch.float64)  # at those of s'


def two_tables(twin: float = 0.0) -> tuple[dict[str, Tensor], dict[str, Targets]]:
    """One state; two equal actions. `twin` is added to the second critic."""
    Q = torch.stack([Q_TWO, Q_TWO + twin], 1)[:, :, None]
    return {"nu": Q}, {"mu": Targets(True, Y_TWO[:, None, None].expand(2, 2, 1))}


def test_critic_loss_of_two_shifts_by_hand() -> None:
    """(Q - y)^2 of the four pairs is 1, 1, 9, 1, twice for the twins: mean 6, variance 48."""
    agent, terms = two_shift("rad")
    tables, targets = two_tables()
    got = critic_loss_spread(agent, terms, tables, targets, seeded(), draws=7)
    close(got.total, math.sqrt(48))
    close(got.transformation, math.sqrt(48))
    close(got.action, 0.0)
    close(critic_loss_spread(agent, terms, tables, targets, seeded(), 7, twin_mean=True).total, math.sqrt(12))
    tables, targets = two_tables(twin=2.0)  # the twins' mean is 2, 4: squares 4, 0, 16, 4
    close(critic_loss_spread(agent, terms, tables, targets, seeded(), 7, twin_mean=True).total, math.sqrt(36))


def test_critic_loss_s_action_part_by_hand() -> None:
    """One transformation, two actions with y = 0 and 2, Q = 1 and 4 (twins): losses 1 + 16 and 1 + 4, variance 36 and
    unbiased 72."""
    agent, terms = two_shift("rad")
    tables, targets = {"nu": torch.tensor([[[1.0], [4.0]]])}, {"mu": Targets(True, torch.tensor([[[0.0], [2.0]]]))}
    got = critic_loss_spread(agent, terms, tables, targets, seeded(), 7)
    close(got.total, 6.0)
    close(got.action, math.sqrt(72))
    close(got.transformation, 0.0)


@pytest.mark.parametrize("method", ["drq", "rad_plus"])
def test_critic_loss_of_two_views(method: str) -> None:
    """All 16 quadruples of two views and two targets. Paired (RAD+): half of RAD's variance."""
    agent, terms = two_shift(method)
    tables, targets = two_tables()
    got = critic_loss_spread(agent, terms, tables, targets, seeded(), draws=100_000)
    losses = []
    for q1, q2, y1, y2 in product(Q_TWO.tolist(), Q_TWO.tolist(), Y_TWO.tolist(), Y_TWO.tolist()):
        t1, t2 = (y1, y2) if method == "rad_plus" else ((y1 + y2) / 2,) * 2
        losses.append((q1 - t1) ** 2 + (q2 - t2) ** 2)  # mean of two views x sum of two twins
    close(got.total, float(np.std(losses)), rtol=0.01)
    if method == "rad_plus":
        close(got.total, math.sqrt(48 / 2), rtol=0.01)


@pytest.mark.parametrize(
    ("preset", "method", "changes"),
    [
        ("drq", "rad", {}),
        ("drq", "drac", {}),
        ("dmgb", "svea", {"strong": "rotate", "strong_in_target": True}),
        ("dmgb", "ours", {"strong": "conv"}),
    ],
)
def test_critic_loss_against_draws_of_the_update(preset: str, method: str, changes: dict[str, Any]) -> None:
    """The spread from tables equals that of many draws made by the update's own passes."""
    agent, batch = make_agent(preset=preset, method=method, **changes), make_batch(2)
    with torch.no_grad():  # large actions, so that both parts count
        agent.nets.actor.trunk.biases[-1][..., 2:] += 2.0
    terms = [t for t in agent.method.critic if isinstance(t, Bellman)]
    targets = measure.own_targets(agent, batch, ZERO, seeded(2))
    chosen = unique(s for term in terms for s in term.needs)
    tables = critic_tables(agent, batch, chosen, {}, seeded(3), 256)
    got = critic_loss_spread(agent, terms, tables, targets, seeded(4), draws=4096)
    N = 4096
    one = Batch(*(v[1:].expand(N, *v.shape[1:])
                  for v in (batch.obs, batch.action, batch.reward, batch.discount, batch.next_obs)))  # fmt: skip
    draw = Draw.sample(agent.method, N, 2, seeded(5))
    with torch.no_grad():
        Y = agent.method.target(agent.target_pass(one, draw, ZERO).y)
        critic = agent.critic_pass(one, draw, Y)
        losses = torch.stack([t.weight * t(critic) for t in terms]).sum(0)
    close(got.total[1], losses.std(), rtol=0.12)


def test_known_values_are_reused() -> None:
    agent, batch = make_agent(preset="dmgb", method="svea", strong="blur"), make_batch(2)
    weak = measure.weak_family(agent)
    Q = at_states(agent, batch, weak, ZERO, seeded(), 9, 2).Q
    chosen = agent.method.critic_samples()
    one = critic_tables(agent, batch, chosen, {}, seeded(), 20)
    two = critic_tables(agent, batch, chosen, {id(weak): Q}, seeded(), 20)
    close(one["nu"], Q)
    assert sorted(one) == sorted(two) == ["nu", "strong0"] and len(one["strong0"]) == 27  # three rounds of nine shifts
    for key in one:
        close(one[key], two[key])


# ------------------------------------------------------------------------------------- tangents and gradients


def test_tangents_are_the_update_s() -> None:
    """dQ of the smaller twin, as tangent prop squares it."""
    agent, batch = make_agent(method="drq_tp", M=1), make_batch()
    got = tangents(agent, batch, Shift(1), seeded(), draws=2)
    assert got is not None
    generator = seeded()
    for row in got:
        tau, direction = Shift(1).sample(3, generator), Shift(1).direction(generator)
        draw = Draw({"nu0": tau}, {"nu0": direction}, {})
        critic = agent.critic_pass(batch, draw, torch.zeros(1, 3))
        (term,) = (t for t in agent.method.critic if not isinstance(t, Bellman))
        close(row.square(), term(critic).detach())
    agent.nets.critic.head.linear.weight.data.zero_()  # a critic that ignores its image
    blind = tangents(agent, batch, Shift(1), seeded(), draws=1)
    assert blind is not None and (blind == 0).all()
    assert tangents(agent, batch, FromModule(nn.Identity()), seeded(), 1) is None


def test_tangents_of_a_linear_critic() -> None:
    """Q = W x: the tangent is the change of Q when the view is moved by one more pixel, for both twins' smaller one."""
    W, shift, batch = torch.randn(2, 9 * 12 * 12) / 255, Shift(1), make_batch()

    def critic(features: Tensor, action: Tensor, t: int = 0) -> Tensor:
        return W @ features.T

    nets = SimpleNamespace(encoder=lambda x, dx: torch.cat([x.double(), dx.double()]).flatten(1), critic=critic)
    got = tangents(SimpleNamespace(nets=nets), batch, shift, seeded(), draws=6)  # type: ignore[arg-type]
    assert got is not None
    generator = seeded()
    for row in got:
        tau, direction = shift.sample(3, generator), shift.direction(generator)
        move = torch.tensor([(0, 1), (0, -1), (1, 0), (-1, 0)][int(direction)])
        view = shift(batch.obs, tau)
        Q, moved = (W @ x.double().flatten(1).T for x in (view, shift(view, shift.identity(3) + move)))
        close(row, (moved - Q).gather(0, Q.argmin(0, keepdim=True))[0])
        assert row.abs().min() > 0


@pytest.mark.parametrize("method", ["ours", "sac"])
def test_gradient_noise_by_brute_force(method: str) -> None:
    """Trace of the covariance and squared mean from 250 independent gradients."""
    agent, batch = make_agent(method=method), make_batch()
    with torch.no_grad():
        agent.nets.actor.trunk.biases[-1][..., 2:] += 2.0
    got = gradient_noise(agent, batch, ZERO, seeded(), triples=60)
    generator = seeded(9)
    many = torch.stack([
        critic_gradient(agent, batch, Draw.sample(agent.method, 3, 2, generator), ZERO) for _ in range(250)
    ])  # fmt: skip
    trace, mean = many.var(0).sum(), many.mean(0)
    signal = mean.square().sum() - trace / 250
    noise, snr = got["critic_gradient_std"], got["critic_gradient_snr"]
    assert (noise.value - trace.sqrt()).abs() < 5 * noise.error and noise.error < 0.15 * noise.value
    assert (snr.value - (signal / trace).sqrt()).abs() < 5 * snr.error
    part = {k: float(got[f"critic_gradient_std_{k}"].value) for k in ("transformation", "action")}
    assert part["action"] > 0
    assert (part["transformation"] > 0) == (method == "ours")
    if method == "sac":
        close(got["critic_gradient_std_action"].value, noise.value)


# ------------------------------------------------------------------------------------- t-SNE


def test_tsne_distance() -> None:
    pytest.importorskip("sklearn")
    features = torch.randn(40, 6)
    near = torch.stack([features, features + 1e-3 * torch.randn(40, 6)])
    plane, got = measure.tsne_distance(near, seed=0)
    close(got.value, (plane[0] - plane[1]).norm(dim=-1).mean(), rtol=1e-6)
    _, far = measure.tsne_distance(torch.stack([features, features[torch.randperm(40)]]), seed=0)
    assert got.value < far.value / 3
    again = measure.tsne_distance(near, seed=0)[1]
    close(got.value, again.value)


# ------------------------------------------------------------------------------------- all of it, and in training


def test_measure_has_every_statistic() -> None:
    agent, batch = make_agent(preset="dmgb", method="ours", strong="blur"), make_batch(4)
    got = numbers(measure.measure(agent, batch, ZERO, seeded(), (Identity(),)))
    assert all(math.isfinite(v) for v in got.values())
    wanted = [
        "target_mean",
        "target_variance",
        "target_std",
        "target_std_of_mean",
        "target_std_transformation",
        "target_std_action",
        "critic_loss_std",
        "critic_loss_std_twin_mean",
        "critic_loss_std_weak",
        "critic_loss_std_transformation",
        "critic_loss_std_action",
        "actor_loss_std_across_shift",
        "actor_loss_std_across_batch",
        "kl_author",
        "kl_exact",
        "cosine_actor_shift",
        "cosine_critic_shift",
        "cosine_actor_blur",
        "cosine_critic_blur",
        "tangent_square",
        "tangent_norm",
        "critic_gradient_std",
        "critic_gradient_snr",
        "actor_gradient_std",
        "actor_gradient_snr",
    ]
    assert set(wanted) <= set(got) and {f"{name}_se" for name in wanted} <= set(got)
    assert got["target_std_of_mean"] == pytest.approx(got["target_std"] / math.sqrt(2))  # K = 2
    assert got["cosine_actor_identity"] == pytest.approx(1.0)
    before = [p.clone() for p in agent.nets.parameters()]
    again = numbers(measure.measure(agent, batch, ZERO, seeded(), (Identity(),)))
    assert got == again and all(map(torch.equal, before, agent.nets.parameters()))


def test_a_target_of_another_law_is_measured_under_both() -> None:
    for method, changes in (("sac", {}), ("svea", {"strong": "blur", "strong_in_target": True})):
        got = numbers(measure.measure(make_agent(method=method, **changes), make_batch(), ZERO, seeded()))
        assert got["target_std"] != got["target_weak_std"]
        if method == "sac":
            assert got["target_std_transformation"] == 0 < got["target_weak_std_transformation"]


RUN: dict[str, Any] = {
    "preset": "cpu", "method": "ours", "frames": 240, "action_repeat": 2, "image_size": 24, "batch_size": 4, "pad": 1,
    "filters": 4, "feature_dim": 8, "hidden_dim": 16, "capacity": 120, "random_steps": 20, "eval_every": 200,
    "eval_episodes": 1, "log_every": 10, "checkpoint_every": 80, "device": "cpu", "discount": 0.9, "keep_states": True,
}  # fmt: skip
MEASURED: dict[str, Any] = {
    "diagnostics": True, "diagnostics_every": 60, "rare_every": 120, "bias_states": 2, "bias_workers": 2,
}  # fmt: skip


@pytest.fixture
def float32(float64: None) -> None:
    torch.set_default_dtype(torch.float32)


def strip(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]


def test_a_run_is_the_same_with_diagnostics(tmp_path: Path, float32: None) -> None:
    """Bit for bit: rows and every weight, with Monte Carlo rollouts from restored states among the diagnostics."""
    plain = train(make_config("toy_reach", runs=tmp_path / "a", **RUN))
    with_them = train(make_config("toy_reach", runs=tmp_path / "b", **(RUN | MEASURED)))
    for name in ("train.jsonl", "eval.jsonl"):
        assert strip(read_rows(plain / name)) == strip(read_rows(with_them / name))
    a, b = (checkpoint.load(f, ("agent", "replay"), print) for f in (plain, with_them))
    assert a is not None and b is not None
    for key, value in a["agent"]["agent"]["nets"].items():
        assert torch.equal(value, b["agent"]["agent"]["nets"][key])
    for key in ("generator", "acting"):
        assert torch.equal(a["agent"]["agent"][key], b["agent"]["agent"][key])
    assert torch.equal(a["replay"]["states"], b["replay"]["states"])
    rows = read_rows(with_them / "diagnostics.jsonl")
    assert [row["frames"] for row in rows] == [60, 120, 180, 240]
    assert ["bias" in row for row in rows] == [False, True, False, True]
    assert ["tsne_actor" in row for row in rows] == [False, measure.tsne_available()] * 2


def test_diagnostics_continue_after_a_stop(tmp_path: Path, float32: None) -> None:
    changes = RUN | MEASURED | {"rare_every": 0, "keep_states": False}
    one = train(make_config("toy_reach", runs=tmp_path / "a", **changes))
    config = make_config("toy_reach", runs=tmp_path / "b", **changes)
    trainer = Trainer(config)
    observe = trainer.observe

    def stopping(action: Any) -> None:
        observe(action)
        trainer.stop = trainer.steps == 70

    trainer.observe = stopping  # type: ignore[method-assign]
    trainer.run()
    with (trainer.folder / "diagnostics.jsonl").open("a") as file:  # of a process that was killed after its checkpoint
        file.write('{"frames": 180, "steps": 90}\n{"frames": 1')
    assert strip(read_rows(train(config) / "diagnostics.jsonl")) == strip(read_rows(one / "diagnostics.jsonl"))
