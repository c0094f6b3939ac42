/* Rows of blocks: whether they are sound, several streams of them merged into one, and pages filled with them.
   tests/oracles/rows.py gives the same answers.

   A row is   key bytes u16, value bytes u16, key, value.   With places, the value is   cell bytes u16, cell, place: then
   only the cell is taken. */

#ifndef TIDELOG_ROWS_H
#define TIDELOG_ROWS_H

#include "page_calls.h"

#define ROW_HEADER_BYTES 4
#define PLACE_HEADER_BYTES 2
/* As in page.py: at least four cells fit into a page. */
#define MAX_LOADED_CELL_BYTES ((PAGE_BYTES - PAGE_HEADER_BYTES) / 4 - SLOT_BYTES)

typedef struct {
    Slice key, value;
    size_t end;
} Row;

static int complain_of_rows(NativeState *state, const char *text) {
    PyErr_SetString(state->data_error, text);
    return -1;
}

/* The row at a place of a block that is not behind its end. */
static int row_at(NativeState *state, Slice raw, size_t at, int has_places, Row *row) {
    size_t left = raw.size - at;
    if (left < ROW_HEADER_BYTES) {
        return complain_of_rows(state, "truncated row in a block");
    }
    size_t key_bytes = load_u16(raw.data + at), value_bytes = load_u16(raw.data + at + 2);
    if (left - ROW_HEADER_BYTES < key_bytes + value_bytes) {
        return complain_of_rows(state, "truncated row in a block");
    }
    row->key = (Slice){raw.data + at + ROW_HEADER_BYTES, key_bytes};
    row->value = (Slice){row->key.data + key_bytes, value_bytes};
    row->end = at + ROW_HEADER_BYTES + key_bytes + value_bytes;
    if (has_places) {
        size_t cell_bytes = value_bytes < PLACE_HEADER_BYTES ? 0 : load_u16(row->value.data);
        if (cell_bytes == 0 || cell_bytes > value_bytes - PLACE_HEADER_BYTES) {
            return complain_of_rows(state, "a block with a row that has no cell");
        }
        row->value = (Slice){row->value.data + PLACE_HEADER_BYTES, cell_bytes};
    }
    return 0;
}

static inline int compare_slices(Slice left, Slice right) {
    return compare_keys(left.data, left.size, right.data, right.size);
}

/* check_rows(raw, count, after_key, has_places): the last key. */
static PyObject *pages_check_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    Slice raw, after;
    uint64_t rows;
    if (expect_arguments("check_rows", count, 4, 4) < 0 || parse_bytes(arguments[0], "raw", &raw) < 0 ||
        parse_u64(arguments[1], &rows) < 0 || parse_bytes(arguments[2], "after_key", &after) < 0) {
        return NULL;
    }
    int has_places = PyObject_IsTrue(arguments[3]);
    size_t at = 0;
    uint64_t found = 0;
    while (at < raw.size) {
        Row row;
        if (row_at(state, raw, at, has_places, &row) < 0) {
            return NULL;
        }
        if (compare_slices(row.key, after) <= 0) {
            complain_of_rows(state, "rows of a block are not in order");
            return NULL;
        }
        after = row.key;
        at = row.end;
        found++;
    }
    if (found != rows) {
        complain_of_rows(state, "a block with another number of rows than it says");
        return NULL;
    }
    return bytes_of(after.data, after.size);
}

/* find_row(raw, key): the first row that is not before a key, as (key, value), or None. */
static PyObject *pages_find_row(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    Slice raw, key;
    if (expect_arguments("find_row", count, 2, 2) < 0 || parse_bytes(arguments[0], "raw", &raw) < 0 ||
        parse_bytes(arguments[1], "key", &key) < 0) {
        return NULL;
    }
    for (size_t at = 0; at < raw.size;) {
        Row row;
        if (row_at(state, raw, at, 0, &row) < 0) {
            return NULL;
        }
        if (compare_slices(row.key, key) >= 0) {
            Cell found = {row.key.data, row.value.data, (uint32_t)row.key.size, (uint32_t)row.value.size};
            return cell_objects(&found);
        }
        at = row.end;
    }
    Py_RETURN_NONE;
}

