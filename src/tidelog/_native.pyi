"""The loops that are C, `native/module.c`: positions, lengths and other arrays travel as bytes.

Buffers are hostile: whatever is in them, an answer or an exception comes back. tests/oracles has each of these
functions in Python, and says what it does.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

from tidelog.engine.btree.page import Cell, Page, Pages
from tidelog.engine.mvcc.known_results import Found, Open
from tidelog.engine.mvcc.versions import BucketVersion, Other, Pointer, Row, Seen
from tidelog.engine.sst.sstable import Source
from tidelog.engine.wal.scan_values import Stored
from tidelog.log.frame import Buffer

_PlainProduce = tuple[tuple[str, int, int, int], int, int, int, int, int, int, int, int, int, int, int]
_T = TypeVar("_T")
_BytesColumn = tuple[Buffer | None, Buffer, Buffer, int, int]
_ListsColumn = tuple[Buffer | None, Buffer, _BytesColumn, _BytesColumn, int, int]
_NumbersColumn = tuple[Buffer | None, Buffer, int]

CRC32_BY: Final[str]

# frames.c

def crc32(data: Buffer, value: int = 0, /) -> int: ...
def crc32_portable(data: Buffer, value: int = 0, /) -> int: ...
def frame_crc(offset: int, payload: Buffer, /) -> int: ...
def encode_many(first_offset: int, payloads: Iterable[Buffer], /) -> tuple[bytes, bytes, bytes]: ...
def scan_frames(
    buffer: Buffer, position: int, offset: int, max_payload: int, payload_only: bool = False, /
) -> tuple[bytes, bytes, int, int]: ...
def find_frame(
    buffer: Buffer, position: int, min_offset: int, max_offset: int, max_payload: int, payload_only: bool = False, /
) -> tuple[int, int] | None: ...
def payloads(buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /) -> list[bytes]: ...
def field_range(buffer: Buffer, positions: Buffer, lengths: Buffer, field: int, /) -> tuple[int, int] | None: ...
def first_at_least(
    buffer: Buffer, positions: Buffer, lengths: Buffer, field: int, minimum: int, start: int, /
) -> int: ...
def renumber(buffer: Buffer, positions: Buffer, lengths: Buffer, first_offset: int, /) -> tuple[bytes, bytes]: ...
def renumber_in_place(buffer: Buffer, positions: Buffer, lengths: Buffer, first_offset: int, /) -> None: ...
def join_frames(
    first_offset: int, pieces: Iterable[tuple[Buffer, Buffer, Buffer]], /
) -> tuple[bytes, bytes, bytes]: ...
def measure_frames(buffer: Buffer, positions: Buffer, lengths: Buffer, /) -> tuple[int, int]: ...

# envelopes.c

def encode(
    value: Buffer | None,
    key: Buffer | None,
    headers: Mapping[str, Buffer | None] | Sequence[tuple[str, Buffer | None]] | None,
    timestamp_us: int,
    extension: Buffer = b"",
    /,
) -> bytes: ...
def encode_values(
    values: Sequence[object], timestamp_us: int, name: bytes | None, epoch: int, sequence: int, /
) -> list[bytes] | None: ...
def decode_frames(
    message_type: Callable[..., _T],
    first_offset: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    start: int,
    stop: int,
    /,
) -> list[_T]: ...
def decode_payloads(message_type: Callable[..., _T], first_offset: int, payloads: Iterable[Buffer], /) -> list[_T]: ...
def extensions(
    buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> list[bytes | None] | None: ...
def newest_producers(
    first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> list[tuple[bytes, int]]: ...
def gather_columns(
    first_offset: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    start: int,
    stop: int,
    wanted: int,
    max_rows: int,
    max_bytes: int,
    /,
) -> tuple[int, int, int, tuple[bytes | None, ...]]: ...
def encode_columns(
    first_offset: int,
    count: int,
    timestamp_us: int,
    max_message_bytes: int,
    values: _BytesColumn,
    keys: _BytesColumn | None,
    headers: _ListsColumn | None,
    timestamps: _NumbersColumn | None,
    /,
) -> tuple[int, bytes, bytes, bytes] | tuple[int, int, int]: ...
def frames_digest(
    first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> int: ...
def partitions_of(count: int, keys: _BytesColumn | None, partitions: int, turn: int, /) -> tuple[bytes, int]: ...
def murmur2(key: Buffer, /) -> int: ...

# pages.c

def format_page(page: bytearray, page_id: int, level: int, /) -> None: ...
def insert(page: bytearray, key: bytes, value: bytes, lsn: int, /) -> None: ...
def replace(page: bytearray, key: bytes, value: bytes, lsn: int, /) -> None: ...
def remove(page: bytearray, key: bytes, lsn: int, /) -> None: ...
def set_header(page: bytearray, right: int, lsn: int, /) -> None: ...
def get(page: Page, key: bytes, /) -> bytes | None: ...
def cells(page: Page, /) -> list[Cell]: ...
def page_rows(page: Page, /) -> tuple[int, bytes]: ...
def compact_image(page: Page, /) -> bytes: ...
def set_image(page: bytearray, image: bytes, /) -> None: ...
def sealed(page: Page, /) -> bytes: ...
def verify_crc(page: Page, /) -> bool: ...
def check_page(page: Page, page_id: int, /) -> str | None: ...
def put_back(pages: Pages, copies: list[tuple[int, Page | None]], /) -> None: ...
def find(pages: Pages, root: int, key: bytes, /) -> Cell | int | None: ...
def scan_tree(
    pages: Pages, root: int, start: bytes, stop: bytes | None, limit: int, /
) -> tuple[list[Cell], bytes | None] | int: ...
def skip(pages: Pages, root: int, key: bytes, /) -> bytes | int | None: ...
def place(
    pages: Pages, root: int, key: bytes, cell_bytes: int, image_floor: int, /
) -> int | tuple[int, int] | tuple[int, tuple[int, ...]]: ...
def plan_split(pages: Pages, path: tuple[int, ...], key: bytes, next_page: int, /) -> tuple[bytes, int]: ...
def redo(pages: Pages, updates: Buffer, lsn: int, /) -> int: ...
def redo_frames(
    pages: Pages,
    rec_lsns: dict[int, int],
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    start: int,
    /,
) -> tuple[int, int, bool]: ...
def decode_updates(updates: Buffer, lsn: int, /) -> list[tuple[int, int, bytes, bytes, bytes]]: ...
def record_updates(record: Buffer, lsn: int, /) -> bytes: ...
def gather_changes(
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    indexes: Buffer,
    start: int,
    max_rows: int,
    /,
) -> tuple[int, int, list[int], tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]]: ...
def sound_records(
    first_lsn: int, buffer: Buffer, positions: Buffer, lengths: Buffer, /
) -> tuple[int, int, list[int]]: ...
def find_version(pages: Pages, root: int, bucket: str, key: str, seq: int, /) -> Pointer | Other | int | None: ...
def list_seen(
    pages: Pages,
    root: int,
    start: bytes,
    stop: bytes,
    seq: int,
    created_seq: int,
    created_order: int,
    limit: int,
    columns: int,
    is_reverse: bool,
    prefix_bytes: int,
    delimiter: bytes,
    /,
) -> Seen: ...
def survey(
    first_lsn: int, buffer: Buffer, positions: Buffer, lengths: Buffer, open_seq: int, open_lsn: int, /
) -> tuple[int, int, int, int, list[int]]: ...
def entry_ends(
    first_lsn: int, buffer: Buffer, positions: Buffer, lengths: Buffer, /
) -> tuple[bytes, bytes, list[tuple[int, int, int]]]: ...
def results_in(first_lsn: int, buffer: Buffer, positions: Buffer, lengths: Buffer, open_entry: Open, /) -> Found: ...
def results_of(first_lsn: int, records: list[bytes], open_entry: Open, /) -> Found: ...
def check_rows(raw: bytes, count: int, after_key: bytes, has_places: bool, /) -> bytes: ...
def find_row(raw: bytes, key: bytes, /) -> tuple[bytes, bytes] | None: ...
def merge_rows(sources: tuple[Source, ...], drops_removed: bool, /) -> tuple[bytes, int, tuple[int, ...]]: ...
def fill_page(page: bytearray, raw: bytes, at: int, reserved_bytes: int, lsn: int, /) -> tuple[int, int]: ...

# entries.c

def select_entries(
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    start: int,
    stop: int,
    owned_stop: int,
    dead: Buffer,
    first_seq: int,
    last_seq: int,
    open_seq: int,
    removals: bool,
    /,
) -> tuple[int, bytes, bytes, int, bool]: ...
def gather_entries(
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    indexes: Buffer,
    start: int,
    wanted: int,
    max_rows: int,
    max_bytes: int,
    /,
) -> tuple[int, int, int, tuple[bytes, ...], tuple[bytes, ...]]: ...
def metadata_columns(ends: bytes, data: bytes, /) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes] | None: ...
def encode_plain_entries(
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    indexes: Buffer,
    start: int,
    max_records: int,
    max_bytes: int,
    /,
) -> tuple[int, int, tuple[bytes, bytes, bytes, bytes]]: ...
def gather_versions(
    raw: Buffer,
    seq: int,
    all_versions: bool,
    start: bytes,
    stop: bytes,
    settled: bytes,
    bucket_ends: Buffer,
    bucket_names: Buffer,
    bucket_seqs: Buffer,
    bucket_orders: Buffer,
    /,
) -> tuple[int, bytes, tuple[bytes, ...], tuple[bytes, ...]]: ...
def gather_rows(
    raw: Buffer,
    seq: int,
    all_versions: bool,
    start: bytes,
    stop: bytes,
    settled: bytes,
    bucket_ends: Buffer,
    bucket_names: Buffer,
    bucket_seqs: Buffer,
    bucket_orders: Buffer,
    columns: int,
    /,
) -> tuple[bytes, list[Row]]: ...

# ranges.c

def read_ranges(descriptor: int, position: int, ranges: bytes, /) -> bytes: ...

# scan_values.c

def cut_rows(rows: list[Row], start: int, most_rows: int, most_bytes: int, /) -> int: ...
def unfinished(values: list[Row | Stored | None], /) -> list[int]: ...
def start_values(rows: list[Row], /) -> tuple[list[Row | Stored | None], int]: ...
def place_in_log(
    rows: list[Row],
    values: list[Row | Stored | None],
    places: bytearray,
    first_unit: int,
    starts: Buffer,
    ends: Buffer,
    start: int,
    /,
) -> int: ...
def place_in_index(
    rows: list[Row],
    values: list[Row | Stored | None],
    places: bytearray,
    first_unit: int,
    prefix: bytes,
    blocks: list[bytes],
    is_reverse: bool,
    /,
) -> int: ...
def group_places(
    values: list[Row | Stored | None], places: bytearray, gap_bytes: int, range_bytes: int, /
) -> list[tuple[int, int, int, bytes]]: ...
def join_places(
    values: list[Row | Stored | None], places: bytearray, gap_bytes: int, most_bytes: int, /
) -> list[tuple[int, bytes, bytes]]: ...
def take_values(
    rows: list[Row],
    values: list[Row | Stored | None],
    places: bytearray,
    indexes: bytes,
    data: Buffer,
    first_byte: int,
    /,
) -> int: ...

# records.c

def object_key(bucket: str, name: str, seq: int, /) -> bytes: ...
def put_record(
    seq: int,
    flags: int,
    previous_lsn: int,
    time_us: int,
    order: int,
    bucket: str,
    name: str,
    data: bytes,
    page: int,
    lsn: int,
    position: int,
    /,
) -> tuple[bytes, bytes]: ...
def stored_record(
    seq: int,
    flags: int,
    previous_lsn: int,
    time_us: int,
    order: int,
    bucket: str,
    name: str,
    stored: bytes,
    page: int,
    lsn: int,
    position: int,
    codec: int,
    size: int,
    crc: int,
    is_inline: bool,
    /,
) -> tuple[bytes, bytes]: ...
def count_cells(cells: list[tuple[bytes, bytes]], usage: array[int], /) -> list[bytes]: ...
def pointing_cells(
    cells: list[tuple[bytes, bytes]], first_lsn: int, below_lsn: int, last_seq: int, /
) -> list[tuple[bytes, bytes]]: ...
def judge_cells(
    cells: list[tuple[bytes, bytes]],
    is_last: bool,
    horizon: int,
    keep_versions: int,
    created: dict[bytes, BucketVersion],
    usage: array[int],
    /,
) -> tuple[int, list[bytes], int, int, list[tuple[bytes, bytes]], list[bytes]]: ...
def cell_parts(value: bytes, /) -> tuple[int, int, int, int, int, int, int, int, bytes | None] | None: ...
def operation_head(
    flags: int,
    time_us: int,
    crc: int,
    op: int,
    codec: int,
    seq: int,
    previous_lsn: int,
    order: int,
    size: int,
    stored_bytes: int,
    *lengths: int,
) -> bytes: ...
def plain_data(stored: bytes, size: int, crc: int, /) -> bytes | None: ...

# record_batches.c

def crc32c(data: Buffer, value: int = 0, /) -> int: ...
def crc32c_portable(data: Buffer, value: int = 0, /) -> int: ...
def records_to_frames(
    records: Buffer,
    count: int,
    first_offset: int,
    base_timestamp_ms: int,
    time_us: int | None,
    is_atomic: bool,
    producer: bytes,
    max_payload: int,
    /,
) -> tuple[bytearray, bytes, bytes] | tuple[int, int]: ...
def produce_requests(received: list[bytes], max_payload: int, /) -> list[tuple[list[_PlainProduce], int]]: ...
def batches_to_frames(batches: list[tuple[bytes, int, int]], max_payload: int, /) -> tuple[bytearray, bytes, bytes]: ...
def frames_to_batches(
    first_offset: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    start: int,
    stop: int,
    max_batch_bytes: int,
    leader_epoch: int,
    /,
) -> bytes: ...
def producer_batches(
    first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> list[tuple[int, int, int, int, int, int, int, int, int]]: ...
def transaction_marks(
    first_offset: int, buffer: Buffer, positions: Buffer, lengths: Buffer, start: int, stop: int, /
) -> list[tuple[int, int, int, int, int]] | None: ...
def payload_transaction_marks(
    first_offset: int, payloads: Sequence[bytes], /
) -> list[tuple[int, int, int, int, int]] | None: ...

# tree_rows.c

def order_rows(columns: tuple[_BytesColumn | tuple[Buffer | None, Buffer, int, int], ...], count: int, /) -> bytes: ...
def survey_rows(
    keys: _BytesColumn,
    cells: _BytesColumn,
    count: int,
    seq: int,
    every: int,
    settled: bytes,
    bucket_ends: Buffer,
    bucket_names: Buffer,
    bucket_seqs: Buffer,
    bucket_orders: Buffer,
    /,
) -> tuple[bytes, int, bytes, list[bytes]]: ...
def judge_rows(
    keys: _BytesColumn,
    cells: _BytesColumn,
    count: int,
    horizon: int,
    keep_versions: int,
    bucket_ends: Buffer,
    bucket_names: Buffer,
    bucket_seqs: Buffer,
    bucket_orders: Buffer,
    /,
) -> bytes: ...
def point_rows(
    keys: _BytesColumn, cells: _BytesColumn, count: int, window_bytes: int, cuts: Buffer, /
) -> tuple[int, tuple[bytes, bytes, bytes]]: ...
def place_units(keys: _BytesColumn, count: int, window_bytes: int, cuts: Buffer, /) -> tuple[bytes, bytes]: ...
def merge_values(
    positions: Buffer, keys: _BytesColumn, values: _BytesColumn, count: int, /
) -> tuple[int, tuple[bytes, ...]]: ...
def gather_values(
    first_lsn: int,
    buffer: Buffer,
    positions: Buffer,
    lengths: Buffer,
    lsns: Buffer,
    sizes: Buffer,
    stored: Buffer,
    crcs: Buffer,
    codecs: Buffer,
    start: int,
    stop: int,
    /,
) -> tuple[bytes, bytes]: ...
def cut_values(
    first_byte: int,
    buffer: Buffer,
    places: Buffer,
    lengths: Buffer,
    lsns: Buffer,
    sizes: Buffer,
    stored: Buffer,
    crcs: Buffer,
    codecs: Buffer,
    start: int,
    stop: int,
    /,
) -> tuple[bytes, bytes]: ...
def block_rows(raw: bytes, has_places: bool, /) -> tuple[int, tuple[bytes, bytes, bytes, bytes, bytes]]: ...
def pack_rows(
    keys: _BytesColumn, values: _BytesColumn, count: int, start: int, target_bytes: int, after_key: bytes, /
) -> tuple[int, bytes]: ...
def file_numbers(keys: _BytesColumn, count: int, cuts: tuple[bytes, ...], /) -> bytes: ...
def join_versions(cells: _BytesColumn, pointers: _BytesColumn, count: int, /) -> tuple[bytes, bytes]: ...
def encode_pointers(codecs: Buffer, blob_files: Buffer, places: Buffer, stored: Buffer, /) -> bytes: ...
def blob_directory(positions: Buffer, stored: Buffer, crcs: Buffer, /) -> bytes: ...
def position_keys(positions: Buffer, /) -> bytes: ...
def said_places(
    raw: bytes, is_values: bool, blob_files: int, /
) -> tuple[int, tuple[bytes, bytes, bytes, bytes, bytes]]: ...
def sound_blob_file(
    data: bytes, places: Buffer, sources: Buffer, said: _BytesColumn, /
) -> tuple[int, int, int, int, int, list[int]] | None: ...
