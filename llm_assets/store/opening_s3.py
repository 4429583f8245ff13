"""From an s3:// URL to a store in S3."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from llm_assets.caching import cache_folder
from llm_assets.errors import NotFoundError, RefusedError, message
from llm_assets.store.opening import FORMAT_DOCUMENT, FORMAT_KEY, check_store_format
from llm_assets.store.s3 import S3Store
from llm_assets.store.s3_backend import WORKERS
from llm_assets.store.s3_client import RetryPolicy, S3Client

_SETTINGS = ("cache", "endpoint", "profile", "region")


def open_s3(
    url: str,
    *,
    create: bool = True,
    client_factory: Callable[[], Any] | None = None,
    retry: RetryPolicy | None = None,
) -> S3Store:
    """The store at s3://bucket/prefix?endpoint=...&region=...&profile=...&cache=...

    What the URL does not say comes from the environment, as boto3 reads it (AWS_PROFILE,
    AWS_ENDPOINT_URL_S3, ...). `client_factory` gives the boto3 client: inside Dagster the
    `get_client` of dagster-aws's S3Resource. Without one a plain client is made, so that a worker
    or a command does not load Dagster. RefusedError for a prefix that holds other objects or
    another format.
    """
    store = connect(url, client_factory=client_factory, retry=retry)
    where = f"{store.s3.where}/{FORMAT_KEY}"
    try:
        document = store.backend.read(FORMAT_KEY)
    except NotFoundError:
        if not create:
            raise NotFoundError(
                message(
                    where=store.s3.where,
                    found="no store",
                    rule="a store is made before it is read",
                    remedy="`llm-assets store init`, or give the right bucket and prefix",
                )
            ) from None
        make(store)
        document = store.backend.read(FORMAT_KEY)
    check_store_format(document, where)
    return store


def connect(
    url: str,
    *,
    client_factory: Callable[[], Any] | None = None,
    retry: RetryPolicy | None = None,
) -> S3Store:
    """The store that `url` names, whether or not one is there."""
    parts = urlsplit(url)
    settings = settings_of(url)
    unknown = sorted(set(settings) - set(_SETTINGS))
    if not parts.netloc or parts.fragment or unknown:
        raise RefusedError(
            message(
                where=url,
                found=f"the setting {unknown[0]!r}" if unknown else "no bucket, or a fragment",
                rule=f"a store in S3 is s3://bucket/prefix, with ?{'&'.join(_SETTINGS)} as needed",
                remedy="correct the URL; credentials come from the environment",
            )
        )
    client = (client_factory or (lambda: _plain_client(settings)))()
    s3 = S3Client(client, parts.netloc, parts.path.strip("/"), retry)
    return S3Store(s3, url=url, cache=_cache(url, settings.get("cache")))


def make(store: S3Store) -> None:
    """Write the format document; RefusedError when the prefix holds something else."""
    s3 = store.s3
    prefix = f"{s3.prefix}/" if s3.prefix else ""
    page = s3.call("list_objects_v2", Prefix=prefix, MaxKeys=1)
    others = [entry["Key"] for entry in page.get("Contents", ())]
    if others and others[0] != s3.key(FORMAT_KEY):
        # Looked at again: another process may have made the store between the two looks.
        try:
            store.backend.read(FORMAT_KEY)
        except NotFoundError:
            raise RefusedError(
                message(
                    where=s3.where,
                    found=f"an object that is no store's: {others[0]}",
                    rule="a store stands alone below its prefix",
                    remedy="give an empty prefix",
                )
            ) from None
    store.backend.create(FORMAT_KEY, FORMAT_DOCUMENT)


def settings_of(url: str) -> dict[str, str]:
    """endpoint, region, profile and cache, as far as the URL tells them."""
    return dict(parse_qsl(urlsplit(url).query, keep_blank_values=True))


def _plain_client(settings: dict[str, str]) -> Any:
    import boto3
    from botocore.config import Config

    session = boto3.session.Session(
        profile_name=settings.get("profile"), region_name=settings.get("region")
    )
    # Retries are this store's own (s3_client.py). A body is not hashed once more for its signature:
    # its SHA-256 is a signed header already. Servers of one's own seldom have a name for each
    # bucket.
    config = Config(
        retries={"total_max_attempts": 1},
        max_pool_connections=4 * WORKERS,
        s3={
            "payload_signing_enabled": False,
            "addressing_style": "path" if settings.get("endpoint") else "auto",
        },
    )
    return session.client("s3", endpoint_url=settings.get("endpoint"), config=config)


def _cache(url: str, given: str | None) -> Path:
    if given:
        return Path(given).expanduser().absolute()
    return cache_folder() / "stores" / hashlib.sha256(url.encode()).hexdigest()[:16]
