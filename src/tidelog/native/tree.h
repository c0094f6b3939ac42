/* Finding and scanning over the resident pages, always from the root.

   Pages hold no Python objects and are looked up by int, so nothing here runs anybody's code before the answer is
   copied out: a call is one step for all threads. Objects that the collector knows are made last, see cell_objects(). */

#ifndef TIDELOG_TREE_H
#define TIDELOG_TREE_H

#include "page_calls.h"

#define PLACE_MISSING 0
#define PLACE_NO_ROOM 1
#define PLACE_NEEDS_IMAGE 2
#define ANY_LEVEL UINT32_MAX

typedef struct {
    NativeState *state;
    PyObject *pages; /* {page id: bytearray}, borrowed */
    Page root;
    uint32_t missing; /* the page that is not in memory, when a step answers 1 */
} Tree;

/* A resident page: 0 found, 1 missing, -1 error. */
static inline int pages_look_up(PyObject *pages, uint32_t id, PyObject **object) {
    PyObject *number = PyLong_FromUnsignedLong(id);
    if (number == NULL) {
        return -1;
    }
    *object = PyDict_GetItemWithError(pages, number);
    Py_DECREF(number);
    if (*object == NULL) {
        return PyErr_Occurred() ? -1 : 1;
    }
    return 0;
}

static int complain_of_name(const Page *page, uint32_t id) {
    return complain_of_cell(page, "it is not the page %lu that another one names", id);
}

/* A resident page that is what it is expected to be, counted and marked as used: 0 found, 1 missing, -1 error. */
static inline int tree_visit(Tree *tree, uint32_t id, uint32_t level, Page *page) {
    PyObject *object;
    int got = pages_look_up(tree->pages, id, &object);
    if (got != 0) {
        tree->missing = id;
        return got;
    }
    if (page_open(tree->state, object, page, 1) < 0) {
        return -1;
    }
    if (page_id(page) != id || page_level(page) > MAX_LEVEL || (level != ANY_LEVEL && page_level(page) != level)) {
        return complain_of_name(page, id);
    }
    page->at[REFERENCED_AT] = 1;
    uint8_t *counter = (tree->root.at == NULL ? page->at : tree->root.at) + ACCESSES_AT;
    store_u64(counter, load_u64(counter) + 1);
    return 0;
}

static int child_index(const Page *page, Slice key, uint32_t *index) {
    if (page->count == 0) {
        return complain(page, "an inner page without a child");
    }
    if (cell_search(page, 1, key, 1, index) < 0) {
        return -1;
    }
    *index -= 1;
    return 0;
}

static int child_id(const Page *page, uint32_t index, uint32_t *id) {
    Cell cell;
    if (cell_at(page, index, &cell) < 0) {
        return -1;
    }
    if (cell.value_bytes != 4) {
        return complain_of_cell(page, "cell %lu of an inner page names no child", index);
    }
    *id = load_u32(cell.value);
    return 0;
}

/* From the root to the leaf of a key, noting the way: 0, 1 when a page is missing, -1 on error. */
static int tree_descend(Tree *tree, uint32_t root, Slice key, Page *leaf, uint32_t path[MAX_LEVEL + 1], int *depth) {
    tree->root.at = NULL;
    int got = tree_visit(tree, root, ANY_LEVEL, leaf);
    if (got != 0) {
        return got;
    }
    tree->root = *leaf;
    *depth = 0;
    path[(*depth)++] = root;
    while (page_level(leaf) > 0) {
        uint32_t index, id;
        if (child_index(leaf, key, &index) < 0 || child_id(leaf, index, &id) < 0) {
            return -1;
        }
        got = tree_visit(tree, id, page_level(leaf) - 1, leaf);
        if (got != 0) {
            return got;
        }
        path[(*depth)++] = id;
    }
    return 0;
}

/* On to the right: 0, 1 when the page is missing, 2 when there is none, -1 on error. */
static int tree_go_right(Tree *tree, Page *leaf, Py_ssize_t steps) {
    uint32_t right = page_right(leaf);
    if (right == 0) {
        return 2;
    }
    if (steps > PyDict_GET_SIZE(tree->pages)) {
        return complain(leaf, "its right siblings go in a circle");
    }
    return tree_visit(tree, right, 0, leaf);
}

/* pages, root, key: the arguments that all calls begin with. */
static int tree_take(PyObject *module, PyObject *const *arguments, Tree *tree, uint32_t *root, Slice *key) {
    tree->state = PyModule_GetState(module);
    tree->pages = arguments[0];
    if (!PyDict_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "pages must be a dict");
        return -1;
    }
    return parse_u32(arguments[1], "root", root) < 0 ? -1 : parse_bytes(arguments[2], "key", key);
}

