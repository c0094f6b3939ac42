/* What became of entries, as their records say: for each that is complete its seq, what it is told apart by, and its
   status. `results_python.py` is the twin, and draws what is compared; records are drawn in `operation_record.py`. */

#ifndef TIDELOG_ENGINE_RESULTS_H
#define TIDELOG_ENGINE_RESULTS_H

#include "_engine_survey.h"

#define RECORD_ROLLBACK_END 7
#define RECORD_FLAG_REFUSED 2
#define OPERATION_BYTES 72
#define OPERATION_NAMES_AT 40
#define OPERATION_NAMES_BYTES 13
#define OPERATION_OP_AT 44
#define OPERATION_LENGTHS_AT 45
#define OPERATION_BODY_AT 55
#define OPERATION_BODY_BYTES 12
#define OP_COPY_OBJECT 6
#define STATUS_APPLIED 0
#define STATUS_NOTHING 1
#define STATUS_REFUSED 2

typedef struct {
    EngineState *state;
    uint64_t open_seq; /* the entry that is not complete; 0 for none, or for one whose beginning was not seen */
    uint32_t names, bodies;
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
    results->prints[results->count] = (uint64_t)results->names << 32 | results->bodies;
    results->statuses[results->count++] = is_refused          ? STATUS_REFUSED
                                          : results->changed ? STATUS_APPLIED
                                                             : STATUS_NOTHING;
    return is_refused ? results_add_other(results, index) : 0;
}

static int results_add_operation(Results *results, Slice record, uint64_t lsn, size_t index) {
    static const uint8_t nothing[OPERATION_BODY_BYTES] = {0};
    const uint8_t *at = record.data;
    if (record.size < OPERATION_BYTES) {
        return complain_of_record(results->state, lsn, "it is too short for an operation");
    }
    uint64_t seq = load_u64(at + 8);
    size_t names = 0;
    for (int name = 0; name < 4; name++) {
        names += load_u16(at + OPERATION_LENGTHS_AT + 2 * name);
    }
    if (OPERATION_BYTES + names > record.size) {
        return complain_of_record(results->state, lsn, "its names go beyond its end");
    }
    if (load_u64(at + 16) == 0) {
        results->open_seq = seq;
        results->names = results->bodies = 0;
        results->changed = 0;
    } else if (seq != results->open_seq) {
        results->open_seq = 0;
        return 0;
    }
    const uint8_t *body = at[OPERATION_OP_AT] == OP_COPY_OBJECT ? nothing : at + OPERATION_BODY_AT;
    results->names = crc_on(results->names, at + OPERATION_NAMES_AT, OPERATION_NAMES_BYTES);
    results->names = crc_on(results->names, at + OPERATION_BYTES, names);
    results->bodies = crc_on(results->bodies, body, OPERATION_BODY_BYTES);
    results->changed |= load_u32(at + 4) < record.size;
    if (!(at[1] & RECORD_FLAG_LAST)) {
        return 0;
    }
    results->open_seq = 0;
    return results_add_row(results, seq, at[1] & RECORD_FLAG_REFUSED, index);
}

static int results_add(Results *results, Slice record, uint64_t lsn, size_t index) {
    if (record.size < RECORD_HEADER_BYTES) {
        return complain_of_record(results->state, lsn, "it is too short for a record");
    }
    if (record.data[0] == RECORD_OPERATION) {
        return results_add_operation(results, record, lsn, index);
    }
    return record.data[0] == RECORD_ROLLBACK_END ? results_add_other(results, index) : 0;
}

static int results_take_open(PyObject *open, Results *results) {
    unsigned long long seq;
    unsigned int names, bodies;
    if (!PyTuple_Check(open) || !PyArg_ParseTuple(open, "KIIp", &seq, &names, &bodies, &results->changed)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "open must be a tuple");
        }
        return -1;
    }
    results->open_seq = seq;
    results->names = names;
    results->bodies = bodies;
    return 0;
}

static PyObject *results_answer(const Results *results) {
    Py_ssize_t words = (Py_ssize_t)(results->count * sizeof(uint64_t));
    return Py_BuildValue("(y#y#y#O(KIIN))", (const char *)results->seqs, words, (const char *)results->prints, words,
                         (const char *)results->statuses, (Py_ssize_t)results->count, results->others,
                         (unsigned long long)results->open_seq, (unsigned int)results->names,
                         (unsigned int)results->bodies, PyBool_FromLong(results->changed));
}

static PyObject *engine_results_in(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
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

static PyObject *engine_results_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
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
