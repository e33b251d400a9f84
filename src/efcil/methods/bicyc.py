"""BiCyc: AdaGauss whose maps between old and new features are trained with the network, in both directions."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from efcil.core.losses import cross_entropy
from efcil.data.store import TaskImages
from efcil.methods.adagauss import AdaptedGaussians, collapse
from efcil.methods.base import Batch, ParameterGroup, Task, Terms
from efcil.network.incremental import IncrementalNetwork
from efcil.settings import Recipe, option

#: Images of a batch whose mutual cosines are compared.
_COMPARED = 128


class BidirectionalCycle(AdaptedGaussians):
    """Trains a map from old to new features beside the distiller, which goes the other way, and makes them inverse."""

    name = "bicyc"
    summary = "AdaGauss with maps between old and new features trained in both directions, each undoing the other"

    @dataclass(frozen=True)
    class Settings(AdaptedGaussians.Settings):
        """Hyper-parameters of BiCyc, with the values of its authors' script for CIFAR-100."""

        distillation_weight: float = option(
            5.0,
            "Weight of the alignment: new to old features, which trains the network, and old to new (BiCyc).",
            minimum=0,
        )
        cycle_weight: float = option(
            2.0,
            "Weight of the cycles: a feature mapped there and back should be itself (the authors' script; "
            "the paper: 1).",
            minimum=0,
        )
        geometry_weight: float = option(
            0.05,
            "Weight of the difference between cosines of mapped features and those they should have (BiCyc).",
            minimum=0,
        )
        adapter: str = option(
            "mlp",
            "Map that updates old Gaussians: mlp (trained with the network) or ridge (closed form, an ablation).",
            choices=("mlp", "ridge"),
        )
        adapter_epochs: int = option(
            30,
            "Epochs in which the map is learned further after the task (SGD; the paper; the authors' code: 100).",
            minimum=1,
            needs=("adapter", "mlp"),
        )

    settings: Settings

    def __init__(self, network: IncrementalNetwork, settings: Settings | None = None) -> None:
        super().__init__(network, settings)
        self.forward_map: nn.Module | None = None

    def begin_task(self, task: Task) -> None:
        """Begin as AdaGauss does, with a new map from old to new features too."""
        super().begin_task(task)
        self.forward_map = self._new_map(task, "adapter")

    def parameter_groups(self, recipe: Recipe) -> list[ParameterGroup]:
        """What AdaGauss trains, and the map."""
        assert self.forward_map is not None
        own = {"params": list(self.forward_map.parameters()), "learning_rate": recipe.learning_rate}
        return [*super().parameter_groups(recipe), own]

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy over the new head, alignment in both directions, cycles, cosines, and that against collapse.

        Only what the distiller makes of new features trains the network; the map follows it.
        """
        assert self.distiller is not None
        assert self.forward_map is not None
        settings, first = self.settings, sum(self.network.head_sizes[:-1])
        new, old = self.embed(batch.images), batch.frozen["features"]
        there = new.detach()
        back, forth = self.distiller(new), self.forward_map(old)
        aligned = functional.mse_loss(back, old) + functional.mse_loss(forth, there)
        cycles = functional.mse_loss(self.forward_map(back.detach()), there)
        cycles = cycles + functional.mse_loss(self.distiller(forth.detach()), old)
        head = self.network.heads[-1][:, : new.shape[1]]
        terms = {
            "current": cross_entropy(new @ head.T, batch.labels - first, smoothing=batch.label_smoothing),
            "distillation": settings.distillation_weight * aligned,
            "cycle": settings.cycle_weight * cycles,
            "geometry": settings.geometry_weight * (geometry(there, forth) + geometry(old, back)),
        }
        if settings.collapse_weight > 0:
            found = collapse(new, settings.collapse_limit, by_columns=new.is_cuda)
            terms["collapse"] = settings.collapse_weight * found
        return terms

    def end_task(self, task: Task, data: TaskImages) -> None:
        """End as AdaGauss does; the map is not kept."""
        super().end_task(task, data)
        self.forward_map = None

    def _new_adapter(self, task: Task) -> nn.Module:
        """The map that was trained with the network."""
        assert self.forward_map is not None
        return copy.deepcopy(self.forward_map)


def geometry(wanted: Tensor, found: Tensor) -> Tensor:
    """Mean squared difference between the cosines among rows of `found` (B, n) and among those of `wanted` (B, n)."""
    one, other = (functional.normalize(rows[:_COMPARED], dim=1) for rows in (wanted, found))
    return functional.mse_loss(other @ other.T, one @ one.T)
