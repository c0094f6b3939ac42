/* The version of an object that is to be seen at a seq, in one step. `version_python.py` is the twin; keys are drawn in
   `version_keys.py`, cells in `cell.py`. */

#ifndef TIDELOG_ENGINE_VERSION_H
#define TIDELOG_ENGINE_VERSION_H

#include "_engine_tree.h"

#define SEQ_BYTES 8
#define POINTER_BYTES 38
/* One that is longer is in no tree; the bound is for the stack. */
#define MAX_VERSION_KEY_BYTES 2048

typedef struct {
    uint8_t bytes[MAX_VERSION_KEY_BYTES];
    size_t size;
} VersionKey;

/* 0 when it was built, 1 when no tree can have such a key, -1 with an error. */
static int version_key(PyObject *const *arguments, VersionKey *key) {
    Py_ssize_t bucket_bytes, name_bytes;
    uint64_t seq;
    const char *bucket = PyUnicode_AsUTF8AndSize(arguments[0], &bucket_bytes);
    const char *name = bucket == NULL ? NULL : PyUnicode_AsUTF8AndSize(arguments[1], &name_bytes);
    if (name == NULL || parse_u64(arguments[2], &seq) < 0) {
        return -1;
    }
    key->size = (size_t)bucket_bytes + (size_t)name_bytes + 3 + SEQ_BYTES;
    if (key->size > MAX_VERSION_KEY_BYTES) {
        return 1;
    }
    uint8_t *at = key->bytes;
    *at++ = 'o';
    memcpy(at, bucket, (size_t)bucket_bytes);
    at += bucket_bytes;
    *at++ = 0;
    memcpy(at, name, (size_t)name_bytes);
    at += name_bytes;
    *at++ = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        *at++ = (uint8_t)(~seq >> shift);
    }
    return 0;
}

static uint64_t version_seq(const Cell *cell) {
    uint64_t inverted = 0;
    const uint8_t *at = cell->key + cell->key_bytes - SEQ_BYTES;
    for (int index = 0; index < SEQ_BYTES; index++) {
        inverted = inverted << 8 | at[index];
    }
    return ~inverted;
}

static PyObject *version_answer(const Cell *cell) {
    const uint8_t *value = cell->value;
    unsigned long long seq = version_seq(cell);
    if (cell->value_bytes != POINTER_BYTES || value[0] != 0) {
        return Py_BuildValue("Ky#", seq, (const char *)value, (Py_ssize_t)cell->value_bytes);
    }
    return Py_BuildValue("KIKIBKKI", seq, (unsigned int)load_u32(value + 1), (unsigned long long)load_u64(value + 5),
                         (unsigned int)load_u32(value + 13), (unsigned char)value[17],
                         (unsigned long long)load_u64(value + 18), (unsigned long long)load_u64(value + 26),
                         (unsigned int)load_u32(value + 34));
}

static PyObject *engine_find_version(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Tree tree;
    uint32_t root;
    VersionKey key;
    Cell cell;
    if (expect_arguments("find_version", count, 5, 5) < 0) {
        return NULL;
    }
    int built = version_key(arguments + 2, &key);
    if (built != 0) {
        return built < 0 ? NULL : Py_NewRef(Py_None);
    }
    tree.state = PyModule_GetState(module);
    tree.pages = arguments[0];
    if (!PyDict_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "pages must be a dict");
        return NULL;
    }
    if (parse_u32(arguments[1], "root", &root) < 0) {
        return NULL;
    }
    switch (tree_find(&tree, root, (Slice){key.bytes, key.size}, &cell)) {
    case 0:
        break;
    case 1:
        return PyLong_FromUnsignedLong(tree.missing);
    case 2:
        Py_RETURN_NONE;
    default:
        return NULL;
    }
    if (cell.key_bytes != key.size || memcmp(cell.key, key.bytes, key.size - SEQ_BYTES) != 0) {
        Py_RETURN_NONE;
    }
    return version_answer(&cell);
}

#endif
