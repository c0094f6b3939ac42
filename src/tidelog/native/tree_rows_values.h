/* Values that rows of the tree point to, and where compactions put them; `sst/blob_file.py` draws the pointers. */

#ifndef TIDELOG_TREE_ROWS_VALUES_H
#define TIDELOG_TREE_ROWS_VALUES_H

#include "operation.h"
#include "tree_rows_survey.h"

#define BLOB_POINTER 1
#define FILE_POINTER 2
#define BLOB_POINTER_BYTES (1 + 1 + 4 + 8 + 4)
#define FILE_POINTER_HEAD_BYTES (1 + 1 + 4)
#define MAX_POINTER_CODEC 1
#define NO_BLOB_FILE (-1)
#define OWN_FILE (-2)

/* ---- point_rows ---- */

typedef struct {
    Py_buffer cuts;
    uint64_t window_bytes;
    uint8_t *rows, *units, *positions;
    size_t count;
} Pointing;

/* The window of a position, or how many cuts are not above it. */
static uint32_t unit_of(const Pointing *pointing, uint64_t position) {
    if (pointing->window_bytes != 0) {
        return (uint32_t)(position / pointing->window_bytes & INT32_MAX);
    }
    size_t low = 0, high = (size_t)pointing->cuts.len / 8;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (native_u64(pointing->cuts.buf, middle) <= position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return (uint32_t)low;
}

static int point_all(NativeState *state, const TreeRows *rows, Pointing *pointing) {
    for (size_t row = 0; row < rows->count; row++) {
        Slice key, cell;
        VersionCell version;
        if (tree_row(rows, row, &key, &cell) < 0) {
            return -1;
        }
        if (key.size == 0 || key.data[0] != 'o' || cell.size == 0 || (cell.data[0] & 15) != CELL_POINTER) {
            continue;
        }
        if (!version_cell_parse(cell, &version)) {
            PyErr_Format(state->data_error, "invalid version: %zu bytes", cell.size);
            return -1;
        }
        store_u32(pointing->rows + 4 * pointing->count, (uint32_t)row);
        store_u32(pointing->units + 4 * pointing->count, unit_of(pointing, version.position));
        store_u64(pointing->positions + 8 * pointing->count, version.position);
        pointing->count++;
    }
    return 0;
}

/* A tuple of bytes of these sizes, to be filled. */
static PyObject *new_columns(const size_t *sizes, Py_ssize_t count, uint8_t **at) {
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t column = 0; tuple != NULL && column < count; column++) {
        if ((at[column] = add_bytes(tuple, column, sizes[column])) == NULL) {
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

/* point_rows(keys, cells, count, window_bytes, cuts): (how many, rows, units, positions): those of objects whose value is
   in the log. Columns have room for all rows. Without `window_bytes` the cuts say which unit a value is in. */
static PyObject *tree_point_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    TreeRows rows;
    Pointing pointing;
    memset(&rows, 0, sizeof rows);
    memset(&pointing, 0, sizeof pointing);
    if (expect_arguments("point_rows", count, 5, 5) < 0 || parse_u64(arguments[3], &pointing.window_bytes) < 0 ||
        PyObject_GetBuffer(arguments[4], &pointing.cuts, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *columns = NULL, *answer = NULL;
    if (tree_rows_take(&rows, arguments[0], arguments[1], arguments[2]) == 0) {
        const size_t sizes[] = {4 * rows.count, 4 * rows.count, 8 * rows.count};
        uint8_t *at[3];
        columns = new_columns(sizes, 3, at);
        if (columns != NULL) {
            pointing.rows = at[0];
            pointing.units = at[1];
            pointing.positions = at[2];
            if (point_all(PyModule_GetState(module), &rows, &pointing) == 0) {
                answer = Py_BuildValue("(nO)", (Py_ssize_t)pointing.count, columns);
            }
        }
    }
    Py_XDECREF(columns);
    PyBuffer_Release(&pointing.cuts);
    tree_rows_release(&rows);
    return answer;
}

static int place_all(NativeState *state, const Column *keys, size_t rows, const Pointing *pointing) {
    for (size_t row = 0; row < rows; row++) {
        Slice key;
        if (!row_slice(keys, row, &key)) {
            return outside_column();
        }
        if (key.size != 8) {
            PyErr_Format(state->data_error, "invalid WAL position: %zu bytes", key.size);
            return -1;
        }
        uint64_t position = 0;
        for (int at = 0; at < 8; at++) {
            position = position << 8 | key.data[at];
        }
        store_u32(pointing->units + 4 * row, unit_of(pointing, position));
        store_u64(pointing->positions + 8 * row, position);
    }
    return 0;
}

/* place_units(keys, count, window_bytes, cuts): (units, positions) of rows of the value index. */
static PyObject *tree_place_units(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Column keys;
    Pointing pointing;
    size_t rows;
    memset(&keys, 0, sizeof keys);
    memset(&pointing, 0, sizeof pointing);
    if (expect_arguments("place_units", count, 4, 4) < 0 || parse_index(arguments[1], "count", &rows) < 0 ||
        parse_u64(arguments[2], &pointing.window_bytes) < 0 ||
        PyObject_GetBuffer(arguments[3], &pointing.cuts, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *columns = NULL;
    if (column_take_bytes(&keys, arguments[0]) == 0) {
        const size_t sizes[] = {4 * rows, 8 * rows};
        uint8_t *at[2];
        if (keys.rows < rows) {
            PyErr_SetString(PyExc_ValueError, "a column has fewer rows than were named");
        } else if ((columns = new_columns(sizes, 2, at)) != NULL) {
            pointing.units = at[0];
            pointing.positions = at[1];
            if (place_all(PyModule_GetState(module), &keys, rows, &pointing) < 0) {
                Py_CLEAR(columns);
            }
        }
    }
    PyBuffer_Release(&pointing.cuts);
    column_release(&keys);
    return columns;
}

/* ---- merge_values ---- */

typedef struct {
    int64_t blob_file; /* NO_BLOB_FILE, OWN_FILE, or its number */
    uint64_t byte;
    uint32_t stored_bytes;
    uint8_t codec;
} ValuePlace;

static int place_parse(NativeState *state, Slice value, ValuePlace *place) {
    uint8_t kind = value.size > 0 ? value.data[0] : 0;
    if (kind == BLOB_POINTER && value.size == BLOB_POINTER_BYTES) {
        *place = (ValuePlace){load_u32(value.data + 2), load_u64(value.data + 6), load_u32(value.data + 14),
                              value.data[1]};
    } else if (kind == FILE_POINTER && value.size > FILE_POINTER_HEAD_BYTES) {
        *place = (ValuePlace){OWN_FILE, 0, load_u32(value.data + 2), value.data[1]};
    } else {
        PyErr_Format(state->data_error, "invalid value pointer: kind %d, %zu bytes", (int)kind, value.size);
        return -1;
    }
    if (place->codec > MAX_POINTER_CODEC) {
        PyErr_Format(state->data_error, "value pointer has unknown codec %d", (int)place->codec);
        return -1;
    }
    return 0;
}

typedef struct {
    uint64_t position;
    size_t first_row, versions;
    int64_t place_row;
    VersionCell cell;
    ValuePlace place;
} LiveValue;

enum { FIRST_ROW, VERSIONS, PLACE_ROW, LSN, POSITION, SIZE, STORED, CRC, CODEC, BLOB_FILE, BYTE, PLACE_STORED, PLACE_CODEC,
       VALUE_COLUMNS };

static const size_t value_widths[VALUE_COLUMNS] = {4, 4, 4, 8, 8, 8, 4, 4, 1, 8, 8, 4, 1};

static void store_value(uint8_t *const *at, size_t row, const LiveValue *value) {
    store_u32(at[FIRST_ROW] + 4 * row, (uint32_t)value->first_row);
    store_u32(at[VERSIONS] + 4 * row, (uint32_t)value->versions);
    store_u32(at[PLACE_ROW] + 4 * row, (uint32_t)value->place_row);
    store_u64(at[LSN] + 8 * row, value->cell.lsn);
    store_u64(at[POSITION] + 8 * row, value->position);
    store_u64(at[SIZE] + 8 * row, value->cell.size);
    store_u32(at[STORED] + 4 * row, (uint32_t)value->cell.stored_bytes);
    store_u32(at[CRC] + 4 * row, value->cell.crc);
    at[CODEC][row] = value->cell.codec;
    store_u64(at[BLOB_FILE] + 8 * row, (uint64_t)value->place.blob_file);
    store_u64(at[BYTE] + 8 * row, value->place.byte);
    store_u32(at[PLACE_STORED] + 4 * row, value->place.stored_bytes);
    at[PLACE_CODEC][row] = value->place.codec;
}

static int same_value(const VersionCell *left, const VersionCell *right) {
    return left->size == right->size && left->crc == right->crc && left->codec == right->codec &&
           left->lsn == right->lsn && left->position == right->position && left->stored_bytes == right->stored_bytes;
}

/* A version of a value; the first of them says what is known of it. */
static int merge_version(NativeState *state, LiveValue *value, size_t row, Slice bytes) {
    VersionCell cell;
    if (!version_cell_parse(bytes, &cell) || cell.flags != CELL_POINTER) {
        PyErr_Format(state->data_error, "invalid version: %zu bytes", bytes.size);
        return -1;
    }
    if (value->versions == 0) {
        value->first_row = row;
        value->cell = cell;
    } else if (!same_value(&value->cell, &cell)) {
        PyErr_Format(state->data_error, "versions tell different things of the value at position %llu",
                     (unsigned long long)value->position);
        return -1;
    }
    value->versions++;
    return 0;
}

/* How many values are alive; -1 on error. Rows without a key are the places of values, and come before their versions. */
static Py_ssize_t merge_all_values(NativeState *state, const TreeRows *rows, const uint8_t *positions,
                                   uint8_t *const *columns) {
    size_t found = 0;
    LiveValue value = {.place = {NO_BLOB_FILE, 0, 0, 0}};
    for (size_t row = 0; row < rows->count; row++) {
        uint64_t position = native_u64(positions, row);
        if (row == 0 || position != value.position) {
            if (value.versions > 0) {
                store_value(columns, found++, &value);
            }
            value = (LiveValue){.position = position, .place_row = -1, .place = {NO_BLOB_FILE, 0, 0, 0}};
        }
        Slice bytes;
        if (!row_slice(&rows->cells, row, &bytes)) {
            return outside_column();
        }
        if (!is_null(&rows->keys, row)) {
            if (merge_version(state, &value, row, bytes) < 0) {
                return -1;
            }
        } else if (place_parse(state, bytes, &value.place) < 0) {
            return -1;
        } else {
            value.place_row = (int64_t)row;
        }
    }
    if (value.versions > 0) {
        store_value(columns, found++, &value);
    }
    return (Py_ssize_t)found;
}

/* merge_values(positions, keys, values, count): (how many, columns): what is known of the values that are alive. Rows are
   in order of position. */
static PyObject *tree_merge_values(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    TreeRows rows;
    Py_buffer positions;
    memset(&rows, 0, sizeof rows);
    if (expect_arguments("merge_values", count, 4, 4) < 0 ||
        PyObject_GetBuffer(arguments[0], &positions, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *columns = NULL, *answer = NULL;
    if (tree_rows_take(&rows, arguments[1], arguments[2], arguments[3]) == 0) {
        size_t sizes[VALUE_COLUMNS];
        uint8_t *at[VALUE_COLUMNS];
        for (int column = 0; column < VALUE_COLUMNS; column++) {
            sizes[column] = value_widths[column] * rows.count;
        }
        if ((size_t)positions.len / 8 < rows.count) {
            PyErr_SetString(PyExc_ValueError, "a column has fewer rows than were named");
        } else if ((columns = new_columns(sizes, VALUE_COLUMNS, at)) != NULL) {
            Py_ssize_t found = merge_all_values(PyModule_GetState(module), &rows, positions.buf, at);
            answer = found < 0 ? NULL : Py_BuildValue("(nO)", found, columns);
        }
    }
    Py_XDECREF(columns);
    PyBuffer_Release(&positions);
    tree_rows_release(&rows);
    return answer;
}

/* ---- gather_values, cut_values ---- */

#define VALUE_CLAIMS 5

/* What cells say of values: LSNs, sizes, stored bytes, checksums, codecs. */
typedef struct {
    Places places;
    Py_buffer claims[VALUE_CLAIMS];
    uint64_t first; /* the LSN, or the byte, with which the buffer begins */
    size_t start, stop;
} Gathering;

static const size_t claim_widths[VALUE_CLAIMS] = {8, 8, 4, 4, 1};

static int gathering_take(Gathering *gathering, PyObject *const *arguments) {
    if (parse_u64(arguments[0], &gathering->first) < 0 || parse_index(arguments[9], "start", &gathering->start) < 0 ||
        parse_index(arguments[10], "stop", &gathering->stop) < 0 || places_take(&gathering->places, arguments + 1) < 0) {
        return -1;
    }
    for (int claim = 0; claim < VALUE_CLAIMS; claim++) {
        if (PyObject_GetBuffer(arguments[4 + claim], &gathering->claims[claim], PyBUF_SIMPLE) < 0) {
            return -1;
        }
        if ((size_t)gathering->claims[claim].len / claim_widths[claim] < gathering->stop) {
            PyErr_SetString(PyExc_ValueError, "a column has fewer rows than were named");
            return -1;
        }
    }
    if (gathering->start > gathering->stop) {
        PyErr_SetString(PyExc_ValueError, "start is behind stop");
        return -1;
    }
    return 0;
}

static void gathering_release(Gathering *gathering) {
    places_release(&gathering->places);
    for (int claim = 0; claim < VALUE_CLAIMS; claim++) {
        PyBuffer_Release(&gathering->claims[claim]);
    }
}

/* Where the page updates of a record begin, before which its value ends. */
static int value_end(NativeState *state, Slice record, uint64_t lsn, size_t *end) {
    Operation operation;
    if (is_operation(record)) {
        if (operation_take(state->data_error, record, lsn, &operation) < 0) {
            return -1;
        }
        *end = (size_t)(operation.updates.data - record.data);
        return 0;
    }
    if (expect_header(state->data_error, record, lsn) < 0) {
        return -1;
    }
    *end = load_u32(record.data + 4);
    if (*end < RECORD_HEADER_BYTES || *end > record.size) {
        PyErr_Format(state->data_error, "a record of %zu bytes has its page updates at %zu, LSN %llu", record.size, *end,
                     (unsigned long long)lsn);
        return -1;
    }
    return 0;
}

/* Where a value is stored. */
typedef int StoredValue(NativeState *state, const Gathering *gathering, size_t row, Slice *stored);

static int value_in_record(NativeState *state, const Gathering *gathering, size_t row, Slice *stored) {
    uint64_t lsn = native_u64(gathering->claims[0].buf, row);
    size_t size = native_u32(gathering->claims[2].buf, row), end;
    Slice record;
    if (lsn < gathering->first || lsn - gathering->first >= gathering->places.count) {
        PyErr_Format(PyExc_ValueError, "there is no record %llu", (unsigned long long)lsn);
        return -1;
    }
    if (place_of(&gathering->places, (size_t)(lsn - gathering->first), &record) < 0 ||
        value_end(state, record, lsn, &end) < 0) {
        return -1;
    }
    if (size > end) {
        PyErr_Format(state->data_error, "a record has no value of %zu bytes, LSN %llu", size, (unsigned long long)lsn);
        return -1;
    }
    *stored = (Slice){record.data + end - size, size};
    return 0;
}

static int value_in_file(NativeState *state, const Gathering *gathering, size_t row, Slice *stored) {
    uint64_t room = (uint64_t)gathering->places.buffer.len, size = native_u32(gathering->claims[2].buf, row);
    if (row >= gathering->places.count) {
        PyErr_Format(PyExc_ValueError, "there is no place %zu", row);
        return -1;
    }
    uint64_t byte = native_u64(gathering->places.positions.buf, row);
    if (byte < gathering->first || byte - gathering->first > room || size > room - (byte - gathering->first)) {
        PyErr_Format(state->data_error, "%llu bytes at byte %llu are not in the file, LSN %llu", (unsigned long long)size,
                     (unsigned long long)byte, (unsigned long long)native_u64(gathering->claims[0].buf, row));
        return -1;
    }
    *stored = (Slice){(const uint8_t *)gathering->places.buffer.buf + (byte - gathering->first), (size_t)size};
    return 0;
}

/* A value that is stored as it is must be the one that its cell tells of; others are looked at by whom decompresses. */
static int value_check(NativeState *state, const Gathering *gathering, size_t row, Slice stored, uint32_t crc) {
    unsigned long long lsn = native_u64(gathering->claims[0].buf, row);
    uint64_t size = native_u64(gathering->claims[1].buf, row);
    if (((const uint8_t *)gathering->claims[4].buf)[row] != 0) {
        return 0;
    }
    if (crc != native_u32(gathering->claims[3].buf, row)) {
        PyErr_Format(state->data_error, "the checksum of the object's value does not match, LSN %llu", lsn);
        return -1;
    }
    uint64_t head = stored.size > size ? stored.size - size : 0;
    uint32_t metadata = head >= METADATA_LENGTH_BYTES ? load_u32(stored.data) : 0;
    if (head != METADATA_LENGTH_BYTES + (uint64_t)metadata) {
        PyErr_Format(state->data_error, "%llu bytes before the data cannot hold %lu of metadata, LSN %llu",
                     (unsigned long long)head, (unsigned long)metadata, lsn);
        return -1;
    }
    return 0;
}

/* The stored values one after the other, and the checksum of each as it is stored. */
static PyObject *gather(NativeState *state, PyObject *const *arguments, StoredValue *stored_value) {
    Gathering gathering;
    memset(&gathering, 0, sizeof gathering);
    PyObject *columns = NULL;
    int is_good = gathering_take(&gathering, arguments) == 0;
    size_t sizes[2] = {0, is_good ? 4 * (gathering.stop - gathering.start) : 0};
    for (size_t row = gathering.start; is_good && row < gathering.stop; row++) {
        sizes[0] += native_u32(gathering.claims[2].buf, row);
    }
    uint8_t *at[2];
    is_good = is_good && (columns = new_columns(sizes, 2, at)) != NULL;
    for (size_t row = gathering.start; is_good && row < gathering.stop; row++) {
        Slice stored;
        is_good = stored_value(state, &gathering, row, &stored) == 0;
        if (is_good) {
            memcpy(at[0], stored.data, stored.size);
            at[0] += stored.size;
            uint32_t crc = crc_of(stored.data, stored.size);
            store_u32(at[1] + 4 * (row - gathering.start), crc);
            is_good = value_check(state, &gathering, row, stored, crc) == 0;
        }
    }
    if (!is_good) {
        Py_CLEAR(columns);
    }
    gathering_release(&gathering);
    return columns;
}

/* gather_values(first_lsn, buffer, positions, lengths, lsns, sizes, stored, crcs, codecs, start, stop): out of records,
   the first of which has this LSN. */
static PyObject *tree_gather_values(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return expect_arguments("gather_values", count, 11, 11) < 0
               ? NULL
               : gather(PyModule_GetState(module), arguments, value_in_record);
}

/* cut_values(first_byte, buffer, bytes, stored, lsns, sizes, stored, crcs, codecs, start, stop): out of a part of a blob
   file, which begins with this byte of it. */
static PyObject *tree_cut_values(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return expect_arguments("cut_values", count, 11, 11) < 0 ? NULL
                                                             : gather(PyModule_GetState(module), arguments, value_in_file);
}

#endif
