"""An environment in a process of its own: physics and rendering run while the agent learns."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unmoved import envs
from unmoved.envs.pixels import Stateful
from unmoved.errors import UserError


def serve(pipe: Connection, kwargs: dict[str, Any]) -> None:
    """The child: answers (method, arguments) with (True, result) or (False, exception)."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides: it may want a last checkpoint
        signal.signal(number, signal.SIG_IGN)
    os.environ["LP_NUM_THREADS"] = "1"  # software GL: one core per environment
    env: envs.PixelEnv | None = None
    try:
        env = envs.make(**kwargs)
        pipe.send((True, (env.observation_space.shape, env.action_space.shape, env.episode_steps)))
        while True:
            name, args = pipe.recv()
            if name == "state":
                simulator = env.simulator
                pipe.send((True, simulator.get_state() if isinstance(simulator, Stateful) else None))
            elif name == "reset":
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

    def __init__(self, **kwargs: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a forked OpenGL or CUDA context is a broken one
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=serve, args=(child, kwargs), daemon=True)
        self._process.start()
        child.close()
        self.obs_shape, (self.action_dim,), self.episode_steps = self.receive()

    def receive(self) -> Any:
        try:
            ok, value = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            raise RuntimeError(f"the environment's process died (exit code {self._process.exitcode})") from None
        if ok:
            return value
        mendable, text = value
        raise UserError(text) if mendable else RuntimeError(f"the environment failed:\n{text}")

    def _call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self.receive()

    def send_reset(self, episode: int | None = None) -> None:
        self._pipe.send(("reset", ({} if episode is None else {"episode": episode},)))

    def reset(self, episode: int | None = None) -> NDArray[np.uint8]:
        self.send_reset(episode)
        return self.receive()[0]

    def send_step(self, action: NDArray[np.float32]) -> None:
        self._pipe.send(("step", (action,)))

    def snapshot(self) -> Any:
        return self._call("snapshot")

    def restore(self, snapshot: Any) -> NDArray[np.uint8]:
        return self._call("restore", snapshot)

    def state(self) -> NDArray[np.float64] | None:
        return self._call("state")

    def close(self) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
