/* What became of entries, as their records say: for each that is complete its seq, what identifies it, and its
   status. tests/oracles/results.py gives the same answers, and draws what is compared; records are drawn in
   `wal/operations.py`. */

#ifndef TIDELOG_RESULTS_H
#define TIDELOG_RESULTS_H

#include "updates.h"

/* Looking over records: what recovery must know of them, without decoding them. tests/oracles/results.py
   gives the same answers. */

typedef struct {
    uint64_t applied_seq, applied_lsn, open_seq, open_lsn;
} Survey;

/* 1 when the record is neither an operation nor structure; -1 when it is none. */
static int survey_record(NativeState *state, Survey *survey, Slice record, uint64_t lsn) {
    Operation operation;
    if (!is_operation(record)) {
        return expect_header(state->data_error, record, lsn) < 0 ? -1 : record.data[0] != RECORD_STRUCTURE;
    }
    if (operation_take(state->data_error, record, lsn, &operation) < 0) {
        return -1;
    }
    if (operation.flags & RECORD_FLAG_LAST) {
        *survey = (Survey){operation.seq, lsn, 0, 0};
    } else {
        survey->open_seq = operation.seq;
        survey->open_lsn = lsn;
    }
    return 0;
}

static int survey_add_other(PyObject *others, size_t index) {
    PyObject *number = PyLong_FromSize_t(index);
    if (number == NULL) {
        return -1;
    }
    int result = PyList_Append(others, number);
    Py_DECREF(number);
    return result;
}

static int survey_all(NativeState *state, Survey *survey, const Places *places, uint64_t first_lsn, PyObject *others) {
    for (size_t index = 0; index < places->count; index++) {
        Slice record;
        if (place_of(places, index, &record) < 0) {
            return -1;
        }
        int is_other = survey_record(state, survey, record, first_lsn + index);
        if (is_other < 0 || (is_other && survey_add_other(others, index) < 0)) {
            return -1;
        }
    }
    return 0;
}

