/* What comes from Python: counts, indices, numbers, bytes, and buffers with the places of payloads in them. */

#ifndef TIDELOG_ARGUMENTS_H
#define TIDELOG_ARGUMENTS_H

#include "endian.h"
#include "native.h"

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

static inline int parse_bytes(PyObject *object, const char *name, Slice *slice) {
    if (!PyBytes_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be bytes, not %.100s", name, Py_TYPE(object)->tp_name);
        return -1;
    }
    *slice = (Slice){(const uint8_t *)PyBytes_AS_STRING(object), (size_t)PyBytes_GET_SIZE(object)};
    return 0;
}

static inline int parse_u64(PyObject *object, uint64_t *number) {
    *number = PyLong_AsUnsignedLongLong(object);
    return *number == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static inline int parse_u32(PyObject *object, const char *name, uint32_t *number) {
    uint64_t wide;
    if (parse_u64(object, &wide) < 0) {
        return -1;
    }
    if (wide > UINT32_MAX) {
        PyErr_Format(PyExc_OverflowError, "%s is over 4294967295", name);
        return -1;
    }
    *number = (uint32_t)wide;
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

/* checksum(data, value=0): `update` works on the inverted value, as checksums of this family do. */
static inline PyObject *checksum_with(const char *name, uint32_t (*update)(uint32_t, const uint8_t *, size_t),
                                      PyObject *const *arguments, Py_ssize_t count) {
    if (expect_arguments(name, count, 1, 2) < 0) {
        return NULL;
    }
    unsigned long value = count == 2 ? PyLong_AsUnsignedLongMask(arguments[1]) : 0;
    if (value == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    Py_buffer data;
    if (PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyThreadState *saved = release_gil_for((uint64_t)data.len);
    uint32_t crc = ~update(~(uint32_t)value, data.buf, (size_t)data.len);
    take_gil_back(saved);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

#endif
