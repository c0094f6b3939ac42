/* A message to its envelope: sizes first, one allocation, then the copies. */

#ifndef TIDELOG_ENVELOPES_ENCODE_H
#define TIDELOG_ENVELOPES_ENCODE_H

#include "envelopes_parse.h"

#define MAX_HEADERS UINT16_MAX
#define MAX_NAME_BYTES UINT16_MAX

/* Raises TypeError with the name of the object's type, and returns -1. */
static int refuse_type(const char *format, PyObject *object) {
    PyObject *name = PyType_GetName(Py_TYPE(object));
    if (name != NULL) {
        PyErr_Format(PyExc_TypeError, format, name);
        Py_DECREF(name);
    }
    return -1;
}

static int slice_of_view(PyObject *object, Slice *slice) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_FULL_RO) < 0) {
        return -1;
    }
    int is_bytes = view.ndim == 1 && view.itemsize == 1 && PyBuffer_IsContiguous(&view, 'C');
    *slice = (Slice){view.buf, (size_t)view.len};
    PyBuffer_Release(&view); /* the memoryview itself keeps the bytes where they are */
    if (!is_bytes) {
        PyErr_SetString(PyExc_TypeError, "a memoryview must be contiguous, of one dimension and of bytes");
        return -1;
    }
    return 0;
}

/* The bytes of a value, key or header value. */
static int slice_of(PyObject *object, Slice *slice) {
    if (PyBytes_Check(object)) {
        *slice = (Slice){(const uint8_t *)PyBytes_AS_STRING(object), (size_t)PyBytes_GET_SIZE(object)};
        return 0;
    }
    if (PyByteArray_Check(object)) {
        *slice = (Slice){(const uint8_t *)PyByteArray_AS_STRING(object), (size_t)PyByteArray_GET_SIZE(object)};
        return 0;
    }
    if (PyMemoryView_Check(object)) {
        return slice_of_view(object, slice);
    }
    return refuse_type("bytes, bytearray or memoryview expected, not %U", object);
}

static int slice_of_name(NativeState *state, PyObject *object, Slice *slice) {
    if (!PyUnicode_Check(object)) {
        return refuse_type("a header name must be str, not %U", object);
    }
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(object, &size);
    if (text == NULL) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            PyErr_SetString(state->input_error, "a header name must be text that UTF-8 can hold");
        }
        return -1;
    }
    if (size > MAX_NAME_BYTES) {
        PyErr_Format(state->input_error, "a header name has at most %d bytes", MAX_NAME_BYTES);
        return -1;
    }
    *slice = (Slice){(const uint8_t *)text, (size_t)size};
    return 0;
}

static int expect_u32(const char *what, uint64_t size) {
    if (size <= UINT32_MAX) {
        return 0;
    }
    PyErr_Format(PyExc_OverflowError, "%s does not fit in 32 bits", what);
    return -1;
}

/* All headers of a mapping as a list; one that names may repeat in (`Headers` in `topics/message.py`) has `pairs`. */
static PyObject *headers_items(PyObject *headers) {
    if (PyDict_CheckExact(headers)) {
        return PyDict_Items(headers);
    }
    if (PyList_Check(headers) || PyTuple_Check(headers)) {
        return PySequence_List(headers);
    }
    PyObject *pairs = PyDict_Check(headers) ? PyObject_GetAttrString(headers, "pairs") : NULL;
    if (pairs == NULL) {
        PyErr_Clear(); /* some other mapping */
        return PyMapping_Items(headers);
    }
    PyObject *items = PySequence_List(pairs);
    Py_DECREF(pairs);
    return items;
}

/* Headers as a list of (name, value) tuples that we hold; NULL without an error when there are none. */
static int headers_take(NativeState *state, PyObject *headers, PyObject **items) {
    *items = NULL;
    int any = headers == Py_None ? 0 : PyObject_IsTrue(headers);
    if (any <= 0) {
        return any;
    }
    *items = headers_items(headers);
    if (*items == NULL) {
        return -1;
    }
    Py_ssize_t count = PyList_GET_SIZE(*items);
    if (count > MAX_HEADERS) {
        PyErr_Format(state->input_error, "a message has at most %d headers, this one has %zd", MAX_HEADERS, count);
        Py_CLEAR(*items);
        return -1;
    }
    return 0;
}

/* What is null has no bytes. */
static int slice_or_null(PyObject *object, Slice *slice) {
    if (object == Py_None) {
        *slice = (Slice){NULL, 0};
        return 0;
    }
    return slice_of(object, slice);
}

static inline int item_is_null(PyObject *item) {
    return PyTuple_GET_ITEM(item, 1) == Py_None;
}

