/* Rows of Arrow columns to frames: one pass checks and measures every row, one writes them.

   What is wrong with a row is reported as a number (`RowFault`), the row and a detail; `columns.py` puts it into words. The
   second pass does not take it for granted that nobody changed a buffer since the first: it writes a row only if that
   still has the size that was measured. */

#ifndef TIDELOG_ENVELOPES_ROWS_H
#define TIDELOG_ENVELOPES_ROWS_H

#include "frame.h"
#include "native.h"
#include "arrow.h"
#include "envelopes_encode.h"
#include "envelopes_parse.h"

/* In the order in which a row is looked at; `RowFault` in `topics/columns.py` has the same numbers. */
typedef enum {
    ROW_SOUND,
    ROW_SHORT_COLUMN,
    ROW_BAD_ENDS,
    ROW_BAD_TIME,
    ROW_TOO_MANY_HEADERS,
    ROW_NULL_NAME,
    ROW_LONG_NAME,
    ROW_NULL_CONTENT,
    ROW_NAME_NOT_UTF8,
    ROW_TOO_LARGE,
    ROW_CHANGED,
} RowFault;

typedef struct {
    uint64_t first_offset, max_payload;
    size_t count;
    int64_t timestamp_us;
    int has_keys, has_headers, has_timestamps;
    Column values, keys, lists, names, contents, timestamps;
    PyObject *frames, *positions, *lengths;
    size_t row; /* the one at hand, and what to tell about it */
    long long detail;
} Rows;

typedef struct {
    Slice value, key;
    int has_key, is_null; /* the latter is the value */
    int64_t timestamp_us;
    size_t header_start, header_stop;
    uint64_t block_bytes;
    size_t nulls_bytes; /* the bitmap of headers without its zeros at the end */
} Row;

static inline size_t extension_bytes(const Row *row) {
    return row->is_null || row->nulls_bytes > 0 ? NULLS_FIXED_BYTES + row->nulls_bytes : 0;
}

static inline uint64_t payload_bytes(const Row *row) {
    return FIXED_BYTES + (uint64_t)row->key.size + row->block_bytes + extension_bytes(row) + row->value.size;
}

/* ---- reading a row ---- */

static RowFault read_time(Rows *rows, Row *row) {
    row->timestamp_us = rows->timestamp_us;
    if (rows->has_timestamps && !is_null(&rows->timestamps, rows->row)) {
        const uint8_t *numbers = rows->timestamps.data.buf;
        row->timestamp_us = (int64_t)load_u64(numbers + 8 * (rows->timestamps.first + rows->row));
    }
    if (!is_possible_time(row->timestamp_us)) {
        rows->detail = row->timestamp_us;
        return ROW_BAD_TIME;
    }
    return ROW_SOUND;
}

static inline RowFault read_header(const Rows *rows, size_t header, Slice *name, Slice *content) {
    if (!row_slice(&rows->names, header, name) || !row_slice(&rows->contents, header, content)) {
        return ROW_BAD_ENDS;
    }
    if (is_null(&rows->names, header)) {
        return ROW_NULL_NAME;
    }
    if (name->size > MAX_NAME_BYTES) {
        return ROW_LONG_NAME;
    }
    content->size = is_null(&rows->contents, header) ? 0 : content->size;
    return ROW_SOUND;
}

static RowFault measure_headers(Rows *rows, Row *row) {
    size_t known = rows->names.rows < rows->contents.rows ? rows->names.rows : rows->contents.rows;
    if (!row_range(&rows->lists, rows->row, known, &row->header_start, &row->header_stop)) {
        return ROW_BAD_ENDS;
    }
    if (is_null(&rows->lists, rows->row)) {
        row->header_stop = row->header_start;
    }
    if (row->header_stop - row->header_start > MAX_HEADERS) {
        rows->detail = (long long)(row->header_stop - row->header_start);
        return ROW_TOO_MANY_HEADERS;
    }
    for (size_t header = row->header_start; header < row->header_stop; header++) {
        Slice name, content;
        RowFault fault = read_header(rows, header, &name, &content);
        if (fault != ROW_SOUND) {
            return fault;
        }
        if (is_null(&rows->contents, header)) {
            size_t index = header - row->header_start;
            if (index >= MAX_NULL_HEADER) {
                return ROW_NULL_CONTENT;
            }
            row->nulls_bytes = index / 8 + 1;
        }
        row->block_bytes += HEADER_BYTES + name.size + content.size;
    }
    return ROW_SOUND;
}

static RowFault read_row(Rows *rows, Row *row) {
    *row = (Row){.key = {NULL, 0}};
    RowFault fault = read_time(rows, row);
    if (fault != ROW_SOUND) {
        return fault;
    }
    if (!row_slice(&rows->values, rows->row, &row->value)) {
        return ROW_BAD_ENDS;
    }
    row->is_null = is_null(&rows->values, rows->row);
    row->value.size = row->is_null ? 0 : row->value.size;
    if (rows->has_keys) {
        if (!row_slice(&rows->keys, rows->row, &row->key)) {
            return ROW_BAD_ENDS;
        }
        row->has_key = !is_null(&rows->keys, rows->row);
        row->key.size = row->has_key ? row->key.size : 0;
    }
    return rows->has_headers ? measure_headers(rows, row) : ROW_SOUND;
}

