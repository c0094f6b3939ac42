/* Rows of the version index as columns: which versions are to be seen at a seq, and what their cells say.
   tests/oracles/version_columns.py gives the same answers; keys and cells are drawn in `mvcc/cells.py`. */

#ifndef TIDELOG_ENTRIES_VERSIONS_H
#define TIDELOG_ENTRIES_VERSIONS_H

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
#define VERSION_NUMBERS 9
#define VERSION_STRINGS 3

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

static int compare_slices(Slice left, Slice right) {
    int order = memcmp(left.data, right.data, left.size < right.size ? left.size : right.size);
    return order != 0 ? order : (left.size > right.size) - (left.size < right.size);
}

static Slice created_name(const Created *created, size_t index) {
    uint32_t begin = native_u32(created->ends.buf, index), end = native_u32(created->ends.buf, index + 1);
    return (Slice){(const uint8_t *)created->names.buf + begin, end - begin};
}

/* Where a bucket is among those that are there; -1 when it is not. */
static Py_ssize_t find_created(const Created *created, Slice bucket) {
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
static int is_of_bucket(Looking *looking, const Version *version) {
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
static int parse_version(Slice key, Version *version) {
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

/* Takes the next row; -1 with the error set, 0 when it is not to be seen. */
static int look_at_row(PyObject *data_error, Looking *looking, Slice *rest, Version *version) {
    size_t key_bytes = 0, value_bytes = 0;
    if (rest->size >= ROW_LENGTHS_BYTES) {
        key_bytes = load_u16(rest->data);
        value_bytes = load_u16(rest->data + 2);
    }
    if (rest->size < ROW_LENGTHS_BYTES + key_bytes + value_bytes) {
        PyErr_SetString(data_error, "truncated row in a block");
        return -1;
    }
    Slice key = {rest->data + ROW_LENGTHS_BYTES, key_bytes};
    Slice value = {key.data + key_bytes, value_bytes};
    *rest = (Slice){value.data + value_bytes, rest->size - ROW_LENGTHS_BYTES - key_bytes - value_bytes};
    if (compare_slices(key, looking->start) < 0 || compare_slices(key, looking->stop) >= 0) {
        return 0;
    }
    if (!parse_version(key, version) || !version_cell_parse(value, &version->cell)) {
        PyErr_SetString(data_error, "a row that is no version of an object");
        return -1;
    }
    if (version->seq > looking->seq) {
        return 0;
    }
    if (looking->all_versions) {
        return 1;
    }
    Slice prefix = {key.data, key.size - SEQ_BYTES};
    if (looking->settled.size == prefix.size && memcmp(looking->settled.data, prefix.data, prefix.size) == 0) {
        return 0;
    }
    looking->settled = prefix;
    return version->cell.flags != CELL_TOMBSTONE && is_of_bucket(looking, version);
}

static const size_t version_widths[VERSION_NUMBERS] = {8, 8, 8, 8, 4, 4, 4, 1, 1};

static void copy_version(uint8_t *const *columns, const Version *version, size_t at) {
    const VersionCell *cell = &version->cell;
    store_u64(columns[0] + 8 * at, version->seq);
    store_u64(columns[1] + 8 * at, cell->size);
    store_u64(columns[2] + 8 * at, cell->lsn);
    store_u64(columns[3] + 8 * at, cell->position);
    store_u32(columns[4] + 4 * at, cell->crc);
    store_u32(columns[5] + 4 * at, (uint32_t)cell->order);
    store_u32(columns[6] + 4 * at, (uint32_t)cell->stored_bytes);
    columns[7][at] = cell->flags;
    columns[8][at] = cell->codec;
}

static Slice version_string(const Version *version, int number) {
    if (number < 2) {
        return number == 0 ? version->bucket : version->name;
    }
    return version->cell.inlined;
}

static int take_created(PyObject *const *arguments, Created *created) {
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

static void created_release(Created *created) {
    PyBuffer_Release(&created->ends);
    PyBuffer_Release(&created->names);
    PyBuffer_Release(&created->seqs);
    PyBuffer_Release(&created->orders);
}

/* ---- gather_versions ---- */

typedef struct {
    Version *items;
    size_t count, room;
} Versions;

static int add_version(Versions *versions, const Version *version) {
    if (versions->count == versions->room) {
        size_t room = versions->room == 0 ? 1024 : 2 * versions->room;
        Version *grown = PyMem_Realloc(versions->items, room * sizeof(Version));
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        versions->items = grown;
        versions->room = room;
    }
    versions->items[versions->count++] = *version;
    return 0;
}

static int look_at_all(PyObject *data_error, Looking *looking, Slice rest, Versions *versions) {
    while (rest.size > 0) {
        Version version;
        int is_seen = look_at_row(data_error, looking, &rest, &version);
        if (is_seen < 0 || (is_seen && add_version(versions, &version) < 0)) {
            return -1;
        }
    }
    return 0;
}

static int fill_version_strings(const Versions *versions, PyObject *strings, int number) {
    size_t size = 0;
    for (size_t at = 0; at < versions->count; at++) {
        size += version_string(&versions->items[at], number).size;
    }
    uint8_t *ends = add_bytes(strings, 2 * number, 4 * (versions->count + 1));
    uint8_t *data = ends == NULL ? NULL : add_bytes(strings, 2 * number + 1, size);
    if (data == NULL) {
        return -1;
    }
    uint32_t end = 0;
    store_u32(ends, 0);
    for (size_t at = 0; at < versions->count; at++) {
        Slice text = version_string(&versions->items[at], number);
        memcpy(data + end, text.data, text.size);
        end += (uint32_t)text.size;
        store_u32(ends + 4 * (at + 1), end);
    }
    return 0;
}

static int fill_versions(const Versions *versions, PyObject *numbers, PyObject *strings) {
    uint8_t *columns[VERSION_NUMBERS];
    for (int column = 0; column < VERSION_NUMBERS; column++) {
        columns[column] = add_bytes(numbers, column, version_widths[column] * versions->count);
        if (columns[column] == NULL) {
            return -1;
        }
    }
    for (size_t at = 0; at < versions->count; at++) {
        copy_version(columns, &versions->items[at], at);
    }
    for (int number = 0; number < VERSION_STRINGS; number++) {
        if (fill_version_strings(versions, strings, number) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *gathered_versions(NativeState *state, Looking *looking, Slice raw) {
    Versions versions = {NULL, 0, 0};
    PyObject *numbers = PyTuple_New(VERSION_NUMBERS), *strings = PyTuple_New(2 * VERSION_STRINGS), *result = NULL;
    if (numbers != NULL && strings != NULL && look_at_all(state->data_error, looking, raw, &versions) == 0 &&
        fill_versions(&versions, numbers, strings) == 0) {
        result = Py_BuildValue("ny#OO", (Py_ssize_t)versions.count, (const char *)looking->settled.data,
                               (Py_ssize_t)looking->settled.size, numbers, strings);
    }
    Py_XDECREF(numbers);
    Py_XDECREF(strings);
    PyMem_Free(versions.items);
    return result;
}

static int take_slice(PyObject *object, Slice *slice) {
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(object, &data, &size) < 0) {
        return -1;
    }
    *slice = (Slice){(const uint8_t *)data, (size_t)size};
    return 0;
}

static PyObject *entries_gather_versions(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Looking looking;
    memset(&looking, 0, sizeof looking);
    if (expect_arguments("gather_versions", count, 10, 10) < 0 || parse_u64(arguments[1], &looking.seq) < 0 ||
        take_slice(arguments[3], &looking.start) < 0 || take_slice(arguments[4], &looking.stop) < 0 ||
        take_slice(arguments[5], &looking.settled) < 0) {
        return NULL;
    }
    looking.all_versions = PyObject_IsTrue(arguments[2]);
    Py_buffer raw;
    if (looking.all_versions < 0 || PyObject_GetBuffer(arguments[0], &raw, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    if (raw.len > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "more bytes than a column can hold");
    } else if (take_created(arguments + 6, &looking.created) == 0) {
        result = gathered_versions(PyModule_GetState(module), &looking, (Slice){raw.buf, (size_t)raw.len});
    }
    created_release(&looking.created);
    PyBuffer_Release(&raw);
    return result;
}

#endif
