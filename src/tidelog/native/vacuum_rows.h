/* Cells of a tree as a collection of garbage looks at them, some of a scan at a time: which versions stay, what they
   point to, and which point somewhere. tests/oracles/vacuum_rows.py gives the same answers; `mvcc/vacuum_rules.py` says
   which versions go, and `mvcc/cells.py` draws keys and cells.

   `usage` is an array of u64: the live bytes of all cells and what they point to, then for each piece of the log its first
   LSN, the next one behind it, and the bytes that cells point to in it. Pieces are in the order of their LSNs.

   Invariants
   - Bytes are hostile: nothing is read or written that was not checked to lie inside of its cell or array.
   - Only names are judged here of which all versions are values, and none is hidden by its bucket. Others are given back. */

#ifndef TIDELOG_VACUUM_ROWS_H
#define TIDELOG_VACUUM_ROWS_H

#include "version_cell.h"

#define PIECE_NUMBERS 3
#define CODEC_OF_FILE 2

typedef struct {
    Py_buffer buffer;
    uint64_t *numbers;
    size_t pieces;
} LogUsage;

static int usage_take(PyObject *object, LogUsage *usage) {
    if (PyObject_GetBuffer(object, &usage->buffer, PyBUF_WRITABLE) < 0) {
        return -1;
    }
    size_t count = (size_t)usage->buffer.len / 8;
    if (usage->buffer.len % 8 != 0 || count % PIECE_NUMBERS != 1 || (uintptr_t)usage->buffer.buf % 8 != 0) {
        PyBuffer_Release(&usage->buffer);
        PyErr_SetString(PyExc_ValueError, "usage is no array of a sum and pieces");
        return -1;
    }
    usage->numbers = usage->buffer.buf;
    usage->pieces = count / PIECE_NUMBERS;
    return 0;
}

/* One cell of a scan, which is a tuple of key and value. */
typedef struct {
    PyObject *pair;
    Slice key, value;
    uint64_t seq;
} ScannedCell;

static int scanned_cell(PyObject *cells, Py_ssize_t index, ScannedCell *cell) {
    PyObject *pair = cell->pair = PyList_GET_ITEM(cells, index);
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError, "a cell must be a tuple of key and value");
        return -1;
    }
    if (parse_bytes(PyTuple_GET_ITEM(pair, 0), "key", &cell->key) < 0 ||
        parse_bytes(PyTuple_GET_ITEM(pair, 1), "value", &cell->value) < 0) {
        return -1;
    }
    if (cell->key.size <= SEQ_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a key has no seq");
        return -1;
    }
    cell->seq = 0;
    for (size_t at = cell->key.size - SEQ_BYTES; at < cell->key.size; at++) {
        cell->seq = cell->seq << 8 | (uint8_t)~cell->key.data[at];
    }
    return 0;
}

static int expect_cells(PyObject *cells) {
    if (PyList_CheckExact(cells)) {
        return 0;
    }
    PyErr_SetString(PyExc_TypeError, "cells must be a list");
    return -1;
}

static inline int is_kind(Slice value, uint8_t kind) {
    return value.size > 0 && (value.data[0] & 15) == kind;
}

/* What a cell points to; -1 with DataError when it is none that could point. */
static int parse_pointer(NativeState *state, Slice value, VersionCell *pointer) {
    if (version_cell_parse(value, pointer)) {
        return 0;
    }
    PyErr_Format(state->data_error, "invalid version: %zu bytes", value.size);
    return -1;
}

/* Counts a version that stays; `in_files` gets the cell of one whose value has a file of its own. */
static int usage_count(NativeState *state, LogUsage *usage, const ScannedCell *cell, PyObject *in_files) {
    usage->numbers[0] += cell->value.size;
    if (is_kind(cell->value, CELL_INLINE) && cell->value.data[0] >> 4 == CODEC_OF_FILE) {
        return PyList_Append(in_files, PyTuple_GET_ITEM(cell->pair, 1));
    }
    if (!is_kind(cell->value, CELL_POINTER)) {
        return 0;
    }
    VersionCell pointer;
    if (parse_pointer(state, cell->value, &pointer) < 0) {
        return -1;
    }
    usage->numbers[0] += pointer.stored_bytes;
    size_t low = 0, high = usage->pieces;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (usage->numbers[1 + PIECE_NUMBERS * middle] <= pointer.lsn) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low > 0) {
        uint64_t *piece = usage->numbers + 1 + PIECE_NUMBERS * (low - 1);
        piece[2] += pointer.lsn < piece[1] ? pointer.stored_bytes : 0;
    }
    return 0;
}

