"""ImageNet in its layouts, which classes are used, and the authors' limit of images per class."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.io import savemat
from shards import plain, write_shard

from efcil.data.deferred import DeferredImages
from efcil.data.images import IMAGENET_MEAN, IMAGENET_STD, Dataset
from efcil.data.sources import SourceOptions, find_source, load_dataset
from efcil.data.sources.classlist import listed_classes
from efcil.data.sources.imagenet import lucir_classes
from efcil.data.sources.shards import ShardSupply
from efcil.errors import DataError, SettingsError
from efcil.experiment.grid import DataShelf
from efcil.resolution import chosen_class_order, identity, label, validate
from efcil.resolution.data import source_options
from efcil.settings import Settings

IDS = ["n01440764", "n01443537", "n01484850"]


def picture(file: Path, value: int, size: tuple[int, int] = (30, 20)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(file, "JPEG")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes with 4, 2 and 3 training images and two validation images each, in class folders."""
    root = tmp_path / "data"
    for number, (identifier, count) in enumerate(zip(IDS, (4, 2, 3), strict=True)):
        for image in range(count):
            picture(root / "train" / identifier / f"{identifier}_{image}.JPEG", 50 * number + 10 * image)
        for image in range(2):
            picture(root / "val" / identifier / f"ILSVRC2012_val_{number}{image}.JPEG", 50 * number + 10 * image)
    return root


def load(folder: Path, name: str = "imagenet-subset", **options: Any) -> Dataset:
    return load_dataset(name, folder, SourceOptions(image_size=14, **options))


def values(images: Any) -> list[int]:
    return [int(round(float(image.mean()), -1)) for image in np.asarray(images)]  # JPEG may be off by one


def check(dataset: Dataset) -> None:
    assert dataset.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert values(dataset.train.images) == [0, 10, 20, 30, 50, 60, 100, 110, 120]
    assert sorted(zip(dataset.test.labels.tolist(), values(dataset.test.images), strict=True)) == [
        *((0, 0), (0, 10), (1, 50), (1, 60), (2, 100), (2, 110))
    ]
    assert (dataset.image_size, dataset.mean, dataset.std) == (14, IMAGENET_MEAN, IMAGENET_STD)
    assert isinstance(dataset.train.images, DeferredImages)


def flatten(root: Path) -> None:
    for file in list((root / "val").rglob("*.JPEG")):
        file.rename(root / "val" / file.name)
    for identifier in IDS:
        (root / "val" / identifier).rmdir()


def test_class_folders(folder: Path) -> None:
    found = load(folder)
    check(found)
    assert found.class_names == tuple(IDS)
    check(load(folder, "imagenet-1k"))
    assert load_dataset("imagenet-subset", folder).image_size == 224
    (folder / "val").rename(folder / "validation")
    check(load(folder))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("val_100.txt", "val/{identifier}/{file} {number}"),
        ("val.txt", "{file} {number}"),
        ("meta/val.txt", "{file} {number}"),
        ("val_1000.txt", "val/{identifier}/{file} 2"),  # a number in some other list: the id counts
        ("val/val_annotations.txt", "{file}\t{identifier}\t0\t0\t3\t3"),
        ("LOC_val_solution.csv", "{stem},{identifier} 1 2 3 4 {identifier} 5 6 7 8"),
    ],
)
def test_a_flat_validation_folder_with_a_list(folder: Path, name: str, line: str) -> None:
    lines = ["ImageId,PredictionString"] if name.endswith(".csv") else []
    for file in sorted((folder / "val").rglob("*.JPEG"), key=lambda file: file.name[::-1]):
        number = IDS.index(file.parent.name)
        lines.append(line.format(identifier=file.parent.name, file=file.name, stem=file.stem, number=number))
    flatten(folder)
    with pytest.raises(DataError, match=r"not sorted into class folders, and there is no list of their labels"):
        load(folder)
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join([*lines, ""]), encoding="utf-8")
    check(load(folder))


