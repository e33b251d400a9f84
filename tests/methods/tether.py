"""Weights are pulled to those of the old network, and old heads keep their predictions."""

from dataclasses import dataclass

from efcil.core.losses import cross_entropy, distillation
from efcil.methods.base import Method
from efcil.settings import option


class Tether(Method):
    """L2-SP, a penalty on the distance of every weight to its old value, beside distillation of predictions."""

    name = "tether"
    summary = "weights pulled to their old values, and predictions over the old classes distilled"
    family = "scheduled"

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters."""

        pull: float = option(1.0, "Weight of the squared distance to the old weights.", minimum=0)
        weight: float = option(10.0, "Weight of the distillation.", minimum=0)
        train_normalisation: bool = option(False, "Let BatchNorm learn after the first task.")

    def begin_task(self, task):
        self.keep_teacher()
        super().begin_task(task)

    def frozen(self, images):
        return {"logits": self.old_network.logits(self.old_network.features(images))}

    def loss(self, batch):
        logits = self.network.logits(self.network.features(batch.images))
        old = sum(self.network.head_sizes[:-1])
        pairs = zip(self.network.backbone.parameters(), self.old_network.backbone.parameters(), strict=True)
        return {
            "current": cross_entropy(logits[:, old:], batch.labels - old),
            "kept": self.settings.weight * distillation(logits[:, :old], batch.frozen["logits"]),
            "pull": self.settings.pull * sum((new - before).square().sum() for new, before in pairs),
        }

    def end_task(self, task, data):
        self.teacher = None
