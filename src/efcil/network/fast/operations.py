"""The operations of the fused backbone other than 3x3 convolutions, in plain PyTorch.

`kernels.py` has the same functions as Triton kernels; this version is the reference they are tested against
and runs if there is no CUDA device. Activations are (batch, channels, h, w), usually channels-last.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from efcil.network import split

#: Shorter gradients count as this long. Not the smallest number there is: a length divided by that is infinite.
SHORTEST = 1e-30


def bias_relu(x: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return relu(x + bias[channel] (+ residual)) in the type of `x`; `bias` is (channels,)."""
    out = x + bias.to(x.dtype)[None, :, None, None]
    if residual is not None:
        out = out + residual
    return out.relu_()


def mask(gradient: Tensor, activation: Tensor, other: Tensor | None = None) -> Tensor:
    """Return (gradient (+ other)) where `activation` > 0, else 0: the backward pass of a ReLU.

    `other` may hold only every other row and column, as the gradient of a stride-2 projection does; the rest is zero.
    """
    total = gradient if other is None else gradient + spread(other, gradient)
    return total * (activation > 0)


def spread(other: Tensor, like: Tensor) -> Tensor:
    """Return `other` in the shape of `like`: as it is, or put on every other row and column of zeros."""
    if other.shape == like.shape:
        return other
    full = torch.zeros_like(like)
    full[:, :, ::2, ::2] = other
    return full


def stem(images: Tensor, weight: Tensor, stride: int, padding: int, bias: Tensor | None) -> Tensor:
    """Return the convolution of images of three colours; with `bias` (outputs,), that is added and a ReLU follows."""
    out = functional.conv2d(images, weight, stride=stride, padding=padding)
    return out if bias is None else bias_relu(out, bias)


def stem_weight(gradient: Tensor, images: Tensor, side: int, stride: int, padding: int) -> Tensor:
    """Return the gradient of the weight (outputs, 3, side, side) of `stem`, from that of the convolution's output."""
    shape = (gradient.shape[1], images.shape[1], side, side)
    return conv2d_weight(images, shape, gradient, stride, padding)


def stem_input(
    gradient: Tensor,
    activation: Tensor,
    other: Tensor | None,
    weight: Tensor,
    size: Sequence[int],
    stride: int,
    padding: int,
) -> Tensor:
    """Return the gradient of images of `size` (h, w) from that of `stem`'s ReLU, whose result was `activation`.

    `gradient` (+ `other`) is masked as in `mask`. The result is in float32 at least.
    """
    masked = mask(gradient, activation, other)
    masked, weight = (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x for x in (masked, weight))
    return conv2d_input((len(masked), weight.shape[1], *size), weight, masked, stride, padding)


def descend(images: Tensor, gradient: Tensor, working: Tensor, length: float) -> None:
    """Move every image by `length` down its gradient, in place; `working` gets the result in its own type."""
    norm = torch.linalg.vector_norm(gradient, dim=(1, 2, 3), keepdim=True)
    images.sub_(gradient * (length / norm.clamp(min=SHORTEST)))
    working.copy_(images)


def turn(weight: Tensor, into: Tensor) -> None:
    """Write `weight` (outputs, inputs, h, w), rotated by 180 degrees, into `into` (inputs, outputs, h, w).

    If the stride of a convolution is 1, the gradient of its input is the convolution with that.
    """
    into.copy_(weight.flip(2, 3).transpose(0, 1))