def official(folder: Path) -> Path:
    """Make the files of image-net.org: flat validation images, and their classes by numbers of another order."""
    numbers, truth = {IDS[0]: 2, IDS[1]: 3, IDS[2]: 1}, []
    for place, file in enumerate(sorted((folder / "val").rglob("*.JPEG"), key=lambda file: file.name[::-1]), start=1):
        truth.append(numbers[file.parent.name])
        file.rename(folder / "val" / f"ILSVRC2012_val_{place:08d}.JPEG")
    flatten(folder)
    devkit = folder / "ILSVRC2012_devkit_t12" / "data"
    devkit.mkdir(parents=True)
    (devkit / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{number}\n" for number in truth))
    kinds = np.dtype([("ILSVRC2012_ID", object), ("WNID", object), ("words", object)])
    above = (4, "n00001740", "entity")  # meta.mat has groups of classes, too
    rows = [(number, identifier, "fish") for identifier, number in numbers.items()]
    savemat(devkit / "meta.mat", {"synsets": np.array([*rows, above], kinds)[:, None]})
    return devkit


def test_the_files_of_image_net_org(folder: Path) -> None:
    devkit = official(folder)
    check(load(folder))
    (folder / "val").rename(folder / "ILSVRC2012_img_val")
    (folder / "train").rename(folder / "ILSVRC2012_img_train")
    check(load(folder))
    truth = devkit / "ILSVRC2012_validation_ground_truth.txt"
    kept = truth.read_text()
    truth.write_text(kept.replace("3", "n1"))
    with pytest.raises(DataError, match=r"Line \d of .*ground_truth\.txt has 'n1', which is no number of a class"):
        load(folder)
    truth.write_text(kept)
    (devkit / "meta.mat").write_bytes(b"no")
    with pytest.raises(DataError, match=r"meta\.mat cannot be read .* which numbers of ILSVRC2012_validation_ground"):
        load(folder)


def test_labels_that_contradict_a_known_image_are_refused(folder: Path) -> None:
    wrong = folder / "val" / IDS[0] / "ILSVRC2012_val_00000236.JPEG"  # which is of class n01443537
    picture(wrong, 0)
    with pytest.raises(DataError, match=r"00000236\.JPEG is of class n01440764, but it is of class n01443537"):
        load(folder)
    wrong.rename(folder / "val" / IDS[1] / wrong.name)
    assert len(load(folder).test) == 7
    flatten(folder)
    (folder / "val.txt").write_text(f"{wrong.name} 2\n")
    (folder.parent / "list.txt").write_text("0\n1\n")
    for chosen in (None, str(folder.parent / "list.txt")):  # also where that class is not used
        with pytest.raises(DataError, match=r"By .*val\.txt, .* number the classes in another order than their sorted"):
            load(folder, class_list=chosen)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_files_that_are_no_usual_jpeg(folder: Path) -> None:
    """ImageNet has a PNG file called .JPEG, 22 in CMYK, grey ones, and some with broken EXIF data."""
    red = Image.new("RGB", (30, 20), (200, 20, 20))
    place = folder / "train" / IDS[0]
    red.save(place / f"{IDS[0]}_0.JPEG", "PNG")
    red.convert("CMYK").save(place / f"{IDS[0]}_1.JPEG", quality=95)
    red.convert("L").save(place / f"{IDS[0]}_2.JPEG")
    red.save(place / f"{IDS[0]}_3.JPEG", quality=95, exif=b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x03\0")
    colours = np.asarray(load(folder).train.images[:4])[:, 7, 7].astype(int)
    assert np.abs(colours[[0, 1, 3]] - [200, 20, 20]).max() <= 4
    assert colours[2].tolist() == [int(colours[2][0])] * 3


def test_archives_that_are_not_extracted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ILSVRC2012_img_train.tar").touch()
    with pytest.raises(
        DataError, match=r"no folder train in it\. It holds archives .*: ILSVRC2012_img_train\.tar\. Ext"
    ):
        load(tmp_path)
    inside = tmp_path / "other" / "train"
    (inside.parent / "val").mkdir(parents=True)
    inside.mkdir()
    (inside / "n01440764.tar").touch()
    with pytest.raises(DataError, match=r"0 class folders\. It holds archives that are not extracted: n01440764\.tar"):
        load(inside.parent)


def test_a_thousand_folders_that_are_not_called_by_ids(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / "train" / str(number)).mkdir(parents=True)
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="not called by WordNet ids, but '0' and so on"):
        load(tmp_path, "imagenet-1k")


def test_the_layout_of_kaggle_with_names(folder: Path, tmp_path: Path) -> None:
    inside = tmp_path / "kaggle" / "ILSVRC" / "Data" / "CLS-LOC"
    inside.parent.mkdir(parents=True)
    lines = [f"{file.stem},{file.parent.name} 1 2 3 4" for file in (folder / "val").rglob("*.JPEG")]
    flatten(folder)
    folder.rename(inside)
    (tmp_path / "kaggle" / "LOC_val_solution.csv").write_text("ImageId,PredictionString\n" + "\n".join(lines))
    (tmp_path / "kaggle" / "LOC_synset_mapping.txt").write_text(f"{IDS[0]} tench, Tinca tinca\n{IDS[2]} shark, a\n")
    for given in (tmp_path / "kaggle", tmp_path / "kaggle" / "ILSVRC", inside):
        found = load(given)
        check(found)
        assert found.class_names == ("tench", IDS[1], "shark")
    (tmp_path / "list.txt").write_text(f"shark\n{IDS[0]}\n")
    assert load(tmp_path / "kaggle", class_list=str(tmp_path / "list.txt")).class_names == ("tench", "shark")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a.JPEG", r"Line 1 of .*val\.txt does not name a file and its class"),
        ("a.JPEG 3", r"names class '3', but classes are ids, or numbers from 0 to 2"),
        ("a.JPEG 0", r"names a\.JPEG, which is not in the folder of validation images"),
    ],
)
def test_mistakes_in_the_list(folder: Path, line: str, message: str) -> None:
    flatten(folder)
    (folder / "val.txt").write_text(line)
    with pytest.raises(DataError, match=message):
        load(folder)


