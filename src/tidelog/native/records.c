/* The record of a put in one step: what is there most of in the engine's log. tests/oracles/records.py
   gives the same answers.

   The formats are drawn where they are at home: the record in `wal/operations.py`, its value in `wal/value.py`, the cell and
   the key in `mvcc/cells.py`, the page update in `btree/page.py`. */

#include "arguments.h"
#include "frame.h"
#include "native.h"
#include "operation.h"
#include "version_cell.h"

#define PUT_UPDATE_BYTES 5
#define KEY_BYTES 11 /* of a key besides its names */
/* What comes before the names: seq, previous_lsn, order, size, stored bytes, and lengths. */
#define MAX_HEAD_BYTES (OPERATION_FIXED_BYTES + 10 + 10 + 5 + 10 + 5 + 3 + 3 + 1)
#define MAX_NAME_BYTES 4096
#define MAX_DATA_BYTES ((Py_ssize_t)1 << 30)

typedef struct {
    uint64_t seq, flags, previous_lsn, time_us, order, page, lsn, position;
    Slice bucket, name, data;
    uint64_t codec, size, crc; /* of a value that is given as it is stored; of plain data the crc is not known yet */
    size_t before_data;        /* bytes of the value in front of plain data */
    int is_inline;
} Put;

static int take_number(PyObject *object, uint64_t largest, uint64_t *number) {
    *number = PyLong_AsUnsignedLongLong(object);
    if (*number == (uint64_t)-1 && PyErr_Occurred()) {
        return -1;
    }
    if (*number > largest) {
        PyErr_Format(PyExc_OverflowError, "%llu does not fit", (unsigned long long)*number);
        return -1;
    }
    return 0;
}

static int take_text(PyObject *object, Slice *text) {
    Py_ssize_t size;
    const char *data = PyUnicode_AsUTF8AndSize(object, &size);
    if (data == NULL) {
        return -1;
    }
    *text = (Slice){(const uint8_t *)data, (size_t)size};
    if (size > MAX_NAME_BYTES) {
        PyErr_SetString(PyExc_OverflowError, "a name is too long");
        return -1;
    }
    return 0;
}

static int take_bytes(PyObject *object, Py_ssize_t most, Slice *bytes) {
    if (!PyBytes_Check(object)) {
        PyErr_Format(PyExc_TypeError, "bytes are needed, not %s", Py_TYPE(object)->tp_name);
        return -1;
    }
    *bytes = (Slice){(const uint8_t *)PyBytes_AS_STRING(object), (size_t)PyBytes_GET_SIZE(object)};
    if (PyBytes_GET_SIZE(object) > most) {
        PyErr_SetString(PyExc_OverflowError, "there are too many bytes");
        return -1;
    }
    return 0;
}

static uint8_t *put_slice(uint8_t *at, Slice slice) {
    memcpy(at, slice.data, slice.size);
    return at + slice.size;
}

/* ---- object_key ---- */

static uint8_t *store_key(uint8_t *at, Slice bucket, Slice name, uint64_t seq) {
    *at++ = 'o';
    at = put_slice(at, bucket);
    *at++ = 0;
    at = put_slice(at, name);
    *at++ = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        *at++ = (uint8_t)(~seq >> shift);
    }
    return at;
}

static PyObject *records_object_key(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Slice bucket, name;
    uint64_t seq;
    if (expect_arguments("object_key", count, 3, 3) < 0 || take_text(arguments[0], &bucket) < 0 ||
        take_text(arguments[1], &name) < 0 || take_number(arguments[2], UINT64_MAX, &seq) < 0) {
        return NULL;
    }
    PyObject *key = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(bucket.size + name.size + KEY_BYTES));
    if (key != NULL) {
        store_key((uint8_t *)PyBytes_AS_STRING(key), bucket, name, seq);
    }
    return key;
}

/* ---- put_record ---- */

