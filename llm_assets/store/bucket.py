"""What `llm-assets store init` sets on a bucket, and proves about its server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from llm_assets.errors import DamagedError, NotFoundError, StoreError, message
from llm_assets.store.local_space import CHECKPOINT_DAYS
from llm_assets.store.opening_s3 import connect, open_s3
from llm_assets.store.remote_saves import FOLDER as SAVES
from llm_assets.store.s3 import S3Store
from llm_assets.store.s3_backend import CLAIM_DAYS, checksum
from llm_assets.store.s3_client import S3Client

OLD_VERSION_DAYS = 30
"""After so many days a deleted or replaced version is gone for good."""


def initialize(
    url: str,
    *,
    encryption: str,
    kms_key: str | None,
    create_bucket: bool,
    configure_bucket: bool,
    client_factory: Callable[[], Any] | None = None,
) -> Iterator[str]:
    """Make the store at `url`, set up its bucket and prove its server; one line for each step."""
    store = connect(url, client_factory=client_factory)
    if create_bucket:
        yield ensure_bucket(store.s3)
    if configure_bucket:
        yield from configure(store.s3, encryption=encryption, kms_key=kms_key)
    yield from prove(store)
    open_s3(url, client_factory=client_factory)
    yield f"store: {store.s3.where}"


def ensure_bucket(s3: S3Client) -> str:
    """Make the bucket when there is none; what was done."""
    region = s3.client.meta.region_name
    try:
        s3.call("head_bucket")
        return f"bucket {s3.bucket}: there already"
    except NotFoundError:
        pass
    place = {} if region in (None, "us-east-1") else {"LocationConstraint": region}
    s3.call("create_bucket", **({"CreateBucketConfiguration": place} if place else {}))
    return f"bucket {s3.bucket}: created"


def configure(s3: S3Client, *, encryption: str, kms_key: str | None) -> Iterator[str]:
    """Set encryption, versioning and lifecycle rules and read them back; one line for each."""
    rule: dict[str, Any] = {"SSEAlgorithm": encryption}
    if kms_key:
        rule["KMSMasterKeyID"] = kms_key
    rules = [{"ApplyServerSideEncryptionByDefault": rule}]
    s3.call("put_bucket_encryption", ServerSideEncryptionConfiguration={"Rules": rules})
    found = s3.call("get_bucket_encryption")["ServerSideEncryptionConfiguration"]["Rules"]
    algorithm = found[0]["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"]
    _must(s3, "default encryption", algorithm, encryption)
    yield f"encryption at rest: {algorithm}"
    s3.call("put_bucket_versioning", VersioningConfiguration={"Status": "Enabled"})
    status = s3.call("get_bucket_versioning").get("Status")
    _must(s3, "versioning", status, "Enabled")
    yield "versioning: enabled"
    names = _set_lifecycle(s3)
    yield f"lifecycle rules: {', '.join(names)}"


def _set_lifecycle(s3: S3Client) -> list[str]:
    """Add this store's rules to those that the bucket has; their names."""
    with_prefix = s3.prefix.replace("/", "-") or "root"
    ours = [
        {
            "ID": f"llm-assets-{with_prefix}-uploads",
            "Status": "Enabled",
            "Filter": {"Prefix": s3.key("objects/")},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": CLAIM_DAYS},
            "NoncurrentVersionExpiration": {"NoncurrentDays": OLD_VERSION_DAYS},
        },
        {
            "ID": f"llm-assets-{with_prefix}-claims",
            "Status": "Enabled",
            "Filter": {"Prefix": s3.key("tmp/")},
            "Expiration": {"Days": CLAIM_DAYS},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        },
        {
            "ID": f"llm-assets-{with_prefix}-saves",
            "Status": "Enabled",
            "Filter": {"Prefix": s3.key(f"{SAVES}/")},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": CLAIM_DAYS},
            "Expiration": {"Days": CHECKPOINT_DAYS},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        },
        {
            "ID": f"llm-assets-{with_prefix}-heartbeats",
            "Status": "Enabled",
            "Filter": {"Prefix": s3.key("leases/")},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
        },
    ]
    names = [str(rule["ID"]) for rule in ours]
    others: list[dict[str, Any]] = []
    try:
        present = s3.call("get_bucket_lifecycle_configuration")["Rules"]
        others = [rule for rule in present if rule.get("ID") not in names]
    except NotFoundError:
        pass
    s3.call(
        "put_bucket_lifecycle_configuration",
        LifecycleConfiguration={"Rules": [*others, *ours]},
    )
    present = s3.call("get_bucket_lifecycle_configuration")["Rules"]
    missing = set(names) - {str(rule.get("ID")) for rule in present}
    _must(s3, "lifecycle rules", sorted(missing), [])
    return names


def prove(store: S3Store) -> Iterator[str]:
    """Try what the store relies on with an object of its own; one line for each proof."""
    s3 = store.s3
    key = f"tmp/probe-{os.urandom(6).hex()}"
    content = b"llm-assets"
    try:
        right = {"Key": s3.key(key), "Body": content, "ChecksumSHA256": checksum(content)}
        taken = {"Key": s3.key(key), "Body": b"other", "IfNoneMatch": "*"}
        wrong = {**right, "Body": b"other"}
        s3.call("put_object", **right, IfNoneMatch="*")
        yield "a new object is written once"
        _refused(s3, "an If-None-Match on a key that is taken", taken)
        yield "a second writer of the same key is refused"
        _refused(s3, "a body that has not its checksum", wrong)
        yield "a body that has not its SHA-256 is refused"
        head = s3.call("head_object", Key=s3.key(key), ChecksumMode="ENABLED")
        if head.get("ChecksumSHA256") == checksum(content):
            yield "the server tells an object's SHA-256 without a download"
        else:
            yield "the server keeps no SHA-256: `verify` has to download"
        if store.backend.read(key) != content:
            raise DamagedError(f"{s3.where}: {key} reads back as something else")
    finally:
        with contextlib.suppress(StoreError):
            store.backend.delete(key)


def _refused(s3: S3Client, what: str, arguments: dict[str, Any]) -> None:
    from botocore.exceptions import ClientError

    try:
        s3.request("put_object", arguments)
    except ClientError:
        return
    raise StoreError(
        message(
            where=s3.where,
            found=f"the server accepted {what}",
            rule="objects are write-once and checked on the way in, by the server",
            remedy="use a server with conditional writes and SHA-256 checksums",
        )
    )


def _must(s3: S3Client, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise StoreError(
            message(
                where=s3.where,
                found=f"{what}: {found!r} after setting {wanted!r}",
                rule="what `store init` sets is read back",
                remedy="look at the bucket's policy and at what the server supports",
            )
        )