def test_what_is_missing_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder train in it"):
        load(tmp_path)
    (folder / "val" / IDS[1]).rename(folder / "val" / "n1")
    with pytest.raises(DataError, match=rf"val/{IDS[1]} is missing: its class has no validation images"):
        load(folder)
    with pytest.raises(DataError, match="needs a path to its files"):
        load_dataset("imagenet-1k")


def write(file: Path, labels: list[int], names: list[str] | None = None) -> None:
    """Write a shard of images in colours of their own."""
    write_shard(file, [plain(50 * label_ + 10 * row, 30, 20) for row, label_ in enumerate(labels)], labels, names=names)


def test_parquet_in_row_groups(tmp_path: Path) -> None:
    names = ["tench", "goldfish", "shark"]
    write(tmp_path / "data" / "train-00000-of-00002.parquet", [0, 1, 2, 1, 0], names)
    write(tmp_path / "data" / "train-00001-of-00002.parquet", [2], names)
    write(tmp_path / "data" / "validation-00000-of-00001.parquet", [2, 1, 0], names)
    write(tmp_path / "data" / "test-00000-of-00001.parquet", [0], names)
    found = load(tmp_path)
    assert found.class_names == tuple(names)
    assert found.train.labels.tolist() == [0, 1, 2, 1, 0, 2]
    expected = [0, 60, 120, 80, 40, 100]
    assert values(found.train.images) == expected
    assert values(found.train.images[np.array([5, 0, 3])]) == [100, 0, 80]
    assert found.test.labels.tolist() == [2, 1, 0]
    listed = tmp_path / "list.txt"
    listed.write_text("# two of them\nshark\n\n0\n")
    two = load(tmp_path, class_list=str(listed))
    assert two.class_names == ("tench", "shark")
    assert (two.train.labels.tolist(), values(two.train.images)) == ([0, 1, 0, 1], [0, 120, 40, 100])


def test_images_of_several_row_groups_are_decoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "train-00000-of-00001.parquet", [0, 1, 2, 1, 0, 2, 1])
    supply = ShardSupply.of([tmp_path / "train-00000-of-00001.parquet"], "image")
    rows = np.array([6, 0, 3, 5])
    ((places, images),) = supply.read(rows)  # of four groups
    assert [int(row) for row in rows[places]] == [0, 3, 5, 6]
    assert [each.where.split(" in ")[1][:5] for each in images] == ["row 0", "row 3", "row 5", "row 6"]
    monkeypatch.setattr("efcil.data.sources.shards.PIECE_IMAGES", 2)
    assert [places.tolist() for places, _ in supply.read(rows)] == [[1, 2], [3, 0]]
    monkeypatch.setattr("efcil.data.sources.shards._PIECE_BYTES", 1)
    assert [places.tolist() for places, _ in supply.read(rows)] == [[1], [2], [3], [0]]


