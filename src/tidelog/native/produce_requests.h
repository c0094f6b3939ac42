/* Small Produce requests of many connections at once: which of them are plain, and the frames of their batches.

   Plain is what most producers send: one batch for one partition, uncompressed, of no transaction, with no tags. Whatever
   else a request is, right or wrong, is left to `codec.py` and `records.py`, which say what is wrong with it. */

#ifndef TIDELOG_PRODUCE_REQUESTS_H
#define TIDELOG_PRODUCE_REQUESTS_H

#include "record_batches_frames.h"
#include "varint.h"

#define PRODUCE_KEY 0
#define FIRST_PRODUCE 3
#define FIRST_FLEXIBLE_PRODUCE 9
#define LAST_PRODUCE 12

typedef struct {
    int16_t version, acks;
    int32_t correlation_id, timeout_ms, index;
    Slice name, batch;
} ProduceRequest;

typedef struct {
    FramesPlan plan;
    Slice records;
    uint8_t producer[PRODUCER_BODY_BYTES];
    int64_t producer_id, max_timestamp_ms;
    int16_t epoch;
} PlainBatch;

static inline uint16_t load_big16(const uint8_t *at) {
    return __builtin_bswap16(load_u16(at));
}

static inline uint32_t load_big32(const uint8_t *at) {
    return __builtin_bswap32(load_u32(at));
}

static inline uint64_t load_big64(const uint8_t *at) {
    return __builtin_bswap64(load_u64(at));
}

static inline int take_slice(Slice *rest, uint64_t size, Slice *taken) {
    if (size > rest->size) {
        return 0;
    }
    *taken = (Slice){rest->data, (size_t)size};
    *rest = (Slice){rest->data + size, rest->size - (size_t)size};
    return 1;
}

static inline int take_number(Slice *rest, size_t size, int64_t *number) {
    Slice taken;
    if (!take_slice(rest, size, &taken)) {
        return 0;
    }
    *number = size == 2 ? (int16_t)load_big16(taken.data) : (int32_t)load_big32(taken.data);
    return 1;
}

/* A length of strings, bytes and arrays: `wide` bytes of it, or a varint of one more; -1 for null. */
static inline int take_length(Slice *rest, int is_flexible, size_t wide, int64_t *length) {
    uint64_t more;
    if (!is_flexible) {
        return take_number(rest, wide, length);
    }
    if (!take_varint(rest, UINT32_MAX, &more)) {
        return 0;
    }
    *length = (int64_t)more - 1;
    return 1;
}

static inline int take_counted(Slice *rest, int is_flexible, size_t wide, Slice *taken) {
    int64_t length;
    return take_length(rest, is_flexible, wide, &length) && length >= 0 && take_slice(rest, (uint64_t)length, taken);
}

/* No tags, where there could be some. */
static inline int take_no_tags(Slice *rest, int is_flexible) {
    Slice tags;
    return !is_flexible || (take_slice(rest, 1, &tags) && tags.data[0] == 0);
}

/* Takes a plain request apart, which comes without its size; 0 when it is anything else. */
static int take_produce(Slice rest, ProduceRequest *request) {
    int64_t key, version, number, length;
    Slice client;
    if (!take_number(&rest, 2, &key) || key != PRODUCE_KEY || !take_number(&rest, 2, &version) ||
        version < FIRST_PRODUCE || version > LAST_PRODUCE || !take_number(&rest, 4, &number)) {
        return 0;
    }
    int is_flexible = version >= FIRST_FLEXIBLE_PRODUCE;
    request->version = (int16_t)version;
    request->correlation_id = (int32_t)number;
    if (!take_number(&rest, 2, &length) || (length >= 0 && (!take_slice(&rest, (uint64_t)length, &client) || !is_utf8(client))) ||
        !take_no_tags(&rest, is_flexible) || !take_length(&rest, is_flexible, 2, &length) || length != -1 ||
        !take_number(&rest, 2, &number)) {
        return 0;
    }
    request->acks = (int16_t)number;
    if (!take_number(&rest, 4, &number) || !take_length(&rest, is_flexible, 4, &length) || length != 1) {
        return 0;
    }
    request->timeout_ms = (int32_t)number;
    if (!take_counted(&rest, is_flexible, 2, &request->name) || !is_utf8(request->name) ||
        !take_length(&rest, is_flexible, 4, &length) || length != 1 || !take_number(&rest, 4, &number)) {
        return 0;
    }
    request->index = (int32_t)number;
    return take_counted(&rest, is_flexible, 4, &request->batch) && take_no_tags(&rest, is_flexible) &&
           take_no_tags(&rest, is_flexible) && take_no_tags(&rest, is_flexible) && rest.size == 0;
}

