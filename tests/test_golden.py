"""Parity with the reference implementations: every case of tests/golden through the library's own agent and terms.

The fixtures are numbers (see tests/golden_inputs.py for how their inputs are rebuilt). Comparison is in float64:
|a - b| <= 1e-8 max(|a|, |b|) + 1e-10, and 1e-8 of the norm for a tensor's sums.
"""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import golden_inputs as inputs
import numpy as np
import pytest
import torch
from torch import Tensor

from unmoved.agent import Agent, Batch, weigh
from unmoved.config import make_config
from unmoved.losses import Draw, PolicyKL, TangentProp, policy_distance, samples
from unmoved.methods import make_method
from unmoved.transforms import Conv, Overlay, Shift

FOLDER = Path(__file__).parent / "golden"
PRESET = {"sac": "drq", "ddpg": "drqv2", "dmgb": "dmgb"}

RAW = {"raw": "original0", "next_raw": "original0'", "obs1": "nu0", "obs2": "nu1", "next1": "mu0'", "next2": "mu1'",
       "strong": "strong0", "overlay_tangent": "mix0"}  # fmt: skip
FRESH = RAW | {"obs1": "act0", "obs2": "act1", "obs3": "nu0", "obs4": "nu1"}

# case -> (changes to the preset, the fixture's name of a view -> ours)
CASES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "sac_noaug": ({"method": "sac"}, RAW | {"obs1": "original0", "next1": "original0'"}),
    "sac_rad": ({"method": "rad"}, RAW),
    "sac_rad_plus": ({"method": "rad_plus"}, RAW),
    "sac_drq_sum": ({"method": "drq", "bellman_reduce": "sum"}, RAW),
    "sac_drq_avg": ({"method": "drq"}, RAW),
    "sac_drac": ({"method": "drac"}, RAW | {"obs1": "nu0"}),
    "sac_drq_kl": ({"method": "drq_kl"}, RAW),
    "sac_drq_tp": ({"method": "drq_tp"}, RAW),
    "sac_drq_kl_tp": ({"method": "ours"}, RAW),
    "sac_drq_tp_raw": ({"method": "drq_tp_original"}, RAW | {"raw": "still0"}),
    "sac_drq_j2": ({"method": "drq", "J": 2}, RAW),
    "ddpg_drqv2": ({"method": "drqv2"}, RAW),
    "ddpg_k2": ({"method": "drqv2", "M": 2, "K": 2}, RAW),
    "ddpg_k2_kl": ({"method": "ours", "tangent_weight": 0.0}, RAW),
    "ddpg_k2_kl_tp": ({"method": "ours"}, FRESH),
    "dmgb_sac": ({"method": "sac"}, RAW),
    "dmgb_svea_conv": ({"method": "svea", "strong": "conv"}, RAW),
    "dmgb_svea_conv_weights": ({"method": "svea", "strong": "conv"}, RAW),
    "dmgb_svea_overlay": ({"method": "svea"}, RAW),
    "dmgb_pda_base": ({"method": "ours"}, RAW),
    "dmgb_pda_shift_tp": ({"method": "ours"}, RAW),
    "dmgb_pda_overlay_tp": ({"method": "ours"}, RAW),
    "dmgb_pda_both": ({"method": "ours"}, RAW),
}


def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


@lru_cache(maxsize=1)
def parameters(family: str) -> dict[str, Tensor]:
    return {k: tensor(v) for k, v in inputs.parameters(load(f"family_{family}")).items()}


@lru_cache(maxsize=8)
def images(key: int, batch: int, channels: int = 9, size: int = 84, first_frame: int = 0) -> np.ndarray:
    return UNCACHED(key, batch, channels, size, first_frame)


UNCACHED, inputs.images = inputs.images, images


def tensor(x: Any) -> Tensor:
    return torch.as_tensor(np.asarray(x))


def close(ours: Any, theirs: Any, what: str) -> None:
    a, b = np.asarray(ours, dtype=np.float64), np.asarray(theirs, dtype=np.float64)
    assert a.shape == b.shape, f"{what}: shape {a.shape} against {b.shape}"
    error = np.abs(a - b) - (1e-8 * np.maximum(np.abs(a), np.abs(b)) + 1e-10)
    assert (error <= 0).all(), f"{what}: off by {np.abs(a - b).max():.3e} at magnitude {np.abs(b).max():.3e}"


