"""The DMControl Generalization Benchmark's scenes: other colours, videos behind the task, and distractions.

train          the task as it is
color_easy     ground, body and sky in one of 100 palettes per episode, near the task's own; color_hard: far from it
video_easy     the sky is a green screen for a clip; video_hard: the ground too
distracting    the Distracting Control Suite: camera, colours and sky move, by `intensity`
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from unmoved.envs import dmc
from unmoved.envs.pixels import Background, Image, Simulator
from unmoved.errors import UserError, unknown
from unmoved.videos import Clips, find_clips

NAMES = ("train", "color_easy", "color_hard", "video_easy", "video_hard", "distracting")
WITH_CLIPS = ("video_easy", "video_hard", "distracting")
INTENSITY = 0.1  # of the distractions, by default

Vector = NDArray[np.float64]  # (3,)
Palette = dict[str, Vector]


def canonical(name: str) -> str:
    if name == "distracting_cs":
        return "distracting"
    return name if name in NAMES else unknown("background", name, NAMES)


def check(background: str, task: str, intensity: float) -> None:
    """Refuse what a task cannot show, before a simulator is started."""
    name = canonical(background)
    if name == "train":
        return
    if task not in dmc.TASKS:
        raise UserError(
            f"background {name} replaces the ground and the sky of the control suite, which {task} does not have: "
            "only background train works with it."
        )
    if name == "distracting":
        domain = dmc.TASKS[task].domain
        if domain not in _GROUND_ALPHA:
            raise UserError(f"background distracting is defined for {', '.join(_GROUND_ALPHA)}, not for {domain}.")
        if not 0 <= intensity <= 1:
            raise UserError(f"intensity lies between 0 and 1, not at {intensity:g}.")


def make(
    background: str, task: str, simulator: Simulator, videos: Path | None, intensity: float, steps: int
) -> Background:
    """`steps`: agent steps of an episode; more frames of a clip are not kept."""
    check(background, task, intensity)
    name = canonical(background)
    if name == "train" or (name == "distracting" and intensity == 0):
        return Background(simulator)
    assert isinstance(simulator, dmc.Suite)
    if name.startswith("color"):
        return Colour(simulator, palettes(name))
    clips = find_clips(videos, name)
    if name == "distracting":
        return Distracting(simulator, dmc.TASKS[task].domain, clips, intensity)
    return Video(simulator, clips, steps + 1, ground=name == "video_hard")


def describe(background: str, task: str, videos: Path | None, intensity: float) -> dict[str, Any]:
    """What a result row has to say about its background. Refuses what cannot be shown."""
    check(background, task, intensity)
    name = canonical(background)
    row: dict[str, Any] = {"background": name}
    if name == "distracting":
        row["intensity"] = intensity
    if name in WITH_CLIPS:
        clips = find_clips(videos, name)
        row |= {"videos": clips.name, "clips": len(clips.sources)}
    return row


# Colours. The benchmark edits the suite's common XML files and loads the task anew. Nothing but textures and one
# material changes, so it is enough to compile those files alone and to take over what the compiler made of them.


def palettes(kind: str) -> list[Palette]:
    """100 of them, by the rule measured on the benchmark's own file: the suite's colours plus normal noise, clipped."""
    # 81: of the first 1000 seeds, the one whose extremes lie nearest to the benchmark's.
    std, seed = {"color_easy": (0.1, 81), "color_hard": (0.2, 82)}[kind]
    rng = np.random.default_rng(seed)
    ground, body, sky = (
        np.clip(np.array(rgb) + rng.normal(0, std, (100, 3)), 0, 1)
        for rgb in ((0.1, 0.2, 0.3), (0.7, 0.5, 0.3), (0.4, 0.6, 0.8))
    )
    return [{"grid": g, "self": b, "skybox": s} for g, b, s in zip(ground, body, sky, strict=True)]


def compile_scene(edits: dict[str, dict[str, Vector]]) -> Any:
    """A model of the suite's common ground, sky and materials: {"grid": {"rgb1": (r, g, b)}} edits a texture."""
    import mujoco
    from dm_control.suite import common

    names = ("./common/skybox.xml", "./common/materials.xml")
    assets = {}
    for name in names:
        tree = ElementTree.fromstring(common.ASSETS[name])
        for texture in tree.iter("texture"):
            for attribute, colour in edits.get(texture.attrib["name"], {}).items():
                texture.set(attribute, " ".join(str(float(c)) for c in colour))
        assets[name] = ElementTree.tostring(tree)
    includes = "".join(f'<include file="{name}"/>' for name in names)
    return mujoco.MjModel.from_xml_string(f"<mujoco>{includes}</mujoco>", assets)