static int header_slices(NativeState *state, PyObject *item, Slice *name, Slice *value) {
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 2) {
        PyErr_SetString(PyExc_TypeError, "headers must be a mapping of str to bytes, or pairs of both");
        return -1;
    }
    if (slice_of_name(state, PyTuple_GET_ITEM(item, 0), name) < 0 ||
        slice_or_null(PyTuple_GET_ITEM(item, 1), value) < 0) {
        return -1;
    }
    return expect_u32("a header value", value->size);
}

/* `bitmap_bytes` is what the bits of null values need, without zero bytes at their end. */
static int headers_measure(NativeState *state, PyObject *items, uint64_t *block_bytes, size_t *bitmap_bytes) {
    Slice name, value;
    *block_bytes = 0;
    *bitmap_bytes = 0;
    for (Py_ssize_t index = 0; items != NULL && index < PyList_GET_SIZE(items); index++) {
        PyObject *item = PyList_GET_ITEM(items, index);
        if (header_slices(state, item, &name, &value) < 0) {
            return -1;
        }
        *block_bytes += HEADER_BYTES + name.size + value.size;
        if (item_is_null(item)) {
            *bitmap_bytes = (size_t)index / 8 + 1;
        }
    }
    if (*bitmap_bytes > MAX_NULLS_BITMAP) {
        PyErr_Format(state->input_error, "only the first %d headers of a message can be null", MAX_NULL_HEADER);
        return -1;
    }
    return expect_u32("the block of headers", *block_bytes);
}

/* The entry of the extension that says what is null; nothing when nothing is. */
static uint8_t *nulls_write(uint8_t *to, int value_is_null, PyObject *items, size_t bitmap_bytes) {
    if (!value_is_null && bitmap_bytes == 0) {
        return to;
    }
    to[0] = KIND_NULLS;
    to[1] = (uint8_t)(1 + bitmap_bytes);
    to[2] = value_is_null ? VALUE_IS_NULL : 0;
    uint8_t *bitmap = to + NULLS_FIXED_BYTES;
    memset(bitmap, 0, bitmap_bytes);
    for (size_t index = 0; bitmap_bytes > 0 && index < (size_t)PyList_GET_SIZE(items); index++) {
        if (item_is_null(PyList_GET_ITEM(items, (Py_ssize_t)index))) {
            bitmap[index / 8] |= (uint8_t)(1u << index % 8);
        }
    }
    return bitmap + bitmap_bytes;
}

static uint8_t *copy_slice(uint8_t *to, Slice slice) {
    if (slice.size > 0) { /* nothing may lie nowhere, and memcpy must not be given that */
        memcpy(to, slice.data, slice.size);
    }
    return to + slice.size;
}

/* Returns where it stopped. Every item went through headers_measure() before, so none can fail now. */
static uint8_t *headers_write(NativeState *state, PyObject *items, uint8_t *to) {
    Slice name, value;
    for (Py_ssize_t index = 0; items != NULL && index < PyList_GET_SIZE(items); index++) {
        if (header_slices(state, PyList_GET_ITEM(items, index), &name, &value) < 0) {
            return NULL;
        }
        store_u16(to, (uint16_t)name.size);
        store_u32(to + 2, (uint32_t)value.size);
        to = copy_slice(copy_slice(to + HEADER_BYTES, name), value);
    }
    return to;
}

