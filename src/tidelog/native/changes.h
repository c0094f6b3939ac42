/* What records did to rows of the tree, as columns. tests/oracles/changes.py gives the same answer.

   Records are looked at twice: to check and to measure them, then to copy. Only the first can fail. */

#ifndef TIDELOG_CHANGES_H
#define TIDELOG_CHANGES_H

#include "crc32.h"
#include "updates.h"

typedef struct {
    Places places;
    Py_buffer indexes;
    uint64_t first_lsn;
    size_t start, stop, max_rows; /* places in `indexes` */
    size_t rows, key_bytes, cell_bytes;
    PyObject *vacuums; /* a list: indexes of the records of retention */
} Changes;

/* Columns of Arrow: ends have a 0 in front, a bit says that there is a cell. */
typedef struct {
    uint8_t *key_ends, *keys, *lsns, *steps, *is_there, *cell_ends, *cells, *parts;
} ChangeColumns;

static int expect_row(NativeState *state, const Update *update, uint64_t lsn) {
    int is_rows = update->what == UPDATE_INSERT || update->what == UPDATE_REPLACE || update->what == UPDATE_REMOVE;
    if (is_rows && update->key.size > SEQ_BYTES) {
        return 0;
    }
    PyErr_Format(state->data_error, "an entry has an update of kind %d that is no row's, LSN %llu", (int)update->what,
                 (unsigned long long)lsn);
    return -1;
}

/* The updates of the record at a place of `indexes`. */
static int changes_record(NativeState *state, const Changes *changes, size_t at, WholeUpdate *whole, Slice *updates,
                          uint64_t *lsn, int *is_vacuum) {
    size_t index = native_u32(changes->indexes.buf, at);
    Slice record;
    if (index >= changes->places.count) {
        PyErr_Format(PyExc_ValueError, "there is no record %zu", index);
        return -1;
    }
    *lsn = changes->first_lsn + index;
    if (place_of(&changes->places, index, &record) < 0) {
        return -1;
    }
    *is_vacuum = record.size > 0 && record.data[0] == RECORD_VACUUM;
    return record_updates(state, record, *lsn, whole, updates);
}

static int note_vacuum(Changes *changes, size_t at) {
    PyObject *index = PyLong_FromUnsignedLong(native_u32(changes->indexes.buf, at));
    int failed = index == NULL || PyList_Append(changes->vacuums, index) < 0;
    Py_XDECREF(index);
    return failed ? -1 : 0;
}

static int changes_measure(NativeState *state, Changes *changes) {
    size_t at = changes->start, there = (size_t)changes->indexes.len / 4;
    for (; at < there && changes->rows < changes->max_rows; at++) {
        WholeUpdate whole;
        Slice updates;
        uint64_t lsn;
        int is_vacuum;
        if (changes_record(state, changes, at, &whole, &updates, &lsn, &is_vacuum) < 0 ||
            (is_vacuum && note_vacuum(changes, at) < 0)) {
            return -1;
        }
        while (updates.size > 0) {
            Update update;
            if (update_parse(state, &updates, lsn, &update) < 0 || expect_row(state, &update, lsn) < 0) {
                return -1;
            }
            changes->rows++;
            changes->key_bytes += update.key.size;
            changes->cell_bytes += update.what == UPDATE_REMOVE ? 0 : update.value.size;
        }
    }
    changes->stop = at;
    if (changes->key_bytes > INT32_MAX || changes->cell_bytes > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "too many rows for one batch");
        return -1;
    }
    return 0;
}

