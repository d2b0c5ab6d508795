"""`unmoved diagnose RUN`: every statistic of a checkpoint, as a table, a row and a picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from unmoved import checkpoint as checkpoints
from unmoved.agent import Agent, Batch, stream_seed
from unmoved.config import Config
from unmoved.diagnostics import States, at_states, numbers
from unmoved.envs.worker import EnvProcess
from unmoved.errors import UserError
from unmoved.evaluate import TRAIN, env_kwargs, pick_device
from unmoved.log import Rows, console, jsonable, read_rows
from unmoved.losses import Method, policy_distance
from unmoved.measure import (
    DRAWS,
    measure,
    own_targets,
    tsne_available,
    tsne_statistics,
    weak_family,
)
from unmoved.methods import make_method, make_transform
from unmoved.replay import Replay
from unmoved.transforms import Shift, Transformation

NO_TSNE = "t-SNE needs scikit-learn: pip install 'unmoved[analysis]'"

# What each number says; a std's two parts stand beside it.
MEANING = {
    "target_mean": "y, the target, mean over states",
    "target_variance": "of y over transformations and actions, per state (Table G)",
    "target_std": "of y over transformations and actions, per state (Table B)",
    "target_std_of_mean": "of the mean of K targets that is regressed on",
    "target_weak_std": "the same under the weak transformation",
    "critic_loss_std": "of the Bellman error over draws, per state, both twins summed (Table B)",
    "critic_loss_std_twin_mean": "the same of (Q1 + Q2)/2",
    "critic_loss_std_weak": "the same of the weak views alone",
    "actor_loss_std_across_shift": "of alpha log pi - Q over transformations and actions, per state",
    "actor_loss_std_across_batch": "of the same across states (the paper's magnitude, Table B)",
    "kl_author": "of the policies at two transformations, the tables' units (Table B)",
    "kl_exact": "the same, exact: before the tanh, summed over dimensions",
    "tangent_square": "(dQ/dtau)^2, what tangent prop penalises",
    "tangent_norm": "its root per state",
    "critic_gradient_std": "root of the covariance's trace over draws, at one batch",
    "critic_gradient_snr": "norm of the mean gradient / std",
    "actor_gradient_std": "root of the covariance's trace over draws, at one batch",
    "actor_gradient_snr": "norm of the mean gradient / std",
    "tsne_actor": "distance of a state's two views in a t-SNE plane",
    "tsne_critic": "distance of a state's two views in a t-SNE plane",
    "bias": "E y - r - gamma G, G played out by the policy",
    "bias_mse": "E (y - r - gamma G)^2 (Table G)",
    "bias_squared": "(E y - r - gamma E G)^2, the rollouts' noise taken off",
    "bias_soft": "as bias, entropy bonus in the return, as y has it",
    "bias_mse_soft": "as bias_mse, with the bonus",
    "bias_squared_soft": "as bias_squared, with the bonus",
    "return_played": "r + gamma G",
    "return_played_soft": "with the bonus",
}


@dataclass
class Loaded:
    agent: Agent
    replay: Replay
    config: Config
    steps: int

    def std(self) -> Tensor:
        return torch.tensor(self.config.std(self.steps), device=self.agent.device)


def load_run(run: Path, device: str = "cpu", steps: int | None = None, method: Method | None = None) -> Loaded:
    """Agent and replay of a checkpoint. `method`: the recipe of a run that was trained with one's own."""
    config, place = Config.load(run), pick_device(device)
    parts = checkpoints.load(run, ("agent", "replay"), console.print, steps=steps)
    if parts is None:
        raise UserError(f"{run} has no whole checkpoint yet")
    state = parts["agent"]
    env = EnvProcess(**env_kwargs(config, TRAIN))  # the replay's layout depends on an episode's length
    env.close()
    agent = Agent(config, method or make_method(config), tuple(state["obs_shape"]), state["action_dim"], place)
    agent.nets.load_state_dict(state["agent"]["nets"])
    replay = Replay(
        config.capacity,
        tuple(state["obs_shape"]),
        state["action_dim"],
        stack=config.stack,
        n_step=config.n_step,
        discount=config.discount,
        episode_steps=env.episode_steps,
        state_size=parts["replay"]["states"].shape[1],
        device=place,
    )
    replay.load_state(parts["replay"])
    return Loaded(agent, replay, config, state["steps"])


def parse_transforms(names: str, config: Config) -> tuple[Transformation, ...]:
    return tuple(make_transform(name.strip(), config) for name in names.split(",") if name.strip())


