/* murmur2 as Kafka's clients compute it: which partition a key belongs to must be the same for all of them. */

#ifndef TIDELOG_MURMUR2_H
#define TIDELOG_MURMUR2_H

#include "arguments.h"
#include "endian.h"
#include "native.h"

static uint32_t murmur2_hash(const uint8_t *data, size_t size) {
    const uint32_t factor = 0x5bd1e995;
    uint32_t hash = 0x9747b28c ^ (uint32_t)size;
    size_t whole = size & ~(size_t)3;
    for (size_t at = 0; at < whole; at += 4) {
        uint32_t word = load_u32(data + at) * factor;
        word = (word ^ word >> 24) * factor;
        hash = hash * factor ^ word;
    }
    switch (size & 3) {
    case 3:
        hash ^= (uint32_t)data[whole + 2] << 16; /* fall through */
    case 2:
        hash ^= (uint32_t)data[whole + 1] << 8; /* fall through */
    case 1:
        hash = (hash ^ data[whole]) * factor;
    }
    hash = (hash ^ hash >> 13) * factor;
    return hash ^ hash >> 15;
}

static PyObject *murmur2(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t argument_count) {
    Py_buffer view;
    if (expect_arguments("murmur2", argument_count, 1, 1) < 0 ||
        PyObject_GetBuffer(arguments[0], &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    uint32_t hash = murmur2_hash(view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(hash);
}

#endif
