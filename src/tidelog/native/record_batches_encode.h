/* Frames to Kafka batches. A batch ends where the producer changes, where a control record stands, and before it gets
   larger than asked; one with the time of append, which all its records share, also where that changes. Offsets that a compaction removed or a repair lost have no record, but the batch covers them: a
   consumer goes on behind them.

   A first pass finds an upper bound of what is written; the second checks each record against what is left of it, so
   frames that change meanwhile give other content or an error, never a write outside. */

#ifndef TIDELOG_RECORD_BATCHES_ENCODE_H
#define TIDELOG_RECORD_BATCHES_ENCODE_H

#include "record_batches.h"

/* The varints of a record at their longest; the fixed part of an envelope is not written, and pays for most of it. */
#define RECORD_BOUND_BYTES 40
#define HEADER_BOUND_BYTES 10
#define CONTROL_BATCH_BYTES (BATCH_HEADER_BYTES + 32)

typedef struct {
    int64_t id;
    int16_t epoch;
    int32_t sequence;
    int is_transactional;
} RecordProducer;

typedef struct {
    Parts parts;
    RecordProducer producer;
    int has_append_time; /* the broker's time, not that of the client */
} RecordSource;

typedef enum { SOURCE_MESSAGE, SOURCE_NONE, SOURCE_CONTROL, SOURCE_BAD } SourceKind;

typedef struct {
    uint8_t *begin, *end; /* of everything */
    uint8_t *batch, *to;  /* the batch that is being written, or NULL, and where its next byte goes */
    uint64_t base_offset, last_offset;
    int64_t base_ms, max_ms;
    uint32_t count;
    RecordProducer producer;
    int has_append_time;
    uint32_t leader_epoch;
    uint64_t max_batch_bytes;
} BatchWriter;

static const RecordProducer no_producer = {-1, -1, -1, 0};

/* The entries of Kafka in an extension whose lengths parse_envelope() has checked; 0 when one is damaged. */
static int source_entries(RecordSource *source, Slice rest) {
    while (rest.size >= 2 && rest.size - 2 >= rest.data[1]) {
        Slice body = {rest.data + 2, rest.data[1]};
        if (rest.data[0] == KIND_PRODUCER) {
            if (body.size != PRODUCER_BODY_BYTES) {
                return 0;
            }
            source->producer.id = (int64_t)load_u64(body.data);
            source->producer.epoch = (int16_t)load_u16(body.data + 8);
            source->producer.sequence = (int32_t)load_u32(body.data + 10);
            source->producer.is_transactional = body.data[14] & IS_TRANSACTIONAL;
            if (source->producer.id < 0 || source->producer.epoch < 0 || source->producer.sequence < 0) {
                return 0;
            }
        } else if (rest.data[0] == KIND_APPEND_TIME) {
            if (body.size != 0) {
                return 0;
            }
            source->has_append_time = 1;
        }
        rest.data += 2 + body.size;
        rest.size -= 2 + body.size;
    }
    return 1;
}

static SourceKind take_source(Slice payload, RecordSource *source, Fault *fault) {
    if (payload.size == 1 && payload.data[0] <= 1) {
        return SOURCE_NONE; /* lost or removed */
    }
    if (payload.size == CONTROL_PAYLOAD_BYTES && payload.data[0] == CONTROL_VERSION) {
        *fault = payload.data[1] > 1 ? UNKNOWN_FLAGS
                 : is_possible_time((int64_t)load_u64(payload.data + 8)) ? SOUND : BAD_TIMESTAMP;
        return *fault == SOUND ? SOURCE_CONTROL : SOURCE_BAD;
    }
    *fault = parse_envelope(payload, &source->parts);
    if (*fault != SOUND) {
        return SOURCE_BAD;
    }
    source->producer = no_producer;
    source->has_append_time = 0;
    const uint8_t *extension = source->parts.block.data + source->parts.block.size;
    Slice rest = {extension, (size_t)(source->parts.value.data - extension)};
    if (rest.size > 0 && !source_entries(source, rest)) {
        *fault = BAD_EXTENSION;
        return SOURCE_BAD;
    }
    return SOURCE_MESSAGE;
}

static int64_t floor_ms(int64_t time_us) {
    return time_us / 1000 - (time_us % 1000 < 0);
}

