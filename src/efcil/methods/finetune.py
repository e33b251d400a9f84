"""Fine-tuning: the lower bound. Nothing is done against forgetting."""

from __future__ import annotations

from efcil.core.losses import cross_entropy
from efcil.methods.base import Batch, Method, Task, Terms


class FineTune(Method):
    """Trains backbone and newest head on the current classes only; old heads do not change."""

    name = "finetune"
    summary = "cross-entropy on the current classes, nothing against forgetting (lower bound)"
    family = "scheduled"
    smooths_labels = True
    cosine_heads = True
    extra_terms = True

    def begin_task(self, task: Task) -> None:
        """Grow a head and freeze the old ones."""
        super().begin_task(task)
        self.freeze_old_heads()

    def loss(self, batch: Batch) -> Terms:
        """Cross-entropy over the newest head."""
        features, labels = self.network.features(batch.images), batch.labels - sum(self.network.head_sizes[:-1])
        batch.compared.append((features, labels))
        return {"current": cross_entropy(self.network.newest_logits(features), labels, smoothing=batch.label_smoothing)}
