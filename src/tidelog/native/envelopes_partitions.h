/* Which partition each row of a column of keys belongs to: that of its key, and rows without one take turns. */

#ifndef TIDELOG_ENVELOPES_PARTITIONS_H
#define TIDELOG_ENVELOPES_PARTITIONS_H

#include "arrow.h"
#include "murmur2.h"

typedef struct {
    Column keys;
    int has_keys;
    size_t count, partitions, turn;
} Routing;

/* Writes the numbers; 0 when a key does not lie in the data. */
static int route_rows(Routing *routing, uint8_t *to) {
    for (size_t row = 0; row < routing->count; row++) {
        Slice key;
        if (routing->has_keys && !row_slice(&routing->keys, row, &key)) {
            return 0;
        }
        uint32_t number;
        if (routing->has_keys && !is_null(&routing->keys, row)) {
            number = (murmur2_hash(key.data, key.size) & 0x7FFFFFFF) % (uint32_t)routing->partitions;
        } else {
            number = (uint32_t)(routing->turn % routing->partitions);
            routing->turn = number + 1;
        }
        store_u32(to + 4 * row, number);
    }
    return 1;
}

static PyObject *routing_run(Routing *routing) {
    if (routing->has_keys && routing->keys.rows < routing->count) {
        PyErr_SetString(PyExc_ValueError, "the column has fewer rows than were announced");
        return NULL;
    }
    PyObject *numbers = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * routing->count));
    if (numbers == NULL) {
        return NULL;
    }
    PyThreadState *saved = release_gil_for((uint64_t)routing->count * FIXED_BYTES);
    int fits = route_rows(routing, (uint8_t *)PyBytes_AS_STRING(numbers));
    take_gil_back(saved);
    if (!fits) {
        Py_DECREF(numbers);
        PyErr_SetString(PyExc_ValueError, "a key lies outside the data of its column");
        return NULL;
    }
    return Py_BuildValue("(Nn)", numbers, (Py_ssize_t)routing->turn);
}

static PyObject *envelopes_partitions_of(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Routing routing = {0};
    if (expect_arguments("partitions_of", given, 4, 4) < 0 || parse_index(arguments[0], "count", &routing.count) < 0 ||
        parse_index(arguments[2], "partitions", &routing.partitions) < 0 ||
        parse_index(arguments[3], "turn", &routing.turn) < 0) {
        return NULL;
    }
    if (routing.partitions < 1 || routing.partitions > INT32_MAX || routing.count > PY_SSIZE_T_MAX / 4) {
        PyErr_SetString(PyExc_ValueError, "partitions must be in the range 1 to 2**31 - 1");
        return NULL;
    }
    routing.has_keys = arguments[1] != Py_None;
    PyObject *result = NULL;
    if (!routing.has_keys || column_take_bytes(&routing.keys, arguments[1]) == 0) {
        result = routing_run(&routing);
    }
    column_release(&routing.keys);
    return result;
}

#endif
