"""Whatever stands in a file: usable rows, counted rows, or one DataError. Never another error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_assets.errors import DataError
from llm_assets.reading.forms import FORMS, PURPOSES
from tests.reading.reading_parts import read

_KEYS = st.sampled_from(
    [
        "messages",
        "conversations",
        "conversation",
        "prompt",
        "completion",
        "chosen",
        "rejected",
        "instruction",
        "input",
        "output",
        "instances",
        "question",
        "answer",
        "choices",
        "mc1_targets",
        "label",
        "labels",
        "type",
        "text",
        "role",
        "content",
        "from",
        "value",
        "system",
        "history",
        "split",
        "votes",
        "check",
        "kind",
        "source",
        "rubric",
    ]
)
_TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["\n\nHuman: a\n\nAssistant: b", "\0", "\ud800", " "]),
    st.sampled_from(
        ["user", "assistant", "system", "human", "gpt", "text", "train", "safe", "A", "1"]
    ),
)
_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 3), st.floats(), _TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=4)),
    max_leaves=12,
)
_ROWS = st.lists(st.dictionaries(_KEYS, _VALUES, max_size=5), min_size=1, max_size=4)
_FORMS = [(form.name, purpose) for form in FORMS.values() for purpose in form.purposes]
_RELAXED = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def account(path: Path, purpose: str, form: str = "auto") -> None:
    """Read the file; every row is kept or counted, and what is kept can be written."""
    try:
        rows, report = read(path, purpose, form=form)
    except DataError as error:
        assert error.where and error.found and error.rule and error.remedy
        str(error).encode("utf-8")
        return
    if report.form != "self_instruct":
        assert report.num_rows == report.num_kept + report.num_dropped
    assert len(rows) == report.num_kept > 0
    for row in rows:
        json.dumps(row, ensure_ascii=False).encode("utf-8")


@_RELAXED
@given(rows=_ROWS, which=st.sampled_from(_FORMS))
def test_any_rows(tmp_path: Path, rows: list[Any], which: tuple[str, str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    account(path, which[1], which[0])
    account(path, which[1])
    array = tmp_path / "rows.json"
    array.write_text(json.dumps(rows), encoding="utf-8")
    account(array, which[1])


@_RELAXED
@given(
    content=st.one_of(
        st.binary(max_size=80), st.text(max_size=60).map(lambda t: t.encode("utf-8", "replace"))
    ),
    name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv", "a.txt", "a.parquet", "a.csv.gz"]),
    packed=st.booleans(),
    purpose=st.sampled_from(PURPOSES),
)
def test_any_bytes(tmp_path: Path, content: bytes, name: str, packed: bool, purpose: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if packed else content)
    account(path, purpose)


@pytest.mark.parametrize("text", ["[", "{", '"', "[[[[", '{"a":', "[1,", "\ufeff[", "null", "{}{}"])
def test_stumps_of_json(tmp_path: Path, text: str) -> None:
    for name in ("a.json", "a.jsonl"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DataError):
            read(path, "instructions")