def recolour(simulator: dmc.Suite, edits: dict[str, dict[str, Vector]]) -> None:
    scene = compile_scene(edits)
    for name in edits:
        texture = scene.texture(name)
        start = texture.adr[0]
        shape = (texture.height[0], texture.width[0], 3)
        simulator.paint(name, scene.tex_data[start : start + np.prod(shape)].reshape(shape))


class Colour(Background):
    """A palette per episode."""

    simulator: dmc.Suite

    def __init__(self, simulator: dmc.Suite, colours: list[Palette]) -> None:
        super().__init__(simulator)
        self.palettes = colours

    def begin(self, episode: int, seed: int) -> None:
        palette = self.palettes[np.random.default_rng(seed).integers(len(self.palettes))]
        ground = {"rgb1": palette["grid"], "rgb2": np.minimum(palette["grid"] + 0.1, 1)}  # the checker's two colours
        recolour(self.simulator, {"grid": ground, "skybox": {"rgb1": palette["skybox"]}})
        self.simulator.physics.named.model.mat_rgba["self"] = [*palette["self"], 1]


# Videos


GREEN = np.array([0.2, 0.8, 0.2])


class Video(Background):
    """A clip on a green screen: the next clip in every episode, its next frame at every agent step."""

    def __init__(self, simulator: dmc.Suite, clips: Clips, limit: int, ground: bool) -> None:
        super().__init__(simulator)
        self.clips, self.limit = clips, limit
        screen = {"rgb1": GREEN, "rgb2": GREEN, "markrgb": GREEN}
        recolour(simulator, {"skybox": screen, "grid": screen} if ground else {"skybox": screen})

    def begin(self, episode: int, seed: int) -> None:
        # The benchmark counts on before it loads, so that its first episode shows clip 1.
        number = (episode + 1) % len(self.clips.sources)
        self.frames = self.clips.load(number, self.simulator.size, self.limit)

    def render(self, step: int) -> Image:
        image = self.simulator.render()
        return np.where(green(image), self.frames[step % len(self.frames)].transpose(2, 0, 1), image)


def is_green(rgb: Image) -> NDArray[np.bool_]:
    """(3, ...) -> (...): hue 100 to 185 degrees, saturation 80 to 255 and value 70 to 255 of 255. Colours on a bound
    are decided by rounding, so the operations and their order are the benchmark's, in float64."""
    r, g, b = rgb / 255
    high, low = np.maximum(np.maximum(r, g), b), np.minimum(np.minimum(r, g), b)
    spread = np.where(high > low, high - low, 1)  # 1: a grey, refused below
    rc, gc, bc = (high - r) / spread, (high - g) / spread, (high - b) / spread
    h = np.where(r == high, bc - gc, np.where(g == high, 2 + rc - bc, 4 + gc - rc))
    hue, saturation = h / 6 % 1 * 360, spread / np.maximum(high, 1 / 255) * 255
    return (high > low) & (hue >= 100) & (hue <= 185) & (saturation >= 80) & (high * 255 >= 70)


@cache
def _answers() -> NDArray[np.uint8]:
    """is_green by colour, filled as colours occur, which are few: 0 not asked yet, 1 no, 2 yes."""
    return np.zeros(1 << 24, np.uint8)


