"""The conformance suite, on a directory and on S3 (see the fixture `world`)."""

from tests.store import conformance


class TestArtifacts(conformance.Artifacts):
    pass


class TestRefusals(conformance.Refusals):
    pass


class TestDamage(conformance.Damage):
    pass


class TestRecords(conformance.Records):
    pass


class TestRefs(conformance.Refs):
    pass


class TestEntries(conformance.Entries):
    pass


class TestLeases(conformance.Leases):
    pass


class TestSaves(conformance.Saves):
    pass
