/* Payloads whose places are known: copies of them, and the i64 that each holds at the same byte. */

#ifndef TIDELOG_FRAMES_PAYLOADS_H
#define TIDELOG_FRAMES_PAYLOADS_H

#include "frames.h"

#define FIELD_BYTES 8

static PyObject *copy_payloads(const Places *places, size_t start, size_t stop) {
    PyObject *copies = PyList_New((Py_ssize_t)(stop - start));
    for (size_t index = start; copies != NULL && index < stop; index++) {
        Slice payload;
        PyObject *copy = NULL;
        if (place_of(places, index, &payload) == 0) {
            copy = PyBytes_FromStringAndSize((const char *)payload.data, (Py_ssize_t)payload.size);
        }
        if (copy == NULL) {
            Py_CLEAR(copies);
        } else {
            PyList_SET_ITEM(copies, (Py_ssize_t)(index - start), copy);
        }
    }
    return copies;
}

static PyObject *frames_payloads(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t argument_count) {
    Places places;
    size_t start, stop;
    if (expect_arguments("payloads", argument_count, 5, 5) < 0 || parse_index(arguments[3], "start", &start) < 0 ||
        parse_index(arguments[4], "stop", &stop) < 0 || places_take(&places, arguments) < 0) {
        return NULL;
    }
    stop = stop < places.count ? stop : places.count;
    start = start < stop ? start : stop;
    PyObject *copies = copy_payloads(&places, start, stop);
    places_release(&places);
    return copies;
}

/* Reads the i64 at byte `field` of a payload: 1 when there is one, 0 when the payload is too short, -1 on error. */
static inline int read_field(const Places *places, size_t index, size_t field, int64_t *number) {
    Slice payload;
    if (place_of(places, index, &payload) < 0) {
        return -1;
    }
    if (payload.size < FIELD_BYTES || field > payload.size - FIELD_BYTES) {
        return 0;
    }
    *number = (int64_t)load_u64(payload.data + field);
    return 1;
}

/* 1 when some payload has the field, 0 when none has it, -1 on error. */
static int range_of_field(const Places *places, size_t field, int64_t *least, int64_t *most) {
    int any = 0;
    for (size_t index = 0; index < places->count; index++) {
        int64_t number;
        int got = read_field(places, index, field, &number);
        if (got < 0) {
            return -1;
        }
        if (got > 0) {
            *least = !any || number < *least ? number : *least;
            *most = !any || number > *most ? number : *most;
            any = 1;
        }
    }
    return any;
}

static PyObject *frames_field_range(PyObject *Py_UNUSED(module), PyObject *const *arguments,
                                    Py_ssize_t argument_count) {
    Places places;
    size_t field;
    if (expect_arguments("field_range", argument_count, 4, 4) < 0 || parse_index(arguments[3], "field", &field) < 0 ||
        places_take(&places, arguments) < 0) {
        return NULL;
    }
    int64_t least = 0, most = 0;
    int got = range_of_field(&places, field, &least, &most);
    places_release(&places);
    if (got < 0) {
        return NULL;
    }
    if (got == 0) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(LL)", (long long)least, (long long)most);
}

/* The index of the first payload whose field is at least `minimum`, -1 when there is none, -2 on error.
   `outside` is -1 when every number is large enough and 1 when none is. */
static Py_ssize_t seek_field(const Places *places, size_t start, size_t field, int64_t minimum, int outside) {
    for (size_t index = start; index < places->count; index++) {
        int64_t number;
        int got = read_field(places, index, field, &number);
        if (got < 0) {
            return -2;
        }
        if (got > 0 && (outside < 0 || (outside == 0 && number >= minimum))) {
            return (Py_ssize_t)index;
        }
    }
    return -1;
}

static PyObject *frames_first_at_least(PyObject *Py_UNUSED(module), PyObject *const *arguments,
                                       Py_ssize_t argument_count) {
    Places places;
    size_t field, start;
    if (expect_arguments("first_at_least", argument_count, 6, 6) < 0) {
        return NULL;
    }
    int outside;
    long long minimum = PyLong_AsLongLongAndOverflow(arguments[4], &outside);
    if ((minimum == -1 && PyErr_Occurred()) || parse_index(arguments[3], "field", &field) < 0 ||
        parse_index(arguments[5], "start", &start) < 0 || places_take(&places, arguments) < 0) {
        return NULL;
    }
    Py_ssize_t index = seek_field(&places, start, field, minimum, outside);
    places_release(&places);
    return index == -2 ? NULL : PyLong_FromSsize_t(index);
}

#endif
