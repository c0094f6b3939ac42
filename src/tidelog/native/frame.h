/* The header of a frame; `log/frame.py` draws it. */

#ifndef TIDELOG_FRAME_H
#define TIDELOG_FRAME_H

#include "crc32.h"

#define FRAME_HEADER_BYTES 16

/* Writes the header in front of a payload that is there. */
static inline void frame_store_header(uint8_t *payload, uint64_t offset, uint32_t length) {
    uint8_t *header = payload - FRAME_HEADER_BYTES;
    store_u64(header, offset);
    store_u32(header + 8, length);
    store_u32(header + 12, crc_of_frame(offset, payload, length));
}

#endif
