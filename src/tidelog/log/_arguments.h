/* What both extensions take from Python: counts, indices, and buffers with the places of payloads in them. */

#ifndef TIDELOG_ARGUMENTS_H
#define TIDELOG_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_endian.h"

typedef struct {
    const uint8_t *data;
    size_t size;
} Slice;

static inline int expect_arguments(const char *name, Py_ssize_t given, Py_ssize_t least, Py_ssize_t most) {
    if (given >= least && given <= most) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "%s() takes %zd positional arguments, %zd were given", name, most, given);
    return -1;
}

/* An index or a field: from 0 on; numbers too large for any array are clamped to the largest. */
static inline int parse_index(PyObject *object, const char *name, size_t *index) {
    Py_ssize_t number = PyNumber_AsSsize_t(object, NULL);
    if (number == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (number < 0) {
        PyErr_Format(PyExc_ValueError, "%s must not be negative", name);
        return -1;
    }
    *index = (size_t)number;
    return 0;
}

/* A buffer and the places of payloads in it. The places are claims: place_of() checks each when it is used. */
typedef struct {
    Py_buffer buffer, positions, lengths;
    size_t count;
} Places;

static inline void places_release(Places *places) {
    PyBuffer_Release(&places->buffer);
    PyBuffer_Release(&places->positions);
    PyBuffer_Release(&places->lengths);
}

/* Takes three arguments: buffer, positions, lengths. */
static inline int places_take(Places *places, PyObject *const *arguments) {
    memset(places, 0, sizeof *places); /* a view of zeros may be released, so one way out serves every failure */
    if (PyObject_GetBuffer(arguments[0], &places->buffer, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(arguments[1], &places->positions, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(arguments[2], &places->lengths, PyBUF_SIMPLE) < 0) {
        places_release(places);
        return -1;
    }
    places->count = (size_t)places->lengths.len / 4;
    if (places->lengths.len % 4 != 0 || places->positions.len % 8 != 0 ||
        (size_t)places->positions.len / 8 != places->count) {
        PyErr_SetString(PyExc_ValueError, "positions and lengths are not arrays of the same count");
        places_release(places);
        return -1;
    }
    return 0;
}

/* Whether the payload lies inside the buffer, and then its bytes. Needs no GIL. */
static inline int place_is_inside(const Places *places, size_t index, Slice *payload) {
    uint64_t position = native_u64(places->positions.buf, index);
    uint32_t length = native_u32(places->lengths.buf, index);
    uint64_t size = (uint64_t)places->buffer.len;
    if (position > size || length > size - position) {
        return 0;
    }
    *payload = (Slice){(const uint8_t *)places->buffer.buf + position, length};
    return 1;
}

static inline void complain_of_place(const Places *places, size_t index) {
    PyErr_Format(PyExc_ValueError, "payload %zu is outside the buffer of %zd bytes", index, places->buffer.len);
}

/* The payload's bytes; -1 with ValueError when they are not inside the buffer. */
static inline int place_of(const Places *places, size_t index, Slice *payload) {
    if (place_is_inside(places, index, payload)) {
        return 0;
    }
    complain_of_place(places, index);
    return -1;
}

#endif
