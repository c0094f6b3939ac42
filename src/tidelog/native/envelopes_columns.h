/* Frames to the buffers of Arrow columns: one pass checks, measures and writes what has a fixed size, one pass copies.

   The first pass keeps the places of keys, values and headers aside, so the second reads no length from the frames again.
   `topics/columns.py` says what each buffer is; tests/oracles/columns.py defines every answer. */

#ifndef TIDELOG_ENVELOPES_COLUMNS_H
#define TIDELOG_ENVELOPES_COLUMNS_H

#include "crc32.h"
#include "envelopes_decode.h"
#include "envelopes_encode.h"
#include "envelopes_parse.h"
#include "native.h"

#define LOST_BYTE 0
#define REMOVED_BYTE 1
#define CONTROL_BYTE 2
#define CONTROL_BYTES 24
#define MAX_COLUMN_BYTES INT32_MAX
/* What a row costs in the first pass, as a measure of whether the GIL is worth giving away. */
#define ROW_WORK_BYTES 64

enum { WANT_OFFSETS = 1, WANT_TIMESTAMPS = 2, WANT_KEYS = 4, WANT_VALUES = 8, WANT_HEADERS = 16 };

/* Why the first pass ended. The first four are answers, the others are raised. */
typedef enum { TOOK_ALL, REACHED_LIMIT, MET_LOST, MET_FAULT, MET_TOO_LARGE, MET_OUTSIDE, NO_MEMORY } End;

enum {
    OFFSETS,
    TIMESTAMPS,
    KEY_VALIDITY,
    KEY_OFFSETS,
    KEY_DATA,
    VALUE_VALIDITY,
    VALUE_OFFSETS,
    VALUE_DATA,
    LIST_VALIDITY,
    LIST_OFFSETS,
    NAME_OFFSETS,
    NAME_DATA,
    CONTENT_VALIDITY,
    CONTENT_OFFSETS,
    CONTENT_DATA,
    BUFFER_COUNT,
};

typedef struct {
    const uint8_t *key, *value;
} RowPlace;

typedef struct {
    const uint8_t *at; /* of the name; the content follows it */
    uint32_t name_bytes, content_bytes;
    int is_null;
} HeaderPlace;

typedef struct {
    Places places;
    long long first_offset;
    size_t start, stop, wanted, max_rows, max_bytes;
    size_t capacity; /* rows that the buffers have room for */
    PyObject *buffers[BUFFER_COUNT];
    uint8_t *at[BUFFER_COUNT];
    RowPlace *rows;
    HeaderPlace *headers;
    size_t header_count, header_capacity;
    /* what was taken so far */
    size_t index, row_count, key_count, value_count, null_header_count;
    uint64_t key_bytes, value_bytes, block_bytes, name_bytes;
} Gather;

/* ---- the first pass ---- */

static int header_keep(Gather *gather, Slice name, Slice content, int is_null) {
    if (gather->header_count == gather->header_capacity) {
        size_t capacity = gather->header_capacity == 0 ? 256 : 2 * gather->header_capacity;
        HeaderPlace *headers = PyMem_RawRealloc(gather->headers, capacity * sizeof *headers);
        if (headers == NULL) {
            return -1;
        }
        gather->headers = headers;
        gather->header_capacity = capacity;
    }
    HeaderPlace place = {name.data, (uint32_t)name.size, (uint32_t)content.size, is_null};
    gather->headers[gather->header_count++] = place;
    gather->null_header_count += (size_t)is_null;
    gather->name_bytes += name.size;
    return 0;
}

/* Headers are checked even if nobody wants them: what is damaged must not depend on the columns that are read. */
static End take_headers(Gather *gather, const Parts *parts) {
    Slice block = parts->block, name, content;
    int wanted = (gather->wanted & WANT_HEADERS) != 0;
    for (size_t index = 0; index < parts->header_count; index++) {
        if (next_header(&block, &name, &content) != SOUND || !is_utf8(name)) {
            return MET_FAULT;
        }
        if (wanted && header_keep(gather, name, content, header_is_null(parts, index)) < 0) {
            return NO_MEMORY;
        }
    }
    return block.size == 0 ? TOOK_ALL : MET_FAULT;
}

/* What a row adds to the columns with data. With that bounded, no single column can outgrow its 32-bit offsets. */
static uint64_t row_bytes(const Gather *gather, const Parts *parts) {
    return (gather->wanted & WANT_KEYS ? parts->key.size : 0) + (gather->wanted & WANT_VALUES ? parts->value.size : 0) +
           (gather->wanted & WANT_HEADERS ? parts->block.size : 0);
}

