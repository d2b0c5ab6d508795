"""One frozen configuration of a run, and the paper's three hyperparameter tables as presets.

`frames` are simulator steps, `steps` are agent steps (frames / action_repeat). Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from unmoved.errors import UserError, unknown


def parse_count(text: str) -> int:
    """'500k' -> 500000, '1.1M' -> 1100000."""
    scale = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    try:
        value = Decimal(text[:-1] if scale > 1 else text) * scale
        if value == value.to_integral_value():
            return int(value)
    except (InvalidOperation, OverflowError):
        pass
    raise ValueError(f"'{text}' is not a count such as 5000, 500k or 1.1M")


def format_count(n: int) -> str:
    for scale, letter in ((1_000_000, "M"), (1_000, "k")):
        if n >= scale and n % (scale // 10) == 0:
            return f"{Decimal(n) / scale:f}{letter}"
    return str(n)


Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="COUNT",
        instance_from_str=lambda args: parse_count(args[0]),
        is_instance=lambda x: isinstance(x, int),
        str_from_instance=lambda n: [format_count(n)],
    ),
]


@dataclass(frozen=True)
class Config:
    """A run. Defaults are the paper's SAC/DrQ table; presets replace what differs."""

    # What is trained
    task: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK")] = "walker_walk"
    """dm_control task such as walker_run, toy_reach, a Gymnasium id, or module:function."""
    method: str = "ours"
    """Recipe: see `unmoved methods`."""
    preset: str = "drq"
    """drq, drqv2, dmgb (the paper's three tables), dmgb_readme, cpu."""
    seed: int = 1
    frames: Count = 500_000
    """Simulator steps in all (agent steps x action repeat)."""

    # Environment
    action_repeat: int = 2
    stack: int = 3
    image_size: int = 84
    camera: int | None = None
    """None: 2 for quadruped, else 0."""
    shadow_map: int | None = None
    """Side of the shadow map. 1024 renders faster and changes under 0.1 % of the pixels; None is dm_control's 2048."""
    background: str = "train"
    """Scene to train in: train, color_easy, color_hard, video_easy, video_hard, distracting."""
    videos: Path | None = None
    """Folder of clips for video_easy, video_hard and distracting; without one, clips are generated."""
    intensity: float = 0.1
    """Of background distracting, 0 to 1."""

    # Loop
    random_steps: Count = 1_000
    """Agent steps of uniform random actions before the first update."""
    burst: Count = 0
    """Updates at once after the random steps (DMControl-GB: 1000)."""
    update_every: int = 1
    """Agent steps per round of updates."""
    updates_per_step: int = 1
    """Updates per round, each on a new batch."""
    batch_size: int = 256
    capacity: Count = 100_000
    """Transitions kept."""
    n_step: int = 1
    discount: float = 0.99
    actor_every: int = 2
    target_every: int = 2

    # Networks
    policy: Literal["tanh", "tanh_dmgb", "clipped"] = "tanh"
    """tanh: SAC as in DrQ. tanh_dmgb: SAC as in DMControl-GB. clipped: DDPG as in DrQ-v2."""
    strides: tuple[int, ...] = (2, 1, 1, 1)
    """One 3x3 convolution per entry."""
    filters: int = 32
    feature_dim: int = 50
    hidden_dim: int = 1024
    last_relu: bool = True
    centre: bool = False
    """Subtract 0.5 from the scaled image."""
    conv_init: Literal["orthogonal", "delta"] = "orthogonal"
    log_std_bounds: tuple[float, float] = (-10.0, 2.0)

    # Optimisation
    lr: float = 1e-3
    alpha_lr: float = 1e-3
    alpha_beta1: float = 0.9
    init_temperature: float = 0.1
    polyak_q: float = 0.01
    polyak_head: float = 0.01
    polyak_encoder: float = 0.01
    """Rate of the target's convolutions; 1.0 is DrQ-v2's shared encoder."""
    early_actor_features: bool = False
    """The actor sees the convolutions as before the critic's step (DrQ-v2)."""
    std_start: float = 1.0
    std_end: float = 0.1
    std_steps: Count = 500_000
    """Linear schedule of DDPG's exploration, in agent steps."""
    std_clip: float = 0.3

    # Method
    weak: str = "shift"
    """Transformation mu, and the first nu."""
    strong: str = "overlay"
    """Strong transformation nu of svea and of ours in the dmgb preset: overlay, conv, rotate, blur, …"""
    overlay: Path | None = None
    """Folder of photographs for overlay; without one, a generated bank is used."""
    pad: int = 4
    """Pixels of the random shift."""
    M: int | None = None
    """Views of s in the critic's loss (None: the recipe's)."""
    K: int | None = None
    """Views of s' in the target."""
    J: int = 1
    """Views of s in the policy term."""
    kl_weight: float = 0.1
    kl_units: Literal["author", "exact", "squared"] = "author"
    kl_stop: Literal["first", "second", "none"] = "first"
    tangent_weight: float = 0.1
    tangent_twins: Literal["min", "mean", "each"] = "min"
    tangent_reduce: Literal["sum", "mean"] = "sum"
    tangent_form: Literal["author", "printed"] = "author"
    overlay_tangent_weight: float = 0.0
    """Tangent prop along overlay's mixing weight (dmgb)."""
    explicit_weight: float = 0.2
    """Weight of drac's regulariser."""
    strong_weight: float = 0.5
    """Weight of the strong view's Bellman term; the weak one's is 1 minus it."""
    strong_in_target: bool = False
    """Apply the strong transformation to s' in svea's target."""
    weak_in_target: bool = True
    """Shift s' in svea's target; the benchmark's code of 2023 did not."""
    bellman_reduce: Literal["mean", "sum"] = "mean"

    # Evaluation and records
    eval_every: Count = 10_000
    """Frames between evaluations."""
    eval_episodes: int = 10
    """Per background."""
    eval_backgrounds: tuple[str, ...] = ("train",)
    """Scenes to evaluate in."""
    eval_workers: int = 0
    """Processes that play evaluation episodes, 0: one per core; which episodes does not depend on it."""
    log_every: Count = 1_000
    """Agent steps per row of train.jsonl."""
    checkpoint_every: Count = 50_000
    """Frames between checkpoints; 0: only at the end."""
    video: bool = False
    """Write an MP4 of an episode at each evaluation."""
    tensorboard: bool = False
    """Also write events for TensorBoard."""
    wandb: bool = False
    """Also log to Weights & Biases."""
    trackio: bool = False
    """Also log to Trackio."""
    keep_states: bool = False
    """Store the simulator's state beside each step in the replay: the bias of the targets is measured from there."""
    diagnostics: bool = False
    """Record the paper's statistics in diagnostics.jsonl; they do not change the run."""
    diagnostics_every: Count = 10_000
    """Frames between records."""
    rare_every: Count = 100_000
    """Frames between records that also have t-SNE distances and, with --keep-states, the targets' bias; 0: never."""
    bias_states: int = 32
    """Transitions whose returns are played out, twice each."""
    bias_workers: int = 8
    """Processes that play them."""

    # Machine
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, …"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Of convolutions and hidden products; parameters, targets and losses are always fp32. auto: bf16 on a GPU."""
    compile: bool = True
    """On a GPU: compile the passes and replay each update as one CUDA graph. Takes half a minute at the start."""
    lag: Literal[0, 1] = 0
    """Updates by which the acting policy is behind: 1 lets acting overlap with the update on a GPU."""
    runs: Path = Path("runs")
    """Folder of all runs; this one is <runs>/<preset>/<task>/<method>/<seed>."""

    def __post_init__(self) -> None:
        def need(ok: bool, sentence: str) -> None:
            if not ok:
                raise UserError(sentence)

        object.__setattr__(self, "runs", Path(self.runs))  # from Python a plain string will do
        need(self.frames > 0, "frames must be positive")
        need(self.seed >= 0, "seed must not be negative")
        need(min(self.lr, self.alpha_lr, self.init_temperature) > 0, "lr, alpha-lr and init-temperature are positive")
        need(0 < self.discount <= 1, "discount lies between 0 and 1")
        need(self.log_every > 0 and self.eval_workers >= 0, "log-every must be positive, eval-workers not negative")
        need(self.checkpoint_every >= 0 and self.burst >= 0, "checkpoint-every and burst must not be negative")
        need(
            min(self.filters, self.hidden_dim, self.feature_dim, self.image_size) > 0
            and len(self.strides) > 0
            and min(self.strides) > 0,
            "sizes and strides of the networks must be positive",
        )
        need(self.action_repeat > 0, "action-repeat must be positive")
        need(self.batch_size > 0, "batch-size must be positive")
        need(self.n_step > 0 and self.stack > 0, "n-step and stack must be positive")
        need(self.capacity >= self.batch_size, f"capacity {self.capacity} is smaller than the batch {self.batch_size}")
        need(self.eval_episodes > 0 and self.eval_every > 0, "eval-every and eval-episodes must be positive")
        need(self.diagnostics_every > 0, "diagnostics-every must be positive")
        need(self.rare_every >= 0, "rare-every must not be negative")
        need(self.bias_states > 1 and self.bias_workers > 0, "bias-states must be at least 2, bias-workers at least 1")
        need(len(self.eval_backgrounds) > 0, "eval-backgrounds must name at least one")
        need(0 <= self.strong_weight <= 1, "strong-weight lies between 0 and 1")
        need(
            min(self.update_every, self.updates_per_step, self.actor_every, self.target_every) > 0,
            "update-every, updates-per-step, actor-every and target-every must be positive",
        )
        need(min(n for n in (self.M, self.K, self.J) if n is not None) > 0, "M, K and J must be positive")
        need(self.pad >= 0 and self.std_steps > 0, "pad must not be negative, std-steps must be positive")
        need(self.kl_weight >= 0 and self.tangent_weight >= 0, "weights must not be negative")
        need(self.random_steps >= 1, "random-steps must be at least 1: the replay must not be empty")

    @property
    def total_steps(self) -> int:
        return -(-self.frames // self.action_repeat)

    @property
    def folder(self) -> Path:
        task = self.task.replace("/", "-").replace(":", "-")
        return self.runs / self.preset / task / self.method / str(self.seed)

    def std(self, step: int) -> float:
        """DDPG's exploration scale at an agent step."""
        m = min(step / self.std_steps, 1.0)
        return (1 - m) * self.std_start + m * self.std_end

    def to_json(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Config:
        known = {f.name for f in dataclasses.fields(Config)}
        extra = set(data) - known
        if extra:
            raise UserError(f"the run's configuration has unknown fields: {', '.join(sorted(extra))}")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        values["runs"] = Path(values["runs"])
        for name in ("overlay", "videos"):
            values[name] = Path(values[name]) if values.get(name) else None
        return Config(**values)

    @staticmethod
    def load(folder: Path) -> Config:
        """The configuration of a run, at the place where the run now lies."""
        path = folder / "config.json"
        if not path.is_file():
            raise UserError(f"{folder} is not a run: it has no config.json")
        try:
            config = Config.from_json(json.loads(path.read_text()))
        except (json.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        parents = folder.resolve().parents
        return dataclasses.replace(config, runs=parents[3] if len(parents) > 3 else config.runs)


# What may change when a run is continued.
FREE_TO_CHANGE = {"runs", "frames", "checkpoint_every", "video", "tensorboard", "wandb", "trackio", "eval_workers",
                  "diagnostics", "diagnostics_every", "rare_every", "bias_states", "bias_workers"}  # fmt: skip


def differences(old: Config, new: Config) -> list[str]:
    """The settings in which two configurations of one run contradict each other."""
    a, b = old.to_json(), new.to_json()
    return [f"{k}: {a[k]} -> {b[k]}" for k in a if k not in FREE_TO_CHANGE and json.dumps(a[k]) != json.dumps(b[k])]


DRQV2: dict[str, Any] = {
    "frames": 1_000_000, "random_steps": 2_000, "update_every": 2, "actor_every": 1, "target_every": 1,
    "capacity": 1_000_000, "n_step": 3, "policy": "clipped", "centre": True, "lr": 1e-4, "polyak_encoder": 1.0,
    "early_actor_features": True,
}  # fmt: skip
DMGB: dict[str, Any] = {
    "action_repeat": 4, "burst": 1_000, "batch_size": 128, "capacity": 125_000, "policy": "tanh_dmgb",
    "strides": (2,) + (1,) * 10, "feature_dim": 100, "last_relu": False, "conv_init": "delta", "alpha_lr": 1e-4,
    "alpha_beta1": 0.5, "polyak_encoder": 0.05, "polyak_head": 0.05, "tangent_weight": 0.5,
    "camera": 0, "eval_backgrounds": ("train", "video_hard"),
}  # fmt: skip
CPU: dict[str, Any] = {
    "frames": 40_000, "action_repeat": 4, "image_size": 64, "shadow_map": 512, "batch_size": 32, "capacity": 20_000,
    "random_steps": 500, "n_step": 3, "strides": (3, 2, 1), "filters": 16, "hidden_dim": 256, "eval_every": 10_000,
    "eval_episodes": 5, "log_every": 250,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "drq": {},
    "drqv2": DRQV2,
    "dmgb": DMGB,
    # The benchmark's own page counts 500k agent steps and evaluates 30 episodes.
    "dmgb_readme": DMGB | {"frames": 2_000_000, "capacity": 500_000, "eval_every": 40_000, "eval_episodes": 30},
    "cpu": CPU,
}

EASY = ("cartpole_balance", "cartpole_balance_sparse", "cartpole_swingup", "ball_in_cup_catch", "finger_spin",
        "hopper_stand", "pendulum_swingup", "walker_stand", "walker_walk")  # fmt: skip


def task_overrides(preset: str, task: str) -> dict[str, Any]:
    """What the three tables, and the scripts behind them, set per task."""
    from unmoved.envs.dmc import TASKS as suite

    domain = task.split("_")[0]
    if preset == "drq" and task in ("reacher_easy", "finger_spin", "ball_in_cup_catch"):
        return {"frames": 250_000}
    if preset == "drqv2":
        out: dict[str, Any] = {"std_steps": 100_000} if task in EASY else {}
        if domain == "walker":
            out |= {"n_step": 1, "batch_size": 512}
        if domain == "quadruped" or task == "reach_duplo":
            out |= {"frames": 3_100_000} | ({"capacity": 100_000} if task == "quadruped_run" else {})
        if domain == "humanoid":
            out |= {"frames": 30_100_000, "lr": 8e-5, "feature_dim": 100, "std_steps": 2_000_000}
        return out
    if preset in ("dmgb", "dmgb_readme"):
        other: dict[str, Any] = {} if task in suite else {"eval_backgrounds": ("train",)}  # no sky to put a video in
        repeat = {"finger": 2, "cartpole": 8}.get(domain, 4)
        if preset == "dmgb":
            return other | {"action_repeat": repeat, "capacity": 500_000 // repeat}
        return other | {"action_repeat": repeat, "frames": 500_000 * repeat, "eval_every": 10_000 * repeat}
    return {}


def make_config(task: str = "walker_walk", *, preset: str = "drq", **changes: Any) -> Config:
    """The preset's configuration for this task, with changes: make_config("walker_run", method="ours", seed=3)."""
    from unmoved.envs import canonical

    if preset not in PRESETS:
        unknown("preset", preset, PRESETS)
    task = canonical(task)
    return Config(**{**PRESETS[preset], **task_overrides(preset, task), **changes, "task": task, "preset": preset})
