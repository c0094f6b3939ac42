"""How long Spark takes until a first answer: a session of ours beside plain PySpark, and a job by its command.

    python bench/spark_start.py [--rounds 3]

Each round starts a process of its own for every contender, with local[2]. `session` is the time from the first line of
the program until the session is there, `first query` the time of the first count after it: ours over a topic of three
messages, PySpark's over a Python data source of its own with three rows, so both start Python workers. `command` is the
wall time of a whole process: `tidelog pipeline verify` over that topic, in a Spark of its own and in one that is kept
(`tidelog pipeline shell --keep`), beside the PySpark program, from its start to its end.
The archive of classes that our sessions use is made in a cache of this benchmark before the rounds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from measuring import Figure, alternate, compared, parser_for, report, scratch_directory, settle

import tidelog

SRC = Path(__file__).resolve().parent.parent / "src"
MASTER = "local[2]"
LIMIT_SECONDS = 300
# An archive is taken once it has not changed for that long.
SETTLED_SECONDS = 3

TIMED = """
import json, sys, time
begin = time.perf_counter()
{start}
there = time.perf_counter()
assert {query}.count() == 3
print(json.dumps([there - begin, time.perf_counter() - there]))
spark.stop()
"""
PLAIN = TIMED.format(
    start="""
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").getOrCreate()
""",
    query="rows_of(spark)",
).replace(
    "there = ",
    """
def rows_of(spark):
    from pyspark.sql.datasource import DataSource, DataSourceReader

    class Three(DataSource):
        @classmethod
        def name(cls):
            return "three"

        def schema(self):
            return "value int"

        def reader(self, schema):
            return Reader()

    class Reader(DataSourceReader):
        def read(self, partition):
            yield from [(0,), (1,), (2,)]

    spark.dataSource.register(Three)
    return spark.read.format("three").load()

there = """,
    1,
)
OURS = TIMED.format(
    start="""
import tidelog
spark = tidelog.spark_session(master="local[2]")
""",
    query='spark.read.format("tidelog").option("root", sys.argv[1]).option("subscribe", "shop/orders").load()',
)


class Programs:
    """Programs that start Spark, in processes of their own, over one small topic and one cache."""

    def __init__(self, root: Path) -> None:
        self.data = root / "data"
        self.times: dict[str, list[tuple[float, float]]] = {"tidelog": [], "PySpark": []}
        self._cache = root / "cache"
        self._cache.mkdir()
        with tidelog.open(self.data) as log:
            log.topic("shop/orders").append_many([b"a", b"b", b"c"], sync=True)

    def run(self, words: list[str]) -> tuple[float, str]:
        """Seconds of a program that must succeed, and what it prints."""
        variables = {"PYTHONPATH": str(SRC), "XDG_CACHE_HOME": str(self._cache), "PYSPARK_PYTHON": sys.executable}
        # Files, not pipes: Java writes the archive when the program has ended, and would hold pipes open meanwhile.
        with (self._cache / "said").open("w+") as said, (self._cache / "problems").open("w+") as problems:
            begin = time.perf_counter()
            code = subprocess.call(
                [sys.executable, *words],
                env={**os.environ, **variables},
                stdout=said,
                stderr=problems,
                timeout=LIMIT_SECONDS,
                cwd=self._cache,
            )
            seconds = time.perf_counter() - begin
            said.seek(0)
            problems.seek(0)
            if code:
                raise RuntimeError(f"{' '.join(words[:5])} ended with {code}: {problems.read()[-2000:]}")
            return seconds, said.read()

    def session(self, name: str) -> float:
        """Seconds of a whole program; those of its parts are kept."""
        program = OURS if name == "tidelog" else PLAIN
        seconds, said = self.run(["-c", program, str(self.data)])
        start, query = json.loads(said.splitlines()[-1])
        self.times[name].append((start, query))
        return seconds

    def pipeline(self, *words: str) -> float:
        """Seconds of a command."""
        return self.run(["-m", "tidelog.cli.main", "pipeline", *words])[0]

    def verify(self) -> float:
        """The same with the least to do."""
        return self.pipeline("verify", "--root", str(self.data), "--master", MASTER)

    def make_archive(self) -> float:
        """Seconds of the first session of a machine; its archive of classes can be used after this."""
        seconds = self.run(["-c", OURS, str(self.data)])[0]
        deadline = time.monotonic() + LIMIT_SECONDS
        while not _is_made(self._cache) and time.monotonic() < deadline:
            time.sleep(1)
        time.sleep(SETTLED_SECONDS)
        return seconds


def _is_made(cache: Path) -> bool:
    """Java writes the file when its program has ended, the first bytes last."""
    for found in cache.glob("tidelog/spark/*.new"):
        with found.open("rb") as file:
            if any(file.read(4)):
                return True
    return False


def measure(programs: Programs, rounds: int) -> tuple[list[Figure], dict[str, float]]:
    """The figures, and the seconds of the first session."""
    first_seconds = programs.make_archive()
    whole = alternate(
        {
            "tidelog": lambda: programs.session("tidelog"),
            "PySpark": lambda: programs.session("PySpark"),
            "verify": programs.verify,
        },
        rounds,
    )
    figures = []
    for number, what in enumerate(("session is there", "first query")):
        each = {name: [times[number] for times in found] for name, found in programs.times.items()}
        figures.append(compared(what, each, "PySpark", 1, unit=" s", digits=2, smaller_is_better=True))
    programs.pipeline("shell", "--keep", "--master", MASTER)
    try:
        programs.verify()
        kept = []
        for _ in range(rounds):
            settle()
            kept.append(programs.verify())
    finally:
        programs.pipeline("shell", "--stop")
    told = {"unit": " s", "digits": 2, "smaller_is_better": True}
    start = {"verify": whole["verify"], "a PySpark program": whole["PySpark"]}
    figures.append(compared("`tidelog pipeline verify`", start, "a PySpark program", 1, ours="verify", **told))
    warm = {"verify": kept, "a session of its own": whole["verify"]}
    figures.append(
        compared("`tidelog pipeline verify`, session kept", warm, "a session of its own", 3, ours="verify", **told)
    )
    return figures, {"first_session_seconds": round(first_seconds, 2)}


def main() -> None:
    """Runs it."""
    parser = parser_for(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with scratch_directory(arguments.dir) as root:
        figures, details = measure(Programs(root), arguments.rounds)
    report("spark_start", figures, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
