/* Frames in a buffer: the whole ones from a position on, and the next one after damage. */

#ifndef TIDELOG_KERNEL_SCAN_H
#define TIDELOG_KERNEL_SCAN_H

#include "_kernel_shared.h"

enum stop { END, PARTIAL, BAD_CRC, WRONG_OFFSET, BAD_LENGTH, WHOLE };

typedef struct {
    const uint8_t *data;
    size_t size;
    uint32_t max_payload;
} Region;

/* Why there is no whole frame with `offset` at `position`; WHOLE, and its length, when there is one. */
static inline enum stop judge(const Region *region, size_t position, uint64_t offset, uint32_t *length) {
    size_t left = region->size - position;
    if (left == 0) {
        return END;
    }
    if (left < HEADER_BYTES) {
        return PARTIAL;
    }
    const uint8_t *header = region->data + position;
    if (load_u64(header) != offset) {
        return WRONG_OFFSET;
    }
    *length = load_u32(header + 8);
    if (*length == 0 || *length > region->max_payload) {
        return BAD_LENGTH;
    }
    if (*length > left - HEADER_BYTES) {
        return PARTIAL;
    }
    return crc_of(header + HEADER_BYTES, *length) == load_u32(header + 12) ? WHOLE : BAD_CRC;
}

typedef struct {
    uint64_t *positions;
    uint32_t *lengths;
    size_t count;
    size_t capacity;
} Found;

/* The raw allocator: the GIL may be away. */
static int found_grow(Found *found) {
    size_t capacity = found->capacity > 0 ? 2 * found->capacity : 256;
    uint64_t *positions = PyMem_RawRealloc(found->positions, capacity * sizeof *positions);
    if (positions == NULL) {
        return -1;
    }
    found->positions = positions;
    uint32_t *lengths = PyMem_RawRealloc(found->lengths, capacity * sizeof *lengths);
    if (lengths == NULL) {
        return -1;
    }
    found->lengths = lengths;
    found->capacity = capacity;
    return 0;
}

/* Moves `position` to the end of the last whole frame. Returns the reason to stop, or -1 when memory ran out. */
static int scan_frames(const Region *region, size_t *position, Bound offset, Found *found) {
    for (;;) {
        uint32_t length = 0;
        size_t left = region->size - *position;
        if (offset.outside != 0 && left >= HEADER_BYTES) {
            return WRONG_OFFSET; /* no header can hold such an offset */
        }
        enum stop stop = judge(region, *position, offset.number, &length);
        if (stop != WHOLE) {
            return stop;
        }
        if (found->count == found->capacity && found_grow(found) < 0) {
            return -1;
        }
        *position += HEADER_BYTES;
        found->positions[found->count] = *position;
        found->lengths[found->count++] = length;
        *position += length;
        offset.number++;
        offset.outside = offset.number == 0; /* 2**64 - 1 was the last offset there is */
    }
}

static PyObject *scan_result(const Found *found, size_t end, int stop) {
    PyObject *positions = PyBytes_FromStringAndSize((const char *)found->positions, (Py_ssize_t)(8 * found->count));
    PyObject *lengths = PyBytes_FromStringAndSize((const char *)found->lengths, (Py_ssize_t)(4 * found->count));
    if (positions == NULL || lengths == NULL) {
        Py_XDECREF(positions);
        Py_XDECREF(lengths);
        return NULL;
    }
    return Py_BuildValue("(NNni)", positions, lengths, (Py_ssize_t)end, stop);
}

static PyObject *kernel_scan(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t argument_count) {
    Py_buffer buffer;
    Region region;
    Bound offset;
    if (expect_arguments("scan", argument_count, 4, 4) < 0 || parse_bound(arguments[2], &offset) < 0 ||
        parse_max_payload(arguments[3], &region.max_payload) < 0 ||
        PyObject_GetBuffer(arguments[0], &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    size_t position;
    if (parse_position(arguments[1], buffer.len, &position) == 0) {
        region.data = buffer.buf;
        region.size = (size_t)buffer.len;
        Found found = {NULL, NULL, 0, 0};
        PyThreadState *saved = release_gil_for(region.size - position);
        int stop = scan_frames(&region, &position, offset, &found);
        take_gil_back(saved);
        result = stop < 0 ? PyErr_NoMemory() : scan_result(&found, position, stop);
        PyMem_RawFree(found.positions);
        PyMem_RawFree(found.lengths);
    }
    PyBuffer_Release(&buffer);
    return result;
}

/* The position of the first whole frame whose offset is in the range, or -1. */
static Py_ssize_t seek_frame(const Region *region, size_t position, uint64_t min_offset, uint64_t max_offset,
                             uint64_t *offset) {
    uint32_t length;
    for (; region->size - position >= HEADER_BYTES; position++) {
        *offset = load_u64(region->data + position);
        if (*offset >= min_offset && *offset <= max_offset && judge(region, position, *offset, &length) == WHOLE) {
            return (Py_ssize_t)position;
        }
    }
    return -1;
}

static PyObject *kernel_find_frame(PyObject *Py_UNUSED(module), PyObject *const *arguments,
                                   Py_ssize_t argument_count) {
    Py_buffer buffer;
    Region region;
    Bound least, most;
    if (expect_arguments("find_frame", argument_count, 5, 5) < 0 || parse_bound(arguments[2], &least) < 0 ||
        parse_bound(arguments[3], &most) < 0 || parse_max_payload(arguments[4], &region.max_payload) < 0 ||
        PyObject_GetBuffer(arguments[0], &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    size_t position;
    if (parse_position(arguments[1], buffer.len, &position) < 0) {
        PyBuffer_Release(&buffer);
        return NULL;
    }
    region.data = buffer.buf;
    region.size = (size_t)buffer.len;
    Py_ssize_t found = -1;
    uint64_t offset = 0;
    if (least.outside <= 0 && most.outside >= 0) {
        uint64_t min_offset = least.outside < 0 ? 0 : least.number;
        uint64_t max_offset = most.outside > 0 ? UINT64_MAX : most.number;
        PyThreadState *saved = release_gil_for(region.size - position);
        found = seek_frame(&region, position, min_offset, max_offset, &offset);
        take_gil_back(saved);
    }
    PyBuffer_Release(&buffer);
    if (found < 0) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(nK)", found, (unsigned long long)offset);
}

#endif
