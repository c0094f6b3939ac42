/* The loops over frames, in C. `log/frame.py` draws the frame; tests/oracles/frames.py defines every answer.

   Invariants
   - Bytes are hostile: nothing is read that was not checked to lie inside the buffer, lengths are summed in 64 bits, and
     a header is read once, so that somebody who writes into a bytearray meanwhile cannot get around the check.
   - Numbers that are only compared (offsets, max_payload, minimum) may be any Python int; they are clamped, not refused.
   - The GIL is released around long work; what is worked on is held by references and buffer views meanwhile. */

#include "frames_encode.h"
#include "frames_payloads.h"
#include "frames_renumber.h"
#include "frames_scan.h"

/* ---- crc32 ---- */

static PyObject *frames_crc32(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    return checksum_with("crc32", crc_update, arguments, count);
}

static PyObject *frames_crc32_portable(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    return checksum_with("crc32", crc_by_tables, arguments, count);
}

static PyObject *frames_frame_crc(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    if (expect_arguments("frame_crc", count, 2, 2) < 0) {
        return NULL;
    }
    uint64_t offset = PyLong_AsUnsignedLongLongMask(arguments[0]);
    Py_buffer payload;
    if ((offset == UINT64_MAX && PyErr_Occurred()) || PyObject_GetBuffer(arguments[1], &payload, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyThreadState *saved = release_gil_for((uint64_t)payload.len);
    uint32_t crc = crc_of_frame(offset, payload.buf, (uint32_t)payload.len);
    take_gil_back(saved);
    PyBuffer_Release(&payload);
    return PyLong_FromUnsignedLong(crc);
}

/* ---- module ---- */

PyMethodDef frame_methods[] = {
    METHOD("crc32", frames_crc32, "crc32(data, value=0): CRC-32 as zlib computes it."),
    METHOD("crc32_portable", frames_crc32_portable,
           "crc32_portable(data, value=0): the same by tables, as on machines without special instructions."),
    METHOD("frame_crc", frames_frame_crc, "frame_crc(offset, payload): the checksum of a frame."),
    METHOD("encode_many", frames_encode_many,
           "encode_many(first_offset, payloads): (frames, payload positions, payload lengths)."),
    METHOD("scan_frames", frames_scan,
           "scan_frames(buffer, position, offset, max_payload, payload_only=False): (payload positions, payload lengths, end, "
           "why it stopped)."),
    METHOD("find_frame", frames_find_frame,
           "find_frame(buffer, position, min_offset, max_offset, max_payload, payload_only=False): (position, offset) "
           "or None."),
    METHOD("payloads", frames_payloads, "payloads(buffer, positions, lengths, start, stop): copies of payloads."),
    METHOD("field_range", frames_field_range,
           "field_range(buffer, positions, lengths, field): least and greatest i64 at that byte, or None."),
    METHOD("first_at_least", frames_first_at_least,
           "first_at_least(buffer, positions, lengths, field, minimum, start): index, or -1."),
    METHOD("renumber", frames_renumber,
           "renumber(buffer, positions, lengths, first_offset): (frames, payload positions) with other offsets."),
    METHOD("renumber_in_place", frames_renumber_in_place,
           "renumber_in_place(buffer, positions, lengths, first_offset): gives frames in a writable buffer other offsets."),
    METHOD("join_frames", frames_join,
           "join_frames(first_offset, [(buffer, positions, lengths), ...]): (frames, payload positions, payload lengths) of "
           "all of them, with other offsets."),
    METHOD("measure_frames", frames_measure,
           "measure_frames(buffer, positions, lengths): (bytes of all payloads, bytes of the largest) of consecutive frames."),
    {NULL, NULL, 0, NULL},
};
