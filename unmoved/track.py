"""TensorBoard, Weights & Biases and Trackio, for those who look there. A run's own files never depend on them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from unmoved.config import Config
from unmoved.errors import UserError
from unmoved.log import console

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}  # option, and what it needs


class Tracker(Protocol):
    def add(self, values: dict[str, float], frames: int) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        self.writer: Any = import_module("tensorboardX").SummaryWriter(str(folder / "tensorboard"))

    def add(self, values: dict[str, float], frames: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, frames)

    def close(self) -> None:
        self.writer.close()


class Experiment:
    """Weights & Biases, and Trackio, which has the same interface. A run that continues goes on where it was."""

    def __init__(self, package: str, config: Config) -> None:
        self.module: Any = import_module(package)
        name = "-".join(config.folder.parts[-4:])
        self.steps = package != "wandb"  # which drops what comes late, as an evaluation beside training does
        options = {} if self.steps else {"id": name}
        self.module.init(project="unmoved", name=name, config=config.to_json(), resume="allow", **options)
        if not self.steps:
            self.module.define_metric("frames")
            self.module.define_metric("*", step_metric="frames")

    def add(self, values: dict[str, float], frames: int) -> None:
        self.module.log({**values, "frames": frames}, **({"step": frames} if self.steps else {}))

    def close(self) -> None:
        self.module.finish()


class Trackers:
    """All that a run's configuration asks for. One that fails is named and left out from then on."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.active: dict[str, Tracker] = {}
        if config.tensorboard:
            self.active["tensorboard"] = TensorBoard(folder)
        for package in ("wandb", "trackio"):
            if getattr(config, package):
                self.active[package] = Experiment(package, config)

    @staticmethod
    def check(config: Config) -> None:
        for option, package in PACKAGES.items():
            if getattr(config, option) and find_spec(package) is None:
                raise UserError(f"--{option} needs {package}: pip install 'unmoved[{option}]'")

    def add(self, group: str, values: dict[str, Any], frames: int) -> None:
        """Numbers alone: null in a row stands for what was not finite."""
        numbers = {f"{group}/{k}": float(v) for k, v in values.items() if isinstance(v, int | float)}
        for name, tracker in list(self.active.items()):
            try:
                tracker.add(numbers, frames)
            except Exception as error:  # a network, a full disk, a server: not worth a run
                del self.active[name]
                console.print(f"{name} failed and is left out from here on: {error}", markup=False)

    def close(self) -> None:
        for tracker in self.active.values():
            tracker.close()