def project(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Return the convolution of `x` with `weight` (outputs, inputs, 1, 1): a matrix product of the pixels it reads."""
    return (_read(x, stride) @ weight.flatten(1).T).permute(0, 3, 1, 2)


def project_input(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the pixels that `project` reads, from that of its output."""
    return (gradient.permute(0, 2, 3, 1) @ weight.flatten(1)).permute(0, 3, 1, 2)


def project_weight(gradient: Tensor, x: Tensor, stride: int) -> Tensor:
    """Return the gradient of the weight of `project`, from that of its output."""
    rows = gradient.permute(0, 2, 3, 1).flatten(0, 2)
    return (rows.T @ _read(x, stride).flatten(0, 2))[:, :, None, None]


def _read(x: Tensor, stride: int) -> Tensor:
    """Return the pixels (batch, h, w, channels) that `project` reads."""
    return x.permute(0, 2, 3, 1)[:, ::stride, ::stride]


def pool(activation: Tensor) -> Tensor:
    """Return the global average (batch, channels) of `activation`, at least in float32."""
    wide = activation.float() if activation.dtype in (torch.bfloat16, torch.float16) else activation
    return wide.mean(dim=(2, 3))


def pool_mask(gradient: Tensor, activation: Tensor) -> Tensor:
    """Backward pass of `pool` and the ReLU before it: the gradient (batch, channels) is spread over the map."""
    area = activation.shape[2] * activation.shape[3]
    spread = (gradient / area).to(activation.dtype)[:, :, None, None]
    return (spread * (activation > 0)).contiguous(memory_format=torch.channels_last)


def max_pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest values of windows of 3 x 3 at every other pixel, and which they were, for `unpool`."""
    return functional.max_pool2d(x, 3, stride=2, padding=1, return_indices=True)


def unpool(gradient: Tensor, other: Tensor | None, pooled: Tensor, places: Tensor, x: Tensor) -> Tensor:
    """Backward pass of `max_pool`, which made `pooled` of `x`, and of the ReLU before it.

    The gradient of `pooled` is `gradient` (+ `other`, as in `mask`). Where `pooled` is zero, ReLU's was.
    """
    total = mask(gradient, pooled, other)
    return torch.ops.aten.max_pool2d_with_indices_backward(total, x, [3, 3], [2, 2], [1, 1], [1, 1], False, places)


def batch_statistics(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    momentum: float,
    epsilon: float,
) -> Tensor:
    """Return (4, channels): mean, 1/std, scale and shift of this batch's normalisation; update running statistics."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    count = x.numel() // x.shape[1]
    variance, mean = torch.var_mean(wide, dim=(0, 2, 3), correction=0)
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_variance.lerp_((variance * (count / max(count - 1, 1))).to(running_variance.dtype), momentum)
    inverse = torch.rsqrt(variance + epsilon)
    scale = gamma * inverse
    return torch.stack([mean, inverse, scale, beta - mean * scale])


def shared_statistics(
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    running_mean: Tensor,
    running_variance: Tensor,
    momentum: float,
    epsilon: float,
) -> Tensor:
    """As `batch_statistics`, of the rows of all processes; a fifth row has the number of values of a channel."""
    mean, variance, count = split.moments(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x)
    split.follow(running_mean, mean, momentum)
    split.follow(running_variance, split.unbiased(variance, count), momentum)
    inverse = torch.rsqrt(variance + epsilon)
    scale = gamma * inverse
    return torch.stack([mean, inverse, scale, beta - mean * scale, count.expand_as(mean)])


def is_shared(statistics: Tensor) -> bool:
    """Return whether these are statistics of the rows of several processes."""
    return len(statistics) == 5


def normalise_relu(
    x: Tensor, statistics: Tensor, residual: Tensor | None = None, residual_statistics: Tensor | None = None
) -> Tensor:
    """Return relu(x * scale + shift (+ residual, itself scaled and shifted if it has statistics))."""
    out = x * statistics[2][None, :, None, None] + statistics[3][None, :, None, None]
    if residual is not None:
        if residual_statistics is not None:
            residual = residual * residual_statistics[2][None, :, None, None]
            residual = residual + residual_statistics[3][None, :, None, None]
        out = out + residual
    return out.relu().to(x.dtype)


def normalise_backward(
    gradient: Tensor,
    x: Tensor,
    statistics: Tensor,
    gamma: Tensor,
    gamma_gradient: Tensor,
    beta_gradient: Tensor,
    activation: Tensor | None = None,
    other: Tensor | None = None,
    plain_relu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Backward pass of a batch normalisation and, if `activation` is given, of the ReLU after it.

    Returns the gradient of `x`, and the gradient that entered the normalisation: (gradient (+ other)) where
    `activation` > 0. Writes the gradients of scale and shift. With `plain_relu` the ReLU came directly after the
    normalisation, so that its sign can be computed from `x` again; the second result must then not be used.
    Statistics of `shared_statistics` stand for the rows of all processes, and the gradient of `x` then does too.
    """
    if plain_relu:
        sign = x * statistics[2][None, :, None, None] + statistics[3][None, :, None, None]
        gradient = mask(gradient, sign.to(x.dtype))
    elif activation is not None:
        gradient = mask(gradient, activation, other)
    wide = gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient
    mean, inverse = statistics[0][None, :, None, None], statistics[1][None, :, None, None]
    normalised = (x - mean) * inverse
    count: int | Tensor = x.numel() // x.shape[1]
    total = wide.sum(dim=(0, 2, 3))
    weighted = (wide * normalised).sum(dim=(0, 2, 3))
    gamma_gradient.copy_(weighted)
    beta_gradient.copy_(total)
    if is_shared(statistics):
        total, weighted = split.total(total, weighted)
        count = statistics[4][None, :, None, None]
    centred = wide - total[None, :, None, None] / count - normalised * weighted[None, :, None, None] / count
    return (centred * (gamma[None, :, None, None] * inverse)).to(x.dtype), gradient


def adam(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    hyper: Tensor,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    scale: Tensor | None,
    working: Tensor | None,
    turned: Tensor | None = None,
) -> None:
    """One Adam step with coupled weight decay on flat tensors, in place.

    `hyper` holds (rate / bias correction 1, 1 / sqrt(bias correction 2)). With `scale` (rows,), the tensors are that
    many equal rows, and `gradient` is that of master * scale of its row; `working` then receives master * scale in
    its own type. `turned` (inputs, outputs, h, w) then receives the same as `turn` would write it.
    """
    wide = gradient.to(master.dtype)
    if scale is not None:
        scale = scale.repeat_interleave(master.numel() // scale.numel())
        wide = wide * scale
    wide = wide + weight_decay * master
    first.lerp_(wide, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(wide, wide, value=1 - betas[1])
    master.sub_(hyper[0] * first / (second.sqrt() * hyper[1] + epsilon))
    _write(master, scale, working, turned)


def sgd(
    master: Tensor,
    gradient: Tensor,
    first: Tensor,
    hyper: Tensor,
    momentum: float,
    weight_decay: float,
    scale: Tensor | None,
    working: Tensor | None,
    turned: Tensor | None = None,
) -> None:
    """One step of gradient descent with momentum and coupled weight decay on flat tensors; `hyper[0]` is the rate.

    `scale`, `working` and `turned` are as for `adam`.
    """
    wide = gradient.to(master.dtype)
    if scale is not None:
        scale = scale.repeat_interleave(master.numel() // scale.numel())
        wide = wide * scale
    wide = wide + weight_decay * master
    first.mul_(momentum).add_(wide)
    master.sub_(hyper[0] * first)
    _write(master, scale, working, turned)


def _write(master: Tensor, scale: Tensor | None, working: Tensor | None, turned: Tensor | None) -> None:
    """Write what the next step reads of weights that were updated."""
    if working is None:
        return
    working.copy_(master if scale is None else master * scale)
    if turned is not None:
        inputs, outputs, high, wide = turned.shape
        turn(working.view(outputs, high, wide, inputs).permute(0, 3, 1, 2), turned)
