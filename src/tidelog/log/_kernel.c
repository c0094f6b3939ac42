/* The loops over frames, in C. `frame.py` draws the frame; `frame_python.py` is the twin that defines every answer.

   Invariants
   - Bytes are hostile: nothing is read that was not checked to lie inside the buffer, lengths are summed in 64 bits, and
     a header is read once, so that somebody who writes into a bytearray meanwhile cannot get around the check.
   - Numbers that are only compared (offsets, max_payload, minimum) may be any Python int; they are clamped, not refused.
   - The GIL is released around long work; what is worked on is held by references and buffer views meanwhile. */

#include "_kernel_encode.h"
#include "_kernel_payloads.h"
#include "_kernel_renumber.h"
#include "_kernel_scan.h"

/* ---- crc32 ---- */

static PyObject *crc32_with(uint32_t (*update)(uint32_t, const uint8_t *, size_t), PyObject *const *arguments,
                            Py_ssize_t count) {
    if (expect_arguments("crc32", count, 1, 2) < 0) {
        return NULL;
    }
    unsigned long value = count == 2 ? PyLong_AsUnsignedLongMask(arguments[1]) : 0;
    if (value == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    Py_buffer data;
    if (PyObject_GetBuffer(arguments[0], &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyThreadState *saved = release_gil_for((uint64_t)data.len);
    uint32_t crc = ~update(~(uint32_t)value, data.buf, (size_t)data.len);
    take_gil_back(saved);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *kernel_crc32(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    return crc32_with(crc_update, arguments, count);
}

static PyObject *kernel_crc32_portable(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    return crc32_with(crc_by_tables, arguments, count);
}

static PyObject *kernel_frame_crc(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
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

#define METHOD(name, function, text) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, PyDoc_STR(text)}

static PyMethodDef kernel_methods[] = {
    METHOD("crc32", kernel_crc32, "crc32(data, value=0): CRC-32 as zlib computes it."),
    METHOD("crc32_portable", kernel_crc32_portable,
           "crc32_portable(data, value=0): the same by tables, as on machines without special instructions."),
    METHOD("frame_crc", kernel_frame_crc, "frame_crc(offset, payload): the checksum of a frame."),
    METHOD("encode_many", kernel_encode_many,
           "encode_many(first_offset, payloads): (frames, payload positions, payload lengths)."),
    METHOD("scan", kernel_scan,
           "scan(buffer, position, offset, max_payload, payload_only=False): (payload positions, payload lengths, end, "
           "why it stopped)."),
    METHOD("find_frame", kernel_find_frame,
           "find_frame(buffer, position, min_offset, max_offset, max_payload, payload_only=False): (position, offset) "
           "or None."),
    METHOD("payloads", kernel_payloads, "payloads(buffer, positions, lengths, start, stop): copies of payloads."),
    METHOD("field_range", kernel_field_range,
           "field_range(buffer, positions, lengths, field): least and greatest i64 at that byte, or None."),
    METHOD("first_at_least", kernel_first_at_least,
           "first_at_least(buffer, positions, lengths, field, minimum, start): index, or -1."),
    METHOD("renumber", kernel_renumber,
           "renumber(buffer, positions, lengths, first_offset): (frames, payload positions) with other offsets."),
    {NULL, NULL, 0, NULL},
};

static int kernel_execute(PyObject *module) {
    KernelState *state = PyModule_GetState(module);
    PyObject *errors = PyImport_ImportModule("tidelog.errors");
    if (errors == NULL) {
        return -1;
    }
    state->input_error = PyObject_GetAttrString(errors, "InputError");
    Py_DECREF(errors);
    if (state->input_error == NULL) {
        return -1;
    }
    crc_prepare();
    return 0;
}

static int kernel_traverse(PyObject *module, visitproc visit, void *arg) {
    KernelState *state = PyModule_GetState(module);
    Py_VISIT(state->input_error);
    return 0;
}

static int kernel_clear(PyObject *module) {
    KernelState *state = PyModule_GetState(module);
    Py_CLEAR(state->input_error);
    return 0;
}

static void kernel_free(void *module) {
    kernel_clear(module);
}

static PyModuleDef_Slot kernel_slots[] = {
    {Py_mod_exec, kernel_execute},
    {0, NULL},
};

static struct PyModuleDef kernel_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tidelog.log._kernel",
    .m_doc = PyDoc_STR("The loops over frames, in C; frame_python is its twin."),
    .m_size = sizeof(KernelState),
    .m_methods = kernel_methods,
    .m_slots = kernel_slots,
    .m_traverse = kernel_traverse,
    .m_clear = kernel_clear,
    .m_free = kernel_free,
};

PyMODINIT_FUNC PyInit__kernel(void) {
    return PyModuleDef_Init(&kernel_module);
}
