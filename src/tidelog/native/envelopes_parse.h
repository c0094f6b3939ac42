/* What an envelope says, once every length in it has been checked. Nothing here touches Python: it runs without the GIL,
   and the one set of rules serves messages and columns alike. */

#ifndef TIDELOG_ENVELOPES_PARSE_H
#define TIDELOG_ENVELOPES_PARSE_H

#include "arguments.h"
#include "utf8.h"

/* The numbers of the envelope; `topics/message.py` draws it. */

#define FIXED_BYTES 24
#define HEADER_BYTES 6
#define VERSION 1
#define HAS_KEY 1
#define DELIVER_AT 3
#define KIND_NULLS 4
#define VALUE_IS_NULL 1
#define NULLS_FIXED_BYTES 3 /* kind, length, flags */
#define MAX_NULLS_BITMAP 254 /* the length of an entry is a byte, and one goes to the flags */
#define MAX_NULL_HEADER (8 * MAX_NULLS_BITMAP)

/* 0001-01-01T00:00:00 and 9999-12-31T23:59:59.999999: what a datetime can hold. */
#define LEAST_MICROSECONDS INT64_C(-62135596800000000)
#define MOST_MICROSECONDS INT64_C(253402300799999999)

/* What can be wrong with an envelope, in the order in which it is looked for. */
typedef enum {
    SOUND,
    TOO_SHORT,
    OTHER_VERSION,
    UNKNOWN_FLAGS,
    BAD_LENGTHS,
    BAD_TIMESTAMP,
    BAD_EXTENSION,
    BAD_DELIVERY,
    BAD_HEADERS,
    BAD_NAME,
} Fault;

/* Those that need no number to be told. */
static const char *fault_text(Fault fault) {
    switch (fault) {
    case BAD_TIMESTAMP:
        return "has an impossible timestamp";
    case BAD_EXTENSION:
        return "has an extension that does not fit";
    case BAD_DELIVERY:
        return "has an impossible time of delivery";
    case BAD_HEADERS:
        return "has headers that do not fit";
    case BAD_NAME:
        return "has a header name that is not UTF-8";
    default:
        return "has an envelope whose lengths do not fit";
    }
}

typedef struct {
    int has_key;
    uint16_t header_count;
    int64_t timestamp_us;
    int has_delivery;
    int64_t deliver_at_us;
    Slice key, block, value;
    Slice nulls; /* the body of the entry; empty when there is none */
} Parts;

static inline int value_is_null(const Parts *parts) {
    return parts->nulls.size > 0 && parts->nulls.data[0] & VALUE_IS_NULL;
}

static inline int header_is_null(const Parts *parts, size_t index) {
    return parts->nulls.size > 1 + index / 8 && parts->nulls.data[1 + index / 8] >> index % 8 & 1;
}

static inline int is_possible_time(int64_t time_us) {
    return time_us >= LEAST_MICROSECONDS && time_us <= MOST_MICROSECONDS;
}

static inline Fault next_header(Slice *block, Slice *name, Slice *value);

/* What is null has no bytes. Headers that do not fit are left to who reads them. */
static Fault check_nulls(const Parts *parts) {
    if (value_is_null(parts) && parts->value.size > 0) {
        return BAD_EXTENSION;
    }
    Slice block = parts->block, name, value;
    for (size_t index = 0; index < 8 * (parts->nulls.size - 1) && index < parts->header_count; index++) {
        if (next_header(&block, &name, &value) != SOUND) {
            return SOUND;
        }
        if (header_is_null(parts, index) && value.size > 0) {
            return BAD_EXTENSION;
        }
    }
    return SOUND;
}

/* Goes through the extension for nulls and the time of delivery; kinds that mean nothing here are stepped over. */
static Fault parse_extension(Slice rest, Parts *parts) {
    while (rest.size > 0) {
        if (rest.size < 2 || rest.size - 2 < rest.data[1]) {
            return BAD_EXTENSION;
        }
        if (rest.data[0] == DELIVER_AT) {
            if (rest.data[1] != 8 || parts->has_delivery) {
                return BAD_EXTENSION;
            }
            parts->has_delivery = 1;
            parts->deliver_at_us = (int64_t)load_u64(rest.data + 2);
        } else if (rest.data[0] == KIND_NULLS) {
            if (rest.data[1] < 1 || parts->nulls.size > 0) {
                return BAD_EXTENSION;
            }
            parts->nulls = (Slice){rest.data + 2, rest.data[1]};
        }
        rest.size -= 2 + (size_t)rest.data[1];
        rest.data += 2 + (size_t)rest.data[1];
    }
    if (parts->has_delivery && !is_possible_time(parts->deliver_at_us)) {
        return BAD_DELIVERY;
    }
    return parts->nulls.size == 0 ? SOUND : check_nulls(parts);
}

/* Everything but what is inside the block of headers, which is left to next_header(). */
static inline Fault parse_envelope(Slice payload, Parts *parts) {
    const uint8_t *fixed = payload.data;
    if (payload.size < FIXED_BYTES) {
        return TOO_SHORT;
    }
    if (fixed[0] != VERSION) {
        return OTHER_VERSION;
    }
    if (fixed[1] & ~HAS_KEY) {
        return UNKNOWN_FLAGS;
    }
    parts->has_key = fixed[1] & HAS_KEY;
    parts->header_count = load_u16(fixed + 2);
    parts->timestamp_us = (int64_t)load_u64(fixed + 8);
    uint64_t key_bytes = load_u32(fixed + 4), block_bytes = load_u32(fixed + 16);
    uint64_t extension_bytes = load_u32(fixed + 20);
    uint64_t value_start = FIXED_BYTES + key_bytes + block_bytes + extension_bytes;
    if (value_start > payload.size || (key_bytes != 0 && !parts->has_key)) {
        return BAD_LENGTHS;
    }
    if (!is_possible_time(parts->timestamp_us)) {
        return BAD_TIMESTAMP;
    }
    parts->key = (Slice){fixed + FIXED_BYTES, (size_t)key_bytes};
    parts->block = (Slice){parts->key.data + key_bytes, (size_t)block_bytes};
    parts->value = (Slice){fixed + value_start, payload.size - (size_t)value_start};
    parts->has_delivery = 0;
    parts->nulls = (Slice){NULL, 0};
    Slice extension = {parts->block.data + block_bytes, (size_t)extension_bytes};
    return extension_bytes == 0 ? SOUND : parse_extension(extension, parts);
}

/* Takes one header off the front of the block. */
static inline Fault next_header(Slice *block, Slice *name, Slice *value) {
    if (block->size < HEADER_BYTES) {
        return BAD_HEADERS;
    }
    uint64_t name_bytes = load_u16(block->data), value_bytes = load_u32(block->data + 2);
    if (name_bytes + value_bytes > block->size - HEADER_BYTES) {
        return BAD_HEADERS;
    }
    *name = (Slice){block->data + HEADER_BYTES, (size_t)name_bytes};
    *value = (Slice){name->data + name_bytes, (size_t)value_bytes};
    *block = (Slice){value->data + value_bytes, block->size - HEADER_BYTES - (size_t)(name_bytes + value_bytes)};
    return SOUND;
}

#endif
