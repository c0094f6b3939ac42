/* The record of a put in one step: what is there most of in the engine's log. `record_python` gives the same answers.

   The formats are drawn where they are at home: the record in `operation_record.py`, its body in `body.py`, the cell in
   `cell.py`, the page update in `updates.py`, the key in `version_keys.py`. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../log/_arguments.h"
#include "../log/_crc32.h"
#include "../log/_gil.h"

#define FRAME_HEADER_BYTES 16
#define OPERATION_BYTES 72
#define METADATA_LENGTH_BYTES 4
#define UPDATE_PUT_BYTES 13
#define POINTER_BYTES 38
#define MAX_NAME_BYTES 4096
#define MAX_DATA_BYTES ((Py_ssize_t)1 << 30)

#define KIND_OPERATION 1
#define OP_PUT_OBJECT 4
#define UPDATE_PUT 6

typedef struct {
    uint64_t seq, flags, previous_lsn, time_us, order, page, lsn, position;
    Slice bucket, name, data;
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

static PyObject *record_object_key(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Slice bucket, name;
    uint64_t seq;
    if (expect_arguments("object_key", count, 3, 3) < 0 || take_text(arguments[0], &bucket) < 0 ||
        take_text(arguments[1], &name) < 0 || take_number(arguments[2], UINT64_MAX, &seq) < 0) {
        return NULL;
    }
    PyObject *key = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(bucket.size + name.size + 11));
    if (key == NULL) {
        return NULL;
    }
    uint8_t *at = (uint8_t *)PyBytes_AS_STRING(key);
    *at++ = 'o';
    at = put_slice(at, bucket);
    *at++ = 0;
    at = put_slice(at, name);
    *at++ = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        *at++ = (uint8_t)(~seq >> shift);
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
        take_number(arguments[8], UINT32_MAX, &put->page) < 0 || take_number(arguments[9], UINT64_MAX, &put->lsn) < 0) {
        return -1;
    }
    return take_number(arguments[10], UINT64_MAX - MAX_DATA_BYTES, &put->position);
}

static void store_operation(uint8_t *at, const Put *put, uint32_t crc) {
    size_t stored_bytes = put->data.size + METADATA_LENGTH_BYTES;
    memset(at, 0, OPERATION_BYTES);
    at[0] = KIND_OPERATION;
    at[1] = (uint8_t)put->flags;
    store_u32(at + 4, (uint32_t)(OPERATION_BYTES + put->bucket.size + put->name.size + stored_bytes));
    store_u64(at + 8, put->seq);
    store_u64(at + 16, put->previous_lsn);
    store_u64(at + 32, put->time_us);
    store_u32(at + 40, (uint32_t)put->order);
    at[44] = OP_PUT_OBJECT;
    store_u16(at + 45, (uint16_t)put->bucket.size);
    store_u16(at + 47, (uint16_t)put->name.size);
    store_u32(at + 55, crc);
    store_u64(at + 59, put->data.size);
    store_u32(at + 68, (uint32_t)stored_bytes);
}

static void store_pointer(uint8_t *at, const Put *put, uint32_t crc) {
    size_t body = FRAME_HEADER_BYTES + OPERATION_BYTES + put->bucket.size + put->name.size;
    at[0] = 0;
    store_u32(at + 1, (uint32_t)put->order);
    store_u64(at + 5, put->data.size);
    store_u32(at + 13, crc);
    at[17] = 0;
    store_u64(at + 18, put->lsn);
    store_u64(at + 26, put->position + body);
    store_u32(at + 34, (uint32_t)(put->data.size + METADATA_LENGTH_BYTES));
}

/* Key and cell follow from the record: the update says where they go, and where the body is. */
static void store_put_update(uint8_t *at, const Put *put, const uint8_t *value) {
    store_u32(at, (uint32_t)put->page);
    at[4] = UPDATE_PUT;
    memcpy(at + 5, value + 26, 8);
}

static void store_record(uint8_t *record, uint8_t *value, const Put *put) {
    uint8_t *body = put_slice(put_slice(record + OPERATION_BYTES, put->bucket), put->name);
    store_u32(body, 0); /* no metadata */
    uint8_t *updates = put_slice(body + METADATA_LENGTH_BYTES, put->data);
    uint32_t crc = ~crc_update(~(uint32_t)0, body, put->data.size + METADATA_LENGTH_BYTES);
    store_operation(record, put, crc);
    store_pointer(value, put, crc);
    store_put_update(updates, put, value);
}

static PyObject *record_put_record(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Put put;
    if (expect_arguments("put_record", count, 11, 11) < 0 || take_put(arguments, &put) < 0) {
        return NULL;
    }
    size_t size = OPERATION_BYTES + put.bucket.size + put.name.size + METADATA_LENGTH_BYTES + put.data.size +
                  UPDATE_PUT_BYTES;
    PyObject *record = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
    PyObject *value = PyBytes_FromStringAndSize(NULL, POINTER_BYTES);
    if (record == NULL || value == NULL) {
        Py_XDECREF(record);
        Py_XDECREF(value);
        return NULL;
    }
    /* Nobody else has seen the two, and what they are made from is unchangeable and held by the caller. */
    PyThreadState *saved = release_gil_for(put.data.size);
    store_record((uint8_t *)PyBytes_AS_STRING(record), (uint8_t *)PyBytes_AS_STRING(value), &put);
    take_gil_back(saved);
    PyObject *both = PyTuple_Pack(2, record, value);
    Py_DECREF(record);
    Py_DECREF(value);
    return both;
}

/* ---- the module ---- */

/* ---- plain_data ---- */

static PyObject *record_plain_data(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
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

static PyMethodDef methods[] = {
    {"object_key", (PyCFunction)(void (*)(void))record_object_key, METH_FASTCALL,
     "object_key(bucket, name, seq): the key of a version in the tree."},
    {"put_record", (PyCFunction)(void (*)(void))record_put_record, METH_FASTCALL,
     "put_record(seq, flags, previous_lsn, time_us, order, bucket, name, data, page, lsn, position): the record of "
     "a put without metadata and its cell."},
    {"plain_data", (PyCFunction)(void (*)(void))record_plain_data, METH_FASTCALL,
     "plain_data(stored, size, crc): the data of a body without metadata that is as it must be, else None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_record", .m_doc = "Records of puts in one step.", .m_size = 0, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__record(void) {
    crc_prepare();
    return PyModule_Create(&module);
}
