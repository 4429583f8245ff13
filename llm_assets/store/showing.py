"""How the commands print: columns, sizes, ages."""

from __future__ import annotations

from collections.abc import Sequence

from llm_assets.errors import NotFoundError, RefusedError, message
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.document_store import DocumentStore

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(num_bytes: float) -> str:
    """For people: `1.5 GiB`."""
    for unit in _UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} {_UNITS[-1]}"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines with aligned cells; the columns in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    return [
        "  ".join(
            cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
            for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def age(seconds: float) -> str:
    """For people: `3 h`."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(0, seconds) / unit:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def find_artifact(store: DocumentStore, text: str) -> ArtifactHash:
    """The artifact that a whole hash, its first digits (six or more) or a ref names."""
    try:
        return ArtifactHash.parse(text)
    except ValueError:
        pass
    if "/" in text:
        if (artifact := store.ref(text)) is not None:
            return artifact
        raise NotFoundError(f"{store.url}: there is no ref {text!r}")
    if len(text) < 6:
        raise RefusedError(
            message(
                where=f"artifact {text!r}",
                found=f"{len(text)} digits",
                rule="an artifact is named by its hash, at least its first six digits, or by a ref",
                remedy="`llm-assets store ls` lists the artifacts",
            )
        )
    found = [artifact for artifact in store.artifacts() if artifact.startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise RefusedError(f"{store.url}: {text!r} begins {len(found)} hashes; give more digits")
    raise NotFoundError(f"{store.url}: no artifact begins with {text!r}")
