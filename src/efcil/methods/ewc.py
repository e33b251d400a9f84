"""Elastic weight consolidation, with the conventions of the FACIL framework."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from efcil import ranks, seeds
from efcil.core import fisher
from efcil.core.losses import cross_entropy
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, Task, Terms
from efcil.methods.finetune import FineTune
from efcil.network import split
from efcil.network.fast import plainly
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import option


class ElasticWeightConsolidation(FineTune):
    """Trains backbone and newest head; penalises changes of backbone parameters that old tasks depend on."""

    name = "ewc"
    summary = "changes of backbone parameters penalised, weighted by a diagonal Fisher matrix"
    family = "scheduled"
    cosine_heads = False  # the Fisher information is computed for linear heads

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters of EWC, with the values of the EFC paper, and the conventions it leaves open."""

        weight: float = option(
            5000.0,
            "Weight of the penalty, which has a factor 1/2 (FACIL's default; the EFC paper's 5000 have none).",
            minimum=0,
        )
        fisher_memory: float = option(
            0.5, "Share of the old Fisher matrix kept when a task's own is added (FACIL).", minimum=0, maximum=1
        )
        fisher_labels: str = option(
            "predicted",
            "Labels of the Fisher pass: predicted (FACIL's default), sampled from the prediction (EWC's definition), "
            "or true.",
            choices=("predicted", "sampled", "true"),
        )
        fisher_trains_statistics: bool = option(
            True,
            "Run the Fisher pass with BatchNorm in training mode, which moves its running statistics (FACIL's code; an "
            "earlier project of the EFC authors has it off). Never done if train_normalisation is off or "
            "fisher_batch_size is 1.",
            needs=("train_normalisation", True),
            unless=("fisher_batch_size", 1),
        )
        fisher_batch_size: int | None = option(
            None,
            "Images whose mean gradient is squared in the Fisher pass; none: those of a training step (FACIL), 1: "
            "every image by itself (the paper's formula).",
            minimum=1,
        )
        train_normalisation: bool = option(
            True, "Keep training BatchNorm after the first task (FACIL's default; the EFC paper does not say)."
        )

    settings: Settings
    fisher: Tensor

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        backbone = self._backbone()
        size = sum(parameter.numel() for parameter in backbone)
        self.keep(
            "fisher",
            torch.zeros(size, device=backbone[0].device),
            why="how much old tasks depend on each weight",
            title="Fisher information",
            recovery="Squared gradients averaged over all images. No image can be recovered from it.",
        )
        self._anchors: list[Tensor] = []
        self._roots: list[Tensor] = []

    def _backbone(self) -> list[nn.Parameter]:
        return list(self.network.backbone.parameters())

    # -- training ----------------------------------------------------------------------------------------------

    def begin_task(self, task: Task) -> None:
        """Store the backbone's parameters, then grow a head; old heads are frozen."""
        # Not saved: a task always starts from a saved state, which has this backbone.
        self._anchors = [parameter.detach().clone() for parameter in self._backbone()]
        super().begin_task(task)
        self.restored()

    def restored(self) -> None:
        """Split the Fisher matrix into the shapes of the parameters."""
        self._roots = fisher.unflatten(self.fisher.sqrt(), self._backbone())

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy over the newest head, plus the penalty."""
        terms = super().loss(batch)
        terms["penalty"] = fisher.elastic_penalty(self._backbone(), self._anchors, self._roots, self.settings.weight)
        return terms

    # -- statistics --------------------------------------------------------------------------------------------

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Blend the Fisher matrix of this task into the stored one."""
        memory = self.settings.fisher_memory
        self.fisher = memory * self.fisher + (1.0 - memory) * self._measure_fisher(task, data)
        self._anchors, self._roots = [], []

    def _measure_fisher(self, task: Task, data: TaskImages) -> Tensor:
        """Squared gradients of batch means, weighted by the batch size and divided by the number of images."""
        size = min(self.settings.fisher_batch_size or task.batch_size, len(data))
        alone = size == 1
        settings = self.settings
        learning = settings.fisher_trains_statistics and settings.train_normalisation and not alone
        # Single images still pass through the network together.
        step = min(task.batch_size, len(data)) if alone else size
        used = len(data) // size * size
        view = data.view("fisher")
        generator = seeds.generator(data.device, task.seed, "fisher", task.index)
        weight = self.network.head_weight().detach()
        with _layer_by_layer(self.network, learning):
            parameters = self._backbone()
            totals = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
            for start in range(0, used, step):
                images, labels = data.render(view, start, min(start + step, used))
                images = images.float()
                with split.averaged():
                    logits = functional.linear(self.network.features(images), weight)
                labels = fisher.fisher_labels(logits, labels, self.settings.fisher_labels, generator)
                if alone:
                    losses = partial(_summed_loss, weight)
                    fisher.add_squares_per_image(totals, self.network.backbone, images, labels, losses, 1 / used)
                else:
                    gradients = torch.autograd.grad(cross_entropy(logits, labels), parameters)
                    ranks.average(gradients)
                    fisher.add_squares(totals, gradients, size / used)
        return fisher.flatten(totals)


def _summed_loss(weight: Tensor, features: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(features, weight), labels, reduction="sum")


@contextmanager
def _layer_by_layer(network: IncrementalNetwork, learning: bool) -> Iterator[None]:
    """Compute features in float32 with ordinary gradients for every backbone parameter, then restore everything."""
    training = network.training
    flags = [(parameter, parameter.requires_grad) for parameter in network.parameters()]
    network.backbone.requires_grad_(True)
    network.train(learning)
    try:
        with plainly(network), torch.enable_grad():
            yield
    finally:
        network.train(training)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