/* count_cells(cells, usage): the cells of values that have files of their own. */
static PyObject *pages_count_cells(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    LogUsage usage;
    if (expect_arguments("count_cells", count, 2, 2) < 0 || expect_cells(arguments[0]) < 0 ||
        usage_take(arguments[1], &usage) < 0) {
        return NULL;
    }
    PyObject *in_files = PyList_New(0);
    for (Py_ssize_t index = 0; in_files != NULL && index < PyList_GET_SIZE(arguments[0]); index++) {
        ScannedCell cell;
        if (scanned_cell(arguments[0], index, &cell) < 0 ||
            usage_count(PyModule_GetState(module), &usage, &cell, in_files) < 0) {
            Py_CLEAR(in_files);
        }
    }
    PyBuffer_Release(&usage.buffer);
    return in_files;
}

/* pointing_cells(cells, first_lsn, below_lsn, last_seq): those of versions up to a seq that point there. */
static PyObject *pages_pointing_cells(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t first_lsn, below_lsn, last_seq;
    if (expect_arguments("pointing_cells", count, 4, 4) < 0 || expect_cells(arguments[0]) < 0 ||
        parse_u64(arguments[1], &first_lsn) < 0 || parse_u64(arguments[2], &below_lsn) < 0 ||
        parse_u64(arguments[3], &last_seq) < 0) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t index = 0; found != NULL && index < PyList_GET_SIZE(arguments[0]); index++) {
        ScannedCell cell;
        VersionCell pointer;
        if (scanned_cell(arguments[0], index, &cell) < 0) {
            Py_CLEAR(found);
        } else if (is_kind(cell.value, CELL_POINTER) && cell.seq <= last_seq) {
            if (parse_pointer(PyModule_GetState(module), cell.value, &pointer) < 0 ||
                (first_lsn <= pointer.lsn && pointer.lsn < below_lsn && PyList_Append(found, cell.pair) < 0)) {
                Py_CLEAR(found);
            }
        }
    }
    return found;
}

typedef struct {
    NativeState *state;
    PyObject *cells, *created, *doomed, *others, *in_files;
    uint64_t horizon, keep_versions, kept, doomed_bytes;
    LogUsage usage;
    Slice bucket; /* the last one that was looked up: it lies in a key of `cells` */
    int is_there;
    uint64_t created_seq;
} Judging;

