"""What the data sets hold, and that damaged files end well."""

import io
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data_loading.manifests import manifest, store
from workbench.data.datasets import open_dataset
from workbench.data.loading import make_loader
from workbench.data.samples import write_samples
from workbench.data.sources import check_source
from workbench.errors import Refused


def test_digits_are_the_published_ones_split_evenly_over_classes() -> None:
    from sklearn.datasets import load_digits

    info = check_source("digits")
    train, val = (open_dataset("digits", split).batch(torch.arange(n)) for split, n in
                  (("train", info.num_train), ("val", info.num_val)))  # fmt: skip
    for images, _ in (train, val):
        assert images.dtype == torch.float32 and images.shape[1:] == info.image_shape
        assert images.min() == 0 and images.max() == 1
    published = load_digits()
    totals, held_out = np.bincount(published.target), torch.bincount(val[1]).numpy()
    assert (np.abs(held_out - totals / 5) < 1).all()
    ours = np.concatenate([(x * 16).flatten(1).numpy() for x, _ in (train, val)])
    assert sorted(map(tuple, ours)) == sorted(map(tuple, published.data)), "not every row once"
    label_of = {tuple(row): label for row, label in zip(published.data, published.target, strict=True)}
    assert all(
        label_of[tuple(row)] == label for row, label in zip(ours, torch.cat([train[1], val[1]]).tolist(), strict=True)
    )


def test_the_digits_split_never_changes() -> None:
    """Numbers of runs long past are compared with today's: these are the first labels as of the first release."""
    first = open_dataset("digits", "val").batch(torch.arange(20))[1].tolist()
    assert first == [0, 9, 4, 7, 1, 2, 8, 5, 5, 7, 2, 3, 3, 6, 4, 3, 4, 4, 3, 4]


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_one_sample_is_the_batch_of_one(name: str) -> None:
    dataset = open_dataset(name, "val")
    images, labels = dataset.batch(torch.tensor([5]))  # type: ignore[attr-defined]
    image, label = dataset[5]
    assert torch.equal(image, images[0]) and label == labels[0] and isinstance(label, int)
    with pytest.raises(IndexError):
        dataset[len(dataset)]  # type: ignore[arg-type]


def test_synthetic_data_says_so_and_nothing_else_does(photographs: Path) -> None:
    info = check_source("synthetic:3x16x24:7:50")
    assert info.synthetic and (info.image_shape, info.num_classes, info.num_train, info.num_val) == (
        (3, 16, 24),
        7,
        50,
        10,
    )
    assert check_source("synthetic").synthetic
    assert not check_source("digits").synthetic and not check_source(str(photographs)).synthetic


def test_synthetic_samples_are_the_same_whenever_read_and_differ_from_each_other() -> None:
    one, other = (open_dataset("synthetic:3x16x24:7:50", "train") for _ in range(2))
    everything, labels = one.batch(torch.arange(50))  # type: ignore[attr-defined]
    assert all(torch.equal(other[k][0], everything[k]) for k in (49, 0, 13))
    assert everything.shape == (50, 3, 16, 24) and everything.min() >= 0 and everything.max() <= 1
    assert set(labels.tolist()) == set(range(7))
    assert len({image.numpy().tobytes() for image in everything}) == 50
    val = open_dataset("synthetic:3x16x24:7:50", "val")
    assert not torch.equal(val[0][0], everything[0])


def test_synthetic_data_of_any_length_stays_small() -> None:
    dataset = open_dataset("synthetic:3x224x224:1000:10000000", "train")
    assert len(dataset) == 10_000_000  # type: ignore[arg-type]
    assert dataset.noise.numel() * 4 <= 2**26  # type: ignore[attr-defined]
    assert dataset[9_999_999][1] == 999


@pytest.mark.parametrize(
    "name",
    ["synthetic:", "synthetic:3x32x32", "synthetic:3x32:10", "synthetic:0x32x32:10", "synthetic:3x32x32:0",
     "synthetic:3x32x32:10:0", "synthetic:3x32x32:10:-1", "synthetic:3x32x32:1e3", "synthetic:axbxc:10"],
)  # fmt: skip
def test_a_synthetic_name_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="synthetic"):
        check_source(name)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(Refused, match=r"'test'.*train or val"):
        open_dataset("digits", "test")