def green(image: Image) -> NDArray[np.bool_]:
    """(3, h, w) -> (h, w): the pixels to replace."""
    answers = _answers()
    r, g, b = image
    colour = (r.astype(np.int32) << 16) | (g.astype(np.int32) << 8) | b
    answer = answers[colour]
    new = answer == 0
    if new.any():
        answers[colour[new]] = answer[new] = 1 + is_green(image[:, new])
    return answer == 2


# Distractions. The original draws from unseeded generators, here from the episode's seed.


_GROUND_ALPHA = {"reacher": 0.0, "cartpole": 0.3, "finger": 0.3, "cheetah": 1.0, "ball_in_cup": 0.3, "walker": 1.0}
_CLIP_FRAMES = 100  # DAVIS's longest training clip has 104


class Distracting(Background):
    """Every second simulator frame the camera's and the colours' random walks and the clip in the sky go on."""

    simulator: dmc.Suite

    def __init__(self, simulator: dmc.Suite, domain: str, clips: Clips, intensity: float) -> None:
        super().__init__(simulator)
        if simulator.camera < 0:
            raise UserError("background distracting moves a camera of the task: choose 0 or above, not the free one.")
        self.clips, self.intensity = clips, intensity
        # Of how many clips an episode's is drawn; all from 0.3 on.
        count = next((n for bound, n in ((0.05, 2), (0.1, 4), (0.15, 6), (0.2, 8)) if intensity <= bound), None)
        self.numbers = range(len(clips.sources))[:count]
        self.upper = domain != "reacher"  # which is seen from above
        rgb = simulator.physics.model.mat_rgba[:, :3].copy()
        self.darkest, self.brightest = (rgb - intensity).clip(0, 1), (rgb + intensity).clip(0, 1)
        simulator.physics.named.model.mat_rgba["grid", "a"] = _GROUND_ALPHA[domain]

    def begin(self, episode: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.elapsed = 0  # simulator frames
        self.rgb = self.rng.uniform(self.darkest, self.brightest)
        # A face of the sky spans 90 degrees, of which a camera sees about half.
        self.frames = self.clips.load(self.rng.choice(self.numbers), 2 * self.simulator.size, _CLIP_FRAMES)
        self.frame, self.direction = int(self.rng.integers(len(self.frames))), int(self.rng.choice([-1, 1]))
        self.shown = -1
        self.view = Walk(self.simulator.physics, self.simulator.camera, self.intensity, self.upper, self.rng)
        self.view.step()

    def advance(self) -> None:
        self.elapsed += 1
        if self.elapsed % 2:
            return
        self.view.step()
        noise = 0.03 * self.intensity * self.rng.normal(size=self.rgb.shape)
        self.rgb = np.clip(self.rgb + noise, self.darkest, self.brightest)
        self.frame += self.direction  # to and fro
        if self.frame <= 0 or self.frame >= len(self.frames):
            self.frame = min(max(self.frame, 0), len(self.frames) - 1)
            self.direction = 1 if self.frame == 0 else -1

    def render(self, step: int) -> Image:
        physics, camera = self.simulator.physics, self.simulator.camera
        physics.model.mat_rgba[:, :3] = self.rgb
        if self.shown != self.frame:
            self.simulator.paint("skybox", self.frames[self.frame])  # square: the same on all six faces
            self.shown = self.frame
        position, axes = physics.data.cam_xpos[camera], physics.data.cam_xmat[camera]
        kept = position.copy(), axes.copy()
        position[:], axes[:] = self.view.pose(physics)
        image = self.simulator.render()
        position[:], axes[:] = kept  # derived from the state: the physics would do the same at its next step
        return image


class Walk:
    """A camera's random walk on a shell around its target, as the suite of distractions defines it."""

    def __init__(self, physics: Any, camera: int, intensity: float, upper: bool, rng: np.random.Generator) -> None:
        self.camera, self.upper, self.rng = camera, upper, rng
        self.follows = physics.model.cam_mode[camera] != 0  # the body's centre of mass; 0: fixed
        self.target = self._target(physics)
        centre = physics.data.subtree_com[1] if self.follows else np.zeros(3)
        radius, azimuth, polar = _spherical(physics.data.cam_xpos[camera] - centre)
        reach = np.pi / 2 * intensity
        self.low = np.array([radius * (1 - 0.5 * intensity), azimuth - reach, polar - reach])
        self.high = np.array([radius * (1 + 1.5 * intensity), azimuth + reach, polar + reach])
        if upper:  # stay in front and above the ground
            self.low[1:] = np.maximum(self.low[1:], [-np.pi, 0])
            self.high[1:] = np.minimum(self.high[1:], [0, np.pi / 2])
        scale = radius / 4  # the usual distance
        self.speed_std, self.top_speed = 0.1 * intensity * scale, 0.4 * intensity * scale
        self.roll_std, self.top_roll = np.pi / 300 * intensity, np.pi / 50 * intensity
        self.place, self.roll = rng.uniform(self.low, self.high), rng.uniform(-reach, reach)
        self.reach = reach
        direction = rng.normal(size=3)
        self.velocity = direction / np.linalg.norm(direction) * rng.uniform(0, 0.4 * intensity)
        self.roll_velocity = rng.uniform(-self.top_roll, self.top_roll)

    def step(self) -> None:
        self.velocity = self.velocity + self.speed_std * self.rng.normal(size=3)
        self.velocity *= min(1, self.top_speed / np.linalg.norm(self.velocity))
        before = _cartesian(self.place)
        self.place = np.clip(_spherical(before + self.velocity), self.low, self.high)
        self.velocity = _cartesian(self.place) - before
        roll_velocity = self.roll_velocity + self.roll_std * self.rng.normal()
        roll = np.clip(self.roll + np.clip(roll_velocity, -self.top_roll, self.top_roll), -self.reach, self.reach)
        self.roll, self.roll_velocity = roll, roll - self.roll

    def pose(self, physics: Any) -> tuple[Vector, Vector]:
        """Position (3,) and axes (9,) in the world, looking at the target."""
        position, target = _cartesian(self.place), self.target
        if self.follows:
            position, target = position + physics.data.subtree_com[1], self._target(physics)
        ahead = (target - position) / np.linalg.norm(target - position)
        # From straight above, "upright" turns wildly: there, the shortest turn from looking down.
        axes = _upright(ahead) if self.upper else _from_above(ahead)
        cos, sin = np.cos(self.roll), np.sin(self.roll)
        return position, (axes @ np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1]])).ravel()

    def _target(self, physics: Any) -> Vector:
        """The point the task's own camera looks at, as far away as the body."""
        position, axes = physics.data.cam_xpos[self.camera], physics.data.cam_xmat[self.camera].reshape(3, 3)
        return position - np.linalg.norm(position - physics.data.subtree_com[1]) * axes[:, 2]


# Axes of a camera: the columns point right, up and back.


def _upright(ahead: Vector) -> NDArray[np.float64]:
    yaw = np.arctan2(ahead[0], ahead[1])  # from the y axis; 0 where there is none
    right = np.array([np.cos(yaw), -np.sin(yaw), 0])
    return np.stack([right, np.cross(right, ahead), -ahead], 1)


def _from_above(ahead: Vector) -> NDArray[np.float64]:
    x, y, cos = ahead[0], ahead[1], -ahead[2]  # Rodrigues: from (0, 0, -1) about its cross product with `ahead`
    cross = np.array([[0, 0, -x], [0, 0, -y], [x, y, 0]])
    return np.eye(3) + cross + cross @ cross / (1 + cos)


def _spherical(point: Vector) -> Vector:
    x, y, z = point
    return np.array([np.linalg.norm(point), np.arctan2(y, x), np.arctan2(np.hypot(x, y), z)])


def _cartesian(place: Vector) -> Vector:
    radius, azimuth, polar = place
    return radius * np.array([np.sin(polar) * np.cos(azimuth), np.sin(polar) * np.sin(azimuth), np.cos(polar)])
