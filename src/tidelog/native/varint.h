/* Numbers in as few bytes as they need; `wal/record_header.py` draws them. */

#ifndef TIDELOG_VARINT_H
#define TIDELOG_VARINT_H

#include "arguments.h"

#define MAX_VARINT_BYTES 10

static inline uint8_t *put_varint(uint8_t *at, uint64_t number) {
    while (number >= 128) {
        *at++ = (uint8_t)(number | 128);
        number >>= 7;
    }
    *at++ = (uint8_t)number;
    return at;
}

static inline size_t varint_bytes(uint64_t number) {
    size_t size = 1;
    while (number >= 128) {
        number >>= 7;
        size++;
    }
    return size;
}

/* Takes a number from the beginning of `rest`; 0 when it is cut short or larger than it may be. */
static inline int take_varint(Slice *rest, uint64_t largest, uint64_t *number) {
    uint64_t found = 0;
    for (size_t index = 0; index < rest->size && index < MAX_VARINT_BYTES; index++) {
        uint8_t byte = rest->data[index];
        if (index == MAX_VARINT_BYTES - 1 && byte > 1) {
            return 0; /* it has more than 64 bits */
        }
        found |= (uint64_t)(byte & 127) << (7 * index);
        if (byte < 128) {
            *number = found;
            *rest = (Slice){rest->data + index + 1, rest->size - index - 1};
            return found <= largest;
        }
    }
    return 0;
}

#endif
