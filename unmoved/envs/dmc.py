"""Tasks of the DeepMind Control Suite, and one of its manipulation tasks, rendered by one kept camera."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unmoved.envs.pixels import Action, Image
from unmoved.errors import UserError

EPISODE_FRAMES = 1000  # of every task of the suite


class SuiteTask(NamedTuple):
    domain: str
    task: str
    action_dim: int
    episode_frames: int = EPISODE_FRAMES

    @property
    def camera(self) -> int:
        """DrQ's and DrQ-v2's choice: the quadruped's camera 0 looks on from far away, camera 2 from the side."""
        return 2 if self.domain == "quadruped" else 0


# Written out, so that names are checked and listed without the seconds that importing and compiling the suite takes.
# lqr is left out: it has neither a time limit nor bounds on its actions.
_DOMAINS: tuple[tuple[str, int, str], ...] = (
    ("acrobot", 1, "swingup swingup_sparse"),
    ("ball_in_cup", 2, "catch"),
    ("cartpole", 1, "balance balance_sparse swingup swingup_sparse two_poles three_poles"),
    ("cheetah", 6, "run"),
    ("dog", 38, "stand walk trot run fetch"),
    ("finger", 2, "spin turn_easy turn_hard"),
    ("fish", 5, "upright swim"),
    ("hopper", 4, "stand hop"),
    ("humanoid", 21, "stand walk run run_pure_state"),
    ("humanoid_CMU", 56, "stand walk run"),
    ("manipulator", 5, "bring_ball bring_peg insert_ball insert_peg"),
    ("pendulum", 1, "swingup"),
    ("point_mass", 2, "easy hard"),
    ("quadruped", 12, "walk run escape fetch"),
    ("reacher", 2, "easy hard"),
    ("stacker", 5, "stack_2 stack_4"),
    ("swimmer", 5, "swimmer6"),
    ("swimmer", 14, "swimmer15"),
    ("walker", 6, "stand walk run"),
)
TASKS = {f"{domain}_{task}": SuiteTask(domain, task, dim) for domain, dim, names in _DOMAINS for task in names.split()}
# DrQ-v2's manipulation task: a Jaco arm, 10 s of 0.04 s, seen by its only camera, front_close.
REACH_DUPLO = "reach_duplo"
MANIPULATION = {REACH_DUPLO: SuiteTask("reach", "duplo", 9, 250)}


class Suite:
    """One task as a Simulator. Holds an OpenGL context, so construct, render and close it in one thread."""

    def __init__(self, name: str, *, size: int, camera: int | None = None, shadow_map: int | None = None) -> None:
        task = (TASKS | MANIPULATION)[name]
        suite, Camera = _import_suite()
        if name in MANIPULATION:
            self._env, self._random = _load_manipulation(name)
        else:
            # The time limit is PixelEnv's: Monte-Carlo returns are rolled out past it.
            kwargs = {"random": 0, "time_limit": float("inf")}
            self._env = suite.load(task.domain, task.task, task_kwargs=kwargs, visualize_reward=False)
            self._random = self._env.task.random
        self.size = size
        self.action_dim, self.episode_frames = task.action_dim, task.episode_frames
        spec = self._env.action_spec()
        self._centre, self._half_range = (spec.maximum + spec.minimum) / 2, (spec.maximum - spec.minimum) / 2

        camera = task.camera if camera is None else camera
        cameras = self.physics.model.ncam
        if not -1 <= camera < cameras:
            raise UserError(f"{name} has no camera {camera}: choose 0 to {cameras - 1}, or -1 for the free one.")
        self.camera = camera
        # Physics.render builds a scene for every frame and draws into a 640 x 480 buffer. A kept camera and a buffer of
        # the image's own size give the same pixels faster. The context is dm_control's own, not a second one beside it:
        # quadruped_escape uploads its terrain there, and dm_control keeps track of which context is current.
        visual = self.physics.model.vis
        visual.global_.offwidth = visual.global_.offheight = size
        if shadow_map is not None:
            visual.quality.shadowsize = shadow_map  # texels per side, MuJoCo's default is 4096, the suite's 2048
        try:
            self._camera = Camera(self.physics, size, size, camera)
        except Exception as error:  # every driver fails in its own way
            raise _no_gl(error) from error

    @property
    def physics(self) -> Any:
        return self._env.physics

    def reset(self, seed: int) -> None:
        self._random.seed(seed)
        self._env.reset()

    def step(self, action: Action) -> tuple[float, bool, bool]:
        timestep = self._env.step(self._centre + self._half_range * action.astype(np.float64))
        terminated = timestep.last() and timestep.discount == 0.0
        return float(timestep.reward), terminated, timestep.last() and not terminated

    def render(self) -> Image:
        # The camera returns a view of its own buffer, (size, size, 3).
        image: Image = self._camera.render().transpose(2, 0, 1).copy()
        return image

    def paint(self, texture: str, pixels: Image) -> None:
        """Replace a texture of the scene, (height, width, 3), at once and until it is painted again."""
        import mujoco

        model, contexts = self.physics.model.ptr, self.physics.contexts
        number = model.texture(texture).id
        # Where the new one is smaller, the rest of the old one's memory lies idle.
        model.tex_height[number], model.tex_width[number] = pixels.shape[:2]
        start = model.tex_adr[number]
        model.tex_data[start : start + pixels.size] = pixels.ravel()
        with contexts.gl.make_current() as context:
            context.call(mujoco.mjr_uploadTexture, model, contexts.mujoco.ptr, number)

    # Positions, velocities, activations, controls and the solver's warm start: all that physics integrates. What the
    # task wrote into the model at reset (reacher's target) is not in it, so a state belongs to its episode.
    @property
    def state_size(self) -> int:
        return self.get_state().size

    def get_state(self) -> NDArray[np.float64]:
        import mujoco

        state: NDArray[np.float64] = self.physics.get_state(mujoco.mjtState.mjSTATE_INTEGRATION.value)
        return state

    def set_state(self, state: NDArray[np.float64]) -> None:
        import mujoco

        self.physics.set_state(state, mujoco.mjtState.mjSTATE_INTEGRATION.value)
        self.physics.forward()  # what a step, a reward or a render derives from the state

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:  # composer's does not like to be closed twice
            env.close()


