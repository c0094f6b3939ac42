/* Records of a Kafka batch to frames. First every record is checked and measured, then frames are written; both without
   the GIL. The bytes may change meanwhile, so the second pass checks everything again against what the first allowed. */

#ifndef TIDELOG_RECORD_BATCHES_FRAMES_H
#define TIDELOG_RECORD_BATCHES_FRAMES_H

#include "record_batches.h"

/* What can be wrong with a record; `service/kafka/records.py` has the words. */
typedef enum {
    RECORD_SOUND,
    RECORD_CUT,
    RECORD_LENGTH,
    RECORD_OFFSET,
    RECORD_TIME,
    RECORD_HEADERS,
    RECORD_NAME,
    RECORD_LIMITS,
    RECORD_TOO_LARGE,
    RECORD_REST,
} RecordFault;

typedef struct {
    size_t count;
    uint64_t first_offset;
    int64_t base_timestamp_ms;
    int has_time;          /* `time_us` counts, not what the records say */
    int64_t time_us;
    int is_atomic;         /* each message says that it belongs to a batch */
    uint64_t max_payload;
    Slice producer;        /* the body of its entry, or nothing; its sequence is that of the first record */
    int32_t sequence;
} FramesPlan;

typedef struct {
    int64_t timestamp_us;
    int has_key, is_null;
    Slice key, value, headers;
    uint16_t header_count;
    size_t headers_bytes, nulls_bytes; /* in the envelope: the block, and the bitmap without its zeros at the end */
} Record;

static inline int record_time(const FramesPlan *plan, int64_t delta_ms, int64_t *time_us) {
    int64_t time_ms;
    if (plan->has_time) {
        *time_us = plan->time_us;
        return 1;
    }
    return !__builtin_add_overflow(plan->base_timestamp_ms, delta_ms, &time_ms) &&
           !__builtin_mul_overflow(time_ms, INT64_C(1000), time_us) && is_possible_time(*time_us);
}

static RecordFault measure_headers(Slice *rest, Record *record) {
    int64_t count;
    if (!take_i32(rest, &count) || count < 0) {
        return RECORD_HEADERS;
    }
    if (count > UINT16_MAX) {
        return RECORD_LIMITS;
    }
    record->header_count = (uint16_t)count;
    record->headers = *rest;
    for (int64_t index = 0; index < count; index++) {
        Slice name, value;
        int name_is_null, value_is_null;
        if (!take_bytes(rest, &name, &name_is_null) || name_is_null || !take_bytes(rest, &value, &value_is_null)) {
            return RECORD_HEADERS;
        }
        if (name.size > UINT16_MAX || (value_is_null && index >= MAX_NULL_HEADER)) {
            return RECORD_LIMITS;
        }
        if (!is_utf8(name)) {
            return RECORD_NAME;
        }
        record->headers_bytes += HEADER_BYTES + name.size + value.size;
        record->nulls_bytes = value_is_null ? (size_t)index / 8 + 1 : record->nulls_bytes;
    }
    return RECORD_SOUND;
}

/* Takes one record off the front of `rest`. */
static inline RecordFault take_record(const FramesPlan *plan, size_t index, Slice *rest, Record *record) {
    int64_t size, delta_ms, offset_delta;
    if (!take_i32(rest, &size) || size < 0 || (uint64_t)size > rest->size) {
        return RECORD_CUT;
    }
    Slice body = {rest->data, (size_t)size};
    rest->data += size;
    rest->size -= (size_t)size;
    if (body.size < 1) {
        return RECORD_LENGTH;
    }
    body.data++; /* attributes: none is defined, and Kafka does not look at them */
    body.size--;
    if (!take_zigzag(&body, 10, &delta_ms) || !take_i32(&body, &offset_delta)) {
        return RECORD_LENGTH;
    }
    if (offset_delta < 0 || (uint64_t)offset_delta != index) {
        return RECORD_OFFSET;
    }
    if (!record_time(plan, delta_ms, &record->timestamp_us)) {
        return RECORD_TIME;
    }
    int key_is_null;
    if (!take_bytes(&body, &record->key, &key_is_null) || !take_bytes(&body, &record->value, &record->is_null)) {
        return RECORD_LENGTH;
    }
    record->has_key = !key_is_null;
    record->headers_bytes = record->nulls_bytes = 0;
    RecordFault fault = measure_headers(&body, record);
    return fault != RECORD_SOUND ? fault : body.size > 0 ? RECORD_LENGTH : RECORD_SOUND;
}

static inline int has_nulls(const Record *record) {
    return record->is_null || record->nulls_bytes > 0;
}

