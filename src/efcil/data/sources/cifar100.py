"""CIFAR-100: Parquet shards with the Hub's columns, or the original Python archive."""

from __future__ import annotations

from efcil.data.sources import Known
from efcil.data.sources.cifar import Cifar, Original
from efcil.data.sources.shards import Layout

HUB_REPOSITORY = "uoft-cs/cifar100"
ARCHIVE = "cifar-100-python.tar.gz"
FOLDER = "cifar-100-python"

# Kept as text because a list of 100 quoted words, one per line, would hide the rest of the file.
_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel "
    "can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur "
    "dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion "
    "lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree "
    "pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea "
    "seal shark shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank "
    "telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
CLASS_NAMES = tuple(_NAMES.split())


class Cifar100(Cifar):
    """100 classes, 50,000 training and 10,000 test images of 32 x 32 pixels."""

    name = "cifar100"
    title = "CIFAR-100"
    description = "100 classes, 50,000 training and 10,000 test images of 32 x 32 pixels"
    expected = (
        "Expected: a folder with train*.parquet and test*.parquet (columns img and fine_label), as in the dataset "
        f"{HUB_REPOSITORY} of the Hugging Face Hub; or the original archive {ARCHIVE} from "
        f"https://www.cs.toronto.edu/~kriz/cifar.html; or its extracted folder {FOLDER}/ with the files train, test "
        "and meta. Without a path the shards are downloaded from the Hub, which needs a network and the package "
        "huggingface_hub."
    )
    layout = Layout("CIFAR-100", "img", "fine_label", size=32, classes=100, images=60_000)
    original = Original(
        ARCHIVE, FOLDER, ("train",), ("test",), "meta", "fine_labels", "fine_label_names", mistaken_for="CIFAR-10"
    )
    known = Known(100, 50_000, 10_000, (500, 500), (100, 100), in_both=10)
    repository = HUB_REPOSITORY
    usual_names = CLASS_NAMES

    @property
    def statistics(self) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """Mean and standard deviation as in the EFC paper's code."""
        return (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
