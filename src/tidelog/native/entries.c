/* Records of the log as columns: which of them count, and what they say. tests/oracles/entry_columns.py
   defines every answer; the record is drawn in `wal/operations.py`, its value in `wal/value.py`.

   Invariants
   - Bytes are hostile: nothing is read that was not checked to lie inside of its record, and nothing is written that
     was not counted before.
   - Records are looked at twice: to check and to measure them, then to copy. Only the first can fail. */

#include "crc32.h"
#include "entries_encode.h"
#include "entries_versions.h"
#include "metadata_columns.h"
#include "native.h"
#include "operation.h"

#define CODEC_FILE 2

#define STILL_OPEN 0
#define COUNTS 1
#define NEVER_COMPLETE 2

#define WANT_NAMES 1
#define WANT_SOURCES 2
#define WANT_REASONS 4
#define WANT_METADATA 8
#define WANT_VALUES 16

#define STRINGS 7
#define NUMBERS 9

static int complain(NativeState *state, const char *text, uint64_t lsn) {
    PyErr_Format(state->data_error, "%s, LSN %llu", text, (unsigned long long)lsn);
    return -1;
}

/* ---- select_entries ---- */

typedef struct {
    uint32_t *items;
    size_t count;
} Indexes;

typedef struct {
    uint64_t first_lsn, first_seq, last_seq, open_seq;
    size_t start, stop, owned_stop;
    const uint8_t *dead;
    size_t dead_count, at_dead;
    Indexes chosen, pending;
    int fate, met_next, removals;
} Selection;

static int is_dead(Selection *selection, uint64_t lsn) {
    while (selection->at_dead < selection->dead_count && native_u64(selection->dead, selection->at_dead + 1) < lsn) {
        selection->at_dead += 2;
    }
    return selection->at_dead < selection->dead_count && native_u64(selection->dead, selection->at_dead) <= lsn;
}

static void settle(Selection *selection, int fate) {
    if (selection->fate == STILL_OPEN && selection->open_seq != 0) {
        selection->fate = fate;
    }
    selection->open_seq = 0;
}

/* The record of an operation that was not rolled back. 1: it begins an entry that is not ours, nor is what follows. */
static int select_operation(Selection *selection, const Operation *operation, size_t index) {
    uint64_t seq = operation->seq, previous_lsn = operation->previous_lsn;
    if (previous_lsn == 0 || seq != selection->open_seq) {
        settle(selection, NEVER_COMPLETE);
        selection->pending.count = 0;
        if (index >= selection->owned_stop) {
            return 1;
        }
        if (previous_lsn != 0) {
            return 0; /* the entry began before the first record here: it is somebody else's */
        }
    }
    if (selection->first_seq <= seq && seq <= selection->last_seq) {
        selection->pending.items[selection->pending.count++] = (uint32_t)index;
    }
    if (operation->flags & RECORD_FLAG_LAST) {
        settle(selection, COUNTS);
        memcpy(selection->chosen.items + selection->chosen.count, selection->pending.items,
               selection->pending.count * sizeof(uint32_t));
        selection->chosen.count += selection->pending.count;
        selection->pending.count = 0;
    } else {
        selection->open_seq = seq;
    }
    return 0;
}

static int select_all(NativeState *state, Selection *selection, const Places *places) {
    for (size_t index = selection->start; index < places->count && index < selection->stop; index++) {
        Slice record;
        if (place_of(places, index, &record) < 0) {
            return -1;
        }
        uint64_t lsn = selection->first_lsn + index;
        int is_own = is_operation(record);
        if (!is_own && expect_header(state->data_error, record, lsn) < 0) {
            return -1;
        }
        if (selection->removals && record.data[0] == RECORD_VACUUM && index < selection->owned_stop) {
            selection->chosen.items[selection->chosen.count++] = (uint32_t)index; /* dead or not */
            continue;
        }
        int is_rollback = record.data[0] == RECORD_ROLLBACK_END && index < selection->owned_stop;
        if ((!is_own && !is_rollback) || is_dead(selection, lsn)) {
            continue;
        }
        if (is_rollback) {
            PyErr_Format(state->data_error, "what was rolled back before LSN %llu is no longer known",
                         (unsigned long long)lsn);
            return -1;
        }
        Operation operation;
        if (operation_take(state->data_error, record, lsn, &operation) < 0) {
            return -1;
        }
        if (select_operation(selection, &operation, index)) {
            selection->met_next = 1;
            return 0;
        }
    }
    return 0;
}

