/* What every part of the extension shares: the state of the module, and how functions get into it.

   A part is one .c file with a table of methods; `module.c` puts the tables into the one module. Names of functions are
   those of one flat module, so no two parts may have the same. */

#ifndef TIDELOG_NATIVE_H
#define TIDELOG_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

typedef struct {
    PyObject *input_error, *data_error; /* of tidelog.errors */
} NativeState;

#define METHOD(name, function, text) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, PyDoc_STR(text)}

extern PyMethodDef frame_methods[], envelope_methods[], page_methods[], entry_methods[], record_methods[],
    record_batch_methods[], tree_row_methods[], scan_value_methods[], range_methods[];

/* Python's own type for times; -1 with the error set. */
int envelopes_prepare(void);

/* The tables of CRC-32C. */
void record_batches_prepare(void);

/* Giving the GIL away for long work, and only for that. */

/* Below this much work, giving the GIL away and taking it back costs more than it gives to others. */
#define LONG_WORK_BYTES (16 * 1024)

static inline PyThreadState *release_gil_for(uint64_t work_bytes) {
    return work_bytes > LONG_WORK_BYTES ? PyEval_SaveThread() : NULL;
}

static inline void take_gil_back(PyThreadState *saved) {
    if (saved != NULL) {
        PyEval_RestoreThread(saved);
    }
}

#endif
