/* Looking over records: what recovery must know of them, without decoding them. `survey_python.py` is the twin. */

#ifndef TIDELOG_ENGINE_SURVEY_H
#define TIDELOG_ENGINE_SURVEY_H

#include "_engine_updates.h"

#define RECORD_OPERATION 1
#define RECORD_STRUCTURE 2
#define RECORD_FLAG_LAST 1

typedef struct {
    uint64_t applied_seq, applied_lsn, open_seq, open_lsn;
} Survey;

/* 1 when the record is neither an operation nor structure. */
static int survey_record(Survey *survey, const uint8_t *record, uint64_t lsn) {
    uint8_t kind = record[0];
    if (kind != RECORD_OPERATION) {
        return kind != RECORD_STRUCTURE;
    }
    uint64_t transaction = load_u64(record + 8);
    if (record[1] & RECORD_FLAG_LAST) {
        *survey = (Survey){transaction, lsn, 0, 0};
    } else {
        survey->open_seq = transaction;
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

static int survey_all(EngineState *state, Survey *survey, const Places *places, uint64_t first_lsn, PyObject *others) {
    for (size_t index = 0; index < places->count; index++) {
        Slice record;
        if (place_of(places, index, &record) < 0) {
            return -1;
        }
        if (record.size < RECORD_HEADER_BYTES) {
            return complain_of_record(state, first_lsn + index, "it is too short for a record");
        }
        if (survey_record(survey, record.data, first_lsn + index) && survey_add_other(others, index) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *engine_survey(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
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

#endif
