"""An environment in a process of its own: physics and rendering run while the agent learns."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmoved import envs
from unmoved.errors import UserError


def main(handle: int) -> None:
    """The child: makes its environment from the first message, then answers (method, arguments) with (True, result) or
    (False, what went wrong)."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides: it may want a last checkpoint
        signal.signal(number, signal.SIG_IGN)
    os.environ["LP_NUM_THREADS"] = "1"  # software GL: one core per environment
    pipe: Connection[Any, Any] = Connection(handle)
    env: envs.PixelEnv | None = None
    try:
        env = envs.make(**pipe.recv())
        pipe.send((True, (env.observation_space.shape, env.action_space.shape, env.episode_steps, env.state_size)))
        while True:
            name, args = pipe.recv()
            if name == "reset":
                pipe.send((True, env.reset(options=args[0])))
            else:
                pipe.send((True, getattr(env, name)(*args)))
    except (EOFError, ConnectionError):
        pass  # the parent is gone
    except Exception as error:  # reported where it can be acted on
        text = str(error) if isinstance(error, UserError) else traceback.format_exc()
        pipe.send((False, (isinstance(error, UserError), text)))
    finally:
        if env is not None:
            env.close()


class EnvProcess:
    """A PixelEnv behind a pipe. `send_step` and `receive` let the caller work in between."""

    def __init__(self, *, greet: bool = True, **kwargs: Any) -> None:
        # A fresh interpreter, not multiprocessing's: a forked OpenGL or CUDA context is a broken one, and a spawned
        # process would import the caller's script again. It ends by itself when this end of the pipe closes.
        self.pipe, child = multiprocessing.Pipe()
        words = [sys.executable, "-c", f"from unmoved.envs.worker import main; main({child.fileno()})"]
        path = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = subprocess.Popen(words, pass_fds=[child.fileno()], env=path)
        child.close()
        self.pipe.send(kwargs)
        if greet:
            self.greet()

    @classmethod
    def several(cls, n: int, **kwargs: Any) -> list[EnvProcess]:
        """Started at the same time: imports and OpenGL take each of them seconds."""
        envs = [cls(greet=False, **kwargs) for _ in range(n)]
        try:
            for env in envs:
                env.greet()
        except BaseException:
            for env in envs:
                env.close()
            raise
        return envs

    def greet(self) -> None:
        """Wait for the child's first message: its environment is made."""
        self.obs_shape, (self.action_dim,), self.episode_steps, self.state_size = self.receive()

    def receive(self) -> Any:
        try:
            ok, value = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"the environment's process died (exit code {self._process.wait(5)})") from None
        if ok:
            return value
        mendable, text = value
        raise UserError(text) if mendable else RuntimeError(f"the environment failed:\n{text}")

    def _call(self, name: str, *args: Any) -> Any:
        self.pipe.send((name, args))
        return self.receive()

    def send_reset(self, episode: int | None = None) -> None:
        self.pipe.send(("reset", ({} if episode is None else {"episode": episode},)))

    def reset(self, episode: int | None = None) -> NDArray[np.uint8]:
        self.send_reset(episode)
        return self.receive()[0]

    def send_step(self, action: NDArray[np.float32]) -> None:
        self.pipe.send(("step", (action,)))

    def snapshot(self) -> Any:
        return self._call("snapshot")

    def restore(self, snapshot: Any) -> NDArray[np.uint8]:
        return self._call("restore", snapshot)

    def state(self) -> NDArray[np.float64]:
        return self._call("state")

    def send_return(self, state: NDArray[np.float64], obs: NDArray[np.uint8]) -> None:
        """Go to a stored state; `receive` gives its observation."""
        self.pipe.send(("return_to", (state, obs)))

    def close(self) -> None:
        self.pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
