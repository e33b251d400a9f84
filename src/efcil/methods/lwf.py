"""Learning without Forgetting, with the conventions of the FACIL framework."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from efcil.core.losses import cross_entropy, distillation
from efcil.data.store import TaskImages
from efcil.methods.base import Batch, Task, Terms
from efcil.methods.finetune import FineTune
from efcil.settings import option


class LearningWithoutForgetting(FineTune):
    """Trains backbone and newest head, and distils the old network's predictions into the old heads."""

    name = "lwf"
    summary = "predictions of the old network over the old classes distilled into the new one"
    family = "scheduled"

    @dataclass(frozen=True)
    class Settings:
        """Hyper-parameters of LwF, with the values of the EFC paper."""

        weight: float = option(10.0, "Weight of the distillation (EFC paper; FACIL's default is 1).", minimum=0)
        temperature: float = option(2.0, "Temperature of the distillation (EFC paper, FACIL).", minimum=1e-3)
        smoothing: float = option(
            1e-5, "Probability mass spread over the student's old classes (FACIL's code).", minimum=0
        )
        train_normalisation: bool = option(
            True, "Keep training BatchNorm after the first task (FACIL's default; the EFC paper does not say)."
        )

    settings: Settings

    def begin_task(self, task: Task) -> None:
        """Keep a copy of the network as the teacher, then grow a head; old heads are frozen."""
        self.keep_teacher()
        super().begin_task(task)

    def frozen(self, images: Tensor) -> dict[str, Tensor]:
        """Logits of the old network."""
        return {"logits": self.old_network.logits(self.old_network.features(images))}

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy over the newest head, plus distillation over all old heads in one softmax."""
        settings, old = self.settings, sum(self.network.head_sizes[:-1])
        features, labels = self.network.features(batch.images), batch.labels - old
        batch.compared.append((features, labels))
        logits = self.network.logits(features)
        retained = distillation(logits[:, :old], batch.frozen["logits"], settings.temperature, settings.smoothing)
        return {
            "current": cross_entropy(logits[:, old:], labels, smoothing=batch.label_smoothing),
            "distillation": settings.weight * retained,
        }

    def end_task(self, task: Task, data: TaskImages) -> None:
        """Free the teacher."""
        self.teacher = None