static End check_room(const Gather *gather, const Parts *parts) {
    uint64_t bytes = row_bytes(gather, parts);
    if (gather->row_count == 0) {
        return bytes > MAX_COLUMN_BYTES ? MET_TOO_LARGE : TOOK_ALL; /* at least one row, or nothing would ever move */
    }
    uint64_t taken = gather->key_bytes + gather->value_bytes + gather->block_bytes;
    return taken + bytes > gather->max_bytes ? REACHED_LIMIT : TOOK_ALL;
}

static inline void set_bit(uint8_t *bits, size_t index) {
    bits[index / 8] |= (uint8_t)(1 << index % 8);
}

static void write_row(Gather *gather, const Parts *parts) {
    size_t row = gather->row_count++;
    gather->rows[row] = (RowPlace){parts->key.data, parts->value.data};
    if (gather->wanted & WANT_OFFSETS) {
        store_u64(gather->at[OFFSETS] + 8 * row, (uint64_t)gather->first_offset + gather->index);
    }
    if (gather->wanted & WANT_TIMESTAMPS) {
        store_u64(gather->at[TIMESTAMPS] + 8 * row, (uint64_t)parts->timestamp_us);
    }
    if (gather->wanted & WANT_KEYS) {
        if (parts->has_key) {
            gather->key_count++;
            set_bit(gather->at[KEY_VALIDITY], row);
        }
        gather->key_bytes += parts->key.size;
        store_u32(gather->at[KEY_OFFSETS] + 4 * row + 4, (uint32_t)gather->key_bytes);
    }
    if (gather->wanted & WANT_VALUES) {
        if (!value_is_null(parts)) {
            gather->value_count++;
            set_bit(gather->at[VALUE_VALIDITY], row);
        }
        gather->value_bytes += parts->value.size;
        store_u32(gather->at[VALUE_OFFSETS] + 4 * row + 4, (uint32_t)gather->value_bytes);
    }
    if (gather->wanted & WANT_HEADERS) {
        if (parts->header_count > 0) {
            set_bit(gather->at[LIST_VALIDITY], row);
        }
        gather->block_bytes += parts->block.size;
        store_u32(gather->at[LIST_OFFSETS] + 4 * row + 4, (uint32_t)gather->header_count);
    }
}

/* Of a row that is not taken nothing is kept: not the headers before the one that is damaged. */
static inline End take_row(Gather *gather, Slice payload) {
    Parts parts;
    size_t header_count = gather->header_count, null_header_count = gather->null_header_count;
    uint64_t name_bytes = gather->name_bytes;
    if (parse_envelope(payload, &parts) != SOUND) {
        return MET_FAULT;
    }
    End end = TOOK_ALL;
    if ((parts.header_count | parts.block.size) != 0) {
        end = take_headers(gather, &parts);
    }
    end = end == TOOK_ALL ? check_room(gather, &parts) : end;
    if (end == TOOK_ALL) {
        write_row(gather, &parts);
    } else {
        gather->header_count = header_count;
        gather->null_header_count = null_header_count;
        gather->name_bytes = name_bytes;
    }
    return end;
}

/* Goes on until `stop`, a limit, a lost offset or what is no message; `index` is then the first frame that was not taken. */
static End take_rows(Gather *gather) {
    for (gather->index = gather->start; gather->index < gather->stop; gather->index++) {
        Slice payload;
        if (gather->row_count == gather->max_rows) {
            return REACHED_LIMIT;
        }
        if (!place_is_inside(&gather->places, gather->index, &payload)) {
            return MET_OUTSIDE;
        }
        if ((payload.size == 1 && payload.data[0] == REMOVED_BYTE) ||
            (payload.size == CONTROL_BYTES && payload.data[0] == CONTROL_BYTE)) {
            continue;
        }
        if (payload.size == 1 && payload.data[0] == LOST_BYTE) {
            return MET_LOST;
        }
        End end = take_row(gather, payload);
        if (end != TOOK_ALL) {
            return end;
        }
    }
    return TOOK_ALL;
}

/* ---- the second pass ---- */

static void copy_keys(Gather *gather) {
    const uint8_t *offsets = gather->at[KEY_OFFSETS];
    uint8_t *to = gather->at[KEY_DATA];
    for (size_t row = 0; row < gather->row_count; row++) {
        size_t size = load_u32(offsets + 4 * row + 4) - load_u32(offsets + 4 * row);
        to = copy_slice(to, (Slice){gather->rows[row].key, size});
    }
}

