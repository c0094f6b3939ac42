/* Giving the GIL away for long work, and only for that. */

#ifndef TIDELOG_GIL_H
#define TIDELOG_GIL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

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
