/* Changing one page: cells in and out, images, and whether it is sound. */

#ifndef TIDELOG_PAGE_CELLS_H
#define TIDELOG_PAGE_CELLS_H

#include "page.h"
#include "varint.h"

#define NO_CELL UINT32_MAX

static void page_format(uint8_t *at, uint32_t id, uint32_t level, uint32_t right) {
    uint8_t memory_only[PAGE_HEADER_BYTES - ACCESSES_AT];
    memcpy(memory_only, at + ACCESSES_AT, sizeof memory_only);
    memset(at, 0, PAGE_BYTES);
    store_u16(at + MAGIC_AT, PAGE_MAGIC);
    at[KIND_AT] = TREE_KIND;
    at[LEVEL_AT] = (uint8_t)level;
    store_u32(at + ID_AT, id);
    store_u32(at + RIGHT_AT, right);
    store_u16(at + HEAP_AT, PAGE_BYTES);
    memcpy(at + ACCESSES_AT, memory_only, sizeof memory_only);
}

/* Moves the cells together; `skipped` is dropped from the heap, its slot stays. On error nothing has changed. */
static int page_compact(Page *page, uint32_t skipped) {
    uint8_t image[PAGE_BYTES];
    uint32_t end = slots_end(page->count), heap = PAGE_BYTES;
    memcpy(image + PAGE_HEADER_BYTES, page->at + PAGE_HEADER_BYTES, end - PAGE_HEADER_BYTES);
    for (uint32_t index = 0; index < page->count; index++) {
        Cell cell;
        if (index == skipped) {
            continue;
        }
        if (cell_at(page, index, &cell) < 0) {
            return -1;
        }
        uint32_t size = cell_size(&cell);
        if (heap - end < size) {
            return complain(page, "its cells overlap");
        }
        heap -= size;
        memcpy(image + heap, cell.key - CELL_HEADER_BYTES, size);
        store_u16(image + slots_end(index), (uint16_t)heap);
    }
    memcpy(page->at + PAGE_HEADER_BYTES, image + PAGE_HEADER_BYTES, end - PAGE_HEADER_BYTES);
    memcpy(page->at + heap, image + heap, PAGE_BYTES - heap);
    page->heap = heap;
    page->dead = 0;
    page_store_counts(page);
    return 0;
}

static int page_add_dead(Page *page, uint32_t size) {
    if (page->dead + size > PAGE_BYTES - page->heap) {
        return complain(page, "its dead bytes are miscounted");
    }
    page->dead += size;
    page_store_counts(page);
    return 0;
}

/* Finds room in the heap, moving cells together when they are in the way. */
static int page_make_room(Page *page, uint32_t size, uint32_t slots, uint32_t skipped) {
    if (page->heap >= slots_end(slots) + size) {
        Cell cell;
        if (skipped == NO_CELL) {
            return 0;
        }
        return cell_at(page, skipped, &cell) < 0 ? -1 : page_add_dead(page, cell_size(&cell));
    }
    if (page_compact(page, skipped) < 0) {
        return -1;
    }
    return page->heap >= slots_end(slots) + size ? 0 : complain(page, "its free room is miscounted");
}

/* Writes a cell and points the slot at it; `slots` is how many there will be. */
static int page_put(Page *page, uint32_t index, Slice key, Slice value, uint32_t slots, uint32_t skipped) {
    uint32_t size = CELL_HEADER_BYTES + (uint32_t)key.size + (uint32_t)value.size;
    if (page_make_room(page, size, slots, skipped) < 0) {
        return -1;
    }
    uint32_t heap = page->heap - size;
    uint8_t *cell = page->at + heap;
    store_u16(cell, (uint16_t)key.size);
    store_u16(cell + 2, (uint16_t)value.size);
    memcpy(cell + CELL_HEADER_BYTES, key.data, key.size);
    memcpy(cell + CELL_HEADER_BYTES + key.size, value.data, value.size);
    uint8_t *slot = page->at + slots_end(index);
    if (slots > page->count) {
        memmove(slot + SLOT_BYTES, slot, SLOT_BYTES * (page->count - index));
    }
    store_u16(slot, (uint16_t)heap);
    page->count = slots;
    page->heap = heap;
    page_store_counts(page);
    return 0;
}

