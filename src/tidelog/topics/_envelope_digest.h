/* One number for any set of frames: the sum, modulo 2^64, of a mix of each frame's offset, length and checksum.

   A sum does not know the order, so parts that were worked on anywhere add up to the number of the whole. The checksum is
   worked out from the payload rather than taken from the frame's header: the number speaks of the bytes that are there. */

#ifndef TIDELOG_ENVELOPE_DIGEST_H
#define TIDELOG_ENVELOPE_DIGEST_H

#include "../log/_crc32.h"
#include "../log/_gil.h"
#include "_envelope_shared.h"

/* A bijection of 64 bits in which every bit depends on all: the last step of the generator SplitMix64. */
static inline uint64_t digest_mix(uint64_t word) {
    word = (word ^ word >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    word = (word ^ word >> 27) * UINT64_C(0x94D049BB133111EB);
    return word ^ word >> 31;
}

static inline uint64_t digest_frame(uint64_t offset, Slice payload) {
    uint64_t content = (uint64_t)payload.size << 32 | crc_of(payload.data, payload.size);
    return digest_mix(digest_mix(offset + UINT64_C(0x9E3779B97F4A7C15)) + content);
}

/* Returns the index where it stopped: `stop`, or that of a payload outside the buffer. */
static size_t digest_frames(const Places *places, uint64_t first, size_t start, size_t stop, uint64_t *sum) {
    size_t index = start;
    for (; index < stop; index++) {
        Slice payload;
        if (!place_is_inside(places, index, &payload)) {
            break;
        }
        *sum += digest_frame(first + index, payload);
    }
    return index;
}

static PyObject *digest_run(const Places *places, uint64_t first, size_t start, size_t stop) {
    uint64_t sum = 0;
    stop = stop < places->count ? stop : places->count;
    start = start < stop ? start : stop;
    PyThreadState *saved = release_gil_for((uint64_t)places->buffer.len);
    size_t stopped_at = digest_frames(places, first, start, stop, &sum);
    take_gil_back(saved);
    if (stopped_at < stop) {
        complain_of_place(places, stopped_at);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(sum);
}

/* Offsets are taken modulo 2^64, so any int will do as the first. */
static PyObject *envelope_frames_digest(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Places places;
    size_t start, stop;
    if (expect_arguments("frames_digest", given, 6, 6) < 0) {
        return NULL;
    }
    uint64_t first = PyLong_AsUnsignedLongLongMask(arguments[0]);
    if ((first == UINT64_MAX && PyErr_Occurred()) || parse_index(arguments[4], "start", &start) < 0 ||
        parse_index(arguments[5], "stop", &stop) < 0 || places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    PyObject *sum = digest_run(&places, first, start, stop);
    places_release(&places);
    return sum;
}

#endif
