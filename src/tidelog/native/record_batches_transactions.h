/* Where transactions are among messages: which stretches belong to one, and where one ends. Readers ask this of every
   batch, so a message without an extension costs three comparisons, and nothing is raised: a damaged message belongs to
   no transaction, and who decodes it says so. */

#ifndef TIDELOG_RECORD_BATCHES_TRANSACTIONS_H
#define TIDELOG_RECORD_BATCHES_TRANSACTIONS_H

#include "record_batches.h"

#define MARK_MESSAGES 0
#define MARK_ABORT 1
#define MARK_COMMIT 2

typedef struct {
    uint64_t first, last;
    int64_t producer_id;
    int epoch, kind;
} TransactionMark;

/* The stretch that is being put together, and the list of those before it: NULL while there is none. */
typedef struct {
    PyObject *list;
    TransactionMark mark;
    int is_open;
} MarkList;

/* Whether the entries of an extension have a producer with a transaction. */
static int extension_mark(Slice rest, TransactionMark *mark) {
    while (rest.size >= 2 && rest.size - 2 >= rest.data[1]) {
        Slice body = {rest.data + 2, rest.data[1]};
        if (rest.data[0] == KIND_PRODUCER) {
            mark->producer_id = body.size == PRODUCER_BODY_BYTES ? (int64_t)load_u64(body.data) : -1;
            mark->epoch = mark->producer_id >= 0 ? (int16_t)load_u16(body.data + 8) : -1;
            mark->kind = MARK_MESSAGES;
            return mark->producer_id >= 0 && body.data[14] & IS_TRANSACTIONAL;
        }
        rest.data += 2 + body.size;
        rest.size -= 2 + body.size;
    }
    return 0;
}

/* Whether a payload is a message of a transaction, or the end of one. */
static inline int payload_mark(Slice payload, TransactionMark *mark) {
    const uint8_t *fixed = payload.data;
    if (payload.size < FIXED_BYTES) {
        return 0;
    }
    if (fixed[0] == VERSION && load_u32(fixed + 20) != 0) {
        uint64_t from = FIXED_BYTES + (uint64_t)load_u32(fixed + 4) + load_u32(fixed + 16);
        uint64_t size = load_u32(fixed + 20);
        return from + size <= payload.size && extension_mark((Slice){fixed + from, (size_t)size}, mark);
    }
    if (fixed[0] == CONTROL_VERSION && payload.size == CONTROL_PAYLOAD_BYTES && fixed[1] <= 1) {
        mark->producer_id = (int64_t)load_u64(fixed + 16);
        mark->epoch = (int16_t)load_u16(fixed + 2);
        mark->kind = fixed[1] == 1 ? MARK_COMMIT : MARK_ABORT;
        return 1;
    }
    return 0;
}

static int marks_close(MarkList *marks) {
    if (!marks->is_open) {
        return 0;
    }
    marks->is_open = 0;
    if (marks->list == NULL && (marks->list = PyList_New(0)) == NULL) {
        return -1;
    }
    const TransactionMark *mark = &marks->mark;
    PyObject *found = Py_BuildValue("(KKLii)", (unsigned long long)mark->first, (unsigned long long)mark->last,
                                    (long long)mark->producer_id, mark->epoch, mark->kind);
    int result = found == NULL ? -1 : PyList_Append(marks->list, found);
    Py_XDECREF(found);
    return result;
}

static inline int marks_add(MarkList *marks, Slice payload, uint64_t offset) {
    TransactionMark mark, *last = &marks->mark;
    if (!payload_mark(payload, &mark)) {
        return 0;
    }
    if (marks->is_open && mark.kind == MARK_MESSAGES && last->kind == MARK_MESSAGES && offset == last->last + 1 &&
        mark.producer_id == last->producer_id && mark.epoch == last->epoch) {
        last->last = offset;
        return 0;
    }
    if (marks_close(marks) < 0) {
        return -1;
    }
    mark.first = mark.last = offset;
    *last = mark;
    marks->is_open = 1;
    return 0;
}

static PyObject *marks_finish(MarkList *marks, int is_sound) {
    if (!is_sound || marks_close(marks) < 0) {
        Py_CLEAR(marks->list);
        return NULL;
    }
    if (marks->list == NULL) {
        Py_RETURN_NONE;
    }
    return marks->list;
}

static PyObject *transaction_marks(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Places places;
    uint64_t first_offset;
    size_t start, stop;
    if (expect_arguments("transaction_marks", given, 6, 6) < 0 || parse_u64(arguments[0], &first_offset) < 0 ||
        parse_index(arguments[4], "start", &start) < 0 || parse_index(arguments[5], "stop", &stop) < 0 ||
        places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    stop = stop < places.count ? stop : places.count;
    MarkList marks = {.list = NULL, .is_open = 0};
    int is_sound = 1;
    for (size_t index = start; is_sound && index < stop; index++) {
        Slice payload;
        is_sound = place_of(&places, index, &payload) == 0 && marks_add(&marks, payload, first_offset + index) == 0;
    }
    PyObject *found = marks_finish(&marks, is_sound);
    places_release(&places);
    return found;
}

static PyObject *payload_transaction_marks(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    uint64_t first_offset;
    if (expect_arguments("payload_transaction_marks", given, 2, 2) < 0 ||
        parse_u64(arguments[0], &first_offset) < 0) {
        return NULL;
    }
    PyObject *payloads = PySequence_Fast(arguments[1], "payloads must be a sequence");
    if (payloads == NULL) {
        return NULL;
    }
    MarkList marks = {.list = NULL, .is_open = 0};
    int is_sound = 1;
    for (Py_ssize_t index = 0; is_sound && index < PySequence_Fast_GET_SIZE(payloads); index++) {
        Slice payload;
        is_sound = parse_bytes(PySequence_Fast_GET_ITEM(payloads, index), "a payload", &payload) == 0 &&
                   marks_add(&marks, payload, first_offset + (uint64_t)index) == 0;
    }
    PyObject *found = marks_finish(&marks, is_sound);
    Py_DECREF(payloads);
    return found;
}

#endif
