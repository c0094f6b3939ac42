/* The objects of a bucket as they are to be seen at a seq: from key to key by seeking, never version by version.
   `version_python.py` is the twin; keys are drawn in `version_keys.py`, cells in `cell.py`. */

#ifndef TIDELOG_ENGINE_LIST_H
#define TIDELOG_ENGINE_LIST_H

#include "_engine_skip.h"
#include "_engine_version.h"

/* Cells of one call: nobody waits longer for it, however many objects were deleted. */
#define LIST_STEPS 2048
/* Neighbours that are looked at before the rest of a leaf is searched. */
#define LIST_NEAR 4
#define VERSION_HEAD_BYTES 17
#define TOMBSTONE_FLAG 1
#define INLINE_FLAG 2
/* "o", NUL, NUL and the seq, around names of one byte each. */
#define LEAST_VERSION_KEY_BYTES (5 + SEQ_BYTES)

typedef struct {
    uint64_t seq, size;
    uint32_t crc;
    size_t name; /* where it begins in `names` */
    size_t name_bytes;
} ListedRow;

typedef struct {
    Tree tree;
    uint32_t root;
    uint8_t target[PAGE_BYTES]; /* the least key that is still wanted */
    size_t target_bytes;
    Slice stop;
    uint64_t seq, created_seq;
    uint32_t created_order;
    Page leaf;
    uint32_t index;
    size_t steps;
    size_t limit, count;
    ListedRow *rows;
    uint8_t *names;
    size_t names_bytes, names_room;
} Listing;

static inline Slice list_target(const Listing *list) {
    return (Slice){list->target, list->target_bytes};
}

static inline void list_aim(Listing *list, const uint8_t *key, size_t size) {
    memcpy(list->target, key, size);
    list->target_bytes = size;
}

/* The leaf of the target, and in it the first cell that is wanted: 0 found, 1 missing, 2 the end, 3 it aims further. */
static int list_descend(Listing *list) {
    Tree *tree = &list->tree;
    Slice fence = {NULL, 0};
    tree->root.at = NULL;
    int got = tree_visit(tree, list->root, ANY_LEVEL, &list->leaf);
    if (got == 0) {
        tree->root = list->leaf;
    }
    while (got == 0 && page_level(&list->leaf) > 0) {
        got = skip_down(tree, list_target(list), &list->leaf, &fence);
    }
    if (got != 0) {
        return got;
    }
    if (cell_search(&list->leaf, 0, list_target(list), 0, &list->index) < 0) {
        return -1;
    }
    if (list->index < list->leaf.count) {
        return 0;
    }
    if (fence.data == NULL) {
        return 2;
    }
    list_aim(list, fence.data, fence.size);
    return 3;
}

/* In the leaf to the right, if the target is there: 0 found, 1 missing, 2 the end, 3 it is further away. */
static int list_right(Listing *list) {
    Cell last;
    uint32_t right = page_right(&list->leaf);
    if (right == 0) {
        return 2;
    }
    int got = tree_visit(&list->tree, right, 0, &list->leaf);
    if (got != 0) {
        return got;
    }
    if (list->leaf.count == 0) {
        return 3;
    }
    if (cell_at(&list->leaf, list->leaf.count - 1, &last) < 0) {
        return -1;
    }
    if (compare_to(&last, list_target(list)) < 0) {
        return 3;
    }
    return cell_search(&list->leaf, 0, list_target(list), 0, &list->index);
}

/* From the cell at `index` on to the first that is not before the target, in this leaf: 0, or 3 when it has none. */
static int list_near(Listing *list) {
    uint32_t index = list->index + 1;
    for (uint32_t near = 0; near < LIST_NEAR && index < list->leaf.count; near++, index++) {
        Cell cell;
        if (cell_at(&list->leaf, index, &cell) < 0) {
            return -1;
        }
        if (compare_to(&cell, list_target(list)) >= 0) {
            list->index = index;
            return 0;
        }
    }
    if (cell_search(&list->leaf, index, list_target(list), 0, &list->index) < 0) {
        return -1;
    }
    return list->index < list->leaf.count ? 0 : 3;
}