static PyObject *selected(const Selection *selection) {
    const Indexes *chosen = &selection->chosen, *pending = &selection->pending;
    return Py_BuildValue("iy#y#KO", selection->fate, (const char *)chosen->items,
                         (Py_ssize_t)(chosen->count * sizeof(uint32_t)), (const char *)pending->items,
                         (Py_ssize_t)(pending->count * sizeof(uint32_t)), (unsigned long long)selection->open_seq,
                         selection->met_next ? Py_True : Py_False);
}

static int take_selection(PyObject *const *arguments, Selection *selection) {
    if (parse_u64(arguments[0], &selection->first_lsn) < 0 || parse_index(arguments[4], "start", &selection->start) < 0 ||
        parse_index(arguments[5], "stop", &selection->stop) < 0 ||
        parse_index(arguments[6], "owned_stop", &selection->owned_stop) < 0 ||
        parse_u64(arguments[8], &selection->first_seq) < 0 || parse_u64(arguments[9], &selection->last_seq) < 0) {
        return -1;
    }
    selection->removals = PyObject_IsTrue(arguments[11]);
    return selection->removals < 0 ? -1 : parse_u64(arguments[10], &selection->open_seq);
}

static PyObject *entries_select(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Selection selection;
    memset(&selection, 0, sizeof selection);
    Places places;
    if (expect_arguments("select_entries", count, 12, 12) < 0 || take_selection(arguments, &selection) < 0 ||
        places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    Py_buffer dead;
    if (PyObject_GetBuffer(arguments[7], &dead, PyBUF_SIMPLE) < 0) {
        places_release(&places);
        return NULL;
    }
    selection.dead = dead.buf;
    selection.dead_count = (size_t)dead.len / 16 * 2;
    PyObject *result = NULL;
    size_t room = (places.count + 1) * sizeof(uint32_t);
    selection.chosen.items = PyMem_Malloc(room);
    selection.pending.items = PyMem_Malloc(room);
    if (selection.chosen.items == NULL || selection.pending.items == NULL) {
        PyErr_NoMemory();
    } else if (select_all(PyModule_GetState(module), &selection, &places) == 0) {
        result = selected(&selection);
    }
    PyMem_Free(selection.chosen.items);
    PyMem_Free(selection.pending.items);
    PyBuffer_Release(&dead);
    places_release(&places);
    return result;
}

/* ---- gather_entries ---- */

typedef struct {
    uint64_t lsn;
    Operation operation;
    Slice strings[STRINGS];
    int is_compressed;
} Row;

static const int asked[OPERATION_NAMES] = {WANT_NAMES, WANT_NAMES, WANT_SOURCES, WANT_SOURCES, WANT_REASONS};

static int has_right_names(const Operation *operation) {
    uint8_t op = operation->op;
    const Slice *names = operation->names;
    int is_copy = op == OP_COPY_OBJECT;
    if (op < 1 || op > OP_COPY_OBJECT || names[0].size == 0) {
        return 0;
    }
    return (names[1].size != 0) == (op >= OP_PUT_OBJECT) && (names[2].size != 0) == is_copy &&
           (names[3].size != 0) == is_copy;
}

static int check_operation(NativeState *state, const Operation *operation, uint64_t lsn) {
    int has_value = operation->op == OP_PUT_OBJECT && !(operation->flags & RECORD_FLAG_REFUSED);
    if (!has_right_names(operation) || operation->seq == 0 || operation->codec > CODEC_FILE ||
        (operation->stored.size != 0) != has_value) {
        return complain(state, "a record that cannot be an operation", lsn);
    }
    return 0;
}

static void find_names(Row *row, int wanted) {
    for (int name = 0; name < OPERATION_NAMES; name++) {
        Slice text = row->operation.names[name];
        row->strings[name] = (Slice){text.data, wanted & asked[name] ? text.size : 0};
    }
}

/* Metadata and data of a value that is stored as it is. */
static int find_value(NativeState *state, Row *row, int wanted) {
    const Operation *operation = &row->operation;
    const uint8_t *value = operation->stored.data;
    size_t stored_bytes = operation->stored.size;
    row->strings[5] = row->strings[6] = (Slice){value, 0};
    row->is_compressed = stored_bytes != 0 && operation->codec != 0;
    if (stored_bytes == 0 || row->is_compressed || !(wanted & (WANT_METADATA | WANT_VALUES))) {
        return 0;
    }
    if (crc_of(value, stored_bytes) != operation->crc) {
        return complain(state, "the checksum of the object's value does not match", row->lsn);
    }
    uint64_t metadata_bytes = stored_bytes >= METADATA_LENGTH_BYTES ? load_u32(value) : 0;
    uint64_t size = operation->size, rest = stored_bytes - METADATA_LENGTH_BYTES;
    if (stored_bytes < METADATA_LENGTH_BYTES || metadata_bytes > rest || size != rest - metadata_bytes) {
        PyErr_Format(state->data_error, "a value of %zu bytes cannot hold %llu and %llu bytes, LSN %llu", stored_bytes,
                     (unsigned long long)metadata_bytes, (unsigned long long)size, (unsigned long long)row->lsn);
        return -1;
    }
    value += METADATA_LENGTH_BYTES;
    row->strings[5] = (Slice){value, wanted & WANT_METADATA ? (size_t)metadata_bytes : 0};
    row->strings[6] = (Slice){value + metadata_bytes, wanted & WANT_VALUES ? (size_t)size : 0};
    return 0;
}

typedef struct {
    uint64_t first_lsn;
    Places places;
    Py_buffer indexes;
    size_t start, max_rows, max_bytes;
    int wanted;
    size_t rows, compressed, bytes[STRINGS];
} Gathering;

static int find_row(NativeState *state, const Gathering *gathering, size_t at, Row *row) {
    size_t index = native_u32(gathering->indexes.buf, at);
    Slice record;
    if (index >= gathering->places.count) {
        PyErr_SetString(PyExc_ValueError, "an index is behind the last record");
        return -1;
    }
    row->lsn = gathering->first_lsn + index;
    if (place_of(&gathering->places, index, &record) < 0 ||
        operation_take(state->data_error, record, row->lsn, &row->operation) < 0 ||
        check_operation(state, &row->operation, row->lsn) < 0) {
        return -1;
    }
    find_names(row, gathering->wanted);
    return find_value(state, row, gathering->wanted);
}

static int measure(NativeState *state, Gathering *gathering, Row *rows, size_t room) {
    uint64_t total = 0;
    while (gathering->rows < room && (gathering->rows == 0 || total < gathering->max_bytes)) {
        Row *row = &rows[gathering->rows];
        if (find_row(state, gathering, gathering->start + gathering->rows, row) < 0) {
            return -1;
        }
        for (int name = 0; name < STRINGS; name++) {
            gathering->bytes[name] += row->strings[name].size;
            total += row->strings[name].size;
        }
        gathering->compressed += (size_t)row->is_compressed;
        gathering->rows++;
    }
    if (total > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "more bytes than a column can hold");
        return -1;
    }
    return 0;
}

