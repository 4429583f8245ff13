"""The store beside the tools that people use, on a checkpoint-like folder and its next version.

    python benchmarks/store.py                      # 2 GiB, 3 rounds, everything that is installed
    python benchmarks/store.py --only local --size-mib 256 --rounds 1

Every step of a round runs the store and its counterpart one after the other on the same machine,
so the ratios are paired; the medians over the rounds count. `dvc`, `aws`, `rclone`, `restic`,
`s5cmd` and `weed` are looked for on PATH, or under `$BENCH_DVC`, `$BENCH_AWS` and so on; what is
missing is said and left out. Exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.store.weed import SeaweedServer, find_weed

MIB = 2**20
TOOLS = ("dvc", "aws", "rclone", "restic", "s5cmd")
BUCKET = "benchmark"
MEMORY_MIB = 200


@dataclass(frozen=True)
class Target:
    """`ours` takes at most `ratio` times the seconds of `theirs`."""

    ours: str
    theirs: str
    ratio: float


TARGETS = (
    Target("put", "dvc add", 0.35),
    Target("put", "dvc add, hardlinks", 0.6),
    Target("put v2", "dvc add v2", 0.7),
    Target("put v2", "dvc add v2, hardlinks", 0.7),
    Target("verify", "dvc status, rehashed", 0.3),
    Target("put, nothing changed", "dvc add, nothing changed", 1.0),
    Target("s3 put", "aws s3 cp, up", 1.0),
    Target("s3 put v2", "rclone copy v2", 0.85),
    Target("s3 get, verified", "aws s3 cp, down", 0.6),
)


class Bench:
    """Runs commands, and keeps their seconds and peak memory by name."""

    def __init__(self, folder: Path, size_mib: int) -> None:
        self.folder = folder
        self.size_mib = size_mib
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.peak_mib: dict[str, float] = defaultdict(float)
        self.tools = {name: find_tool(name) for name in TOOLS}
        self.environment = {
            **os.environ,
            "LLM_ASSETS_CACHE": str(folder / "llm-assets-cache"),
            "DVC_NO_ANALYTICS": "1",
            "DVC_SITE_CACHE_DIR": str(folder / "dvc-site"),
            "RESTIC_PASSWORD": "benchmark",
            "RESTIC_REPOSITORY": str(folder / "restic"),
            "RESTIC_CACHE_DIR": str(folder / "restic-cache"),
            "RCLONE_CONFIG": str(folder / "rclone.conf"),
        }
        # The server speaks plain HTTP, and older versions of rclone fail on a bundle.
        self.environment.pop("AWS_CA_BUNDLE", None)

    def time(self, name: str, *command: str, cwd: Path | None = None) -> str:
        """Run a command after the disk has settled; its output."""
        os.sync()
        started = time.perf_counter()
        with (self.folder / "output").open("w+b") as output:
            process = subprocess.Popen(
                command, cwd=cwd, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds = time.perf_counter() - started
            output.seek(0)
            text = output.read().decode(errors="replace")
        if process.returncode:
            raise SystemExit(f"{name}: exit code {process.returncode}\n{text}")
        self.seconds[name].append(seconds)
        self.peak_mib[name] = max(self.peak_mib[name], usage.ru_maxrss / 1024)
        print(f"  {name:46} {seconds:7.2f} s  {usage.ru_maxrss / 1024:6.0f} MiB", flush=True)
        return text

    def quiet(self, *command: str, cwd: Path | None = None) -> None:
        """Run a command that is no part of the measurement."""
        subprocess.run(command, cwd=cwd, env=self.environment, check=True, capture_output=True)

    def fresh(self, *names: str) -> None:
        """Delete what an earlier round left."""
        for name in names:
            shutil.rmtree(self.folder / name, ignore_errors=True)


def find_tool(name: str) -> str | None:
    """From `$BENCH_NAME`, or PATH."""
    return os.environ.get(f"BENCH_{name.upper()}") or shutil.which(name)


def make_checkpoint(folder: Path, size_mib: int, version: int) -> None:
    """Two weight files of random bytes and the small files of a checkpoint. The second version is
    written anew as a trainer does it; its first weight file has the same bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number in (1, 2):
        generator = random.Random(number if number == 1 else 10 * version + number)
        with (folder / f"model-0000{number}-of-00002.safetensors").open("wb") as file:
            for _ in range(size_mib // 2):
                file.write(generator.randbytes(MIB))
    texts = {
        "config.json": {"version": version},
        "model.safetensors.index.json": {"weight_map": {}},
        "tokenizer.json": {"model": {"vocab": {str(n): n for n in range(20_000)}}},
        "tokenizer_config.json": {"pad_token": "<pad>"},
        "generation_config.json": {"max_new_tokens": 64},
    }
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value))
    # Nobody puts a checkpoint in the second in which it was written, and the stat caches of all
    # tools ask for some age.
    old = time.time() - 60
    for path in folder.iterdir():
        os.utime(path, (old, old))


