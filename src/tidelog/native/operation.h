/* The record of an operation, taken apart; `wal/operations.py` draws it. */

#ifndef TIDELOG_OPERATION_H
#define TIDELOG_OPERATION_H

#include "varint.h"

#define RECORD_HEADER_BYTES 32
#define RECORD_OPERATION 1
#define RECORD_STRUCTURE 2
#define RECORD_ROLLBACK_END 7
#define RECORD_VACUUM 8
#define RECORD_FLAG_LAST 1
#define RECORD_FLAG_REFUSED 2
#define RECORD_FLAG_PART_OF_BATCH 4
#define OPERATION_FIXED_BYTES 15
#define OP_PUT_OBJECT 4
#define OP_COPY_OBJECT 6
#define OPERATION_NAMES 5
/* What a value begins with. */
#define METADATA_LENGTH_BYTES 4

/* Kinds of page updates; `btree/page.py` draws them. */
#define UPDATE_INSERT 1
#define UPDATE_REPLACE 2
#define UPDATE_REMOVE 3
#define UPDATE_IMAGE 4
#define UPDATE_TRUNCATE 5
#define UPDATE_PUT 6
#define UPDATE_SPLIT 7
#define UPDATE_HEADER_BYTES 11

typedef struct {
    uint64_t time_us, seq, previous_lsn, order, size;
    uint32_t crc;
    uint8_t flags, op, codec;
    Slice names[OPERATION_NAMES]; /* bucket, key, src_bucket, src_key, reason */
    Slice stored, updates;
} Operation;

/* The numbers behind the fixed ones; 0 when they are cut short. */
static inline int take_operation_numbers(Slice *rest, Operation *operation, uint64_t *stored, uint64_t *lengths) {
    int is_part = operation->flags & RECORD_FLAG_PART_OF_BATCH;
    if (!take_varint(rest, UINT64_MAX, &operation->seq) ||
        (is_part && !take_varint(rest, UINT64_MAX, &operation->previous_lsn)) ||
        (is_part && !take_varint(rest, UINT32_MAX, &operation->order)) ||
        !take_varint(rest, UINT64_MAX, &operation->size) || !take_varint(rest, UINT32_MAX, stored)) {
        return 0;
    }
    for (int name = 0; name < OPERATION_NAMES; name++) {
        int is_there = name < 2 || (name < 4 ? operation->op == OP_COPY_OBJECT
                                             : (operation->flags & RECORD_FLAG_REFUSED) != 0);
        if (is_there && !take_varint(rest, UINT16_MAX, &lengths[name])) {
            return 0;
        }
    }
    return 1;
}

/* Whether the lengths in a record add up, and then its parts. */
static inline int operation_parse(Slice record, Operation *operation) {
    uint64_t stored = 0, lengths[OPERATION_NAMES] = {0};
    memset(operation, 0, sizeof *operation);
    operation->flags = record.data[1];
    operation->time_us = load_u64(record.data + 2);
    operation->crc = load_u32(record.data + 10);
    operation->op = record.data[14] & 15;
    operation->codec = record.data[14] >> 4;
    Slice rest = {record.data + OPERATION_FIXED_BYTES, record.size - OPERATION_FIXED_BYTES};
    if (!take_operation_numbers(&rest, operation, &stored, lengths)) {
        return 0;
    }
    uint64_t total = stored;
    for (int name = 0; name < OPERATION_NAMES; name++) {
        total += lengths[name];
    }
    if (total > rest.size) {
        return 0;
    }
    for (int name = 0; name < OPERATION_NAMES; name++) {
        operation->names[name] = (Slice){rest.data, (size_t)lengths[name]};
        rest.data += lengths[name];
    }
    operation->stored = (Slice){rest.data, (size_t)stored};
    operation->updates = (Slice){rest.data + stored, rest.size - (size_t)total};
    return 1;
}

/* The operation in a record; -1 with the error set when it is none. */
static inline int operation_take(PyObject *data_error, Slice record, uint64_t lsn, Operation *operation) {
    if (record.size < OPERATION_FIXED_BYTES || record.data[0] != RECORD_OPERATION) {
        PyErr_Format(data_error, "a record of %zu bytes is no operation, LSN %llu", record.size,
                     (unsigned long long)lsn);
        return -1;
    }
    if (!operation_parse(record, operation)) {
        PyErr_Format(data_error, "the lengths in an operation do not add up, LSN %llu", (unsigned long long)lsn);
        return -1;
    }
    return 0;
}

/* Whether a record that is none of an operation has a header. */
static inline int expect_header(PyObject *data_error, Slice record, uint64_t lsn) {
    if (record.size >= RECORD_HEADER_BYTES) {
        return 0;
    }
    PyErr_Format(data_error, "a record of %zu bytes has no header, LSN %llu", record.size, (unsigned long long)lsn);
    return -1;
}

static inline int is_ascii(Slice text) {
    uint8_t bits = 0;
    for (size_t at = 0; at < text.size; at++) {
        bits |= text.data[at];
    }
    return bits < 128;
}

static inline int is_operation(Slice record) {
    return record.size > 0 && record.data[0] == RECORD_OPERATION;
}

#endif
