/* Entries as any log carries them, straight from the records of an engine's log: `txn/read_set.py` draws them, and
   tests/oracles/entry_bytes.py gives the same answer by its encoder.

   Invariants
   - Only what is plain is encoded here: operations that were applied, names of ASCII, values as they are with the checksum
     of their record, metadata of short texts, small numbers and truth values. At the first entry with anything else this
     stops, and who decodes records one by one goes on: it also says what is wrong with one.
   - What comes out is what the encoder of entries would write, byte by byte. */

#ifndef TIDELOG_ENTRIES_ENCODE_H
#define TIDELOG_ENTRIES_ENCODE_H

#include "crc32.h"
#include "operation.h"
#include "version_rows.h"

#define ENTRY_VERSION 1
#define MAX_BUCKET_BYTES 255
#define MAX_KEY_BYTES 1024
#define MAX_DATA_BYTES (1000u << 20)

#define MSGPACK_FIXMAP 0x80
#define MSGPACK_FIXARRAY 0x90
#define MSGPACK_FIXSTR 0xa0
#define MSGPACK_NIL 0xc0
#define MSGPACK_FALSE 0xc2
#define MSGPACK_TRUE 0xc3
#define MSGPACK_BIN8 0xc4
#define MSGPACK_STR8 0xd9
#define MSGPACK_ARRAY16 0xdc

/* ---- what is plain ---- */

typedef struct {
    Operation operation;
    Slice metadata, data; /* metadata as it is packed; empty when there is none */
} PlainOperation;

static int is_plain_name(Slice name, size_t most) {
    return 0 < name.size && name.size <= most && is_ascii(name) && memchr(name.data, 0, name.size) == NULL;
}

/* A text of up to 255 bytes of ASCII, in as few bytes as it needs, from the beginning of `rest`. */
static int take_plain_text(Slice *rest, Slice *text) {
    size_t head = 1, size = 0;
    if (rest->size >= 1 && (rest->data[0] & 0xe0) == MSGPACK_FIXSTR) {
        size = rest->data[0] & 31;
    } else if (rest->size >= 2 && rest->data[0] == MSGPACK_STR8 && rest->data[1] > 31) {
        head = 2;
        size = rest->data[1];
    } else {
        return 0;
    }
    if (rest->size - head < size) {
        return 0;
    }
    *text = (Slice){rest->data + head, size};
    *rest = (Slice){rest->data + head + size, rest->size - head - size};
    return is_ascii(*text);
}

static int take_plain_value(Slice *rest) {
    Slice text;
    uint8_t first = rest->size > 0 ? rest->data[0] : MSGPACK_FIXSTR;
    if (first < MSGPACK_FIXMAP || first == MSGPACK_NIL || first == MSGPACK_FALSE || first == MSGPACK_TRUE) {
        *rest = (Slice){rest->data + 1, rest->size - 1};
        return 1;
    }
    return take_plain_text(rest, &text);
}

/* A small map as the encoder of values writes it: in strict order of its names. */
static int is_plain_metadata(Slice packed) {
    if (packed.size == 0) {
        return 1;
    }
    size_t count = packed.data[0] & 15;
    Slice name, before = {packed.data, 0}, rest = {packed.data + 1, packed.size - 1};
    if ((packed.data[0] & 0xf0) != MSGPACK_FIXMAP || count == 0) {
        return 0;
    }
    for (size_t at = 0; at < count; at++) {
        if (!take_plain_text(&rest, &name) || !take_plain_value(&rest)) {
            return 0;
        }
        size_t both = name.size < before.size ? name.size : before.size;
        int order = memcmp(name.data, before.data, both);
        if (at > 0 && (order < 0 || (order == 0 && name.size <= before.size))) {
            return 0;
        }
        before = name;
    }
    return rest.size == 0;
}

