/* What a split is, as page updates. Nothing changes here: the updates are logged first and done by redo. */

#ifndef TIDELOG_TREE_SPLIT_H
#define TIDELOG_TREE_SPLIT_H

#include "operation.h"
#include "tree.h"

/* Below this many bytes the moved cells are logged themselves: the page can be rebuilt without the other. */
#define SMALL_IMAGE_BYTES 128

/* Three updates: at most three images, or three with a key. */
#define SPLIT_BYTES (3 * (UPDATE_HEADER_BYTES + MAX_IMAGE_BYTES))

typedef struct {
    Page page;
    uint32_t point;         /* the first cell that moves to the right */
    const uint8_t *divider; /* the key that divides */
    uint32_t divider_bytes;
} Division;

typedef struct {
    uint8_t bytes[SPLIT_BYTES];
    size_t size;
} Plan;

static uint8_t *plan_header(Plan *plan, uint32_t id, uint8_t what, uint32_t key_bytes, uint32_t value_bytes) {
    uint8_t *at = plan->bytes + plan->size;
    store_u32(at, id);
    at[4] = what;
    store_u16(at + 5, (uint16_t)key_bytes);
    store_u16(at + 7, (uint16_t)value_bytes);
    store_u16(at + 9, 0);
    plan->size += UPDATE_HEADER_BYTES + key_bytes + value_bytes;
    return at + UPDATE_HEADER_BYTES;
}

static void plan_image(Plan *plan, const Page *copy) {
    uint8_t *begin = plan->bytes + plan->size;
    uint8_t *end = image_write(copy, plan_header(plan, page_id(copy), UPDATE_IMAGE, 0, 0));
    store_u16(begin + 7, (uint16_t)(end - begin - UPDATE_HEADER_BYTES));
    plan->size = (size_t)(end - plan->bytes);
}

static void plan_with_key(Plan *plan, uint32_t id, uint8_t what, const Division *division, uint32_t number) {
    uint8_t *at = plan_header(plan, id, what, division->divider_bytes, 4);
    memcpy(at, division->divider, division->divider_bytes);
    store_u32(at + division->divider_bytes, number);
}

/* The cell at which the bytes of a page are divided into about two halves; at least one stays on each side. */
static int middle_of(const Page *page, uint32_t *point) {
    uint32_t total = 0, taken = 0;
    Cell cell;
    for (uint32_t index = 0; index < page->count; index++) {
        if (cell_at(page, index, &cell) < 0) {
            return -1;
        }
        total += cell_size(&cell) + SLOT_BYTES;
    }
    for (*point = 0; *point < page->count - 1 && 2 * taken < total; *point += 1) {
        cell_look(page, *point, &cell);
        taken += cell_size(&cell) + SLOT_BYTES;
    }
    *point = *point == 0 ? 1 : *point;
    return 0;
}

/* The shortest beginning of `right` that is greater than `left`. */
static uint32_t divider_length(const uint8_t *left, size_t left_bytes, const uint8_t *right, size_t right_bytes) {
    size_t common = 0;
    while (common < left_bytes && common < right_bytes && left[common] == right[common]) {
        common++;
    }
    return (uint32_t)(common < right_bytes ? common + 1 : right_bytes);
}

static int divide_inner(Division *division, Slice key) {
    const Page *page = &division->page;
    uint32_t index;
    Cell cell;
    if (page->count < 2) {
        return complain(page, "it is too small to be split");
    }
    if (child_index(page, key, &index) < 0) {
        return -1;
    }
    division->point = page->count - 1;
    if (index != page->count - 1 && middle_of(page, &division->point) < 0) {
        return -1;
    }
    if (cell_at(page, division->point, &cell) < 0) {
        return -1;
    }
    division->divider = cell.key;
    division->divider_bytes = cell.key_bytes;
    return 0;
}

/* Inserts in order leave full pages: only what is behind the new key moves. */
static int divide_leaf(Division *division, Slice key) {
    const Page *page = &division->page;
    uint32_t index;
    Cell left, right;
    if (cell_search(page, 0, key, 0, &index) < 0) {
        return -1;
    }
    if (index > 0 && (index == page->count || continues_run(page, index))) {
        if (cell_at(page, index - 1, &left) < 0) {
            return -1;
        }
        division->point = index;
        division->divider = key.data;
        division->divider_bytes = divider_length(left.key, left.key_bytes, key.data, key.size);
        return 0;
    }
    if (page->count < 2) {
        return complain(page, "it is too small to be split");
    }
    if (middle_of(page, &division->point) < 0 || cell_at(page, division->point - 1, &left) < 0 ||
        cell_at(page, division->point, &right) < 0) {
        return -1;
    }
    division->divider = right.key;
    division->divider_bytes = divider_length(left.key, left.key_bytes, right.key, right.key_bytes);
    return 0;
}

