"""Backgrounds: the green screen, the colours, which clip and frame is shown, and the distractions."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

from unmoved import cli, envs
from unmoved.config import make_config
from unmoved.envs import backgrounds, dmc
from unmoved.envs.backgrounds import Colour, Distracting, Video, green, palettes
from unmoved.errors import UserError
from unmoved.evaluate import EVALUATE, Evaluator
from unmoved.log import read_rows, write_video
from unmoved.train import train
from unmoved.videos import find_clips

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden" / "chroma_key.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def renderer() -> None:
    try:
        envs.make("cartpole_swingup").close()
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five clips of three flat frames: 40 n + 10 t in red, nothing in green, so that a pixel tells clip and frame."""
    folder = tmp_path_factory.mktemp("clips")
    for number in range(5):
        (folder / f"video{number}").mkdir()
        for frame in range(3):
            from PIL import Image

            colour = np.full((9, 9, 3), (40 * number + 10 * frame, 0, 7), np.uint8)
            Image.fromarray(colour).save(folder / f"video{number}" / f"{frame}.png")
    return folder


def corner(obs: NDArray[np.uint8]) -> list[tuple[int, int]]:
    """(clip, frame) in the sky of each stacked frame."""
    reds = [round(int(obs[channel, 2, 2]) / 10) for channel in range(0, len(obs), 3)]
    return [divmod(red, 4) for red in reds]