static int complain_of_version(PyObject *data_error, const Cell *cell) {
    if (cell->value_bytes < VERSION_HEAD_BYTES) {
        PyErr_Format(data_error, "a version of %lu bytes is none", (unsigned long)cell->value_bytes);
    } else {
        PyErr_Format(data_error, "a version with flags %d and %lu bytes is none", (int)cell->value[0],
                     (unsigned long)cell->value_bytes);
    }
    return -1;
}

/* Whether a version that is the newest of its key up to the seq is there: 0 or 1, -1 when it is no version. */
static int list_is_seen(const Listing *list, const Cell *cell, uint64_t seq) {
    const uint8_t *value = cell->value;
    uint32_t size = cell->value_bytes;
    if (size == VERSION_HEAD_BYTES && value[0] == TOMBSTONE_FLAG) {
        return 0;
    }
    if (!(size == POINTER_BYTES && value[0] == 0) && !(size > VERSION_HEAD_BYTES && value[0] == INLINE_FLAG)) {
        return complain_of_version(list->tree.state->data_error, cell);
    }
    return seq > list->created_seq || (seq == list->created_seq && load_u32(value + 1) >= list->created_order);
}

static int list_take(Listing *list, const Cell *cell, uint64_t seq) {
    const uint8_t *name = (const uint8_t *)memchr(cell->key, 0, cell->key_bytes) + 1;
    size_t size = (size_t)(cell->key + cell->key_bytes - SEQ_BYTES - 1 - name);
    if (list->names_bytes + size > list->names_room) {
        size_t room = 2 * list->names_room + PAGE_BYTES;
        uint8_t *names = PyMem_RawRealloc(list->names, room);
        if (names == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        list->names = names;
        list->names_room = room;
    }
    memcpy(list->names + list->names_bytes, name, size);
    list->rows[list->count++] = (ListedRow){.seq = seq,
                                            .size = load_u64(cell->value + 5),
                                            .crc = load_u32(cell->value + 13),
                                            .name = list->names_bytes,
                                            .name_bytes = size};
    list->names_bytes += size;
    return 0;
}

/* "o" bucket NUL key NUL seq: anything else is not in the range that was asked for, or damaged. */
static int list_is_key(const Cell *cell) {
    size_t end = cell->key_bytes - SEQ_BYTES - 1;
    if (cell->key_bytes < LEAST_VERSION_KEY_BYTES || cell->key[0] != 'o' || cell->key[end] != 0) {
        return 0;
    }
    const uint8_t *first = memchr(cell->key, 0, end);
    return first != NULL && first + 1 < cell->key + end && memchr(first + 1, 0, cell->key + end - first - 1) == NULL;
}

/* Looks at the cell at `index`, and aims at what is wanted next: 0, 2 at the end, -1 on error. */
static int list_look(Listing *list) {
    Cell cell;
    if (cell_at(&list->leaf, list->index, &cell) < 0) {
        return -1;
    }
    if (compare_to(&cell, list->stop) >= 0) {
        return 2;
    }
    if (!list_is_key(&cell)) {
        return complain_of_cell(&list->leaf, "cell %lu is no version of an object", list->index);
    }
    size_t prefix = cell.key_bytes - SEQ_BYTES;
    uint64_t seq = version_seq(&cell);
    list_aim(list, cell.key, prefix);
    if (seq > list->seq) {
        for (int shift = 56; shift >= 0; shift -= 8) {
            list->target[list->target_bytes++] = (uint8_t)(~list->seq >> shift);
        }
        return 0;
    }
    list->target[prefix - 1] = 1; /* behind all versions of this key */
    int seen = list_is_seen(list, &cell, seq);
    return seen < 1 ? seen : list_take(list, &cell, seq);
}

/* 0 when there may be more, 1 when a page is missing, 2 at the end, -1 on error. */
static int list_walk(Listing *list) {
    int got = list_descend(list);
    while (got == 0 || got == 3) {
        if (list->steps++ >= LIST_STEPS) {
            return 0;
        }
        if (got == 0) {
            got = list_look(list);
            if (got != 0 || list->count == list->limit) {
                return got;
            }
            got = list_near(list);
            if (got == 3) {
                got = list_right(list);
            }
        }
        if (got == 3) {
            got = list_descend(list);
        }
    }
    return got;
}

static PyObject *list_rows(const Listing *list, int has_crc) {
    PyObject *answer = PyList_New((Py_ssize_t)list->count);
    for (size_t index = 0; answer != NULL && index < list->count; index++) {
        const ListedRow *row = &list->rows[index];
        PyObject *fields = PyTuple_New(has_crc ? 4 : 3);
        PyObject *name = fields == NULL ? NULL
                                        : PyUnicode_DecodeUTF8((const char *)list->names + row->name,
                                                               (Py_ssize_t)row->name_bytes, NULL);
        PyObject *size = name == NULL ? NULL : PyLong_FromUnsignedLongLong(row->size);
        PyObject *seq = size == NULL ? NULL : PyLong_FromUnsignedLongLong(row->seq);
        PyObject *crc = seq == NULL ? NULL : has_crc ? PyLong_FromUnsignedLong(row->crc) : Py_NewRef(Py_None);
        if (crc == NULL) {
            Py_XDECREF(fields);
            Py_XDECREF(name);
            Py_XDECREF(size);
            Py_XDECREF(seq);
            Py_CLEAR(answer);
            break;
        }
        PyTuple_SET_ITEM(fields, 0, name);
        PyTuple_SET_ITEM(fields, 1, size);
        PyTuple_SET_ITEM(fields, 2, seq);
        if (has_crc) {
            PyTuple_SET_ITEM(fields, 3, crc);
        } else {
            Py_DECREF(crc);
        }
        PyList_SET_ITEM(answer, (Py_ssize_t)index, fields);
    }
    return answer;
}

static PyObject *list_answer(const Listing *list, int got, int has_crc) {
    PyObject *rows = list_rows(list, has_crc);
    if (rows == NULL) {
        return NULL;
    }
    unsigned long missing = got == 1 ? list->tree.missing : 0;
    if (got == 2) {
        return Py_BuildValue("(NOk)", rows, Py_None, missing);
    }
    return Py_BuildValue("(Ny#k)", rows, (const char *)list->target, (Py_ssize_t)list->target_bytes, missing);
}

static int list_arguments(PyObject *module, PyObject *const *arguments, Listing *list, int *has_crc) {
    Slice start;
    if (tree_take(module, arguments, &list->tree, &list->root, &start) < 0 ||
        parse_bytes(arguments[3], "stop", &list->stop) < 0 || parse_u64(arguments[4], &list->seq) < 0 ||
        parse_u64(arguments[5], &list->created_seq) < 0 ||
        parse_u32(arguments[6], "created_order", &list->created_order) < 0 ||
        parse_index(arguments[7], "limit", &list->limit) < 0) {
        return -1;
    }
    if (list->limit < 1 || list->limit > LIST_STEPS) {
        PyErr_Format(PyExc_ValueError, "limit must be from 1 to %d", LIST_STEPS);
        return -1;
    }
    if (start.size > MAX_VERSION_KEY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "start is longer than a key can be");
        return -1;
    }
    list_aim(list, start.data, start.size);
    *has_crc = PyObject_IsTrue(arguments[8]);
    return *has_crc < 0 ? -1 : 0;
}

static PyObject *engine_list_seen(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Listing list;
    int has_crc;
    memset(&list, 0, sizeof list);
    if (expect_arguments("list_seen", count, 9, 9) < 0 || list_arguments(module, arguments, &list, &has_crc) < 0) {
        return NULL;
    }
    list.rows = PyMem_RawMalloc(list.limit * sizeof(ListedRow));
    if (list.rows == NULL) {
        return PyErr_NoMemory();
    }
    int got = list_walk(&list);
    PyObject *answer = got < 0 ? NULL : list_answer(&list, got, has_crc);
    PyMem_RawFree(list.rows);
    PyMem_RawFree(list.names);
    return answer;
}

#endif