static void changes_copy(const ChangeColumns *columns, const Update *update, uint64_t lsn, size_t step, size_t row) {
    size_t key_at = load_u32(columns->key_ends + 4 * row), cell_at = load_u32(columns->cell_ends + 4 * row);
    int is_there = update->what != UPDATE_REMOVE;
    size_t cell_bytes = is_there ? update->value.size : 0;
    memcpy(columns->keys + key_at, update->key.data, update->key.size);
    memcpy(columns->cells + cell_at, update->value.data, cell_bytes);
    store_u32(columns->key_ends + 4 * (row + 1), (uint32_t)(key_at + update->key.size));
    store_u32(columns->cell_ends + 4 * (row + 1), (uint32_t)(cell_at + cell_bytes));
    store_u64(columns->lsns + 8 * row, lsn);
    store_u32(columns->steps + 4 * row, (uint32_t)step);
    uint32_t crc = ~crc_update(~(uint32_t)0, update->key.data, update->key.size - SEQ_BYTES);
    store_u32(columns->parts + 4 * row, crc & INT32_MAX);
    columns->is_there[row / 8] |= (uint8_t)(is_there << (row % 8));
}

static int changes_fill(NativeState *state, const Changes *changes, const ChangeColumns *columns) {
    size_t row = 0;
    memset(columns->key_ends, 0, 4);
    memset(columns->cell_ends, 0, 4);
    memset(columns->is_there, 0, (changes->rows + 7) / 8);
    for (size_t at = changes->start; at < changes->stop; at++) {
        WholeUpdate whole;
        Slice updates;
        uint64_t lsn;
        int is_vacuum;
        if (changes_record(state, changes, at, &whole, &updates, &lsn, &is_vacuum) < 0) {
            return -1;
        }
        for (size_t step = 0; updates.size > 0; step++, row++) {
            Update update;
            if (update_parse(state, &updates, lsn, &update) < 0) {
                return -1;
            }
            changes_copy(columns, &update, lsn, step, row);
        }
    }
    return 0;
}

static PyObject *changes_columns(NativeState *state, const Changes *changes) {
    size_t rows = changes->rows;
    const size_t sizes[] = {4 * (rows + 1), changes->key_bytes, 8 * rows, 4 * rows, (rows + 7) / 8, 4 * (rows + 1),
                            changes->cell_bytes, 4 * rows};
    const Py_ssize_t count = sizeof sizes / sizeof *sizes;
    PyObject *tuple = PyTuple_New(count);
    uint8_t *at[sizeof sizes / sizeof *sizes];
    for (Py_ssize_t column = 0; tuple != NULL && column < count; column++) {
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizes[column]);
        if (bytes == NULL) {
            Py_CLEAR(tuple);
            break;
        }
        at[column] = (uint8_t *)PyBytes_AS_STRING(bytes);
        PyTuple_SET_ITEM(tuple, column, bytes);
    }
    if (tuple == NULL) {
        return NULL;
    }
    ChangeColumns columns = {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]};
    if (changes_fill(state, changes, &columns) < 0) {
        Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *pages_gather_changes(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    Changes changes;
    memset(&changes, 0, sizeof changes);
    if (expect_arguments("gather_changes", count, 7, 7) < 0 || parse_u64(arguments[0], &changes.first_lsn) < 0 ||
        parse_index(arguments[5], "start", &changes.start) < 0 ||
        parse_index(arguments[6], "max_rows", &changes.max_rows) < 0 || places_take(&changes.places, arguments + 1) < 0) {
        return NULL;
    }
    PyObject *answer = NULL, *columns = NULL;
    changes.vacuums = PyList_New(0);
    if (changes.vacuums != NULL && PyObject_GetBuffer(arguments[4], &changes.indexes, PyBUF_SIMPLE) == 0) {
        if (changes_measure(state, &changes) == 0 && (columns = changes_columns(state, &changes)) != NULL) {
            answer = Py_BuildValue("(nnON)", (Py_ssize_t)changes.rows, (Py_ssize_t)changes.stop, changes.vacuums,
                                   columns);
        }
        PyBuffer_Release(&changes.indexes);
    }
    Py_XDECREF(changes.vacuums);
    places_release(&changes.places);
    return answer;
}

#endif