static void batch_finish(BatchWriter *writer) {
    uint8_t *at = writer->batch;
    if (at == NULL) {
        return;
    }
    size_t size = (size_t)(writer->to - at);
    store_big64(at, writer->base_offset);
    store_big32(at + 8, (uint32_t)(size - 12));
    store_big32(at + 12, writer->leader_epoch);
    at[16] = 2;
    store_big16(at + BATCH_ATTRIBUTES_AT, (uint16_t)((writer->producer.is_transactional ? BATCH_IS_TRANSACTIONAL : 0) |
                                                     (writer->has_append_time ? BATCH_HAS_APPEND_TIME : 0)));
    store_big32(at + 23, (uint32_t)(writer->last_offset - writer->base_offset));
    store_big64(at + 27, (uint64_t)writer->base_ms);
    store_big64(at + 35, (uint64_t)writer->max_ms);
    store_big64(at + 43, (uint64_t)writer->producer.id);
    store_big16(at + 51, (uint16_t)writer->producer.epoch);
    store_big32(at + 53, (uint32_t)writer->producer.sequence);
    store_big32(at + 57, writer->count);
    store_big32(at + BATCH_CRC_AT, crc32c_of(at + BATCH_ATTRIBUTES_AT, size - BATCH_ATTRIBUTES_AT));
    writer->batch = NULL;
}

/* Begins a batch; 0 when there is no room for its header. */
static int batch_begin(BatchWriter *writer, uint64_t offset, int64_t time_ms, const RecordProducer *producer) {
    batch_finish(writer);
    if ((size_t)(writer->end - writer->to) < BATCH_HEADER_BYTES) {
        return 0;
    }
    writer->batch = writer->to;
    writer->to += BATCH_HEADER_BYTES;
    writer->base_offset = offset;
    writer->base_ms = writer->max_ms = time_ms;
    writer->count = 0;
    writer->producer = *producer;
    writer->has_append_time = 0;
    return 1;
}

/* A batch that only covers offsets without records so far becomes that of its first record. */
static void batch_adopt(BatchWriter *writer, const RecordSource *source, uint64_t offset, int64_t time_ms) {
    writer->base_ms = writer->max_ms = time_ms;
    writer->producer = source->producer;
    writer->has_append_time = source->has_append_time;
    if (source->producer.id >= 0) {
        uint64_t ahead = (offset - writer->base_offset) & INT32_MAX;
        writer->producer.sequence = sequence_after(source->producer.sequence, ((uint64_t)INT32_MAX + 1) - ahead);
    }
}

/* Whether a message belongs to the batch that is being written. */
static int batch_takes(const BatchWriter *writer, const RecordSource *source, uint64_t offset, int64_t time_ms,
                       uint64_t bound) {
    const RecordProducer *one = &writer->producer, *other = &source->producer;
    int64_t delta_ms;
    if (writer->batch == NULL || offset - writer->base_offset > INT32_MAX ||
        (writer->count > 0 && (uint64_t)(writer->to - writer->batch) + bound > writer->max_batch_bytes) ||
        __builtin_sub_overflow(time_ms, writer->base_ms, &delta_ms) ||
        writer->has_append_time != source->has_append_time || (writer->has_append_time && delta_ms != 0)) {
        return 0;
    }
    return one->id == other->id && one->epoch == other->epoch && one->is_transactional == other->is_transactional &&
           (one->id < 0 || other->sequence == sequence_after(one->sequence, offset - writer->base_offset));
}

/* The bytes of the headers in a record; 0 when the block is damaged. There is at least the count. */
static Fault headers_bytes_of(const RecordSource *source, size_t *size) {
    Slice block = source->parts.block, name, value;
    *size = zigzag_bytes(source->parts.header_count);
    for (size_t index = 0; index < source->parts.header_count; index++) {
        if (next_header(&block, &name, &value) != SOUND) {
            return BAD_HEADERS;
        }
        int is_null = header_is_null(&source->parts, index);
        if (is_null && value.size > 0) {
            return BAD_EXTENSION;
        }
        *size += zigzag_bytes((int64_t)name.size) + name.size + zigzag_bytes(is_null ? -1 : (int64_t)value.size) + value.size;
    }
    return block.size == 0 ? SOUND : BAD_HEADERS;
}

static uint8_t *put_headers(const RecordSource *source, uint8_t *to, size_t left) {
    Slice block = source->parts.block, name, value;
    uint8_t *end = to + left;
    to = put_zigzag(to, source->parts.header_count);
    for (size_t index = 0; index < source->parts.header_count; index++) {
        if (next_header(&block, &name, &value) != SOUND ||
            (size_t)(end - to) < name.size + value.size + 2 * 5) {
            return NULL;
        }
        to = put_slice(put_zigzag(to, (int64_t)name.size), name);
        to = put_slice(put_zigzag(to, header_is_null(&source->parts, index) ? -1 : (int64_t)value.size), value);
    }
    return to;
}

