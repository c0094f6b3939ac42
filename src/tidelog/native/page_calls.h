/* The calls from Python on one page. Nothing here lets go of the GIL: each call is one step for all threads. */

#ifndef TIDELOG_PAGE_CALLS_H
#define TIDELOG_PAGE_CALLS_H

#include "page_cells.h"

static PyObject *pages_format_page(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    uint32_t id, level;
    if (expect_arguments("format_page", count, 3, 3) < 0 ||
        page_take(PyModule_GetState(module), arguments[0], &page, 1) < 0 ||
        parse_u32(arguments[1], "page_id", &id) < 0 ||
        parse_u32(arguments[2], "level", &level) < 0) {
        return NULL;
    }
    page_format(page.at, id, level, 0);
    Py_RETURN_NONE;
}

static int check_lsn(const Page *page, uint64_t lsn) {
    if (lsn >= page_lsn(page)) {
        return 0;
    }
    PyErr_Format(page->data_error, "page %lu: a change of record %llu comes behind one of record %llu",
                 (unsigned long)page_id(page), (unsigned long long)lsn, (unsigned long long)page_lsn(page));
    return -1;
}

/* insert and replace: page, key, value, lsn. */
static PyObject *change_cell(PyObject *module, const char *name, int (*change)(Page *, Slice, Slice),
                             PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    Slice key, value;
    uint64_t lsn;
    if (expect_arguments(name, count, 4, 4) < 0 ||
        page_open(PyModule_GetState(module), arguments[0], &page, 1) < 0 ||
        parse_bytes(arguments[1], "key", &key) < 0 ||
        parse_bytes(arguments[2], "value", &value) < 0 || parse_u64(arguments[3], &lsn) < 0 ||
        check_lsn(&page, lsn) < 0 || change(&page, key, value) < 0) {
        return NULL;
    }
    store_u64(page.at + LSN_AT, lsn);
    Py_RETURN_NONE;
}

static PyObject *pages_insert(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return change_cell(module, "insert", page_insert, arguments, count);
}

static PyObject *pages_replace(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    return change_cell(module, "replace", page_replace, arguments, count);
}

static PyObject *pages_remove(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    Slice key;
    uint64_t lsn;
    if (expect_arguments("remove", count, 3, 3) < 0 ||
        page_open(PyModule_GetState(module), arguments[0], &page, 1) < 0 ||
        parse_bytes(arguments[1], "key", &key) < 0 ||
        parse_u64(arguments[2], &lsn) < 0 || check_lsn(&page, lsn) < 0 || page_remove(&page, key) < 0) {
        return NULL;
    }
    store_u64(page.at + LSN_AT, lsn);
    Py_RETURN_NONE;
}

static PyObject *pages_set_header(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    uint32_t right;
    uint64_t lsn;
    if (expect_arguments("set_header", count, 3, 3) < 0 ||
        page_open(PyModule_GetState(module), arguments[0], &page, 1) < 0 ||
        parse_u32(arguments[1], "right", &right) < 0 || parse_u64(arguments[2], &lsn) < 0) {
        return NULL;
    }
    store_u32(page.at + RIGHT_AT, right);
    store_u64(page.at + LSN_AT, lsn);
    Py_RETURN_NONE;
}

static PyObject *pages_get(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    Slice key;
    uint32_t index;
    Cell cell;
    if (expect_arguments("get", count, 2, 2) < 0 || page_open(PyModule_GetState(module), arguments[0], &page, 0) < 0 ||
        parse_bytes(arguments[1], "key", &key) < 0) {
        return NULL;
    }
    int found = cell_find(&page, key, &index, &cell);
    if (found < 0) {
        return NULL;
    }
    if (found == 0) {
        Py_RETURN_NONE;
    }
    return bytes_of(cell.value, cell.value_bytes);
}

/* A pair of bytes. They are copied before the tuple is made: making one may run the collector, and with it anybody's code. */
static PyObject *cell_objects(const Cell *cell) {
    PyObject *key = bytes_of(cell->key, cell->key_bytes);
    PyObject *value = key == NULL ? NULL : bytes_of(cell->value, cell->value_bytes);
    PyObject *pair = value == NULL ? NULL : PyTuple_New(2);
    if (pair == NULL) {
        Py_XDECREF(key);
        Py_XDECREF(value);
        return NULL;
    }
    PyTuple_SET_ITEM(pair, 0, key);
    PyTuple_SET_ITEM(pair, 1, value);
    return pair;
}