static void copy_values(Gather *gather) {
    const uint8_t *offsets = gather->at[VALUE_OFFSETS];
    uint8_t *to = gather->at[VALUE_DATA];
    for (size_t row = 0; row < gather->row_count; row++) {
        size_t size = load_u32(offsets + 4 * row + 4) - load_u32(offsets + 4 * row);
        to = copy_slice(to, (Slice){gather->rows[row].value, size});
    }
}

static void copy_headers(Gather *gather) {
    uint8_t *name_to = gather->at[NAME_DATA], *content_to = gather->at[CONTENT_DATA];
    uint32_t name_end = 0, content_end = 0;
    store_u32(gather->at[NAME_OFFSETS], 0);
    store_u32(gather->at[CONTENT_OFFSETS], 0);
    for (size_t index = 0; index < gather->header_count; index++) {
        HeaderPlace header = gather->headers[index];
        if (gather->null_header_count > 0 && !header.is_null) {
            set_bit(gather->at[CONTENT_VALIDITY], index);
        }
        name_to = copy_slice(name_to, (Slice){header.at, header.name_bytes});
        content_to = copy_slice(content_to, (Slice){header.at + header.name_bytes, header.content_bytes});
        store_u32(gather->at[NAME_OFFSETS] + 4 * index + 4, name_end += header.name_bytes);
        store_u32(gather->at[CONTENT_OFFSETS] + 4 * index + 4, content_end += header.content_bytes);
    }
}

static void copy_columns(Gather *gather) {
    if (gather->wanted & WANT_KEYS) {
        copy_keys(gather);
    }
    if (gather->wanted & WANT_VALUES) {
        copy_values(gather);
    }
    if (gather->wanted & WANT_HEADERS) {
        copy_headers(gather);
    }
}

/* ---- buffers ---- */

static int buffer_make(Gather *gather, int which, size_t size) {
    PyObject *buffer = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (buffer == NULL) {
        return -1;
    }
    gather->buffers[which] = buffer;
    gather->at[which] = (uint8_t *)PyBytes_AS_STRING(buffer);
    return 0;
}

static int buffer_make_zeroed(Gather *gather, int which, size_t size) {
    if (buffer_make(gather, which, size) < 0) {
        return -1;
    }
    memset(gather->at[which], 0, size);
    return 0;
}

static int buffer_shrink(Gather *gather, int which, size_t size) {
    if (gather->buffers[which] == NULL || (size_t)PyBytes_GET_SIZE(gather->buffers[which]) == size) {
        return 0;
    }
    if (_PyBytes_Resize(&gather->buffers[which], (Py_ssize_t)size) < 0) {
        return -1;
    }
    gather->at[which] = (uint8_t *)PyBytes_AS_STRING(gather->buffers[which]);
    return 0;
}

static int offsets_make(Gather *gather, int which) {
    if (buffer_make(gather, which, 4 * (gather->capacity + 1)) < 0) {
        return -1;
    }
    store_u32(gather->at[which], 0);
    return 0;
}