def hub(folder: Path, ids: list[str], names: list[str] | None = None) -> None:
    """Write shards in which images have the names that they have on the Hub: n01440764_18_n01440764.JPEG."""
    for split, labels in (("train", [2, 0, 1, 0]), ("validation", [0, 1, 2])):
        contents = [plain(50 * each, 30, 20) for each in labels]
        paths = [f"{ids[each]}_{row}_{ids[each]}.JPEG" for row, each in enumerate(labels)]
        file = folder / "data" / f"{split}-00000-of-00001.parquet"
        write_shard(file, contents, labels, paths=paths, names=names)


def test_classes_of_shards_by_id_and_by_name(tmp_path: Path) -> None:
    hub(tmp_path, IDS, ["tench", "goldfish", "shark"])
    listed = tmp_path / "list.txt"
    listed.write_text(f"{IDS[2]}\ngoldfish\n")
    found = load(tmp_path, class_list=str(listed))
    assert (found.class_names, found.train.labels.tolist()) == (("goldfish", "shark"), [1, 0])
    assert values(found.train.images) == [100, 50]


@pytest.mark.parametrize("named", [True, False])
def test_classes_of_shards_get_the_order_of_their_ids(tmp_path: Path, named: bool) -> None:
    hub(tmp_path, [IDS[1], IDS[2], IDS[0]], ["goldfish", "shark", "tench"] if named else None)
    found = load(tmp_path)
    assert found.class_names == (("tench", "goldfish", "shark") if named else tuple(IDS))
    assert (found.train.labels.tolist(), values(found.train.images)) == ([0, 1, 2, 1], [100, 0, 50, 0])
    assert (found.test.labels.tolist(), values(found.test.images)) == ([1, 2, 0], [0, 50, 100])