static int parse_timestamp(PyObject *object, int64_t *timestamp_us) {
    int overflow;
    *timestamp_us = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (*timestamp_us == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (overflow != 0) {
        PyErr_SetString(PyExc_OverflowError, "timestamp_us does not fit in 64 bits");
        return -1;
    }
    return 0;
}

/* What could not be read back is not written. */
static int check_time(NativeState *state, int64_t timestamp_us) {
    if (is_possible_time(timestamp_us)) {
        return 0;
    }
    PyErr_Format(state->input_error, "the timestamp is outside of the years 1 to 9999 in UTC (%lld us since 1970)",
                 (long long)timestamp_us);
    return -1;
}

static PyObject *encode_parts(NativeState *state, PyObject *const *arguments, PyObject *items, PyObject *more) {
    Slice value, key = {NULL, 0}, extension = {NULL, 0};
    uint64_t block_bytes;
    size_t bitmap_bytes;
    int64_t timestamp_us;
    int has_key = arguments[1] != Py_None, has_null_value = arguments[0] == Py_None;
    /* The timestamp first: it may be any object with code of its own, which must not run once the slices are taken. */
    if (parse_timestamp(arguments[3], &timestamp_us) < 0 || slice_or_null(arguments[0], &value) < 0 ||
        (has_key && slice_of(arguments[1], &key) < 0) ||
        headers_measure(state, items, &block_bytes, &bitmap_bytes) < 0 ||
        check_time(state, timestamp_us) < 0 || expect_u32("the key", key.size) < 0 ||
        (more != NULL && slice_of(more, &extension) < 0)) {
        return NULL;
    }
    size_t nulls_bytes = has_null_value || bitmap_bytes > 0 ? NULLS_FIXED_BYTES + bitmap_bytes : 0;
    uint64_t extension_bytes = (uint64_t)extension.size + nulls_bytes;
    if (expect_u32("the extension", extension_bytes) < 0) {
        return NULL;
    }
    if (value.size > (size_t)PY_SSIZE_T_MAX - FIXED_BYTES - key.size - block_bytes - extension_bytes) {
        return PyErr_NoMemory();
    }
    Py_ssize_t size = (Py_ssize_t)(FIXED_BYTES + key.size + block_bytes + extension_bytes + value.size);
    PyObject *envelope = PyBytes_FromStringAndSize(NULL, size);
    if (envelope == NULL) {
        return NULL;
    }
    uint8_t *to = (uint8_t *)PyBytes_AS_STRING(envelope);
    to[0] = VERSION;
    to[1] = has_key ? HAS_KEY : 0;
    store_u16(to + 2, items == NULL ? 0 : (uint16_t)PyList_GET_SIZE(items));
    store_u32(to + 4, (uint32_t)key.size);
    store_u64(to + 8, (uint64_t)timestamp_us);
    store_u32(to + 16, (uint32_t)block_bytes);
    store_u32(to + 20, (uint32_t)extension_bytes);
    to += FIXED_BYTES;
    to = headers_write(state, items, copy_slice(to, key));
    if (to == NULL) {
        Py_DECREF(envelope);
        return NULL;
    }
    copy_slice(nulls_write(copy_slice(to, extension), has_null_value, items, bitmap_bytes), value);
    return envelope;
}

static PyObject *envelopes_encode(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    NativeState *state = PyModule_GetState(module);
    PyObject *items;
    if (expect_arguments("encode", argument_count, 4, 5) < 0 || headers_take(state, arguments[2], &items) < 0) {
        return NULL;
    }
    PyObject *envelope = encode_parts(state, arguments, items, argument_count == 5 ? arguments[4] : NULL);
    Py_XDECREF(items);
    return envelope;
}

/* Values alone, as most batches are: all envelopes in one call, with the marks of their batch and their producer. */

#define KIND_BATCH 1
#define KIND_PRODUCER 2
#define BATCH_ENTRY_BYTES 10
#define PRODUCER_ENTRY_BYTES 18 /* without the name */
#define MAX_ENTRY_NAME_BYTES (UINT8_MAX - 16)

typedef struct {
    uint32_t count;
    uint64_t epoch, sequence;
    Slice name;
    int has_producer;
    uint32_t extension_bytes;
} BatchMarks;

static uint8_t *marks_write(uint8_t *to, const BatchMarks *marks, uint32_t number) {
    if (marks->count > 1) {
        to[0] = KIND_BATCH;
        to[1] = BATCH_ENTRY_BYTES - 2;
        store_u32(to + 2, number);
        store_u32(to + 6, marks->count);
        to += BATCH_ENTRY_BYTES;
    }
    if (marks->has_producer) {
        to[0] = KIND_PRODUCER;
        to[1] = (uint8_t)(PRODUCER_ENTRY_BYTES - 2 + marks->name.size);
        store_u64(to + 2, marks->epoch);
        store_u64(to + 10, marks->sequence + number);
        to = copy_slice(to + PRODUCER_ENTRY_BYTES, marks->name);
    }
    return to;
}

static PyObject *encode_value(Slice value, int64_t timestamp_us, const BatchMarks *marks, uint32_t number) {
    if (value.size > (size_t)PY_SSIZE_T_MAX - FIXED_BYTES - marks->extension_bytes) {
        return PyErr_NoMemory();
    }
    PyObject *envelope =
        PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(FIXED_BYTES + marks->extension_bytes + value.size));
    if (envelope == NULL) {
        return NULL;
    }
    uint8_t *to = (uint8_t *)PyBytes_AS_STRING(envelope);
    memset(to, 0, FIXED_BYTES);
    to[0] = VERSION;
    store_u64(to + 8, (uint64_t)timestamp_us);
    store_u32(to + 20, marks->extension_bytes);
    copy_slice(marks_write(to + FIXED_BYTES, marks, number), value);
    return envelope;
}

