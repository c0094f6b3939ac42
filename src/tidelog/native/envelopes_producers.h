/* The newest message of each producer that frames name: what a compaction by key must not remove. `topics/message.py` draws
   extensions; one that is damaged names nobody, and who reads its message is told. */

#ifndef TIDELOG_ENVELOPES_PRODUCERS_H
#define TIDELOG_ENVELOPES_PRODUCERS_H

#include "crc32.h"
#include "envelopes_encode.h"

#define EXTENSION_KINDS 256
#define PRODUCER_NUMBERS_BYTES 16

/* A name, and the message that was the last to have it; a slot without a name is free. */
typedef struct {
    Slice name;
    size_t index;
} NewestOf;

typedef struct {
    NewestOf *slots;
    size_t mask, *order, names; /* the slots in the order in which their names were first met */
} NewestTable;

static int is_sound_entry(uint8_t kind, Slice body) {
    switch (kind) {
    case KIND_BATCH:
        return body.size == 8 && load_u32(body.data) < load_u32(body.data + 4);
    case KIND_PRODUCER:
        return body.size >= PRODUCER_NUMBERS_BYTES &&
               is_utf8((Slice){body.data + PRODUCER_NUMBERS_BYTES, body.size - PRODUCER_NUMBERS_BYTES});
    case DELIVER_AT:
        return body.size == 8;
    default:
        return 1;
    }
}

/* Whether a sound extension names a producer. */
static int producer_name(Slice rest, Slice *name) {
    uint8_t seen[EXTENSION_KINDS / 8] = {0};
    int has_name = 0;
    while (rest.size > 0) {
        if (rest.size < 2 || rest.size - 2 < rest.data[1]) {
            return 0;
        }
        uint8_t kind = rest.data[0], bit = (uint8_t)(1u << kind % 8);
        Slice body = {rest.data + 2, rest.data[1]};
        if (seen[kind / 8] & bit || !is_sound_entry(kind, body)) {
            return 0;
        }
        seen[kind / 8] |= bit;
        if (kind == KIND_PRODUCER) {
            *name = (Slice){body.data + PRODUCER_NUMBERS_BYTES, body.size - PRODUCER_NUMBERS_BYTES};
            has_name = 1;
        }
        rest = (Slice){body.data + body.size, rest.size - 2 - body.size};
    }
    return has_name;
}

static void newest_put(NewestTable *table, Slice name, size_t index) {
    size_t at = crc_of(name.data, name.size) & table->mask;
    while (table->slots[at].name.data != NULL && (table->slots[at].name.size != name.size ||
                                                  memcmp(table->slots[at].name.data, name.data, name.size) != 0)) {
        at = (at + 1) & table->mask;
    }
    if (table->slots[at].name.data == NULL) {
        table->slots[at].name = name;
        table->order[table->names++] = at;
    }
    table->slots[at].index = index;
}

/* A table that stays half empty whatever the messages name; it is made when the first names somebody. */
static int newest_prepare(NewestTable *table, size_t messages) {
    size_t slots = 2;
    while (slots < 2 * messages) {
        slots *= 2;
    }
    table->mask = slots - 1;
    table->slots = PyMem_Calloc(slots, sizeof *table->slots);
    table->order = PyMem_Calloc(messages, sizeof *table->order);
    if (table->slots == NULL || table->order == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static int newest_fill(NewestTable *table, const Places *places, size_t start, size_t stop) {
    for (size_t index = start; index < stop; index++) {
        Slice payload, name;
        if (place_of(places, index, &payload) < 0) {
            return -1;
        }
        Slice extension = extension_slice(payload);
        if (extension.size == 0 || !producer_name(extension, &name)) {
            continue;
        }
        if (table->slots == NULL && newest_prepare(table, stop - start) < 0) {
            return -1;
        }
        newest_put(table, name, index);
    }
    return 0;
}

static PyObject *newest_list(const NewestTable *table, uint64_t first_offset) {
    PyObject *list = PyList_New((Py_ssize_t)table->names);
    for (size_t number = 0; list != NULL && number < table->names; number++) {
        const NewestOf *one = &table->slots[table->order[number]];
        PyObject *pair = Py_BuildValue("(y#K)", one->name.data, (Py_ssize_t)one->name.size,
                                       (unsigned long long)(first_offset + one->index));
        if (pair == NULL) {
            Py_CLEAR(list);
        } else {
            PyList_SET_ITEM(list, (Py_ssize_t)number, pair);
        }
    }
    return list;
}

/* newest_producers(first_offset, buffer, positions, lengths, start, stop): [(name, the offset of its newest message)]. */
static PyObject *envelopes_newest_producers(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Places places;
    NewestTable table = {0};
    uint64_t first_offset;
    size_t start, stop;
    if (expect_arguments("newest_producers", given, 6, 6) < 0 || parse_u64(arguments[0], &first_offset) < 0 ||
        parse_index(arguments[4], "start", &start) < 0 || parse_index(arguments[5], "stop", &stop) < 0 ||
        places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    stop = stop < places.count ? stop : places.count;
    PyObject *list = newest_fill(&table, &places, start, stop) < 0 ? NULL : newest_list(&table, first_offset);
    PyMem_Free(table.slots);
    PyMem_Free(table.order);
    places_release(&places);
    return list;
}

#endif
