"""CUDA kernels of our own (kernels.cu): the encoder's convolutions, and what brings images to them.

cuDNN runs a layer at a time, and with 32 filters it waits for memory: activations of 512 images pass through it after
every convolution, again for bias and ReLU, and again on the way back. Here all layers of an image run in one thread
block, and what lies between them stays in shared memory. Every kernel has a twin in plain torch, used wherever the
kernels are not: the loop over F.conv2d in networks.py, crop in transforms.py, the others' below.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FILTERS = 32
CHANNELS = 16  # of an image, the last of which are zero
KERNELS = ("encode_bytes", "encode_bf16", "descend", "weigh_bytes", "weigh_bf16", "weigh_inner", "pack_weights",
           "pixels_last", "crop_bytes")  # fmt: skip
THREADS, WEIGH_THREADS, GROUPS, STRIP, STRIP_BYTES = 512, 384, 4, 8, 30_720  # as in kernels.cu
built = False  # whether the kernels are at hand: the agent builds them when it can use them


def sizes(height: int, width: int, stride: int, layers: int) -> list[tuple[int, int]]:
    """Height and width of each layer's output."""
    h, w = (height - 3) // stride + 1, (width - 3) // stride + 1
    return [(h - 2 * i, w - 2 * i) for i in range(layers)]


def obstacle(obs_shape: tuple[int, ...], filters: int, strides: Sequence[int]) -> str | None:
    """Why this stack cannot run as our kernels on the present GPU, or None."""
    channels, height, width = obs_shape
    if filters != FILTERS or any(s != 1 for s in strides[1:]) or len(strides) < 2 or channels > CHANNELS:
        return f"they take {FILTERS} filters, at most {CHANNELS} channels and strides (s, 1, 1, …)"
    props: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    need, have = memory(*sizes(height, width, strides[0], 1)[0]), props.shared_memory_per_block_optin
    if ((STRIP - 1) * strides[0] + 3) * width * CHANNELS > STRIP_BYTES:
        return f"images are too wide ({width})"
    if props.major != 9:
        return f"they are written for Hopper GPUs, this is {props.name}"
    if need > have:
        return f"they need {need // 1024} KB of shared memory per block, {props.name} has {have // 1024}"
    global built
    try:
        kernels()
    except Exception as error:  # NVRTC missing, a driver too old, ...: whatever it is, cuDNN still works
        return f"they could not be compiled ({str(error).strip().splitlines()[0]})"
    built = True
    return None