/* Whether a bucket is there at the horizon, and since when. */
static int look_bucket_up(Judging *judging, Slice bucket) {
    if (judging->bucket.data != NULL && judging->bucket.size == bucket.size &&
        memcmp(judging->bucket.data, bucket.data, bucket.size) == 0) {
        return 0;
    }
    judging->bucket = bucket;
    PyObject *name = PyBytes_FromStringAndSize((const char *)bucket.data, (Py_ssize_t)bucket.size);
    PyObject *found = name == NULL ? NULL : PyDict_GetItemWithError(judging->created, name);
    Py_XDECREF(name);
    judging->is_there = found != NULL;
    if (found == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    PyObject *seq = PyObject_GetAttrString(found, "seq");
    int failed = seq == NULL || parse_u64(seq, &judging->created_seq) < 0;
    Py_XDECREF(seq);
    return failed ? -1 : 0;
}

/* Whether all versions of a name are values that its bucket does not hide; -1 when it cannot be said. */
static int is_plain(Judging *judging, Py_ssize_t first, Py_ssize_t stop) {
    ScannedCell cell = {.seq = 0};
    for (Py_ssize_t index = first; index < stop; index++) {
        if (scanned_cell(judging->cells, index, &cell) < 0) {
            return -1;
        }
        if (!is_kind(cell.value, CELL_INLINE) && !is_kind(cell.value, CELL_POINTER)) {
            return 0;
        }
    }
    const uint8_t *name = cell.key.data + 1;
    const uint8_t *end = cell.key.data[0] == 'o' ? memchr(name, 0, cell.key.size - SEQ_BYTES - 1) : NULL;
    if (end == NULL) {
        return 0;
    }
    if (look_bucket_up(judging, (Slice){name, (size_t)(end - name)}) < 0) {
        return -1;
    }
    return judging->is_there && cell.seq > judging->created_seq;
}

static int give_back(Judging *judging, Py_ssize_t first, Py_ssize_t stop) {
    for (Py_ssize_t index = first; index < stop; index++) {
        if (PyList_Append(judging->others, PyList_GET_ITEM(judging->cells, index)) < 0) {
            return -1;
        }
    }
    return 0;
}

/* Judges the versions of one name, newest first; those that go are named oldest first. */
static int judge_name(Judging *judging, Py_ssize_t first, Py_ssize_t stop) {
    int plain = is_plain(judging, first, stop);
    if (plain <= 0) {
        return plain < 0 ? -1 : give_back(judging, first, stop);
    }
    uint64_t final = 0;
    ScannedCell cell;
    Py_ssize_t index = first;
    for (; index < stop; index++) {
        if (scanned_cell(judging->cells, index, &cell) < 0) {
            return -1;
        }
        if (cell.seq <= judging->horizon && final++ >= judging->keep_versions) {
            break;
        }
        judging->kept++;
        if (usage_count(judging->state, &judging->usage, &cell, judging->in_files) < 0) {
            return -1;
        }
    }
    for (Py_ssize_t last = stop; last-- > index;) {
        VersionCell pointer = {.stored_bytes = 0};
        if (scanned_cell(judging->cells, last, &cell) < 0 ||
            (is_kind(cell.value, CELL_POINTER) && parse_pointer(judging->state, cell.value, &pointer) < 0) ||
            PyList_Append(judging->doomed, PyTuple_GET_ITEM(cell.pair, 0)) < 0) {
            return -1;
        }
        judging->doomed_bytes += pointer.stored_bytes;
    }
    return 0;
}

static int have_one_name(Slice left, Slice right) {
    return left.size == right.size && memcmp(left.data, right.data, left.size - SEQ_BYTES) == 0;
}

/* Judges all names that are complete; how many cells that takes, -1 on failure. */
static Py_ssize_t judge_all(Judging *judging, int is_last) {
    Py_ssize_t count = PyList_GET_SIZE(judging->cells), first = 0;
    while (first < count) {
        ScannedCell cell, next;
        Py_ssize_t stop = first + 1;
        if (scanned_cell(judging->cells, first, &cell) < 0) {
            return -1;
        }
        for (; stop < count; stop++) {
            if (scanned_cell(judging->cells, stop, &next) < 0) {
                return -1;
            }
            if (!have_one_name(cell.key, next.key)) {
                break;
            }
        }
        if (stop == count && !is_last) {
            break;
        }
        if (judge_name(judging, first, stop) < 0) {
            return -1;
        }
        first = stop;
    }
    return first;
}

/* judge_cells(cells, is_last, horizon, keep_versions, created, usage): (cells of complete names, keys that go, bytes that
   they point to, versions that stay, cells of names that are not judged, cells of values that have files). */
static PyObject *pages_judge_cells(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Judging judging = {.state = PyModule_GetState(module)};
    if (expect_arguments("judge_cells", count, 6, 6) < 0 || expect_cells(arguments[0]) < 0 ||
        parse_u64(arguments[2], &judging.horizon) < 0 || parse_u64(arguments[3], &judging.keep_versions) < 0) {
        return NULL;
    }
    int is_last = PyObject_IsTrue(arguments[1]);
    if (is_last < 0) {
        return NULL;
    }
    if (!PyDict_Check(arguments[4])) {
        PyErr_SetString(PyExc_TypeError, "created must be a dict");
        return NULL;
    }
    if (usage_take(arguments[5], &judging.usage) < 0) {
        return NULL;
    }
    judging.cells = arguments[0];
    judging.created = arguments[4];
    judging.doomed = PyList_New(0);
    judging.others = PyList_New(0);
    judging.in_files = PyList_New(0);
    PyObject *result = NULL;
    if (judging.doomed != NULL && judging.others != NULL && judging.in_files != NULL) {
        Py_ssize_t done = judge_all(&judging, is_last);
        if (done >= 0) {
            result = Py_BuildValue("nOKKOO", done, judging.doomed, (unsigned long long)judging.doomed_bytes,
                                   (unsigned long long)judging.kept, judging.others, judging.in_files);
        }
    }
    Py_XDECREF(judging.doomed);
    Py_XDECREF(judging.others);
    Py_XDECREF(judging.in_files);
    PyBuffer_Release(&judging.usage.buffer);
    return result;
}

#endif