static int take_plain_put(PlainOperation *plain) {
    const Operation *put = &plain->operation;
    if (put->stored.size < METADATA_LENGTH_BYTES || put->size > MAX_DATA_BYTES ||
        crc_of(put->stored.data, put->stored.size) != put->crc) {
        return 0;
    }
    uint64_t metadata_bytes = load_u32(put->stored.data), rest = put->stored.size - METADATA_LENGTH_BYTES;
    if (metadata_bytes > rest || put->size != rest - metadata_bytes) {
        return 0;
    }
    plain->metadata = (Slice){put->stored.data + METADATA_LENGTH_BYTES, (size_t)metadata_bytes};
    plain->data = (Slice){plain->metadata.data + metadata_bytes, (size_t)put->size};
    return is_plain_metadata(plain->metadata);
}

static int has_plain_names(const Operation *operation) {
    const Slice *names = operation->names;
    int has_key = operation->op >= OP_PUT_OBJECT, is_copy = operation->op == OP_COPY_OBJECT;
    return is_plain_name(names[0], MAX_BUCKET_BYTES) &&
           (has_key ? is_plain_name(names[1], MAX_KEY_BYTES) : names[1].size == 0) &&
           (!is_copy || (is_plain_name(names[2], MAX_BUCKET_BYTES) && is_plain_name(names[3], MAX_KEY_BYTES)));
}

static int take_plain(Slice record, uint64_t lsn, PlainOperation *plain) {
    Operation *operation = &plain->operation;
    if (record.size < OPERATION_FIXED_BYTES || !is_operation(record) || !operation_parse(record, operation) ||
        (operation->flags & ~(RECORD_FLAG_LAST | RECORD_FLAG_PART_OF_BATCH)) != 0 || operation->previous_lsn >= lsn ||
        operation->seq == 0 || operation->op < 1 || operation->op > OP_COPY_OBJECT || operation->codec != 0 ||
        !has_plain_names(operation)) {
        return 0;
    }
    return operation->op == OP_PUT_OBJECT ? take_plain_put(plain) : operation->stored.size == 0;
}

/* ---- how it is written ---- */

/* Bytes that are written, or counted alone while there is no place for them. */
typedef struct {
    uint8_t *to;
    size_t size;
} Packing;

static void pack_bytes(Packing *packing, const void *data, size_t size) {
    if (packing->to != NULL) {
        memcpy(packing->to + packing->size, data, size);
    }
    packing->size += size;
}

static void pack_byte(Packing *packing, size_t byte) {
    uint8_t one = (uint8_t)byte;
    pack_bytes(packing, &one, 1);
}

/* A kind and a length in one, two or four bytes; the kinds of longer ones follow the first. */
static void pack_length(Packing *packing, uint8_t kind8, size_t size) {
    int bytes = size <= UINT8_MAX ? 1 : size <= UINT16_MAX ? 2 : 4;
    pack_byte(packing, kind8 + (size_t)(bytes / 2));
    for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
        pack_byte(packing, size >> shift);
    }
}

static void pack_text(Packing *packing, Slice text) {
    if (text.size <= 31) {
        pack_byte(packing, MSGPACK_FIXSTR | text.size);
    } else {
        pack_length(packing, MSGPACK_STR8, text.size);
    }
    pack_bytes(packing, text.data, text.size);
}

static void pack_field(Packing *packing, const char *name) {
    pack_text(packing, (Slice){(const uint8_t *)name, strlen(name)});
}

static void pack_texts(Packing *packing, const char *const *fields, const Slice *const *texts, int count) {
    for (int field = 0; field < count; field++) {
        pack_field(packing, fields[field]);
        pack_text(packing, *texts[field]);
    }
}

static void pack_type(Packing *packing, size_t fields, const char *type) {
    pack_byte(packing, MSGPACK_FIXMAP | fields);
    pack_field(packing, "type");
    pack_field(packing, type);
}