def ours(*arguments: str) -> tuple[str, ...]:
    """A command line of llm-assets in this environment."""
    beside = Path(sysconfig.get_path("scripts")) / "llm-assets"
    return (str(beside), "store", *arguments)


def put(folder: Path, url: str) -> tuple[str, ...]:
    """The command that puts a checkpoint."""
    metadata = json.dumps({"num_parameters": 1})
    return ours("put", str(folder), "--type", "checkpoint", "--metadata", metadata, "--store", url)


def local_round(bench: Bench, v1: Path, v2: Path) -> None:
    """Put, next version, nothing changed, verify; beside dvc, and restic as a second opinion."""
    bench.fresh("store")
    store = str(bench.folder / "store")
    steps: list[Callable[[], object]] = []
    dvc_modes = [("", "copy"), (", hardlinks", "hardlink")] if bench.tools["dvc"] else []
    for label, mode in dvc_modes:
        steps += dvc_steps(bench, label, mode, v1, v2)
    bench.time("put", *put(v1, store))
    for step in steps[0::5]:
        step()
    bench.time("put v2", *put(v2, store))
    for step in steps[1::5]:
        step()
    time.sleep(2.5)
    bench.quiet(*put(v2, store))
    bench.time("put, nothing changed", *put(v2, store))
    for step in steps[2::5]:
        step()
    artifact = latest(bench, store)
    warm(bench.folder / "store" / "objects")
    bench.time("verify", *ours("verify", "--store", store, artifact))
    cool(bench.folder / "store" / "objects")
    bench.time("verify, from the disk", *ours("verify", "--store", store, artifact))
    for step in steps[3::5]:
        step()
    for step in steps[4::5]:
        step()
    bench.fresh("store")
    if restic := bench.tools["restic"]:
        bench.fresh("restic", "restic-cache")
        bench.quiet(restic, "init")
        bench.time("restic backup", restic, "backup", str(v1))
        bench.time("restic check", restic, "check", "--read-data")
        bench.fresh("restic", "restic-cache")


def latest(bench: Bench, store: str) -> str:
    """The newest artifact of a store."""
    listed = subprocess.run(
        ours("ls", "--json", "--store", store),
        env=bench.environment, check=True, capture_output=True,
    )  # fmt: skip
    artifact: str = json.loads(listed.stdout)[0]["artifact"]
    return artifact


def warm(folder: Path) -> None:
    """Bring the files into the page cache, so that both sides of a pair find theirs there."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(4 * MIB):
                    pass


def cool(folder: Path) -> None:
    """Take the files out of the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dvc_steps(
    bench: Bench, label: str, mode: str, v1: Path, v2: Path
) -> list[Callable[[], object]]:
    """Five steps: add, next version, nothing changed, status with nothing remembered, clean up."""
    dvc = bench.tools["dvc"] or ""
    work = bench.folder / f"dvc-{mode}"

    def prepare(version: Path) -> None:
        shutil.rmtree(work / "checkpoint", ignore_errors=True)
        shutil.copytree(version, work / "checkpoint")
        old = time.time() - 60
        for path in (work / "checkpoint").iterdir():
            os.utime(path, (old, old))

    def first() -> None:
        bench.fresh(work.name, "dvc-site")
        work.mkdir()
        bench.quiet(dvc, "init", "--no-scm", cwd=work)
        bench.quiet(dvc, "config", "core.analytics", "false", cwd=work)
        bench.quiet(dvc, "config", "cache.type", mode, cwd=work)
        prepare(v1)
        bench.time(f"dvc add{label}", dvc, "add", "-q", "checkpoint", cwd=work)

    def second() -> None:
        prepare(v2)
        bench.time(f"dvc add v2{label}", dvc, "add", "-q", "checkpoint", cwd=work)

    def unchanged() -> None:
        bench.quiet(dvc, "add", "-q", "checkpoint", cwd=work)
        bench.time(f"dvc add, nothing changed{label}", dvc, "add", "-q", "checkpoint", cwd=work)

    def rehash() -> None:
        for suffix, prepare_cache in (("", warm), (", from the disk", cool)):
            bench.fresh("dvc-site")
            shutil.rmtree(work / ".dvc" / "tmp", ignore_errors=True)
            prepare_cache(work / "checkpoint")
            bench.time(f"dvc status, rehashed{label}{suffix}", dvc, "status", cwd=work)

    def clean() -> None:
        bench.fresh(work.name, "dvc-site")

    return [first, second, unchanged, rehash, clean]


def s3_round(bench: Bench, number: int, v1: Path, v2: Path) -> None:
    """Upload, next version, download; beside aws, rclone and s5cmd, on a new server."""
    with SeaweedServer() as server:
        server.client().create_bucket(Bucket=BUCKET)
        s3_steps(bench, server, number, v1, v2)


