"""What a store in S3 promises beyond the conformance suite."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from llm_assets.errors import (
    DamagedError,
    NotFoundError,
    RefusedError,
    StoreError,
    StoreUnreachableError,
)
from llm_assets.store import open_store
from llm_assets.store.bucket import initialize
from llm_assets.store.ingest import ingest
from llm_assets.store.opening_s3 import open_s3
from llm_assets.store.s3_client import RetryPolicy
from llm_assets.store.scanning import scan
from llm_assets.store.transfer import Upload
from tests.store.conformance import contents
from tests.store.proxy import Fault, FaultyProxy, Request
from tests.store.samples import folder_of, identity_of, put, record_of
from tests.store.weed import SeaweedServer
from tests.store.worlds import FAST, S3World, blob_of

PART = 64 * 2**20


class Faulty:
    """Opens the store of a world through a proxy."""

    def __init__(self, world: S3World, stack: ExitStack) -> None:
        self.world, self._stack = world, stack

    def open(
        self, choose: Callable[[Request], Fault], retry: RetryPolicy = FAST, **changes: Any
    ) -> Any:
        parts = urlsplit(self.world.server.endpoint)
        self.proxy = self._stack.enter_context(
            FaultyProxy(str(parts.hostname), int(parts.port or 0), choose)
        )
        client = self.world.server.client(endpoint_url=self.proxy.endpoint, **changes)
        self._stack.callback(client.close)
        return open_s3(self.world.url(), client_factory=lambda: client, retry=retry)

    @property
    def faults(self) -> list[Fault]:
        """The faults so far."""
        return [fault for _, _, fault in self.proxy.requests if fault]


@pytest.fixture
def faulty(s3_world: S3World) -> Iterator[Faulty]:
    """Opens stores through proxies."""
    with ExitStack() as stack:
        yield Faulty(s3_world, stack)


def at_random(seed: int, share: float, *faults: Fault) -> Callable[[Request], Fault]:
    """Spoils this share of the requests. Only bodies of objects are flipped: nothing but TLS
    protects a listing."""
    generator = random.Random(seed)

    def choose(request: Request) -> Fault:
        fault = generator.choice(faults) if generator.random() < share else ""
        if fault in ("flip", "cut") and not (request.method == "GET" and request.is_object):
            return ""
        if fault == "flip-up" and not (request.method == "PUT" and request.is_object):
            return ""
        return fault

    return choose


@pytest.mark.parametrize("seed", range(3))
def test_nothing_wrong_is_returned_as_right(faulty: Faulty, source: Path, seed: int) -> None:
    """Dropped connections, cut and flipped bodies, 503 and delays, in a third of all requests."""
    every = ("drop", "lost", "reset", "cut", "flip", "flip-up", "slow", "503", "500")
    store = faulty.open(at_random(seed, 0.33, *every), RetryPolicy(attempts=16, base_s=0.01))
    folder_of(source, **{f"f{n}_txt": os.urandom(3000 * n) for n in range(6)})
    artifact = put(store, source)
    direct = faulty.world.open()
    assert direct.verify(artifact, deep=True) == []
    assert store.has(artifact)
    assert contents(store.fetch(artifact)) == contents(source)
    assert store.verify(artifact, deep=True) == []
    lease = store.acquire("a", owner="ann", ttl_s=60)
    records = [record_of(artifact, run_id=str(number)) for number in range(3)]
    for record in records:
        store.add_record(record, lease=lease)
    lease.renew()
    lease.release()
    assert store.records(identity_of("one")) == direct.records(identity_of("one")) == records
    for number in range(3):
        store.move_ref(
            "a/b", artifact, expected=artifact if number else None, who="x", why=str(number)
        )
        store.add_entry("ledger", str(number), {"usd": number})
    assert [move.why for move in store.ref_log("a/b")] == ["0", "1", "2"]
    assert [body for _, body in store.entries("ledger")] == [{"usd": n} for n in range(3)]
    assert len(set(faulty.faults)) >= 7


def test_a_large_file_through_a_bad_network(faulty: Faulty, source: Path) -> None:
    """Multipart: parts that fail are sent and fetched again, alone."""
    spoiled: set[tuple[str, str]] = set()

    def choose(request: Request) -> Fault:
        # Each part, up and down, is spoiled once.
        key = (request.method, request.headers.get("range", request.path))
        if (len(request.body) < 2**20 and request.method != "GET") or key in spoiled:
            return ""
        if "objects/blobs" not in request.path:
            return ""
        spoiled.add(key)
        return "flip-up" if request.method == "PUT" else ("flip", "cut")[len(spoiled) % 2]

    store = faulty.open(choose)
    folder_of(source)
    with (source / "weights.raw").open("wb") as file:
        file.write(os.urandom(2**20))
        file.truncate(PART + 1000)
        file.seek(PART)
        file.write(b"end")
    artifact = put(store, source)
    assert (store.fetch(artifact) / "weights.raw").read_bytes() == (
        source / "weights.raw"
    ).read_bytes()
    assert store.verify(artifact) == []
    assert faulty.faults.count("flip-up") >= 1
    assert faulty.faults.count("flip") + faulty.faults.count("cut") >= 3


def test_throttling_is_retried(faulty: Faulty) -> None:
    answers = iter(["503"] * 3)
    store = faulty.open(lambda request: next(answers, ""))
    assert store.refs() == {}
    assert faulty.faults == ["503"] * 3


def test_pauses_grow_at_random_up_to_a_cap() -> None:
    policy = RetryPolicy(base_s=0.2, cap_s=3.0)
    pauses = [[policy.pause_s(attempt) for _ in range(200)] for attempt in range(10)]
    for attempt, found in enumerate(pauses):
        limit = min(3.0, 0.2 * 2**attempt)
        assert 0.8 * limit < max(found) <= limit
        assert min(found) < 0.2 * limit


def test_what_never_ends_is_given_up(faulty: Faulty, source: Path) -> None:
    broken = False
    store = faulty.open(lambda request: "503" if broken else "", RetryPolicy(attempts=4, base_s=0))
    artifact = put(store, folder_of(source))
    broken = True
    before = len(faulty.proxy.requests)
    with pytest.raises(StoreUnreachableError, match="4 tries"):
        store.has(artifact)
    assert len(faulty.proxy.requests) == before + 4
    with pytest.raises(StoreUnreachableError):
        put(store, folder_of(source, new_txt="new"))


def test_no_server_is_said(s3_world: S3World) -> None:
    client = s3_world.server.client(endpoint_url="http://127.0.0.1:9")
    with pytest.raises(StoreUnreachableError, match="3 tries"):
        open_s3(
            s3_world.url(),
            client_factory=lambda: client,
            retry=RetryPolicy(attempts=3, base_s=0),
        )
    client.close()


def test_denied_access_is_not_retried(s3_world: S3World, faulty: Faulty, source: Path) -> None:
    reader = {"aws_access_key_id": "reader", "aws_secret_access_key": "reader-secret"}
    store = faulty.open(lambda request: "", **reader)
    with pytest.raises(StoreError, match="access is denied"):
        put(store, folder_of(source))
    puts = [path for method, path, _ in faulty.proxy.requests if method == "PUT"]
    assert len(puts) == 1
    assert s3_world.keys("objects/") == []
    with pytest.raises(StoreError, match="access is denied"):
        faulty.open(lambda request: "", aws_secret_access_key="wrong")
    assert len(faulty.proxy.requests) == 1


def test_a_missing_bucket_is_not_retried(s3_world: S3World, faulty: Faulty) -> None:
    s3_world.bucket = "no-such-bucket"
    with pytest.raises(StoreError, match="no bucket 'no-such-bucket'"):
        faulty.open(lambda request: "")
    assert len(faulty.proxy.requests) == 1


def test_a_wrong_region_is_not_retried(faulty: Faulty) -> None:
    with pytest.raises(StoreError, match=r"another region: eu-central-1"):
        faulty.open(lambda request: "301")
    assert 1 <= len(faulty.proxy.requests) <= 2


def test_missing_credentials_are_said(
    s3_world: S3World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="AWS_PROFILE"):
        open_store(s3_world.url())


def test_the_url_and_the_environment_are_enough(
    s3_world: S3World, monkeypatch: pytest.MonkeyPatch, source: Path
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_world.server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_world.server.secret)
    store = open_store(s3_world.url())
    artifact = put(store, folder_of(source))
    assert open_store(store.url).has(artifact)


def test_a_client_of_dagster_aws_is_taken(s3_world: S3World, source: Path) -> None:
    from dagster_aws.s3 import S3Resource

    server = s3_world.server
    resource = S3Resource(
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.key,
        aws_secret_access_key=server.secret,
    )
    store = open_store(s3_world.url(), s3_client=resource.get_client)
    assert store.has(put(store, folder_of(source)))


@pytest.mark.parametrize(
    "url", ["s3://", "s3://bucket/p?secret=x", "s3://bucket/p#x", "s3:///prefix"]
)
def test_a_url_that_names_no_store(url: str) -> None:
    with pytest.raises(RefusedError, match="s3://"):
        open_store(url)


def test_a_prefix_that_holds_something_else(s3_world: S3World) -> None:
    s3_world.remove("format.json")
    s3_world.write("photo.jpg", b"x")
    with pytest.raises(RefusedError, match=r"photo\.jpg"):
        s3_world.open()
    s3_world.remove("photo.jpg")
    with pytest.raises(NotFoundError, match="no store"):
        open_s3(s3_world.url(), create=False, client_factory=lambda: s3_world.client)
    assert s3_world.keys() == []


def test_listings_of_many_pages(s3_world: S3World) -> None:
    store = s3_world.open()
    original = store.s3.call

    def small_pages(operation: str, **arguments: Any) -> dict[str, Any]:
        if operation == "list_objects_v2":
            arguments.setdefault("MaxKeys", 3)
        return original(operation, **arguments)

    store.s3.call = small_pages
    for number in range(8):
        store.add_entry("ledger", f"{number}", {"n": number})
    assert [body["n"] for _, body in store.entries("ledger")] == list(range(8))


# The cache


def test_a_fetched_blob_is_not_downloaded_again(faulty: Faulty, source: Path) -> None:
    store = faulty.open(lambda request: "")
    folder_of(source, shared_txt="s" * 5000)
    first, second = put(store, source), put(store, source, other=1)

    def gets() -> int:
        return sum("objects/blobs" in path for m, path, _ in faulty.proxy.requests if m == "GET")

    store.fetch(first)
    assert gets() == 2
    store.fetch(first)
    store.fetch(second)
    assert gets() == 2


def test_fetches_at_the_same_time_share_one_download(faulty: Faulty, source: Path) -> None:
    artifact = put(faulty.world.open(), folder_of(source, a_txt=os.urandom(10**6)))
    store = faulty.open(lambda request: "slow" if "objects/blobs" in request.path else "")
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(store.fetch(artifact))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gets = [path for m, path, _ in faulty.proxy.requests if m == "GET" and "blobs" in path]
    assert len(gets) == 2
    assert len(folders) == 6
    assert contents(folders[0]) == contents(source)


def test_a_download_goes_on_where_it_stopped(faulty: Faulty, source: Path) -> None:
    folder_of(source)
    with (source / "weights.raw").open("wb") as file:
        file.write(os.urandom(2**20))
        file.seek(2 * PART)
        file.write(b"the last part")
    artifact = put(faulty.world.open(), source)
    broken = True

    def choose(request: Request) -> Fault:
        last = request.headers.get("range", "").startswith(f"bytes={2 * PART}-")
        return "503" if broken and last else ""

    store = faulty.open(choose, RetryPolicy(attempts=2, base_s=0))
    with pytest.raises(StoreUnreachableError):
        store.fetch(artifact)
    assert not (store.cache / "checkouts" / artifact).exists()
    partial = [p for p in (store.cache / "partial").iterdir() if p.suffix != ".lock"]
    assert len(partial) == 1
    broken = False
    before = len(faulty.proxy.requests)
    folder = store.fetch(artifact)
    ranges = [p for m, p, _ in faulty.proxy.requests[before:] if m == "GET" and "blobs" in p]
    assert len(ranges) == 1
    assert (folder / "weights.raw").read_bytes() == (source / "weights.raw").read_bytes()
    # What is left of an earlier try is not trusted.
    assert list((store.cache / "partial").glob("*-3")) == []


def test_a_part_list_that_is_lost_or_wrong(s3_world: S3World, source: Path) -> None:
    folder_of(source)
    with (source / "weights.raw").open("wb") as file:
        file.truncate(PART + 10)
    artifact = put(s3_world.open(), source)
    [key] = s3_world.keys("objects/parts/")
    s3_world.write(key, b"x" * 64)
    assert (s3_world.open().fetch(artifact) / "weights.raw").stat().st_size == PART + 10
    s3_world.remove(key)
    assert s3_world.open().verify(artifact, deep=True) == []
    assert (s3_world.open().fetch(artifact) / "weights.raw").stat().st_size == PART + 10


def test_a_damaged_cache_heals(s3_world: S3World, source: Path) -> None:
    artifact = put(s3_world.open(), folder_of(source, a_txt="right"))
    store = s3_world.open("cache")
    spoiled = store.fetch(artifact) / "a.txt"
    spoiled.chmod(0o644)
    spoiled.write_text("wrong")
    assert contents(s3_world.open("cache").fetch(artifact)) == contents(source)


def test_verify_does_not_download(faulty: Faulty, source: Path) -> None:
    store = faulty.open(lambda request: "")
    artifact = put(store, folder_of(source, a_txt="x" * 1000))
    before = len(faulty.proxy.requests)
    assert store.verify(artifact) == []
    methods = [m for m, path, _ in faulty.proxy.requests[before:] if "objects/blobs" in path]
    assert methods == ["HEAD", "HEAD"]


def test_a_server_without_checksums_is_read(s3_world: S3World, source: Path) -> None:
    store = s3_world.open()
    artifact = put(store, folder_of(source, a_txt="x" * 1000))
    key = blob_of(store, artifact, "a.txt")
    for content, damaged in ((b"x" * 1000, []), (b"y" * 1000, ["a.txt"])):
        s3_world.client.put_object(
            Bucket=s3_world.bucket, Key=f"{s3_world.prefix}/{key}", Body=content,
            ChecksumAlgorithm="CRC32",
        )  # fmt: skip
        assert [damage.path for damage in s3_world.open().verify(artifact)] == damaged


# Uploads


def test_a_source_that_changes_before_the_upload_is_refused(
    s3_world: S3World, source: Path
) -> None:
    store = s3_world.open()
    path = folder_of(source, a_txt="a" * 1000) / "a.txt"
    found = next(x for x in ingest(scan(source), lambda file: None) if x.file.source == path)
    for content in ("b" * 1000, "short"):
        path.write_text(content)
        upload = Upload(store.s3, path, found.blob, found.parts, replace=False)
        with pytest.raises(RefusedError, match="changed while"):
            upload.run(1000)
    assert s3_world.keys("objects/blobs/") == []


def test_a_failed_upload_is_aborted(s3_world: S3World, faulty: Faulty, source: Path) -> None:
    folder_of(source)
    with (source / "weights.raw").open("wb") as file:
        file.truncate(PART + 10)
    store = faulty.open(
        lambda request: "503" if "partNumber=2" in request.path else "",
        RetryPolicy(attempts=2, base_s=0),
    )
    with pytest.raises(StoreUnreachableError):
        put(store, source)
    assert list(s3_world.open().open_uploads()) == []
    assert s3_world.keys("objects/trees/") == []
    assert s3_world.keys("tmp/") == []


def test_a_completion_whose_answer_is_lost(faulty: Faulty, source: Path) -> None:
    folder_of(source)
    with (source / "weights.raw").open("wb") as file:
        file.truncate(PART + 10)
    lost = iter(["lost"])

    def choose(request: Request) -> Fault:
        completes = request.method == "POST" and "uploadId=" in request.path
        return next(lost, "") if completes else ""

    store = faulty.open(choose)
    assert store.verify(put(store, source), deep=True) == []
    assert faulty.faults == ["lost"]


# The bucket


def test_init_sets_up_and_proves_a_bucket(s3_server: SeaweedServer, tmp_path: Path) -> None:
    client = s3_server.client()
    url = f"s3://init-test/some/prefix?endpoint={s3_server.endpoint}&cache={tmp_path / 'cache'}"
    others = {"ID": "theirs", "Status": "Enabled", "Filter": {"Prefix": "logs/"},
              "Expiration": {"Days": 3}}  # fmt: skip
    client.create_bucket(Bucket="init-test")
    client.put_bucket_lifecycle_configuration(
        Bucket="init-test", LifecycleConfiguration={"Rules": [others]}
    )
    for _ in range(2):
        lines = list(
            initialize(
                url, encryption="AES256", kms_key=None, create_bucket=True, configure_bucket=True,
                client_factory=lambda: client,
            )
        )  # fmt: skip
    assert lines[0] == "bucket init-test: there already"
    assert "versioning: enabled" in lines
    assert "a second writer of the same key is refused" in lines
    assert "the server tells an object's SHA-256 without a download" in lines
    rules = client.get_bucket_encryption(Bucket="init-test")["ServerSideEncryptionConfiguration"]
    assert "AES256" in str(rules)
    assert client.get_bucket_versioning(Bucket="init-test")["Status"] == "Enabled"
    rules = client.get_bucket_lifecycle_configuration(Bucket="init-test")["Rules"]
    assert sorted(rule["ID"] for rule in rules) == [
        "llm-assets-some-prefix-claims",
        "llm-assets-some-prefix-heartbeats",
        "llm-assets-some-prefix-saves",
        "llm-assets-some-prefix-uploads",
        "theirs",
    ]
    aborts = [rule.get("AbortIncompleteMultipartUpload") for rule in rules]
    assert {"DaysAfterInitiation": 7} in aborts
    (saves,) = [rule for rule in rules if rule["ID"].endswith("-saves")]
    assert saves["Expiration"]["Days"] == 30
    assert saves["Filter"]["Prefix"] == "some/prefix/checkpoints/"
    stored = client.list_objects_v2(Bucket="init-test")["Contents"]
    assert [entry["Key"] for entry in stored] == ["some/prefix/format.json"]


def test_a_store_on_an_encrypted_versioned_bucket(
    s3_server: SeaweedServer, tmp_path: Path, source: Path
) -> None:
    client = s3_server.client()
    url = f"s3://init-large/p?endpoint={s3_server.endpoint}&cache={tmp_path / 'cache'}"
    assert "bucket init-large: created" in list(
        initialize(
            url, encryption="AES256", kms_key=None, create_bucket=True, configure_bucket=True,
            client_factory=lambda: client,
        )
    )  # fmt: skip
    store = open_s3(url, client_factory=lambda: client, retry=FAST)
    folder_of(source)
    with (source / "weights.raw").open("wb") as file:
        file.truncate(PART + 10)
    artifact = put(store, source)
    assert store.verify(artifact) == []
    head = client.head_object(
        Bucket="init-large", Key=f"p/{blob_of(store, artifact, 'weights.raw')}"
    )
    assert head["ServerSideEncryption"] == "AES256"
    assert (store.fetch(artifact) / "weights.raw").stat().st_size == PART + 10


def test_init_refuses_a_server_that_takes_a_second_writer(faulty: Faulty) -> None:
    """Conditions that a proxy takes off the requests: like a server that does not know them."""
    store = faulty.open(lambda request: "")
    original = store.s3.request

    def without_condition(operation: str, arguments: dict[str, Any]) -> dict[str, Any]:
        arguments.pop("IfNoneMatch", None)
        return original(operation, arguments)

    store.s3.request = without_condition
    from llm_assets.store.bucket import prove

    with pytest.raises(StoreError, match="accepted an If-None-Match"):
        list(prove(store))


def test_damage_names_the_artifact(s3_world: S3World, source: Path) -> None:
    store = s3_world.open()
    artifact = put(store, folder_of(source, a_txt="x" * 1000))
    s3_world.write(blob_of(store, artifact, "a.txt"), b"y" * 1000)
    with pytest.raises(DamagedError, match=artifact.short):
        s3_world.open().fetch(artifact)
