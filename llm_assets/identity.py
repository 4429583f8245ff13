"""Source hash and identity: what a stage's result depends on, as one hash.

The source hash covers the stage's module and all that it imports inside the package, from the
syntax tree: formatting, comments, docstrings and imports for types only do not count. It also
covers the versions of the libraries that the stage declares. The identity adds the stage's part of
the recipe, the seed and the hashes of the input artifacts. Never placement: no path, host, device.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from llm_assets.caching import cached_json
from llm_assets.store.digest import Identity

PACKAGE = "llm_assets"
_ROOT = Path(__file__).parent
_FORMAT = "source-1"

# Texts for people; and the shapes of settings, whose values are in the recipe part already.
# A change there can't change a result.
_NOT_SOURCE = frozenset(
    {
        "llm_assets",
        "llm_assets.data_settings",
        "llm_assets.errors",
        "llm_assets.stage_settings",
        "llm_assets.stages",
        "llm_assets.stages.context",
    }
)


def canonical_json(value: Any) -> bytes:
    """The one encoding of a value: sorted keys, no spaces, UTF-8. ValueError for a value without
    a canonical form (NaN, infinity, bytes, objects, keys that are no text)."""
    return json.dumps(
        _canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    ).encode("utf-8", "strict")


def _canonical(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} has no canonical form")
        # 1.0 and 1 are one number in YAML and must be one here.
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a mapping with keys that are no text has no canonical form")
        return {key: _canonical(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(entry) for entry in value]
    raise ValueError(f"a {type(value).__name__} has no canonical form: {value!r}")


def digest_of(value: Any) -> str:
    """SHA-256 of the canonical encoding, hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


class _Stripper(ast.NodeTransformer):
    """Takes out what can't change a result: docstrings, and blocks under `if TYPE_CHECKING`."""

    def _body(self, node: Any) -> Any:
        self.generic_visit(node)
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            node.body = node.body[1:] or [ast.Pass()]
        return node

    visit_Module = visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _body

    def visit_If(self, node: ast.If) -> Any:
        test = node.test
        name = test.id if isinstance(test, ast.Name) else getattr(test, "attr", "")
        if name == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


def _imports_of(tree: ast.AST, module: str, is_package: bool) -> list[str]:
    """Dotted names inside the package that a module may import, at any depth of its code."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:keep], *([base] if base else [])])
            names.add(base)
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return sorted(name for name in names if name == PACKAGE or name.startswith(f"{PACKAGE}."))


def _analyse(source: bytes, module: str, is_package: bool) -> list[Any]:
    tree = _Stripper().visit(ast.parse(source))
    dump = ast.dump(tree, annotate_fields=False, include_attributes=False)
    return [
        hashlib.sha256(dump.encode("utf-8", "backslashreplace")).hexdigest(),
        _imports_of(tree, module, is_package),
    ]


def _locate(module: str, root: Path) -> tuple[Path, bool] | None:
    relative = Path(*module.split(".")[1:])
    as_module = root / relative.with_suffix(".py") if relative.parts else None
    if as_module is not None and as_module.is_file():
        return as_module, False
    as_package = root / relative / "__init__.py"
    return (as_package, True) if as_package.is_file() else None


@cache
def _module(
    name: str, path: Path, is_package: bool, _mtime_ns: int, _size_bytes: int
) -> tuple[str, tuple[str, ...]]:
    """Hash and imports of one module; the file's time and size make the memo forget old content."""
    source = path.read_bytes()
    key = json.dumps([_FORMAT, name, is_package, hashlib.sha256(source).hexdigest()])
    digest, imports = cached_json(key, lambda: _analyse(source, name, is_package))
    return str(digest), tuple(imports)


def source_modules(module: str, root: Path = _ROOT) -> dict[str, str]:
    """Module name to the hash of its stripped syntax tree, for `module` and all that it imports
    inside the package.

    A package's own `__init__` counts when something is imported from it by name, not for having
    modules in it. ValueError when there is no such module.
    """
    found: dict[str, str] = {}
    waiting = [module]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen or name in _NOT_SOURCE:
            continue
        seen.add(name)
        located = _locate(name, root)
        if located is None:
            continue  # a function or class: its module is in the list too
        path, is_package = located
        status = path.stat()
        digest, imports = _module(name, path, is_package, status.st_mtime_ns, status.st_size)
        found[name] = digest
        waiting.extend(imports)
    if module not in found:
        raise ValueError(f"{module} is no module of {PACKAGE}")
    return dict(sorted(found.items()))


@cache
def library_version(distribution: str) -> str:
    """The installed version of a distribution, "absent" when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


@dataclass(frozen=True, kw_only=True)
class Source:
    """The code that a stage's result depends on: modules and libraries, and one hash over both."""

    modules: Mapping[str, str]
    libraries: Mapping[str, str]
    hash: str


def source_of(module: str, libraries: tuple[str, ...], root: Path = _ROOT) -> Source:
    """The source of a stage, read from disk now: call it in the process that executes."""
    modules = source_modules(module, root)
    versions = {name: library_version(name).split("+")[0] for name in sorted(libraries)}
    digest = digest_of({"modules": modules, "libraries": versions})
    return Source(modules=modules, libraries=versions, hash=digest)


def identity_of(
    *, source_hash: str, recipe: Mapping[str, Any], seed: int, inputs: Mapping[str, str]
) -> Identity:
    """The identity of a stage: hash of source hash, recipe part, seed and input hashes by name."""
    return Identity.parse(
        digest_of(
            {
                "format": "identity-1",
                "source": source_hash,
                "recipe": recipe,
                "seed": seed,
                "inputs": dict(inputs),
            }
        )
    )


def hashed_part(settings: Any) -> dict[str, Any]:
    """What of a settings block can change a result, as plain JSON: not the fields marked
    `runtime()`, not `enabled` and `pin`, which decide whether the stage runs at all."""
    return _without_runtime(settings, top=True)


def _without_runtime(settings: Any, *, top: bool = False) -> dict[str, Any]:
    from llm_assets.trainer_fields import RUNTIME_ONLY

    part: dict[str, Any] = {}
    for name, field in type(settings).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("identity") is False:
            continue
        if top and name in ("enabled", "pin"):
            continue
        part[field.alias or name] = _plain(getattr(settings, name))
    for name, value in (settings.model_extra or {}).items():
        if name not in RUNTIME_ONLY:
            part[name] = value
    return part


def _plain(value: Any) -> Any:
    if hasattr(type(value), "model_fields"):
        return _without_runtime(value)
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return value


def changed_keys(old: Any, new: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two recipe parts differ: (dotted key, old value, new value), in key order."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from changed_keys(
                old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key)
            )
    elif old != new:
        yield prefix, old, new