def actions(env: envs.PixelEnv, steps: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(-1, 1, (steps, env.simulator.action_dim)).astype(np.float32)


# The green screen


def test_chroma_key_is_the_benchmarks_bit_by_bit() -> None:
    colours = np.array(GOLDEN["thresholds"]["colors"], np.uint8).T[..., None]  # (3, n, 1)
    for _ in range(2):  # asked for the first time, and remembered
        assert green(colours)[:, 0].astype(int).tolist() == GOLDEN["thresholds"]["replaced"]
    for case in GOLDEN["images"]:
        image, background = (np.array(case[name], np.uint8) for name in ("input", "background"))
        mask = green(image)
        assert (mask == np.array(case["mask"], bool)).all()
        assert (np.where(mask, background, image) == np.array(case["output"])).all()


# Fractions of replaced pixels measured on the benchmark's scenes. The walker's camera goes up and down with it, and its
# mirroring floor shows more or less of the sky: its mean over a random policy's first steps.
FRACTIONS = {
    "walker_walk": (0.52, 0.93),
    "cartpole_swingup": (0.65, 0.98),
    "ball_in_cup_catch": (0.75, 0.99),
    "finger_spin": (0.69, 0.93),
    "cheetah_run": (0.83, 0.96),
    "reacher_easy": (0.0, 0.92),
}


@pytest.mark.parametrize("task", FRACTIONS)
def test_fraction_of_replaced_pixels(task: str) -> None:
    env = envs.make(task, action_repeat=4)
    assert isinstance(env.simulator, dmc.Suite)
    screens = find_clips(None, "video_easy")
    for ground, want in zip((None, False, True), (0.0, *FRACTIONS[task]), strict=True):
        if ground is not None:  # None: nothing of the task's own is green
            Video(env.simulator, screens, 1, ground)
        fractions = []
        for episode in range(3):
            env.reset(options={"episode": episode})
            for action in actions(env, 20 if task == "walker_walk" and ground is False else 2, episode):
                fractions.append(green(env.simulator.render()).mean())
                env.step(action)
        assert abs(np.mean(fractions) - want) < 0.02 and (want > 0 or max(fractions) == 0)
    env.close()


# The scene. What the benchmark does: edit the suite's XML, load the task anew.


def reloaded(task: str, edits: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> dmc.Suite:
    from dm_control.suite import common

    for name in ("./common/skybox.xml", "./common/materials.xml"):
        tree = ElementTree.fromstring(common.ASSETS[name])
        for element in tree.iter():
            for attribute, colour in edits.get(f"{element.tag} {element.get('name')}", {}).items():
                element.set(attribute, " ".join(map(str, colour)))
        monkeypatch.setitem(common.ASSETS, name, ElementTree.tostring(tree))
    simulator = dmc.Suite(task, size=84)
    monkeypatch.undo()
    return simulator


@pytest.mark.parametrize(
    ("task", "mode"),
    [("walker_walk", "color_hard"), ("walker_walk", "video_easy"), ("finger_spin", "color_easy"),
     ("finger_spin", "video_hard")],
)  # fmt: skip
def test_scene_is_that_of_the_edited_xml(task: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = dict.fromkeys(("rgb1", "rgb2", "markrgb"), (0.2, 0.8, 0.2))
    simulator = dmc.Suite(task, size=84)
    if mode.startswith("color"):
        palette = palettes(mode)[17]
        ground = palette["grid"]
        edits: dict[str, Any] = {
            "texture grid": {"rgb1": ground, "rgb2": ground + 0.1},
            "texture skybox": {"rgb1": palette["skybox"]},
            "material self": {"rgba": (*palette["self"], 1)},
        }
        Colour(simulator, palettes(mode)).begin(0, 0)  # another one before it leaves no trace
        Colour(simulator, [palette]).begin(0, 0)
    else:
        edits = {"texture skybox": screen} | ({"texture grid": screen} if mode == "video_hard" else {})
        Video(simulator, find_clips(None, mode), 1, ground=mode == "video_hard")
    want = reloaded(task, edits, monkeypatch)
    plain = dmc.Suite(task, size=84)
    for seed in (1, 2):
        images = []
        for s in (simulator, want, plain):
            s.reset(seed)
            for action in np.random.default_rng(seed).uniform(-1, 1, (5, s.action_dim)).astype(np.float32):
                rewards = s.step(action)
            images.append((s.render(), rewards))
        assert (images[0][0] == images[1][0]).all() and (images[0][0] != images[2][0]).any()
        assert images[0][1] == images[1][1] == images[2][1]
    for s in (simulator, want, plain):
        s.close()


def test_palettes_have_the_measured_distribution() -> None:
    defaults = {"grid": (0.1, 0.2, 0.3), "self": (0.7, 0.5, 0.3), "skybox": (0.4, 0.6, 0.8)}
    for kind, std in (("color_easy", 0.1), ("color_hard", 0.2)):
        rows = palettes(kind)
        assert len(rows) == 100 and all(row.keys() == defaults.keys() for row in rows)
        for name, default in defaults.items():
            values = np.array([row[name] for row in rows])  # (100, 3)
            assert values.min() >= 0 and values.max() <= 1
            inside = [v[(v > 0) & (v < 1)] for v in values.T]
            assert np.abs(np.median(values, 0) - default).max() < 0.4 * std  # the clipping moves means
            assert all(0.6 * std < v.std() < 1.2 * std for v in inside)
        if kind == "color_hard":
            everything = np.array([list(row.values()) for row in rows])
            assert everything.min() == 0 and everything.max() == 1
        else:  # ranges of the benchmark's 100 presets; those of another 100 lie near
            body, sky, ground = (np.array([row[name] for row in rows]) for name in ("self", "skybox", "grid"))
            for got, want in (
                (ground.max(0), (0.32, 0.52, 0.51)),
                (body.min(0), (0.42, 0.26, 0.08)),
                (body.max(0), (0.96, 0.68, 0.56)),
                (sky.min(0), (0.19, 0.42, 0.44)),
                (sky.max(0), (0.65, 0.92, 1.0)),
            ):
                assert np.abs(got - want).max() < 0.07


def test_colours_change_with_the_episode() -> None:
    env = envs.make("cartpole_swingup", background="color_hard", size=32)
    looks = [env.reset()[0] for _ in range(3)]
    assert (looks[0] != looks[1]).mean() > 0.5 and (looks[1] != looks[2]).mean() > 0.5
    assert (env.reset(options={"episode": 1})[0] == looks[1]).all()
    env.close()


# Which clip, which frame


def test_clips_follow_the_episode_and_frames_the_agents_steps(clips: Path) -> None:
    env = envs.make("cartpole_swingup", background="video_hard", videos=clips, action_repeat=4, size=32)
    assert corner(env.reset()[0]) == [(1, 0)] * 3  # the first episode shows clip 1
    seen = [corner(env.step(a)[0]) for a in actions(env, 4)]
    assert seen == [
        [(1, 0), (1, 0), (1, 1)],
        [(1, 0), (1, 1), (1, 2)],
        [(1, 1), (1, 2), (1, 0)],
        [(1, 2), (1, 0), (1, 1)],
    ]
    assert [corner(env.reset()[0])[0] for _ in range(5)] == [(2, 0), (3, 0), (4, 0), (0, 0), (1, 0)]
    assert corner(env.reset(options={"episode": 1_000_003})[0])[0] == (4, 0)
    assert corner(env.reset(seed=5)[0])[0] == (1, 0)  # whatever the seed
    assert (env.render()[2, 2] == [40, 0, 7]).all()
    env.close()


def test_which_clip_does_not_depend_on_the_workers(clips: Path) -> None:
    """Also: the evaluation's first episode decides, and later evaluations go on with the next clips."""
    config = make_config("cartpole_swingup", preset="cpu", image_size=24, action_repeat=100, videos=clips)
    results, shown = [], []
    for workers in (1, 2):
        seen: dict[bytes, tuple[int, int]] = {}

        def act(obs: Any, moments: Any, seen: Any = seen) -> Any:
            for o in obs:
                seen[o.tobytes()] = corner(o)[-1]
            return np.sin(obs.mean((1, 2, 3)))[:, None].astype(np.float32)

        evaluator = Evaluator(config, workers, EVALUATE, "video_hard")
        result = evaluator.run(act, 4, first=8)
        evaluator.close()
        shown.append({number for number, _ in seen.values()})
        results.append((result.returns, [corner(f.transpose(2, 0, 1))[0] for f in result.frames[:4]]))
        assert result.row()["videos"] == clips.name and result.row()["background"] == "video_hard"
    assert results[0] == results[1]  # the actions, and so the returns, depend on every pixel
    assert results[0][1] == [(4, 0), (4, 1), (4, 2), (4, 0)]
    assert shown[0] == {4, 0, 1, 2}


MODES = ["color_hard", "video_easy", "video_hard", "distracting"]


@pytest.mark.parametrize("mode", MODES)
def test_snapshot_continues_bit_by_bit(mode: str) -> None:
    options = {"background": mode, "action_repeat": 3, "size": 48, "intensity": 0.3, "episode_frames": 60}
    env = envs.make("walker_walk", seed=4, **options)
    env.reset()
    env.reset()
    for action in actions(env, 5):
        env.step(action)
    snapshot = env.snapshot()
    rest = [env.step(a)[0] for a in actions(env, 4, 1)]
    next_episode = env.reset()[0]
    env.close()
    other = envs.make("walker_walk", **options)
    other.restore(snapshot)
    assert all((other.step(a)[0] == want).all() for a, want in zip(actions(other, 4, 1), rest, strict=True))
    assert (other.reset()[0] == next_episode).all()
    other.close()


def test_the_same_pixels_in_another_process_and_the_physics_of_train() -> None:
    code, here = "import test_backgrounds as t; t.print_looks()", {"PYTHONPATH": ":".join([str(HERE), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | here)
    lines = done.stdout.splitlines()
    assert lines == looks() and len(lines) == 5
    pixels, rewards, states = (set(column) for column in zip(*(line.split() for line in lines), strict=True))
    assert len(pixels) == 5 and len(rewards) == 1 and len(states) == 1


def looks() -> list[str]:
    """What is seen, rewarded and simulated after three steps, by background."""
    lines = []
    for mode in ("train", *MODES):
        env = envs.make("finger_spin", background=mode, seed=3, size=32, intensity=0.2, episode_frames=10)
        env.reset()
        obs, reward, *_ = [env.step(np.full(2, 0.5, np.float32)) for _ in range(3)][-1]
        assert isinstance(env.simulator, dmc.Suite)
        state = env.simulator.get_state()
        lines.append(" ".join([hashlib.sha256(obs.tobytes()).hexdigest(), str(reward), state.tobytes().hex()]))
        env.close()
    return lines


def print_looks() -> None:
    print("\n".join(looks()))


# Distractions


def test_intensity_zero_is_the_task_itself() -> None:
    plain, still = envs.make("cheetah_run"), envs.make("cheetah_run", background="distracting_cs", intensity=0)
    assert (plain.reset()[0] == still.reset()[0]).all()
    plain.close()
    still.close()


def distracting(task: str, **options: Any) -> tuple[envs.PixelEnv, Distracting]:
    env = envs.make(task, background="distracting", size=16, **options)
    env.reset()
    assert isinstance(env.background, Distracting)
    return env, env.background


def test_distractions_go_on_every_second_simulator_frame_and_stay_in_their_bounds() -> None:
    env, scene = distracting("walker_walk", intensity=0.5, action_repeat=1)
    walk, seen = scene.view, []
    for action in actions(env, 12):
        env.step(action)
        seen.append((scene.frame, scene.rgb.tobytes(), walk.place.tobytes(), walk.roll))
        assert (walk.low <= walk.place).all() and (walk.place <= walk.high).all() and abs(walk.roll) <= np.pi / 4
        assert (scene.rgb >= scene.darkest).all() and (scene.rgb <= scene.brightest).all()
    assert all((seen[i] == seen[i + 1]) == (i % 2 == 1) for i in range(11))
    assert np.abs(np.diff([frame for frame, *_ in seen])).max() == 1
    assert (scene.brightest - scene.darkest).max() == pytest.approx(1.0)  # 0.5 to either side where there is room
    assert walk.low[0] == pytest.approx(0.75 * walk.high[0] / 1.75)  # zoom: 25 % in, 75 % out
    env.close()


def test_the_clip_runs_to_and_fro(clips: Path) -> None:
    env, scene = distracting("cartpole_swingup", videos=clips)
    scene.frame, scene.direction = 1, 1
    seen = []
    for _ in range(7):
        scene.advance()
        scene.advance()
        seen.append(scene.frame)
    assert seen == [2, 2, 1, 0, 1, 2, 2]  # the last frame twice, as the original's test for the end is one too late
    env.close()


def test_the_camera_looks_at_the_body_from_where_it_is_put() -> None:
    for task, intensity in (
        ("walker_walk", 0.2),
        ("cartpole_swingup", 0.2),
        ("reacher_easy", 0.2),
        ("walker_walk", 0.0001),
    ):
        env, scene = distracting(task, intensity=intensity)
        physics = env.simulator.physics  # type: ignore[attr-defined]
        before = physics.data.cam_xpos.copy(), physics.data.cam_xmat.copy()
        position, axes = scene.view.pose(physics)
        axes = axes.reshape(3, 3)
        np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-9)
        assert np.linalg.det(axes) == pytest.approx(1)
        target = scene.view._target(physics)
        np.testing.assert_allclose((target - position) / np.linalg.norm(target - position), -axes[:, 2], atol=1e-6)
        env.background.render(0)
        assert (physics.data.cam_xpos == before[0]).all() and (physics.data.cam_xmat == before[1]).all()
        if intensity < 0.001:  # hardly moved: the task's own view
            np.testing.assert_allclose(position, before[0][0], atol=0.01)
            np.testing.assert_allclose(axes, before[1][0].reshape(3, 3), atol=0.01)
        env.close()


def test_how_many_clips_are_drawn_from() -> None:
    env, _ = distracting("cartpole_swingup")
    assert isinstance(env.simulator, dmc.Suite)
    sixty = find_clips(None, "distracting")
    counts = {0.025: 2, 0.05: 2, 0.1: 4, 0.15: 6, 0.2: 8, 0.3: 60, 0.5: 60}
    assert {i: len(Distracting(env.simulator, "cartpole", sixty, i).numbers) for i in counts} == counts
    env.close()


# What cannot be shown


@pytest.mark.parametrize(
    ("task", "options", "sentence"),
    [
        ("toy_reach", {"background": "video_hard"}, "which toy_reach does not have: only background train"),
        ("reach_duplo", {"background": "color_easy"}, "which reach_duplo does not have"),
        ("CarRacing-v3", {"background": "video_easy"}, "which CarRacing-v3 does not have"),
        ("walker_walk", {"background": "vidoe_hard"}, r"unknown background 'vidoe_hard'\. Did you mean: video_hard"),
        ("hopper_hop", {"background": "distracting"}, "defined for reacher, cartpole, .*, not for hopper"),
        ("walker_walk", {"background": "distracting", "intensity": 2.0}, "intensity lies between 0 and 1, not at 2"),
        ("walker_walk", {"background": "distracting", "camera": -1}, "not the free one"),
        ("walker_walk", {"background": "video_hard", "videos": Path("/nowhere")}, "no readable clip .*/nowhere"),
    ],
)
def test_what_cannot_be_shown(task: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        envs.make(task, **options)


def test_every_domain_has_the_textures() -> None:
    """All but the dog, which takes seconds to compile."""
    suite = dmc._import_suite()[0]
    scene = backgrounds.compile_scene({})
    for domain in {task.domain for task in dmc.TASKS.values()} - {"dog"}:
        name = next(task.task for task in dmc.TASKS.values() if task.domain == domain)
        model = suite.load(domain, name).physics.model.ptr
        for texture in ("skybox", "grid"):
            ours, theirs = scene.texture(texture), model.texture(texture)
            assert (ours.width, ours.height) == (theirs.width, theirs.height)
        assert model.material("self").id >= 0


# Runs


def test_training_evaluates_every_background(clips: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(
        "cartpole_swingup", preset="cpu", method="rad", frames=200, action_repeat=100, image_size=24, batch_size=2,
        filters=2, feature_dim=4, hidden_dim=8, capacity=10, random_steps=1, eval_every=200, eval_episodes=1,
        log_every=1, runs=tmp_path, eval_backgrounds=("train", "video_hard"), videos=clips, video=True,
        eval_workers=1, device="cpu",
    )  # fmt: skip
    folder = train(config)
    rows = read_rows(folder / "eval.jsonl")
    assert [(r["frames"], r["background"], r.get("videos")) for r in rows] == [
        (frames, *scene) for frames in (0, 200) for scene in (("train", None), ("video_hard", clips.name))
    ]
    assert sorted(p.name for p in (folder / "video").iterdir()) == sorted(
        f"{frames}{suffix}.mp4" for frames in (0, 200) for suffix in ("", "_video_hard")
    )
    capsys.readouterr()
    cli.main(["evaluate", str(folder), "--episodes", "1", "--video", "--background", "video_easy", "train"])
    out = capsys.readouterr().out
    easy, plain = read_rows(folder / "evaluations.jsonl")
    assert (easy["background"], easy["videos"], easy["clips"], len(easy["returns"])) == ("video_easy", clips.name, 5, 1)
    assert plain["background"] == "train" and "videos" not in plain and plain["returns"] != easy["returns"]
    assert clips.name in out and f"{easy['return_mean']:.1f}" in out
    assert (folder / "video" / "evaluation_video_easy.mp4").is_file()


def test_a_bad_folder_of_clips_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = make_config("cartpole_swingup", preset="dmgb", method="rad", runs=tmp_path / "runs", videos=tmp_path)
    with pytest.raises(UserError, match="no readable clip"):
        train(config)
    assert not (tmp_path / "runs").exists()


def test_dmgb_evaluates_train_and_video_hard() -> None:
    assert make_config("walker_walk", preset="dmgb").eval_backgrounds == ("train", "video_hard")
    assert make_config("toy_reach", preset="dmgb").eval_backgrounds == ("train",)
    assert make_config("walker_walk").eval_backgrounds == ("train",)


def test_generated_clips_are_called_so_in_every_row() -> None:
    assert backgrounds.describe("video_easy", "walker_walk", None, 0.1) == {
        "background": "video_easy", "videos": "generated clips", "clips": 10,
    }  # fmt: skip
    assert backgrounds.describe("distracting_cs", "walker_walk", None, 0.3)["intensity"] == 0.3
    assert backgrounds.describe("color_easy", "walker_walk", None, 0.1) == {"background": "color_easy"}


def test_a_video_file_is_shown_as_decoded(tmp_path: Path) -> None:
    pictures = np.zeros((4, 32, 32, 3), np.uint8)
    pictures[:, :16, :, 0] = 255  # red above, black below
    write_video(tmp_path / "a.mp4", list(pictures), scale=1)
    env = envs.make("cartpole_swingup", background="video_easy", videos=tmp_path, size=32)
    sky = env.reset()[0][-3:, 4, 4]
    assert sky[0] > 230 and sky[1:].max() < 25
    env.close()


def test_palettes_stay() -> None:
    """Colours are part of what results mean: they must not change unnoticed."""
    numbers = np.concatenate([np.concatenate(list(row.values())) for row in palettes("color_hard")]).round(9)
    assert hashlib.sha256(numbers.tobytes()).hexdigest()[:8] == "f3864ad1"
