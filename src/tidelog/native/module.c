/* The module `tidelog._native`: all loops that are C, in one extension. `_native.pyi` has the signatures, and
   tests/oracles/ the same functions in Python, which define every answer.

   Invariants
   - Bytes are hostile: nothing is read or written that was not checked to lie inside of what was given.
   - There is one state, of one interpreter: the errors that are raised. */

#include "native.h"

#include "crc32.h"

static PyMethodDef *const parts[] = {frame_methods, envelope_methods, page_methods, entry_methods, record_methods,
                                     record_batch_methods, tree_row_methods, scan_value_methods,
                                     range_methods};

static int take_errors(NativeState *state) {
    PyObject *errors = PyImport_ImportModule("tidelog.errors");
    if (errors == NULL) {
        return -1;
    }
    state->input_error = PyObject_GetAttrString(errors, "InputError");
    state->data_error = state->input_error == NULL ? NULL : PyObject_GetAttrString(errors, "DataError");
    Py_DECREF(errors);
    return state->data_error == NULL ? -1 : 0;
}

static int native_execute(PyObject *module) {
    crc_prepare();
    record_batches_prepare();
    if (take_errors(PyModule_GetState(module)) < 0 || envelopes_prepare() < 0 ||
        PyModule_AddStringConstant(module, "CRC32_BY", crc_way) < 0) {
        return -1;
    }
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) {
        if (PyModule_AddFunctions(module, parts[part]) < 0) {
            return -1;
        }
    }
    return 0;
}

static int native_traverse(PyObject *module, visitproc visit, void *arg) {
    NativeState *state = PyModule_GetState(module);
    Py_VISIT(state->input_error);
    Py_VISIT(state->data_error);
    return 0;
}

static int native_clear(PyObject *module) {
    NativeState *state = PyModule_GetState(module);
    Py_CLEAR(state->input_error);
    Py_CLEAR(state->data_error);
    return 0;
}

static void native_free(void *module) {
    native_clear(module);
}

static PyModuleDef_Slot native_slots[] = {
    {Py_mod_exec, native_execute},
    {0, NULL},
};

static struct PyModuleDef native_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tidelog._native",
    .m_doc = PyDoc_STR("The loops over frames, messages, pages and records, in C."),
    .m_size = sizeof(NativeState),
    .m_slots = native_slots,
    .m_traverse = native_traverse,
    .m_clear = native_clear,
    .m_free = native_free,
};

PyMODINIT_FUNC PyInit__native(void) {
    return PyModuleDef_Init(&native_module);
}
