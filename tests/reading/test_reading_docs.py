"""docs/data.md names every form, format and reason."""

from __future__ import annotations

from pathlib import Path

from llm_assets.reading.files import FORMATS
from llm_assets.reading.forms import FORMS
from llm_assets.reading.problems import REASONS

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_counted_reason_is_explained() -> None:
    missing = [name for name, reason in REASONS.items() if not reason.fatal]
    assert [name for name in missing if f"`{name}`" not in TEXT] == []


def test_every_form_has_a_row() -> None:
    assert [name for name in FORMS if f"| `{name}` |" not in TEXT] == []


def test_every_format_is_named() -> None:
    said = {".json": "JSON", ".csv": "CSV", ".tsv": "TSV", ".parquet": "Parquet", ".text": "text"}
    assert [end for end in FORMATS if said.get(end, f"`{end}`") not in TEXT] == []