static PyObject *pages_cells(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    uint8_t memory[PAGE_BYTES];
    if (expect_arguments("cells", count, 1, 1) < 0 ||
        page_open(PyModule_GetState(module), arguments[0], &page, 0) < 0) {
        return NULL;
    }
    memcpy(memory, page.at, PAGE_BYTES); /* the objects below may let others run, see cell_objects() */
    page.at = memory;
    PyObject *list = PyList_New(0);
    for (uint32_t index = 0; list != NULL && index < page.count; index++) {
        Cell cell;
        PyObject *pair = cell_at(&page, index, &cell) < 0 ? NULL : cell_objects(&cell);
        if (pair == NULL || PyList_Append(list, pair) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(pair);
    }
    return list;
}

/* page_rows(page): (how many cells, all of them as rows of a block: a cell is one as it is). */
static PyObject *pages_page_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    if (expect_arguments("page_rows", count, 1, 1) < 0 ||
        page_open(PyModule_GetState(module), arguments[0], &page, 0) < 0) {
        return NULL;
    }
    uint8_t rows[PAGE_BYTES];
    uint32_t used = 0;
    for (uint32_t index = 0; index < page.count; index++) {
        Cell cell;
        if (cell_at(&page, index, &cell) < 0) {
            return NULL;
        }
        uint32_t size = cell_size(&cell);
        if (size > PAGE_BYTES - used) {
            complain(&page, "its cells overlap");
            return NULL;
        }
        memcpy(rows + used, cell.key - CELL_HEADER_BYTES, size);
        used += size;
    }
    return Py_BuildValue("(ny#)", (Py_ssize_t)page.count, (const char *)rows, (Py_ssize_t)used);
}

static PyObject *pages_compact_image(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page, copy;
    uint8_t memory[PAGE_BYTES], image[MAX_IMAGE_BYTES];
    if (expect_arguments("compact_image", count, 1, 1) < 0 ||
        page_open(PyModule_GetState(module), arguments[0], &page, 0) < 0 ||
        page_normal_copy(&page, memory, &copy) < 0) {
        return NULL;
    }
    return bytes_of(image, (size_t)(image_write(&copy, image) - image));
}

static PyObject *pages_set_image(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    Slice image;
    if (expect_arguments("set_image", count, 2, 2) < 0 ||
        page_take(PyModule_GetState(module), arguments[0], &page, 1) < 0 ||
        parse_bytes(arguments[1], "image", &image) < 0 ||
        page_put_image(&page, image, image.size < IMAGE_HEADER_BYTES ? 0 : load_u32(image.data)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *pages_sealed(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    if (expect_arguments("sealed", count, 1, 1) < 0 ||
        page_open(PyModule_GetState(module), arguments[0], &page, 0) < 0) {
        return NULL;
    }
    PyObject *copy = bytes_of(page.at, PAGE_BYTES);
    if (copy != NULL) {
        uint8_t *at = (uint8_t *)PyBytes_AS_STRING(copy);
        uint32_t end = slots_end(page.count);
        memset(at + ACCESSES_AT, 0, PAGE_HEADER_BYTES - ACCESSES_AT);
        memset(at + end, 0, page.heap - end);
        store_u32(at, crc_of(at + MAGIC_AT, PAGE_BYTES - MAGIC_AT));
    }
    return copy;
}

static PyObject *pages_verify_crc(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    uint8_t memory[PAGE_BYTES];
    if (expect_arguments("verify_crc", count, 1, 1) < 0 ||
        page_take(PyModule_GetState(module), arguments[0], &page, 0) < 0) {
        return NULL;
    }
    memcpy(memory, page.at, PAGE_BYTES);
    memory[REFERENCED_AT] = 0;
    return PyBool_FromLong(crc_of(memory + MAGIC_AT, PAGE_BYTES - MAGIC_AT) == load_u32(memory));
}

static PyObject *pages_check_page(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Page page;
    uint32_t id;
    char text[96];
    if (expect_arguments("check_page", count, 2, 2) < 0 ||
        page_take(PyModule_GetState(module), arguments[0], &page, 0) < 0 ||
        parse_u32(arguments[1], "page_id", &id) < 0) {
        return NULL;
    }
    if (page_fault(&page, id, text, sizeof text)) {
        return PyUnicode_FromString(text);
    }
    Py_RETURN_NONE;
}

#endif
