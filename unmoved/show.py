"""A picture sheet of a task, for the eye: what the transformations do to a state, their tangents, the backgrounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from torch import Generator, Tensor

from unmoved import envs
from unmoved.config import make_config
from unmoved.errors import UserError
from unmoved.log import console
from unmoved.methods import make_transform
from unmoved.transforms import Tau, Transformation

Image = NDArray[np.uint8]

# A tangent's unit, by the last family's name; else tau has none.
UNITS = {"shift": "pixel", "rotate": "degree", "blur": "pixel of σ", "overlay": "unit of weight"}
GENERATED = {"overlay": "generated images", "video": "generated clips", "distracting": "generated clips"}


@dataclass(frozen=True)
class ShowArgs:
    """Draw a picture sheet of a task: the state, f_tau(s), the tangent, and the backgrounds."""

    task: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK")]
    """As in `unmoved train`."""
    transforms: str = "shift,overlay,conv,rotate,blur"
    """Separated by commas; a + composes: shift+rotate."""
    backgrounds: str = ""
    """Separated by commas, such as train,color_hard,video_hard."""
    videos: Path | None = None
    """Folder of clips for the backgrounds; without one they are generated."""
    intensity: float | None = None
    """Of background distracting."""
    overlay: Path | None = None
    """Folder of photographs for overlay; without one they are generated."""
    draws: int = 4
    """Views f_tau(s) per transformation."""
    steps: int = 20
    """Agent steps of a random policy before the picture is taken."""
    size: int = 84
    camera: int | None = None
    seed: int = 0
    out: Path | None = None
    """PNG to write; by default TASK.png."""


@dataclass
class Row:
    """One line of the sheet: its name and its panels."""

    name: str
    panels: list[Panel]


@dataclass
class Panel:
    image: NDArray[Any] | None  # (h, w, 3) bytes, (h, w) signed, or nothing to show
    caption: str = ""


def show(args: ShowArgs) -> Path:
    task = envs.canonical(args.task)
    if min(args.draws, args.size) < 1 or args.steps < 0:
        raise UserError("--draws and --size must be at least 1, --steps at least 0")
    config = make_config(task, overlay=args.overlay, image_size=args.size)
    # All names are checked before anything is rendered.
    families = {name: make_transform(name, config) for name in listed(args.transforms)}
    with console.status(f"drawing {task}"):
        (state,) = play(args, task)
        rows = [transform_row(name, f, state, args) for name, f in families.items()]
        rows += [background_row(name, task, args) for name in listed(args.backgrounds)]
        if not rows:
            raise UserError("nothing to show: name --transforms or --backgrounds")
        out = args.out or Path(f"{task.replace('/', '-').replace(':', '-')}.png")
        title = f"{task}, after {args.steps} random agent steps, seed {args.seed}"
        if families:
            title += (
                "\ntangents in grey levels, mean over the colours: red where a pixel gets brighter, blue where darker"
            )
        draw(rows, title, out)
    console.print(f"saved: {out}", soft_wrap=True)
    return out


def listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def play(args: ShowArgs, task: str, episodes: int = 1, **background: Any) -> list[Tensor]:
    """Each episode's observation (1, 9, size, size) after its first steps, the same for every background."""
    env = envs.make(task, seed=args.seed, size=args.size, camera=args.camera, **background)
    seen = []
    try:
        for episode in range(episodes):
            obs, _ = env.reset(options={"episode": episode})
            rng = np.random.default_rng([args.seed, episode])
            for _ in range(args.steps):
                action = rng.uniform(-1, 1, env.simulator.action_dim).astype(np.float32)
                obs, _, terminated, truncated, _ = env.step(action)
                if terminated or truncated:
                    break
            seen.append(torch.from_numpy(obs.copy())[None])
    finally:
        env.close()
    return seen


def transform_row(name: str, family: Transformation, state: Tensor, args: ShowArgs) -> Row:
    generator = Generator().manual_seed(args.seed)
    x = state.expand(args.draws, -1, -1, -1)
    tau = family.sample(args.draws, generator)
    views = [
        Panel(newest(view), caption(tau, i)) for i, view in enumerate(family(x, tau).clamp(0, 255).to(torch.uint8))
    ]
    panels = [Panel(newest(state[0]), "s"), *views, tangent_panel(name, family, x, tau, generator)]
    return Row(label(name, args.overlay is None), panels)


def tangent_panel(name: str, family: Transformation, x: Tensor, tau: Tau, generator: Generator) -> Panel:
    """At the first view, averaged over the colours."""
    try:
        tangent = family.tangent(x, tau, family.direction(generator))[0, -3:]
    except TypeError:  # its parameter is not continuous
        return Panel(None, "no tangent")
    values = tangent.mean(0).numpy()
    unit = UNITS.get(name.split("+")[-1], "unit of τ")
    return Panel(values, f"tangent of the first view,\n±{scale(values):.3g} per {unit}")


def scale(values: NDArray[np.float32]) -> float:
    """The grey levels that the deepest red and blue stand for."""
    return max(float(np.abs(values).max()), 1e-6)


def background_row(name: str, task: str, args: ShowArgs) -> Row:
    """One panel per episode: that is what decides the colours and the clip."""
    settings: dict[str, Any] = {"background": name, "videos": args.videos, "intensity": args.intensity}
    settings = {k: v for k, v in settings.items() if v is not None}
    states = play(args, task, args.draws + 2, **settings)
    panels = [Panel(newest(state[0]), f"episode {k}") for k, state in enumerate(states)]
    return Row(label(name, args.videos is None), panels)


def label(name: str, generated: bool) -> str:
    kind = next((text for part, text in GENERATED.items() if part in name), "")
    return f"{name}\n({kind})" if generated and kind else name


def newest(obs: Tensor) -> Image:
    """(9, h, w) -> (h, w, 3): the last frame of the stack."""
    return obs[-3:].permute(1, 2, 0).numpy()


def caption(tau: Tau, i: int) -> str:
    """f_tau(s), and tau where it is a number or two."""
    if not isinstance(tau, Tensor) or not 0 < tau[i].numel() <= 2:
        return "f_τ(s)"
    return "τ = " + ", ".join(f"{v:.3g}" for v in tau[i].flatten().tolist())


def draw(rows: list[Row], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = max(len(row.panels) for row in rows)
    size = (1.2 + 1.35 * columns, 0.4 + 1.62 * len(rows))  # inches
    figure, grid = plt.subplots(len(rows), columns, figsize=size, dpi=150, squeeze=False, layout="constrained")
    for line, row in zip(grid, rows, strict=True):
        line[0].set_ylabel(row.name, fontsize=8, rotation=0, ha="right", va="center", labelpad=6)
        for axes, panel in zip(line, row.panels, strict=False):
            axes.set(xticks=[], yticks=[], box_aspect=1)
            axes.spines[:].set_visible(False)
            axes.set_title(panel.caption, fontsize=6.5, pad=3)
            if panel.image is None:
                axes.set_facecolor("0.93")
            elif panel.image.ndim == 3:
                axes.imshow(panel.image, interpolation="nearest")
            else:  # signed: white is 0
                limit = scale(panel.image)
                axes.imshow(panel.image, cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
                axes.spines[:].set(visible=True, color="0.8")
    figure.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
