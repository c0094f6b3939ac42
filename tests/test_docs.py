"""The documents are held to the code: bytes, names, errors, settings and every example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import S3Server

from tidelog import errors
from tidelog.cli.errors import exit_code_of
from tidelog.codec import encode_document
from tidelog.cold.settings import TierSettings
from tidelog.log.frame import REMOVED_PAYLOAD, encode
from tidelog.log.repair import LOST_PAYLOAD
from tidelog.log.settings import LogSettings
from tidelog.store.settings import MetadataSettings, StoreSettings
from tidelog.testing import POLICIES, FaultyFiles, ManualClock
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import BatchMark, ProducerMark, encode_extension, encode_message
from tidelog.topics.producer.dedup import ProducersSnapshot, ProducerState

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
FORMATS = (DOCS / "formats.md").read_text("utf-8")
ARCHITECTURE = (DOCS / "architecture.md").read_text("utf-8")
OPERATIONS = (DOCS / "reference" / "operations.md").read_text("utf-8")
COLD_TIER = (DOCS / "how-to" / "cold-tier.md").read_text("utf-8")
TESTING = (DOCS / "how-to" / "testing.md").read_text("utf-8")
FOLDERS = ("tutorial", "how-to", "reference", "explanation")
GUIDES = sorted(page for folder in FOLDERS for page in (DOCS / folder).glob("*.md"))
INDEX = (DOCS / "README.md").read_text("utf-8")
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEX_LINE = re.compile(r"((?:[0-9a-f]{2} )*[0-9a-f]{2})  ")
NEW_YEAR_US = 1_767_225_600_000_000
TIMEOUT_SECONDS = 180


def block(text: str, kind: str) -> str:
    """The one fenced block of this kind."""
    (found,) = [content for info, content in BLOCK.findall(text) if info == kind]
    return str(found)


def hex_block(kind: str) -> bytes:
    """The bytes of an annotated block: what stands before the words in each line."""
    matches = [HEX_LINE.match(line) for line in block(FORMATS, kind).splitlines()]
    assert all(matches)
    return b"".join(bytes.fromhex(match[1]) for match in matches if match is not None)


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def written_files() -> dict[str, bytes | None]:
    """All files of a log directory with one message, by path."""
    files = FaultyFiles()
    with LogDirectory(Path("/data"), files=files, clock=ManualClock(NEW_YEAR_US)) as log:
        log.topic("shop/orders").append(b"paid", key=b"order-7", headers={"source": b"web"}, sync=True)
    return files.tree()


def error_classes() -> list[type[errors.TidelogError]]:
    """Every error of ours."""
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in found if issubclass(value, errors.TidelogError)]


def test_the_bytes_of_a_message_are_those_of_the_formats_page() -> None:
    """A reader written from the page alone reads what the code writes."""
    payload = encode_message(b"paid", b"order-7", {"source": b"web"}, NEW_YEAR_US)
    assert encode(7, payload) == hex_block("hex message")


def test_the_bytes_of_an_extension_are_those_of_the_formats_page() -> None:
    """Each kind is drawn as it is."""
    extension = encode_extension(BatchMark(1, 3), ProducerMark(1, 8, "till-4"), NEW_YEAR_US)
    assert extension == hex_block("hex extension")


def test_the_bytes_of_a_lost_offset_are_those_of_the_formats_page() -> None:
    """The frame that a repair leaves in the place of a message is drawn as it is."""
    assert encode(41, LOST_PAYLOAD) == hex_block("hex lost")
    assert encode(41, REMOVED_PAYLOAD) == hex_block("hex removed")


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("json tidelog.json", "/data/tidelog.json"),
        ("json topic.json", "/data/shop/orders/topic.json"),
        ("text wal.ckpt", "/data/shop/orders/wal.ckpt"),
    ],
)
def test_the_documents_on_disk_are_those_of_the_formats_page(kind: str, path: str) -> None:
    """The page shows each document to the letter."""
    assert written_files()[path] == block(FORMATS, kind).encode("utf-8")


def test_the_producers_file_is_that_of_the_formats_page() -> None:
    """What the page shows is what follows from such messages, and is written so."""
    state = ProducerState()
    for sequence, offset in ((7, 0), (8, 1), (10, 2), (11, 3), (12, 4)):
        state.record(2, sequence, offset)
    producer = state.snapshot("till-4", 5)
    assert producer is not None
    snapshot = ProducersSnapshot(as_of_offset=5, last_crc32=1067833283, epoch=0, producers=(producer,))
    assert encode_document("producers", 1, snapshot) == block(FORMATS, "text producers.ckpt").encode("utf-8")


def test_every_file_in_a_log_directory_is_on_the_formats_page() -> None:
    """Nobody finds a file in the directory that the page does not explain."""
    paths = [Path(path) for path, content in written_files().items() if content is not None]
    names = {re.sub(r"-\d{20}$", "-{offset:020}", path.name) for path in paths}
    assert {
        name for name in names if f"\n      {name} " not in FORMATS and f"\n        {name} " not in FORMATS
    } == set()


def test_architecture_names_every_package_and_only_modules_that_exist() -> None:
    """A reader finds each package on the page, and every module that the page names."""
    source = ROOT / "src" / "tidelog"
    packages = {str(path.parent.relative_to(source)) for path in source.rglob("__init__.py")} - {"."}
    top = {package for package in packages if "/" not in package}
    named = set(re.findall(r"`((?:\w+/)+|(?:\w+/)*\w+\.(?:py|c))`", ARCHITECTURE))
    assert top - {name.partition("/")[0] for name in named} == set()
    assert {name for name in named if not (source / name).exists()} == set()


def test_index_links_every_page() -> None:
    """Nobody has to guess a path: the index leads to every page of the documentation."""
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - {"README.md"}
    decisions = {page for page in pages if page.startswith("decisions/") and page != "decisions/README.md"}
    linked = set(re.findall(r"\]\(([^)#\s]+)[^)]*\)", INDEX))
    assert pages - decisions - linked == set()


def test_anchors_of_links_lead_to_a_heading() -> None:
    """A link to a part of a page finds that part, as GitHub names it."""
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    links = [
        (page, target, anchor)
        for page in pages
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", page.read_text("utf-8"))
    ]
    assert links
    broken = [
        f"{page.name}: {target}#{anchor}"
        for page, target, anchor in links
        if anchor not in anchors(page if not target else page.parent / target)
    ]
    assert broken == []


def error_kinds() -> list[type[errors.TidelogError]]:
    """What the errors are sorted into; other tests may have made classes of their own."""
    return [kind for kind in errors.TidelogError.__subclasses__() if kind.__module__ == errors.__name__]


def test_every_error_is_explained() -> None:
    """The operations guide says of each error what to do about it."""
    names = {error.__name__ for error in error_classes()} - {"TidelogError"}
    kinds = {error.__name__ for error in error_kinds()}
    assert {name for name in names - kinds if f"\n**`{name}`.** " not in OPERATIONS} == set()
    assert {name for name in kinds if f"\n### {name}: " not in OPERATIONS} == set()


def test_the_exit_codes_are_those_of_the_command_line() -> None:
    """The table of error classes shows what a script will see."""
    listed = dict(re.findall(r"^\| `(\w+)` \|.*\| (\d+) \|$", OPERATIONS, re.MULTILINE))
    codes = {error.__name__: str(int(exit_code_of(error("x")))) for error in error_kinds()}
    assert listed == codes


def test_every_setting_is_listed_with_its_default() -> None:
    """The table of settings is complete and has the right numbers."""
    listed = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", OPERATIONS, re.MULTILINE))
    settings = LogSettings()
    assert listed == {name: str(getattr(settings, name)) for name in settings.__struct_fields__}


def test_every_setting_of_the_cold_tier_is_listed() -> None:
    """The guide has them all, numbers with their default."""
    listed = dict(re.findall(r"^\| `(\w+)` \| (\d+) \|", COLD_TIER, re.MULTILINE))
    settings = TierSettings()
    values = {name: getattr(settings, name) for name in settings.__struct_fields__}
    numbers = {name: str(value) for name, value in values.items() if type(value) is int}
    assert listed == numbers
    names = {*settings.__struct_fields__, *StoreSettings.__struct_fields__, *MetadataSettings.__struct_fields__}
    assert {name for name in names if f"`{name}`" not in COLD_TIER} == set()


S3_EXAMPLES = [
    (page.name, text)
    for page in [ROOT / "README.md", *GUIDES]
    for info, text in BLOCK.findall(page.read_text("utf-8"))
    if info == "python s3"
]


@pytest.mark.parametrize(("page", "example"), S3_EXAMPLES, ids=[page for page, _ in S3_EXAMPLES])
def test_the_examples_with_a_bucket_run(page: str, example: str, tmp_path: Path, s3_server: S3Server) -> None:
    """Every example with s3:// works as it stands, given a bucket and the usual variables."""
    settings = s3_server.settings()
    assert settings.store_secret_access_key is not None
    environment = {
        "PYTHONPATH": str(ROOT / "src"),
        "AWS_ENDPOINT_URL": str(settings.store_endpoint),
        "AWS_ACCESS_KEY_ID": str(settings.store_access_key_id),
        "AWS_SECRET_ACCESS_KEY": settings.store_secret_access_key.reveal(),
    }
    code = example.replace("s3://tidelog", s3_server.url(f"docs-{page.replace('.', '-')}"))
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert finished.returncode == 0, f"{page}:\n{finished.stderr}"


def test_every_crash_policy_is_explained() -> None:
    """The guide to the test kit says what each policy leaves."""
    assert {policy for policy in POLICIES if f"\n| `{policy}` | " not in TESTING} == set()


EXAMPLES = [
    (guide.name, number, text)
    for guide in GUIDES
    for number, text in enumerate(code for info, code in BLOCK.findall(guide.read_text("utf-8")) if info == "python")
]


@pytest.mark.parametrize(("guide", "number", "example"), EXAMPLES, ids=[f"{guide}-{n}" for guide, n, _ in EXAMPLES])
def test_the_examples_in_the_guides_run(
    guide: str, number: int, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every Python block of a guide works as it stands, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    exec(compile(example, f"{guide}, example {number}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("script", ["make-api-reference", "make-kafka-reference", "make-http-reference"])
def test_the_generated_references_are_up_to_date(script: str) -> None:
    """A page has every name as the source declares it; the script writes it again."""
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert result.returncode == 0, result.stderr