static int tree_find(Tree *tree, uint32_t root, Slice key, Cell *cell) {
    uint32_t path[MAX_LEVEL + 1], index;
    int depth, got;
    Page leaf;
    got = tree_descend(tree, root, key, &leaf, path, &depth);
    if (got != 0) {
        return got;
    }
    if (cell_search(&leaf, 0, key, 0, &index) < 0) {
        return -1;
    }
    for (Py_ssize_t steps = 1; index >= leaf.count; steps++) {
        got = tree_go_right(tree, &leaf, steps);
        if (got != 0) {
            return got;
        }
        index = 0;
    }
    return cell_at(&leaf, index, cell);
}

static PyObject *pages_find(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Tree tree;
    uint32_t root;
    Slice key;
    Cell cell;
    if (expect_arguments("find", count, 3, 3) < 0 || tree_take(module, arguments, &tree, &root, &key) < 0) {
        return NULL;
    }
    switch (tree_find(&tree, root, key, &cell)) {
    case 0:
        return cell_objects(&cell);
    case 1:
        return PyLong_FromUnsignedLong(tree.missing);
    case 2:
        Py_RETURN_NONE;
    default:
        return NULL;
    }
}

/* ---- scan ---- */

/* Copies of cells, one behind the other: first all of them, then the objects. */
typedef struct {
    uint8_t *bytes;
    size_t size, room;
    size_t count, limit;
    size_t last; /* where the last cell begins */
} Gathered;

static int gather(Gathered *gathered, const Cell *cell) {
    size_t size = cell_size(cell);
    if (gathered->size + size > gathered->room) {
        size_t room = 2 * gathered->room + PAGE_BYTES;
        uint8_t *bytes = PyMem_RawRealloc(gathered->bytes, room);
        if (bytes == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        gathered->bytes = bytes;
        gathered->room = room;
    }
    memcpy(gathered->bytes + gathered->size, cell->key - CELL_HEADER_BYTES, size);
    gathered->last = gathered->size;
    gathered->size += size;
    gathered->count++;
    return 0;
}

static inline Cell gathered_cell(const Gathered *gathered, size_t position) {
    const uint8_t *at = gathered->bytes + position;
    Cell cell = {.key_bytes = load_u16(at), .value_bytes = load_u16(at + 2), .key = at + CELL_HEADER_BYTES};
    cell.value = cell.key + cell.key_bytes;
    return cell;
}

/* Takes the cells of a leaf: 1 when the scan is over, by limit or by `stop` (data NULL: none). */
static int gather_leaf(Gathered *gathered, const Page *leaf, Slice start, Slice stop) {
    uint32_t index;
    if (cell_search(leaf, 0, start, 0, &index) < 0) {
        return -1;
    }
    for (; index < leaf->count; index++) {
        Cell cell;
        if (cell_at(leaf, index, &cell) < 0) {
            return -1;
        }
        if (stop.data != NULL && compare_to(&cell, stop) >= 0) {
            return 1;
        }
        if (gather(gathered, &cell) < 0) {
            return -1;
        }
        if (gathered->count == gathered->limit) {
            return 1;
        }
    }
    return 0;
}

static PyObject *gathered_list(const Gathered *gathered) {
    PyObject *list = PyList_New((Py_ssize_t)gathered->count);
    size_t position = 0;
    for (size_t index = 0; list != NULL && index < gathered->count; index++) {
        Cell cell = gathered_cell(gathered, position);
        PyObject *pair = cell_objects(&cell);
        if (pair == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)index, pair);
        }
        position += cell_size(&cell);
    }
    return list;
}

/* The last key and a zero byte: the least key behind it. */
static PyObject *resume_key(const Gathered *gathered) {
    Cell cell = gathered_cell(gathered, gathered->last);
    PyObject *key = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)cell.key_bytes + 1);
    if (key != NULL) {
        memcpy(PyBytes_AS_STRING(key), cell.key, cell.key_bytes);
        PyBytes_AS_STRING(key)[cell.key_bytes] = 0;
    }
    return key;
}

static PyObject *scan_answer(const Gathered *gathered, int goes_on) {
    PyObject *list = gathered_list(gathered);
    PyObject *resume = list == NULL ? NULL : goes_on ? resume_key(gathered) : Py_NewRef(Py_None);
    PyObject *answer = resume == NULL ? NULL : PyTuple_Pack(2, list, resume);
    Py_XDECREF(list);
    Py_XDECREF(resume);
    return answer;
}

/* 0 stopped by limit or stop, 1 a page is missing, 2 the end, -1 error. */
static int tree_scan(Tree *tree, uint32_t root, Slice start, Slice stop, Gathered *gathered) {
    uint32_t path[MAX_LEVEL + 1];
    int depth;
    Page leaf;
    int got = tree_descend(tree, root, start, &leaf, path, &depth);
    for (Py_ssize_t steps = 1; got == 0; steps++) {
        got = gather_leaf(gathered, &leaf, start, stop);
        if (got != 0) {
            return got < 0 ? -1 : 0;
        }
        start.size = 0;
        got = tree_go_right(tree, &leaf, steps);
    }
    return got;
}