static Fault write_record(BatchWriter *writer, const RecordSource *source, uint64_t offset, int64_t time_ms) {
    const Parts *parts = &source->parts;
    int64_t delta_ms = time_ms - writer->base_ms, delta = (int64_t)(offset - writer->base_offset);
    int64_t key_size = parts->has_key ? (int64_t)parts->key.size : -1;
    int64_t value_size = value_is_null(parts) ? -1 : (int64_t)parts->value.size;
    size_t headers;
    Fault fault = headers_bytes_of(source, &headers);
    if (fault != SOUND) {
        return fault;
    }
    if (value_size < 0 && parts->value.size > 0) {
        return BAD_EXTENSION;
    }
    size_t size = 1 + zigzag_bytes(delta_ms) + zigzag_bytes(delta) + zigzag_bytes(key_size) + parts->key.size +
                  zigzag_bytes(value_size) + parts->value.size + headers;
    if (size > INT32_MAX || (size_t)(writer->end - writer->to) < size + 5) {
        return BAD_LENGTHS;
    }
    uint8_t *to = put_zigzag(writer->to, (int64_t)size);
    uint8_t *expected_end = to + size;
    *to++ = 0;
    to = put_zigzag(put_zigzag(to, delta_ms), delta);
    to = put_slice(put_zigzag(to, key_size), parts->key);
    to = put_slice(put_zigzag(to, value_size), parts->value);
    if (parts->header_count == 0) {
        *to++ = 0;
    } else {
        to = put_headers(source, to, (size_t)(writer->end - to));
    }
    if (to != expected_end) {
        return BAD_HEADERS; /* somebody changes the bytes under our hands */
    }
    writer->to = to;
    writer->count++;
    writer->last_offset = offset;
    writer->max_ms = time_ms > writer->max_ms ? time_ms : writer->max_ms;
    return SOUND;
}

/* A control record is a batch of its own. */
static Fault write_control(BatchWriter *writer, Slice payload, uint64_t offset) {
    RecordProducer producer = {(int64_t)load_u64(payload.data + 16), (int16_t)load_u16(payload.data + 2), -1, 1};
    int64_t time_ms = floor_ms((int64_t)load_u64(payload.data + 8));
    if (!batch_begin(writer, offset, time_ms, &producer) ||
        (size_t)(writer->end - writer->to) < CONTROL_BATCH_BYTES - BATCH_HEADER_BYTES) {
        return BAD_LENGTHS;
    }
    static const uint8_t head[] = {32, 0, 0, 0, 8}; /* length 16, attributes, both deltas, key of 4 bytes */
    uint8_t *to = put_slice(writer->to, (Slice){head, sizeof head});
    store_big16(to, 0);
    store_big16(to + 2, payload.data[1]);
    to[4] = 12; /* value of 6 bytes */
    store_big16(to + 5, 0);
    store_big32(to + 7, load_u32(payload.data + 4));
    to[11] = 0; /* no headers */
    uint8_t *batch = writer->batch;
    writer->to = to + 12;
    writer->count = 1;
    writer->last_offset = offset;
    batch_finish(writer);
    store_big16(batch + BATCH_ATTRIBUTES_AT, BATCH_IS_TRANSACTIONAL | BATCH_IS_CONTROL);
    size_t size = (size_t)(writer->to - batch);
    store_big32(batch + BATCH_CRC_AT, crc32c_of(batch + BATCH_ATTRIBUTES_AT, size - BATCH_ATTRIBUTES_AT));
    return SOUND;
}

/* An offset without a record: the batch that is being written covers it, or an empty one. */
static Fault write_nothing(BatchWriter *writer, uint64_t offset) {
    if (writer->batch == NULL || offset - writer->base_offset > INT32_MAX) {
        if (!batch_begin(writer, offset, -1, &no_producer)) {
            return BAD_LENGTHS;
        }
    }
    writer->last_offset = offset;
    return SOUND;
}

static inline uint64_t record_bound(Slice payload) {
    uint64_t headers = payload.size >= FIXED_BYTES ? load_u16(payload.data + 2) : 0;
    return payload.size + RECORD_BOUND_BYTES + headers * HEADER_BOUND_BYTES;
}