/* ---- the two passes ---- */

/* Of headers that were measured. */
static RowFault check_names(const Rows *rows, const Row *row) {
    for (size_t header = row->header_start; header < row->header_stop; header++) {
        Slice name, content;
        if (read_header(rows, header, &name, &content) != ROW_SOUND) {
            return ROW_CHANGED;
        }
        if (!is_utf8(name)) {
            return ROW_NAME_NOT_UTF8;
        }
    }
    return ROW_SOUND;
}

/* Writes positions and lengths; `frames_bytes` is what all frames need. */
static RowFault measure_rows(Rows *rows, uint64_t *frames_bytes) {
    uint8_t *positions = (uint8_t *)PyBytes_AS_STRING(rows->positions);
    uint8_t *lengths = (uint8_t *)PyBytes_AS_STRING(rows->lengths);
    uint64_t position = 0;
    for (rows->row = 0; rows->row < rows->count; rows->row++) {
        Row row;
        RowFault fault = read_row(rows, &row);
        if (fault == ROW_SOUND && row.header_start < row.header_stop) {
            fault = check_names(rows, &row);
        }
        if (fault != ROW_SOUND) {
            return fault;
        }
        uint64_t size = payload_bytes(&row);
        if (size > rows->max_payload) {
            rows->detail = (long long)size;
            return ROW_TOO_LARGE;
        }
        uint32_t length = (uint32_t)size; /* max_payload is below 2^32 */
        position += FRAME_HEADER_BYTES;
        memcpy(positions + 8 * rows->row, &position, 8);
        memcpy(lengths + 4 * rows->row, &length, 4);
        position += length;
    }
    *frames_bytes = position;
    return ROW_SOUND;
}

/* NULL when the headers are no longer those that were measured. */
static uint8_t *write_headers(const Rows *rows, const Row *row, uint8_t *to) {
    const uint8_t *end = to + row->block_bytes;
    for (size_t header = row->header_start; header < row->header_stop; header++) {
        Slice name, content;
        if (read_header(rows, header, &name, &content) != ROW_SOUND ||
            HEADER_BYTES + (uint64_t)name.size + content.size > (uint64_t)(end - to)) {
            return NULL;
        }
        store_u16(to, (uint16_t)name.size);
        store_u32(to + 2, (uint32_t)content.size);
        to = copy_slice(copy_slice(to + HEADER_BYTES, name), content);
    }
    return to == end ? to : NULL;
}

/* The entry of nulls; NULL when headers are null that were not when they were measured. */
static uint8_t *write_nulls(const Rows *rows, const Row *row, uint8_t *to) {
    uint8_t *bitmap = to + NULLS_FIXED_BYTES;
    to[0] = KIND_NULLS;
    to[1] = (uint8_t)(1 + row->nulls_bytes);
    to[2] = row->is_null ? VALUE_IS_NULL : 0;
    memset(bitmap, 0, row->nulls_bytes);
    for (size_t index = 0; index < row->header_stop - row->header_start; index++) {
        if (!is_null(&rows->contents, row->header_start + index)) {
            continue;
        }
        if (index / 8 >= row->nulls_bytes) {
            return NULL;
        }
        bitmap[index / 8] |= (uint8_t)(1u << index % 8);
    }
    return bitmap + row->nulls_bytes;
}

static int write_payload(const Rows *rows, const Row *row, uint8_t *to) {
    to[0] = VERSION;
    to[1] = row->has_key ? HAS_KEY : 0;
    store_u16(to + 2, (uint16_t)(row->header_stop - row->header_start));
    store_u32(to + 4, (uint32_t)row->key.size);
    store_u64(to + 8, (uint64_t)row->timestamp_us);
    store_u32(to + 16, (uint32_t)row->block_bytes);
    store_u32(to + 20, (uint32_t)extension_bytes(row));
    to = copy_slice(to + FIXED_BYTES, row->key);
    if (row->header_start < row->header_stop) {
        to = write_headers(rows, row, to);
    }
    if (to != NULL && extension_bytes(row) > 0) {
        to = write_nulls(rows, row, to);
    }
    if (to == NULL) {
        return -1;
    }
    copy_slice(to, row->value);
    return 0;
}

static RowFault write_rows(Rows *rows) {
    uint8_t *frames = (uint8_t *)PyBytes_AS_STRING(rows->frames);
    const uint8_t *positions = (const uint8_t *)PyBytes_AS_STRING(rows->positions);
    const uint8_t *lengths = (const uint8_t *)PyBytes_AS_STRING(rows->lengths);
    for (rows->row = 0; rows->row < rows->count; rows->row++) {
        Row row;
        uint8_t *payload = frames + native_u64(positions, rows->row);
        uint32_t length = native_u32(lengths, rows->row);
        if (read_row(rows, &row) != ROW_SOUND || payload_bytes(&row) != length ||
            write_payload(rows, &row, payload) < 0) {
            return ROW_CHANGED;
        }
        frame_store_header(payload, rows->first_offset + rows->row, length);
    }
    return ROW_SOUND;
}