def diagnose(
    run: Path,
    *,
    checkpoint: int | None = None,
    transforms: str = "",
    batch: int = 256,
    tsne: bool = True,
    rollouts: int = 0,
    workers: int = 2,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Measure, print, and leave RUN/diagnose.jsonl (a row is added) and RUN/diagnose.png."""
    if batch < 2 or rollouts < 0 or workers < 1:
        raise UserError("--batch must be at least 2, --workers at least 1, --rollouts not negative")
    families = parse_transforms(transforms, Config.load(run))
    with console.status(f"loading {run}"):
        loaded = load_run(run, device, checkpoint)
    agent, config, std = loaded.agent, loaded.config, loaded.std()
    generator = Generator(agent.device).manual_seed(stream_seed(seed, "diagnose"))
    sample = loaded.replay.sample(batch, generator)
    with console.status(f"{batch} states, all transformations of each"):
        values = numbers(measure(agent, sample, std, generator, families))
    planes: dict[str, Tensor] = {}
    if tsne and not tsne_available():
        console.print(NO_TSNE, markup=False)
    elif tsne:
        with console.status("t-SNE"):
            statistics, planes = tsne_statistics(agent, sample, generator, seed)
            values |= numbers(statistics)
    if rollouts:
        values |= played_out(loaded, rollouts, workers, generator, seed)
    frames = loaded.steps * config.action_repeat
    row = {"frames": frames, "steps": loaded.steps, "batch": batch, "seed": seed} | jsonable(values)
    Rows(run / "diagnose.jsonl").write(row)
    title = f"{config.task}  {config.preset}/{config.method}  seed {config.seed}  at {frames:,} frames, {batch} states"
    print_table(values, title)
    picture = run / "diagnose.png"
    draw(agent, sample, std, generator, values, planes, read_rows(run / "diagnostics.jsonl"), title, picture)
    console.print(f"picture: {picture}", soft_wrap=True)
    return row


def played_out(loaded: Loaded, count: int, workers: int, generator: Generator, seed: int) -> dict[str, float]:
    """The targets' bias against returns of `count` transitions, two rollouts each."""
    from unmoved.montecarlo import horizon, measure_bias, waves

    agent, std = loaded.agent, loaded.std()
    if loaded.replay.states.shape[1] == 0:
        console.print("this run stored no simulator states (--keep-states): the returns are those of fresh episodes")
    total = waves(2 * count, workers)
    done = 0

    with console.status("") as status:

        def progress() -> None:
            nonlocal done
            done += 1
            status.update(f"rollouts of {horizon(loaded.config.discount)} steps: {done} of {total} rounds")

        statistics, returns = measure_bias(
            agent,
            loaded.replay,
            lambda b: next(iter(own_targets(agent, b, std, generator).values())),
            generator,
            std=float(std),
            count=count,
            rollouts=2,
            workers=workers,
            seed=stream_seed(seed, "rollouts"),
            progress=progress,
        )
    if returns.truncated:
        console.print(f"{returns.truncated} rollouts were cut short by a time limit of the environment's own")
    return numbers(statistics) | {"bias_restored": float(returns.restored), "bias_truncated": float(returns.truncated)}


def print_table(values: dict[str, float], title: str) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for column in ("statistic", "value", "± s.e.", "transformation", "action"):
        side: Any = "left" if column == "statistic" else "right"
        table.add_column(column, header_style="bold", justify=side, no_wrap=True)
    table.add_column("what it is", header_style="bold")
    parts = ("_se", "_transformation", "_action")
    for name, value in values.items():
        if name.endswith(parts) or f"{name}_se" not in values:
            continue
        split = [format_number(values[name + part]) if name + part in values else "" for part in parts]
        table.add_row(name, format_number(value), *split, MEANING.get(name, cosine_meaning(name)))
    console.print(table)


def cosine_meaning(name: str) -> str:
    if not name.startswith("cosine_"):
        return ""
    _, head, family = name.split("_", 2)
    return f"cosine similarity of the {head}'s features, two draws of {family}"


def format_number(value: float) -> str:
    return "-" if not math.isfinite(value) else f"{value:.4g}"


# ------------------------------------------------------------------------------------------------ the picture


def draw(
    agent: Agent,
    batch: Batch,
    std: Tensor,
    generator: Generator,
    values: dict[str, float],
    planes: dict[str, Tensor],
    history: list[dict[str, Any]],
    title: str,
    path: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(11, 6.2), dpi=150, layout="constrained")
    family = weak_family(agent)
    states = at_states(agent, batch, family, std, generator, DRAWS, actions=2)
    if isinstance(family, Shift):
        draw_maps(figure, axes[0, :2], states, family)
    else:
        for axis in axes[0, :2]:
            axis.set_axis_off()
    draw_split(axes[0, 2], values)
    draw_cosines(axes[1, 0], values)
    draw_plane(axes[1, 1], planes.get("critic"))
    draw_history(axes[1, 2], history)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)
    plt.close(figure)


