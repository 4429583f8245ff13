"""Source hash and identity: what changes them, and what does not."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_assets.graph import STAGES
from llm_assets.identity import (
    canonical_json,
    changed_keys,
    digest_of,
    hashed_part,
    identity_of,
    source_modules,
    source_of,
)
from llm_assets.stage_settings import SftSettings

STAGE = '''
"""Docstring."""
from __future__ import annotations
from typing import TYPE_CHECKING
from llm_assets.helper import help_out
if TYPE_CHECKING:
    from llm_assets.types_only import Thing

def run(context):
    """Run it."""
    total = help_out(2)  # a comment
    return total
'''
HELPER = "from llm_assets import deep\n\ndef help_out(n):\n    return deep.f(n)\n"
DEEP = "def f(n):\n    return n + 1\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in {
        "__init__.py": "",
        "stage.py": STAGE,
        "helper.py": HELPER,
        "deep.py": DEEP,
        "types_only.py": "class Thing: pass\n",
        "unrelated.py": "x = 1\n",
    }.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def source_hash(root: Path) -> str:
    return source_of("llm_assets.stage", (), root).hash


def test_the_source_covers_what_is_imported_and_nothing_else(package: Path) -> None:
    assert list(source_modules("llm_assets.stage", package)) == [
        "llm_assets.deep",
        "llm_assets.helper",
        "llm_assets.stage",
    ]


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stage.py", "# a comment", "# another one, longer"),
        ("stage.py", '"""Run it."""', '"""Run it, differently told."""'),
        ("stage.py", '"""Docstring."""', '"""Another."""'),
        ("stage.py", "total = help_out(2)", "total = help_out( 2 )"),
        ("stage.py", "def run(context):", "\n\n\ndef run(\n    context,\n):"),
        ("unrelated.py", "x = 1", "x = 2"),
        ("types_only.py", "pass", "y = 3"),
    ],
)
def test_what_cannot_matter_changes_nothing(package: Path, file: str, old: str, new: str) -> None:
    before = source_hash(package)
    path = package / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert source_hash(package) == before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("stage.py", "total", "summed"),
        ("stage.py", "help_out(2)", "help_out(3)"),
        ("helper.py", "deep.f(n)", "deep.f(n) + 0"),
        ("deep.py", "n + 1", "n + 2"),
    ],
)
def test_what_can_matter_changes_the_hash(package: Path, file: str, old: str, new: str) -> None:
    before = source_hash(package)
    path = package / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert source_hash(package) != before


def test_a_library_version_counts_only_where_it_is_declared() -> None:
    with_trl = source_of(STAGES["sft_checkpoint"].module, ("trl",))
    without = source_of(STAGES["sft_checkpoint"].module, ())
    assert with_trl.hash != without.hash
    assert "trl" in STAGES["sft_checkpoint"].libraries
    assert "trl" not in STAGES["tokenizer"].libraries


def test_every_stage_has_a_module() -> None:
    for stage in STAGES.values():
        assert stage.module in source_modules(stage.module)


def test_no_source_covers_settings_or_error_texts() -> None:
    for stage in STAGES.values():
        covered = set(source_modules(stage.module))
        assert not covered & {"llm_assets.errors", "llm_assets.stage_settings", "llm_assets.assets"}


def test_an_unknown_module_is_an_error(package: Path) -> None:
    with pytest.raises(ValueError, match="no module"):
        source_modules("llm_assets.nothing", package)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abcäß", max_size=4), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), JSON, min_size=2))
def test_key_order_does_not_matter(document: dict[str, object]) -> None:
    turned = dict(reversed(document.items()))
    assert canonical_json(document) == canonical_json(turned)


@given(JSON)
def test_encoding_is_stable_through_json(value: object) -> None:
    import json

    assert canonical_json(json.loads(canonical_json(value))) == canonical_json(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, b"x", {1: 2}, object(), {"a": {3}}])
def test_a_value_without_canonical_form_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="canonical form"):
        canonical_json({"value": value})


def test_one_and_one_point_zero_are_one_number() -> None:
    assert digest_of({"a": 1}) == digest_of({"a": 1.0})
    assert digest_of({"a": 1}) != digest_of({"a": True})


def test_the_identity_depends_on_each_of_its_parts() -> None:
    base = {"source_hash": "s", "recipe": {"a": 1}, "seed": 0, "inputs": {"x": "1", "y": "2"}}
    variants = [
        base,
        {**base, "source_hash": "t"},
        {**base, "recipe": {"a": 2}},
        {**base, "seed": 1},
        {**base, "inputs": {"x": "2", "y": "1"}},
        {**base, "inputs": {"x": "1"}},
    ]
    assert len({identity_of(**variant) for variant in variants}) == len(variants)  # type: ignore[arg-type]
    again = {**base, "inputs": {"y": "2", "x": "1"}}
    assert identity_of(**again) == identity_of(**base)  # type: ignore[arg-type]


def test_runtime_settings_are_no_part_of_the_identity() -> None:
    plain = SftSettings.model_validate({"max_steps": 3})
    other = SftSettings.model_validate(
        {"max_steps": 3, "checkpoint": {"keep": 9}, "logging_steps": 2, "enabled": True}
    )
    assert hashed_part(plain) == hashed_part(other)
    packed = SftSettings.model_validate({"max_steps": 3, "packing": True})
    assert hashed_part(plain) != hashed_part(packed)


def test_changed_keys_name_the_place() -> None:
    old = {"a": {"b": 1, "c": 2}, "d": 3}
    assert list(changed_keys(old, {"a": {"b": 1, "c": 5}})) == [("a.c", 2, 5), ("d", 3, None)]
