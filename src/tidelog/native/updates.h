/* Page updates: parsing them, and doing them again where a page has not got them yet.

   Nothing of a record is done before all of its pages are in memory. */

#ifndef TIDELOG_UPDATES_H
#define TIDELOG_UPDATES_H

#include "tree_split.h"
#include "operation.h"
#include "version_cell.h"

#define FEW_UPDATES 8

typedef struct {
    Page page;
    uint32_t id;
    uint8_t what;
    int is_behind; /* the page has not got the record's changes */
    Slice key, value, old;
} Update;

typedef struct {
    Update *items; /* `few`, or allocated */
    size_t count, room;
    Update few[FEW_UPDATES];
} Updates;

static void updates_start(Updates *updates) {
    updates->items = updates->few;
    updates->count = 0;
    updates->room = FEW_UPDATES;
}

static void updates_release(Updates *updates) {
    if (updates->items != updates->few) {
        PyMem_RawFree(updates->items);
    }
}

static int updates_grow(Updates *updates) {
    size_t room = 4 * updates->room;
    Update *items = PyMem_RawMalloc(room * sizeof(Update));
    if (items == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    memcpy(items, updates->items, updates->count * sizeof(Update));
    updates_release(updates);
    updates->items = items;
    updates->room = room;
    return 0;
}

static int complain_of_record(NativeState *state, uint64_t lsn, const char *text) {
    PyErr_Format(state->data_error, "record %llu: %s", (unsigned long long)lsn, text);
    return -1;
}

/* One update at the beginning of `rest`, which moves on behind it. */
static int update_parse(NativeState *state, Slice *rest, uint64_t lsn, Update *update) {
    if (rest->size < UPDATE_HEADER_BYTES) {
        return complain_of_record(state, lsn, "a page update is cut short");
    }
    const uint8_t *at = rest->data;
    update->id = load_u32(at);
    update->what = at[4];
    if (update->what < UPDATE_INSERT || update->what > UPDATE_SPLIT || update->what == UPDATE_PUT) {
        PyErr_Format(state->data_error, "record %llu: a page update of an unknown kind %d", (unsigned long long)lsn,
                     (int)update->what);
        return -1;
    }
    update->key = (Slice){at + UPDATE_HEADER_BYTES, load_u16(at + 5)};
    update->value = (Slice){update->key.data + update->key.size, load_u16(at + 7)};
    update->old = (Slice){update->value.data + update->value.size, load_u16(at + 9)};
    size_t size = UPDATE_HEADER_BYTES + update->key.size + update->value.size + update->old.size;
    if (size > rest->size) {
        return complain_of_record(state, lsn, "a page update is cut short");
    }
    rest->data += size;
    rest->size -= size;
    return 0;
}

static int updates_parse(NativeState *state, Updates *updates, Slice rest, uint64_t lsn) {
    updates->count = 0;
    while (rest.size > 0) {
        if (updates->count == updates->room && updates_grow(updates) < 0) {
            return -1;
        }
        if (update_parse(state, &rest, lsn, &updates->items[updates->count]) < 0) {
            return -1;
        }
        updates->count++;
    }
    return 0;
}

/* The page that a split takes the cells from, before they are cut there: by a later update of the same record. */
static Page *split_source(Updates *updates, size_t index) {
    const Update *split = &updates->items[index];
    while (split->value.size == 4 && ++index < updates->count) {
        Update *cut = &updates->items[index];
        if (cut->what == UPDATE_TRUNCATE && cut->id == load_u32(split->value.data) && cut->is_behind) {
            return page_look(&cut->page) ? &cut->page : NULL;
        }
    }
    return NULL;
}

/* Makes the page what the right part of another is; what the page holds in memory only stays. */
static int update_split(Updates *updates, size_t index) {
    Update *update = &updates->items[index];
    Page *source = split_source(updates, index), fresh;
    uint8_t memory[PAGE_BYTES] = {0};
    uint32_t start;
    if (source == NULL) {
        PyErr_Format(update->page.data_error, "page %lu: the page that it was split from is not as it was then",
                     (unsigned long)update->id);
        return -1;
    }
    if (cell_search(source, 0, update->key, 0, &start) < 0 ||
        page_of_range(source, start, source->count, update->id, page_right(source), memory, &fresh) < 0) {
        return -1;
    }
    memcpy(memory + ACCESSES_AT, update->page.at + ACCESSES_AT, PAGE_HEADER_BYTES - ACCESSES_AT);
    memcpy(update->page.at, memory, PAGE_BYTES);
    return 0;
}

static int update_do(Updates *updates, size_t index) {
    Update *update = &updates->items[index];
    Page *page = &update->page;
    if (update->what == UPDATE_IMAGE) {
        return page_put_image(page, update->value, update->id);
    }
    if (update->what == UPDATE_SPLIT) {
        return update_split(updates, index);
    }
    if (!page_look(page)) { /* looked at for each: an update before may have changed the same page */
        return complain(page, "its header is damaged");
    }
    switch (update->what) {
    case UPDATE_INSERT:
        return page_insert(page, update->key, update->value);
    case UPDATE_REPLACE:
        return page_replace(page, update->key, update->value);
    case UPDATE_REMOVE:
        return page_remove(page, update->key);
    default:
        if (update->value.size != 4) {
            PyErr_Format(page->data_error, "page %lu: a right sibling is a number of 4 bytes",
                         (unsigned long)update->id);
            return -1;
        }
        return page_truncate(page, update->key, load_u32(update->value.data));
    }
}

static int note_dirtied(PyObject *dirtied, uint32_t id, uint64_t lsn) {
    PyObject *key = PyLong_FromUnsignedLong(id);
    int got = key == NULL ? -1 : PyDict_Contains(dirtied, key);
    if (got == 0) {
        PyObject *first = PyLong_FromUnsignedLongLong(lsn);
        got = first == NULL ? -1 : PyDict_SetItem(dirtied, key, first);
        Py_XDECREF(first);
    }
    Py_XDECREF(key);
    return got < 0 ? -1 : 0;
}

/* Looks up the pages of a record: 0 all there, 1 one is missing (its update in `missing`), -1 error. */
static int updates_look_up(NativeState *state, PyObject *pages, Updates *updates, uint64_t lsn, Update **missing) {
    for (size_t index = 0; index < updates->count; index++) {
        Update *update = &updates->items[index];
        PyObject *object;
        int got = pages_look_up(pages, update->id, &object);
        if (got != 0) {
            *missing = update;
            return got;
        }
        if (page_take(state, object, &update->page, 1) < 0) {
            return -1;
        }
        update->is_behind = page_lsn(&update->page) < lsn;
    }
    return 0;
}

/* Does a record's updates: 0 done, 1 a page is missing and nothing was done, -1 error. `dirtied` may be NULL. */
static int updates_redo(NativeState *state, PyObject *pages, Updates *updates, uint64_t lsn, PyObject *dirtied,
                        Update **missing) {
    int got = updates_look_up(state, pages, updates, lsn, missing);
    if (got != 0) {
        return got;
    }
    for (size_t index = 0; index < updates->count; index++) {
        if (updates->items[index].is_behind && update_do(updates, index) < 0) {
            return -1;
        }
    }
    for (size_t index = 0; index < updates->count; index++) {
        Update *update = &updates->items[index];
        if (update->is_behind) {
            store_u64(update->page.at + LSN_AT, lsn);
            if (dirtied != NULL && note_dirtied(dirtied, update->id, lsn) < 0) {
                return -1;
            }
        }
    }
    return 0;
}

static int expect_pages(PyObject *pages) {
    if (PyDict_Check(pages)) {
        return 0;
    }
    PyErr_SetString(PyExc_TypeError, "pages and their LSNs must be dicts");
    return -1;
}

static PyObject *pages_redo(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    uint64_t lsn;
    Py_buffer buffer;
    if (expect_arguments("redo", count, 3, 3) < 0 || expect_pages(arguments[0]) < 0 ||
        parse_u64(arguments[2], &lsn) < 0 || PyObject_GetBuffer(arguments[1], &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Updates updates;
    Update *missing = NULL;
    updates_start(&updates);
    int got = updates_parse(state, &updates, (Slice){buffer.buf, (size_t)buffer.len}, lsn);
    if (got == 0) {
        got = updates_redo(state, arguments[0], &updates, lsn, NULL, &missing);
    }
    PyObject *answer = got < 0 ? NULL : PyLong_FromLongLong(got == 1 ? (long long)missing->id : -1);
    updates_release(&updates);
    PyBuffer_Release(&buffer);
    return answer;
}

/* ---- whole frames ---- */

/* A put's update says where it goes, and its record says what: page u32, kind u8, position varint. */
#define PUT_HEADER_BYTES 5
#define PUT_KEY_BYTES 2048

typedef struct {
    uint8_t bytes[UPDATE_HEADER_BYTES + PUT_KEY_BYTES + MAX_POINTER_BYTES];
} WholeUpdate;

/* Writes the cell of a put and says where it ends; the position of its value is known from the update. */
static uint8_t *put_cell(uint8_t *at, const Operation *put, uint64_t lsn, uint64_t position) {
    VersionCell cell = {.order = put->order,
                        .size = put->size,
                        .crc = put->crc,
                        .codec = put->codec,
                        .lsn = lsn,
                        .position = position,
                        .stored_bytes = put->stored.size};
    return put_pointer(at, &cell);
}

/* The INSERT that the update of a put stands for. */
static int put_update(NativeState *state, const Operation *put, uint64_t lsn, WholeUpdate *whole, Slice *found) {
    Slice rest = {put->updates.data + PUT_HEADER_BYTES, put->updates.size - PUT_HEADER_BYTES};
    Slice bucket = put->names[0], name = put->names[1];
    uint64_t position;
    if (put->op != OP_PUT_OBJECT) {
        return complain_of_record(state, lsn, "the update of a put, and it is none");
    }
    if (!take_varint(&rest, UINT64_MAX, &position)) {
        return complain_of_record(state, lsn, "a page update is cut short");
    }
    if (rest.size != 0) {
        return complain_of_record(state, lsn, "the update of a put does not stand alone");
    }
    size_t key = bucket.size + name.size + 11;
    if (key > PUT_KEY_BYTES) {
        return complain_of_record(state, lsn, "its names are too long");
    }
    uint8_t *to = whole->bytes + UPDATE_HEADER_BYTES;
    *to++ = 'o';
    memcpy(to, bucket.data, bucket.size);
    to += bucket.size;
    *to++ = 0;
    memcpy(to, name.data, name.size);
    to += name.size;
    *to++ = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        *to++ = (uint8_t)(~put->seq >> shift);
    }
    uint8_t *end = put_cell(to, put, lsn, position);
    memcpy(whole->bytes, put->updates.data, 4);
    whole->bytes[4] = UPDATE_INSERT;
    store_u16(whole->bytes + 5, (uint16_t)key);
    store_u16(whole->bytes + 7, (uint16_t)(end - to));
    store_u16(whole->bytes + 9, 0);
    *found = (Slice){whole->bytes, (size_t)(end - whole->bytes)};
    return 0;
}

static int operation_updates(NativeState *state, Slice record, uint64_t lsn, WholeUpdate *whole, Slice *found) {
    Operation operation;
    if (operation_take(state->data_error, record, lsn, &operation) < 0) {
        return -1;
    }
    *found = operation.updates;
    if (found->size >= PUT_HEADER_BYTES && found->data[4] == UPDATE_PUT) {
        return put_update(state, &operation, lsn, whole, found);
    }
    return 0;
}

static int record_updates(NativeState *state, Slice payload, uint64_t lsn, WholeUpdate *whole, Slice *found) {
    if (is_operation(payload)) {
        return operation_updates(state, payload, lsn, whole, found);
    }
    if (expect_header(state->data_error, payload, lsn) < 0) {
        return -1;
    }
    uint32_t start = load_u32(payload.data + 4);
    if (start < RECORD_HEADER_BYTES || start > payload.size) {
        PyErr_Format(state->data_error, "a record of %zu bytes has its page updates at %lu, LSN %llu", payload.size,
                     (unsigned long)start, (unsigned long long)lsn);
        return -1;
    }
    *found = (Slice){payload.data + start, payload.size - start};
    return 0;
}

static PyObject *pages_record_updates(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    uint64_t lsn;
    Py_buffer buffer;
    WholeUpdate whole;
    Slice found;
    if (expect_arguments("record_updates", count, 2, 2) < 0 || parse_u64(arguments[1], &lsn) < 0 ||
        PyObject_GetBuffer(arguments[0], &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Slice record = {buffer.buf, (size_t)buffer.len};
    int got = record_updates(PyModule_GetState(module), record, lsn, &whole, &found);
    PyObject *answer = got < 0 ? NULL : bytes_of(found.data, found.size);
    PyBuffer_Release(&buffer);
    return answer;
}

/* Goes on until the end or a missing page: 0, 1, or -1 on error. */
static int redo_places(NativeState *state, PyObject *pages, const Places *places, uint64_t first_lsn, size_t *index,
                       PyObject *dirtied, Updates *updates, Update **missing) {
    for (; *index < places->count; *index += 1) {
        Slice payload, rest;
        WholeUpdate whole;
        uint64_t lsn = first_lsn + *index;
        if (place_of(places, *index, &payload) < 0 || record_updates(state, payload, lsn, &whole, &rest) < 0 ||
            updates_parse(state, updates, rest, lsn) < 0) {
            return -1;
        }
        int got = updates_redo(state, pages, updates, lsn, dirtied, missing);
        if (got != 0) {
            return got;
        }
    }
    return 0;
}

static PyObject *pages_redo_frames(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    Places places;
    uint64_t first_lsn;
    size_t index;
    if (expect_arguments("redo_frames", count, 7, 7) < 0 || expect_pages(arguments[0]) < 0 ||
        expect_pages(arguments[1]) < 0 || parse_u64(arguments[2], &first_lsn) < 0 ||
        parse_index(arguments[6], "start", &index) < 0 || places_take(&places, arguments + 3) < 0) {
        return NULL;
    }
    Updates updates;
    Update *missing = NULL;
    updates_start(&updates);
    int got = redo_places(state, arguments[0], &places, first_lsn, &index, arguments[1], &updates, &missing);
    PyObject *answer = NULL;
    if (got >= 0) {
        long long page = got == 1 ? (long long)missing->id : -1;
        PyObject *must_read = got == 1 && missing->what != UPDATE_IMAGE && missing->what != UPDATE_SPLIT ? Py_True : Py_False;
        answer = Py_BuildValue("(nLO)", (Py_ssize_t)index, page, must_read);
    }
    updates_release(&updates);
    places_release(&places);
    return answer;
}

static PyObject *update_objects(const Update *update) {
    return Py_BuildValue("(kiy#y#y#)", (unsigned long)update->id, (int)update->what, update->key.data,
                         (Py_ssize_t)update->key.size, update->value.data, (Py_ssize_t)update->value.size,
                         update->old.data, (Py_ssize_t)update->old.size);
}

static PyObject *pages_decode_updates(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    uint64_t lsn;
    Py_buffer buffer;
    if (expect_arguments("decode_updates", count, 2, 2) < 0 || parse_u64(arguments[1], &lsn) < 0 ||
        PyObject_GetBuffer(arguments[0], &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Slice rest = {buffer.buf, (size_t)buffer.len};
    PyObject *list = PyList_New(0);
    while (list != NULL && rest.size > 0) {
        Update update;
        PyObject *item = update_parse(state, &rest, lsn, &update) < 0 ? NULL : update_objects(&update);
        if (item == NULL || PyList_Append(list, item) < 0) {
            Py_CLEAR(list);
        }
        Py_XDECREF(item);
    }
    PyBuffer_Release(&buffer);
    return list;
}

/* ---- putting back ---- */

/* copies: a list of (page id, the page as it was or None), checked before anything changes. */
static int put_back_check(PyObject *copies) {
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(copies); index++) {
        PyObject *pair = PyList_GET_ITEM(copies, index);
        PyObject *copy = PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2 ? PyTuple_GET_ITEM(pair, 1) : NULL;
        int is_page = copy != NULL && ((PyBytes_Check(copy) && PyBytes_GET_SIZE(copy) == PAGE_BYTES) ||
                                       (PyByteArray_Check(copy) && PyByteArray_GET_SIZE(copy) == PAGE_BYTES));
        if (copy == NULL || !PyLong_Check(PyTuple_GET_ITEM(pair, 0)) || !(is_page || copy == Py_None)) {
            PyErr_SetString(PyExc_TypeError, "copies must be a list of (page id, page or None)");
            return -1;
        }
    }
    return 0;
}

static int put_back_one(NativeState *state, PyObject *pages, PyObject *number, PyObject *copy) {
    PyObject *object = PyDict_GetItemWithError(pages, number);
    Page page, before;
    if (object == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (copy == Py_None) {
        return PyDict_DelItem(pages, number);
    }
    if (page_take(state, object, &page, 1) < 0 || page_take(state, copy, &before, 0) < 0) {
        return -1;
    }
    memmove(page.at, before.at, PAGE_BYTES);
    return 0;
}

static PyObject *pages_put_back(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (expect_arguments("put_back", count, 2, 2) < 0 || expect_pages(arguments[0]) < 0) {
        return NULL;
    }
    if (!PyList_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "copies must be a list of (page id, page or None)");
        return NULL;
    }
    if (put_back_check(arguments[1]) < 0) {
        return NULL;
    }
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(arguments[1]); index++) {
        PyObject *pair = PyList_GET_ITEM(arguments[1], index);
        if (put_back_one(PyModule_GetState(module), arguments[0], PyTuple_GET_ITEM(pair, 0),
                         PyTuple_GET_ITEM(pair, 1)) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

#endif
