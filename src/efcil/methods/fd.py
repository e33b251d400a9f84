"""Feature distillation: EFC with a drift penalty that is the same in all directions."""

from __future__ import annotations

from dataclasses import dataclass

from efcil.methods.efc import ElasticFeatureConsolidation
from efcil.settings import option


class FeatureDistillation(ElasticFeatureConsolidation):
    """EFC whose feature drift is penalised equally in every direction; the rest of EFC stays as it is."""

    name = "fd"
    summary = "EFC with plain feature distillation instead of the empirical feature matrix (ablation)"

    @dataclass(frozen=True)
    class Settings(ElasticFeatureConsolidation.Settings):
        """The settings of EFC, the drift penalty being feature distillation."""

        regulariser: str = option(
            "features",
            "Drift penalty: features, the mean squared feature distance times feature_weight; efm makes this EFC.",
            choices=("efm", "features"),
        )

    settings: Settings