static const size_t widths[NUMBERS] = {8, 8, 8, 8, 4, 4, 1, 1, 1};

static void copy_numbers(uint8_t *const *columns, const Row *row, size_t at) {
    const Operation *operation = &row->operation;
    const uint64_t wide[4] = {operation->seq, row->lsn, operation->time_us, operation->size};
    for (int column = 0; column < 4; column++) {
        store_u64(columns[column] + 8 * at, wide[column]);
    }
    store_u32(columns[4] + 4 * at, operation->crc);
    store_u32(columns[5] + 4 * at, (uint32_t)operation->order);
    columns[6][at] = operation->op;
    columns[7][at] = operation->flags;
    columns[8][at] = operation->codec;
}

static void copy_strings(uint8_t *ends, uint8_t *data, const Row *rows, size_t count, int name) {
    uint32_t end = 0;
    store_u32(ends, 0);
    for (size_t at = 0; at < count; at++) {
        Slice text = rows[at].strings[name];
        memcpy(data + end, text.data, text.size);
        end += (uint32_t)text.size;
        store_u32(ends + 4 * (at + 1), end);
    }
}

static int fill(const Gathering *gathering, const Row *rows, PyObject *numbers, PyObject *strings) {
    uint8_t *columns[NUMBERS];
    for (int column = 0; column < NUMBERS; column++) {
        columns[column] = add_bytes(numbers, column, widths[column] * gathering->rows);
        if (columns[column] == NULL) {
            return -1;
        }
    }
    for (size_t at = 0; at < gathering->rows; at++) {
        copy_numbers(columns, &rows[at], at);
    }
    for (int name = 0; name < STRINGS; name++) {
        uint8_t *ends = add_bytes(strings, 2 * name, 4 * (gathering->rows + 1));
        uint8_t *data = ends == NULL ? NULL : add_bytes(strings, 2 * name + 1, gathering->bytes[name]);
        if (data == NULL) {
            return -1;
        }
        copy_strings(ends, data, rows, gathering->rows, name);
    }
    return 0;
}

