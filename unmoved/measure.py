"""All statistics of an agent on a batch in one dictionary, and their recording during training."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from unmoved.agent import Agent, Batch, stream_seed
from unmoved.diagnostics import (
    Estimate,
    Statistics,
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
from unmoved.gradients import gradient_noise
from unmoved.log import Rows, console, jsonable, read_rows
from unmoved.losses import Bellman, Sample, samples, unique, with_bases
from unmoved.methods import make_transform
from unmoved.replay import Replay
from unmoved.transforms import Compose, Identity, Transformation

DRAWS = 256  # of a family that is not finite
ACTIONS = 16  # of the policy at each transformation, more where there are few transformations
RESAMPLES = 1024  # of the critic's loss
TRIPLES = 4  # of gradients
COSINE_DRAWS = 8  # of a strong family: 28 pairs per state


def weak_family(agent: Agent) -> Transformation:
    """The transformation that the method's views have in common, or the configuration's where it has none."""
    method = agent.method
    for s in with_bases([*method.critic_samples(), *method.actor_samples(), *samples(method.target.mu)]):
        if s.view.on is None and not isinstance(s.view.transform, Identity):
            return s.view.transform
    return make_transform(agent.config.weak, agent.config)


def strong_families(agent: Agent) -> list[Transformation]:
    """Those that are applied on top of another view."""
    method = agent.method
    used = [*method.critic_samples(), *method.actor_samples(), *samples(method.target.mu)]
    found = {s.view.transform.name: s.view.transform for s in with_bases(used) if s.view.on is not None}
    return list(found.values())


def whole(s: Sample) -> Transformation:
    """A sample's transformation of the state, its bases included."""
    parts = [part.view.transform for part in with_bases([s], all_of_them=True)]
    return parts[0] if len(parts) == 1 else Compose(*parts)