/* What the first pass writes into: as large as it can become. */
static int make_fixed_buffers(Gather *gather) {
    size_t wanted = gather->wanted, capacity = gather->capacity, bitmap_bytes = (capacity + 7) / 8;
    gather->rows = PyMem_RawMalloc((capacity + 1) * sizeof *gather->rows);
    if (gather->rows == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if ((wanted & WANT_OFFSETS && buffer_make(gather, OFFSETS, 8 * capacity) < 0) ||
        (wanted & WANT_TIMESTAMPS && buffer_make(gather, TIMESTAMPS, 8 * capacity) < 0)) {
        return -1;
    }
    if (wanted & WANT_VALUES &&
        (buffer_make_zeroed(gather, VALUE_VALIDITY, bitmap_bytes) < 0 || offsets_make(gather, VALUE_OFFSETS) < 0)) {
        return -1;
    }
    if (wanted & WANT_KEYS &&
        (buffer_make_zeroed(gather, KEY_VALIDITY, bitmap_bytes) < 0 || offsets_make(gather, KEY_OFFSETS) < 0)) {
        return -1;
    }
    if (wanted & WANT_HEADERS &&
        (buffer_make_zeroed(gather, LIST_VALIDITY, bitmap_bytes) < 0 || offsets_make(gather, LIST_OFFSETS) < 0)) {
        return -1;
    }
    return 0;
}

static int shrink_fixed_buffers(Gather *gather) {
    size_t rows = gather->row_count, bitmap_bytes = (rows + 7) / 8;
    if (gather->wanted & WANT_KEYS && gather->key_count == rows) {
        Py_CLEAR(gather->buffers[KEY_VALIDITY]); /* every row has a key */
    }
    if (gather->wanted & WANT_VALUES && gather->value_count == rows) {
        Py_CLEAR(gather->buffers[VALUE_VALIDITY]);
    }
    return buffer_shrink(gather, OFFSETS, 8 * rows) < 0 || buffer_shrink(gather, TIMESTAMPS, 8 * rows) < 0 ||
                   buffer_shrink(gather, KEY_VALIDITY, bitmap_bytes) < 0 ||
                   buffer_shrink(gather, KEY_OFFSETS, 4 * (rows + 1)) < 0 ||
                   buffer_shrink(gather, VALUE_VALIDITY, bitmap_bytes) < 0 ||
                   buffer_shrink(gather, VALUE_OFFSETS, 4 * (rows + 1)) < 0 ||
                   buffer_shrink(gather, LIST_VALIDITY, bitmap_bytes) < 0 ||
                   buffer_shrink(gather, LIST_OFFSETS, 4 * (rows + 1)) < 0
               ? -1
               : 0;
}

/* What the second pass writes into, to the byte. */
static int make_data_buffers(Gather *gather) {
    size_t wanted = gather->wanted, headers = gather->header_count;
    if ((wanted & WANT_KEYS && buffer_make(gather, KEY_DATA, gather->key_bytes) < 0) ||
        (wanted & WANT_VALUES && buffer_make(gather, VALUE_DATA, gather->value_bytes) < 0)) {
        return -1;
    }
    if (!(wanted & WANT_HEADERS)) {
        return 0;
    }
    if (gather->null_header_count > 0 && buffer_make_zeroed(gather, CONTENT_VALIDITY, (headers + 7) / 8) < 0) {
        return -1;
    }
    size_t content_bytes = gather->block_bytes - HEADER_BYTES * headers - gather->name_bytes;
    return buffer_make(gather, NAME_OFFSETS, 4 * (headers + 1)) < 0 ||
                   buffer_make(gather, NAME_DATA, gather->name_bytes) < 0 ||
                   buffer_make(gather, CONTENT_OFFSETS, 4 * (headers + 1)) < 0 ||
                   buffer_make(gather, CONTENT_DATA, content_bytes) < 0
               ? -1
               : 0;
}

static void gather_release(Gather *gather) {
    for (int which = 0; which < BUFFER_COUNT; which++) {
        Py_CLEAR(gather->buffers[which]);
    }
    PyMem_RawFree(gather->rows);
    PyMem_RawFree(gather->headers);
    places_release(&gather->places);
}

/* ---- the call ---- */

static void gather_complain(NativeState *state, const Gather *gather, End end) {
    Slice payload;
    if (end == NO_MEMORY) {
        PyErr_NoMemory();
        return;
    }
    if (place_of(&gather->places, gather->index, &payload) < 0) {
        return;
    }
    unsigned long long offset = (unsigned long long)gather->first_offset + gather->index;
    PyErr_Format(state->input_error, "message %llu is too large for a column, which holds at most %d bytes", offset,
                 MAX_COLUMN_BYTES);
}

/* (rows, index of the first frame that was not taken, why it ended, buffers) */
static PyObject *gather_result(const Gather *gather, End end) {
    PyObject *buffers = PyTuple_New(BUFFER_COUNT);
    if (buffers == NULL) {
        return NULL;
    }
    for (int which = 0; which < BUFFER_COUNT; which++) {
        PyObject *buffer = gather->buffers[which] == NULL ? Py_None : gather->buffers[which];
        PyTuple_SET_ITEM(buffers, which, Py_NewRef(buffer));
    }
    return Py_BuildValue("(nniN)", (Py_ssize_t)gather->row_count, (Py_ssize_t)gather->index, (int)end, buffers);
}

static PyObject *gather_run(NativeState *state, Gather *gather) {
    if (make_fixed_buffers(gather) < 0) {
        return NULL;
    }
    PyThreadState *saved = release_gil_for((uint64_t)gather->capacity * ROW_WORK_BYTES);
    End end = take_rows(gather);
    take_gil_back(saved);
    if (end > MET_FAULT) {
        gather_complain(state, gather, end);
        return NULL;
    }
    if (shrink_fixed_buffers(gather) < 0 || make_data_buffers(gather) < 0) {
        return NULL;
    }
    saved = release_gil_for(gather->key_bytes + gather->value_bytes + gather->block_bytes);
    copy_columns(gather);
    take_gil_back(saved);
    return gather_result(gather, end);
}

static int gather_arguments(NativeState *state, Gather *gather, PyObject *const *arguments) {
    int overflow;
    gather->first_offset = PyLong_AsLongLongAndOverflow(arguments[0], &overflow);
    if (gather->first_offset == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (parse_index(arguments[4], "start", &gather->start) < 0 || parse_index(arguments[5], "stop", &gather->stop) < 0 ||
        parse_index(arguments[6], "wanted", &gather->wanted) < 0 ||
        parse_index(arguments[7], "max_rows", &gather->max_rows) < 0 ||
        parse_index(arguments[8], "max_bytes", &gather->max_bytes) < 0 ||
        places_take(&gather->places, arguments + 1) < 0) {
        return -1;
    }
    size_t count = gather->places.count;
    if (overflow != 0 || gather->first_offset < 0 || gather->first_offset > (long long)(INT64_MAX - count)) {
        PyErr_SetString(state->input_error, "offsets in a column must be in the range 0 to 2**63 - 1");
        places_release(&gather->places);
        return -1;
    }
    return 0;
}

static PyObject *envelopes_gather_columns(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    NativeState *state = PyModule_GetState(module);
    Gather gather = {0};
    if (expect_arguments("gather_columns", argument_count, 9, 9) < 0 ||
        gather_arguments(state, &gather, arguments) < 0) {
        return NULL;
    }
    gather.stop = gather.stop < gather.places.count ? gather.stop : gather.places.count;
    gather.start = gather.start < gather.stop ? gather.start : gather.stop;
    gather.max_bytes = gather.max_bytes < MAX_COLUMN_BYTES ? gather.max_bytes : MAX_COLUMN_BYTES;
    gather.capacity = gather.stop - gather.start;
    gather.capacity = gather.capacity < gather.max_rows ? gather.capacity : gather.max_rows;
    PyObject *result = gather_run(state, &gather);
    gather_release(&gather);
    return result;
}

/* One number for any set of frames: the sum, modulo 2^64, of a mix of each frame's offset, length and checksum.

   A sum does not know the order, so parts that were worked on anywhere add up to the number of the whole. The checksum is
   worked out from the payload rather than taken from the frame's header: the number speaks of the bytes that are there. */

/* A bijection of 64 bits in which every bit depends on all: the last step of the generator SplitMix64. */
static inline uint64_t digest_mix(uint64_t word) {
    word = (word ^ word >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ word >> 27) * UINT64_C(0x94D049BB133111EB);
    return word ^ word >> 31;
}

static inline uint64_t digest_frame(uint64_t offset, Slice payload) {
    uint64_t content = (uint64_t)payload.size << 32 | crc_of(payload.data, payload.size);
    return digest_mix(digest_mix(offset + UINT64_C(0x9E3779B97F4A7C15)) + content);
}

/* Returns the index where it stopped: `stop`, or that of a payload outside the buffer. */
static size_t digest_frames(const Places *places, uint64_t first, size_t start, size_t stop, uint64_t *sum) {
    size_t index = start;
    for (; index < stop; index++) {
        Slice payload;
        if (!place_is_inside(places, index, &payload)) {
            break;
        }
        *sum += digest_frame(first + index, payload);
    }
    return index;
}

static PyObject *digest_run(const Places *places, uint64_t first, size_t start, size_t stop) {
    uint64_t sum = 0;
    stop = stop < places->count ? stop : places->count;
    start = start < stop ? start : stop;
    PyThreadState *saved = release_gil_for((uint64_t)places->buffer.len);
    size_t stopped_at = digest_frames(places, first, start, stop, &sum);
    take_gil_back(saved);
    if (stopped_at < stop) {
        complain_of_place(places, stopped_at);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(sum);
}

/* Offsets are taken modulo 2^64, so any int will do as the first. */
static PyObject *envelopes_frames_digest(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Places places;
    size_t start, stop;
    if (expect_arguments("frames_digest", given, 6, 6) < 0) {
        return NULL;
    }
    uint64_t first = PyLong_AsUnsignedLongLongMask(arguments[0]);
    if ((first == UINT64_MAX && PyErr_Occurred()) || parse_index(arguments[4], "start", &start) < 0 ||
        parse_index(arguments[5], "stop", &stop) < 0 || places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    PyObject *sum = digest_run(&places, first, start, stop);
    places_release(&places);
    return sum;
}

#endif
