"""Which artifacts stay: what is reached, and what the retention policy keeps."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from llm_assets.errors import DamagedError, NotFoundError, RefusedError, message
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.document_store import DocumentStore, hashes_in
from llm_assets.store.parallel import in_parallel
from llm_assets.store.protocol import Record, Tree

WORKERS = 8
PRODUCTION = "production"


@dataclass(frozen=True, kw_only=True)
class BestBy:
    """Keep the artifact whose record is best by a metric, for each pipeline and stage."""

    metric: str
    lowest: bool = False

    @classmethod
    def parse(cls, text: str) -> BestBy:
        """From `METRIC`, `METRIC:max` or `METRIC:min`."""
        metric, _, order = text.partition(":")
        if not metric or order not in ("", "max", "min"):
            raise RefusedError(
                message(
                    where=f"retention by metric {text!r}",
                    found="no METRIC, METRIC:max or METRIC:min",
                    rule="the best is the highest value, or with :min the lowest",
                    remedy="name a metric of the records, such as facts_exact or perplexity:min",
                )
            )
        return cls(metric=metric, lowest=order == "min")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept beside refs, pins and leases.

    With none of `newest`, `days` and `best` every record keeps its artifact. With one of them the
    records that no rule keeps expire. What ever was in production stays in any case.
    """

    newest: int | None = None
    days: float | None = None
    best: tuple[BestBy, ...] = ()

    @property
    def expires_records(self) -> bool:
        """Whether a record alone does not keep its artifact."""
        return self.newest is not None or self.days is not None or bool(self.best)


@dataclass
class Catalog:
    """What a store holds, read once."""

    trees: Mapping[ArtifactHash, Tree | None]
    modified: dict[ArtifactHash, float]
    records: list[tuple[str, Record]]
    by_output: dict[ArtifactHash, list[Record]] = field(default_factory=dict)

    @classmethod
    def read(cls, store: DocumentStore) -> Catalog:
        """Every tree and record. A tree that can't be read stands as None; a record raises."""
        modified: dict[ArtifactHash, float] = {}
        for item in store.backend.items("objects/trees"):
            with contextlib.suppress(ValueError):
                modified[ArtifactHash.parse(item.key.rpartition("/")[2])] = item.modified
        found = dict(in_parallel(lambda name: (name, _tree(store, name)), modified, WORKERS))
        trees = {name: tree for name, tree in found.items() if not isinstance(tree, NotFoundError)}
        records = list(store.record_items())
        by_output: dict[ArtifactHash, list[Record]] = defaultdict(list)
        for _, record in records:
            by_output[record.output].append(record)
        return cls(trees=trees, modified=modified, records=records, by_output=dict(by_output))

    def lineage(self, artifact: ArtifactHash) -> Iterator[ArtifactHash]:
        """The artifacts that one was made from or names: inputs of its records, and hashes in its
        metadata."""
        for record in self.by_output.get(artifact, ()):
            yield from hashes_in(record.inputs)
        tree = self.trees.get(artifact)
        if tree is not None:
            yield from hashes_in(tree.metadata)


def _tree(store: DocumentStore, artifact: ArtifactHash) -> Tree | NotFoundError | None:
    try:
        return store.tree(artifact)
    except NotFoundError as error:
        return error
    except DamagedError:
        return None


def keep(
    store: DocumentStore, catalog: Catalog, retention: Retention, *, grace_s: float,
    extra: Iterable[ArtifactHash] = (),
) -> dict[ArtifactHash, str]:  # fmt: skip
    """Every artifact that stays, and why. Reachability follows lineage, so that whatever stays can
    be made again."""
    kept: dict[ArtifactHash, str] = {}
    waiting = [*_roots(store, catalog, retention, grace_s), *((a, "asked for") for a in extra)]
    while waiting:
        artifact, why = waiting.pop()
        if artifact in kept or artifact not in catalog.trees:
            continue
        kept[artifact] = why
        waiting += [(above, f"lineage of {artifact[:12]}") for above in catalog.lineage(artifact)]
    return kept


def _roots(
    store: DocumentStore, catalog: Catalog, retention: Retention, grace_s: float
) -> Iterator[tuple[ArtifactHash, str]]:
    yield from _references(store, catalog)
    now = store.backend.now()
    for artifact, modified in catalog.modified.items():
        # With a grace time of nothing the store's clock does not count: it tells whole seconds.
        if grace_s > 0 and now - modified < grace_s:
            yield artifact, f"younger than {grace_s / 3600:g} hours"
        elif retention.days is not None and now - modified < retention.days * 86_400:
            yield artifact, f"younger than {retention.days:g} days"
    if not retention.expires_records:
        yield from ((record.output, f"record of {record.stage}") for _, record in catalog.records)
        return
    for (_, stage), records in _by_stage(catalog.records).items():
        if retention.newest is not None:
            newest = _newest(records, catalog)[: retention.newest]
            yield from ((artifact, f"newest of {stage}") for artifact in newest)
        for rule in retention.best:
            yield from _best(records, stage, rule, catalog)


def _references(store: DocumentStore, catalog: Catalog) -> Iterator[tuple[ArtifactHash, str]]:
    for name, artifact in store.refs().items():
        yield artifact, f"ref {name}"
        if name.rpartition("/")[2] == PRODUCTION:
            for move in store.ref_log(name):
                yield move.artifact, f"was on {name}"
    for key, body in store.entries("pins"):
        yield from ((artifact, f"pin {key}") for artifact in hashes_in([key, body]))
    outputs: dict[str, list[ArtifactHash]] = defaultdict(list)
    for _, record in catalog.records:
        outputs[record.identity].append(record.output)
    for name, reaches in live_leases(store):
        found = [*hashes_in(list(reaches)), *hashes_in(name)]
        for artifact in found:
            yield artifact, f"lease {name}"
            yield from ((output, f"lease {name}") for output in outputs.get(artifact, ()))


def live_leases(store: DocumentStore) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name and reach of each lease whose owner is alive."""
    for name in store.leases.names():
        top = store.leases.top(name)
        if top is not None and top.alive:
            yield name, top.reaches


def live_identities(store: DocumentStore) -> set[Identity]:
    """The identities that a live lease is about."""
    return {Identity(found) for name, _ in live_leases(store) for found in hashes_in(name)}


def _by_stage(records: Sequence[tuple[str, Record]]) -> Mapping[tuple[str, str], list[Record]]:
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for _, record in records:
        groups[record.pipeline, record.stage].append(record)
    return groups


def _newest(records: Sequence[Record], catalog: Catalog) -> list[ArtifactHash]:
    """Distinct outputs, the last committed first."""
    ordered = sorted(
        (record for record in records if record.output in catalog.trees),
        key=lambda record: record.created_at,
        reverse=True,
    )
    return list(dict.fromkeys(record.output for record in ordered))


def _best(
    records: Sequence[Record], stage: str, rule: BestBy, catalog: Catalog
) -> Iterator[tuple[ArtifactHash, str]]:
    measured = [
        (float(record.metrics[rule.metric]["value"]), record.output)
        for record in records
        if rule.metric in record.metrics and record.output in catalog.trees
    ]
    if measured:
        pick = min if rule.lowest else max
        value, artifact = pick(measured, key=lambda pair: pair[0])
        yield artifact, f"best {rule.metric} of {stage} ({value:g})"


def named_metrics(catalog: Catalog) -> set[str]:
    """Every metric that some record has."""
    return {name for _, record in catalog.records for name in record.metrics}