/* ---- merging ---- */

typedef struct {
    Slice raw;
    size_t at;
    int has_places;
    Row row;
} Source;

typedef struct {
    Source *sources;
    size_t count;
    int drops_removed;
    uint8_t *target;
    size_t size;
    uint64_t rows;
} Merge;

static int source_look(NativeState *state, Source *source) {
    return row_at(state, source->raw, source->at, source->has_places, &source->row);
}

static void merge_write(Merge *merge, const Row *row) {
    uint8_t *target = merge->target + merge->size;
    store_u16(target, (uint16_t)row->key.size);
    store_u16(target + 2, (uint16_t)row->value.size);
    memcpy(target + ROW_HEADER_BYTES, row->key.data, row->key.size);
    memcpy(target + ROW_HEADER_BYTES + row->key.size, row->value.data, row->value.size);
    merge->size += ROW_HEADER_BYTES + row->key.size + row->value.size;
    merge->rows++;
}

/* All sources that are at this key go on; 1 when one of them is at its end then, -1 on error. */
static int merge_step(NativeState *state, Merge *merge, Slice key) {
    int is_over = 0;
    for (size_t index = 0; index < merge->count; index++) {
        Source *source = &merge->sources[index];
        if (compare_slices(source->row.key, key) != 0) {
            continue;
        }
        source->at = source->row.end;
        if (source->at == source->raw.size) {
            is_over = 1;
        } else if (source_look(state, source) < 0) {
            return -1;
        } else if (compare_slices(source->row.key, key) <= 0) {
            return complain_of_rows(state, "rows of a block are not in order");
        }
    }
    return is_over;
}

static int merge_all(NativeState *state, Merge *merge) {
    for (size_t index = 0; index < merge->count; index++) {
        if (source_look(state, &merge->sources[index]) < 0) {
            return -1;
        }
    }
    int is_over = 0;
    while (!is_over) {
        const Row *least = &merge->sources[0].row;
        for (size_t index = 1; index < merge->count; index++) {
            const Row *other = &merge->sources[index].row;
            if (compare_slices(other->key, least->key) < 0) {
                least = other;
            }
        }
        Slice key = least->key;
        if (least->value.size > 0 || !merge->drops_removed) {
            merge_write(merge, least);
        }
        is_over = merge_step(state, merge, key);
    }
    return is_over < 0 ? -1 : 0;
}

/* Takes (raw, at, has_places) apart. */
static int source_take(PyObject *object, Source *source) {
    uint64_t at;
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 3) {
        PyErr_SetString(PyExc_TypeError, "a source is (raw, at, has_places)");
        return -1;
    }
    if (parse_bytes(PyTuple_GET_ITEM(object, 0), "raw", &source->raw) < 0 ||
        parse_u64(PyTuple_GET_ITEM(object, 1), &at) < 0) {
        return -1;
    }
    source->at = (size_t)at;
    source->has_places = PyObject_IsTrue(PyTuple_GET_ITEM(object, 2));
    if (at >= source->raw.size) {
        PyErr_SetString(PyExc_ValueError, "a source is at its end");
        return -1;
    }
    return 0;
}

static PyObject *merge_result(Merge *merge, PyObject *raw) {
    PyObject *places = PyTuple_New((Py_ssize_t)merge->count);
    for (size_t index = 0; places != NULL && index < merge->count; index++) {
        PyObject *at = PyLong_FromSize_t(merge->sources[index].at);
        if (at == NULL) {
            Py_CLEAR(places);
        } else {
            PyTuple_SET_ITEM(places, (Py_ssize_t)index, at);
        }
    }
    if (places == NULL) {
        Py_DECREF(raw);
        return NULL;
    }
    return Py_BuildValue("NKN", raw, (unsigned long long)merge->rows, places);
}