/* Whether a batch has a header of the plain kind. Its checksum is not looked at. */
static int take_plain_batch(Slice batch, uint64_t max_payload, PlainBatch *plain) {
    const uint8_t *at = batch.data;
    if (batch.size < BATCH_HEADER_BYTES || (uint64_t)load_big32(at + 8) + 12 != batch.size || at[16] != 2 ||
        load_big16(at + BATCH_ATTRIBUTES_AT) != 0) {
        return 0;
    }
    int32_t count = (int32_t)load_big32(at + 57), sequence = (int32_t)load_big32(at + 53);
    plain->producer_id = (int64_t)load_big64(at + 43);
    plain->epoch = (int16_t)load_big16(at + 51);
    plain->max_timestamp_ms = (int64_t)load_big64(at + 35);
    int has_producer = plain->producer_id >= 0;
    if (count < 1 || (int32_t)load_big32(at + 23) != count - 1 || (has_producer && (plain->epoch < 0 || sequence < 0))) {
        return 0;
    }
    plain->records = (Slice){at + BATCH_HEADER_BYTES, batch.size - BATCH_HEADER_BYTES};
    if ((size_t)count > plain->records.size) {
        return 0; /* a record has at least seven bytes: nothing is allocated for a lie */
    }
    store_u64(plain->producer, (uint64_t)plain->producer_id);
    store_u16(plain->producer + 8, (uint16_t)plain->epoch);
    store_u32(plain->producer + 10, (uint32_t)sequence);
    plain->producer[14] = 0;
    plain->plan = (FramesPlan){
        .count = (size_t)count,
        .base_timestamp_ms = (int64_t)load_big64(at + 27),
        .is_atomic = count > 1,
        .max_payload = max_payload,
        .producer = {plain->producer, has_producer ? PRODUCER_BODY_BYTES : 0},
        .sequence = sequence,
    };
    return 1;
}

/* Whether all records of a batch are sound and its checksum is right, and the size of the largest payload. */
static int is_sound_batch(Slice batch, const PlainBatch *plain, uint32_t *largest) {
    Slice rest = plain->records;
    *largest = 0;
    for (size_t index = 0; index < plain->plan.count; index++) {
        Record record;
        if (take_record(&plain->plan, index, &rest, &record) != RECORD_SOUND) {
            return 0;
        }
        uint64_t size = payload_bytes(&plain->plan, &record);
        if (size > plain->plan.max_payload || size > UINT32_MAX) {
            return 0;
        }
        *largest = size > *largest ? (uint32_t)size : *largest;
    }
    uint32_t crc = ~crc32c_update(~(uint32_t)0, batch.data + BATCH_ATTRIBUTES_AT, batch.size - BATCH_ATTRIBUTES_AT);
    return rest.size == 0 && crc == load_big32(batch.data + BATCH_CRC_AT);
}

/* Topic, partition, acks and timeout of a request; the same object for requests that have the same. */
static PyObject *key_of(const ProduceRequest *request, const ProduceRequest *before, PyObject *key_before) {
    if (key_before != NULL && request->index == before->index && request->acks == before->acks &&
        request->timeout_ms == before->timeout_ms && request->name.size == before->name.size &&
        memcmp(request->name.data, before->name.data, request->name.size) == 0) {
        return Py_NewRef(key_before);
    }
    return Py_BuildValue("(s#iii)", (const char *)request->name.data, (Py_ssize_t)request->name.size, (int)request->index,
                         (int)request->acks, (int)request->timeout_ms);
}

typedef struct {
    ProduceRequest request;
    PyObject *key;
} LastKey;

/* The plain requests at the beginning of what one connection sent, and where they end. */
static PyObject *plain_requests(Slice data, uint64_t max_payload, LastKey *last) {
    PyObject *found = PyList_New(0);
    size_t at = 0;
    while (found != NULL && data.size - at >= 4) {
        uint32_t size = load_big32(data.data + at), largest;
        ProduceRequest request;
        PlainBatch plain;
        if (size > data.size - at - 4 || !take_produce((Slice){data.data + at + 4, size}, &request) ||
            !take_plain_batch(request.batch, max_payload, &plain) || !is_sound_batch(request.batch, &plain, &largest)) {
            break;
        }
        PyObject *key = key_of(&request, &last->request, last->key);
        if (key == NULL) {
            Py_CLEAR(found);
            break;
        }
        Py_XSETREF(last->key, key);
        last->request = request;
        Py_ssize_t begin = request.batch.data - data.data;
        PyObject *made = Py_BuildValue("(OiinnnLiinIL)", key, (int)request.version, (int)request.correlation_id, (Py_ssize_t)at, begin,
                                       begin + (Py_ssize_t)request.batch.size, (long long)plain.producer_id,
                                       (int)plain.epoch, (int)plain.plan.sequence, (Py_ssize_t)plain.plan.count,
                                       (unsigned int)largest, (long long)plain.max_timestamp_ms);
        if (made == NULL || PyList_Append(found, made) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(made);
        at += 4 + (size_t)size;
    }
    return found == NULL ? NULL : Py_BuildValue("(Nn)", found, (Py_ssize_t)at);
}

static PyObject *produce_requests(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    uint64_t max_payload;
    if (expect_arguments("produce_requests", given, 2, 2) < 0 || parse_u64(arguments[1], &max_payload) < 0) {
        return NULL;
    }
    if (!PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "received must be a list of bytes");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(arguments[0]);
    PyObject *result = PyList_New(count);
    LastKey last = {.key = NULL};
    for (Py_ssize_t index = 0; result != NULL && index < count; index++) {
        Slice data;
        PyObject *found = NULL;
        if (parse_bytes(PyList_GET_ITEM(arguments[0], index), "received", &data) == 0) {
            found = plain_requests(data, max_payload, &last);
        }
        if (found == NULL) {
            Py_CLEAR(result);
            break;
        }
        PyList_SET_ITEM(result, index, found);
    }
    Py_XDECREF(last.key);
    return result;
}

/* Batches that go into a log one after the other. */
typedef struct {
    PlainBatch *all;
    size_t batches, count;
} PlainBatches;

static int take_joined(PlainBatches *taken, PyObject *items, uint64_t max_payload) {
    for (; taken->batches < (size_t)PyList_GET_SIZE(items); taken->batches++) {
        PyObject *item = PyList_GET_ITEM(items, (Py_ssize_t)taken->batches);
        Slice data;
        size_t start, stop;
        if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3) {
            PyErr_SetString(PyExc_TypeError, "a batch is a tuple of bytes, start and stop");
            return -1;
        }
        if (parse_bytes(PyTuple_GET_ITEM(item, 0), "batch", &data) < 0 ||
            parse_index(PyTuple_GET_ITEM(item, 1), "start", &start) < 0 ||
            parse_index(PyTuple_GET_ITEM(item, 2), "stop", &stop) < 0) {
            return -1;
        }
        PlainBatch *plain = &taken->all[taken->batches];
        if (start > stop || stop > data.size ||
            !take_plain_batch((Slice){data.data + start, stop - start}, max_payload, plain)) {
            PyErr_Format(PyExc_ValueError, "batch %zu is not plain", taken->batches);
            return -1;
        }
        plain->plan.first_offset = taken->count;
        taken->count += plain->plan.count;
    }
    return 0;
}

