/* What the two halves of `_entries.c` share: the state of the module, and how columns are made. */

#ifndef TIDELOG_ENTRIES_STATE_H
#define TIDELOG_ENTRIES_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../log/_arguments.h"

typedef struct {
    PyObject *data_error;
} EntriesState;

static int take_u64(PyObject *object, uint64_t *number) {
    *number = PyLong_AsUnsignedLongLong(object);
    return *number == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* A new bytes object in a tuple, to be filled; NULL when there is no memory. */
static uint8_t *add_bytes(PyObject *tuple, Py_ssize_t at, size_t size) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (bytes == NULL) {
        return NULL;
    }
    PyTuple_SET_ITEM(tuple, at, bytes);
    return (uint8_t *)PyBytes_AS_STRING(bytes);
}

#endif