def draw_maps(figure: Any, axes: Any, states: States, family: Shift) -> None:
    """How Q and the policy move with the shift: a 9 x 9 picture each, identity in the middle."""
    side, reach = 2 * family.pad + 1, family.pad + 0.5
    Q = states.Q.mean(1)
    change = (Q - Q.mean(0)).abs().mean(1)
    mu, scale = (v.reshape(side * side, -1, v.shape[-1]) for v in (states.policy.mu, states.policy.std))
    middle = side * side // 2
    here = replace(states.policy, mu=mu[middle], std=scale[middle])
    views = [replace(states.policy, mu=m, std=s) for m, s in zip(mu, scale, strict=True)]
    far = [policy_distance(here, view, "author").mean() for view in views]
    for axis, value, name in (
        (axes[0], change, "|Q(f(s)) - mean over shifts|"),
        (axes[1], torch.stack(far), "KL(π(s) ‖ π(f(s))), tables' units"),
    ):
        image = axis.imshow(
            value.reshape(side, side).cpu().numpy(), extent=(-reach, reach, reach, -reach), cmap="viridis"
        )
        figure.colorbar(image, ax=axis, shrink=0.8)
        axis.set_title(name, fontsize=9)
        axis.set(xlabel="shift, columns", ylabel="shift, rows")


def draw_split(axis: Any, values: dict[str, float]) -> None:
    """Each std and its two parts."""
    shown = {"target_std": "target", "critic_loss_std": "critic loss", "actor_loss_std_across_shift": "actor loss"}
    shown = {name: label for name, label in shown.items() if name in values}
    for k, (part, label) in enumerate((("", "all"), ("_transformation", "transformation"), ("_action", "action"))):
        height = [values[name + part] for name in shown]
        error = [values[f"{name}{part}_se"] for name in shown]
        axis.bar([i + 0.27 * (k - 1) for i in range(len(shown))], height, 0.25, yerr=error, label=label)
    axis.set_xticks(range(len(shown)), shown.values(), fontsize=8)
    axis.set_title("std over draws, per state", fontsize=9)
    axis.legend(frameon=False, fontsize=7)


def draw_cosines(axis: Any, values: dict[str, float]) -> None:
    names = [
        n.removeprefix("cosine_critic_") for n in values if n.startswith("cosine_critic_") and not n.endswith("_se")
    ]
    for k, head in enumerate(("actor", "critic")):
        keys = [f"cosine_{head}_{name}" for name in names]
        at = [i + 0.2 * (2 * k - 1) for i in range(len(names))]
        axis.bar(at, [values[key] for key in keys], 0.38, yerr=[values[f"{key}_se"] for key in keys], label=head)
    low = min(values[f"cosine_{head}_{name}"] for head in ("actor", "critic") for name in names)
    axis.set_ylim(min(0.0, low - 0.05), 1.0)  # bars begin at 0
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_title("cosine similarity of a state's features", fontsize=9)
    axis.legend(fontsize=7, loc="lower right", framealpha=0.9)


def draw_plane(axis: Any, plane: Tensor | None) -> None:
    if plane is None:
        axis.set_axis_off()
        return
    for a, b in plane.transpose(0, 1).tolist():
        axis.plot([a[0], b[0]], [a[1], b[1]], color="0.6", lw=0.5, zorder=1)
    for view in plane:
        axis.scatter(*view.T.numpy(), s=4, zorder=2)
    axis.set_title("t-SNE of the critic's features, pairs joined", fontsize=9)
    axis.set_xticks([])
    axis.set_yticks([])


def draw_history(axis: Any, history: list[dict[str, Any]]) -> None:
    """The statistics that training recorded."""
    if len(history) < 2:
        axis.set_axis_off()
        return
    frames = [row["frames"] for row in history]
    for name, label in (
        ("target_std", "target std"),
        ("critic_loss_std_twin_mean", "critic loss std"),
        ("kl_author", "KL"),
    ):
        axis.plot(frames, [row.get(name) or math.nan for row in history], marker=".", label=label)
    axis.set_yscale("log")
    axis.set(xlabel="frames (simulator steps)")
    axis.set_title("during training", fontsize=9)
    axis.legend(frameon=False, fontsize=7)
