/* Payloads to frames: sizes first, one allocation, then the copies and checksums with the GIL away. */

#ifndef TIDELOG_FRAMES_ENCODE_H
#define TIDELOG_FRAMES_ENCODE_H

#include "frames.h"

/* Payloads of one call that need no allocation for the list of their places. */
#define FEW_PAYLOADS 16

typedef struct {
    PyObject *items;       /* a tuple: nobody can take an item out of it while the GIL is away */
    Slice *payloads;       /* `few`, or allocated */
    Py_buffer *views;      /* only when an item is not bytes; as many as were taken */
    Py_ssize_t view_count;
    uint64_t frames_bytes;
    Slice few[FEW_PAYLOADS];
} Batch;

static void batch_release(Batch *batch) {
    for (Py_ssize_t index = 0; index < batch->view_count; index++) {
        PyBuffer_Release(&batch->views[index]);
    }
    PyMem_Free(batch->views);
    if (batch->payloads != batch->few) {
        PyMem_Free(batch->payloads);
    }
    Py_XDECREF(batch->items);
}

/* Where the bytes of an item are; a view of it is kept when they could move otherwise. */
static int batch_view(Batch *batch, PyObject *item, const uint8_t **data, Py_ssize_t *size) {
    if (PyBytes_Check(item)) {
        *data = (const uint8_t *)PyBytes_AS_STRING(item);
        *size = PyBytes_GET_SIZE(item);
        return 0;
    }
    if (batch->views == NULL) {
        batch->views = PyMem_New(Py_buffer, (size_t)PyTuple_GET_SIZE(batch->items));
        if (batch->views == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    Py_buffer *view = &batch->views[batch->view_count];
    if (PyObject_GetBuffer(item, view, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    batch->view_count++;
    *data = view->buf;
    *size = view->len;
    return 0;
}

static int batch_add(NativeState *state, Batch *batch, Py_ssize_t index) {
    const uint8_t *data;
    Py_ssize_t size;
    if (batch_view(batch, PyTuple_GET_ITEM(batch->items, index), &data, &size) < 0) {
        return -1;
    }
    if (size == 0) {
        PyErr_SetString(state->input_error, "a frame must hold at least one byte");
        return -1;
    }
    if ((uint64_t)size > UINT32_MAX) {
        PyErr_Format(state->input_error, "a frame holds at most 4294967295 bytes, this payload has %zd", size);
        return -1;
    }
    batch->payloads[index] = (Slice){data, (size_t)size};
    batch->frames_bytes += FRAME_HEADER_BYTES + (uint64_t)size;
    if (batch->frames_bytes > (uint64_t)PY_SSIZE_T_MAX) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int batch_gather(NativeState *state, Batch *batch, Py_ssize_t count) {
    if (count > FEW_PAYLOADS) {
        batch->payloads = PyMem_New(Slice, (size_t)count);
        if (batch->payloads == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        if (batch_add(state, batch, index) < 0) {
            return -1;
        }
    }
    return 0;
}

static void batch_write(const Batch *batch, size_t count, uint64_t offset, uint8_t *frames, uint8_t *positions,
                        uint8_t *lengths) {
    uint64_t position = 0;
    for (size_t index = 0; index < count; index++) {
        Slice payload = batch->payloads[index];
        uint32_t length = (uint32_t)payload.size; /* checked by batch_add */
        position += FRAME_HEADER_BYTES;
        memcpy(frames + position, payload.data, length);
        /* Over the copy: if somebody changes a bytearray meanwhile, the frame is still one that its checksum fits. */
        frame_store_header(frames + position, offset + index, length);
        memcpy(positions + 8 * index, &position, 8);
        memcpy(lengths + 4 * index, &length, 4);
        position += length;
    }
}

static PyObject *batch_encode(const Batch *batch, Py_ssize_t count, uint64_t offset) {
    PyObject *frames = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)batch->frames_bytes);
    PyObject *positions = PyBytes_FromStringAndSize(NULL, 8 * count);
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, 4 * count);
    PyObject *result = NULL;
    if (frames != NULL && positions != NULL && lengths != NULL) {
        uint8_t *frames_at = (uint8_t *)PyBytes_AS_STRING(frames);
        uint8_t *positions_at = (uint8_t *)PyBytes_AS_STRING(positions);
        uint8_t *lengths_at = (uint8_t *)PyBytes_AS_STRING(lengths);
        PyThreadState *saved = release_gil_for(batch->frames_bytes);
        batch_write(batch, (size_t)count, offset, frames_at, positions_at, lengths_at);
        take_gil_back(saved);
        result = PyTuple_Pack(3, frames, positions, lengths);
    }
    Py_XDECREF(frames);
    Py_XDECREF(positions);
    Py_XDECREF(lengths);
    return result;
}

static PyObject *frames_encode_many(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    NativeState *state = PyModule_GetState(module);
    Bound first;
    if (expect_arguments("encode_many", argument_count, 2, 2) < 0 || parse_bound(arguments[0], &first) < 0) {
        return NULL;
    }
    Batch batch;
    batch.views = NULL;
    batch.view_count = 0;
    batch.frames_bytes = 0;
    batch.items = PySequence_Tuple(arguments[1]);
    if (batch.items == NULL) {
        return NULL;
    }
    batch.payloads = batch.few;
    PyObject *result = NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(batch.items);
    uint64_t more = count > 0 ? (uint64_t)count - 1 : 0;
    if (first.outside != 0 || first.number > UINT64_MAX - more) {
        PyErr_SetString(state->input_error, "offsets of frames must be in the range 0 to 2**64 - 1");
    } else if (batch_gather(state, &batch, count) == 0) {
        result = batch_encode(&batch, count, first.number);
    }
    batch_release(&batch);
    return result;
}

#endif