def targets_under(agent: Agent, batch: Batch, family: Transformation, std: Tensor, generator: Generator) -> Targets:
    support = family.support()
    actions = max(ACTIONS, DRAWS // len(support)) if support is not None else ACTIONS
    return at_targets(agent, batch, family, std, generator, DRAWS, actions)


def own_targets(agent: Agent, batch: Batch, std: Tensor, generator: Generator) -> dict[str, Targets]:
    """y under the transformations of the method's own target, by view."""
    views = {s.view.name: s for s in samples(agent.method.target.mu)}
    return {name: targets_under(agent, batch, whole(s), std, generator) for name, s in views.items()}


def measure(
    agent: Agent, batch: Batch, std: Tensor, generator: Generator, families: tuple[Transformation, ...] = ()
) -> Statistics:
    """Every statistic that one batch gives. `families`: more transformations whose cosine similarity is wanted."""
    weak = weak_family(agent)
    states = at_states(agent, batch, weak, std, generator, DRAWS, ACTIONS)
    targets = own_targets(agent, batch, std, generator)
    out = target_statistics(agent, batch, weak, targets, std, generator)
    out |= critic_loss_statistics(agent, batch, {id(weak): states.Q}, targets, generator)
    out |= spread(states.improve, states.exact).statistics("actor_loss_std_across_shift")
    out["actor_loss_std_across_batch"] = std_across_batch(states.improve.flatten(0, 1))
    for units in ("author", "exact"):
        out[f"kl_{units}"] = over_states(pair_kl(states.policy, len(states.Q), units, states.exact))
    out |= cosine_statistics(weak.name, states.unit, states.exact)
    for family in {f.name: f for f in (*strong_families(agent), *families) if f.name != weak.name}.values():
        unit = unit_features(agent, batch.obs, family, generator, COSINE_DRAWS)
        out |= cosine_statistics(family.name, unit, family.support() is not None)
    out |= tangent_statistics(tangents(agent, batch, weak, generator, draws=8))
    return out | gradient_noise(agent, batch, std, generator, TRIPLES)


def target_statistics(
    agent: Agent, batch: Batch, weak: Transformation, targets: dict[str, Targets], std: Tensor, generator: Generator
) -> Statistics:
    """Mean, variance and std of y over its transformations and actions; std of the K-mean that is regressed on. Where
    the method's target has another law than the weak transformation, also under that."""
    first = samples(agent.method.target.mu)[0]
    K = 1 if agent.method.target.combine == "paired" else len(samples(agent.method.target.mu))
    laws = {"target": targets[first.view.name]}
    if whole(first).name != weak.name:
        laws["target_weak"] = targets_under(agent, batch, weak, std, generator)
    out = Statistics()
    for name, law in laws.items():
        parts = spread(law.y, law.exact)
        out |= {f"{name}_mean": over_states(law.y.mean((0, 1))), f"{name}_variance": over_states(parts.total.square())}
        out |= parts.statistics(f"{name}_std")
        out[f"{name}_std_of_mean"] = over_states(parts.total / K**0.5)
    return out


def critic_loss_statistics(
    agent: Agent, batch: Batch, known: dict[int, Tensor], targets: dict[str, Targets], generator: Generator
) -> Statistics:
    """Std of the Bellman error per state, as trained (both twins' errors summed) and of the twins' mean; where a strong
    view takes part, also of the weak terms alone, their weights made to sum to 1."""
    terms = [t for t in agent.method.critic if isinstance(t, Bellman)]
    chosen = unique(s for term in terms for s in term.needs)
    tables = critic_tables(agent, batch, chosen, known, generator, DRAWS)
    kinds = {"critic_loss_std": (terms, False), "critic_loss_std_twin_mean": (terms, True)}
    plain = [t for t in terms if all(s.view.on is None for s in t.needs)]
    if 0 < len(plain) < len(terms):
        total = sum(t.weight for t in plain)
        kinds["critic_loss_std_weak"] = ([Bellman(t.nu, t.weight / total, t.reduce) for t in plain], False)
    out = Statistics()
    for name, (used, twin_mean) in kinds.items():
        parts = critic_loss_spread(agent, used, tables, targets, generator, RESAMPLES, twin_mean)
        out |= parts.statistics(name)
    return out


def cosine_statistics(name: str, unit: dict[str, Tensor], exact: bool) -> Statistics:
    return {f"cosine_{head}_{name}": over_states(pair_cosine(u, exact)) for head, u in unit.items()}


def tangent_statistics(derivative: Tensor | None) -> Statistics:
    """tangent_square is what tangent prop penalises, tangent_norm its root per state."""
    if derivative is None:
        return {}
    square = derivative.square().mean(0)
    return {"tangent_square": over_states(square), "tangent_norm": over_states(square.sqrt())}


def tsne_distance(unit: Tensor, seed: int) -> tuple[Tensor, Estimate]:
    """Distance of the two views of a state in a t-SNE plane of all 2 B, (2, B, d) -> plane (2, B, 2) and the mean."""
    from sklearn.manifold import TSNE  # the extra `analysis`

    points = unit.flatten(0, 1).float().cpu().numpy()
    perplexity = min(30.0, (len(points) - 1) / 3)  # 30 is scikit-learn's default, and too much for few points
    plane = TSNE(n_components=2, init="pca", random_state=seed, perplexity=perplexity).fit_transform(points)
    both = torch.from_numpy(plane).reshape(2, -1, 2)
    return both, over_states((both[0] - both[1]).norm(dim=-1))


def tsne_available() -> bool:
    return find_spec("sklearn") is not None


def tsne_statistics(
    agent: Agent, batch: Batch, generator: Generator, seed: int
) -> tuple[Statistics, dict[str, Tensor]]:
    """Pair distances of both heads' features, unscaled, under two draws of the weak transformation; and the planes."""
    family, B = weak_family(agent), len(batch.reward)
    out, planes = Statistics(), {}
    with torch.no_grad():
        x = torch.cat([family(batch.obs, family.sample(B, generator)) for _ in range(2)])
        features = agent.nets.encoder(x)
        heads = {"actor": agent.nets.actor.head(features), "critic": agent.nets.critic.head(features)}
    for name, part in heads.items():
        planes[name], out[f"tsne_{name}"] = tsne_distance(part.reshape(2, B, -1), seed)
    return out, planes


class Recorder:
    """diagnostics.jsonl of a run. Its random streams are its own, seeded by the step, and it samples its own batch: a
    run is the same with and without it."""

    def __init__(self, agent: Agent, replay: Replay, folder: Path, restorable: bool) -> None:
        self.agent, self.replay, self.config = agent, replay, agent.config
        self.rows = Rows(folder / "diagnostics.jsonl")
        self.steps = -1  # at the last record
        c = self.config
        self.every, self.rare = (max(1, f // c.action_repeat) if f else 0 for f in (c.diagnostics_every, c.rare_every))
        if self.rare and not tsne_available():
            console.print("no t-SNE distances: pip install 'unmoved[analysis]'", markup=False)
        self.bias = c.keep_states or not restorable
        if self.rare and not restorable:
            console.print(
                f"{c.task} cannot be restored: the targets' bias is measured on fresh episodes, not the replay's"
            )
        elif self.rare and not c.keep_states:
            console.print("the targets' bias is left out of the diagnostics: it needs --keep-states")

    def resume(self, steps: int) -> None:
        """Cut off what was recorded after a checkpoint."""
        kept = [row for row in read_rows(self.rows.path) if row["steps"] <= steps]
        self.rows.keep(0)
        for row in kept:
            self.rows.write(row)
        self.steps = kept[-1]["steps"] if kept else -1

    def due(self, steps: int) -> bool:
        return steps % self.every == 0 and self._ready(steps)

    def _ready(self, steps: int) -> bool:
        return steps > max(self.steps, self.config.random_steps) and len(self.replay) > 0

    def record(self, counters: dict[str, Any], last: bool = False) -> dict[str, Any]:
        """Measure and write a row; nothing where there is nothing new."""
        steps, c = counters["steps"], self.config
        if not self._ready(steps):
            return {}
        started = time.monotonic()
        generator = Generator(self.agent.device).manual_seed(stream_seed(c.seed, f"diagnostics {steps}"))
        with self.replay.turns.sampling():
            batch = self.replay.sample(c.batch_size, generator)
        std = torch.tensor(c.std(steps), device=self.agent.device)
        values = numbers(measure(self.agent, batch, std, generator))
        if self.rare and (last or steps % self.rare == 0):
            values |= self._rare(batch, std, generator, steps)
        row = counters | {"cost_seconds": round(time.monotonic() - started, 3)} | jsonable(values)
        self.rows.write(row)
        self.steps = steps
        return row

    def _rare(self, batch: Batch, std: Tensor, generator: Generator, steps: int) -> dict[str, float]:
        from unmoved.montecarlo import measure_bias

        c, values = self.config, dict[str, float]()
        seed = stream_seed(c.seed, f"rollouts {steps}")
        if tsne_available():
            values |= numbers(tsne_statistics(self.agent, batch, generator, seed)[0])
        if self.bias:
            statistics, returns = measure_bias(
                self.agent,
                self.replay,
                lambda b: next(iter(own_targets(self.agent, b, std, generator).values())),
                generator,
                std=c.std(steps),
                count=c.bias_states,
                rollouts=2,
                workers=c.bias_workers,
                seed=seed,
            )
            values |= numbers(statistics) | {
                "bias_truncated": float(returns.truncated),
                "bias_restored": float(returns.restored),
            }
        return values
