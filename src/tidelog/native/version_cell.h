/* What a cell says about a version of an object; `mvcc/cells.py` draws it. */

#ifndef TIDELOG_VERSION_CELL_H
#define TIDELOG_VERSION_CELL_H

#include "varint.h"

/* What the key of a version ends with. */
#define SEQ_BYTES 8
#define CELL_TOMBSTONE 1
#define CELL_INLINE 2
#define CELL_POINTER 4
/* flags, order, size, stored bytes, crc, LSN, position */
#define MAX_POINTER_BYTES (1 + 5 + 10 + 5 + 4 + 10 + 10)

#define MAX_INLINE_HEAD_BYTES (1 + 5 + 10 + 4)
#define MAX_CELL_CODEC 15

typedef struct {
    uint64_t order, size, lsn, position, stored_bytes;
    uint32_t crc;
    uint8_t flags, codec;
    Slice inlined; /* the stored value of a small one */
} VersionCell;

static inline int take_crc(Slice *rest, uint32_t *crc) {
    if (rest->size < 4) {
        return 0;
    }
    *crc = load_u32(rest->data);
    *rest = (Slice){rest->data + 4, rest->size - 4};
    return 1;
}

/* Whether these bytes are a version of an object, and then what they say. */
static inline int version_cell_parse(Slice value, VersionCell *cell) {
    *cell = (VersionCell){.inlined = {value.data, 0}};
    if (value.size == 0) {
        return 0;
    }
    Slice rest = {value.data + 1, value.size - 1};
    cell->flags = value.data[0] & 15;
    cell->codec = value.data[0] >> 4;
    if (!take_varint(&rest, UINT32_MAX, &cell->order)) {
        return 0;
    }
    switch (cell->flags) {
    case CELL_TOMBSTONE:
        return cell->codec == 0 && rest.size == 0;
    case CELL_INLINE:
        if (!take_varint(&rest, UINT64_MAX, &cell->size) || !take_crc(&rest, &cell->crc)) {
            return 0;
        }
        cell->inlined = rest;
        return 1;
    case CELL_POINTER:
        return take_varint(&rest, UINT64_MAX, &cell->size) && take_varint(&rest, UINT32_MAX, &cell->stored_bytes) &&
               take_crc(&rest, &cell->crc) && take_varint(&rest, UINT64_MAX, &cell->lsn) &&
               take_varint(&rest, UINT64_MAX, &cell->position) && rest.size == 0;
    default:
        return 0;
    }
}

/* Writes what a cell has in front of a small value; where that begins. */
static inline uint8_t *put_inline_head(uint8_t *at, const VersionCell *cell) {
    *at++ = (uint8_t)(CELL_INLINE | cell->codec << 4);
    at = put_varint(put_varint(at, cell->order), cell->size);
    store_u32(at, cell->crc);
    return at + 4;
}

/* Writes the cell of a value that is in the log, of at most MAX_POINTER_BYTES; where it ends. */
static inline uint8_t *put_pointer(uint8_t *at, const VersionCell *cell) {
    *at++ = (uint8_t)(CELL_POINTER | cell->codec << 4);
    at = put_varint(put_varint(put_varint(at, cell->order), cell->size), cell->stored_bytes);
    store_u32(at, cell->crc);
    return put_varint(put_varint(at + 4, cell->lsn), cell->position);
}

#endif