static PyObject *pages_survey(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (expect_arguments("survey", count, 6, 6) < 0) {
        return NULL;
    }
    uint64_t first_lsn = PyLong_AsUnsignedLongLong(arguments[0]);
    Survey survey = {0, 0, 0, 0};
    if (!PyErr_Occurred()) {
        survey.open_seq = PyLong_AsUnsignedLongLong(arguments[4]);
    }
    if (!PyErr_Occurred()) {
        survey.open_lsn = PyLong_AsUnsignedLongLong(arguments[5]);
    }
    Places places;
    if (PyErr_Occurred() || places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    PyObject *others = PyList_New(0), *result = NULL;
    if (others != NULL && survey_all(PyModule_GetState(module), &survey, &places, first_lsn, others) == 0) {
        result = Py_BuildValue("KKKKO", (unsigned long long)survey.applied_seq, (unsigned long long)survey.applied_lsn,
                               (unsigned long long)survey.open_seq, (unsigned long long)survey.open_lsn, others);
    }
    Py_XDECREF(others);
    places_release(&places);
    return result;
}

#define ROLLBACK_END_BYTES (RECORD_HEADER_BYTES + 8)

/* The seq of an entry that ends with this record: 1 if it does, 2 if the record ends a rollback, -1 if it is none. */
static int entry_end(NativeState *state, Slice record, uint64_t lsn, uint64_t *seq) {
    if (is_operation(record) && record.size > OPERATION_FIXED_BYTES) {
        Slice rest = {record.data + OPERATION_FIXED_BYTES, record.size - OPERATION_FIXED_BYTES};
        if (!(record.data[1] & RECORD_FLAG_LAST)) {
            return 0;
        }
        if (take_varint(&rest, UINT64_MAX, seq)) {
            return 1;
        }
    } else if (!is_operation(record) && record.size >= RECORD_HEADER_BYTES) {
        if (record.data[0] != RECORD_ROLLBACK_END) {
            return 0;
        }
        if (record.size >= ROLLBACK_END_BYTES) {
            *seq = load_u64(record.data + RECORD_HEADER_BYTES);
            return 2;
        }
    }
    PyErr_Format(state->data_error, "a record of %zu bytes is cut short, LSN %llu", record.size,
                 (unsigned long long)lsn);
    return -1;
}

static int entry_ends_add_rollback(PyObject *rollbacks, size_t count, uint64_t seq, uint64_t lsn) {
    PyObject *one = Py_BuildValue("nKK", (Py_ssize_t)count, (unsigned long long)seq, (unsigned long long)lsn);
    int result = one == NULL ? -1 : PyList_Append(rollbacks, one);
    Py_XDECREF(one);
    return result;
}

static PyObject *pages_entry_ends(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    Places places;
    if (expect_arguments("entry_ends", count, 4, 4) < 0) {
        return NULL;
    }
    uint64_t first_lsn = PyLong_AsUnsignedLongLong(arguments[0]);
    if (PyErr_Occurred() || places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    size_t found = 0, room = places.count ? places.count : 1;
    uint64_t *seqs = PyMem_RawMalloc(room * sizeof *seqs), *lsns = PyMem_RawMalloc(room * sizeof *lsns);
    PyObject *rollbacks = PyList_New(0), *answer = NULL;
    int got = seqs == NULL || lsns == NULL || rollbacks == NULL ? -1 : 0;
    for (size_t index = 0; got >= 0 && index < places.count; index++) {
        Slice record;
        uint64_t seq = 0, lsn = first_lsn + index;
        got = place_of(&places, index, &record);
        got = got < 0 ? got : entry_end(state, record, lsn, &seq);
        if (got == 1) {
            seqs[found] = seq;
            lsns[found++] = lsn;
        } else if (got == 2) {
            got = entry_ends_add_rollback(rollbacks, found, seq, lsn);
        }
    }
    if (got >= 0) {
        Py_ssize_t words = (Py_ssize_t)(found * sizeof *seqs);
        answer = Py_BuildValue("(y#y#O)", (const char *)seqs, words, (const char *)lsns, words, rollbacks);
    } else if (!PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    PyMem_RawFree(seqs);
    PyMem_RawFree(lsns);
    Py_XDECREF(rollbacks);
    places_release(&places);
    return answer;
}

#define PRINT_NAMES_BYTES 13
#define PRINT_VALUE_BYTES 12
#define STATUS_APPLIED 0
#define STATUS_NOTHING 1
#define STATUS_REFUSED 2

typedef struct {
    NativeState *state;
    uint64_t open_seq; /* the entry that is not complete; 0 for none, or for one whose beginning was not seen */
    uint32_t names, values;
    int changed;
    size_t count, room;
    uint64_t *seqs, *prints;
    uint8_t *statuses;
    PyObject *others;
} Results;

static inline uint32_t crc_on(uint32_t before, const uint8_t *data, size_t size) {
    return ~crc_update(~before, data, size);
}

static int results_room(Results *results, size_t room) {
    results->room = room;
    results->seqs = PyMem_RawMalloc((room ? room : 1) * sizeof(uint64_t));
    results->prints = PyMem_RawMalloc((room ? room : 1) * sizeof(uint64_t));
    results->statuses = PyMem_RawMalloc(room ? room : 1);
    results->others = PyList_New(0);
    if (results->seqs == NULL || results->prints == NULL || results->statuses == NULL || results->others == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void results_release(Results *results) {
    PyMem_RawFree(results->seqs);
    PyMem_RawFree(results->prints);
    PyMem_RawFree(results->statuses);
    Py_XDECREF(results->others);
}

/* A record that says more than a row can: how many rows are before what it says, and which one it is. */
static int results_add_other(Results *results, size_t index) {
    PyObject *pair = Py_BuildValue("nn", (Py_ssize_t)results->count, (Py_ssize_t)index);
    if (pair == NULL) {
        return -1;
    }
    int result = PyList_Append(results->others, pair);
    Py_DECREF(pair);
    return result;
}

static int results_add_row(Results *results, uint64_t seq, int is_refused, size_t index) {
    results->seqs[results->count] = seq;
    results->prints[results->count] = (uint64_t)results->names << 32 | results->values;
    results->statuses[results->count++] = is_refused          ? STATUS_REFUSED
                                          : results->changed ? STATUS_APPLIED
                                                             : STATUS_NOTHING;
    return is_refused ? results_add_other(results, index) : 0;
}

static void results_print(Results *results, const Operation *operation) {
    uint8_t names[PRINT_NAMES_BYTES], value[PRINT_VALUE_BYTES] = {0};
    store_u32(names, (uint32_t)operation->order);
    names[4] = operation->op;
    for (int name = 0; name < 4; name++) {
        store_u16(names + 5 + 2 * name, (uint16_t)operation->names[name].size);
    }
    if (operation->op != OP_COPY_OBJECT) {
        store_u32(value, operation->crc);
        store_u64(value + 4, operation->size);
    }
    results->names = crc_on(results->names, names, sizeof names);
    for (int name = 0; name < 4; name++) {
        results->names = crc_on(results->names, operation->names[name].data, operation->names[name].size);
    }
    results->values = crc_on(results->values, value, sizeof value);
}

static int results_add_operation(Results *results, Slice record, uint64_t lsn, size_t index) {
    Operation operation;
    if (operation_take(results->state->data_error, record, lsn, &operation) < 0) {
        return -1;
    }
    if (operation.previous_lsn == 0) {
        results->open_seq = operation.seq;
        results->names = results->values = 0;
        results->changed = 0;
    } else if (operation.seq != results->open_seq) {
        results->open_seq = 0;
        return 0;
    }
    results_print(results, &operation);
    results->changed |= operation.updates.size > 0;
    if (!(operation.flags & RECORD_FLAG_LAST)) {
        return 0;
    }
    results->open_seq = 0;
    return results_add_row(results, operation.seq, operation.flags & RECORD_FLAG_REFUSED, index);
}

static int results_add(Results *results, Slice record, uint64_t lsn, size_t index) {
    if (is_operation(record)) {
        return results_add_operation(results, record, lsn, index);
    }
    if (expect_header(results->state->data_error, record, lsn) < 0) {
        return -1;
    }
    return record.data[0] == RECORD_ROLLBACK_END ? results_add_other(results, index) : 0;
}

static int results_take_open(PyObject *open, Results *results) {
    unsigned long long seq;
    unsigned int names, values;
    if (!PyTuple_Check(open) || !PyArg_ParseTuple(open, "KIIp", &seq, &names, &values, &results->changed)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "open must be a tuple");
        }
        return -1;
    }
    results->open_seq = seq;
    results->names = names;
    results->values = values;
    return 0;
}

static PyObject *results_answer(const Results *results) {
    Py_ssize_t words = (Py_ssize_t)(results->count * sizeof(uint64_t));
    return Py_BuildValue("(y#y#y#O(KIIN))", (const char *)results->seqs, words, (const char *)results->prints, words,
                         (const char *)results->statuses, (Py_ssize_t)results->count, results->others,
                         (unsigned long long)results->open_seq, (unsigned int)results->names,
                         (unsigned int)results->values, PyBool_FromLong(results->changed));
}

static PyObject *pages_results_in(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Results results = {.state = PyModule_GetState(module)};
    Places places;
    if (expect_arguments("results_in", count, 5, 5) < 0) {
        return NULL;
    }
    uint64_t first_lsn = PyLong_AsUnsignedLongLong(arguments[0]);
    if (PyErr_Occurred() || results_take_open(arguments[4], &results) < 0 || places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    int got = results_room(&results, places.count);
    for (size_t index = 0; got == 0 && index < places.count; index++) {
        Slice record;
        got = place_of(&places, index, &record);
        if (got == 0) {
            got = results_add(&results, record, first_lsn + index, index);
        }
    }
    PyObject *answer = got < 0 ? NULL : results_answer(&results);
    results_release(&results);
    places_release(&places);
    return answer;
}

static PyObject *pages_results_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Results results = {.state = PyModule_GetState(module)};
    if (expect_arguments("results_of", count, 3, 3) < 0) {
        return NULL;
    }
    uint64_t first_lsn = PyLong_AsUnsignedLongLong(arguments[0]);
    if (PyErr_Occurred() || results_take_open(arguments[2], &results) < 0) {
        return NULL;
    }
    if (!PyList_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "records must be a list");
        return NULL;
    }
    size_t records = (size_t)PyList_GET_SIZE(arguments[1]);
    int got = results_room(&results, records);
    for (size_t index = 0; got == 0 && index < records; index++) {
        Slice record;
        got = parse_bytes(PyList_GET_ITEM(arguments[1], (Py_ssize_t)index), "a record", &record);
        if (got == 0) {
            got = results_add(&results, record, first_lsn + index, index);
        }
    }
    PyObject *answer = got < 0 ? NULL : results_answer(&results);
    results_release(&results);
    return answer;
}

#endif