def align(n: int) -> int:
    return -(-n // 128) * 128


def memory(height: int, width: int) -> int:
    """Bytes of shared memory for a first layer's output of this size: two layers' outputs, weights, a zero pixel."""
    return align(height * width * 64) + align((height - 2) * (width - 2) * 64) + 18 * 1024 + 128


@cache
def kernels() -> dict[str, Any]:
    """Compiled for the present GPU, in two seconds, by the NVRTC that comes with torch: no CUDA toolkit is needed."""
    import torch.utils.cpp_extension as extension
    from torch.cuda._utils import _cuda_load_module, _nvrtc_compile

    if extension.CUDA_HOME is None:  # torch wants to add its headers to the search path; ours needs none
        extension.CUDA_HOME = "/usr/local/cuda"
    binary, _ = _nvrtc_compile(Path(__file__).with_suffix(".cu").read_text(), KERNELS[0], "90a")
    built: dict[str, Any] = _cuda_load_module(binary, list(KERNELS))  # type: ignore[assignment]
    props: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    for kernel in built.values():
        kernel.set_shared_memory_config(props.shared_memory_per_block_optin)
    return built


def pack_first(weight: Tensor) -> Tensor:
    """(32, c, 3, 3) -> bf16 in the order of mma's B fragments: tap, lane, then the 16 values of a lane."""
    padded = F.pad(weight, (0, 0, 0, 0, 0, CHANNELS - weight.shape[1]))
    # filter = 8 n + g; channel = 4 q + 2 r + h, so that a lane's four channels are neighbours; lane = 4 g + q.
    n, g, q, r, h, tap = range(6)
    return padded.reshape(4, 8, 4, 2, 2, 9).permute(tap, g, q, n, r, h).to(torch.bfloat16).flatten()


def pack_inner(weight: Tensor) -> Tensor:
    """(32, 32, 3, 3) -> bf16 in the blocks of wgmma: per tap and 16 channels, 4 x 2 of 8 filters x 8 channels."""
    n, g, k, r, c, tap = range(6)  # filter = 8 n + g; channel = 16 k + 8 r + c
    return weight.reshape(4, 8, 2, 2, 8, 9).permute(tap, k, n, r, g, c).to(torch.bfloat16).flatten()


@torch.library.custom_op("unmoved::pack_weights", mutates_args=())
def pack_weights(weights: list[Tensor], back: bool) -> Tensor:
    """What `encode` takes; or, for `backward`, the inner layers' with inputs and filters exchanged."""
    if back:
        return torch.cat([pack_inner(w.transpose(0, 1)) for w in weights[1:]])
    return torch.cat([pack_first(weights[0]), *map(pack_inner, weights[1:])])


@pack_weights.register_kernel("cuda")
def _(weights: list[Tensor], back: bool) -> Tensor:
    packed = packed_like(weights, back)
    flat = torch.cat([w.flatten() for w in weights])
    args = [flat, packed, weights[0].shape[1], len(weights), int(back)]
    kernels()["pack_weights"](grid=(-(-len(packed) // 256), 1, 1), block=(256, 1, 1), args=args)
    return packed


@pack_weights.register_fake
def packed_like(weights: list[Tensor], back: bool) -> Tensor:
    size = (0 if back else 9 * 32 * CHANNELS) + (len(weights) - 1) * 9 * 32 * 32
    return torch.empty(size, dtype=torch.bfloat16, device=weights[0].device)


@torch.library.custom_op("unmoved::pixels_last", mutates_args=())
def pixels_last(x: Tensor) -> Tensor:
    """Bytes (n, c, h, w) -> (n, h, w, 16)."""
    return F.pad(x.permute(0, 2, 3, 1), (0, CHANNELS - x.shape[1]))


@pixels_last.register_kernel("cuda")
def _(x: Tensor) -> Tensor:
    (n, channels, height, width), out = x.shape, pixels_last_like(x)
    args = [x.contiguous(), out, channels, height * width]
    kernels()["pixels_last"](grid=(-(-height * width // 256), n, 1), block=(256, 1, 1), args=args)
    return out


@pixels_last.register_fake
def pixels_last_like(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2], x.shape[3], CHANNELS))


@torch.library.custom_op("unmoved::crop_bytes", mutates_args=())
def crop_bytes(x: Tensor, offset: Tensor, size: int) -> Tensor:
    """transforms.crop for bytes on a GPU; `size` is a multiple of 4."""
    n, channels, height, width = x.shape
    out = cropped_like(x, offset, size)
    args = [x.contiguous(), offset.contiguous(), out, channels, height, width, size]
    kernels()["crop_bytes"](grid=(-(-channels * size * size // 1024), n, 1), block=(256, 1, 1), args=args)
    return out


@crop_bytes.register_fake
def cropped_like(x: Tensor, offset: Tensor, size: int) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], size, size))


class Windows(NamedTuple):
    """Views of images that only shift them, and so need not be made: the kernels read the images at an offset."""

    images: Tensor  # (m, h, w, 16) bytes
    offsets: Tensor  # (n, 2): view i is of image i % m; beyond the border, the border repeats


def rows(x: Tensor, offsets: Tensor) -> int:
    return len(offsets) or len(x)


def encoded(
    x: Tensor, offsets: Tensor, dx: Tensor, biases: Tensor, stride: int, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for what `encode` returns."""
    n = rows(x, offsets)
    *inner, (h, w) = sizes(x.shape[1], x.shape[2], stride, len(biases))
    pixels = sum(a * b for a, b in inner) if keep else 0
    return (
        x.new_empty((n + len(dx), h, w, FILTERS), dtype=torch.bfloat16),
        x.new_empty(((n + len(dx)) * pixels * FILTERS,), dtype=torch.bfloat16),
        x.new_empty((n * (pixels + h * w) if keep else 0,), dtype=torch.int32),
    )


@torch.library.custom_op("unmoved::encode", mutates_args=())
def encode(
    x: Tensor, offsets: Tensor, dx: Tensor, weights: Tensor, biases: Tensor, stride: int, last_relu: bool, keep: bool,
    centre: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Features (n + t, h', w', 32) and, for a backward pass, flat: the layers before, which outputs are positive."""
    sources, height, width, _ = x.shape
    n = rows(x, offsets)
    features, kept, positive = encoded(x, offsets, dx, biases, stride, keep)
    kernels()["encode_bytes" if x.dtype == torch.uint8 else "encode_bf16"](
        grid=(n, 1, 1),
        block=(THREADS, 1, 1),
        args=[x, sources, offsets, len(offsets), dx, weights, biases, kept, positive, features, n, len(dx), height,
              width, stride, len(biases), int(last_relu), int(keep), 1 / 255, float(centre)],
        shared_mem=memory(*sizes(height, width, stride, 1)[0]),
    )  # fmt: skip
    return features, kept, positive


@encode.register_fake
def _(
    x: Tensor, offsets: Tensor, dx: Tensor, weights: Tensor, biases: Tensor, stride: int, last_relu: bool, keep: bool,
    centre: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return encoded(x, offsets, dx, biases, stride, keep)


def weighed(x: Tensor, gradient: Tensor, layers: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for what `backward` returns."""
    slots = GROUPS * min(torch.cuda.get_device_properties(x.device).multi_processor_count, len(gradient))
    return (
        torch.empty(slots, 9, FILTERS, CHANNELS, device=x.device),
        torch.empty(layers - 1, slots, 9, FILTERS, FILTERS, device=x.device),
        torch.empty(layers, slots, FILTERS, device=x.device),
    )


@torch.library.custom_op("unmoved::backward", mutates_args=())
def backward(
    gradient: Tensor, x: Tensor, offsets: Tensor, dx: Tensor, kept: Tensor, positive: Tensor, weights: Tensor,
    stride: int, layers: int, last_relu: bool, centre: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the first layer's weights (slots, 9, 32, 16), of the others' (layers - 1, slots, 9, 32, 32) and of
    the biases (layers, slots, 32), each still to be summed over slots: no sum depends on timing, so that the same call
    gives the same bits."""
    n, t = rows(x, offsets), len(dx)
    outputs = sizes(x.shape[1], x.shape[2], stride, layers)
    first, inner, bias = weighed(x, gradient, layers)
    descended = kept.new_empty(kept.numel() + gradient.numel())
    kernels()["descend"](
        grid=(n + t, 1, 1),
        block=(THREADS, 1, 1),
        args=[gradient, positive, weights, descended, n, t, *outputs[0], layers, int(last_relu)],
        shared_mem=memory(*outputs[0]),
    )
    activations, gradients = unflatten(kept, n + t, outputs[:-1]), unflatten(descended, n + t, outputs)
    for layer, g in enumerate(gradients):
        a, da = (x, dx) if layer == 0 else (activations[layer - 1][:n], activations[layer - 1][n:])
        name = "weigh_inner" if layer else "weigh_bytes" if x.dtype == torch.uint8 else "weigh_bf16"
        s, (_, height, width, channels), (out_height, out_width) = 1 if layer else stride, a.shape, outputs[layer]
        kernels()[name](
            grid=(bias.shape[1] // GROUPS, 1, 1),
            block=(WEIGH_THREADS, 1, 1),
            args=[a, len(a), offsets, 0 if layer else len(offsets), da, g, inner[layer - 1] if layer else first,
                  bias[layer], n, t, height, width, out_height, out_width, s, 0.0 if layer else float(centre)],
            shared_mem=128 + 2 * (align(STRIP * out_width * 64) + align(((STRIP - 1) * s + 3) * width * channels * 2)),
        )  # fmt: skip
    return first, inner, bias


@backward.register_fake
def _(
    gradient: Tensor, x: Tensor, offsets: Tensor, dx: Tensor, kept: Tensor, positive: Tensor, weights: Tensor,
    stride: int, layers: int, last_relu: bool, centre: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return weighed(x, gradient, layers)


class ConvStack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offsets: Tensor, dx: Tensor, stride: int, last_relu: bool, centre: float, *params: Tensor
    ) -> Tensor:
        weights, biases = list(params[::2]), params[1::2]
        packed = pack_weights(weights, False)
        features, *state = encode(x, offsets, dx, packed, torch.stack(biases), stride, last_relu, True, centre)
        ctx.save_for_backward(x, offsets, dx, *state, *weights)
        ctx.options = stride, len(weights), last_relu, centre
        return features

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        *inputs, kept, positive = ctx.saved_tensors[:5]
        weights = list(ctx.saved_tensors[5:])
        packed = pack_weights(weights, True)
        first, inner, bias = backward(gradient.contiguous(), *inputs, kept, positive, packed, *ctx.options)
        sums = [first.sum(0)[..., : weights[0].shape[1]] / 255, *inner.sum(1)]  # (9, 32, channels) per layer
        by_weight = [w.permute(1, 2, 0).reshape(w.shape[1], w.shape[2], 3, 3) for w in sums]
        grads = [g for pair in zip(by_weight, bias.sum(1), strict=True) for g in pair]
        return None, None, None, None, None, None, *grads


def unflatten(flat: Tensor, rows: int, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    parts = flat.split([rows * h * w * FILTERS for h, w in shapes])
    return [part.view(rows, h, w, FILTERS) for part, (h, w) in zip(parts, shapes, strict=True)]


def conv_stack(
    x: Tensor | Windows, dx: Tensor | None, weights: Sequence[Tensor], biases: Sequence[Tensor], stride: int,
    last_relu: bool, centre: float,
) -> Tensor:  # fmt: skip
    """Images (n, c, h, w) and tangents (t, c, h, w) of the first t, in grey levels -> features (n + t, h' w' 32) in
    bf16. `centre` is subtracted from the images."""
    offsets = weights[0].new_empty((0, 2), dtype=torch.long)
    if isinstance(x, Windows):
        images, offsets = x
    elif x.dtype == torch.uint8:
        images = pixels_last(x)
    else:
        images, centre = padded(x - centre if centre else x), 0.0  # before the rounding to bf16; bytes are exact
    dx = images.new_empty((0, 0), dtype=torch.bfloat16) if dx is None else padded(dx)
    if torch.is_grad_enabled() and weights[0].requires_grad:
        params = [p for pair in zip(weights, biases, strict=True) for p in pair]
        features: Tensor = ConvStack.apply(images, offsets, dx, stride, last_relu, centre, *params)  # type: ignore[no-untyped-call]
    else:
        packed = pack_weights(list(weights), False)
        features, _, _ = encode(
            images, offsets, dx, packed, torch.stack(list(biases)), stride, last_relu, False, centre
        )
    return features.flatten(1)


def padded(x: Tensor) -> Tensor:
    """Floats (n, c, h, w) -> bf16 (n, h, w, 16): left to the compiler, which joins it with what made them."""
    return F.pad(x.to(torch.bfloat16).permute(0, 2, 3, 1), (0, CHANNELS - x.shape[1]))