static void pack_operation(Packing *packing, const PlainOperation *plain) {
    static const char *const places[] = {"bucket", "key"};
    static const char *const copied[] = {"src_bucket", "src_key", "dest_bucket", "dest_key"};
    const Operation *operation = &plain->operation;
    const Slice *names = operation->names;
    const Slice *const here[] = {&names[0], &names[1]}, *const there[] = {&names[2], &names[3], &names[0], &names[1]};
    int has_metadata = plain->metadata.size != 0;
    switch (operation->op) {
    case 1:
        pack_type(packing, 2, "CreateBucket");
        pack_texts(packing, places, here, 1);
        break;
    case 2:
    case 3:
        pack_type(packing, 3, "DeleteBucket");
        pack_texts(packing, places, here, 1);
        pack_field(packing, "force");
        pack_byte(packing, operation->op == 3 ? MSGPACK_TRUE : MSGPACK_FALSE);
        break;
    case OP_PUT_OBJECT:
        pack_type(packing, 4 + (size_t)has_metadata, "PutObject");
        pack_texts(packing, places, here, 2);
        pack_field(packing, "data");
        pack_length(packing, MSGPACK_BIN8, plain->data.size);
        pack_bytes(packing, plain->data.data, plain->data.size);
        if (has_metadata) {
            pack_field(packing, "metadata");
            pack_bytes(packing, plain->metadata.data, plain->metadata.size);
        }
        break;
    case OP_COPY_OBJECT:
        pack_type(packing, 5, "CopyObject");
        pack_texts(packing, copied, there, 4);
        break;
    default:
        pack_type(packing, 3, "DeleteObject");
        pack_texts(packing, places, here, 2);
    }
}

static void pack_entry(Packing *packing, const PlainOperation *plains, size_t count) {
    pack_byte(packing, ENTRY_VERSION);
    if (!(plains[0].operation.flags & RECORD_FLAG_PART_OF_BATCH)) {
        pack_operation(packing, plains);
        return;
    }
    pack_type(packing, 2, "Batch");
    pack_field(packing, "entries");
    if (count <= 15) {
        pack_byte(packing, MSGPACK_FIXARRAY | count);
    } else {
        int bytes = count <= UINT16_MAX ? 2 : 4;
        pack_byte(packing, MSGPACK_ARRAY16 + (size_t)(bytes / 4));
        for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
            pack_byte(packing, count >> shift);
        }
    }
    for (size_t at = 0; at < count; at++) {
        pack_operation(packing, &plains[at]);
    }
}

/* ---- encode_plain_entries ---- */

typedef struct {
    uint64_t first_lsn;
    Places places;
    Py_buffer indexes;
    size_t start, room, max_bytes;
    PlainOperation *plains;
    size_t records, entries, bytes; /* of whole entries */
} PlainEntries;

/* The records of the next entry, behind those that are taken: how many, 0 when it is not plain or not all there. -1 with
   the error set when an index is none. */
static Py_ssize_t next_plain(PlainEntries *found) {
    for (size_t at = found->records; at < found->room; at++) {
        size_t index = native_u32(found->indexes.buf, found->start + at);
        PlainOperation *plain = &found->plains[at];
        Slice record;
        if (index >= found->places.count) {
            PyErr_SetString(PyExc_ValueError, "an index is behind the last record");
            return -1;
        }
        if (place_of(&found->places, index, &record) < 0) {
            return -1;
        }
        memset(plain, 0, sizeof *plain);
        if (!take_plain(record, found->first_lsn + index, plain)) {
            return 0;
        }
        int is_part = plain->operation.flags & RECORD_FLAG_PART_OF_BATCH;
        int was_part = found->plains[found->records].operation.flags & RECORD_FLAG_PART_OF_BATCH;
        if (is_part != was_part || (!is_part && at > found->records)) {
            return 0;
        }
        if (plain->operation.flags & RECORD_FLAG_LAST) {
            return (Py_ssize_t)(at + 1 - found->records);
        }
    }
    return 0;
}