static int complain_of_room(const Page *page, size_t size) {
    PyErr_Format(page->data_error, "page %lu: no room for a cell of %zu bytes", (unsigned long)page_id(page), size);
    return -1;
}

static inline int is_next_of_run(const Page *page, uint32_t index) {
    return page_id(page) != ROOT_PAGE && index == (uint32_t)load_u16(page->at + RUN_INDEX_AT) + 1;
}

static inline void note_run(Page *page, uint32_t index) {
    if (page_id(page) != ROOT_PAGE) {
        uint8_t length = page->at[RUN_LENGTH_AT];
        page->at[RUN_LENGTH_AT] = !is_next_of_run(page, index) ? 0 : length < 255 ? length + 1 : 255;
        store_u16(page->at + RUN_INDEX_AT, (uint16_t)index);
    }
}

/* Whether an insert at `index` goes on with many that came in order. */
static inline int continues_run(const Page *page, uint32_t index) {
    return is_next_of_run(page, index) && page->at[RUN_LENGTH_AT] >= LONG_RUN;
}

static int page_insert(Page *page, Slice key, Slice value) {
    uint32_t index;
    Cell cell;
    int found = cell_find(page, key, &index, &cell);
    if (found != 0) {
        return found < 0 ? -1 : complain(page, "the key to insert is already there");
    }
    size_t size = CELL_HEADER_BYTES + key.size + value.size;
    if (size + SLOT_BYTES > page_free(page)) {
        return complain_of_room(page, size);
    }
    if (page_put(page, index, key, value, page->count + 1, NO_CELL) < 0) {
        return -1;
    }
    note_run(page, index);
    return 0;
}

static int page_replace(Page *page, Slice key, Slice value) {
    uint32_t index;
    Cell cell;
    int found = cell_find(page, key, &index, &cell);
    if (found <= 0) {
        return found < 0 ? -1 : complain(page, "the key to replace is not there");
    }
    if (value.size <= cell.value_bytes) {
        if (page_add_dead(page, cell.value_bytes - (uint32_t)value.size) < 0) {
            return -1;
        }
        uint8_t *start = page->at + (cell.key - page->at);
        store_u16(start - 2, (uint16_t)value.size);
        memcpy(start + cell.key_bytes, value.data, value.size);
        return 0;
    }
    size_t size = CELL_HEADER_BYTES + key.size + value.size;
    if (size > page_free(page) + cell_size(&cell)) {
        return complain_of_room(page, size);
    }
    return page_put(page, index, key, value, page->count, index);
}

static int page_remove(Page *page, Slice key) {
    uint32_t index;
    Cell cell;
    int found = cell_find(page, key, &index, &cell);
    if (found <= 0) {
        return found < 0 ? -1 : complain(page, "the key to remove is not there");
    }
    if (page_add_dead(page, cell_size(&cell)) < 0) {
        return -1;
    }
    uint8_t *slot = page->at + slots_end(index);
    memmove(slot, slot + SLOT_BYTES, SLOT_BYTES * (page->count - index - 1));
    page->count--;
    page_store_counts(page);
    return 0;
}

static int page_truncate(Page *page, Slice key, uint32_t right) {
    uint32_t keep;
    if (cell_search(page, 0, key, 0, &keep) < 0) {
        return -1;
    }
    uint64_t dead = page->dead;
    for (uint32_t index = keep; index < page->count; index++) {
        Cell cell;
        if (cell_at(page, index, &cell) < 0) {
            return -1;
        }
        dead += cell_size(&cell);
    }
    if (dead > PAGE_BYTES - page->heap) {
        return complain(page, "its dead bytes are miscounted");
    }
    page->count = keep;
    page->dead = (uint32_t)dead;
    page_store_counts(page);
    store_u32(page->at + RIGHT_AT, right);
    return 0;
}

