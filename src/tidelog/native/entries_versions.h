/* Rows of the version index as columns: which versions are to be seen at a seq, and what their cells say.
   tests/oracles/version_columns.py gives the same answers; keys and cells are drawn in `mvcc/cells.py`. */

#ifndef TIDELOG_ENTRIES_VERSIONS_H
#define TIDELOG_ENTRIES_VERSIONS_H

#include "version_rows.h"
#include "version_tuples.h"

#define VERSION_NUMBERS 9
#define VERSION_STRINGS 3

/* Takes the next row; -1 with the error set, 0 when it is not to be seen. */
static int look_at_row(PyObject *data_error, Looking *looking, Slice *rest, Version *version) {
    size_t key_bytes = 0, value_bytes = 0;
    if (rest->size >= ROW_LENGTHS_BYTES) {
        key_bytes = load_u16(rest->data);
        value_bytes = load_u16(rest->data + 2);
    }
    if (rest->size < ROW_LENGTHS_BYTES + key_bytes + value_bytes) {
        PyErr_SetString(data_error, "truncated row in a block");
        return -1;
    }
    Slice key = {rest->data + ROW_LENGTHS_BYTES, key_bytes};
    Slice value = {key.data + key_bytes, value_bytes};
    *rest = (Slice){value.data + value_bytes, rest->size - ROW_LENGTHS_BYTES - key_bytes - value_bytes};
    if (compare_slices(key, looking->start) < 0 || compare_slices(key, looking->stop) >= 0) {
        return 0;
    }
    if (!parse_version(key, version) || !version_cell_parse(value, &version->cell)) {
        PyErr_SetString(data_error, "a row that is no version of an object");
        return -1;
    }
    if (version->seq > looking->seq) {
        return 0;
    }
    if (looking->all_versions) {
        return 1;
    }
    Slice prefix = {key.data, key.size - SEQ_BYTES};
    if (looking->settled.size == prefix.size && memcmp(looking->settled.data, prefix.data, prefix.size) == 0) {
        return 0;
    }
    looking->settled = prefix;
    return version->cell.flags != CELL_TOMBSTONE && is_of_bucket(looking, version);
}

static const size_t version_widths[VERSION_NUMBERS] = {8, 8, 8, 8, 4, 4, 4, 1, 1};

static void copy_version(uint8_t *const *columns, const Version *version, size_t at) {
    const VersionCell *cell = &version->cell;
    store_u64(columns[0] + 8 * at, version->seq);
    store_u64(columns[1] + 8 * at, cell->size);
    store_u64(columns[2] + 8 * at, cell->lsn);
    store_u64(columns[3] + 8 * at, cell->position);
    store_u32(columns[4] + 4 * at, cell->crc);
    store_u32(columns[5] + 4 * at, (uint32_t)cell->order);
    store_u32(columns[6] + 4 * at, (uint32_t)cell->stored_bytes);
    columns[7][at] = cell->flags;
    columns[8][at] = cell->codec;
}

static Slice version_string(const Version *version, int number) {
    if (number < 2) {
        return number == 0 ? version->bucket : version->name;
    }
    return version->cell.inlined;
}

/* ---- gather_versions ---- */

typedef struct {
    Version *items;
    size_t count, room;
} Versions;

static int add_version(Versions *versions, const Version *version) {
    if (versions->count == versions->room) {
        size_t room = versions->room == 0 ? 1024 : 2 * versions->room;
        Version *grown = PyMem_Realloc(versions->items, room * sizeof(Version));
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        versions->items = grown;
        versions->room = room;
    }
    versions->items[versions->count++] = *version;
    return 0;
}

static int look_at_all(PyObject *data_error, Looking *looking, Slice rest, Versions *versions) {
    while (rest.size > 0) {
        Version version;
        int is_seen = look_at_row(data_error, looking, &rest, &version);
        if (is_seen < 0 || (is_seen && add_version(versions, &version) < 0)) {
            return -1;
        }
    }
    return 0;
}

static int fill_version_strings(const Versions *versions, PyObject *strings, int number) {
    size_t size = 0;
    for (size_t at = 0; at < versions->count; at++) {
        size += version_string(&versions->items[at], number).size;
    }
    uint8_t *ends = add_bytes(strings, 2 * number, 4 * (versions->count + 1));
    uint8_t *data = ends == NULL ? NULL : add_bytes(strings, 2 * number + 1, size);
    if (data == NULL) {
        return -1;
    }
    uint32_t end = 0;
    store_u32(ends, 0);
    for (size_t at = 0; at < versions->count; at++) {
        Slice text = version_string(&versions->items[at], number);
        memcpy(data + end, text.data, text.size);
        end += (uint32_t)text.size;
        store_u32(ends + 4 * (at + 1), end);
    }
    return 0;
}

