"""The content-addressed artifact store: one Protocol, a directory and S3 (docs/store.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llm_assets.store.protocol import Store


def open_store(
    url: str, *, create: bool = True, s3_client: Callable[[], Any] | None = None
) -> Store:
    """The store at `url`: a directory (a path or file://...) or s3://bucket/prefix.

    An absent or empty place becomes a store, unless `create` is false (NotFoundError). `s3_client`
    gives the boto3 client for a store in S3, such as `S3Resource(...).get_client` of dagster-aws;
    without it one is made from the URL and the environment (opening_s3.py).
    """
    # Imported here so that the digest types alone cost nothing to import, and a directory no boto3.
    if url.startswith("s3://"):
        from llm_assets.store.opening_s3 import open_s3

        return open_s3(url, create=create, client_factory=s3_client)
    from llm_assets.store.opening import directory_of, open_directory

    return open_directory(directory_of(url), create=create)


__all__ = ["Store", "open_store"]
