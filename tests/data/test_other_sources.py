"""CIFAR-10, CUB-200-2011 and DomainNet in the layouts in which they are published."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from efcil.cli import main
from efcil.data.deferred import DeferredImages
from efcil.data.images import Dataset
from efcil.data.sources import SourceOptions, load_dataset
from efcil.data.sources.cifar10 import CLASS_NAMES
from efcil.data.sources.domainnet import DOMAINS
from efcil.errors import DataError, SettingsError
from efcil.experiment.plan import make_run_scenario
from efcil.settings import Settings

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)


def load(name: str, path: Path, tmp_path: Path, **options: Any) -> Dataset:
    return load_dataset(name, path, SourceOptions(cache=tmp_path / "cache", **options))


def picture(file: Path, value: int, size: tuple[int, int] = (30, 20)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(file, "JPEG")


def values(images: Any) -> list[int]:
    return [int(round(float(image.mean()), -1)) for image in np.asarray(images)]  # JPEG may be off by one


# --- CIFAR-10 ------------------------------------------------------------------------------------------------------


@pytest.fixture
def batches(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    planes = PIXELS.transpose(0, 3, 1, 2).reshape(12, 3072)
    for number in range(5):
        rows = slice(2 * number, 2 * number + 2)
        batch = {b"data": planes[rows], b"labels": [number, 9 - number], b"batch_label": b"x"}
        (folder / f"data_batch_{number + 1}").write_bytes(pickle.dumps(batch, protocol=2))
    (folder / "test_batch").write_bytes(pickle.dumps({b"data": planes[10:], b"labels": [4, 0]}, protocol=2))
    (folder / "batches.meta").write_bytes(pickle.dumps({b"label_names": [n.encode() for n in CLASS_NAMES]}, protocol=2))
    return folder


def test_cifar10_as_folder_and_as_archive(batches: Path, tmp_path: Path) -> None:
    archive = tmp_path / "packed" / "cifar-10-python.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as opened:
        opened.add(batches, "cifar-10-batches-py")
    for path in (batches, batches.parent, archive, archive.parent):
        found = load("cifar10", path, tmp_path)
        assert np.array_equal(found.train.images, PIXELS[:10])
        assert np.array_equal(found.test.images, PIXELS[10:])
        assert found.train.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
        assert found.test.labels.tolist() == [4, 0]
        assert (found.name, found.class_names, found.image_size) == ("cifar10", CLASS_NAMES, 32)


def test_cifar10_that_is_not_complete_or_something_else(batches: Path, tmp_path: Path) -> None:
    (batches / "test_batch").write_bytes(pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "fine_labels": [0]}))
    with pytest.raises(DataError, match=r"test_batch holds no list 'labels' with one label per image. Is it CIFAR-100"):
        load("cifar10", batches, tmp_path)
    (batches / "test_batch").write_bytes(pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10]}))
    with pytest.raises(DataError, match=r"Label 10 of image 0 in .*test_batch is not in 0 \.\. 9.*CIFAR-10"):
        load("cifar10", batches, tmp_path)
    (batches / "data_batch_4").unlink()
    with pytest.raises(DataError, match="data_batch_4 is missing"):
        load("cifar10", batches, tmp_path)
    batches.rename(tmp_path / "away")
    with pytest.raises(DataError, match="holds no CIFAR-10 files"):
        load("cifar10", tmp_path / "data", tmp_path)


# --- CUB-200-2011 --------------------------------------------------------------------------------------------------


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    root = tmp_path / "data" / "CUB_200_2011"
    kinds = ["001.Black_footed_Albatross", "002.Laysan_Albatross"]
    images, labels, splits = [], [], []
    for number in range(6):
        kind = number % 2
        name = f"{kinds[kind]}/bird_{number}.jpg"
        picture(root / "images" / name, 40 * number, (50, 30 + number))
        images.append(f"{number + 1} {name}")
        labels.append(f"{number + 1} {kind + 1}")
        splits.append(f"{number + 1} {int(number < 4)}")
    for file, lines in (("images", images), ("image_class_labels", labels), ("train_test_split", splits)):
        (root / f"{file}.txt").write_text("\n".join(lines) + "\n")
    (root / "classes.txt").write_text("".join(f"{place} {kind}\n" for place, kind in enumerate(kinds, start=1)))
    return root


def test_cub200_with_its_published_split(birds: Path, tmp_path: Path) -> None:
    for path in (birds, birds.parent):
        found = load("cub200", path, tmp_path, image_size=14)
        assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([0, 1, 0, 1], [0, 1])
        assert (values(found.train.images), values(found.test.images)) == ([0, 40, 80, 120], [160, 200])
        assert found.class_names == ("Black footed Albatross", "Laysan Albatross")
        assert isinstance(found.train.images, DeferredImages)
    assert load("cub200", birds, tmp_path).image_size == 224


def test_cub200_with_mistakes_in_its_lists(birds: Path, tmp_path: Path) -> None:
    for file, text, message in (
        ("train_test_split.txt", "1 2\n2 0\n3 0\n4 1\n5 1\n6 1\n", "neither 0 .* nor 1"),
        ("train_test_split.txt", "1 1\n", "do not name the same images"),
        ("image_class_labels.txt", "1 0\n2 1\n3 1\n4 1\n5 1\n6 1\n", "'0' where a number from 1 to"),
        ("images.txt", "".join(f"{n} ../../{n}.jpg\n" for n in range(1, 7)), "which is not in"),
        ("images.txt", "1\n", "Line 1 of .* does not have 2 parts"),
    ):
        kept = (birds / file).read_text()
        (birds / file).write_text(text)
        with pytest.raises(DataError, match=message):
            load("cub200", birds, tmp_path)
        (birds / file).write_text(kept)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match=r"there is no images\.txt\. Folders train/ and test/ .* dataset `folder`"):
        load("cub200", tmp_path, tmp_path)


# --- DomainNet -----------------------------------------------------------------------------------------------------


@pytest.fixture
def domains(tmp_path: Path) -> Path:
    root = tmp_path / "domainnet"
    for place, domain in enumerate(DOMAINS):
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for label, name in enumerate(("airplane", "apple")):
            for image in range(3):
                file = f"{domain}/{name}/{image}.jpg"
                picture(root / file, 40 * place + 10 * label)
                lines["test" if image == 2 else "train"].append(f"{file} {label}")
        for split, each in lines.items():
            (root / f"{domain}_{split}.txt").write_text("\n".join(each) + "\n")
    return root


def test_classes_of_a_domain_are_classes_of_their_own(domains: Path, tmp_path: Path) -> None:
    found = load("domainnet", domains, tmp_path, image_size=14)
    assert found.number_of_classes == 12
    assert found.class_names[:3] == ("clipart/airplane", "clipart/apple", "infograph/airplane")
    assert found.train.labels.tolist() == [label for label in range(12) for _ in range(2)]
    assert found.test.labels.tolist() == list(range(12))
    assert values(found.test.images) == [40 * (label // 2) + 10 * (label % 2) for label in range(12)]
    names = [f"c{label:03d}" for label in range(345)]
    whole = "".join(f"real/{name}/1.jpg {label}\n" for label, name in enumerate(names))
    kept = (domains / "real_train.txt").read_text()
    (domains / "real_train.txt").write_text(kept.replace("airplane", "aircraft_carrier"))
    with pytest.raises(DataError, match=r"Class 0 is 'airplane', but 'aircraft_carrier' in real_train\.txt"):
        load("domainnet", domains, tmp_path)
    (domains / "real_train.txt").write_text(whole)
    with pytest.raises(DataError, match="345 classes: they are those of the whole DomainNet"):
        load("domainnet", domains, tmp_path)
    (domains / "real_train.txt").write_text(kept)
    (domains / "real").rename(domains / "kept")
    with pytest.raises(DataError, match=r"6 of 36 images that the lists name are missing: .*real/airplane/0\.jpg, "):
        load("domainnet", domains, tmp_path)
    (domains / "kept").rename(domains / "real")
    (domains / "real_test.txt").unlink()
    with pytest.raises(DataError, match=r"real_test\.txt is missing"):
        load("domainnet", domains, tmp_path)


def test_images_are_resized_before_crops_are_cut_as_in_efc_plus_plus(domains: Path, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    small, large = (Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC) for size in ((150, 100), (600, 400)))
    for number, image in enumerate((small, large)):
        image.save(domains / "clipart" / "airplane" / f"{number}.jpg", "JPEG")
    found = load("domainnet", domains, tmp_path)
    assert isinstance(found.train.images, DeferredImages)
    ((_, whole),) = found.train.images[:2].whole()
    for number, pixels in enumerate(whole):
        opened = Image.open(domains / "clipart" / "airplane" / f"{number}.jpg")
        assert np.array_equal(pixels, np.asarray(opened.resize((384, 256), Image.Resampling.BILINEAR)))
    bounded = load("domainnet", domains, tmp_path, stored_side=200).train.images
    assert isinstance(bounded, DeferredImages)
    ((_, whole),) = bounded[:2].whole()
    assert [pixels.shape for pixels in whole] == [(100, 150, 3), (200, 300, 3)]


def test_every_domain_is_a_task_and_classes_share_answers(domains: Path) -> None:
    dataset = load_dataset("domainnet", domains)
    scenario = make_run_scenario(Settings(dataset="domainnet", data=str(domains)), dataset)
    assert scenario.name == "domains"
    firsts = [dataset.class_names[scenario.order[task[0]]] for task in scenario.tasks]
    assert firsts == [
        f"{name}/airplane" for name in ("real", "clipart", "infograph", "painting", "sketch", "quickdraw")
    ]
    assert scenario.task_sizes == (2,) * 6
    assert scenario.answers == (0, 1) * 6


def test_efcil_data_counts_its_answers(domains: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["domainnet", "--data", str(domains)]
    assert main(["data", *place]) == 0
    assert "sketch: 12 classes share 2 answers" in " ".join(capsys.readouterr().out.split())
    assert main(["data", *place, "--answers", "separate"]) == 0
    assert "answers" not in capsys.readouterr().out


def test_as_six_hundred_classes_it_is_the_benchmark_of_efc_plus_plus(domains: Path) -> None:
    dataset = load_dataset("domainnet", domains)
    settings = Settings(dataset="domainnet", answers="separate", class_order="natural", data=str(domains))
    scenario = make_run_scenario(settings, dataset)
    assert scenario.order == tuple(range(12))
    assert scenario.task_sizes == (2,) * 6
    assert scenario.answers is None
    tasks = Settings(
        dataset="domainnet", scenario="custom", tasks=6, answers="separate", class_order="natural", data=str(domains)
    )
    assert make_run_scenario(tasks, dataset).tasks == scenario.tasks


def test_options_without_a_use_are_refused(birds: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="CUB-200-2011 has no use for columns"):
        load("cub200", birds, tmp_path, columns="a,b")