static Fault write_source(BatchWriter *writer, Slice payload, uint64_t offset) {
    RecordSource source;
    Fault fault = SOUND;
    switch (take_source(payload, &source, &fault)) {
    case SOURCE_NONE:
        return write_nothing(writer, offset);
    case SOURCE_CONTROL:
        return write_control(writer, payload, offset);
    case SOURCE_BAD:
        return fault;
    default:
        break;
    }
    int64_t time_ms = floor_ms(source.parts.timestamp_us);
    if (writer->batch != NULL && writer->count == 0) {
        batch_adopt(writer, &source, offset, time_ms);
    }
    if (!batch_takes(writer, &source, offset, time_ms, record_bound(payload))) {
        if (!batch_begin(writer, offset, time_ms, &source.producer)) {
            return BAD_LENGTHS;
        }
        writer->has_append_time = source.has_append_time;
    }
    return write_record(writer, &source, offset, time_ms);
}

/* Each message of a producer, each control record and each offset without a record may begin a batch, and end it too;
   without any of them only the sizes decide. */
static uint64_t batches_bound(const Places *places, size_t start, size_t stop, uint64_t max_batch_bytes) {
    uint64_t total = 0, begins = 2;
    for (size_t index = start; index < stop; index++) {
        Slice payload;
        if (!place_is_inside(places, index, &payload)) {
            return UINT64_MAX;
        }
        total += record_bound(payload);
        begins += payload.size < FIXED_BYTES || payload.data[0] != VERSION || load_u32(payload.data + 20) != 0 ? 2 : 0;
    }
    uint64_t by_size = 2 * (total / (max_batch_bytes > 0 ? max_batch_bytes : 1));
    uint64_t most = 2 * (uint64_t)(stop - start);
    return total + CONTROL_BATCH_BYTES * (begins + (by_size < most ? by_size : most));
}

static Fault write_batches(BatchWriter *writer, const Places *places, uint64_t first_offset, size_t start, size_t stop,
                           size_t *index) {
    for (*index = start; *index < stop; (*index)++) {
        Slice payload;
        Fault fault = place_is_inside(places, *index, &payload)
                          ? write_source(writer, payload, first_offset + *index) : BAD_LENGTHS;
        if (fault != SOUND) {
            return fault;
        }
    }
    batch_finish(writer);
    return SOUND;
}

static PyObject *build_batches(NativeState *state, BatchWriter *writer, const Places *places, uint64_t first_offset,
                               size_t start, size_t stop) {
    size_t index = start;
    uint64_t bound = batches_bound(places, start, stop, writer->max_batch_bytes);
    if (bound > (uint64_t)PY_SSIZE_T_MAX) {
        PyErr_SetString(PyExc_ValueError, "a payload is outside of the buffer");
        return NULL;
    }
    /* Written aside and copied once: a bytes object that shrinks has its memory mapped again every time, and each page of it
       costs more than the copy. */
    writer->begin = writer->to = PyMem_RawMalloc((size_t)bound);
    if (writer->begin == NULL) {
        return PyErr_NoMemory();
    }
    writer->end = writer->begin + bound;
    PyThreadState *saved = release_gil_for(bound);
    Fault fault = write_batches(writer, places, first_offset, start, stop, &index);
    take_gil_back(saved);
    PyObject *batches = NULL;
    if (fault == SOUND) {
        batches = PyBytes_FromStringAndSize((const char *)writer->begin, writer->to - writer->begin);
    } else {
        PyErr_Format(state->data_error, "message %llu %s", (unsigned long long)(first_offset + index), fault_text(fault));
    }
    PyMem_RawFree(writer->begin);
    return batches;
}

static PyObject *frames_to_batches(PyObject *module, PyObject *const *arguments, Py_ssize_t given) {
    Places places;
    BatchWriter writer = {.batch = NULL};
    uint64_t first_offset;
    size_t start, stop;
    if (expect_arguments("frames_to_batches", given, 8, 8) < 0 || parse_u64(arguments[0], &first_offset) < 0 ||
        parse_index(arguments[4], "start", &start) < 0 || parse_index(arguments[5], "stop", &stop) < 0 ||
        parse_u64(arguments[6], &writer.max_batch_bytes) < 0 ||
        parse_u32(arguments[7], "leader_epoch", &writer.leader_epoch) < 0 || places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    stop = stop < places.count ? stop : places.count;
    start = start < stop ? start : stop;
    PyObject *batches = build_batches(PyModule_GetState(module), &writer, &places, first_offset, start, stop);
    places_release(&places);
    return batches;
}

#endif