def s3_steps(bench: Bench, server: SeaweedServer, number: int, v1: Path, v2: Path) -> None:
    """The steps of s3_round; who uploads first changes with the rounds."""
    bench.environment |= {
        "AWS_ACCESS_KEY_ID": server.key,
        "AWS_SECRET_ACCESS_KEY": server.secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.endpoint,
        "S3_ENDPOINT_URL": server.endpoint,
    }
    url = f"s3://{BUCKET}/ours"
    aws, rclone, s5cmd = (bench.tools[name] for name in ("aws", "rclone", "s5cmd"))
    target = bench.folder / "download"
    uploads = [("s3 put", put(v1, url))]
    if aws:
        copy = (aws, "s3", "cp", "--only-show-errors", "--recursive", str(v1))
        uploads.append(("aws s3 cp, up", (*copy, f"s3://{BUCKET}/aws")))
    # The first gigabyte costs a new server more, whoever sends it: its memory and files grow.
    first = bench.folder / "first"
    make_checkpoint(first, bench.size_mib // 2, 3)
    bench.quiet(*put(first, f"s3://{BUCKET}/first"))
    bench.fresh("first", "llm-assets-cache")
    for name, command in uploads[::-1] if number % 2 else uploads:
        warm(v1)
        bench.time(name, *command)
    artifact = latest(bench, url)
    bench.fresh("llm-assets-cache")
    cool(v1)
    cool(v2)
    warm(server.data)
    bench.time("s3 get, verified", *ours("get", artifact, "--store", url))
    bench.fresh("llm-assets-cache")
    if aws:
        warm(server.data)
        bench.time("aws s3 cp, down", aws, "s3", "cp", "--only-show-errors", "--recursive",
                   f"s3://{BUCKET}/aws", str(target))  # fmt: skip
        bench.fresh("download")
    if aws and s5cmd:
        warm(server.data)
        bench.time("s5cmd cp, down", s5cmd, "cp", f"s3://{BUCKET}/aws/*", f"{target}/")
        bench.fresh("download")
    if rclone:
        remote = f"seaweed:{BUCKET}/rclone"
        (bench.folder / "rclone.conf").write_text(
            f"[seaweed]\ntype = s3\nprovider = SeaweedFS\nendpoint = {server.endpoint}\n"
            f"access_key_id = {server.key}\nsecret_access_key = {server.secret}\n"
        )
        bench.quiet(rclone, "copy", "--checksum", str(v1), remote)
    warm(v2)
    bench.time("s3 put v2", *put(v2, url))
    if rclone:
        warm(v2)
        bench.time("rclone copy v2", rclone, "copy", "--checksum", str(v2), remote)
    bench.fresh("llm-assets-cache")


def report(bench: Bench) -> bool:
    """Print medians and targets; whether all that could be measured are met."""
    medians = {name: statistics.median(values) for name, values in bench.seconds.items()}
    print(f"\n{'step':48} {'median s':>8} {'peak MiB':>9}")
    for name, seconds in medians.items():
        print(f"{name:48} {seconds:8.2f} {bench.peak_mib[name]:9.0f}")
    print(f"\n{'target':62} {'ratio':>6} {'limit':>6}")
    good = True
    for target in TARGETS:
        if target.ours not in medians or target.theirs not in medians:
            print(f"{target.ours + ' / ' + target.theirs:62} not measured")
            continue
        ratio = medians[target.ours] / medians[target.theirs]
        met = ratio <= target.ratio
        good = good and met
        label = f"{target.ours} / {target.theirs}"
        print(f"{label:62} {ratio:6.2f} {target.ratio:6.2f} {'' if met else ' MISSED'}")
    names = {target.ours for target in TARGETS} & set(medians)
    peak = max((bench.peak_mib[name] for name in names), default=0.0)
    good = good and peak <= MEMORY_MIB
    print(f"{'peak memory of the store, MiB':62} {peak:6.0f} {MEMORY_MIB:6}"
          f" {'' if peak <= MEMORY_MIB else ' MISSED'}")  # fmt: skip
    return good


def main() -> int:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without", action="append", default=[], choices=TOOLS)
    parser.add_argument("--only", choices=["local", "s3"])
    parser.add_argument("--folder", type=Path, help="Where to work; needs ten times the size.")
    parser.add_argument("--json", type=Path, help="Write seconds and memory to this file.")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.folder)))
        bench = Bench(folder, arguments.size_mib)
        bench.tools |= dict.fromkeys(arguments.without)
        missing = [name for name, found in bench.tools.items() if found is None]
        with_s3 = arguments.only != "local" and find_weed() is not None
        if arguments.only != "local" and not with_s3:
            missing.append("weed")
        print(f"missing, and left out: {', '.join(missing) or 'nothing'}")
        v1, v2 = folder / "v1", folder / "v2"
        make_checkpoint(v1, arguments.size_mib, 1)
        make_checkpoint(v2, arguments.size_mib, 2)
        for number in range(arguments.rounds):
            print(f"round {number + 1} of {arguments.rounds}")
            if arguments.only != "s3":
                local_round(bench, v1, v2)
            if with_s3:
                s3_round(bench, number, v1, v2)
        good = report(bench)
        if arguments.json:
            result = {"seconds": bench.seconds, "peak_mib": bench.peak_mib}
            arguments.json.write_text(json.dumps(result, indent=2))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
