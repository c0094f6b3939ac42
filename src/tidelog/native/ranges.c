/* Reads many ranges of a file without the GIL, for `files.py`; tests/oracles/ranges.py says what comes out.

   Invariants
   - The result has exactly the bytes that the ranges have together: what the file does not have is zero.
   - Ranges are claims: their count, their ends and their sum are checked before memory is taken. */

#include <errno.h>
#include <unistd.h>

#include "arguments.h"

/* As many bytes as there are from a byte of the file on; -1 with errno. */
static int read_range(int descriptor, uint8_t *into, uint64_t bytes, uint64_t byte) {
    while (bytes > 0) {
        ssize_t got = pread(descriptor, into, (size_t)bytes, (off_t)byte);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            memset(into, 0, (size_t)bytes);
            return got == 0 ? 0 : -1;
        }
        into += got;
        byte += (uint64_t)got;
        bytes -= (uint64_t)got;
    }
    return 0;
}

/* The sum of the bytes of all ranges; -1 with an error. */
static Py_ssize_t ranges_bytes(const Slice *ranges, uint64_t position) {
    uint64_t sum = 0;
    for (size_t at = 0; at < ranges->size / 16; at++) {
        uint64_t byte = native_u64(ranges->data, 2 * at), bytes = native_u64(ranges->data, 2 * at + 1);
        if (position > INT64_MAX || byte > INT64_MAX - position || bytes > INT64_MAX - position - byte ||
            bytes > (uint64_t)PY_SSIZE_T_MAX - sum) {
            PyErr_SetString(PyExc_OverflowError, "a range ends behind the end of any file");
            return -1;
        }
        sum += bytes;
    }
    return (Py_ssize_t)sum;
}

/* read_ranges(descriptor, position, ranges): the bytes of the ranges, one after the other. A range is (byte u64 from the
   position on, bytes u64), native; what the file does not have is zero. */
static PyObject *ranges_read(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    uint64_t position;
    Slice ranges;
    if (expect_arguments("read_ranges", count, 3, 3) < 0 || parse_u64(arguments[1], &position) < 0 ||
        parse_bytes(arguments[2], "ranges", &ranges) < 0) {
        return NULL;
    }
    int descriptor = PyObject_AsFileDescriptor(arguments[0]);
    if (descriptor < 0) {
        return NULL;
    }
    if (ranges.size % 16 != 0) {
        PyErr_SetString(PyExc_ValueError, "ranges are pairs of 8 bytes each");
        return NULL;
    }
    Py_ssize_t sum = ranges_bytes(&ranges, position);
    PyObject *read = sum < 0 ? NULL : PyBytes_FromStringAndSize(NULL, sum);
    if (read == NULL) {
        return NULL;
    }
    uint8_t *into = (uint8_t *)PyBytes_AS_STRING(read);
    int got = 0;
    Py_BEGIN_ALLOW_THREADS
    for (size_t at = 0; got == 0 && at < ranges.size / 16; at++) {
        uint64_t bytes = native_u64(ranges.data, 2 * at + 1);
        got = read_range(descriptor, into, bytes, position + native_u64(ranges.data, 2 * at));
        into += bytes;
    }
    Py_END_ALLOW_THREADS
    if (got < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_CLEAR(read);
    }
    return read;
}

PyMethodDef range_methods[] = {
    METHOD("read_ranges", ranges_read, "read_ranges(descriptor, position, ranges): their bytes, one after the other."),
    {NULL, NULL, 0, NULL},
};
