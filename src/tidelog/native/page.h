/* The numbers of a page, and looking into one. `btree/page.py` draws it.

   A page is hostile: `page_open` checks what every access relies on, `cell_at` checks each cell before it is looked at. */

#ifndef TIDELOG_PAGE_H
#define TIDELOG_PAGE_H

#include "arguments.h"
#include "crc32.h"

#define PAGE_BYTES 8192
#define PAGE_HEADER_BYTES 40
#define SLOT_BYTES 2
#define CELL_HEADER_BYTES 4
#define PAGE_MAGIC 0x5447
#define TREE_KIND 1
#define MAX_LEVEL 15

#define MAGIC_AT 4
#define KIND_AT 6
#define LEVEL_AT 7
#define ID_AT 8
#define RIGHT_AT 12
#define LSN_AT 16
#define COUNT_AT 24
#define HEAP_AT 26
#define DEAD_AT 28
#define ACCESSES_AT 30
#define REFERENCED_AT 38
/* In pages other than the root: where the last insert was, and how many had come there in order. */
#define RUN_INDEX_AT 30
#define RUN_LENGTH_AT 32
#define LONG_RUN 8
#define ROOT_PAGE 1

typedef struct {
    uint8_t *at;
    PyObject *data_error; /* borrowed from the module's state */
    uint32_t count, heap, dead;
} Page;

typedef struct {
    const uint8_t *key, *value;
    uint32_t key_bytes, value_bytes;
} Cell;

static inline uint32_t cell_size(const Cell *cell) {
    return CELL_HEADER_BYTES + cell->key_bytes + cell->value_bytes;
}

static inline uint32_t slots_end(uint32_t count) {
    return PAGE_HEADER_BYTES + SLOT_BYTES * count;
}

static inline uint32_t page_id(const Page *page) {
    return load_u32(page->at + ID_AT);
}

static inline uint32_t page_level(const Page *page) {
    return page->at[LEVEL_AT];
}

static inline uint32_t page_right(const Page *page) {
    return load_u32(page->at + RIGHT_AT);
}

static inline uint64_t page_lsn(const Page *page) {
    return load_u64(page->at + LSN_AT);
}

static int complain(const Page *page, const char *text) {
    PyErr_Format(page->data_error, "page %lu: %s", (unsigned long)page_id(page), text);
    return -1;
}

static int complain_of_cell(const Page *page, const char *format, uint32_t index) {
    char text[96];
    PyOS_snprintf(text, sizeof text, format, (unsigned long)index);
    return complain(page, text);
}

/* Whether the header allows to look at slots and cells, and then the numbers in it. */
static inline int page_look(Page *page) {
    const uint8_t *at = page->at;
    page->count = load_u16(at + COUNT_AT);
    page->heap = load_u16(at + HEAP_AT);
    page->dead = load_u16(at + DEAD_AT);
    return load_u16(at + MAGIC_AT) == PAGE_MAGIC && at[KIND_AT] == TREE_KIND && page->heap <= PAGE_BYTES &&
           slots_end(page->count) <= page->heap && page->dead <= PAGE_BYTES - page->heap;
}

static int complain_of_type(void) {
    PyErr_Format(PyExc_ValueError, "a page is a bytearray of %d bytes", PAGE_BYTES);
    return -1;
}

/* Memory of the size of a page, whatever is in it. */
static inline int page_take(NativeState *state, PyObject *object, Page *page, int to_change) {
    page->data_error = state->data_error;
    if (PyByteArray_Check(object) && PyByteArray_GET_SIZE(object) == PAGE_BYTES) {
        page->at = (uint8_t *)PyByteArray_AS_STRING(object);
        return 0;
    }
    if (!to_change && PyBytes_Check(object) && PyBytes_GET_SIZE(object) == PAGE_BYTES) {
        page->at = (uint8_t *)PyBytes_AS_STRING(object);
        return 0;
    }
    return complain_of_type();
}

static inline int page_open(NativeState *state, PyObject *object, Page *page, int to_change) {
    if (page_take(state, object, page, to_change) < 0) {
        return -1;
    }
    return page_look(page) ? 0 : complain(page, "its header is damaged");
}

static inline void page_store_counts(Page *page) {
    store_u16(page->at + COUNT_AT, (uint16_t)page->count);
    store_u16(page->at + HEAP_AT, (uint16_t)page->heap);
    store_u16(page->at + DEAD_AT, (uint16_t)page->dead);
}

/* Room for cells and their slots, once the dead bytes are taken back. */
static inline uint32_t page_free(const Page *page) {
    return page->heap - slots_end(page->count) + page->dead;
}

static inline int cell_look(const Page *page, uint32_t index, Cell *cell) {
    uint32_t position = load_u16(page->at + slots_end(index));
    if (position < page->heap || position + CELL_HEADER_BYTES > PAGE_BYTES) {
        return 0;
    }
    cell->key_bytes = load_u16(page->at + position);
    cell->value_bytes = load_u16(page->at + position + 2);
    cell->key = page->at + position + CELL_HEADER_BYTES;
    cell->value = cell->key + cell->key_bytes;
    return position + cell_size(cell) <= PAGE_BYTES;
}

static inline int cell_at(const Page *page, uint32_t index, Cell *cell) {
    return cell_look(page, index, cell) ? 0 : complain_of_cell(page, "cell %lu lies outside of the heap", index);
}

/* Less than 0, 0 or more than 0, as bytes are ordered. */
static inline int compare_keys(const uint8_t *left, size_t left_bytes, const uint8_t *right, size_t right_bytes) {
    int order = memcmp(left, right, left_bytes < right_bytes ? left_bytes : right_bytes);
    if (order != 0) {
        return order;
    }
    return left_bytes < right_bytes ? -1 : left_bytes > right_bytes;
}

static inline int compare_to(const Cell *cell, Slice key) {
    return compare_keys(cell->key, cell->key_bytes, key.data, key.size);
}

/* Index of the first cell from `low` on whose key is not less (`equal` 0), or is greater (`equal` 1). */
static inline int cell_search(const Page *page, uint32_t low, Slice key, int equal, uint32_t *found) {
    uint32_t high = page->count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        Cell cell;
        if (cell_at(page, middle, &cell) < 0) {
            return -1;
        }
        int order = compare_to(&cell, key);
        if (order < 0 || (equal && order == 0)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    *found = low;
    return 0;
}

/* 1 when the key is there, at `index`; 0 when it would be inserted at `index`; -1 on error. */
static inline int cell_find(const Page *page, Slice key, uint32_t *index, Cell *cell) {
    if (cell_search(page, 0, key, 0, index) < 0) {
        return -1;
    }
    if (*index == page->count) {
        return 0;
    }
    if (cell_at(page, *index, cell) < 0) {
        return -1;
    }
    return compare_to(cell, key) == 0;
}

static inline PyObject *bytes_of(const uint8_t *data, size_t size) {
    return PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size);
}

#endif
