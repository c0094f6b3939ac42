/* The extensions of a batch, as bytes: most messages have none, and then that is all that is said. */

#ifndef TIDELOG_ENVELOPE_EXTENSION_H
#define TIDELOG_ENVELOPE_EXTENSION_H

#include "_envelope_shared.h"

/* Where the extension lies. Empty for what is no envelope of this version: decoding it says what is wrong. */
static Slice extension_slice(Slice payload) {
    Slice none = {NULL, 0};
    if (payload.size < FIXED_BYTES || payload.data[0] != VERSION) {
        return none;
    }
    uint64_t start = FIXED_BYTES + (uint64_t)load_u32(payload.data + 4) + load_u32(payload.data + 16);
    uint64_t size = load_u32(payload.data + 20);
    if (size == 0 || start + size > payload.size) {
        return none;
    }
    return (Slice){payload.data + start, (size_t)size};
}

/* Puts one into the list, which is made when the first is found: None stands for those before it. */
static int extension_put(PyObject **list, size_t count, size_t index, Slice extension) {
    if (*list == NULL) {
        *list = PyList_New((Py_ssize_t)count);
        if (*list == NULL) {
            return -1;
        }
        for (size_t each = 0; each < count; each++) {
            PyList_SET_ITEM(*list, (Py_ssize_t)each, Py_NewRef(Py_None));
        }
    }
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)extension.data, (Py_ssize_t)extension.size);
    return bytes == NULL ? -1 : PyList_SetItem(*list, (Py_ssize_t)index, bytes);
}

static PyObject *extensions_in(const Places *places, size_t start, size_t stop) {
    PyObject *list = NULL;
    for (size_t index = start; index < stop; index++) {
        Slice payload;
        if (place_of(places, index, &payload) < 0) {
            Py_XDECREF(list);
            return NULL;
        }
        Slice extension = extension_slice(payload);
        if (extension.size > 0 && extension_put(&list, stop - start, index - start, extension) < 0) {
            Py_XDECREF(list);
            return NULL;
        }
    }
    return list == NULL ? Py_NewRef(Py_None) : list;
}

static PyObject *envelope_extensions(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Places places;
    size_t start, stop;
    if (expect_arguments("extensions", given, 5, 5) < 0 || parse_index(arguments[3], "start", &start) < 0 ||
        parse_index(arguments[4], "stop", &stop) < 0 || places_take(&places, arguments) < 0) {
        return NULL;
    }
    PyObject *list = extensions_in(&places, start, stop < places.count ? stop : places.count);
    places_release(&places);
    return list;
}

#endif