/* ---- whether a page is sound ---- */

static int fault_of_cells(const Page *page, char *text, size_t text_bytes) {
    Cell before = {0};
    for (uint32_t index = 0; index < page->count; index++) {
        Cell cell;
        const char *wrong = NULL;
        if (!cell_look(page, index, &cell)) {
            wrong = "cell %lu lies outside of the heap";
        } else if (page_level(page) > 0 && cell.value_bytes != 4) {
            wrong = "cell %lu of an inner page names no child";
        } else if (index > 0 && compare_keys(cell.key, cell.key_bytes, before.key, before.key_bytes) <= 0) {
            wrong = "cell %lu is out of order";
        }
        if (wrong != NULL) {
            PyOS_snprintf(text, text_bytes, wrong, (unsigned long)index);
            return 1;
        }
        before = cell;
    }
    return 0;
}

/* Only for cells that lie inside of the heap. */
static int fault_of_heap(const Page *page, char *text, size_t text_bytes) {
    uint8_t used[PAGE_BYTES] = {0};
    uint32_t total = 0;
    for (uint32_t index = 0; index < page->count; index++) {
        Cell cell = {0};
        cell_look(page, index, &cell);
        uint8_t *begin = used + (cell.key - CELL_HEADER_BYTES - page->at);
        if (memchr(begin, 1, cell_size(&cell)) != NULL) {
            PyOS_snprintf(text, text_bytes, "cell %lu overlaps another", (unsigned long)index);
            return 1;
        }
        memset(begin, 1, cell_size(&cell));
        total += cell_size(&cell);
    }
    if (total + page->dead != PAGE_BYTES - page->heap) {
        PyOS_snprintf(text, text_bytes, "its heap is miscounted");
        return 1;
    }
    return 0;
}

/* 1, and the first fault in words; 0 when the page is sound. */
static int page_fault(Page *page, uint32_t id, char *text, size_t text_bytes) {
    if (!page_look(page)) {
        PyOS_snprintf(text, text_bytes, "its header is damaged");
    } else if (page_id(page) != id) {
        PyOS_snprintf(text, text_bytes, "it says that it is page %lu", (unsigned long)page_id(page));
    } else if (page_level(page) > MAX_LEVEL) {
        PyOS_snprintf(text, text_bytes, "its level is %lu", (unsigned long)page_level(page));
    } else if (page_level(page) > 0 && page->count == 0) {
        PyOS_snprintf(text, text_bytes, "an inner page without a child");
    } else {
        return fault_of_cells(page, text, text_bytes) || fault_of_heap(page, text, text_bytes);
    }
    return 1;
}

/* ---- images ---- */

#define IMAGE_HEADER_BYTES 9
/* Lengths of cells take two bytes less in a page than here, if they are long; then there are not many. */
#define MAX_IMAGE_BYTES (PAGE_BYTES + 256)

static inline size_t common_bytes(Slice left, Slice right) {
    size_t common = 0, most = left.size < right.size ? left.size : right.size;
    while (common < most && left.data[common] == right.data[common]) {
        common++;
    }
    return common;
}

/* Makes a copy that has no dead bytes; so its cells do not overlap, and an image has room for all of them. */
static int page_normal_copy(const Page *page, uint8_t *memory, Page *copy) {
    memcpy(memory, page->at, PAGE_BYTES);
    *copy = *page;
    copy->at = memory;
    return page_compact(copy, NO_CELL);
}

static inline uint8_t *put_unshared(uint8_t *to, Slice text, size_t shared) {
    memcpy(to, text.data + shared, text.size - shared);
    return to + (text.size - shared);
}

