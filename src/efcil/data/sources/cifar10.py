"""CIFAR-10: Parquet shards with the Hub's columns, or the original Python archive."""

from __future__ import annotations

from efcil.data.sources import Known
from efcil.data.sources.cifar import Cifar, Original
from efcil.data.sources.shards import Layout

HUB_REPOSITORY = "uoft-cs/cifar10"
ARCHIVE = "cifar-10-python.tar.gz"
FOLDER = "cifar-10-batches-py"
CLASS_NAMES = tuple(["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"])
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))


class Cifar10(Cifar):
    """10 classes, 50,000 training and 10,000 test images of 32 x 32 pixels."""

    name = "cifar10"
    title = "CIFAR-10"
    description = "10 classes, 50,000 training and 10,000 test images of 32 x 32 pixels"
    expected = (
        "Expected: a folder with train*.parquet and test*.parquet (columns img and label), as in the dataset "
        f"{HUB_REPOSITORY} of the Hugging Face Hub; or the original archive {ARCHIVE} from "
        f"https://www.cs.toronto.edu/~kriz/cifar.html; or its extracted folder {FOLDER}/ with the files data_batch_1 "
        "to data_batch_5, test_batch and batches.meta. Without a path the shards are downloaded from the Hub, which "
        "needs a network and the package huggingface_hub."
    )
    layout = Layout("CIFAR-10", "img", "label", size=32, classes=10, images=60_000)
    original = Original(
        ARCHIVE, FOLDER, _BATCHES, ("test_batch",), "batches.meta", "labels", "label_names", mistaken_for="CIFAR-100"
    )
    known = Known(10, 50_000, 10_000, (5_000, 5_000), (1_000, 1_000))
    repository = HUB_REPOSITORY
    usual_names = CLASS_NAMES

    @property
    def statistics(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Mean and standard deviation of the training pixels."""
        return (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