/* ---- the call ---- */

static int has_all_rows(const Rows *rows) {
    return rows->values.rows >= rows->count && (!rows->has_keys || rows->keys.rows >= rows->count) &&
           (!rows->has_headers || rows->lists.rows >= rows->count) &&
           (!rows->has_timestamps || rows->timestamps.rows >= rows->count);
}

/* A fault, or -1 when Python raised something. */
static int encode_rows(Rows *rows) {
    uint64_t frames_bytes = 0;
    if (!has_all_rows(rows)) {
        return ROW_SHORT_COLUMN;
    }
    rows->positions = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * rows->count));
    rows->lengths = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * rows->count));
    if (rows->positions == NULL || rows->lengths == NULL) {
        return -1;
    }
    PyThreadState *saved = release_gil_for((uint64_t)rows->count * FIXED_BYTES);
    RowFault fault = measure_rows(rows, &frames_bytes);
    take_gil_back(saved);
    if (fault != ROW_SOUND) {
        return (int)fault;
    }
    rows->frames = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)frames_bytes);
    if (rows->frames == NULL) {
        return -1;
    }
    saved = release_gil_for(frames_bytes);
    fault = write_rows(rows);
    take_gil_back(saved);
    return (int)fault;
}

/* (validity, ends, names, contents, first, end_bytes) */
static int rows_take_headers(Rows *rows, PyObject *tuple) {
    return expect_fields(tuple, 6) < 0 ||
                   column_take_validity(&rows->lists, PyTuple_GET_ITEM(tuple, 0), PyTuple_GET_ITEM(tuple, 4)) < 0 ||
                   column_take_ends(&rows->lists, PyTuple_GET_ITEM(tuple, 1), PyTuple_GET_ITEM(tuple, 5)) < 0 ||
                   column_take_bytes(&rows->names, PyTuple_GET_ITEM(tuple, 2)) < 0 ||
                   column_take_bytes(&rows->contents, PyTuple_GET_ITEM(tuple, 3)) < 0
               ? -1
               : 0;
}

static int rows_take_offsets(NativeState *state, Rows *rows, PyObject *first_offset) {
    rows->first_offset = PyLong_AsUnsignedLongLong(first_offset);
    int fits = !PyErr_Occurred();
    if (!fits && !PyErr_ExceptionMatches(PyExc_OverflowError)) {
        return -1;
    }
    uint64_t more = rows->count > 0 ? rows->count - 1 : 0;
    if (!fits || rows->first_offset > UINT64_MAX - more) {
        PyErr_SetString(state->input_error, "offsets of frames must be in the range 0 to 2**64 - 1");
        return -1;
    }
    return 0;
}

static int rows_take(NativeState *state, Rows *rows, PyObject *const *arguments) {
    size_t max_payload;
    if (parse_index(arguments[1], "count", &rows->count) < 0 || rows_take_offsets(state, rows, arguments[0]) < 0 ||
        parse_timestamp(arguments[2], &rows->timestamp_us) < 0 ||
        parse_index(arguments[3], "max_message_bytes", &max_payload) < 0 ||
        column_take_bytes(&rows->values, arguments[4]) < 0) {
        return -1;
    }
    rows->max_payload = max_payload < UINT32_MAX ? max_payload : UINT32_MAX;
    rows->has_keys = arguments[5] != Py_None;
    rows->has_headers = arguments[6] != Py_None;
    rows->has_timestamps = arguments[7] != Py_None;
    return (rows->has_keys && column_take_bytes(&rows->keys, arguments[5]) < 0) ||
                   (rows->has_headers && rows_take_headers(rows, arguments[6]) < 0) ||
                   (rows->has_timestamps && column_take_numbers(&rows->timestamps, arguments[7]) < 0)
               ? -1
               : 0;
}

static void rows_release(Rows *rows) {
    column_release(&rows->values);
    column_release(&rows->keys);
    column_release(&rows->lists);
    column_release(&rows->names);
    column_release(&rows->contents);
    column_release(&rows->timestamps);
    Py_XDECREF(rows->frames);
    Py_XDECREF(rows->positions);
    Py_XDECREF(rows->lengths);
}

/* (0, frames, positions, lengths), or (fault, row, detail) */
static PyObject *rows_result(const Rows *rows, int fault) {
    if (fault == ROW_SOUND) {
        return Py_BuildValue("(iOOO)", 0, rows->frames, rows->positions, rows->lengths);
    }
    return fault < 0 ? NULL : Py_BuildValue("(inL)", fault, (Py_ssize_t)rows->row, rows->detail);
}

static PyObject *envelopes_encode_columns(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    Rows rows = {0};
    if (expect_arguments("encode_columns", argument_count, 8, 8) < 0) {
        return NULL;
    }
    int fault = rows_take(PyModule_GetState(module), &rows, arguments);
    fault = fault < 0 ? fault : encode_rows(&rows);
    PyObject *result = rows_result(&rows, fault);
    rows_release(&rows);
    return result;
}

#endif
