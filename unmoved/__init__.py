"""Image-based reinforcement learning whose value function and policy are unmoved by image transformations."""

__version__ = "0.1.0"