/* A page that has some of the cells of another; the first key of an inner page is not needed and left out. */
static int page_of_range(const Page *page, uint32_t start, uint32_t stop, uint32_t id, uint32_t right, uint8_t *memory,
                         Page *fresh) {
    memset(memory, 0, PAGE_HEADER_BYTES);
    page_format(memory, id, page_level(page), right);
    *fresh = (Page){.at = memory, .data_error = page->data_error};
    page_look(fresh);
    for (uint32_t index = start; index < stop; index++) {
        Cell cell;
        if (cell_at(page, index, &cell) < 0) {
            return -1;
        }
        Slice key = {cell.key, index == start && page_level(page) > 0 ? 0 : cell.key_bytes};
        Slice value = {cell.value, cell.value_bytes};
        if (CELL_HEADER_BYTES + key.size + value.size + SLOT_BYTES > page_free(fresh)) {
            return complain(page, "its cells overlap");
        }
        if (page_put(fresh, index - start, key, value, index - start + 1, NO_CELL) < 0) {
            return -1;
        }
    }
    return 0;
}

static int put_child(Page *top, uint32_t index, const uint8_t *key, uint32_t key_bytes, uint32_t child) {
    uint8_t number[4];
    store_u32(number, child);
    return page_put(top, index, (Slice){key, key_bytes}, (Slice){number, 4}, index + 1, NO_CELL);
}

/* The root stays where it is: its cells move into two new pages. */
static int plan_root_split(Plan *plan, const Division *division, uint32_t next_page) {
    const Page *page = &division->page;
    uint8_t memory[PAGE_BYTES];
    Page part;
    if (page_level(page) >= MAX_LEVEL) {
        return complain(page, "the tree is too high");
    }
    if (page_of_range(page, 0, division->point, next_page, next_page + 1, memory, &part) < 0) {
        return -1;
    }
    plan_image(plan, &part);
    if (page_of_range(page, division->point, page->count, next_page + 1, page_right(page), memory, &part) < 0) {
        return -1;
    }
    plan_image(plan, &part);
    memset(memory, 0, PAGE_HEADER_BYTES);
    page_format(memory, page_id(page), page_level(page) + 1, 0);
    page_look(&part);
    if (put_child(&part, 0, (const uint8_t *)"", 0, next_page) < 0 ||
        put_child(&part, 1, division->divider, division->divider_bytes, next_page + 1) < 0) {
        return -1;
    }
    plan_image(plan, &part);
    return 0;
}

static int plan_page_split(Plan *plan, const Division *division, const Page *parent, uint32_t next_page) {
    const Page *page = &division->page;
    uint8_t memory[PAGE_BYTES];
    Page part;
    if (page_of_range(page, division->point, page->count, next_page, page_right(page), memory, &part) < 0) {
        return -1;
    }
    if (PAGE_BYTES - part.heap < SMALL_IMAGE_BYTES) {
        plan_image(plan, &part);
    } else {
        plan_with_key(plan, next_page, UPDATE_SPLIT, division, page_id(page));
    }
    plan_with_key(plan, page_id(page), UPDATE_TRUNCATE, division, next_page);
    plan_with_key(plan, page_id(parent), UPDATE_INSERT, division, next_page);
    return 0;
}

static int resident_page(NativeState *state, PyObject *pages, PyObject *path, Py_ssize_t depth, Page *page) {
    uint32_t id;
    PyObject *object;
    if (parse_u32(PyTuple_GET_ITEM(path, depth), "page", &id) < 0) {
        return -1;
    }
    int got = pages_look_up(pages, id, &object);
    if (got == 1) {
        PyErr_Format(PyExc_ValueError, "page %lu is not in memory", (unsigned long)id);
    }
    return got != 0 ? -1 : page_open(state, object, page, 1);
}

/* Plans the split of the lowest page whose parent has room for one more child: how many new pages, or -1. */
static int plan_lowest(NativeState *state, PyObject *pages, PyObject *path, Slice key, uint32_t next_page, Plan *plan) {
    Division division;
    Page parent;
    for (Py_ssize_t depth = PyTuple_GET_SIZE(path) - 1;; depth--) {
        if (resident_page(state, pages, path, depth, &division.page) < 0) {
            return -1;
        }
        int leaf = page_level(&division.page) == 0;
        if ((leaf ? divide_leaf(&division, key) : divide_inner(&division, key)) < 0) {
            return -1;
        }
        if (depth == 0) {
            return plan_root_split(plan, &division, next_page) < 0 ? -1 : 2;
        }
        if (resident_page(state, pages, path, depth - 1, &parent) < 0) {
            return -1;
        }
        if (CELL_HEADER_BYTES + division.divider_bytes + 4 + SLOT_BYTES <= page_free(&parent)) {
            return plan_page_split(plan, &division, &parent, next_page) < 0 ? -1 : 1;
        }
    }
}

static PyObject *pages_plan_split(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Plan plan;
    Slice key;
    uint32_t next_page;
    if (expect_arguments("plan_split", count, 4, 4) < 0 || parse_bytes(arguments[2], "key", &key) < 0 ||
        parse_u32(arguments[3], "next_page", &next_page) < 0) {
        return NULL;
    }
    if (!PyDict_Check(arguments[0]) || !PyTuple_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "pages must be a dict and path a tuple");
        return NULL;
    }
    if (PyTuple_GET_SIZE(arguments[1]) == 0) {
        PyErr_SetString(PyExc_ValueError, "a path has at least one page");
        return NULL;
    }
    plan.size = 0;
    int fresh = plan_lowest(PyModule_GetState(module), arguments[0], arguments[1], key, next_page, &plan);
    return fresh < 0 ? NULL : Py_BuildValue("(y#i)", plan.bytes, (Py_ssize_t)plan.size, fresh);
}

#endif
