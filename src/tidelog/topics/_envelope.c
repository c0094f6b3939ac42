/* The message codec, in C. `message.py` draws the envelope; `envelope_python.py` is the twin that defines every answer.

   Invariants
   - A stored payload is hostile: every length is checked against what is left, in 64 bits, before anything is read.
   - Encoding takes its sizes first and copies second. No Python code runs in between (only bytes, bytearray, memoryview
     and str are looked into, with the GIL held), so the sizes still hold when the bytes are copied.
   - Decoding calls `message_type`, which may be anybody's code: buffers and items are held until it has returned.
   - Columns are gathered without the GIL. Sizes and places are taken once and kept aside, so that a buffer which
     somebody changes meanwhile gives other content, never a read or a write outside of what was checked. */

#include "_envelope_columns.h"
#include "_envelope_decode.h"
#include "_envelope_digest.h"
#include "_envelope_encode.h"
#include "_envelope_extension.h"
#include "_envelope_rows.h"

#define METHOD(name, function, text) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, PyDoc_STR(text)}

static PyMethodDef envelope_methods[] = {
    METHOD("encode", envelope_encode, "encode(value, key, headers, timestamp_us, extension=b''): the envelope of one message."),
    METHOD("decode_frames", envelope_decode_frames,
           "decode_frames(message_type, first_offset, buffer, positions, lengths, start, stop): messages of frames."),
    METHOD("decode_payloads", envelope_decode_payloads,
           "decode_payloads(message_type, first_offset, payloads): messages of payloads that are not framed yet."),
    METHOD("extensions", envelope_extensions,
           "extensions(buffer, positions, lengths, start, stop): those of frames, or None when no message has one."),
    METHOD("gather_columns", envelope_gather_columns,
           "gather_columns(first_offset, buffer, positions, lengths, start, stop, wanted, max_rows, max_bytes): "
           "messages of frames as the buffers of Arrow columns."),
    METHOD("encode_columns", envelope_encode_columns,
           "encode_columns(first_offset, count, timestamp_us, max_message_bytes, values, keys, headers, timestamps): "
           "frames of the rows of Arrow columns, or what is wrong with a row."),
    METHOD("frames_digest", envelope_frames_digest,
           "frames_digest(first_offset, buffer, positions, lengths, start, stop): a sum over frames, in any order."),
    {NULL, NULL, 0, NULL},
};

static int envelope_execute(PyObject *module) {
    EnvelopeState *state = PyModule_GetState(module);
    crc_prepare();
    PyDateTime_IMPORT;
    if (PyDateTimeAPI == NULL) {
        return -1;
    }
    PyObject *errors = PyImport_ImportModule("tidelog.errors");
    if (errors == NULL) {
        return -1;
    }
    state->input_error = PyObject_GetAttrString(errors, "InputError");
    state->data_error = state->input_error == NULL ? NULL : PyObject_GetAttrString(errors, "DataError");
    Py_DECREF(errors);
    return state->data_error == NULL ? -1 : 0;
}

static int envelope_traverse(PyObject *module, visitproc visit, void *arg) {
    EnvelopeState *state = PyModule_GetState(module);
    Py_VISIT(state->input_error);
    Py_VISIT(state->data_error);
    return 0;
}

static int envelope_clear(PyObject *module) {
    EnvelopeState *state = PyModule_GetState(module);
    Py_CLEAR(state->input_error);
    Py_CLEAR(state->data_error);
    return 0;
}

static void envelope_free(void *module) {
    envelope_clear(module);
}

static PyModuleDef_Slot envelope_slots[] = {
    {Py_mod_exec, envelope_execute},
    {0, NULL},
};

static struct PyModuleDef envelope_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tidelog.topics._envelope",
    .m_doc = PyDoc_STR("The message codec, in C; envelope_python is its twin."),
    .m_size = sizeof(EnvelopeState),
    .m_methods = envelope_methods,
    .m_slots = envelope_slots,
    .m_traverse = envelope_traverse,
    .m_clear = envelope_clear,
    .m_free = envelope_free,
};

PyMODINIT_FUNC PyInit__envelope(void) {
    return PyModuleDef_Init(&envelope_module);
}
