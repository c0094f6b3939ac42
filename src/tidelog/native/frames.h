/* What the loops over frames share: ints of any size. */

#ifndef TIDELOG_FRAMES_H
#define TIDELOG_FRAMES_H

#include "arguments.h"
#include "frame.h"
#include "native.h"

/* A Python int that is compared with u64 numbers; `outside` is -1 when it is below all of them, 1 when above. */
typedef struct {
    uint64_t number;
    int outside;
} Bound;

static int parse_bound(PyObject *object, Bound *bound) {
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    bound->number = (uint64_t)number;
    bound->outside = overflow < 0 || (overflow == 0 && number < 0) ? -1 : 0;
    if (overflow > 0) {
        bound->number = PyLong_AsUnsignedLongLong(object);
        if (PyErr_Occurred()) {
            PyErr_Clear(); /* over 2**64 - 1; any other fault was found above */
            bound->outside = 1;
        }
    }
    return 0;
}

/* The largest length that may pass: lengths are u32, so anything above allows them all. */
static int parse_max_payload(PyObject *object, uint32_t *max_payload) {
    Bound bound;
    if (parse_bound(object, &bound) < 0) {
        return -1;
    }
    if (bound.outside < 0) {
        *max_payload = 0;
    } else if (bound.outside > 0 || bound.number > UINT32_MAX) {
        *max_payload = UINT32_MAX;
    } else {
        *max_payload = (uint32_t)bound.number;
    }
    return 0;
}

static int parse_position(PyObject *object, Py_ssize_t size, size_t *position) {
    Py_ssize_t number = PyNumber_AsSsize_t(object, NULL);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (number < 0 || number > size) {
        PyErr_Format(PyExc_ValueError, "position %S is outside the buffer of %zd bytes", object, size);
        return -1;
    }
    *position = (size_t)number;
    return 0;
}

#endif
