/* Which producers' batches are among frames: from this their state is rebuilt after a crash. */

#ifndef TIDELOG_RECORD_BATCHES_PRODUCERS_H
#define TIDELOG_RECORD_BATCHES_PRODUCERS_H

#include "record_batches_encode.h"

typedef struct {
    uint64_t first, last;
    RecordProducer producer;
    uint32_t left; /* messages of the batch that are still to come */
    int64_t time_us;
    int is_open;
} ProducerRun;

static int list_run(PyObject *list, uint64_t first, uint64_t last, const RecordProducer *producer, int is_control,
                    int is_commit, int64_t time_us) {
    PyObject *run = Py_BuildValue("(KKLiiiiiL)", (unsigned long long)first, (unsigned long long)last,
                                  (long long)producer->id, (int)producer->epoch, (int)producer->sequence,
                                  producer->is_transactional, is_control, is_commit, (long long)time_us);
    if (run == NULL) {
        return -1;
    }
    int result = PyList_Append(list, run);
    Py_DECREF(run);
    return result;
}

static int run_close(PyObject *list, ProducerRun *run) {
    if (!run->is_open) {
        return 0;
    }
    run->is_open = 0;
    return list_run(list, run->first, run->last, &run->producer, 0, 0, run->time_us);
}

/* How many messages of its batch come after this one, by the mark of the batch; 0 when it is alone. */
static uint32_t messages_after(const RecordSource *source) {
    const uint8_t *extension = source->parts.block.data + source->parts.block.size;
    size_t size = (size_t)(source->parts.value.data - extension);
    if (size < BATCH_ENTRY_BYTES || extension[0] != KIND_BATCH || extension[1] != 8) {
        return 0;
    }
    uint32_t number = load_u32(extension + 2), total = load_u32(extension + 6);
    return number < total ? total - number - 1 : 0;
}

static int run_add(PyObject *list, ProducerRun *run, const RecordSource *source, uint64_t offset) {
    const RecordProducer *one = &run->producer, *other = &source->producer;
    uint32_t left = messages_after(source);
    if (run->is_open && run->left > 0 && left < run->left && offset > run->last && one->id == other->id &&
        one->epoch == other->epoch && one->is_transactional == other->is_transactional &&
        other->sequence == sequence_after(one->sequence, offset - run->first)) {
        run->last = offset;
        run->left = left;
        run->time_us = source->parts.timestamp_us;
        return 0;
    }
    if (run_close(list, run) < 0) {
        return -1;
    }
    if (other->id >= 0) {
        *run = (ProducerRun){offset, offset, *other, left, source->parts.timestamp_us, 1};
    }
    return 0;
}

static int add_source(NativeState *state, PyObject *list, ProducerRun *run, Slice payload, uint64_t offset) {
    RecordSource source;
    Fault fault = SOUND;
    switch (take_source(payload, &source, &fault)) {
    case SOURCE_NONE:
        return 0; /* a compaction may have removed one from the middle of a batch */
    case SOURCE_CONTROL: {
        RecordProducer producer = {(int64_t)load_u64(payload.data + 16), (int16_t)load_u16(payload.data + 2),
                                   (int32_t)load_u32(payload.data + 4), 1};
        if (run_close(list, run) < 0) {
            return -1;
        }
        return list_run(list, offset, offset, &producer, 1, payload.data[1] == 1, (int64_t)load_u64(payload.data + 8));
    }
    case SOURCE_BAD:
        PyErr_Format(state->data_error, "message %llu %s", (unsigned long long)offset, fault_text(fault));
        return -1;
    default:
        return run_add(list, run, &source, offset);
    }
}

static PyObject *producer_batches(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    NativeState *state = PyModule_GetState(module);
    Places places;
    uint64_t first_offset;
    size_t start, stop;
    if (expect_arguments("producer_batches", given, 6, 6) < 0 || parse_u64(arguments[0], &first_offset) < 0 ||
        parse_index(arguments[4], "start", &start) < 0 || parse_index(arguments[5], "stop", &stop) < 0 ||
        places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    stop = stop < places.count ? stop : places.count;
    ProducerRun run = {.is_open = 0};
    PyObject *list = PyList_New(0);
    for (size_t index = start; list != NULL && index < stop; index++) {
        Slice payload;
        if (place_of(&places, index, &payload) < 0 || add_source(state, list, &run, payload, first_offset + index) < 0) {
            Py_CLEAR(list);
        }
    }
    if (list != NULL && run_close(list, &run) < 0) {
        Py_CLEAR(list);
    }
    places_release(&places);
    return list;
}

#endif
