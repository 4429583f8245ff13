"""Great Expectations suites of the four data sets: one expectation for each number that is gated.

The expectations only count: how much is too much stands in the recipe, so a changed threshold
measures nothing again. Great Expectations takes seconds to import, and is imported by the process
that measures, never by one that loads the definitions.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_assets.gates.artifact_rows import ALL_FILES, Input, Measured, Row, read_rows, texts_of
from llm_assets.gates.text_checks import BROKEN, language_of, personal_data
from llm_assets.reading.mixing import prompt_hash

_MOST_ROWS = 200_000
"""Larger sets are measured on so many rows, by hash of the content: copies stay together."""
_ROWS_SHOWN = 20
_SHOWN = 160
_ROLES = {"system": "s", "user": "u", "assistant": "a"}
_ROLE_ORDER = {"instructions": r"^s?(ua)+$", "preferences": r"^s?u(au)*>a\|a$"}


def measure(inputs: Mapping[str, Input]) -> Measured:
    """Run the suite of `data`. Rates are shares of rows with at least one such fault."""
    data = inputs["data"]
    frame = _frame(data)
    if not len(frame):
        return Measured(metrics={})
    results = _validate(frame, data.type)
    metrics: dict[str, dict[str, Any]] = {}
    tables: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        name, found = result.expectation_config.meta["metric"], result.result
        if "observed_value" in found:
            observed = found["observed_value"]
            value = 1.0 - observed if name == "duplicate_rate" else observed
            metrics[name] = {"value": float(value), "n": len(frame)}
            rows = _longest(frame) if name == "length_max" else []
            tables[name] = _copies(frame) if name == "duplicate_rate" else rows
            continue
        n = found["element_count"] - found["missing_count"]
        count = found["unexpected_count"]
        metrics[name] = {"value": count / n if n else None, "n": n}
        bad = found.get("unexpected_index_list") or []
        tables[name] = [_shown(frame, int(entry), name) for entry in bad[:_ROWS_SHOWN]]
    overview = [_overview(result, metrics) for result in results]
    return Measured(
        metrics=metrics, tables={name: rows or overview for name, rows in tables.items()}
    )


def _overview(result: Any, metrics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One line of the whole suite: what a gate without a faulty row shows."""
    config = result.expectation_config
    name = config.meta["metric"]
    return {
        "expectation": config.type,
        "column": config.kwargs.get("column", ""),
        "metric": name,
        "value": metrics[name]["value"],
        "rows": metrics[name]["n"],
    }


# From rows to a table that expectations can look at


def _frame(data: Input) -> Any:
    import pandas as pd

    files = ALL_FILES.get(data.type) or _task_files(data.path)
    rows = list(_chosen(data.path, files))
    held_out = {prompt_hash(row) for file, _, row in rows if file == "held_out.jsonl"}
    trained = {prompt_hash(row) for file, _, row in rows if file == "train.jsonl"}
    crossing = held_out & trained
    made = [_columns(row, data.type) for _, _, row in rows]
    for line, (file, number, row) in zip(made, rows, strict=True):
        line["file"], line["row"] = file, number
        # Nothing for a row to train on: the share is that of the held-out rows.
        line["crossing"] = None
        if file == "held_out.jsonl":
            line["crossing"] = "both sides" if prompt_hash(row) in crossing else "ok"
    languages = Counter(line["language"] for line in made if line["language"])
    main = languages.most_common(1)[0][0] if languages else ""
    for line in made:
        line["language"] = line["language"] if line["language"] not in ("", main) else "ok"
    return pd.DataFrame(made)


def _task_files(folder: Path) -> tuple[str, ...]:
    tasks = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    return tuple(f"{task['name']}.jsonl" for task in tasks)


def _chosen(folder: Path, files: tuple[str, ...]) -> Iterator[tuple[str, int, Row]]:
    """(file, number, row), at most about _MOST_ROWS of them."""
    total = sum(1 for file in files for _ in read_rows(folder / file))
    bound = min(1.0, _MOST_ROWS / max(1, total)) * 2**32
    for file in files:
        for number, row in enumerate(read_rows(folder / file)):
            if bound >= 2**32 or int(_content(row)[:8], 16) < bound:
                yield file, number, row