def test_checking_a_source_loads_no_torch() -> None:
    code = (
        "import sys, workbench.data.fetch, workbench.data.authoring, workbench.data.samples\n"
        "from workbench.data.sources import check_source\n"
        "check_source('digits'), check_source('synthetic')\n"
        "assert not {'torch', 'sklearn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_folder_of_images_gives_what_the_files_hold(photographs: Path) -> None:
    info = check_source(str(photographs))
    assert (info.num_train, info.num_val, info.num_classes, info.image_shape) == (8, 4, 2, (3, 224, 224))
    image, label = open_dataset(str(photographs), "train")[0]
    assert (image.shape, image.dtype, label) == ((3, 224, 224), torch.float32, 0)
    with Image.open(photographs / "train" / "china" / "00000.jpg") as file:
        expected = np.asarray(file, dtype=np.float32).mean((0, 1)) / 255
    # 96 by 64 pixels: the crop takes the middle two thirds of the width, so colours agree roughly.
    assert np.allclose(image.mean((1, 2)).numpy(), expected, atol=0.1)


def test_without_val_every_fifth_image_of_a_class_is_held_out(tmp_path: Path) -> None:
    for label, count in (("a", 11), ("b", 3)):
        (tmp_path / label).mkdir()
        for k in range(count):
            Image.new("RGB", (8, 8), (k, 0, 0)).save(tmp_path / label / f"{k:02}.png")
    info = check_source(str(tmp_path))
    val = open_dataset(str(tmp_path), "val").files  # type: ignore[attr-defined]
    train = open_dataset(str(tmp_path), "train").files  # type: ignore[attr-defined]
    assert [path.relative_to(tmp_path).as_posix() for path, _ in val] == ["a/04.png", "a/09.png", "b/02.png"]
    assert not {path for path, _ in val} & {path for path, _ in train}
    assert (info.num_train, info.num_val) == (len(train), len(val)) == (11, 3)


def test_folders_that_are_no_image_folders_are_refused(tmp_path: Path, photographs: Path) -> None:
    with pytest.raises(Refused, match="exists"):
        check_source(str(tmp_path / "nowhere"))
    with pytest.raises(Refused, match="two or more classes"):
        check_source(str(photographs / "train" / "china"))
    (photographs / "train" / "empty").mkdir()
    with pytest.raises(Refused, match=r"empty holds no image"):
        check_source(str(photographs))
    (photographs / "train" / "empty").rmdir()
    (photographs / "val" / "unheard").mkdir()
    with pytest.raises(Refused, match=r"unheard.*china, flower"):
        check_source(str(photographs))
    (photographs / "train").rename(photographs / "training")
    with pytest.raises(Refused, match="val but no train"):
        check_source(str(photographs))


def _damage(path: Path, kind: str) -> None:
    content = path.read_bytes()
    damaged = {"truncated": content[: len(content) // 2], "empty": b"", "text": b"not an image", "header": content[:20]}
    path.write_bytes(damaged[kind])


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "header"])
def test_a_damaged_image_is_refused_by_name(photographs: Path, kind: str) -> None:
    victim = photographs / "train" / "china" / "00004.jpg"
    _damage(victim, kind)
    with pytest.raises(Refused, match=r"china/00004\.jpg cannot be decoded"):
        list(make_loader(open_dataset(str(photographs), "train"), 2))


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "header"])
def test_a_damaged_image_is_skipped_and_counted_on_request(photographs: Path, kind: str) -> None:
    _damage(photographs / "train" / "china" / "00004.jpg", kind)
    loader = make_loader(open_dataset(str(photographs), "train", skip_corrupt=True), 2)
    assert sum(len(labels) for _, labels in loader) == 8
    assert loader.skipped == 1


def test_damaged_png_and_gone_file_are_refused_and_the_gone_one_is_never_skipped(photographs: Path) -> None:
    picture = photographs / "train" / "china" / "0.png"
    Image.effect_noise((64, 64), 50).save(picture)
    content = bytearray(picture.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 64] = bytes(64)
    picture.write_bytes(content)
    dataset = open_dataset(str(photographs), "train", skip_corrupt=True)
    with pytest.raises(Refused, match=r"0\.png cannot be decoded"):
        open_dataset(str(photographs), "train")[0]
    picture.unlink()
    with pytest.raises(Refused, match=r"0\.png cannot be read"):
        dataset[0]


def test_a_folder_without_one_good_image_is_refused_even_when_skipping(photographs: Path) -> None:
    for path in (photographs / "train").rglob("*.jpg"):
        _damage(path, "truncated")
    with pytest.raises(Refused, match="none of the 8 images"):
        open_dataset(str(photographs), "train", skip_corrupt=True)[0]