static int take_put(PyObject *const *arguments, Put *put) {
    if (take_number(arguments[0], UINT64_MAX, &put->seq) < 0 || take_number(arguments[1], UINT8_MAX, &put->flags) < 0 ||
        take_number(arguments[2], UINT64_MAX, &put->previous_lsn) < 0 ||
        take_number(arguments[3], UINT64_MAX, &put->time_us) < 0 ||
        take_number(arguments[4], UINT32_MAX, &put->order) < 0 || take_text(arguments[5], &put->bucket) < 0 ||
        take_text(arguments[6], &put->name) < 0 || take_bytes(arguments[7], MAX_DATA_BYTES, &put->data) < 0 ||
        take_number(arguments[8], UINT32_MAX, &put->page) < 0 || take_number(arguments[9], UINT64_MAX, &put->lsn) < 0 ||
        take_number(arguments[10], UINT64_MAX - 2 * MAX_DATA_BYTES, &put->position) < 0) {
        return -1;
    }
    if (!(put->flags & RECORD_FLAG_PART_OF_BATCH) && (put->previous_lsn != 0 || put->order != 0)) {
        PyErr_SetString(PyExc_ValueError, "an operation that is no part of a batch has none before it");
        return -1;
    }
    return 0;
}

static inline size_t stored_bytes(const Put *put) {
    return put->before_data + put->data.size;
}

/* The head of the record, with room for the crc, which may not be known yet; where it ends. */
static uint8_t *store_head(uint8_t *at, const Put *put) {
    at[0] = RECORD_OPERATION;
    at[1] = (uint8_t)put->flags;
    store_u64(at + 2, put->time_us);
    at[14] = (uint8_t)(OP_PUT_OBJECT | put->codec << 4);
    at = put_varint(at + OPERATION_FIXED_BYTES, put->seq);
    if (put->flags & RECORD_FLAG_PART_OF_BATCH) {
        at = put_varint(put_varint(at, put->previous_lsn), put->order);
    }
    at = put_varint(put_varint(at, put->size), stored_bytes(put));
    at = put_varint(put_varint(at, put->bucket.size), put->name.size);
    return put->flags & RECORD_FLAG_REFUSED ? put_varint(at, 0) : at;
}

/* The names and the value, behind the head that is there; where they end. */
static uint8_t *store_value(uint8_t *record, size_t head_bytes, Put *put) {
    uint8_t *value = put_slice(put_slice(record + head_bytes, put->bucket), put->name);
    if (put->before_data > 0) {
        store_u32(value, 0); /* no metadata */
    }
    uint8_t *end = put_slice(value + put->before_data, put->data);
    if (put->before_data > 0) {
        put->crc = crc_of(value, stored_bytes(put));
    }
    store_u32(record + 10, (uint32_t)put->crc);
    return end;
}

/* Key and cell follow from the record: the update says where they go, and where the value is. */
static void store_put_update(uint8_t *at, const Put *put, uint64_t position) {
    store_u32(at, (uint32_t)put->page);
    at[4] = UPDATE_PUT;
    put_varint(at + PUT_UPDATE_BYTES, position);
}

static void store_insert(uint8_t *at, const Put *put, Slice cell) {
    store_u32(at, (uint32_t)put->page);
    at[4] = UPDATE_INSERT;
    store_u16(at + 5, (uint16_t)(put->bucket.size + put->name.size + KEY_BYTES));
    store_u16(at + 7, (uint16_t)cell.size);
    store_u16(at + 9, 0);
    put_slice(store_key(at + UPDATE_HEADER_BYTES, put->bucket, put->name, put->seq), cell);
}

/* A value that stays in the log, and a cell that points to it. */
static PyObject *record_and_pointer(Put *put) {
    uint8_t head[MAX_HEAD_BYTES], pointer[MAX_POINTER_BYTES];
    size_t head_bytes = (size_t)(store_head(head, put) - head), names = put->bucket.size + put->name.size;
    uint64_t position = put->position + FRAME_HEADER_BYTES + head_bytes + names;
    size_t size = head_bytes + names + stored_bytes(put) + PUT_UPDATE_BYTES + varint_bytes(position);
    PyObject *record = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    if (record == NULL) {
        return NULL;
    }
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(record);
    memcpy(at, head, head_bytes);
    /* Nobody else has seen it, and what it is made from is unchangeable and held by the caller. */
    PyThreadState *saved = release_gil_for(put->data.size);
    store_put_update(store_value(at, head_bytes, put), put, position);
    take_gil_back(saved);
    VersionCell cell = {.order = put->order,
                        .size = put->size,
                        .crc = (uint32_t)put->crc,
                        .codec = (uint8_t)put->codec,
                        .lsn = put->lsn,
                        .position = position,
                        .stored_bytes = stored_bytes(put)};
    Py_ssize_t pointer_bytes = put_pointer(pointer, &cell) - pointer;
    return Py_BuildValue("Ny#", record, (const char *)pointer, pointer_bytes);
}

