"""Manifests: valid Croissant, and refused by name when anything in them is wrong."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlcroissant
import pytest

from tests.data_loading.manifests import DIGITS, manifest, store
from workbench.data.authoring import write_manifest
from workbench.data.manifest import manifest_names, parse_manifest, read_manifest
from workbench.data.sources import check_source
from workbench.errors import Refused

REPOSITORY_MANIFESTS = sorted((Path(__file__).parents[2] / "data_manifests").glob("*.json"))


@pytest.mark.parametrize("path", REPOSITORY_MANIFESTS, ids=lambda p: p.stem)
def test_every_manifest_is_valid_croissant_and_describes_its_splits(path: Path) -> None:
    dataset = mlcroissant.Dataset(path)
    assert not dataset.metadata.ctx.issues.errors
    assert not dataset.metadata.ctx.issues.warnings
    ours = parse_manifest(path)
    splits = {str(row["splits/name"]): row["splits/num_samples"] for row in dataset.records("splits")}
    assert splits == {"train": ours.num_train, "val": ours.num_val}
    assert ours.licence and ours.citation
    assert all(file.sha256 and file.size_bytes for file in ours.files)
    assert ours.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_mlcroissant_would_have_found_an_invalid_manifest(tmp_path: Path) -> None:
    broken = manifest("broken", {"a": b"a"})
    del broken["distribution"][0]["contentUrl"]
    with pytest.raises(mlcroissant.ValidationError):
        mlcroissant.Dataset(store(tmp_path, broken))


def test_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(Refused, match=r"digist.*did you mean 'digits'"):
        read_manifest("digist")
    with pytest.raises(Refused, match=r"cifar-10.*did you mean 'cifar10'"):
        check_source("cifar-10")
    with pytest.raises(Refused, match=r"data: ''.*choose from cifar10, digits"):
        check_source("")


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"name": "m"', "[]", "null", '"m"', "\x00", '{"name": NaN', '{"name": "m", "name": "m"}'],
)
def test_what_is_not_a_whole_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(Refused, match=r"m\.json"):
        parse_manifest(path)


def test_a_manifest_that_is_not_utf8_is_refused_and_a_byte_order_mark_is_not(tmp_path: Path) -> None:
    path = tmp_path / "digits.json"
    path.write_bytes(b"\xff\xfe{\x00}\x00")
    with pytest.raises(Refused, match="not UTF-8"):
        parse_manifest(path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(DIGITS).encode())
    assert parse_manifest(path).name == "digits"


@pytest.mark.parametrize(
    "field", ["name", "description", "license", "citeAs", "distribution", "recordSet", "variableMeasured"]
)
@pytest.mark.parametrize("value", ["missing", None, 5, [5], {}], ids=repr)
def test_a_missing_or_malformed_field_is_named(tmp_path: Path, field: str, value: object) -> None:
    content = manifest("m", {"a": b"a"})
    content[field] = value
    if value == "missing":
        del content[field]
    path = tmp_path / "m.json"
    path.write_text(json.dumps(content))
    with pytest.raises(Refused, match=field):
        parse_manifest(path)


def _set_file(key: str, value: object) -> Callable[[Any], None]:
    return lambda content: content["distribution"][0].__setitem__(key, value)


def _set_variable(place: int, value: object) -> Callable[[Any], None]:
    return lambda content: content["variableMeasured"][place].__setitem__("value", value)


def _set_samples(value: object) -> Callable[[Any], None]:
    return lambda content: content["recordSet"][0]["data"][0].__setitem__("splits/num_samples", value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        *[
            (_set_file("name", outside), "file name")
            for outside in (
                "../a", "a/../../b", "/etc/passwd", "..", "a\\..\\b", "C:/a", "C:a", "//host/a", "a\0b", ".", "\\\\host\\a",
            )
        ],
        (_set_file("name", ""), "'name'"),
        (_set_file("contentUrl", "../a"), "file name"),
        (_set_file("contentUrl", "/etc/passwd"), "file name"),
        (_set_file("contentUrl", "file:///etc/passwd"), "http"),
        (_set_file("contentUrl", "ftp://example.org/a"), "http"),
        (_set_file("contentUrl", "data:text/plain,a"), "http"),
        (_set_file("sha256", ""), "neither sha256 nor md5"),
        (_set_file("sha256", "abc"), "sha256"),
        (_set_file("sha256", "g" * 64), "sha256"),
        (_set_file("md5", "0" * 31), "md5"),
        (_set_variable(0, "exec"), "reader"),
        (_set_variable(1, 0), "num_classes"),
        (_set_variable(1, "ten"), "num_classes"),
        (_set_variable(2, [3, 32]), "image_shape"),
        (_set_variable(2, None), "image_shape"),
        (_set_variable(2, [2, 32, 32]), "image_shape"),
        (_set_variable(2, [3, 0, 32]), "image_shape"),
        (_set_samples(0), "num_train"),
        (_set_samples(None), "num_train"),
        (lambda content: content.update(distribution=[]), "files"),
        (lambda content: content.update(name="../m"), "name"),
        (lambda content: content.update(name="n"), "name"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(tmp_path: Path, change: Callable[[Any], None], named: str) -> None:
    content = manifest("m", {"a": b"a"})
    path = store(tmp_path, content)
    parse_manifest(path)  # the control: nothing wrong with it yet
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(Refused, match=named):
        parse_manifest(path)


def test_a_manifest_of_ones_own_folder_is_valid_and_usable(own_folders: tuple[Path, Path], photographs: Path) -> None:
    path = write_manifest(
        photographs, "mine", licence="https://creativecommons.org/licenses/by/4.0/", image_shape=(3, 32, 48)
    )
    assert not mlcroissant.Dataset(path).metadata.ctx.issues.errors
    assert manifest_names() == ["mine"]
    info = check_source("mine")
    assert (info.num_train, info.num_val, info.num_classes, info.image_shape) == (8, 4, 2, (3, 32, 48))
    assert info.manifest_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert str(photographs) not in path.read_text(), "a path of this machine in a manifest"


def test_a_manifest_of_ones_own_overwrites_nothing(own_folders: tuple[Path, Path], photographs: Path) -> None:
    manifests, data = own_folders
    write_manifest(photographs, "mine")
    with pytest.raises(Refused, match="exists already"):
        write_manifest(photographs, "mine")
    (data / "other").mkdir()
    with pytest.raises(Refused, match=r"other exists already and is not"):
        write_manifest(photographs, "other")
    with pytest.raises(Refused, match="name of a manifest"):
        write_manifest(photographs, "../mine")
    assert [p.name for p in manifests.iterdir()] == ["mine.json"]


def test_one_changed_byte_in_ones_own_folder_is_refused_by_name(
    own_folders: tuple[Path, Path], photographs: Path
) -> None:
    path = write_manifest(photographs, "mine")
    assert not mlcroissant.Dataset(path).metadata.ctx.issues.errors, "invalid where no licence is given"
    check_source("mine")
    victim = photographs / "train" / "flower" / "00003.jpg"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(Refused, match=r"sha256 of .*flower/00003\.jpg") as refusal:
        check_source("mine")
    found = hashlib.sha256(content).hexdigest()
    assert found in str(refusal.value), "the hash found is not named"
    victim.unlink()
    with pytest.raises(Refused, match=r"00003\.jpg of mine is not there"):
        check_source("mine")
