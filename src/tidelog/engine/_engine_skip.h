/* Over leaves that have nothing, by key: a walk from sibling to sibling needs all of them in memory at once. */

#ifndef TIDELOG_ENGINE_SKIP_H
#define TIDELOG_ENGINE_SKIP_H

#include "_engine_tree.h"

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

static PyObject *engine_skip(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
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