def test_a_list_of_classes(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "classes.txt"
    file.write_text(f"{IDS[2]}\n{IDS[0]}\n")
    found = load(folder, class_list=str(file))
    assert found.class_names == (IDS[0], IDS[2])
    assert found.train.labels.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert values(found.test.images) == [0, 10, 100, 110]
    for text, message in ((f"{IDS[0]}\n", "lists 1 classes"), ("n5\n", "Line 1 of .* is not a class: 'n5'")):
        file.write_text(text)
        with pytest.raises(SettingsError, match=message):
            load(folder, class_list=str(file))
    file.write_text(f"{IDS[0]}\n0\n")
    with pytest.raises(SettingsError, match=r"Line 2 of .* repeats line 1"):
        load(folder, class_list=str(file))
    with pytest.raises(SettingsError, match=r"Unknown list of classes 'lucyr'.*'lucir'.*not a file either"):
        load(folder, class_list="lucyr")
    with pytest.raises(SettingsError, match="Digits has no use for class_list"):
        load_dataset("digits", None, SourceOptions(class_list=str(file)))


def test_a_list_of_other_classes_says_which_there_are(tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("n1000\n")
    with pytest.raises(SettingsError, match=r"not a class: 'n1000'\. Classes are n0, n1, n2, n3, n4 and 995 others\."):
        listed_classes(tmp_path / "list.txt", [f"n{number}" for number in range(1000)])


def test_the_lists_of_the_subset(folder: Path) -> None:
    identifiers = [f"n{number:08d}" for number in range(1000)]
    subset: Any = find_source("imagenet-subset")
    assert subset.chosen(identifiers, None) == subset.chosen(identifiers, "first") == list(range(100))
    lucir = subset.chosen(identifiers, "lucir")
    assert len(lucir) == 100
    assert {54, 7, 894, 512, 126} <= set(lucir)
    assert lucir == sorted(lucir) == lucir_classes(identifiers)
    with pytest.raises(SettingsError, match="drawn from all 1000 classes of ImageNet, but 3 are there"):
        load(folder, class_list="lucir")


def test_at_most_the_mean_number_of_images_of_a_class(folder: Path) -> None:
    found = load(folder, images_per_class="mean")  # 9 images of 3 classes
    assert found.train.labels.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert values(found.train.images) == [0, 10, 20, 50, 60, 100, 110, 120]
    assert len(found.test) == 6
    assert load(folder, images_per_class="1").train.labels.tolist() == [0, 1, 2]
    digits = load_dataset("digits", None, SourceOptions(images_per_class="5"))
    assert np.array_equal(digits.train.class_counts(10), [5] * 10)
    for wrong in ("0", "half", "-1"):
        with pytest.raises(SettingsError, match="all, mean or a number of at least 1"):
            load(folder, images_per_class=wrong)


def test_held_out_images_stay_undecoded(folder: Path) -> None:
    found = load(folder, held_out=0.5)
    assert isinstance(found.test.images, DeferredImages)
    assert found.test.class_counts(3).tolist() == [2, 1, 2]
    assert sorted(values(found.train.images) + values(found.test.images)) == [0, 10, 20, 30, 50, 60, 100, 110, 120]


def test_what_the_presets_say() -> None:
    whole, subset, plain = (Settings(dataset=name) for name in ("imagenet-1k", "imagenet-subset", "cifar100"))
    assert [chosen_class_order(each) for each in (whole, subset, plain)] == ["efc-imagenet", "efc", "efc"]
    assert [source_options(each).images_per_class for each in (whole, subset, plain)] == ["mean", "mean", "all"]
    assert identity(whole)["class_order"] == "efc-imagenet"
    assert "images_per_class" not in identity(plain)
    assert identity(subset)["images_per_class"] == "mean"
    assert Settings(dataset="imagenet") == whole
    assert label(Settings(dataset="imagenet-1k", class_order="efc-imagenet", images_per_class="mean")) == "efc"
    changed = Settings(dataset="imagenet-1k", class_order="efc", images_per_class="all", stored_side=256)
    assert label(changed) == "efc+class_order=efc+images_per_class=all+stored_side=256"
    lucir = Settings(dataset="imagenet-subset", class_list="lucir")
    assert (label(lucir), identity(lucir)["class_list"]) == ("efc+class_list=lucir", "lucir")


def test_one_file_of_classes_is_one_run_wherever_it_lies(tmp_path: Path) -> None:
    one, same, other = (tmp_path / name for name in ("a/list.txt", "b/list.txt", "c/list.txt"))
    for file, text in ((one, "x\ny\n"), (same, "x\ny\n"), (other, "x\nz\n")):
        file.parent.mkdir()
        file.write_text(text)
    runs = [Settings(dataset="imagenet-subset", class_list=str(file)) for file in (one, same, other)]
    assert label(runs[0]) == label(runs[1]) != label(runs[2])
    assert identity(runs[0]) == identity(runs[1]) != identity(runs[2])


def test_the_shelf_reads_again_when_the_choice_changes(folder: Path) -> None:
    shelf = DataShelf()
    settings = validate(Settings(dataset="imagenet-subset", data=str(folder), image_size=14))
    capped = shelf.get(settings)
    assert len(capped.dataset.train) == 8
    free = shelf.get(validate(replace(settings, images_per_class="all")))
    assert len(free.dataset.train) == 9
    shrunk = shelf.get(validate(replace(settings, stored_side=16)))
    assert len({capped.fingerprint, free.fingerprint, shrunk.fingerprint}) == 3


@pytest.mark.parametrize("augmentation", ["resized-crop", "crop-flip"])
def test_a_run_on_whole_images(folder: Path, tmp_path: Path, augmentation: str) -> None:
    from efcil.cli import main

    picture(folder / "train" / "n02" / "0.JPEG", 150, (20, 33))
    picture(folder / "train" / "n02" / "1.JPEG", 160, (60, 18))
    picture(folder / "val" / "n02" / "2.JPEG", 170, (21, 16))
    command = f"run --dataset imagenet-subset --data {folder} --image-size 16 --network slim --epochs 2 --tasks 2"
    command += f" --batch-size 4 --method efc fetril --device cpu --augmentation {augmentation} --output {tmp_path}"
    assert main(command.split()) == 0
    summaries = sorted((tmp_path / "imagenet-subset").rglob("summary.json"))
    assert len(summaries) == 2
    facts = json.loads(summaries[0].read_text())
    assert facts["A_step"] >= 0
    assert facts["dataset"] == "imagenet-subset"


def test_a_missing_image_of_a_shard_is_named_by_its_row(tmp_path: Path) -> None:
    file = tmp_path / "train-0.parquet"
    write(file, [0, 1, 0, 1, 0])
    write(tmp_path / "validation-0.parquet", [0, 1])
    table = pq.read_table(file)
    images = table.column("image").to_pylist()
    images[3]["bytes"] = None
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(table.set_column(0, "image", pa.array(images, kind)), file, row_group_size=2)
    found = load(tmp_path)
    assert values(found.train.images[[0, 1, 4]]) == [0, 60, 40]
    with pytest.raises(DataError, match=r"The image in row 3 of .*train-0\.parquet is missing"):
        np.asarray(found.train.images)
