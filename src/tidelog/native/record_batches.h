/* Kafka's record batch (magic 2), and what of it an envelope keeps in its extension; `service/kafka/records.py` and
   docs/formats.md draw them. */

#ifndef TIDELOG_RECORD_BATCHES_H
#define TIDELOG_RECORD_BATCHES_H

#include "crc32c.h"
#include "envelopes_parse.h"
#include "frame.h"

#define BATCH_HEADER_BYTES 61
#define BATCH_CRC_AT 17
#define BATCH_ATTRIBUTES_AT 21
#define BATCH_HAS_APPEND_TIME 0x08
#define BATCH_IS_TRANSACTIONAL 0x10
#define BATCH_IS_CONTROL 0x20

#define KIND_BATCH 1
#define KIND_PRODUCER 5
#define KIND_APPEND_TIME 6
#define BATCH_ENTRY_BYTES 10
#define PRODUCER_ENTRY_BYTES 17
#define APPEND_TIME_ENTRY_BYTES 2
#define PRODUCER_BODY_BYTES 15
#define IS_TRANSACTIONAL 1
#define CONTROL_PAYLOAD_BYTES 24
#define CONTROL_VERSION 2

/* Kafka's numbers are big-endian. */
static inline void store_big16(uint8_t *at, uint16_t number) {
    store_u16(at, __builtin_bswap16(number));
}

static inline void store_big32(uint8_t *at, uint32_t number) {
    store_u32(at, __builtin_bswap32(number));
}

static inline void store_big64(uint8_t *at, uint64_t number) {
    store_u64(at, __builtin_bswap64(number));
}

static inline uint64_t zigzag(int64_t number) {
    return ((uint64_t)number << 1) ^ (uint64_t)(number >> 63);
}

static inline size_t zigzag_bytes(int64_t number) {
    uint64_t bits = zigzag(number) | 1;
    return (size_t)(70 - __builtin_clzll(bits)) / 7; /* 64 - leading zeros are the bits, seven of them to a byte */
}

static inline uint8_t *put_zigzag(uint8_t *to, int64_t number) {
    uint64_t rest = zigzag(number);
    while (rest >= 128) {
        *to++ = (uint8_t)(rest | 128);
        rest >>= 7;
    }
    *to++ = (uint8_t)rest;
    return to;
}

/* Takes a number off the front of `rest`; 0 when it is cut short or has more than `max_bytes` bytes. */
static inline int take_zigzag(Slice *rest, size_t max_bytes, int64_t *number) {
    uint64_t found = 0;
    size_t most = rest->size < max_bytes ? rest->size : max_bytes;
    for (size_t index = 0; index < most; index++) {
        uint8_t byte = rest->data[index];
        found |= (uint64_t)(byte & 127) << (7 * index);
        if (byte < 128) {
            *number = (int64_t)(found >> 1) ^ -(int64_t)(found & 1);
            rest->data += index + 1;
            rest->size -= index + 1;
            return 1;
        }
    }
    return 0;
}

static inline int take_i32(Slice *rest, int64_t *number) {
    return take_zigzag(rest, 5, number) && *number >= INT32_MIN && *number <= INT32_MAX;
}

/* Takes a length and so many bytes; a length below zero is null. */
static inline int take_bytes(Slice *rest, Slice *bytes, int *is_null) {
    int64_t size;
    if (!take_i32(rest, &size)) {
        return 0;
    }
    *is_null = size < 0;
    uint64_t wanted = size < 0 ? 0 : (uint64_t)size;
    if (wanted > rest->size) {
        return 0;
    }
    *bytes = (Slice){rest->data, (size_t)wanted};
    rest->data += wanted;
    rest->size -= (size_t)wanted;
    return 1;
}

static inline uint8_t *put_slice(uint8_t *to, Slice slice) {
    if (slice.size > 0) {
        memcpy(to, slice.data, slice.size);
    }
    return to + slice.size;
}

/* The sequence of a record that comes `more` after another one: after the largest comes 0. */
static inline int32_t sequence_after(int32_t sequence, uint64_t more) {
    return (int32_t)(((uint64_t)(uint32_t)sequence + more) & INT32_MAX);
}

#endif
