"""The Triton kernels against the plain operations, through Triton's interpreter where there is no CUDA device."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed here; the plain operations are used instead")

import triton

from efcil import compiled
from efcil.network.fast import kernels, operations

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(*shape, generator=generator).to(DEVICE)
    return value.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else value


def halved(shape):
    """Return the shape of every other row and column."""
    return (*shape[:2], (shape[2] + 1) // 2, (shape[3] + 1) // 2)


SHAPES = [(3, 16, 5, 5), (2, 64, 8, 8), (9, 8, 7, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_residual", [False, True])
def test_bias_relu(shape, with_residual):
    x, bias = tensor(*shape), tensor(shape[1], seed=1)
    residual = tensor(*shape, seed=2) if with_residual else None
    expected = operations.bias_relu(x, bias, residual)
    torch.testing.assert_close(kernels.bias_relu(x.clone(), bias, residual), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["none", "whole", "halved"])
def test_mask(shape, kind):
    gradient, activation = tensor(*shape), tensor(*shape, seed=1)
    other = {"none": None, "whole": tensor(*shape, seed=2), "halved": tensor(*halved(shape), seed=2)}[kind]
    expected = operations.mask(gradient, activation, other)
    torch.testing.assert_close(kernels.mask(gradient.clone(), activation, other), expected)


def exact(function, *arguments):
    """Return what `function` of operations.py gives in float64 on the CPU, where nothing is rounded on the way."""
    wide = [a.double().cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
    return function(*wide).float().to(DEVICE)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("outputs", [16, 40, 200])
@pytest.mark.parametrize("shape", [*SHAPES, (40, 24, 9, 9)])
def test_projections_forwards_and_backwards(shape, outputs, stride):
    x, weight = tensor(*shape), tensor(outputs, shape[1], 1, 1, seed=1)
    expected = exact(operations.project, x, weight, stride)
    torch.testing.assert_close(expected, exact(functional.conv2d, x, weight, None, stride))
    torch.testing.assert_close(kernels.project(x, weight, stride), expected, atol=1e-4, rtol=1e-4)
    gradient = tensor(*expected.shape, seed=2)
    for name, arguments in (("project_input", (gradient, weight)), ("project_weight", (gradient, x, stride))):
        plain, fast = exact(getattr(operations, name), *arguments), getattr(kernels, name)(*arguments)
        torch.testing.assert_close(fast, plain, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("shape", [(16, 16, 3, 3), (40, 24, 3, 3), (100, 130, 1, 2)])
def test_turned_weights(shape):
    weight = tensor(*shape)
    turned = []
    for module in (operations, kernels):
        into = torch.zeros(shape[1], shape[0], *shape[2:], device=DEVICE).contiguous(memory_format=torch.channels_last)
        module.turn(weight, into)
        turned.append(into)
    assert torch.equal(*turned)


@pytest.mark.parametrize(("side", "stride", "padding"), [(3, 1, 1), (7, 2, 3)])
@pytest.mark.parametrize("outputs", [16, 80])
@pytest.mark.parametrize("shape", [(3, 3, 8, 8), (11, 3, 9, 7)])
def test_the_first_convolution_forwards_and_backwards(shape, outputs, side, stride, padding):
    images, weight = tensor(*shape), tensor(outputs, 3, side, side, seed=1)
    for bias in (None, tensor(outputs, seed=3)):
        expected = exact(operations.stem, images, weight, stride, padding, bias)
        torch.testing.assert_close(kernels.stem(images, weight, stride, padding, bias), expected, atol=1e-4, rtol=1e-4)
    gradient = tensor(*expected.shape, seed=2)
    plain = exact(operations.stem_weight, gradient, images, side, stride, padding)
    fast = kernels.stem_weight(gradient, images, side, stride, padding)
    torch.testing.assert_close(fast, plain, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("side", "stride", "padding"), [(3, 1, 1), (7, 2, 3)])
@pytest.mark.parametrize("kind", ["none", "whole", "halved"])
@pytest.mark.parametrize(("outputs", "size"), [(16, (8, 8)), (80, (9, 7))])
def test_gradients_of_images(outputs, size, kind, side, stride, padding):
    weight = tensor(outputs, 3, side, side, seed=1)
    shape = (5, outputs, *((length + 2 * padding - side) // stride + 1 for length in size))
    gradient, activation = tensor(*shape), tensor(*shape, seed=2)
    other = {"none": None, "whole": tensor(*shape, seed=3), "halved": tensor(*halved(shape), seed=3)}[kind]
    arguments = (gradient, activation, other, weight, size, stride, padding)
    torch.testing.assert_close(
        kernels.stem_input(*arguments), exact(operations.stem_input, *arguments), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("shape", [(3, 3, 8, 8), (2, 3, 33, 35)])
def test_steps_down_a_gradient(shape):
    ends = []
    for module in (operations, kernels):
        images, gradient, working = tensor(*shape), tensor(*shape, seed=1), tensor(*shape, seed=2).bfloat16()
        gradient[0] = 0.0
        module.descend(images, gradient, working, 6.0)
        assert torch.equal(images[0], tensor(*shape)[0])
        ends.append((images, working.float()))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-5, rtol=1e-2)
    torch.testing.assert_close(ends[1][0], ends[0][0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_pool_and_its_way_back(shape):
    activation = tensor(*shape).relu()
    torch.testing.assert_close(kernels.pool(activation), operations.pool(activation))
    gradient = tensor(shape[0], shape[1], seed=1)
    torch.testing.assert_close(kernels.pool_mask(gradient, activation), operations.pool_mask(gradient, activation))


@pytest.mark.parametrize("shape", [*SHAPES, (2, 16, 1, 1), (1, 8, 12, 12)])
@pytest.mark.parametrize("kind", ["none", "whole", "halved"])
def test_max_pooling_and_its_way_back(shape, kind):
    x = tensor(*shape).mul(2).round().div(2).relu()  # many values are equal, and the first of them counts
    (pooled, places), (expected, indices) = kernels.max_pool(x), operations.max_pool(x)
    assert torch.equal(pooled, expected)
    gradient = tensor(*pooled.shape, seed=1)
    shapes = {"whole": pooled.shape, "halved": halved(pooled.shape)}
    other = tensor(*shapes[kind], seed=2) if kind in shapes else None
    found = kernels.unpool(gradient.clone(), other, pooled, places, x)
    torch.testing.assert_close(found, operations.unpool(gradient, other, pooled, indices, x))
    leaf = x.clone().requires_grad_()
    total = gradient if other is None else gradient + operations.spread(other, gradient)
    functional.max_pool2d(leaf.relu(), 3, stride=2, padding=1).backward(total)
    torch.testing.assert_close(found, leaf.grad)


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_normalisation_forwards_and_backwards(shape):
    x, gradient = tensor(*shape) * 2 + 1, tensor(*shape, seed=1)
    gamma, beta = tensor(shape[1], seed=2), tensor(shape[1], seed=3)
    running = [(torch.zeros(shape[1], device=DEVICE), torch.ones(shape[1], device=DEVICE)) for _ in range(2)]
    plain = operations.batch_statistics(x, gamma, beta, *running[0], 0.1, 1e-5)
    fast = kernels.batch_statistics(x, gamma, beta, *running[1], 0.1, 1e-5)
    torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-4)
    for left, right in zip(*running, strict=True):
        torch.testing.assert_close(right, left, atol=1e-5, rtol=1e-4)
    residual = tensor(*shape, seed=4)
    for arguments in [(), (residual,), (residual, plain.flip(0).contiguous())]:
        expected = operations.normalise_relu(x, plain, *arguments)
        torch.testing.assert_close(kernels.normalise_relu(x, plain, *arguments), expected, atol=1e-5, rtol=1e-4)
    activation, other = tensor(*shape, seed=5), tensor(*shape, seed=6)
    every_other = tensor(*halved(shape), seed=7)
    for arguments in [(), (activation,), (activation, other), (activation, every_other), (None, None, True)]:
        outs = []
        for module in (operations, kernels):
            into = torch.zeros(2, shape[1], device=DEVICE)
            out, summed = module.normalise_backward(gradient.clone(), x, plain, gamma, *into, *arguments)
            outs.append((out, into) if len(arguments) == 3 else (out, into, summed))
        torch.testing.assert_close(outs[1], outs[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
def test_optimisers(with_scale, rule):
    size = 1500
    results = []
    for module in (operations, kernels):
        master, first, second = tensor(size), tensor(size, seed=1) * 0.1, tensor(size, seed=2).abs()
        gradient = tensor(size, seed=3).bfloat16()
        scale = tensor(size // 10, seed=4) if with_scale else None
        working = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
        hyper = torch.tensor([1e-2, 1.5], device=DEVICE)
        if rule == "adam":
            module.adam(master, gradient, first, second, hyper, (0.9, 0.999), 1e-8, 1e-3, scale, working)
        else:
            module.sgd(master, gradient, first, hyper, 0.9, 1e-3, scale, working)
        results.append((master, first, second, working.float()))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-2)
    torch.testing.assert_close(results[1][0], results[0][0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("rule", ["adam", "sgd"])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 8), (40, 72)])
def test_optimisers_write_turned_weights_too(outputs, inputs, rule, with_scale):
    size = outputs * 9 * inputs
    results = []
    for module, together in ((operations, False), (operations, True), (kernels, True)):
        master, first, second = tensor(size), tensor(size, seed=1) * 0.1, tensor(size, seed=2).abs()
        gradient, hyper = tensor(size, seed=3).bfloat16(), torch.tensor([1e-2, 1.5], device=DEVICE)
        scale = tensor(outputs, seed=4) if with_scale else None
        working = torch.zeros(size, dtype=torch.bfloat16, device=DEVICE)
        turned = torch.zeros(inputs, 3, 3, outputs, dtype=torch.bfloat16, device=DEVICE).permute(0, 3, 1, 2)
        wanted = turned if together else None
        if rule == "adam":
            module.adam(master, gradient, first, second, hyper, (0.9, 0.999), 1e-8, 1e-3, scale, working, wanted)
        else:
            module.sgd(master, gradient, first, hyper, 0.9, 1e-3, scale, working, wanted)
        weight = working.view(outputs, 3, 3, inputs).permute(0, 3, 1, 2)
        if not together:
            operations.turn(weight, turned)
        assert torch.equal(turned, weight.flip(2, 3).transpose(0, 1))
        results.append((master, first, second, working.float()))
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], atol=1e-5, rtol=1e-2)
        torch.testing.assert_close(found[0], results[0][0], atol=1e-6, rtol=1e-5)


def test_adam_is_torch_adam():
    weight = torch.nn.Parameter(tensor(50).clone())
    reference = torch.optim.Adam([weight], lr=1e-2, weight_decay=1e-2)
    master, first, second = weight.detach().clone(), torch.zeros(50, device=DEVICE), torch.zeros(50, device=DEVICE)
    for step in range(1, 6):
        gradient = tensor(50, seed=step)
        weight.grad = gradient.clone()
        reference.step()
        hyper = torch.tensor([1e-2 / (1 - 0.9**step), (1 - 0.999**step) ** -0.5], device=DEVICE)
        operations.adam(master, gradient, first, second, hyper, (0.9, 0.999), 1e-8, 1e-2, None, None)
        torch.testing.assert_close(master, weight.detach(), atol=1e-6, rtol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter does not compute in bfloat16; needs a GPU")
@pytest.mark.parametrize("shape", [(64, 64, 32, 32), (64, 512, 4, 4)])
def test_in_the_type_and_the_sizes_of_training(shape):
    """Inputs in bfloat16: the result is that of exact arithmetic on them, rounded."""
    half = torch.bfloat16
    x, other, residual = (tensor(*shape, seed=seed).to(half) for seed in range(3))
    gamma, beta, gradients = tensor(shape[1]), tensor(shape[1], seed=1), torch.zeros(2, shape[1], device=DEVICE)
    running = (torch.zeros(shape[1], device=DEVICE), torch.ones(shape[1], device=DEVICE))
    statistics = kernels.batch_statistics(x, gamma, beta, *running, 0.1, 1e-5)
    close = {"atol": 0.05, "rtol": 0.02}

    def check(name, *arguments):
        owned = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        found = getattr(kernels, name)(*owned)
        torch.testing.assert_close(found.float(), exact(getattr(operations, name), *arguments), **close)

    check("bias_relu", x, beta, residual)
    check("mask", x, other, residual)
    check("pool", x)
    check("pool_mask", tensor(*shape[:2]), x)
    check("normalise_relu", x, statistics, residual, statistics.flip(0).contiguous())
    weight = tensor(2 * shape[1], shape[1], 1, 1, seed=3).to(half) / shape[1] ** 0.5
    check("project", x, weight, 2)
    rows = shape[0] * shape[2] * shape[3]
    into = tensor(shape[0], 2 * shape[1], *halved(shape)[2:], seed=4).to(half) / rows**0.5
    check("project_input", into, weight)
    check("project_weight", into, x, 2)
    images = tensor(shape[0], 3, *shape[2:], seed=5).to(half)
    check("stem", images, tensor(64, 3, 3, 3, seed=6).to(half) / 5, 1, 1, None)
    check("stem_weight", tensor(shape[0], 64, *shape[2:], seed=7).to(half) / rows**0.5, images, 3, 1, 1)
    wide = [t.double().cpu() for t in (x, other, statistics, gamma)]
    into64 = torch.zeros(2, shape[1], dtype=torch.float64)
    plain, _ = operations.normalise_backward(wide[1].clone(), wide[0], wide[2], wide[3], *into64, None, None, True)
    fast, _ = kernels.normalise_backward(other.clone(), x, statistics, gamma, *gradients, None, None, True)
    torch.testing.assert_close(fast.float().cpu(), plain.float(), **close)
    torch.testing.assert_close(gradients.cpu(), into64.float(), atol=1.0, rtol=0.01)


@pytest.mark.parametrize(("given", "fused"), [(None, True), ("0", False)])
def test_products_and_sums_are_rounded_together_whatever_triton_s_default(monkeypatch, recwarn, given, fused):
    fusion = getattr(getattr(triton, "knobs", None), "language", None)
    if not hasattr(fusion, "fp_fusion_enabled"):
        pytest.skip("this version of Triton has one default, which is this one")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "unset")  # so that it is restored
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION")
    if given is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", given)
    if hasattr(triton._utils, "warn_once"):  # it warns once per process
        triton._utils.warn_once.cache_clear()
    assert compiled._triton.__wrapped__()
    assert fusion.fp_fusion_enabled(None) is fused
    assert not [each for each in recwarn if "FP_FUSION" in str(each.message)]
