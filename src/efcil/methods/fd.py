"""Feature distillation: EFC with a drift penalty that is the same in all directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from efcil.methods.efc import ElasticFeatureConsolidation, PrototypeSettings
from efcil.settings import option


class FeatureDistillation(ElasticFeatureConsolidation):
    """EFC with a drift penalty that is equal in every direction; the rest of EFC is unchanged."""

    name = "fd"
    summary = "EFC with plain feature distillation instead of the empirical feature matrix (ablation)"

    @dataclass(frozen=True)
    class Settings(PrototypeSettings):
        """The settings of EFC, except those of its penalty."""

        #: Values of the penalty in earlier records; with `regulariser=efm` they were of EFC.
        removed: ClassVar[Mapping[str, Any]] = {"regulariser": "features", "efm_weight": None, "damping": None}

        feature_weight: float = option(10.0, "Weight of the mean squared feature distance.", minimum=0)
        loss: str = option(
            "prace",
            "Rehearsal: prace (asymmetric, PR-ACE) or symmetric (all classes in both terms; ablation).",
            choices=("prace", "symmetric"),
        )
        symmetric_weight: float = option(
            10.0, "Weight of the prototypes if loss is symmetric.", minimum=0, needs=("loss", "symmetric")
        )

    settings: Settings  # type: ignore[assignment]

    def _penalty_matrix(self) -> Tensor:
        return self.settings.feature_weight * torch.eye(self.network.feature_size, device=self.feature_matrix.device)
