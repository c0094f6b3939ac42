/* Versions of objects in rows of the tree: their keys taken apart, and the buckets that they belong to. */

#ifndef TIDELOG_VERSION_ROWS_H
#define TIDELOG_VERSION_ROWS_H

#include "arguments.h"
#include "version_cell.h"

/* How columns of entries and of versions are made. */

/* A new bytes object in a tuple, to be filled; NULL when there is no memory. */
static uint8_t *add_bytes(PyObject *tuple, Py_ssize_t at, size_t size) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (bytes == NULL) {
        return NULL;
    }
    PyTuple_SET_ITEM(tuple, at, bytes);
    return (uint8_t *)PyBytes_AS_STRING(bytes);
}

#define ROW_LENGTHS_BYTES 4
#define LEAST_KEY_BYTES (1 + 1 + 1 + 1 + 1 + SEQ_BYTES)

/* The buckets that are there, in order of name, with their creation. */
typedef struct {
    Py_buffer ends, names, seqs, orders;
    size_t count;
} Created;

typedef struct {
    uint64_t seq;
    Slice bucket, name;
    VersionCell cell;
} Version;

typedef struct {
    uint64_t seq;
    int all_versions;
    Slice start, stop, settled;
    Created created;
    Slice known_bucket;
    size_t known_index;
    int is_known;
} Looking;

static inline int compare_slices(Slice left, Slice right) {
    int order = memcmp(left.data, right.data, left.size < right.size ? left.size : right.size);
    return order != 0 ? order : (left.size > right.size) - (left.size < right.size);
}

static inline Slice created_name(const Created *created, size_t index) {
    uint32_t begin = native_u32(created->ends.buf, index), end = native_u32(created->ends.buf, index + 1);
    return (Slice){(const uint8_t *)created->names.buf + begin, end - begin};
}

/* Where a bucket is among those that are there; -1 when it is not. */
static inline Py_ssize_t find_created(const Created *created, Slice bucket) {
    size_t low = 0, high = created->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (compare_slices(created_name(created, middle), bucket) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < created->count && compare_slices(created_name(created, low), bucket) == 0 ? (Py_ssize_t)low : -1;
}

/* Whether a version belongs to the bucket that is there. Neighbours are of one bucket, so it is looked up once. */
static inline int is_of_bucket(Looking *looking, const Version *version) {
    if (looking->known_bucket.data == NULL || compare_slices(looking->known_bucket, version->bucket) != 0) {
        Py_ssize_t index = find_created(&looking->created, version->bucket);
        looking->known_bucket = version->bucket;
        looking->is_known = index >= 0;
        looking->known_index = index >= 0 ? (size_t)index : 0;
    }
    if (!looking->is_known) {
        return 0;
    }
    uint64_t seq = native_u64(looking->created.seqs.buf, looking->known_index);
    uint32_t order = native_u32(looking->created.orders.buf, looking->known_index);
    return version->seq > seq || (version->seq == seq && version->cell.order >= order);
}

/* Takes a key apart; 0 when it is none of an object. */
static inline int parse_version(Slice key, Version *version) {
    if (key.size < LEAST_KEY_BYTES || key.data[0] != 'o' || key.data[key.size - SEQ_BYTES - 1] != 0) {
        return 0;
    }
    const uint8_t *names = key.data + 1;
    size_t size = key.size - SEQ_BYTES - 2;
    const uint8_t *end = memchr(names, 0, size);
    if (end == NULL || end == names || end + 1 == names + size) {
        return 0;
    }
    version->bucket = (Slice){names, (size_t)(end - names)};
    version->name = (Slice){end + 1, size - version->bucket.size - 1};
    uint64_t seq = 0;
    for (int at = 0; at < SEQ_BYTES; at++) {
        seq = seq << 8 | key.data[key.size - SEQ_BYTES + (size_t)at];
    }
    version->seq = ~seq;
    return memchr(version->name.data, 0, version->name.size) == NULL;
}

static inline int take_created(PyObject *const *arguments, Created *created) {
    memset(created, 0, sizeof *created);
    if (PyObject_GetBuffer(arguments[0], &created->ends, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(arguments[1], &created->names, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(arguments[2], &created->seqs, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(arguments[3], &created->orders, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    created->count = (size_t)created->seqs.len / 8;
    int fits = (size_t)created->ends.len == 4 * (created->count + 1) && (size_t)created->orders.len == 4 * created->count;
    for (size_t index = 0; fits && index < created->count; index++) {
        uint32_t begin = native_u32(created->ends.buf, index), end = native_u32(created->ends.buf, index + 1);
        fits = begin <= end && end <= (size_t)created->names.len;
    }
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the arrays of buckets do not fit together");
        return -1;
    }
    return 0;
}

static inline void created_release(Created *created) {
    PyBuffer_Release(&created->ends);
    PyBuffer_Release(&created->names);
    PyBuffer_Release(&created->seqs);
    PyBuffer_Release(&created->orders);
}

static inline int take_slice(PyObject *object, Slice *slice) {
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &data, &size) < 0) {
        return -1;
    }
    *slice = (Slice){(const uint8_t *)data, (size_t)size};
    return 0;
}

#endif