static inline size_t extension_bytes(const FramesPlan *plan, const Record *record) {
    return (plan->is_atomic ? BATCH_ENTRY_BYTES : 0) +
           (has_nulls(record) ? NULLS_FIXED_BYTES + record->nulls_bytes : 0) +
           (plan->producer.size > 0 ? PRODUCER_ENTRY_BYTES : 0) + (plan->has_time ? APPEND_TIME_ENTRY_BYTES : 0);
}

static inline uint64_t payload_bytes(const FramesPlan *plan, const Record *record) {
    return (uint64_t)FIXED_BYTES + record->key.size + record->headers_bytes + extension_bytes(plan, record) +
           record->value.size;
}

/* Writes the block of headers and sets the bits of those that are null; 0 when they are no longer what was measured. */
static int write_headers(const Record *record, uint8_t *to, uint8_t *nulls) {
    Slice rest = record->headers;
    size_t left = record->headers_bytes;
    for (size_t index = 0; index < record->header_count; index++) {
        Slice name, value;
        int name_is_null, value_is_null;
        if (!take_bytes(&rest, &name, &name_is_null) || !take_bytes(&rest, &value, &value_is_null) ||
            name.size > UINT16_MAX || left < HEADER_BYTES + name.size + value.size) {
            return 0;
        }
        left -= HEADER_BYTES + name.size + value.size;
        store_u16(to, (uint16_t)name.size);
        store_u32(to + 2, (uint32_t)value.size);
        to = put_slice(put_slice(to + HEADER_BYTES, name), value);
        if (value_is_null && index / 8 < record->nulls_bytes) {
            nulls[index / 8] |= (uint8_t)(1u << index % 8);
        }
    }
    return left == 0;
}

static int write_payload(const FramesPlan *plan, const Record *record, size_t index, uint8_t *to) {
    to[0] = VERSION;
    to[1] = record->has_key ? HAS_KEY : 0;
    store_u16(to + 2, record->header_count);
    store_u32(to + 4, (uint32_t)record->key.size);
    store_u64(to + 8, (uint64_t)record->timestamp_us);
    store_u32(to + 16, (uint32_t)record->headers_bytes);
    store_u32(to + 20, (uint32_t)extension_bytes(plan, record));
    to = put_slice(to + FIXED_BYTES, record->key);
    uint8_t *headers = to;
    to += record->headers_bytes;
    if (plan->is_atomic) {
        to[0] = KIND_BATCH;
        to[1] = 8;
        store_u32(to + 2, (uint32_t)index);
        store_u32(to + 6, (uint32_t)plan->count);
        to += BATCH_ENTRY_BYTES;
    }
    uint8_t *nulls = to + NULLS_FIXED_BYTES;
    if (has_nulls(record)) {
        to[0] = KIND_NULLS;
        to[1] = (uint8_t)(1 + record->nulls_bytes);
        to[2] = record->is_null ? VALUE_IS_NULL : 0;
        memset(nulls, 0, record->nulls_bytes);
        to = nulls + record->nulls_bytes;
    }
    if (plan->producer.size > 0) {
        to[0] = KIND_PRODUCER;
        to[1] = PRODUCER_BODY_BYTES;
        memcpy(to + 2, plan->producer.data, PRODUCER_BODY_BYTES);
        store_u32(to + 12, (uint32_t)sequence_after(plan->sequence, index));
        to += PRODUCER_ENTRY_BYTES;
    }
    if (plan->has_time) {
        to[0] = KIND_APPEND_TIME;
        to[1] = 0;
        to += APPEND_TIME_ENTRY_BYTES;
    }
    put_slice(to, record->value);
    return record->header_count == 0 || write_headers(record, headers, nulls);
}

static RecordFault measure_records(const FramesPlan *plan, Slice rest, uint64_t *total, uint8_t *lengths, size_t *index) {
    *total = 0;
    for (*index = 0; *index < plan->count; (*index)++) {
        Record record;
        RecordFault fault = take_record(plan, *index, &rest, &record);
        if (fault != RECORD_SOUND) {
            return fault;
        }
        uint64_t size = payload_bytes(plan, &record);
        if (size > plan->max_payload || size > UINT32_MAX) {
            return RECORD_TOO_LARGE;
        }
        uint32_t length = (uint32_t)size;
        memcpy(lengths + 4 * *index, &length, 4);
        *total += FRAME_HEADER_BYTES + size;
    }
    return rest.size > 0 ? RECORD_REST : RECORD_SOUND;
}