static RecordFault measure_joined(const PlainBatches *taken, uint8_t *lengths, uint64_t *total) {
    RecordFault fault = RECORD_SOUND;
    *total = 0;
    for (size_t at = 0, batch = 0; fault == RECORD_SOUND && batch < taken->batches; batch++) {
        uint64_t size;
        size_t index;
        const PlainBatch *plain = &taken->all[batch];
        fault = measure_records(&plain->plan, plain->records, &size, lengths + 4 * at, &index);
        at += plain->plan.count;
        *total += size;
    }
    return fault;
}

static RecordFault write_joined(const PlainBatches *taken, const uint8_t *lengths, uint8_t *positions, uint8_t *frames) {
    RecordFault fault = RECORD_SOUND;
    uint64_t position = 0;
    for (size_t at = 0, batch = 0; fault == RECORD_SOUND && batch < taken->batches; batch++) {
        size_t index;
        const PlainBatch *plain = &taken->all[batch];
        fault = write_frames(&plain->plan, plain->records, lengths + 4 * at, positions + 8 * at, frames, &position, &index);
        at += plain->plan.count;
    }
    return fault;
}

static PyObject *build_joined(const PlainBatches *taken) {
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * taken->count));
    PyObject *positions = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * taken->count));
    PyObject *frames = NULL, *result = NULL;
    uint64_t total;
    if (lengths == NULL || positions == NULL) {
        goto done;
    }
    uint8_t *lengths_at = (uint8_t *)PyBytes_AS_STRING(lengths), *positions_at = (uint8_t *)PyBytes_AS_STRING(positions);
    RecordFault fault = measure_joined(taken, lengths_at, &total);
    if (fault == RECORD_SOUND) {
        frames = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)total);
        if (frames == NULL) {
            goto done;
        }
        uint8_t *frames_at = (uint8_t *)PyByteArray_AS_STRING(frames);
        PyThreadState *saved = release_gil_for(total); /* the batches are bytes, which nobody changes */
        fault = write_joined(taken, lengths_at, positions_at, frames_at);
        take_gil_back(saved);
    }
    if (fault == RECORD_SOUND) {
        result = PyTuple_Pack(3, frames, positions, lengths);
    } else {
        PyErr_SetString(PyExc_ValueError, "a batch has a record that is not sound");
    }
done:
    Py_XDECREF(frames);
    Py_XDECREF(positions);
    Py_XDECREF(lengths);
    return result;
}

static PyObject *batches_to_frames(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    uint64_t max_payload;
    if (expect_arguments("batches_to_frames", given, 2, 2) < 0 || parse_u64(arguments[1], &max_payload) < 0) {
        return NULL;
    }
    if (!PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "batches must be a list");
        return NULL;
    }
    size_t room = (size_t)PyList_GET_SIZE(arguments[0]);
    PlainBatches taken = {PyMem_New(PlainBatch, room > 0 ? room : 1), 0, 0};
    PyObject *result = NULL;
    if (taken.all == NULL) {
        return PyErr_NoMemory();
    }
    if (take_joined(&taken, arguments[0], max_payload) == 0) {
        result = build_joined(&taken);
    }
    PyMem_Free(taken.all);
    return result;
}

#endif