/* Whether the first record is worth a closer look: it is plain, or there is an error to be told. */
static int begins_plain(const PlainEntries *found, PlainOperation *first) {
    Slice record;
    size_t index = found->room == 0 ? 0 : native_u32(found->indexes.buf, found->start);
    memset(first, 0, sizeof *first);
    return found->room == 0 || index >= found->places.count || !place_is_inside(&found->places, index, &record) ||
           take_plain(record, found->first_lsn + index, first);
}

static int find_plain(PlainEntries *found) {
    while (found->entries == 0 || found->bytes < found->max_bytes) {
        Py_ssize_t count = next_plain(found);
        if (count <= 0) {
            return (int)count;
        }
        Packing counted = {NULL, 0};
        pack_entry(&counted, &found->plains[found->records], (size_t)count);
        if (found->bytes + counted.size > INT32_MAX) {
            return 0; /* a column cannot hold it with those before */
        }
        found->bytes += counted.size;
        found->records += (size_t)count;
        found->entries++;
    }
    return 0;
}

static PyObject *packed_entries(const PlainEntries *found) {
    PyObject *columns = PyTuple_New(4);
    if (columns == NULL) {
        return NULL;
    }
    const size_t sizes[] = {8 * found->entries, 8 * found->entries, 4 * (found->entries + 1), found->bytes};
    uint8_t *at[4];
    for (int column = 0; column < 4; column++) {
        if ((at[column] = add_bytes(columns, column, sizes[column])) == NULL) {
            Py_DECREF(columns);
            return NULL;
        }
    }
    Packing packing = {at[3], 0};
    store_u32(at[2], 0);
    for (size_t entry = 0, record = 0; entry < found->entries; entry++) {
        size_t first = record;
        while (!(found->plains[record].operation.flags & RECORD_FLAG_LAST)) {
            record++;
        }
        const Operation *last = &found->plains[record++].operation;
        pack_entry(&packing, &found->plains[first], record - first);
        store_u64(at[0] + 8 * entry, last->seq);
        store_u64(at[1] + 8 * entry, last->time_us);
        store_u32(at[2] + 4 * (entry + 1), (uint32_t)packing.size);
    }
    return Py_BuildValue("(nnN)", (Py_ssize_t)found->entries, (Py_ssize_t)(found->start + found->records), columns);
}

/* encode_plain_entries(first_lsn, buffer, positions, lengths, indexes, start, max_records, max_bytes): (entries, where to go
   on, (seqs, times, value ends, values)). */
static PyObject *entries_encode_plain(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    PlainEntries found;
    memset(&found, 0, sizeof found);
    if (expect_arguments("encode_plain_entries", count, 8, 8) < 0 || parse_u64(arguments[0], &found.first_lsn) < 0 ||
        parse_index(arguments[5], "start", &found.start) < 0 ||
        parse_index(arguments[6], "max_records", &found.room) < 0 ||
        parse_index(arguments[7], "max_bytes", &found.max_bytes) < 0 || places_take(&found.places, arguments + 1) < 0) {
        return NULL;
    }
    if (PyObject_GetBuffer(arguments[4], &found.indexes, PyBUF_SIMPLE) < 0) {
        places_release(&found.places);
        return NULL;
    }
    size_t there = (size_t)found.indexes.len / 4, left = found.start < there ? there - found.start : 0;
    found.room = left < found.room ? left : found.room;
    PlainOperation first;
    if (!begins_plain(&found, &first)) {
        found.room = 0; /* room for many records costs more than a look at one */
    }
    found.plains = PyMem_Malloc((found.room + 1) * sizeof(PlainOperation));
    PyObject *result = NULL;
    if (found.plains == NULL) {
        PyErr_NoMemory();
    } else if (find_plain(&found) == 0) {
        result = packed_entries(&found);
    }
    PyMem_Free(found.plains);
    PyBuffer_Release(&found.indexes);
    places_release(&found.places);
    return result;
}

#endif