/* A value that is in the cell as well. */
static PyObject *record_and_inline(Put *put) {
    uint8_t head[MAX_HEAD_BYTES], cell_head[MAX_INLINE_HEAD_BYTES];
    size_t head_bytes = (size_t)(store_head(head, put) - head), names = put->bucket.size + put->name.size;
    VersionCell cell = {
        .order = put->order, .size = put->size, .crc = (uint32_t)put->crc, .codec = (uint8_t)put->codec};
    Slice before = {cell_head, (size_t)(put_inline_head(cell_head, &cell) - cell_head)};
    size_t cell_bytes = before.size + put->data.size;
    if (cell_bytes > UINT16_MAX) {
        PyErr_SetString(PyExc_OverflowError, "the value is too large for a page");
        return NULL;
    }
    PyObject *value = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)cell_bytes);
    PyObject *record = PyBytes_FromStringAndSize(
        NULL, (Py_ssize_t)(head_bytes + names + put->data.size + UPDATE_HEADER_BYTES + names + KEY_BYTES + cell_bytes));
    if (value == NULL || record == NULL) {
        Py_XDECREF(value);
        Py_XDECREF(record);
        return NULL;
    }
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(record), *cell_at = (uint8_t *)PyBytes_AS_STRING(value);
    put_slice(put_slice(cell_at, before), put->data);
    memcpy(at, head, head_bytes);
    store_insert(store_value(at, head_bytes, put), put, (Slice){cell_at, cell_bytes});
    return Py_BuildValue("NN", record, value);
}

static PyObject *records_put_record(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Put put = {.before_data = METADATA_LENGTH_BYTES};
    if (expect_arguments("put_record", count, 11, 11) < 0 || take_put(arguments, &put) < 0) {
        return NULL;
    }
    put.size = put.data.size;
    return record_and_pointer(&put);
}

static PyObject *records_stored_record(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Put put = {0};
    if (expect_arguments("stored_record", count, 15, 15) < 0 || take_put(arguments, &put) < 0 ||
        take_number(arguments[11], MAX_CELL_CODEC, &put.codec) < 0 ||
        take_number(arguments[12], UINT64_MAX, &put.size) < 0 || take_number(arguments[13], UINT32_MAX, &put.crc) < 0) {
        return NULL;
    }
    put.is_inline = PyObject_IsTrue(arguments[14]);
    return put.is_inline < 0 ? NULL : put.is_inline ? record_and_inline(&put) : record_and_pointer(&put);
}

/* ---- plain_data ---- */

static PyObject *records_plain_data(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Slice stored;
    uint64_t size, crc;
    if (expect_arguments("plain_data", count, 3, 3) < 0 || take_bytes(arguments[0], PY_SSIZE_T_MAX, &stored) < 0 ||
        take_number(arguments[1], UINT64_MAX, &size) < 0 || take_number(arguments[2], UINT32_MAX, &crc) < 0) {
        return NULL;
    }
    if (stored.size < METADATA_LENGTH_BYTES || stored.size - METADATA_LENGTH_BYTES != size ||
        load_u32(stored.data) != 0 || crc_of(stored.data, stored.size) != crc) {
        Py_RETURN_NONE;
    }
    return PyBytes_FromStringAndSize((const char *)stored.data + METADATA_LENGTH_BYTES, (Py_ssize_t)size);
}

/* ---- cell_parts ---- */