static int fill_versions(const Versions *versions, PyObject *numbers, PyObject *strings) {
    uint8_t *columns[VERSION_NUMBERS];
    for (int column = 0; column < VERSION_NUMBERS; column++) {
        columns[column] = add_bytes(numbers, column, version_widths[column] * versions->count);
        if (columns[column] == NULL) {
            return -1;
        }
    }
    for (size_t at = 0; at < versions->count; at++) {
        copy_version(columns, &versions->items[at], at);
    }
    for (int number = 0; number < VERSION_STRINGS; number++) {
        if (fill_version_strings(versions, strings, number) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *gathered_versions(NativeState *state, Looking *looking, Slice raw) {
    Versions versions = {NULL, 0, 0};
    PyObject *numbers = PyTuple_New(VERSION_NUMBERS), *strings = PyTuple_New(2 * VERSION_STRINGS), *result = NULL;
    if (numbers != NULL && strings != NULL && look_at_all(state->data_error, looking, raw, &versions) == 0 &&
        fill_versions(&versions, numbers, strings) == 0) {
        result = Py_BuildValue("ny#OO", (Py_ssize_t)versions.count, (const char *)looking->settled.data,
                               (Py_ssize_t)looking->settled.size, numbers, strings);
    }
    Py_XDECREF(numbers);
    Py_XDECREF(strings);
    PyMem_Free(versions.items);
    return result;
}

/* ---- gather_rows: rows of a listing, as `versions_list.h` makes them from pages ---- */

static SeenVersion seen_version(const Version *version) {
    return (SeenVersion){.name = version->name,
                         .stored = version->cell.inlined,
                         .seq = version->seq,
                         .size = version->cell.size,
                         .crc = version->cell.crc,
                         .cell = &version->cell};
}

static int all_versions_plain(const Versions *versions) {
    for (size_t at = 0; at < versions->count; at++) {
        SeenVersion seen = seen_version(&versions->items[at]);
        if (!seen_is_plain(&seen)) {
            return 0;
        }
    }
    return 1;
}

static PyObject *version_tuples(const Versions *versions, uint32_t columns) {
    int has_data = columns == LISTED_DATA && all_versions_plain(versions);
    PyObject *rows = PyList_New((Py_ssize_t)versions->count);
    for (size_t at = 0; rows != NULL && at < versions->count; at++) {
        SeenVersion seen = seen_version(&versions->items[at]);
        PyObject *row = has_data                 ? plain_tuple(&seen)
                        : columns < LISTED_VALUE ? info_tuple(&seen, columns == LISTED_CRC ? 4 : 3)
                                                 : place_tuple(&seen);
        if (row == NULL) {
            Py_CLEAR(rows);
        } else {
            PyList_SET_ITEM(rows, (Py_ssize_t)at, row);
        }
    }
    return rows;
}

static PyObject *gathered_rows(NativeState *state, Looking *looking, Slice raw, uint32_t columns) {
    Versions versions = {NULL, 0, 0};
    PyObject *rows = NULL;
    if (look_at_all(state->data_error, looking, raw, &versions) == 0) {
        rows = version_tuples(&versions, columns);
    }
    PyMem_Free(versions.items);
    if (rows == NULL) {
        return NULL;
    }
    return Py_BuildValue("(y#N)", (const char *)looking->settled.data, (Py_ssize_t)looking->settled.size, rows);
}

/* With `columns`, rows of a listing; without, columns of numbers and strings. */
static PyObject *gather_from(PyObject *module, PyObject *const *arguments, const uint32_t *columns) {
    Looking looking;
    memset(&looking, 0, sizeof looking);
    if (parse_u64(arguments[1], &looking.seq) < 0 || take_slice(arguments[3], &looking.start) < 0 ||
        take_slice(arguments[4], &looking.stop) < 0 || take_slice(arguments[5], &looking.settled) < 0) {
        return NULL;
    }
    looking.all_versions = PyObject_IsTrue(arguments[2]);
    Py_buffer raw;
    if (looking.all_versions < 0 || PyObject_GetBuffer(arguments[0], &raw, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    NativeState *state = PyModule_GetState(module);
    Slice rows = {raw.buf, (size_t)raw.len};
    if (raw.len > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "more bytes than a column can hold");
    } else if (take_created(arguments + 6, &looking.created) == 0) {
        result = columns == NULL ? gathered_versions(state, &looking, rows) : gathered_rows(state, &looking, rows, *columns);
    }
    created_release(&looking.created);
    PyBuffer_Release(&raw);
    return result;
}

static PyObject *entries_gather_versions(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return expect_arguments("gather_versions", count, 10, 10) < 0 ? NULL : gather_from(module, arguments, NULL);
}

static PyObject *entries_gather_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    uint32_t columns;
    if (expect_arguments("gather_rows", count, 11, 11) < 0 || parse_u32(arguments[10], "columns", &columns) < 0) {
        return NULL;
    }
    if (columns > LISTED_DATA) {
        PyErr_Format(PyExc_ValueError, "columns must be from 0 to %d", LISTED_DATA);
        return NULL;
    }
    return gather_from(module, arguments, &columns);
}

#endif
