"""The content-addressed artifact store: one Protocol, a directory and S3 (docs/store.md)."""

from __future__ import annotations

from llm_assets.store.protocol import Store


def open_store(url: str, *, create: bool = True) -> Store:
    """The store at `url`: a directory (a path or file://...) or s3://bucket/prefix.

    An absent or empty directory becomes a store, unless `create` is false (NotFoundError).
    """
    # Imported here so that the digest types alone cost nothing to import.
    from llm_assets.store.opening import directory_of, open_directory

    return open_directory(directory_of(url), create=create)


__all__ = ["Store", "open_store"]