def test_refusals_and_counts_arrive_from_worker_processes(photographs: Path) -> None:
    _damage(photographs / "train" / "china" / "00004.jpg", "truncated")
    refusing = make_loader(open_dataset(str(photographs), "train"), 2, num_workers=1)
    with pytest.raises(Refused, match=r"^image .*china/00004\.jpg cannot be decoded") as refusal:
        list(refusing)
    assert "Traceback" not in str(refusal.value)
    skipping = make_loader(open_dataset(str(photographs), "train", skip_corrupt=True), 2, num_workers=1)
    assert len(list(skipping)) == 4
    assert skipping.skipped == 1


def test_samples_are_reproducible_and_never_overwrite(tmp_path: Path) -> None:
    one, other = (write_samples(tmp_path / name, num_train=4, num_val=2) for name in ("one", "other"))
    files = sorted(path.relative_to(one) for path in one.rglob("*.jpg"))
    assert len(files) == 6
    assert all((one / file).read_bytes() == (other / file).read_bytes() for file in files)
    assert len({(one / file).read_bytes() for file in files}) == 6
    with pytest.raises(Refused, match="not empty"):
        write_samples(one)
    with pytest.raises(Refused, match="2 or more"):
        write_samples(tmp_path / "few", num_val=1)
    with pytest.raises(Refused, match="640 by 427"):
        write_samples(tmp_path / "wide", crop=(641, 100))


class _OldPickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes bytes as Python 2 wrote strings, which is what CIFAR's files hold."""

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def _save_bytes(self, value: bytes) -> None:
        self.write(b"T" + struct.pack("<i", len(value)) + value)

    dispatch[bytes] = _save_bytes


def _old_pickle(value: object) -> bytes:
    out = io.BytesIO()
    _OldPickler(out, protocol=2).dump(value)
    return out.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def _cifar_archive(path: Path, batches: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in batches.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def _publish_cifar(folders: tuple[Path, Path], batches: dict[str, bytes]) -> None:
    manifests, data = folders
    archive = data / "small" / "cifar-10-python.tar.gz"
    _cifar_archive(archive, batches)
    store(manifests, manifest("small", {archive.name: archive.read_bytes()}, reader="cifar10"))


def test_cifar_batches_are_read_from_the_archive(own_folders: tuple[Path, Path]) -> None:
    pixels = np.arange(2 * 3072, dtype=np.int64).astype(np.uint8).reshape(2, 3072)
    batch = _old_pickle({b"data": pixels, b"labels": [3, 9]})
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    _publish_cifar(own_folders, dict.fromkeys(names, batch))
    train, val = open_dataset("small", "train"), open_dataset("small", "val")
    assert (len(train), len(val)) == (10, 2)  # type: ignore[arg-type]
    image, label = val[1]
    assert label == 9
    assert np.array_equal((image * 255).round().numpy().astype(np.uint8), pixels[1].reshape(3, 32, 32))


class _Evil:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.proof,)


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(
    own_folders: tuple[Path, Path], tmp_path: Path
) -> None:
    proof = tmp_path / "proof"
    evil = pickle.dumps({b"data": _Evil(proof), b"labels": []}, protocol=2)
    pickle.loads(evil)
    assert proof.exists(), "the pickle is harmless, so this tests nothing"
    proof.unlink()
    _publish_cifar(own_folders, {"test_batch": evil})
    with pytest.raises(Refused, match="has no place in a data file"):
        open_dataset("small", "val")
    assert not proof.exists()


def test_an_archive_of_images_is_unpacked_once_and_never_outside_its_folder(
    own_folders: tuple[Path, Path], photographs: Path
) -> None:
    manifests, data = own_folders
    archive = data / "packed" / "photographs.tgz"
    archive.parent.mkdir(parents=True)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(photographs, "photographs")
    store(manifests, manifest("packed", {archive.name: archive.read_bytes()}))
    assert len(open_dataset("packed", "train")) == 8  # type: ignore[arg-type]
    assert open_dataset("packed", "val")[3][0].shape == (3, 32, 32)
    assert sorted(p.name for p in archive.parent.iterdir()) == ["photographs.tgz", "unpacked"]

    climbing = data / "climbing" / "climbing.tgz"
    climbing.parent.mkdir()
    with tarfile.open(climbing, "w:gz") as tar:
        tar.add(photographs / "val" / "china" / "00000.jpg", "../../outside.jpg")
    store(manifests, manifest("climbing", {climbing.name: climbing.read_bytes()}))
    with pytest.raises(Refused, match=r"climbing\.tgz"):
        open_dataset("climbing", "train")
    assert not list(data.parent.rglob("outside.jpg"))