/* Writes the image of a page without dead bytes, of at most MAX_IMAGE_BYTES; where it ends. */
static uint8_t *image_write(const Page *copy, uint8_t *to) {
    Slice key = {copy->at, 0}, value = {copy->at, 0};
    store_u32(to, page_id(copy));
    store_u32(to + 4, page_right(copy));
    to[8] = (uint8_t)page_level(copy);
    to += IMAGE_HEADER_BYTES;
    for (uint32_t index = 0; index < copy->count; index++) {
        Cell cell = {0};
        cell_look(copy, index, &cell); /* it lies inside: the cells were moved together */
        Slice own_key = {cell.key, cell.key_bytes}, own_value = {cell.value, cell.value_bytes};
        size_t shared_key = common_bytes(key, own_key), shared_value = common_bytes(value, own_value);
        to = put_varint(put_varint(to, shared_key), own_key.size - shared_key);
        to = put_varint(put_varint(to, shared_value), own_value.size - shared_value);
        to = put_unshared(put_unshared(to, own_key, shared_key), own_value, shared_value);
        key = own_key;
        value = own_value;
    }
    return to;
}

static int complain_of_image(PyObject *data_error, uint32_t id) {
    PyErr_Format(data_error, "page %lu: its image is damaged", (unsigned long)id);
    return -1;
}

/* A key or a value of an image: the beginning of the one before and what is its own. 0 when that cannot be. */
static int image_part(Slice *rest, Slice before, size_t shared, size_t own, uint8_t *memory, Slice *part) {
    if (shared > before.size || own > rest->size || shared + own > PAGE_BYTES) {
        return 0;
    }
    memmove(memory, before.data, shared);
    memcpy(memory + shared, rest->data, own);
    *part = (Slice){memory, shared + own};
    *rest = (Slice){rest->data + own, rest->size - own};
    return 1;
}

/* Fills an empty page with the cells of an image; 0 when they are damaged. */
static int image_cells(Page *page, Slice rest) {
    uint8_t keys[PAGE_BYTES], values[PAGE_BYTES];
    Slice key = {keys, 0}, value = {values, 0};
    while (rest.size > 0) {
        uint64_t lengths[4];
        for (int number = 0; number < 4; number++) {
            if (!take_varint(&rest, PAGE_BYTES, &lengths[number])) {
                return 0;
            }
        }
        if (!image_part(&rest, key, lengths[0], lengths[1], keys, &key) ||
            !image_part(&rest, value, lengths[2], lengths[3], values, &value) ||
            CELL_HEADER_BYTES + key.size + value.size + SLOT_BYTES > page_free(page)) {
            return 0;
        }
        if (page_put(page, page->count, key, value, page->count + 1, NO_CELL) < 0) {
            return -1;
        }
    }
    return 1;
}

/* Makes the page what the image says, if that is sound; what the page holds in memory only stays. */
static int page_put_image(Page *page, Slice image, uint32_t id) {
    uint8_t memory[PAGE_BYTES] = {0};
    char text[96];
    Page whole = {.at = memory, .data_error = page->data_error};
    if (image.size < IMAGE_HEADER_BYTES) {
        return complain_of_image(page->data_error, id);
    }
    page_format(memory, load_u32(image.data), image.data[8], load_u32(image.data + 4));
    page_look(&whole);
    int got = image_cells(&whole, (Slice){image.data + IMAGE_HEADER_BYTES, image.size - IMAGE_HEADER_BYTES});
    if (got <= 0 || page_fault(&whole, id, text, sizeof text)) {
        return got < 0 ? -1 : complain_of_image(page->data_error, id);
    }
    memcpy(memory + ACCESSES_AT, page->at + ACCESSES_AT, PAGE_HEADER_BYTES - ACCESSES_AT);
    memcpy(page->at, memory, PAGE_BYTES);
    page_look(page);
    return 0;
}

#endif
