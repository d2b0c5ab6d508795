"""Image-based reinforcement learning whose value function and policy are unmoved by image transformations."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from unmoved.envs.ids import register

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unmoved.agent import Agent as Agent
    from unmoved.agent import Batch as Batch
    from unmoved.config import Config as Config
    from unmoved.config import make_config as make_config
    from unmoved.evaluate import load_agent as load_agent
    from unmoved.losses import Bellman as Bellman
    from unmoved.losses import Draw as Draw
    from unmoved.losses import Improve as Improve
    from unmoved.losses import Method as Method
    from unmoved.losses import PolicyKL as PolicyKL
    from unmoved.losses import QInvariance as QInvariance
    from unmoved.losses import TangentProp as TangentProp
    from unmoved.losses import Target as Target
    from unmoved.losses import View as View
    from unmoved.losses import original as original
    from unmoved.methods import make_method as make_method
    from unmoved.transforms import Blur as Blur
    from unmoved.transforms import Compose as Compose
    from unmoved.transforms import Conv as Conv
    from unmoved.transforms import FromModule as FromModule
    from unmoved.transforms import Mixture as Mixture
    from unmoved.transforms import Overlay as Overlay
    from unmoved.transforms import Rotate as Rotate
    from unmoved.transforms import Shift as Shift
    from unmoved.transforms import Transformation as Transformation

# name -> module. Imported on first use, so that the command line's help does not wait for torch.
_HOME = {
    name: module
    for module, names in {
        "agent": "Agent Batch",
        "config": "Config make_config",
        "evaluate": "load_agent",
        "losses": "Bellman Draw Improve Method PolicyKL QInvariance TangentProp Target View original",
        "methods": "make_method",
        "transforms": "Blur Compose Conv FromModule Mixture Overlay Rotate Shift Transformation",
    }.items()
    for name in names.split()
}

register()  # "unmoved/walker_walk-v0" and the others with Gymnasium


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"unmoved.{_HOME[name]}"), name)
    raise AttributeError(f"module 'unmoved' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
