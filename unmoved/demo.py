"""The demonstration: a real control task from pixels, learnt on a CPU in minutes, with a curve and a video."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmoved.config import PRESETS, Config, Count, make_config


@dataclass(frozen=True)
class DemoArgs:
    """Train on a real task on this machine, in minutes, and show what was learnt."""

    task: str = "finger_spin"
    method: str = "rad"
    seed: int = 1
    frames: Count = PRESETS["cpu"]["frames"]
    runs: Path = Path("demo")
    """Folder for everything the demo writes."""


def demo_config(args: DemoArgs) -> Config:
    return make_config(args.task, preset="cpu", method=args.method, seed=args.seed, frames=args.frames, runs=args.runs)


def demo(args: DemoArgs) -> None:
    from unmoved.evaluate import RANDOM, Evaluator, deterministic, load_agent, uniform_random
    from unmoved.log import Rows, console, read_rows, write_video
    from unmoved.train import train

    config = demo_config(args)
    console.print(
        f"[bold]{config.task}[/] from {config.image_size} x {config.image_size} pixels, [bold]{config.method}[/], "
        f"{config.frames:,} frames. Everything goes to {config.folder}/",
        soft_wrap=True,
    )
    train(config)
    agent, config, _ = load_agent(config.folder, console.print)
    with console.status("10 episodes of the trained policy and 10 of a random one"):
        evaluator = Evaluator(config, workers=2, stream=RANDOM)
        try:
            trained = evaluator.run(deterministic(agent), 10)
            random = evaluator.run(uniform_random(agent.action_dim, config.seed), 10)
        finally:
            evaluator.close()
    video, curve = config.folder / "video" / "trained.mp4", config.folder / "curve.png"
    write_video(video, trained.frames)
    evaluations = [row for row in read_rows(config.folder / "eval.jsonl") if row["background"] == "train"]
    draw_curve(evaluations, random.row()["return_mean"], config, curve)
    ours, theirs = trained.row(), random.row()
    rows = Rows(config.folder / "demo.jsonl")
    rows.keep(0)
    for name, row in (("trained", ours), ("random", theirs)):
        rows.write({"policy": name, "seed": config.seed, **row})
    console.print(f"\ncurve: {curve}\nvideo: {video}", soft_wrap=True)
    console.print(
        f"Over 10 episodes each, a random policy returns {theirs['return_mean']:.0f} and the trained one "
        f"[bold]{ours['return_mean']:.0f}[/].",
        soft_wrap=True,
    )


def draw_curve(rows: list[dict[str, Any]], random: float, config: Config, path: Path) -> None:
    """Return against frames, with the spread of the evaluation's episodes and the random policy's level."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    frames = [row["frames"] for row in rows]
    low, high = ([sorted(row["returns"])[i * (len(row["returns"]) - 1)] for row in rows] for i in (0, 1))
    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=150, layout="constrained")
    axes.fill_between(frames, low, high, color="#3b6fb6", alpha=0.2, lw=0, label="lowest to highest episode")
    axes.plot(frames, [row["return_mean"] for row in rows], color="#3b6fb6", marker="o", ms=3, label="mean return")
    axes.axhline(random, color="0.4", ls="--", lw=1, label="random policy")
    axes.set(xlabel="frames (simulator steps)", ylabel="return", ylim=(0, None), xlim=(0, None))
    axes.set_title(f"{config.task}, {config.preset}/{config.method}, seed {config.seed}, "
                   f"{config.eval_episodes} episodes per point", fontsize=9)  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    figure.savefig(path)
    plt.close(figure)
