/* Frames with other offsets: a copy of frames that lie one behind the other, each header with its new number, and with
   the checksum that follows from the old one. */

#ifndef TIDELOG_KERNEL_RENUMBER_H
#define TIDELOG_KERNEL_RENUMBER_H

#include "_kernel_shared.h"

/* Where the first frame begins and the last one ends; -1 with ValueError when they are not whole and side by side. */
static int frames_extent(const Places *places, uint64_t *begin, uint64_t *end) {
    *begin = *end = 0;
    for (size_t index = 0; index < places->count; index++) {
        Slice payload;
        if (place_of(places, index, &payload) < 0) {
            return -1;
        }
        uint64_t position = (uint64_t)(payload.data - (const uint8_t *)places->buffer.buf);
        if (position < HEADER_BYTES || (index > 0 && position - HEADER_BYTES != *end)) {
            PyErr_Format(PyExc_ValueError, "frame %zu is not right behind the one before", index);
            return -1;
        }
        if (index == 0) {
            *begin = position - HEADER_BYTES;
        }
        *end = position + payload.size;
    }
    return 0;
}

static void write_renumbered(const Places *places, uint64_t begin, uint64_t end, uint64_t offset, uint8_t *frames,
                             uint8_t *positions) {
    memcpy(frames, (const uint8_t *)places->buffer.buf + begin, end - begin);
    uint64_t position = HEADER_BYTES;
    for (size_t index = 0; index < places->count; index++) {
        uint8_t *header = frames + position - HEADER_BYTES;
        store_u32(header + 12, crc_of_renumbered(load_u32(header + 12), load_u64(header), offset + index));
        store_u64(header, offset + index);
        memcpy(positions + 8 * index, &position, 8);
        position += (uint64_t)native_u32(places->lengths.buf, index) + HEADER_BYTES;
    }
}

static PyObject *renumbered(const Places *places, uint64_t begin, uint64_t end, uint64_t offset) {
    PyObject *frames = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(end - begin));
    PyObject *positions = PyBytes_FromStringAndSize(NULL, 8 * (Py_ssize_t)places->count);
    PyObject *result = NULL;
    if (frames != NULL && positions != NULL) {
        uint8_t *frames_at = (uint8_t *)PyBytes_AS_STRING(frames);
        uint8_t *positions_at = (uint8_t *)PyBytes_AS_STRING(positions);
        /* With the GIL: the places were checked, and nobody may change them until they are used. */
        write_renumbered(places, begin, end, offset, frames_at, positions_at);
        result = PyTuple_Pack(2, frames, positions);
    }
    Py_XDECREF(frames);
    Py_XDECREF(positions);
    return result;
}

static PyObject *kernel_renumber(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    KernelState *state = PyModule_GetState(module);
    Places places;
    Bound first;
    if (expect_arguments("renumber", argument_count, 4, 4) < 0 || parse_bound(arguments[3], &first) < 0 ||
        places_take(&places, arguments) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    uint64_t begin, end, more = places.count > 0 ? (uint64_t)places.count - 1 : 0;
    if (first.outside != 0 || first.number > UINT64_MAX - more) {
        PyErr_SetString(state->input_error, "offsets of frames must be in the range 0 to 2**64 - 1");
    } else if (frames_extent(&places, &begin, &end) == 0) {
        result = renumbered(&places, begin, end, first.number);
    }
    places_release(&places);
    return result;
}

#endif