static int marks_parse(BatchMarks *marks, Py_ssize_t count, PyObject *const *arguments) {
    memset(marks, 0, sizeof *marks);
    if (count > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "a batch has at most 4294967295 messages");
        return -1;
    }
    marks->count = (uint32_t)count;
    marks->has_producer = arguments[2] != Py_None;
    if (marks->has_producer) {
        if (parse_bytes(arguments[2], "name", &marks->name) < 0 || parse_u64(arguments[3], &marks->epoch) < 0 ||
            parse_u64(arguments[4], &marks->sequence) < 0) {
            return -1;
        }
        if (marks->name.size > MAX_ENTRY_NAME_BYTES) {
            PyErr_Format(PyExc_OverflowError, "the name of a producer has at most %d bytes", MAX_ENTRY_NAME_BYTES);
            return -1;
        }
    }
    marks->extension_bytes = (count > 1 ? BATCH_ENTRY_BYTES : 0) +
                             (marks->has_producer ? PRODUCER_ENTRY_BYTES + (uint32_t)marks->name.size : 0);
    return 0;
}

/* None when an item is not bytes, and nothing else: then the caller encodes message by message. */
static PyObject *envelopes_encode_values(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    NativeState *state = PyModule_GetState(module);
    int64_t timestamp_us;
    BatchMarks marks;
    if (expect_arguments("encode_values", argument_count, 5, 5) < 0 ||
        parse_timestamp(arguments[1], &timestamp_us) < 0 || check_time(state, timestamp_us) < 0) {
        return NULL;
    }
    PyObject *values = PySequence_Fast(arguments[0], "values must be a sequence");
    if (values == NULL) {
        return NULL;
    }
    Py_ssize_t count = PySequence_Fast_GET_SIZE(values);
    PyObject *envelopes = marks_parse(&marks, count, arguments) < 0 ? NULL : PyList_New(count);
    for (Py_ssize_t index = 0; envelopes != NULL && index < count; index++) {
        PyObject *value = PySequence_Fast_GET_ITEM(values, index);
        if (!PyBytes_CheckExact(value)) {
            Py_SETREF(envelopes, Py_NewRef(Py_None));
            break;
        }
        Slice slice = {(const uint8_t *)PyBytes_AS_STRING(value), (size_t)PyBytes_GET_SIZE(value)};
        PyObject *envelope = encode_value(slice, timestamp_us, &marks, (uint32_t)index);
        if (envelope == NULL) {
            Py_CLEAR(envelopes);
        } else {
            PyList_SET_ITEM(envelopes, index, envelope);
        }
    }
    Py_DECREF(values);
    return envelopes;
}

/* The extensions of a batch, as bytes: most messages have none, and then that is all that is said. */

/* Where the extension lies. Empty for what is no envelope of this version: decoding it says what is wrong. */
static Slice extension_slice(Slice payload) {
    Slice none = {NULL, 0};
    if (payload.size < FIXED_BYTES || payload.data[0] != VERSION) {
        return none;
    }
    uint64_t start = FIXED_BYTES + (uint64_t)load_u32(payload.data + 4) + load_u32(payload.data + 16);
    uint64_t size = load_u32(payload.data + 20);
    if (size == 0 || start + size > payload.size) {
        return none;
    }
    return (Slice){payload.data + start, (size_t)size};
}

/* Puts one into the list, which is made when the first is found: None stands for those before it. */
static int extension_put(PyObject **list, size_t count, size_t index, Slice extension) {
    if (*list == NULL) {
        *list = PyList_New((Py_ssize_t)count);
        if (*list == NULL) {
            return -1;
        }
        for (size_t each = 0; each < count; each++) {
            PyList_SET_ITEM(*list, (Py_ssize_t)each, Py_NewRef(Py_None));
        }
    }
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)extension.data, (Py_ssize_t)extension.size);
    return bytes == NULL ? -1 : PyList_SetItem(*list, (Py_ssize_t)index, bytes);
}

static PyObject *extensions_in(const Places *places, size_t start, size_t stop) {
    PyObject *list = NULL;
    for (size_t index = start; index < stop; index++) {
        Slice payload;
        if (place_of(places, index, &payload) < 0) {
            Py_XDECREF(list);
            return NULL;
        }
        Slice extension = extension_slice(payload);
        if (extension.size > 0 && extension_put(&list, stop - start, index - start, extension) < 0) {
            Py_XDECREF(list);
            return NULL;
        }
    }
    return list == NULL ? Py_NewRef(Py_None) : list;
}

static PyObject *envelopes_extensions(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t given) {
    Places places;
    size_t start, stop;
    if (expect_arguments("extensions", given, 5, 5) < 0 || parse_index(arguments[3], "start", &start) < 0 ||
        parse_index(arguments[4], "stop", &stop) < 0 || places_take(&places, arguments) < 0) {
        return NULL;
    }
    PyObject *list = extensions_in(&places, start, stop < places.count ? stop : places.count);
    places_release(&places);
    return list;
}

#endif
