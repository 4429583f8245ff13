"""The parsers of trees, records and names: nothing crashes them, only their own passes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_assets.errors import DamagedError, RefusedError, StoreError
from llm_assets.store.canonical import decode, encode, seal, unseal
from llm_assets.store.digest import ArtifactHash, BlobHash
from llm_assets.store.documents import (
    encode_tree,
    make_tree,
    parse_record,
    parse_tree,
    record_body,
    unseal_record,
)
from llm_assets.store.hashing import PART_BYTES, hash_bytes, hash_file, join_parts
from llm_assets.store.names import check_clashes, check_path, decode_name, encode_name
from llm_assets.store.protocol import FileEntry
from tests.store.samples import record_of, write

COMMON = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
ARTIFACT = ArtifactHash("a" * 64)

texts = st.text(max_size=12)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
blobs = st.binary(min_size=32, max_size=32).map(lambda digest: BlobHash(digest.hex()))
entries = st.builds(
    FileEntry,
    path=st.text(max_size=30) | st.sampled_from(["a", "b/c", "A", "../x", "a/b", "é"]),
    size_bytes=st.integers(0, PART_BYTES),
    blob=blobs,
)


def example_tree() -> bytes:
    """A tree as it is stored."""
    files = [
        FileEntry(path=path, size_bytes=3, blob=BlobHash("b" * 64)) for path in ("a", "b/c", "d")
    ]
    return encode_tree(make_tree("corpus", files, {"num_rows": 1, "x": [1.5, None]}))[1]


def example_record() -> bytes:
    """A record as it is stored."""
    return seal(record_body(record_of(ARTIFACT)), "record")


@st.composite
def mutations(draw: st.DrawFn, content: bytes) -> bytes:
    """Some bytes replaced, inserted or cut out."""
    spoiled = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(spoiled)))
        end = draw(st.integers(start, min(len(spoiled), start + 8)))
        spoiled[start:end] = draw(
            st.binary(max_size=6) | st.sampled_from([b"null", b"1e999", b'"'])
        )
    return bytes(spoiled)


@COMMON
@given(st.binary(max_size=300) | values.map(lambda value: json.dumps(value).encode()))
def test_garbage_is_no_tree_and_no_record(content: bytes) -> None:
    for parse in (parse_tree, lambda data: unseal_record(data, "test")):
        with pytest.raises(StoreError):
            parse(content)


@COMMON
@given(mutations(example_tree()))
def test_a_spoiled_tree_is_refused_or_a_tree(content: bytes) -> None:
    with pytest.raises(DamagedError):
        parse_tree(content + b" ", ArtifactHash(hashlib.sha256(content).hexdigest()))
    try:
        tree = parse_tree(content)
    except StoreError:
        return
    assert encode_tree(tree)[1] == content


@COMMON
@given(mutations(example_record()))
def test_a_spoiled_record_is_refused(content: bytes) -> None:
    if content == example_record():
        return
    with pytest.raises(StoreError):
        unseal_record(content, "test")


@COMMON
@given(st.dictionaries(st.sampled_from(sorted(record_body(record_of(ARTIFACT)))), values))
def test_a_record_of_strange_values(changes: dict[str, Any]) -> None:
    body = {**record_body(record_of(ARTIFACT)), **changes}
    try:
        record = parse_record(body, "test")
    except StoreError:
        return
    try:
        content = seal(record_body(record), "test")
    except RefusedError:
        return
    assert unseal_record(content, "test") == record


@COMMON
@given(
    st.text(max_size=8), st.lists(entries, max_size=6), st.dictionaries(texts, values, max_size=4)
)
def test_what_make_tree_takes_comes_back(
    kind: str, files: list[FileEntry], metadata: dict[str, Any]
) -> None:
    try:
        tree = make_tree(kind, files, metadata)
        artifact, content = encode_tree(tree)
    except RefusedError:
        return
    assert parse_tree(content, artifact) == tree
    assert [entry.path for entry in tree.files] == sorted(entry.path for entry in files)


@COMMON
@given(values)
def test_canonical_json_has_one_form(value: Any) -> None:
    try:
        content = encode({"value": value}, "test")
    except RefusedError:
        return
    assert encode(decode(content, "test"), "test") == content
    assert unseal(seal({"value": value}, "test"), "test") == decode(content, "test")


@COMMON
@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_names_keep_apart(one: str, other: str) -> None:
    try:
        keys = [encode_name(name, "ref") for name in (one, other)]
    except RefusedError:
        return
    assert [decode_name(key) for key in keys] == [one, other]
    assert (keys[0] == keys[1]) == (one == other)
    for key in keys:
        assert key.isascii()
        assert not any(s.startswith(".") or s == "" for s in key.split("/"))
        assert not any(s.endswith((".json", ".beat")) for s in key.split("/"))


@COMMON
@given(st.text(max_size=40))
def test_a_path_that_passes_stays_inside(path: str) -> None:
    try:
        check_path(path, "test")
    except RefusedError:
        return
    root = Path("/store/checkouts/x")
    assert root in (root / path).parents
    assert ".." not in Path(path).parts
    assert "\0" not in path


@pytest.mark.parametrize(
    "content",
    [
        b'{"a":1,"a":2}',
        b'{"a": 1}',
        b'{"b":1,"a":2}',
        b'{"a":NaN}',
        b'{"a":1.50}',
        b'{"a":"\\u0041"}',
        b'{"a":1}\n',
        b"\xef\xbb\xbf{}",
        b"[]",
        b'{"a":"\xff"}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":' * 100_000,
        b"",
    ],
)
def test_other_spellings_are_refused(content: bytes) -> None:
    with pytest.raises(DamagedError):
        decode(content, "test")


@pytest.mark.parametrize("found", [0, 2, 99])
def test_another_format_is_refused_and_named(found: int) -> None:
    content = example_tree().replace(b'"format":1', f'"format":{found}'.encode())
    with pytest.raises(RefusedError, match=f"format {found}"):
        parse_tree(content)
    content = example_record().replace(b'"format":1', f'"format":{found}'.encode())
    with pytest.raises(RefusedError, match=f"format {found}"):
        unseal_record(content, "test")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"format":1,', b""),
        (b'"format":1', b'"format":true'),
        (b'"size_bytes":3', b'"size_bytes":-1'),
        (b'"size_bytes":3', b'"size_bytes":67108865'),
        (b'"size_bytes":3', b'"size_bytes":3.0'),
        (b'"path":"a"', b'"path":"e"'),
        (b'"path":"a"', b'"path":7'),
        (b'"type":"corpus"', b'"type":null'),
        (b'"blob":"b', b'"blob":"B'),
        (b'"metadata":{', b'"more":1,"metadata":{'),
    ],
)
def test_a_tree_with_a_wrong_field(old: bytes, new: bytes) -> None:
    content = example_tree()
    assert old in content
    with pytest.raises(DamagedError):
        parse_tree(content.replace(old, new, 1))


def test_a_record_with_fields_of_another_time() -> None:
    body = record_body(record_of(ARTIFACT))
    with pytest.raises(DamagedError, match="later"):
        parse_record({**body, "later": 1}, "test")
    with pytest.raises(DamagedError, match="stage"):
        parse_record({name: body[name] for name in body if name != "stage"}, "test")
    short = {name: body[name] for name in body if name not in ("tables", "samples", "tokens")}
    expected = dataclasses.replace(record_of(ARTIFACT), tables={}, samples=(), tokens=0)
    assert parse_record(short, "test") == expected


def test_the_hash_of_blobs(tmp_path: Path) -> None:
    assert hash_bytes(b"") == hashlib.sha256(b"").hexdigest()
    assert hash_bytes(b"abc") == hashlib.sha256(b"abc").hexdigest()
    exact = bytes(PART_BYTES)
    assert hash_bytes(exact) == hashlib.sha256(exact).hexdigest()
    over = hash_bytes(exact + b"x")
    digests = hashlib.sha256(exact).digest() + hashlib.sha256(b"x").digest()
    assert over == f"{hashlib.sha256(digests).hexdigest()}-2"
    assert over == join_parts([digests[:32], digests[32:]])
    write(tmp_path / "file", exact + b"x")
    assert hash_file(tmp_path / "file") == over
    assert BlobHash.parse(over) == over
    for wrong in ("", "x", "A" * 64, "a" * 63, "a" * 64 + "-0", "a" * 64 + "-1x"):
        with pytest.raises(ValueError, match="BlobHash"):
            BlobHash.parse(wrong)


@pytest.mark.parametrize(
    "paths",
    [["a", "a"], ["a", "a/b"], ["a/b", "a"], ["a", "A"], ["x/a", "X/b"], ["é", "e\u0301"]],
)
def test_clashes(paths: list[str]) -> None:
    with pytest.raises(RefusedError):
        check_clashes(paths, "test")


def test_no_clash() -> None:
    check_clashes(["a", "b", "c/a", "c/b", "c/d/a"], "test")


def test_a_directory_store_loads_neither_dagster_nor_boto3(tmp_path: Path) -> None:
    code = (
        "import sys; from llm_assets.store import open_store; import llm_assets.store.commands;"
        f"store = open_store({str(tmp_path / 'store')!r}); list(store.artifacts());"
        "print([m for m in sys.modules if m in ('dagster', 'dagster_aws', 'boto3', 'torch')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