static PyObject *records_cell_parts(PyObject *Py_UNUSED(module), PyObject *value) {
    Slice bytes;
    VersionCell cell;
    if (take_bytes(value, PY_SSIZE_T_MAX, &bytes) < 0) {
        return NULL;
    }
    if (!version_cell_parse(bytes, &cell)) {
        Py_RETURN_NONE;
    }
    int is_inline = cell.flags == CELL_INLINE;
    return Py_BuildValue("(BKKIBKKKy#)", cell.flags, (unsigned long long)cell.order, (unsigned long long)cell.size,
                         (unsigned int)cell.crc, cell.codec, (unsigned long long)cell.lsn,
                         (unsigned long long)cell.position,
                         (unsigned long long)(is_inline ? cell.inlined.size : cell.stored_bytes),
                         is_inline ? (const char *)cell.inlined.data : NULL, (Py_ssize_t)cell.inlined.size);
}

/* ---- operation_head ---- */

static PyObject *records_operation_head(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    /* flags, time_us, crc, op, codec, seq, previous_lsn, order, size, stored_bytes, and five lengths */
    static const uint64_t largest[10 + OPERATION_NAMES] = {
        UINT8_MAX,  UINT64_MAX, UINT32_MAX, 15,         15,         UINT64_MAX, UINT64_MAX, UINT32_MAX,
        UINT64_MAX, UINT32_MAX, UINT16_MAX, UINT16_MAX, UINT16_MAX, UINT16_MAX, UINT16_MAX};
    uint64_t given[10 + OPERATION_NAMES];
    uint8_t head[MAX_HEAD_BYTES + 3 * OPERATION_NAMES], *at = head;
    if (expect_arguments("operation_head", count, 10 + OPERATION_NAMES, 10 + OPERATION_NAMES) < 0) {
        return NULL;
    }
    for (int number = 0; number < 10 + OPERATION_NAMES; number++) {
        if (take_number(arguments[number], largest[number], &given[number]) < 0) {
            return NULL;
        }
    }
    int is_part = (given[0] & RECORD_FLAG_PART_OF_BATCH) != 0, is_refused = (given[0] & RECORD_FLAG_REFUSED) != 0;
    if ((!is_part && (given[6] != 0 || given[7] != 0)) || (!is_refused && given[14] != 0)) {
        PyErr_SetString(PyExc_ValueError, "an operation that is no part of a batch has none before it, and one that "
                                          "counts no reason");
        return NULL;
    }
    *at++ = RECORD_OPERATION;
    *at++ = (uint8_t)given[0];
    store_u64(at, given[1]);
    store_u32(at + 8, (uint32_t)given[2]);
    at[12] = (uint8_t)(given[3] | given[4] << 4);
    at = put_varint(at + 13, given[5]);
    for (int number = is_part ? 6 : 8; number < 10 + OPERATION_NAMES; number++) {
        int is_there = number < 12 || (number < 14 ? given[3] == OP_COPY_OBJECT : is_refused);
        at = is_there ? put_varint(at, given[number]) : at;
    }
    return PyBytes_FromStringAndSize((const char *)head, at - head);
}

/* ---- the module ---- */

PyMethodDef record_methods[] = {
    {"object_key", (PyCFunction)(void (*)(void))records_object_key, METH_FASTCALL,
     "object_key(bucket, name, seq): the key of a version in the tree."},
    {"put_record", (PyCFunction)(void (*)(void))records_put_record, METH_FASTCALL,
     "put_record(seq, flags, previous_lsn, time_us, order, bucket, name, data, page, lsn, position): the record of "
     "a put without metadata and its cell."},
    {"stored_record", (PyCFunction)(void (*)(void))records_stored_record, METH_FASTCALL,
     "stored_record(seq, flags, previous_lsn, time_us, order, bucket, name, stored, page, lsn, position, codec, size, crc, "
     "is_inline): the record of a put whose value is given as it is stored, and its cell."},
    {"cell_parts", (PyCFunction)records_cell_parts, METH_O,
     "cell_parts(value): what a cell says about a version of an object, in the order of `Cell`; None when it is none."},
    {"operation_head", (PyCFunction)(void (*)(void))records_operation_head, METH_FASTCALL,
     "operation_head(flags, time_us, crc, op, codec, seq, previous_lsn, order, size, stored_bytes, *lengths): all of an "
     "operation before its names."},
    {"plain_data", (PyCFunction)(void (*)(void))records_plain_data, METH_FASTCALL,
     "plain_data(stored, size, crc): the data of a value without metadata that is as it must be, else None."},
    {NULL, NULL, 0, NULL},
};
