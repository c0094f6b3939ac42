/* The objects of a bucket as they are to be seen at a seq: from key to key by seeking, never version by version.
   tests/oracles/versions.py gives the same answers; keys and cells are drawn in `mvcc/cells.py`. */

#ifndef TIDELOG_VERSIONS_LIST_H
#define TIDELOG_VERSIONS_LIST_H

#include "tree.h"
#include "version_tuples.h"

/* The version of an object that is to be seen at a seq, in one step. tests/oracles/versions.py gives the same
   answers; keys and cells are drawn in `mvcc/cells.py`. */

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
    VersionCell version;
    unsigned long long seq = version_seq(cell);
    if (!version_cell_parse((Slice){cell->value, cell->value_bytes}, &version) || version.flags != CELL_POINTER) {
        return Py_BuildValue("Ky#", seq, (const char *)cell->value, (Py_ssize_t)cell->value_bytes);
    }
    return Py_BuildValue("KKKIBKKK", seq, (unsigned long long)version.order, (unsigned long long)version.size,
                         (unsigned int)version.crc, (unsigned char)version.codec, (unsigned long long)version.lsn,
                         (unsigned long long)version.position, (unsigned long long)version.stored_bytes);
}

static PyObject *pages_find_version(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
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

/* Cells of one call: nobody waits longer for it, however many objects were deleted. */
#define LIST_STEPS 2048
/* Neighbours that are looked at before the rest of a leaf is searched. */
#define LIST_NEAR 4
/* "o", NUL, NUL and the seq, around names of one byte each. */
#define LEAST_VERSION_KEY_BYTES (5 + SEQ_BYTES)

typedef struct {
    uint64_t seq, size;
    uint32_t crc;
    size_t name; /* where it begins in `names` */
    size_t name_bytes;
    VersionCell version; /* a small value is behind the name, not where `inlined` says */
} ListedRow;

typedef struct {
    Tree tree;
    uint32_t root;
    uint8_t target[PAGE_BYTES]; /* the least key that is still wanted; in reverse, the least that is not */
    size_t target_bytes;
    Slice stop; /* the least key that is not wanted; in reverse, the least that is */
    int columns, is_reverse;
    size_t prefix_bytes; /* of all names */
    Slice delimiter;
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

/* Whether a version that is the newest of its key up to the seq is there: 0 or 1, -1 when it is no version. */
static int list_is_seen(const Listing *list, const Cell *cell, uint64_t seq, VersionCell *version) {
    if (!version_cell_parse((Slice){cell->value, cell->value_bytes}, version)) {
        PyErr_Format(list->tree.state->data_error, "invalid version: %lu bytes", (unsigned long)cell->value_bytes);
        return -1;
    }
    return version->flags != CELL_TOMBSTONE &&
           (seq > list->created_seq || (seq == list->created_seq && version->order >= list->created_order));
}

/* How much of a name is a common prefix: up to the first delimiter behind the prefix that all names have; 0 for none. */
static size_t list_fold(const Listing *list, const uint8_t *name, size_t size) {
    Slice delimiter = list->delimiter;
    if (delimiter.size == 0) {
        return 0;
    }
    for (size_t at = list->prefix_bytes; at + delimiter.size <= size; at++) {
        if (memcmp(name + at, delimiter.data, delimiter.size) == 0) {
            return at + delimiter.size;
        }
    }
    return 0;
}

static int list_make_room(Listing *list, size_t size) {
    if (list->names_bytes + size <= list->names_room) {
        return 0;
    }
    size_t room = 2 * list->names_room + 2 * PAGE_BYTES;
    uint8_t *names = PyMem_RawRealloc(list->names, room);
    if (names == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    list->names = names;
    list->names_room = room;
    return 0;
}

/* Takes an object, or the common prefix that its name begins with: how many bytes of the key that is, 0 for all. */
static int list_take(Listing *list, const Cell *cell, uint64_t seq, const VersionCell *version, size_t *folded) {
    const uint8_t *name = (const uint8_t *)memchr(cell->key, 0, cell->key_bytes) + 1;
    size_t size = (size_t)(cell->key + cell->key_bytes - SEQ_BYTES - 1 - name);
    size_t common = list_fold(list, name, size);
    Slice inlined = {version->inlined.data, list->columns >= LISTED_VALUE && !common ? version->inlined.size : 0};
    *folded = common ? (size_t)(name - cell->key) + common : 0;
    size = common ? common : size;
    if (list_make_room(list, size + inlined.size) < 0) {
        return -1;
    }
    memcpy(list->names + list->names_bytes, name, size);
    memcpy(list->names + list->names_bytes + size, inlined.data, inlined.size);
    ListedRow *row = &list->rows[list->count++];
    row->name = list->names_bytes;
    row->name_bytes = size;
    row->seq = common ? 0 : seq;
    row->size = common ? 0 : version->size;
    row->crc = common ? 0 : version->crc;
    if (list->columns >= LISTED_VALUE) { /* nobody else looks at it, and it is most of the row */
        row->version = common ? (VersionCell){.flags = 0} : *version;
    }
    list->names_bytes += size + inlined.size;
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
    VersionCell version;
    size_t folded = 0;
    int seen = list_is_seen(list, &cell, seq, &version);
    if (seen < 1 || list_take(list, &cell, seq, &version, &folded) < 0) {
        return seen < 1 ? seen : -1;
    }
    if (folded > 0) { /* behind all keys with this prefix, which is text and so ends with no 0xff */
        list_aim(list, cell.key, folded);
        list->target[folded - 1]++;
    }
    return 0;
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

/* The leaf with the greatest key before the target, and its cell: 0 found, 1 missing, 2 there is none, 3 it aims
   further. */
static int list_descend_before(Listing *list) {
    Tree *tree = &list->tree;
    Slice fence = {NULL, 0};
    uint32_t index, id;
    tree->root.at = NULL;
    int got = tree_visit(tree, list->root, ANY_LEVEL, &list->leaf);
    if (got == 0) {
        tree->root = list->leaf;
    }
    while (got == 0 && page_level(&list->leaf) > 0) {
        Cell cell;
        if (list->leaf.count == 0) {
            return complain(&list->leaf, "an inner page without a child");
        }
        /* The last child that begins before the target: one that begins with it has nothing before it. */
        if (cell_search(&list->leaf, 1, list_target(list), 0, &index) < 0 || cell_at(&list->leaf, --index, &cell) < 0 ||
            child_id(&list->leaf, index, &id) < 0) {
            return -1;
        }
        if (index > 0) {
            fence = (Slice){cell.key, cell.key_bytes};
        }
        got = tree_visit(tree, id, page_level(&list->leaf) - 1, &list->leaf);
    }
    if (got != 0) {
        return got;
    }
    if (cell_search(&list->leaf, 0, list_target(list), 0, &index) < 0) {
        return -1;
    }
    if (index > 0) {
        list->index = index - 1;
        return 0;
    }
    if (fence.data == NULL) {
        return 2;
    }
    if (compare_keys(fence.data, fence.size, list->target, list->target_bytes) >= 0) {
        return complain(&list->leaf, "it does not lie where its parent says");
    }
    list_aim(list, fence.data, fence.size);
    return 3;
}

/* The version to be seen of the object of a cell, which is its oldest: 0 found, 1 missing, -1 on error. */
static int list_newest(Listing *list, const Cell *oldest, Cell *cell) {
    uint8_t key[PAGE_BYTES];
    size_t prefix = oldest->key_bytes - SEQ_BYTES;
    memcpy(key, oldest->key, prefix);
    for (int byte = 0; byte < SEQ_BYTES; byte++) {
        key[prefix + (size_t)byte] = (uint8_t)(~list->seq >> (56 - 8 * byte));
    }
    Slice wanted = {key, prefix + SEQ_BYTES};
    uint32_t index;
    if (cell_search(&list->leaf, 0, wanted, 0, &index) < 0) {
        return -1;
    }
    /* When the first cell of a leaf is not before what is wanted, there may be others in the leaf to the left. */
    int got = index > list->index ? 2
              : index > 0         ? cell_at(&list->leaf, index, cell)
                                  : tree_find(&list->tree, list->root, wanted, cell);
    if (got == 0 && (cell->key_bytes != wanted.size || memcmp(cell->key, key, prefix) != 0)) {
        got = 2;
    }
    return got == 2 ? complain(&list->leaf, "its cells are not in order") : got;
}

/* Looks at the cell at `index`, and aims before all versions of its key: 0, 1 missing, 2 at the end, -1 on error. */
static int list_look_before(Listing *list) {
    Cell oldest, cell;
    size_t folded = 0;
    if (cell_at(&list->leaf, list->index, &oldest) < 0) {
        return -1;
    }
    if (compare_to(&oldest, list->stop) < 0) {
        return 2;
    }
    if (!list_is_key(&oldest)) {
        return complain_of_cell(&list->leaf, "cell %lu is no version of an object", list->index);
    }
    if (version_seq(&oldest) <= list->seq) {
        VersionCell version;
        int got = list_newest(list, &oldest, &cell);
        if (got != 0) {
            return got;
        }
        uint64_t seq = version_seq(&cell);
        int seen = list_is_seen(list, &cell, seq, &version);
        if (seen < 0 || (seen && list_take(list, &cell, seq, &version, &folded) < 0)) {
            return -1;
        }
    }
    list_aim(list, oldest.key, folded > 0 ? folded : oldest.key_bytes - SEQ_BYTES);
    return 0;
}

/* As list_walk(), from the greatest key to the least. */
static int list_walk_before(Listing *list) {
    int got = list_descend_before(list);
    while (got == 0 || got == 3) {
        if (list->steps++ >= LIST_STEPS) {
            return 0;
        }
        if (got == 0) {
            got = list_look_before(list);
            if (got != 0 || list->count == list->limit) {
                return got;
            }
            uint32_t index;
            if (cell_search(&list->leaf, 0, list_target(list), 0, &index) < 0) {
                return -1;
            }
            got = index > 0 ? 0 : 3;
            list->index = index - 1;
        }
        if (got == 3) {
            got = list_descend_before(list);
        }
    }
    return got;
}

static SeenVersion list_row(const Listing *list, size_t index) {
    const ListedRow *row = &list->rows[index];
    const uint8_t *name = list->names + row->name;
    return (SeenVersion){.name = {name, row->name_bytes},
                         .stored = {name + row->name_bytes, row->version.inlined.size},
                         .seq = row->seq,
                         .size = row->size,
                         .crc = row->crc,
                         .cell = &row->version};
}

static int list_all_plain(const Listing *list) {
    size_t index = 0;
    while (index < list->count) {
        SeenVersion seen = list_row(list, index);
        if (!seen_is_plain(&seen)) {
            return 0;
        }
        index++;
    }
    return 1;
}

static PyObject *list_rows(const Listing *list) {
    int has_data = list->columns == LISTED_DATA && list_all_plain(list);
    PyObject *answer = PyList_New((Py_ssize_t)list->count);
    for (size_t index = 0; answer != NULL && index < list->count; index++) {
        SeenVersion seen = list_row(list, index);
        PyObject *fields = has_data                       ? plain_tuple(&seen)
                           : list->columns < LISTED_VALUE ? info_tuple(&seen, list->columns == LISTED_CRC ? 4 : 3)
                                                          : place_tuple(&seen);
        if (fields == NULL) {
            Py_CLEAR(answer);
        } else {
            PyList_SET_ITEM(answer, (Py_ssize_t)index, fields);
        }
    }
    return answer;
}

static PyObject *list_answer(const Listing *list, int got) {
    PyObject *rows = list_rows(list);
    if (rows == NULL) {
        return NULL;
    }
    unsigned long missing = got == 1 ? list->tree.missing : 0;
    if (got == 2) {
        return Py_BuildValue("(NOk)", rows, Py_None, missing);
    }
    return Py_BuildValue("(Ny#k)", rows, (const char *)list->target, (Py_ssize_t)list->target_bytes, missing);
}

static int list_arguments(PyObject *module, PyObject *const *arguments, Listing *list) {
    Slice start;
    uint32_t columns;
    if (tree_take(module, arguments, &list->tree, &list->root, &start) < 0 ||
        parse_bytes(arguments[3], "stop", &list->stop) < 0 || parse_u64(arguments[4], &list->seq) < 0 ||
        parse_u64(arguments[5], &list->created_seq) < 0 ||
        parse_u32(arguments[6], "created_order", &list->created_order) < 0 ||
        parse_index(arguments[7], "limit", &list->limit) < 0 || parse_u32(arguments[8], "columns", &columns) < 0 ||
        parse_index(arguments[10], "prefix_bytes", &list->prefix_bytes) < 0 ||
        parse_bytes(arguments[11], "delimiter", &list->delimiter) < 0) {
        return -1;
    }
    if (list->delimiter.size > 0 && list->delimiter.data[list->delimiter.size - 1] == 0xff) {
        PyErr_SetString(PyExc_ValueError, "a delimiter is text");
        return -1;
    }
    list->is_reverse = PyObject_IsTrue(arguments[9]);
    if (list->is_reverse < 0) {
        return -1;
    }
    if (columns > LISTED_DATA) {
        PyErr_Format(PyExc_ValueError, "columns must be from 0 to %d", LISTED_DATA);
        return -1;
    }
    list->columns = (int)columns;
    if (list->is_reverse) {
        Slice stop = list->stop;
        list->stop = start;
        start = stop;
    }
    if (list->limit < 1 || list->limit > LIST_STEPS) {
        PyErr_Format(PyExc_ValueError, "limit must be from 1 to %d", LIST_STEPS);
        return -1;
    }
    if (start.size > MAX_VERSION_KEY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "it begins with more than a key can be");
        return -1;
    }
    list_aim(list, start.data, start.size);
    return 0;
}

static PyObject *pages_list_seen(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Listing list;
    memset(&list, 0, sizeof list);
    if (expect_arguments("list_seen", count, 12, 12) < 0 || list_arguments(module, arguments, &list) < 0) {
        return NULL;
    }
    list.rows = PyMem_RawMalloc(list.limit * sizeof(ListedRow));
    if (list.rows == NULL) {
        return PyErr_NoMemory();
    }
    int got = list.is_reverse ? list_walk_before(&list) : list_walk(&list);
    PyObject *answer = got < 0 ? NULL : list_answer(&list, got);
    PyMem_RawFree(list.rows);
    PyMem_RawFree(list.names);
    return answer;
}

#endif