def _content(row: Row) -> str:
    """Hash of what a row says, whichever file it is from."""
    said = [row.get("prompt"), row.get("chosen"), row.get("rejected"), row.get("messages")]
    text = json.dumps([*said, row.get("text"), row.get("target")], ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _columns(row: Row, kind: str) -> dict[str, Any]:
    problem = schema_problem(row, kind)
    if problem:
        said = [json.dumps(row, ensure_ascii=False)[:_SHOWN]]
    else:
        said = [str(row["prompt"])] if kind == "evals" else texts_of(row)
    text = "\n".join(said)
    return {
        "schema": problem or "ok",
        "shortest": min(said, key=lambda part: len(part.strip()), default=""),
        "chars": len(text),
        "roles": "" if problem else _roles(row, kind),
        "content": _content(row),
        "text": text,
        "language": language_of(text),
        "personal": "; ".join(f"{what}: {masked}" for what, masked in personal_data(text)) or "ok",
        "source": str(row.get("source", "")),
    }


def schema_problem(row: Row, kind: str) -> str:
    """What a row lacks or has of the wrong type; "" for a row as the data stage writes it."""
    if kind == "corpus":
        return "" if isinstance(row.get("text"), str) else "text is no text"
    if kind == "evals":
        if not isinstance(row.get("prompt"), str):
            return "prompt is no text"
        return "" if "target" in row else "no target"
    names = ("messages",) if kind == "instructions" else ("prompt", "chosen", "rejected")
    for name in names:
        turns = row.get(name)
        if not isinstance(turns, list) or not turns:
            return f"{name} is no list of turns"
        if not all(
            isinstance(turn, Mapping)
            and isinstance(turn.get("role"), str)
            and isinstance(turn.get("content"), str)
            for turn in turns
        ):
            return f"a turn of {name} has no role or no content"
    return ""


def _roles(row: Row, kind: str) -> str:
    def letters(turns: Any) -> str:
        return "".join(_ROLES.get(turn["role"], "?") for turn in turns)

    if kind == "instructions":
        return letters(row["messages"])
    if kind == "preferences":
        sides = f"{letters(row['chosen'])}|{letters(row['rejected'])}"
        return f"{letters(row['prompt'])}>{sides}"
    return ""


# The suites


def _validate(frame: Any, kind: str) -> list[Any]:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    with warnings.catch_warnings():
        # It imports modules that Python deprecates; nothing that we could mend.
        warnings.simplefilter("ignore")
        import great_expectations as gx

        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False}
        asset = context.data_sources.add_pandas("rows").add_dataframe_asset("rows")
        batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame})
        suite = gx.ExpectationSuite(name=kind, expectations=_expectations(gx.expectations, kind))
        found = batch.validate(
            suite,
            result_format={
                "result_format": "COMPLETE",
                "unexpected_index_column_names": [],
                "partial_unexpected_count": 0,
                "return_unexpected_index_query": False,
            },
        )
    return list(found.results)


def _expectations(known: Any, kind: str) -> list[Any]:
    def only(column: str, metric: str) -> Any:
        return known.ExpectColumnValuesToBeInSet(
            column=column, value_set=["ok"], meta={"metric": metric}
        )

    expectations = [
        only("schema", "schema_error_rate"),
        known.ExpectColumnValuesToMatchRegex(
            column="shortest", regex=r"\S", meta={"metric": "empty_rate"}
        ),
        known.ExpectColumnMedianToBeBetween(column="chars", meta={"metric": "length_median"}),
        known.ExpectColumnMaxToBeBetween(column="chars", meta={"metric": "length_max"}),
        known.ExpectColumnProportionOfUniqueValuesToBeBetween(
            column="content", meta={"metric": "duplicate_rate"}
        ),
        known.ExpectColumnValuesToNotMatchRegex(
            column="text", regex=BROKEN, meta={"metric": "charset_error_rate"}
        ),
        only("language", "other_language_rate"),
        only("personal", "pii_rate"),
    ]
    if kind in _ROLE_ORDER:
        expectations += [
            known.ExpectColumnValuesToMatchRegex(
                column="roles", regex=_ROLE_ORDER[kind], meta={"metric": "role_error_rate"}
            ),
            only("crossing", "split_overlap_rate"),
        ]
    return expectations


# What a person reads beside a number

_WHY = {
    "schema_error_rate": "schema",
    "other_language_rate": "language",
    "pii_rate": "personal",
    "role_error_rate": "roles",
}


def _shown(frame: Any, index: int, metric: str) -> dict[str, Any]:
    line = frame.iloc[index]
    row = {"file": line["file"], "row": int(line["row"]), "source": line["source"]}
    if metric in _WHY:
        row["found"] = str(line[_WHY[metric]])[:_SHOWN]
    if metric != "pii_rate":
        row["text"] = line["text"][:_SHOWN]
    return row


def _longest(frame: Any) -> list[dict[str, Any]]:
    longest = frame["chars"].nlargest(5).index
    return [
        {**_shown(frame, int(index), "length_max"), "chars": int(frame["chars"][index])}
        for index in longest
    ]


def _copies(frame: Any) -> list[dict[str, Any]]:
    """The rows that stand most often."""
    counts = frame["content"].value_counts()
    rows = []
    for content, count in counts[counts > 1].head(_ROWS_SHOWN).items():
        first = int((frame["content"] == content).to_numpy().argmax())
        rows.append({"times": int(count), **_shown(frame, first, "duplicate_rate")})
    return rows