_opened_in: int | None = None  # the process in which dm_control opened OpenGL


def _import_suite() -> tuple[Any, Any]:
    """dm_control.suite and its Camera. The import opens the display, so a missing driver shows here."""
    global _opened_in
    if _opened_in not in (None, os.getpid()):  # drivers would hang or crash
        raise UserError(
            "this process was forked from one that had opened OpenGL, where rendering does not work: start it afresh, "
            "with Gymnasium's vector environments by vector_kwargs={'context': 'spawn'}."
        )
    _choose_gl()
    try:
        from dm_control import suite
        from dm_control.mujoco.engine import Camera
    except ModuleNotFoundError as error:
        raise UserError(f"the control suite needs {error.name}: pip install 'dm_control>=1.0.50'.") from error
    except Exception as error:  # ImportError, AttributeError, RuntimeError, ...: depends on what is missing
        raise _no_gl(error) from error
    _opened_in = os.getpid()
    return suite, Camera


def _load_manipulation(name: str) -> tuple[Any, Any]:
    """A composer environment, and the random state it draws its episodes from."""
    from dm_control import composer
    from dm_control.manipulation.shared import registry

    # "features" differs from "vision" in what is observed alone, and would not render at every simulator step.
    # The model is the same in every episode: compiled once, it keeps the camera's context alive.
    task = registry.get_constructor(f"{name}_features")()
    env = composer.Environment(task, time_limit=float("inf"), random_state=0, recompile_mjcf_every_episode=False)
    env.reset()
    return env, env.random_state


def _choose_gl() -> None:
    """Without a display, choose a renderer that loads. Must precede the import, which makes the choice final."""
    # OSMesa would draw in a thread of its own, slower and with tracebacks when Python exits; EGL and GLFW never do.
    os.environ.setdefault("DISABLE_RENDER_THREAD_OFFLOADING", "1")
    if sys.platform != "linux" or "dm_control._render" in sys.modules:
        return
    if os.environ.get("MUJOCO_GL") or os.environ.get("DISPLAY"):
        return
    if _egl_devices() > 0:
        os.environ["MUJOCO_GL"] = "egl"
    elif _load("libOSMesa.so.8", "libOSMesa.so.6", "libOSMesa.so"):
        os.environ["MUJOCO_GL"] = "osmesa"
    else:
        raise _no_gl("no EGL device, no OSMesa and no display")


def _load(*names: str) -> ctypes.CDLL | None:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def _egl_devices() -> int:
    """How many devices EGL can render on. The library alone proves little: containers often lack its driver."""
    egl = _load("libEGL.so.1")
    if egl is None:
        return 0
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    address = egl.eglGetProcAddress(b"eglQueryDevicesEXT")
    if not address:
        return 0
    query = ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))(address)
    count = ctypes.c_int(0)
    query(0, None, ctypes.byref(count))
    return count.value


def _no_gl(error: object) -> UserError:
    reason = " ".join(str(error).split()).rstrip(".")  # some drivers answer with a page
    return UserError(
        f"cannot render with OpenGL (MUJOCO_GL={os.environ.get('MUJOCO_GL', '')}): {reason}. Install the libraries, "
        "on Debian or Ubuntu with 'apt-get install libegl1 libgl1 libosmesa6', "
        "or choose another renderer by setting MUJOCO_GL to egl, osmesa or glfw."
    )
