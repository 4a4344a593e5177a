"""Fetching and verifying, against a web server of the test's own."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.data_loading.manifests import manifest, store
from workbench.data.fetch import fetch, list_sources, verify
from workbench.data.sources import check_source
from workbench.errors import Refused

CONTENT = bytes(range(256)) * 40


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing.bin":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        sent = {"/whole.bin": CONTENT, "/cut.bin": CONTENT[:-1], "/other.bin": CONTENT[::-1]}
        self.wfile.write(sent[self.path])

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/"
        running.shutdown()
        thread.join()


def _publish(folders: tuple[Path, Path], server: str, name: str) -> Path:
    """A manifest that says CONTENT for NAME.bin; where the file would lie."""
    store(folders[0], manifest(name, {f"{name}.bin": CONTENT}, url=server))
    return folders[1] / name / f"{name}.bin"


def test_a_file_is_fetched_verified_and_listed(own_folders: tuple[Path, Path], server: str) -> None:
    target = _publish(own_folders, server, "whole")
    (row,) = list_sources()
    assert (row.name, row.size_bytes, row.present, row.verified) == ("whole", len(CONTENT), False, False)
    with pytest.raises(Refused, match=r"whole\.bin of whole is not there.*workbench data fetch whole"):
        check_source("whole")
    assert "every hash as in the manifest" in fetch("whole")
    assert target.read_bytes() == CONTENT
    (row,) = list_sources()
    assert row.present and row.verified
    assert check_source("whole").manifest_sha256


@pytest.mark.parametrize(("name", "reason"), [("cut", "sha256"), ("other", "sha256"), ("missing", "404")])
def test_what_is_not_the_file_of_the_manifest_is_refused_and_nothing_stays(
    own_folders: tuple[Path, Path], server: str, name: str, reason: str
) -> None:
    target = _publish(own_folders, server, name)
    with pytest.raises(Refused, match=rf"{name}\.bin.*{reason}|{reason}.*{name}\.bin"):
        fetch(name)
    assert list(target.parent.iterdir()) == []


def test_a_server_that_is_not_there_is_refused(own_folders: tuple[Path, Path]) -> None:
    _publish(own_folders, "http://127.0.0.1:1/", "whole")
    with pytest.raises(Refused, match=r"could not be fetched.*by hand"):
        fetch("whole")


def test_a_file_changed_after_it_was_verified_is_found(own_folders: tuple[Path, Path], server: str) -> None:
    target = _publish(own_folders, server, "whole")
    fetch("whole")
    target.write_bytes(CONTENT[:-1] + b"!")  # the same size
    (row,) = list_sources()
    assert row.present and not row.verified
    for look in (check_source, verify, fetch):
        with pytest.raises(Refused, match=r"sha256 of .*whole\.bin"):
            look("whole")


def test_a_verified_file_is_not_read_again_unless_asked(
    own_folders: tuple[Path, Path], server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _publish(own_folders, server, "whole")
    fetch("whole")
    read: list[Path] = []
    monkeypatch.setattr("workbench.data.integrity.verify_file", lambda file, path: read.append(path))
    check_source("whole")
    assert read == []
    verify("whole")
    assert [path.name for path in read] == ["whole.bin"]


def test_md5_serves_where_no_sha256_is_known(own_folders: tuple[Path, Path], server: str) -> None:
    import hashlib

    content = manifest("other", {"other.bin": CONTENT}, url=server)
    del content["distribution"][0]["sha256"]
    content["distribution"][0]["md5"] = hashlib.md5(CONTENT).hexdigest()
    store(own_folders[0], content)
    with pytest.raises(Refused, match="md5"):
        fetch("other")


def test_a_broken_manifest_does_not_hide_the_others(own_folders: tuple[Path, Path], server: str) -> None:
    _publish(own_folders, server, "whole")
    (own_folders[0] / "broken.json").write_text("{")
    broken, whole = list_sources()
    assert "not JSON" in broken.problem and not broken.present
    assert not whole.problem


def test_the_digits_are_there_without_fetching() -> None:
    assert "every hash as in the manifest" in fetch("digits")
    rows = {row.name: row for row in list_sources()}
    assert rows["digits"].present and rows["digits"].verified
    assert {"cifar10", "imagenette-160"} <= set(rows)