def number(x: Tensor) -> Any:
    return x.detach().numpy()


# ------------------------------------------------------------------------------------- parameters by canonical name


def place(agent: Agent, name: str) -> Tensor:
    """The tensor (or the slice of one) that a canonical name means."""
    nets = agent.nets
    if name == "log_alpha":
        return nets.log_alpha
    owner, rest = name.split(".", 1)
    if owner == "target" and rest.startswith("encoder"):
        owner, rest = "target.encoder", rest.split(".", 1)[1]
    elif owner == "target":
        owner = "target.critic"
    module = nets.get_submodule(owner)
    if "conv" in rest:
        rest = rest.replace("conv", "convs.")
    if rest.split(".")[0] in ("q1", "q2", "trunk"):
        part, layer, kind = rest.split(".")
        mlp = module.get_submodule("trunk" if part == "trunk" else "q")
        copy = 1 if part == "q2" else 0
        values = mlp.weights if kind == "weight" else mlp.biases
        value = values[int(layer) // 2][copy]
        return value if kind == "weight" else value[0]
    return module.get_parameter(rest)


def shape_of_features(agent: Agent) -> tuple[int, int, int]:
    """(filters, rows, columns) of the last convolution."""
    size = 84
    for stride in agent.config.strides:
        size = (size - 3) // stride + 1
    return agent.config.filters, size, size


def to_ours(agent: Agent, name: str, value: Tensor) -> Tensor:
    """The fixtures flatten features as (filter, row, column), we as (row, column, filter)."""
    if not name.endswith("head.linear.weight"):
        return value
    return value.unflatten(1, shape_of_features(agent)).permute(0, 2, 3, 1).flatten(1)


def to_theirs(agent: Agent, name: str, value: Tensor) -> Tensor:
    if not name.endswith("head.linear.weight"):
        return value
    c, h, w = shape_of_features(agent)
    return value.unflatten(1, (h, w, c)).permute(0, 3, 1, 2).flatten(1)


def gradients(loss: Tensor, params: list[Tensor]) -> dict[int, Tensor]:
    grads = torch.autograd.grad(loss, params, retain_graph=True)
    return {id(p): g.contiguous() for p, g in zip(params, grads, strict=True)}


def gradient(agent: Agent, grads: dict[int, Tensor], name: str) -> Tensor:
    """As `place`, in the gradients: a twin's slice is cut out of its stacked tensor's gradient."""
    value = place(agent, name)
    if id(value) in grads:
        return grads[id(value)]
    base = value._base if value._base is not None else value
    while id(base) not in grads and base._base is not None:
        base = base._base
    return grads[id(base)].as_strided(value.size(), value.stride(), value.storage_offset())


def check_summary(ours: Tensor, theirs: dict[str, Any], what: str) -> None:
    mine = inputs.summary(ours.detach().numpy())
    close(mine["probe"], theirs["probe"], what + " probe")
    close(mine["l2"], theirs["l2"], what + " l2")
    for key in ("sum", "dotcos"):
        assert abs(mine[key] - theirs[key]) <= 1e-8 * theirs["l2"] + 1e-10, f"{what} {key}"


# ------------------------------------------------------------------------------------- one case


def make_agent(name: str) -> tuple[Agent, dict[str, Any], dict[str, str]]:
    case = load(name)
    changes, views = CASES[name]
    h = case["hyper"]
    changes = dict(changes, lr=h.get("lr", h.get("critic_lr")), alpha_lr=h.get("alpha_lr", h.get("lr")))
    if case["family"] == "dmgb":
        names = {"svea_beta": "strong_weight", "tangent_weight": "tangent_weight",
                 "overlay_tangent_weight": "overlay_tangent_weight"}  # fmt: skip
        changes |= {ours: h[theirs] for theirs, ours in names.items() if theirs in h}
        assert h["svea_alpha"] == 1 - h["svea_beta"]
    config = make_config("cheetah_run", preset=PRESET[case["family"]], **changes)
    agent = Agent(config, make_method(config), (9, 84, 84), case["action_dim"])
    agent.nets.double()
    agent.nets.log_alpha.data.fill_(math.log(0.1))  # float32 rounded it
    with torch.no_grad():
        for key, value in parameters(case["family"]).items():
            place(agent, key).copy_(to_ours(agent, key, value))
        if agent.config.polyak_encoder == 1.0:
            agent.nets.target.encoder.load_state_dict(agent.nets.encoder.state_dict())
    return agent, case, views


def make_draw(agent: Agent, case: dict[str, Any], views: dict[str, str], data: dict[str, Any]) -> Draw:
    """The fixture's listed draws under our names."""
    method, B = agent.method, case["batch_size"]
    draw = Draw({}, {}, {})
    for view, offsets in data["shift"].items():
        draw.tau[views[view]] = tensor(offsets)
    for key in ("original0", "original0'"):
        draw.tau.setdefault(key, torch.zeros(B, 0))
    draw.tau["still0"] = Shift().identity(B)
    if "overlay" in data:
        image = 255 * tensor(data["overlay"])
        draw.tau["strong0"] = (image, torch.full((B,), 0.5, dtype=torch.float64))
        if "tangent_alpha" in data:
            draw.tau["mix0"] = (image, torch.full((B,), float(data["tangent_alpha"]), dtype=torch.float64))
            draw.direction["mix0"] = torch.tensor(-1.0, dtype=torch.float64)  # the reference has x - image
    if "kernel" in data:
        draw.tau["strong0"] = tensor(data["kernel"])
    acting = [s.key for term in method.actor for s in term.acting]
    for role, noise in data["noise"].items():
        key = acting[{"actor": 0, "actor2": 1}[role]] if role.startswith("actor") else views[role]
        draw.noise[key] = tensor(noise)
    for view, direction in data.get("tangent_direction", {}).items():
        draw.direction[views[view]] = torch.tensor(direction)
    return draw


def make_batch(case: dict[str, Any], data: dict[str, Any]) -> Batch:
    discount = data["discount"] if "discount" in data else case["hyper"]["discount"] * data["not_done"]
    return Batch(
        obs=tensor(data["obs"]).double(),
        action=tensor(data["action"]),
        reward=tensor(data["reward"])[:, 0],
        discount=tensor(discount)[:, 0],
        next_obs=tensor(data["next_obs"]).double(),
    )


def check_critic(agent: Agent, batch: Batch, draw: Draw, std: Tensor, want: Any, views: dict[str, str]) -> None:
    method = agent.method
    values = agent.target_pass(batch, draw, std)
    order = [s.key + "'" for s in samples(method.target.mu)]
    for view, expected in want["next"].items():
        k = order.index(views[view])
        close(number(values.y[k]), expected["y"], f"y {view}")
        close(number(values.Q[0, k]), expected["q1"], f"target q1 {view}")
        close(number(values.Q[1, k]), expected["q2"], f"target q2 {view}")
        close(number(values.action[k]), expected["action"], f"next action {view}")
        if "log_prob" in expected:
            close(number(values.log_pi[k]), expected["log_prob"], f"next log_prob {view}")
    Y = method.target(values.y)
    critic = agent.critic_pass(batch, draw, Y)
    nu = {s.key: i for i, s in enumerate(method.critic[0].needs)}
    for view, expected in want["y_used"].items():
        close(number(Y[min(nu.get(views[view], 0), len(Y) - 1)]), expected, f"y used at {view}")
    for view, expected in want["q"].items():
        Q = critic.Q[views[view]]
        close(number(Q[0]), expected["q1"], f"q1 {view}")
        close(number(Q[1]), expected["q2"], f"q2 {view}")
    for view, expected in want["mse"].items():
        y = Y[min(nu.get(views[view], 0), len(Y) - 1)]
        error = (critic.Q[views[view]] - y).square().mean(1)
        close(number(error), [expected["q1"], expected["q2"]], f"mse {view}")
    for view, expected in want.get("tangent", {}).items():
        d = TangentProp(agent.method.tangent_samples()[0]).derivative(critic.Q[views[view]], critic.dQ[views[view]])[0]
        close(number(d), expected["derivative"], f"tangent derivative {view}")
        close(number(d.square().mean()), expected["value"], f"tangent value {view}")
    loss, metrics = weigh(method.critic, critic)
    close(number(loss), want["loss"], "critic loss")
    regression = sum(t.weight * metrics[t.name] for t in method.critic if not isinstance(t, TangentProp))
    close(number(regression), want["regression_loss"], "regression loss")
    if "grad" in want:
        grads = gradients(loss, agent.critic_params)
        for name, expected in want["grad"].items():
            check_summary(to_theirs(agent, name, gradient(agent, grads, name)), expected, f"critic gradient {name}")


def check_actor(
    agent: Agent, features: dict[str, Tensor], draw: Draw, std: Tensor, want: Any, views: dict[str, str]
) -> None:
    actor = agent.actor_pass(features, draw, std)
    loss, metrics = weigh(agent.method.actor, actor)
    for view, expected in want["actor"]["policy"].items():
        key = views[view]
        close(number(actor.policy[key].mu), expected["mu"], f"mu {view}")
        if "std" in expected:
            close(number(actor.policy[key].std), np.broadcast_to(expected["std"], actor.policy[key].std.shape), "std")
        if "log_prob" in expected:
            close(number(actor.log_pi[key]), expected["log_prob"], f"log_prob {view}")
    for view, expected in want["actor"]["q"].items():
        close(number(actor.Q[views[view]][0]), expected["q1"], f"actor q1 {view}")
        close(number(actor.Q[views[view]][1]), expected["q2"], f"actor q2 {view}")
    close(number(loss), want["actor"]["loss"], "actor loss")
    close(number(metrics[agent.method.actor[0].name]), want["actor"]["policy_loss"], "policy loss")
    if "kl" in want["actor"]:
        kl = want["actor"]["kl"]
        term = next(t for t in agent.method.actor if isinstance(t, PolicyKL))
        assert samples(term.eta)[0].key == views[kl["target_view"]]
        assert samples(term.mu)[0].key == views[kl["trained_view"]]
        close(number(term.distance(actor, "author").mean()), kl["author"], "KL author")
        close(number(term.distance(actor, "author")), kl["author_per_sample"], "KL author per sample")
        if "exact" in kl:
            close(number(term.distance(actor, "exact").mean()), kl["exact"], "KL exact")
            close(number(term.distance(actor, "exact")), kl["exact_per_sample"], "KL exact per sample")
        if "mean_squared_difference" in kl:
            p, q = actor.policy[views[kl["target_view"]]], actor.policy[views[kl["trained_view"]]]
            close(number(policy_distance(p, q, "squared").mean()), kl["mean_squared_difference"], "squared distance")
    if "alpha" in want:
        log_pi = next(iter(actor.log_pi.values())).detach()
        alpha_loss = agent.temperature_loss(log_pi)
        close(number(alpha_loss), want["alpha"]["loss"], "alpha loss")
        grad = torch.autograd.grad(alpha_loss, agent.nets.log_alpha)[0]
        close(number(grad), want["alpha"]["grad_log_alpha"], "alpha gradient")
    if "grad" in want["actor"]:
        grads = gradients(loss, agent.actor_params)
        for name, expected in want["actor"]["grad"].items():
            check_summary(to_theirs(agent, name, gradient(agent, grads, name)), expected, f"actor gradient {name}")


class Watch:
    """Checks the actor's half from inside `update`, between the critic's step and the actor's."""

    def __init__(self, agent: Agent, early: dict[str, Tensor], want: Any, views: dict[str, str]) -> None:
        self.agent, self.early, self.want, self.views, self.seen = agent, early, want, views, False
        self.update_actor, agent.update_actor = agent.update_actor, self  # type: ignore[method-assign]

    def __call__(self, features: dict[str, Tensor], draw: Draw, std: Tensor) -> Any:
        if self.agent.config.early_actor_features:  # of before the critic's step
            assert all(torch.equal(features[k], self.early[k]) for k in self.early)
        check_actor(self.agent, features, draw, std, self.want, self.views)
        self.seen = True
        return self.update_actor(features, draw, std)

    def stop(self) -> None:
        assert self.seen
        self.agent.update_actor = self.update_actor  # type: ignore[method-assign]


def check_after(agent: Agent, before: dict[str, Tensor], want: dict[str, Any]) -> None:
    if "log_alpha" in want:
        close(number(agent.nets.log_alpha), want["log_alpha"], "log_alpha")
    for name, expected in want["parameters"].items():
        value = to_theirs(agent, name, place(agent, name).detach())
        close(inputs.summary(value.numpy())["probe"], expected["probe"], f"{name} after")
        delta = inputs.summary((value - before[name]).numpy())
        close(delta["l2"], expected["delta_l2"], f"{name} delta l2")
        assert abs(delta["dotcos"] - expected["delta_dotcos"]) <= 1e-8 * expected["delta_l2"] + 1e-10, name


@pytest.mark.parametrize("name", CASES)
def test_reference_is_reproduced(name: str) -> None:
    agent, case, views = make_agent(name)
    for i, want in enumerate(case["updates"]):
        data = inputs.batch(case, i)
        batch, draw = make_batch(case, data), make_draw(agent, case, views, data)
        std = torch.tensor(data.get("stddev", 0.0), dtype=torch.float64)
        if "stddev" in data:
            assert abs(agent.config.std(data["step"]) - data["stddev"]) < 1e-12
        if i == 0:
            check_actor(agent, agent.actor_features(batch, draw), draw, std, case["actor_at_init"], views)
        check_critic(agent, batch, draw, std, want["critic"], views)
        before = {n: to_theirs(agent, n, place(agent, n).detach().clone()) for n in want["after"]["parameters"]}
        early = agent.actor_features(batch, draw)

        # The actor's half is checked inside the real update, at the moment where it happens.
        watch = Watch(agent, early, want, views)
        agent.update(batch, draw, std)
        watch.stop()
        check_after(agent, before, want["after"])


def test_every_case_is_covered() -> None:
    cases = {p.stem for p in FOLDER.glob("*.json") if load(p.stem).get("kind") == "case"}
    assert cases - {"sac_shift_table"} == set(CASES)


def test_all_81_shifts() -> None:
    """Q and targets at every shift, one forward pass per shift."""
    table, agent = load("sac_shift_table"), make_agent("sac_rad")[0]
    spec = table["batches"][0] if "batches" in table else table
    B, dim = table["batch_size"], table["action_dim"]
    obs = tensor(inputs.images(spec["image_key"], B)).double()
    next_obs = tensor(inputs.images(spec["image_key"], B, first_frame=spec["next_first_frame"])).double()
    action = tensor(inputs.actions(spec["action_key"], B, dim))
    reward = tensor(inputs.rewards(spec["reward_key"], B))[:, 0]
    batch = Batch(obs, action, reward, 0.99 * tensor(inputs.not_done(B))[:, 0], next_obs)
    q, y = [], []
    for i, tau in enumerate(Shift().support()):
        draw = Draw({"nu0": tau.expand(B, 2), "mu0'": tau.expand(B, 2)}, {}, {})
        draw.noise["mu0'"] = tensor(inputs.noise(table["noise_key_first"] + i, B, dim))
        values = agent.target_pass(batch, draw, torch.zeros(()))
        with torch.no_grad():
            q.append(agent.critic_pass(batch, draw, values.y).Q["nu0"].mean(0))
        y.append(values.y[0])
    close(torch.stack(q, 1).numpy(), table["q_mean"], "Q over shifts")
    close(torch.stack(y, 1).numpy(), table["y"], "y over shifts")


def test_image_operations() -> None:
    want = load("transforms")
    small = tensor(inputs.images(want["shift"]["image_key"], 1, channels=3, size=6)).double()
    support = Shift().support()
    shifted = Shift()(small.expand(81, -1, -1, -1), support)
    assert torch.equal(shifted, tensor(want["shift"]["output"]).double().reshape(shifted.shape))
    for d, expected in enumerate(want["tangent"]["output"]):
        t = Shift().tangent(small, Shift().identity(1), torch.tensor(d))
        close(t.numpy().reshape(-1), np.reshape(expected, -1), f"tangent {d}")
    for name in ("overlay", "overlay_tangent", "random_conv"):
        check_photometric(name, want[name])


def check_photometric(name: str, want: dict[str, Any]) -> None:
    shape = np.asarray(want["output"]).shape
    x = tensor(inputs.images(want["image_key"], shape[0], channels=shape[1], size=shape[2])).double()
    if name == "random_conv":
        out = Conv()(x, tensor(inputs.conv_kernels(want["kernel_key"], shape[0])))
    else:
        image = tensor(inputs.images(want["overlay_key"], shape[0], channels=3, size=shape[2])).double()
        tau = (image, torch.full((shape[0],), 0.5, dtype=torch.float64))
        family = Overlay(torch.zeros(1, 3, 6, 6), size=6)
        out = family(x, tau) if name == "overlay" else -family.tangent(x, tau, torch.tensor(1.0))
    close(out.numpy(), want["output"], name)