/* The first frame is written at `*at` of `frames`, which is afterwards where the last one ends. */
static RecordFault write_frames(const FramesPlan *plan, Slice rest, const uint8_t *lengths, uint8_t *positions,
                                uint8_t *frames, uint64_t *at, size_t *index) {
    uint64_t position = *at;
    for (*index = 0; *index < plan->count; (*index)++) {
        Record record;
        RecordFault fault = take_record(plan, *index, &rest, &record);
        uint32_t length = native_u32(lengths, *index);
        if (fault != RECORD_SOUND || payload_bytes(plan, &record) != length) {
            return RECORD_CUT; /* somebody changes the bytes under our hands */
        }
        position += FRAME_HEADER_BYTES;
        if (!write_payload(plan, &record, *index, frames + position)) {
            return RECORD_CUT;
        }
        frame_store_header(frames + position, plan->first_offset + *index, length);
        memcpy(positions + 8 * *index, &position, 8);
        position += length;
    }
    *at = position;
    return RECORD_SOUND;
}

static int take_frames_plan(FramesPlan *plan, PyObject *const *arguments) {
    long long base_timestamp = PyLong_AsLongLong(arguments[3]);
    if (base_timestamp == -1 && PyErr_Occurred()) {
        return -1;
    }
    plan->base_timestamp_ms = base_timestamp;
    plan->has_time = arguments[4] != Py_None;
    plan->time_us = plan->has_time ? PyLong_AsLongLong(arguments[4]) : 0;
    if (plan->time_us == -1 && PyErr_Occurred()) {
        return -1;
    }
    plan->is_atomic = PyObject_IsTrue(arguments[5]);
    if (plan->is_atomic < 0 || parse_index(arguments[1], "count", &plan->count) < 0 ||
        parse_u64(arguments[2], &plan->first_offset) < 0 || parse_bytes(arguments[6], "producer", &plan->producer) < 0 ||
        parse_u64(arguments[7], &plan->max_payload) < 0) {
        return -1;
    }
    if (plan->producer.size != 0 && plan->producer.size != PRODUCER_BODY_BYTES) {
        PyErr_Format(PyExc_ValueError, "producer must have 0 or %d bytes", PRODUCER_BODY_BYTES);
        return -1;
    }
    if (plan->count > INT32_MAX || (plan->has_time && !is_possible_time(plan->time_us))) {
        PyErr_SetString(PyExc_ValueError, "count or time_us is impossible");
        return -1;
    }
    plan->sequence = plan->producer.size > 0 ? (int32_t)load_u32(plan->producer.data + 10) : 0;
    return 0;
}

static PyObject *build_frames(const FramesPlan *plan, Slice records) {
    uint64_t total;
    size_t index = 0;
    PyObject *frames = NULL, *result = NULL;
    if (plan->count > records.size) { /* a record has at least seven bytes: nothing is allocated for a lie */
        return Py_BuildValue("(in)", (int)RECORD_CUT, (Py_ssize_t)0);
    }
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * plan->count));
    PyObject *positions = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * plan->count));
    if (lengths == NULL || positions == NULL) {
        goto done;
    }
    uint8_t *lengths_at = (uint8_t *)PyBytes_AS_STRING(lengths), *positions_at = (uint8_t *)PyBytes_AS_STRING(positions);
    PyThreadState *saved = release_gil_for(records.size);
    RecordFault fault = measure_records(plan, records, &total, lengths_at, &index);
    take_gil_back(saved);
    if (fault == RECORD_SOUND) {
        /* A bytearray: the log gives the frames their offsets in place. */
        frames = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)total);
        if (frames == NULL) {
            goto done;
        }
        uint8_t *frames_at = (uint8_t *)PyByteArray_AS_STRING(frames);
        uint64_t at = 0;
        saved = release_gil_for(total);
        fault = write_frames(plan, records, lengths_at, positions_at, frames_at, &at, &index);
        take_gil_back(saved);
    }
    result = fault == RECORD_SOUND ? PyTuple_Pack(3, frames, positions, lengths)
                                   : Py_BuildValue("(in)", (int)fault, (Py_ssize_t)index);
done:
    Py_XDECREF(frames);
    Py_XDECREF(positions);
    Py_XDECREF(lengths);
    return result;
}

static PyObject *records_to_frames(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    FramesPlan plan;
    Py_buffer records;
    if (expect_arguments("records_to_frames", given, 8, 8) < 0 || take_frames_plan(&plan, arguments) < 0 ||
        PyObject_GetBuffer(arguments[0], &records, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *result = build_frames(&plan, (Slice){records.buf, (size_t)records.len});
    PyBuffer_Release(&records);
    return result;
}

#endif