static PyObject *gathered(NativeState *state, Gathering *gathering, Row *rows, size_t room) {
    if (measure(state, gathering, rows, room) < 0) {
        return NULL;
    }
    PyObject *numbers = PyTuple_New(NUMBERS), *strings = PyTuple_New(2 * STRINGS), *result = NULL;
    if (numbers != NULL && strings != NULL && fill(gathering, rows, numbers, strings) == 0) {
        result = Py_BuildValue("nnnOO", (Py_ssize_t)gathering->rows, (Py_ssize_t)(gathering->start + gathering->rows),
                               (Py_ssize_t)gathering->compressed, numbers, strings);
    }
    Py_XDECREF(numbers);
    Py_XDECREF(strings);
    return result;
}

static int take_gathering(PyObject *const *arguments, Gathering *gathering) {
    size_t wanted = 0;
    if (parse_u64(arguments[0], &gathering->first_lsn) < 0 || parse_index(arguments[5], "start", &gathering->start) < 0 ||
        parse_index(arguments[6], "wanted", &wanted) < 0 ||
        parse_index(arguments[7], "max_rows", &gathering->max_rows) < 0) {
        return -1;
    }
    gathering->wanted = (int)(wanted & 31);
    return parse_index(arguments[8], "max_bytes", &gathering->max_bytes);
}

static PyObject *entries_gather(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Gathering gathering;
    memset(&gathering, 0, sizeof gathering);
    if (expect_arguments("gather_entries", count, 9, 9) < 0 || take_gathering(arguments, &gathering) < 0 ||
        places_take(&gathering.places, arguments + 1) < 0) {
        return NULL;
    }
    if (PyObject_GetBuffer(arguments[4], &gathering.indexes, PyBUF_SIMPLE) < 0) {
        places_release(&gathering.places);
        return NULL;
    }
    size_t there = (size_t)gathering.indexes.len / 4;
    size_t room = gathering.start < there ? there - gathering.start : 0;
    room = room < gathering.max_rows ? room : gathering.max_rows;
    Row *rows = PyMem_Malloc((room + 1) * sizeof(Row));
    PyObject *result = rows == NULL ? PyErr_NoMemory() : gathered(PyModule_GetState(module), &gathering, rows, room);
    PyMem_Free(rows);
    PyBuffer_Release(&gathering.indexes);
    places_release(&gathering.places);
    return result;
}

/* ---- the module ---- */

PyMethodDef entry_methods[] = {
    {"select_entries", (PyCFunction)(void (*)(void))entries_select, METH_FASTCALL,
     PyDoc_STR("select_entries(first_lsn, buffer, positions, lengths, start, stop, owned_stop, dead, first_seq, last_seq, "
               "open_seq, removals): (fate, indexes that count, indexes of an open entry, its seq, whether the next was met).")},
    {"gather_entries", (PyCFunction)(void (*)(void))entries_gather, METH_FASTCALL,
     PyDoc_STR("gather_entries(first_lsn, buffer, positions, lengths, indexes, start, wanted, max_rows, max_bytes): "
               "(rows, where to go on, compressed rows, numbers, strings).")},
    {"encode_plain_entries", (PyCFunction)(void (*)(void))entries_encode_plain, METH_FASTCALL,
     PyDoc_STR("encode_plain_entries(first_lsn, buffer, positions, lengths, indexes, start, max_records, max_bytes): "
               "(entries, where to go on, (seqs, times, value ends, values)).")},
    {"metadata_columns", (PyCFunction)(void (*)(void))entries_metadata_columns, METH_FASTCALL,
     PyDoc_STR("metadata_columns(ends, data): (ends, name ends, names, value ends, values, a byte a value: 0 for null); None "
               "where a row has what only a decoder understands.")},
    {"gather_versions", (PyCFunction)(void (*)(void))entries_gather_versions, METH_FASTCALL,
     PyDoc_STR("gather_versions(raw, seq, all_versions, start, stop, settled, bucket_ends, bucket_names, bucket_seqs, "
               "bucket_orders): (versions, the name decided about last, numbers, strings).")},
    {"gather_rows", (PyCFunction)(void (*)(void))entries_gather_rows, METH_FASTCALL,
     PyDoc_STR("gather_rows(raw, seq, all_versions, start, stop, settled, bucket_ends, bucket_names, bucket_seqs, "
               "bucket_orders, columns): (the name decided about last, rows of a listing).")},
    {NULL, NULL, 0, NULL},
};
