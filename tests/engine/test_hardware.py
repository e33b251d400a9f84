"""What is asked of a device before a run trusts it."""

import pytest
import torch
from torch.nn import functional

from efcil import ranks
from efcil.compiled import compiled
from efcil.engine.hardware import MPS_SHARE, choose_execution, describe, refuse_broken_products, switches
from efcil.engine.trainer import Execution
from efcil.errors import SettingsError, TrainingError
from efcil.settings import Settings

CPU = torch.device("cpu")


PLAIN = Execution(CPU, half=False, fused=False, captured=False)


def test_right_products_pass():
    refuse_broken_products(PLAIN)


@pytest.mark.parametrize("value", [torch.nan, 0.0, 1e4])
@pytest.mark.parametrize("where", ["result", "input", "weight"])
def test_a_convolution_with_a_wrong_place_is_refused(monkeypatch, where, value):
    convolve, differentiate = functional.conv2d, torch.autograd.grad

    def spoilt(tensor):
        tensor = tensor.detach().clone()
        tensor[-1, -1, -1, -1] = value
        return tensor

    def grad(result, inputs, direction):
        images, weight = differentiate(result, inputs, direction)
        if weight.shape[2] == 1:  # a projection reads every other pixel, and not the last one
            images = images.clone()
            images[-1, -1, -2, -2] = value if where == "input" else images[-1, -1, -2, -2]
            return images, spoilt(weight) if where == "weight" else weight
        return images, weight

    def conv2d(images, weight, **options):
        result = convolve(images, weight, **options)
        if where == "result" and weight.shape[2] == 1:
            result = result + (spoilt(result) - result.detach())
        return result

    monkeypatch.setattr(functional, "conv2d", conv2d)
    monkeypatch.setattr(torch.autograd, "grad", grad)
    with pytest.raises(TrainingError, match="Products on this GPU are wrong"):
        refuse_broken_products(PLAIN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_product_that_leaves_its_last_rows_unwritten_is_refused(monkeypatch, dtype):
    multiply = torch.mm

    def half_done(left, right, out):
        if out.dtype == dtype:
            out[:-1] = multiply(left[:-1], right)
        else:
            multiply(left, right, out=out)

    monkeypatch.setattr(torch, "mm", half_done)
    monkeypatch.setenv(MPS_SHARE, "40")
    with pytest.raises(TrainingError, match=f"may use 40 % of it.*{MPS_SHARE}"):
        refuse_broken_products(PLAIN)


def test_on_a_cpu_tf32_is_fp32():
    assert choose_execution(Settings(precision="tf32", device="cpu")) == PLAIN


@pytest.fixture
def card(monkeypatch):
    """Return a function that stands a GPU of a name and a compute capability in, of AMD's if there is none."""

    def stand_in(name, capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability or (9, 4))
        monkeypatch.setattr(torch.version, "hip", None if capability else "7.0")
        return torch.device("cuda", 0)

    return stand_in


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)])
def test_gpus_with_bf16_take_the_fused_path(card, capability):
    device = card("a GPU", capability)
    assert choose_execution(Settings()) == Execution(device, half=True, fused=True, captured=True)


@pytest.mark.parametrize(("messages", "captured"), [("", True), ("host", False), ("uncaptured", False)])
def test_steps_of_several_processes_are_captured_with_their_messages_by_nccl(card, monkeypatch, messages, captured):
    device = card("a GPU", (9, 0))
    monkeypatch.setattr(ranks._world, "place", ranks.Place(0, 2, 0, 1))
    monkeypatch.setenv(ranks.MESSAGES_VARIABLE, messages)
    assert choose_execution(Settings()) == Execution(device, half=True, fused=True, captured=captured)


@pytest.mark.parametrize(("name", "capability"), [("Tesla T4", (7, 5)), ("an AMD GPU", None)])
def test_gpus_without_bf16_compute_in_fp32_layer_by_layer(card, name, capability):
    device = card(name, capability)
    assert choose_execution(Settings()) == Execution(device, half=False, fused=False, captured=False)
    asked = choose_execution(Settings(precision="bf16"))
    assert (asked.half, asked.fused) == (True, False)
    with pytest.raises(SettingsError, match=f"8.0 .*or later only, and this is {name}"):
        choose_execution(Settings(precision="bf16", path="fused"))


def test_kernels_are_for_gpus_of_nvidia(card):
    pytest.importorskip("triton", reason="Triton is not installed here")
    assert compiled(card("a GPU", (9, 0)))
    assert not compiled(card("an AMD GPU", None))


@pytest.mark.parametrize(("tf32", "half", "allowed"), [(True, False, True), (False, False, False), (False, True, True)])
def test_convolutions_round_only_where_that_was_chosen(monkeypatch, tf32, half, allowed):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    execution = Execution(CPU, half=half, fused=False, captured=False, tf32=tf32)
    with switches(execution, deterministic=False):
        assert torch.backends.cudnn.allow_tf32 is allowed
    assert torch.backends.cudnn.allow_tf32 is True
    assert describe(execution, False)["precision"] == ("tf32" if tf32 else "bf16" if half else "fp32")


@pytest.mark.parametrize(("device", "asked"), [("cuda:0", [2, 16]), ("cpu", [])])
def test_a_run_on_a_gpu_leaves_the_cores_to_others(monkeypatch, device, asked):
    numbers = [16]
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with switches(Execution(torch.device(device), half=False, fused=False, captured=False), deterministic=False):
        assert numbers[-1] == (asked or [16])[0]
    assert numbers[1:] == asked


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_run_may_be_started_where_gradients_are_off(mode):
    with mode():
        with switches(PLAIN, deterministic=False):
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (True, False)
        assert not torch.is_grad_enabled()


def test_what_would_not_be_computed_in_bf16_is_not_called_so():
    with pytest.raises(SettingsError, match="on GPUs only"):
        choose_execution(Settings(precision="bf16", path="fused", device="cpu"))


def test_the_switch_for_repeating_algorithms_is_left_alone_unless_it_must_change(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, warn_only=False: asked.append(mode))
    with switches(PLAIN, deterministic=False):
        assert asked == []
    with switches(PLAIN, deterministic=True):
        assert asked == [True]
