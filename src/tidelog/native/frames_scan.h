/* Frames in a buffer: the whole ones from a position on, and the next one after damage. */

#ifndef TIDELOG_FRAMES_SCAN_H
#define TIDELOG_FRAMES_SCAN_H

#include "frames.h"

/* Frames that a scan has room for before it knows how large they are. */
#define FIRST_CAPACITY 256

enum stop { END, PARTIAL, BAD_CRC, WRONG_OFFSET, BAD_LENGTH, WHOLE };

typedef struct {
    const uint8_t *data;
    size_t size;
    uint32_t max_payload;
    int payload_only; /* the checksum does not cover the header, as in Danube's frames */
} Region;

static int parse_payload_only(PyObject *object, int *payload_only) {
    *payload_only = PyObject_IsTrue(object);
    return *payload_only;
}

/* Why there is no whole frame with `offset` at `position`; WHOLE, and its length, when there is one. */
static inline enum stop judge(const Region *region, size_t position, uint64_t offset, uint32_t *length) {
    size_t left = region->size - position;
    if (left == 0) {
        return END;
    }
    if (left < FRAME_HEADER_BYTES) {
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
    if (*length > left - FRAME_HEADER_BYTES) {
        return PARTIAL;
    }
    const uint8_t *payload = header + FRAME_HEADER_BYTES;
    uint32_t crc = region->payload_only ? crc_of(payload, *length) : crc_of_frame(offset, payload, *length);
    return crc == load_u32(header + 12) ? WHOLE : BAD_CRC;
}

/* Where the scan is, and the arrays it fills. They are the bytes objects that are handed out in the end: on large buffers
   a copy of them would cost as much as the checksums. */
typedef struct {
    Region region;
    size_t start, position;
    Bound offset;
    PyObject *positions, *lengths;
    size_t count, capacity;
} Scan;

static int scan_resize(Scan *scan, size_t capacity) {
    scan->capacity = capacity;
    /* On failure these leave NULL behind, and MemoryError. */
    return _PyBytes_Resize(&scan->positions, (Py_ssize_t)(8 * capacity)) < 0 ||
                   _PyBytes_Resize(&scan->lengths, (Py_ssize_t)(4 * capacity)) < 0
               ? -1
               : 0;
}

static int scan_begin(Scan *scan) {
    size_t most = (scan->region.size - scan->start) / (FRAME_HEADER_BYTES + 1);
    scan->capacity = most < FIRST_CAPACITY ? most : FIRST_CAPACITY;
    scan->positions = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * scan->capacity));
    scan->lengths = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * scan->capacity));
    return scan->positions == NULL || scan->lengths == NULL ? -1 : 0;
}

/* Room for as many as will come if frames go on as they began, but no great leap on the word of a few. */
static int scan_grow(Scan *scan) {
    size_t mean_bytes = scan->count > 0 ? (scan->position - scan->start) / scan->count : FRAME_HEADER_BYTES + 1;
    size_t expected = (scan->region.size - scan->position) / mean_bytes;
    size_t more = expected + expected / 16 + 16;
    size_t most = 8 * scan->capacity + FIRST_CAPACITY;
    return scan_resize(scan, scan->count + (more < most ? more : most));
}

/* Moves on to the end of the last whole frame; WHOLE means that the arrays are full. Needs no GIL. */
static enum stop scan_some(Scan *scan) {
    uint8_t *positions = (uint8_t *)PyBytes_AS_STRING(scan->positions);
    uint8_t *lengths = (uint8_t *)PyBytes_AS_STRING(scan->lengths);
    for (;;) {
        uint32_t length = 0;
        if (scan->offset.outside != 0 && scan->region.size - scan->position >= FRAME_HEADER_BYTES) {
            return WRONG_OFFSET; /* no header can hold such an offset */
        }
        enum stop stop = judge(&scan->region, scan->position, scan->offset.number, &length);
        if (stop != WHOLE || scan->count == scan->capacity) {
            return stop;
        }
        uint64_t payload = scan->position + FRAME_HEADER_BYTES;
        memcpy(positions + 8 * scan->count, &payload, 8);
        memcpy(lengths + 4 * scan->count, &length, 4);
        scan->count++;
        scan->position = payload + length;
        scan->offset.number++;
        scan->offset.outside = scan->offset.number == 0; /* 2**64 - 1 was the last offset there is */
    }
}

static PyObject *scan_run(Scan *scan) {
    enum stop stop = WHOLE;
    if (scan_begin(scan) < 0) {
        return NULL;
    }
    for (;;) {
        PyThreadState *saved = release_gil_for(scan->region.size - scan->position);
        stop = scan_some(scan);
        take_gil_back(saved);
        if (stop != WHOLE) {
            break;
        }
        if (scan_grow(scan) < 0) {
            return NULL;
        }
    }
    if (scan_resize(scan, scan->count) < 0) {
        return NULL;
    }
    return Py_BuildValue("(OOni)", scan->positions, scan->lengths, (Py_ssize_t)scan->position, (int)stop);
}

static PyObject *frames_scan(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t argument_count) {
    Py_buffer buffer;
    Scan scan;
    memset(&scan, 0, sizeof scan);
    if (expect_arguments("scan_frames", argument_count, 4, 5) < 0 || parse_bound(arguments[2], &scan.offset) < 0 ||
        parse_max_payload(arguments[3], &scan.region.max_payload) < 0 ||
        parse_payload_only(argument_count == 5 ? arguments[4] : Py_False, &scan.region.payload_only) < 0 ||
        PyObject_GetBuffer(arguments[0], &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (parse_position(arguments[1], buffer.len, &scan.start) == 0) {
        scan.region.data = buffer.buf;
        scan.region.size = (size_t)buffer.len;
        scan.position = scan.start;
        result = scan_run(&scan);
    }
    Py_XDECREF(scan.positions);
    Py_XDECREF(scan.lengths);
    PyBuffer_Release(&buffer);
    return result;
}

/* The position of the first whole frame whose offset is in the range, or -1. */
static Py_ssize_t seek_frame(const Region *region, size_t position, uint64_t min_offset, uint64_t max_offset,
                             uint64_t *offset) {
    uint32_t length;
    for (; region->size - position >= FRAME_HEADER_BYTES; position++) {
        *offset = load_u64(region->data + position);
        if (*offset >= min_offset && *offset <= max_offset && judge(region, position, *offset, &length) == WHOLE) {
            return (Py_ssize_t)position;
        }
    }
    return -1;
}

static PyObject *frames_find_frame(PyObject *Py_UNUSED(module), PyObject *const *arguments,
                                   Py_ssize_t argument_count) {
    Py_buffer buffer;
    Region region;
    Bound least, most;
    if (expect_arguments("find_frame", argument_count, 5, 6) < 0 || parse_bound(arguments[2], &least) < 0 ||
        parse_bound(arguments[3], &most) < 0 || parse_max_payload(arguments[4], &region.max_payload) < 0 ||
        parse_payload_only(argument_count == 6 ? arguments[5] : Py_False, &region.payload_only) < 0 ||
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
