/* Rows of a listing as Python sees them, `mvcc/versions.py` says which: from pages and from blocks of a store alike. */

#ifndef TIDELOG_VERSION_TUPLES_H
#define TIDELOG_VERSION_TUPLES_H

#include "arguments.h"
#include "crc32.h"
#include "operation.h"
#include "version_cell.h"

/* What a row has: key, size and seq; the crc too; and where the value is; or the data, if all of it is in the cells. */
enum { LISTED_INFO, LISTED_CRC, LISTED_VALUE, LISTED_DATA };

#define PLACE_COLUMNS 9
#define PLAIN_COLUMNS 6
#define CODEC_OF_FILES 2

typedef struct {
    Slice name, stored; /* the value, where the cell has it */
    uint64_t seq, size;
    uint32_t crc;
    const VersionCell *cell;
} SeenVersion;

/* A tuple of objects that are all there; else none of them is left. Nothing in it leads back to it, and there are many: the
   collector of garbage need not look at them. */
static inline PyObject *tuple_of_all(PyObject *const *items, Py_ssize_t count) {
    int is_whole = 1;
    for (Py_ssize_t at = 0; at < count; at++) {
        is_whole &= items[at] != NULL;
    }
    PyObject *tuple = is_whole ? PyTuple_New(count) : NULL;
    for (Py_ssize_t at = 0; at < count; at++) {
        if (tuple != NULL) {
            PyTuple_SET_ITEM(tuple, at, items[at]);
        } else {
            Py_XDECREF(items[at]);
        }
    }
    if (tuple != NULL) {
        PyObject_GC_UnTrack(tuple);
    }
    return tuple;
}

static inline PyObject *name_object(Slice name) {
    return PyUnicode_DecodeUTF8((const char *)name.data, (Py_ssize_t)name.size, NULL);
}

static inline PyObject *bytes_object(const uint8_t *data, uint64_t size) {
    return PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size);
}

/* Whether a stored value is not compressed, has no metadata, and is what its checksum says. */
static inline int value_is_plain(Slice stored, uint64_t codec, uint64_t size, uint32_t crc) {
    return codec == 0 && stored.size >= METADATA_LENGTH_BYTES && stored.size - METADATA_LENGTH_BYTES == size &&
           load_u32(stored.data) == 0 && crc_of(stored.data, stored.size) == crc;
}

static inline int seen_is_plain(const SeenVersion *seen) {
    return seen->cell->flags == CELL_INLINE && value_is_plain(seen->stored, seen->cell->codec, seen->size, seen->crc);
}

/* (key, size, seq, crc) or fewer of them */
static inline PyObject *info_tuple(const SeenVersion *seen, Py_ssize_t columns) {
    PyObject *items[] = {name_object(seen->name), PyLong_FromUnsignedLongLong(seen->size),
                         PyLong_FromUnsignedLongLong(seen->seq),
                         columns == 4 ? PyLong_FromUnsignedLong(seen->crc) : NULL};
    return tuple_of_all(items, columns);
}

/* (key, size, seq, crc, data, empty metadata) */
static inline PyObject *plain_tuple(const SeenVersion *seen) {
    PyObject *items[] = {name_object(seen->name),
                         PyLong_FromUnsignedLongLong(seen->size),
                         PyLong_FromUnsignedLongLong(seen->seq),
                         PyLong_FromUnsignedLong(seen->crc),
                         bytes_object(seen->stored.data + METADATA_LENGTH_BYTES, seen->size),
                         PyDict_New()};
    return tuple_of_all(items, PLAIN_COLUMNS);
}

/* (key, size, seq, crc, codec, lsn, position, stored bytes, small value or None) */
static inline PyObject *place_tuple(const SeenVersion *seen) {
    const VersionCell *cell = seen->cell;
    int is_inline = cell->flags == CELL_INLINE;
    PyObject *items[] = {name_object(seen->name),
                         PyLong_FromUnsignedLongLong(seen->size),
                         PyLong_FromUnsignedLongLong(seen->seq),
                         PyLong_FromUnsignedLong(seen->crc),
                         PyLong_FromLong(cell->codec),
                         PyLong_FromUnsignedLongLong(cell->lsn),
                         PyLong_FromUnsignedLongLong(cell->position),
                         PyLong_FromUnsignedLongLong(cell->stored_bytes),
                         is_inline ? bytes_object(seen->stored.data, seen->stored.size) : Py_NewRef(Py_None)};
    return tuple_of_all(items, PLACE_COLUMNS);
}

#endif