static PyObject *pages_scan(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Tree tree;
    uint32_t root;
    Slice start, stop = {NULL, 0};
    Gathered gathered = {0};
    if (expect_arguments("scan_tree", count, 5, 5) < 0 || tree_take(module, arguments, &tree, &root, &start) < 0 ||
        (arguments[3] != Py_None && parse_bytes(arguments[3], "stop", &stop) < 0)) {
        return NULL;
    }
    Py_ssize_t limit = PyNumber_AsSsize_t(arguments[4], NULL);
    if (limit == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (limit < 1) {
        PyErr_SetString(PyExc_ValueError, "limit must be at least 1");
        return NULL;
    }
    gathered.limit = (size_t)limit;
    int got = tree_scan(&tree, root, start, stop, &gathered);
    PyObject *answer = NULL;
    if (got == 1 && gathered.count == 0) {
        answer = PyLong_FromUnsignedLong(tree.missing);
    } else if (got >= 0) {
        answer = scan_answer(&gathered, got == 1 || gathered.count == gathered.limit);
    }
    PyMem_RawFree(gathered.bytes);
    return answer;
}

/* ---- place ---- */

static PyObject *path_objects(const uint32_t *path, int depth) {
    PyObject *tuple = PyTuple_New(depth);
    for (int index = 0; tuple != NULL && index < depth; index++) {
        PyObject *number = PyLong_FromUnsignedLong(path[index]);
        if (number == NULL) {
            Py_CLEAR(tuple);
        } else {
            PyTuple_SET_ITEM(tuple, index, number);
        }
    }
    return tuple;
}

static PyObject *pages_place(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Tree tree;
    uint32_t root, path[MAX_LEVEL + 1];
    Slice key;
    size_t cell_bytes;
    uint64_t image_floor;
    int depth;
    Page leaf;
    if (expect_arguments("place", count, 5, 5) < 0 || tree_take(module, arguments, &tree, &root, &key) < 0 ||
        parse_index(arguments[3], "cell_bytes", &cell_bytes) < 0 || parse_u64(arguments[4], &image_floor) < 0) {
        return NULL;
    }
    int got = tree_descend(&tree, root, key, &leaf, path, &depth);
    if (got < 0) {
        return NULL;
    }
    if (got == 1) {
        return Py_BuildValue("(ik)", PLACE_MISSING, (unsigned long)tree.missing);
    }
    if (cell_bytes > PAGE_BYTES || (cell_bytes > 0 && cell_bytes + SLOT_BYTES > page_free(&leaf))) {
        return Py_BuildValue("(iN)", PLACE_NO_ROOM, path_objects(path, depth));
    }
    if (page_lsn(&leaf) < image_floor) {
        return Py_BuildValue("(ik)", PLACE_NEEDS_IMAGE, (unsigned long)path[depth - 1]);
    }
    return PyLong_FromUnsignedLong(path[depth - 1]);
}

/* Over leaves that have nothing, by key: a walk from sibling to sibling needs all of them in memory at once. */

/* One level down, and the least key of what is to the right of there (if anything is): 0, 1 missing, -1 error. */
static int skip_down(Tree *tree, Slice key, Page *page, Slice *fence) {
    uint32_t index, id;
    if (child_index(page, key, &index) < 0 || child_id(page, index, &id) < 0) {
        return -1;
    }
    if (index + 1 < page->count) {
        Cell next;
        if (cell_at(page, index + 1, &next) < 0) {
            return -1;
        }
        if (compare_to(&next, key) <= 0) {
            return complain(page, "its cells are not in order");
        }
        *fence = (Slice){next.key, next.key_bytes};
    }
    return tree_visit(tree, id, page_level(page) - 1, page);
}

/* 0 with a fence, 1 when a page is missing, 2 when there is nothing to skip, -1 on error. */
static int tree_skip(Tree *tree, uint32_t root, Slice key, Slice *fence) {
    Page page;
    uint32_t index;
    tree->root.at = NULL;
    int got = tree_visit(tree, root, ANY_LEVEL, &page);
    if (got == 0) {
        tree->root = page;
    }
    while (got == 0 && page_level(&page) > 0) {
        got = skip_down(tree, key, &page, fence);
    }
    if (got != 0) {
        return got;
    }
    if (cell_search(&page, 0, key, 0, &index) < 0) {
        return -1;
    }
    return index < page.count || fence->data == NULL ? 2 : 0;
}

static PyObject *pages_skip(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Tree tree;
    uint32_t root;
    Slice key, fence = {NULL, 0};
    if (expect_arguments("skip", count, 3, 3) < 0 || tree_take(module, arguments, &tree, &root, &key) < 0) {
        return NULL;
    }
    switch (tree_skip(&tree, root, key, &fence)) {
    case 0:
        return PyBytes_FromStringAndSize((const char *)fence.data, (Py_ssize_t)fence.size);
    case 1:
        return PyLong_FromUnsignedLong(tree.missing);
    case 2:
        Py_RETURN_NONE;
    default:
        return NULL;
    }
}

#endif