static PyObject *merge_into_bytes(NativeState *state, Merge *merge) {
    size_t room = 0;
    for (size_t index = 0; index < merge->count; index++) {
        room += merge->sources[index].raw.size - merge->sources[index].at;
    }
    PyObject *raw = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)room);
    if (raw == NULL) {
        return NULL;
    }
    merge->target = (uint8_t *)PyBytes_AS_STRING(raw);
    if (merge_all(state, merge) < 0) {
        Py_DECREF(raw);
        return NULL;
    }
    if (_PyBytes_Resize(&raw, (Py_ssize_t)merge->size) < 0) {
        return NULL;
    }
    return merge_result(merge, raw);
}

/* merge_rows(sources, drops_removed): (raw, rows, where each source is then). */
static PyObject *pages_merge_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (expect_arguments("merge_rows", count, 2, 2) < 0) {
        return NULL;
    }
    if (!PyTuple_Check(arguments[0]) || PyTuple_GET_SIZE(arguments[0]) < 1) {
        PyErr_SetString(PyExc_ValueError, "there is no source");
        return NULL;
    }
    Merge merge = {.count = (size_t)PyTuple_GET_SIZE(arguments[0]), .drops_removed = PyObject_IsTrue(arguments[1])};
    merge.sources = PyMem_Calloc(merge.count, sizeof(Source));
    if (merge.sources == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *result = NULL;
    size_t taken = 0;
    while (taken < merge.count &&
           source_take(PyTuple_GET_ITEM(arguments[0], (Py_ssize_t)taken), &merge.sources[taken]) == 0) {
        taken++;
    }
    if (taken == merge.count) {
        result = merge_into_bytes(PyModule_GetState(module), &merge);
    }
    PyMem_Free(merge.sources);
    return result;
}

/* ---- filling pages ---- */

/* Rows from `at` on go behind the cells of the page, as long as it keeps `reserved` bytes; -1 on error. */
static int page_fill(NativeState *state, Page *page, Slice raw, size_t *at, size_t *last_at, uint32_t reserved) {
    Cell last = {0};
    if (page->count > 0 && cell_at(page, page->count - 1, &last) < 0) {
        return -1;
    }
    Slice before = {last.key, last.key_bytes};
    int is_first = page->count == 0;
    while (*at < raw.size) {
        Row row;
        if (row_at(state, raw, *at, 0, &row) < 0) {
            return -1;
        }
        size_t size = CELL_HEADER_BYTES + row.key.size + row.value.size;
        if (size > MAX_LOADED_CELL_BYTES) {
            return complain_of_rows(state, "a row that is too large for a page");
        }
        if (!is_first && compare_slices(row.key, before) <= 0) {
            return complain_of_rows(state, "rows to be loaded are not in order, or a key comes twice");
        }
        if (page_free(page) < size + SLOT_BYTES + reserved) {
            return 0;
        }
        if (page_put(page, page->count, row.key, row.value, page->count + 1, NO_CELL) < 0) {
            return -1;
        }
        note_run(page, page->count - 1);
        before = row.key;
        is_first = 0;
        *last_at = *at;
        *at = row.end;
    }
    return 0;
}

/* fill_page(page, raw, at, reserved_bytes, lsn): (where the next row is, where the last one was that went in). */
static PyObject *pages_fill_page(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    Page page;
    Slice raw;
    uint64_t from, lsn;
    uint32_t reserved;
    if (expect_arguments("fill_page", count, 5, 5) < 0 || page_open(state, arguments[0], &page, 1) < 0 ||
        parse_bytes(arguments[1], "raw", &raw) < 0 || parse_u64(arguments[2], &from) < 0 ||
        parse_u32(arguments[3], "reserved_bytes", &reserved) < 0 || parse_u64(arguments[4], &lsn) < 0 ||
        check_lsn(&page, lsn) < 0) {
        return NULL;
    }
    if (from > raw.size || reserved > PAGE_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a place behind the rows, or more reserved than a page has");
        return NULL;
    }
    size_t at = (size_t)from, last_at = (size_t)from;
    if (page_fill(state, &page, raw, &at, &last_at, reserved) < 0) {
        return NULL;
    }
    store_u64(page.at + LSN_AT, lsn);
    return Py_BuildValue("nn", (Py_ssize_t)at, (Py_ssize_t)last_at);
}

#endif
