/* Metadata of objects as the columns of a map from text to text. What each value becomes is said in
   `pipeline/source/entry_batches.py`; tests/oracles/entry_columns.py gives the same answers by its decoder.

   Invariants
   - Bytes are hostile: nothing is read that was not checked to lie inside of its row, and nothing is written that was not
     counted before.
   - At the first row that is no map with names in strict order, or has a number with a fraction or a value with parts, there
     is no answer: who decodes rows one by one gives it, and says what is wrong with one. */

#ifndef TIDELOG_METADATA_COLUMNS_H
#define TIDELOG_METADATA_COLUMNS_H

#include "arguments.h"
#include "endian.h"
#include "utf8.h"
#include "version_rows.h"

#define BASE64_BYTES(size) (((size) + 2) / 3 * 4)
#define MOST_DIGITS 24

/* What has been found; the columns are NULL while it is counted. */
typedef struct {
    size_t entries, name_bytes, value_bytes;
    uint8_t *ends, *name_ends, *names, *value_ends, *values, *is_there;
} MapColumns;

static int take_big_endian(Slice *rest, size_t width, uint64_t *number) {
    if (rest->size < width) {
        return 0;
    }
    *number = 0;
    for (size_t at = 0; at < width; at++) {
        *number = *number << 8 | rest->data[at];
    }
    *rest = (Slice){rest->data + width, rest->size - width};
    return 1;
}

static int take_bytes(Slice *rest, uint64_t size, Slice *taken) {
    if (rest->size < size) {
        return 0;
    }
    *taken = (Slice){rest->data, (size_t)size};
    *rest = (Slice){rest->data + size, rest->size - (size_t)size};
    return 1;
}

/* Bytes of a form with 5 bits for the size in its first byte, or behind that a size of 1, 2 or 4 bytes. */
static int take_text(uint8_t first, Slice *rest, Slice *text) {
    uint64_t size = first & 31;
    if ((first & 0xe0) != 0xa0 && (first < 0xd9 || first > 0xdb || !take_big_endian(rest, (size_t)1 << (first - 0xd9), &size))) {
        return 0;
    }
    return take_bytes(rest, size, text) && is_utf8(*text);
}

static void put_base64(Slice from, uint8_t *to) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t at = 0; at < from.size; at += 3, to += 4) {
        size_t left = from.size - at;
        uint32_t three = (uint32_t)from.data[at] << 16 | (left > 1 ? (uint32_t)from.data[at + 1] << 8 : 0) |
                         (left > 2 ? from.data[at + 2] : 0);
        to[0] = (uint8_t)digits[three >> 18];
        to[1] = (uint8_t)digits[three >> 12 & 63];
        to[2] = left > 1 ? (uint8_t)digits[three >> 6 & 63] : '=';
        to[3] = left > 2 ? (uint8_t)digits[three & 63] : '=';
    }
}

static void add_text(MapColumns *map, Slice text) {
    if (map->values != NULL) {
        memcpy(map->values + map->value_bytes, text.data, text.size);
    }
    map->value_bytes += text.size;
}

static void add_words(MapColumns *map, const char *words) {
    add_text(map, (Slice){(const uint8_t *)words, strlen(words)});
}

static void add_number(MapColumns *map, uint64_t number, int is_signed) {
    char digits[MOST_DIGITS];
    if (is_signed) {
        snprintf(digits, sizeof digits, "%lld", (long long)number);
    } else {
        snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    }
    add_words(map, digits);
}

static int add_binary(MapColumns *map, uint8_t first, Slice *rest) {
    uint64_t size;
    Slice bytes;
    if (!take_big_endian(rest, (size_t)1 << (first - 0xc4), &size) || !take_bytes(rest, size, &bytes)) {
        return 0;
    }
    if (map->values != NULL) {
        put_base64(bytes, map->values + map->value_bytes);
    }
    map->value_bytes += BASE64_BYTES(bytes.size);
    return 1;
}

static int add_integer(MapColumns *map, uint8_t first, Slice *rest) {
    uint64_t number;
    int is_signed = first >= 0xd0;
    size_t width = (size_t)1 << (first - (is_signed ? 0xd0 : 0xcc));
    if (!take_big_endian(rest, width, &number)) {
        return 0;
    }
    if (is_signed && width < 8 && number >> (8 * width - 1)) {
        number |= ~UINT64_C(0) << 8 * width;
    }
    add_number(map, number, is_signed);
    return 1;
}

static int add_value(MapColumns *map, Slice *rest) {
    if (rest->size == 0) {
        return 0;
    }
    uint8_t first = rest->data[0];
    *rest = (Slice){rest->data + 1, rest->size - 1};
    if (map->is_there != NULL) {
        map->is_there[map->entries] = first != 0xc0;
    }
    if (first < 0x80 || first >= 0xe0) {
        add_number(map, first < 0x80 ? first : ~UINT64_C(0) << 8 | first, first >= 0xe0);
        return 1;
    }
    if (first == 0xc2 || first == 0xc3) {
        add_words(map, first == 0xc2 ? "false" : "true");
        return 1;
    }
    if (first >= 0xc4 && first <= 0xc6) {
        return add_binary(map, first, rest);
    }
    if (first >= 0xcc && first <= 0xd3) {
        return add_integer(map, first, rest);
    }
    Slice text;
    if (first == 0xc0 || !take_text(first, rest, &text)) {
        return first == 0xc0;
    }
    add_text(map, text);
    return 1;
}

static int add_entry(MapColumns *map, Slice *rest, Slice *before, int is_first) {
    Slice name;
    uint8_t first = rest->size == 0 ? 0 : rest->data[0];
    if (rest->size == 0) {
        return 0;
    }
    *rest = (Slice){rest->data + 1, rest->size - 1};
    if (!take_text(first, rest, &name)) {
        return 0;
    }
    int order = memcmp(name.data, before->data, name.size < before->size ? name.size : before->size);
    if (!is_first && (order < 0 || (order == 0 && name.size <= before->size))) {
        return 0;
    }
    *before = name;
    if (map->names != NULL) {
        memcpy(map->names + map->name_bytes, name.data, name.size);
    }
    map->name_bytes += name.size;
    if (!add_value(map, rest)) {
        return 0;
    }
    map->entries++;
    if (map->name_ends != NULL) {
        store_u32(map->name_ends + 4 * map->entries, (uint32_t)map->name_bytes);
        store_u32(map->value_ends + 4 * map->entries, (uint32_t)map->value_bytes);
    }
    return 1;
}

/* The map of one row; no bytes are an empty one. */
static int add_map(MapColumns *map, Slice packed) {
    Slice rest = packed, before = {packed.data, 0};
    if (packed.size == 0) {
        return 1;
    }
    uint8_t first = packed.data[0];
    uint64_t count = first & 15;
    rest = (Slice){packed.data + 1, packed.size - 1};
    if ((first & 0xf0) != 0x80 && (first < 0xde || first > 0xdf || !take_big_endian(&rest, (size_t)2 << (first - 0xde), &count))) {
        return 0;
    }
    for (uint64_t number = 0; number < count; number++) {
        if (!add_entry(map, &rest, &before, number == 0)) {
            return 0;
        }
    }
    return rest.size == 0;
}

/* 1 when every row was understood, 0 when one was not, -1 on error. */
static int add_maps(MapColumns *map, Slice ends, Slice data) {
    size_t rows = ends.size / 4 - 1;
    map->entries = map->name_bytes = map->value_bytes = 0;
    for (size_t row = 0; row < rows; row++) {
        uint32_t start = native_u32(ends.data, row), end = native_u32(ends.data, row + 1);
        if (start > end || end > data.size) {
            PyErr_SetString(PyExc_ValueError, "a row lies outside of its column");
            return -1;
        }
        if (!add_map(map, (Slice){data.data + start, end - start})) {
            return 0;
        }
        if (map->ends != NULL) {
            store_u32(map->ends + 4 * (row + 1), (uint32_t)map->entries);
        }
    }
    return 1;
}

static PyObject *map_columns(Slice ends, Slice data, MapColumns *map) {
    size_t entries = map->entries;
    const size_t sizes[] = {ends.size, 4 * (entries + 1), map->name_bytes, 4 * (entries + 1), map->value_bytes, entries};
    uint8_t **const at[] = {&map->ends, &map->name_ends, &map->names, &map->value_ends, &map->values, &map->is_there};
    PyObject *columns = PyTuple_New(6);
    for (Py_ssize_t column = 0; columns != NULL && column < 6; column++) {
        if ((*at[column] = add_bytes(columns, column, sizes[column])) == NULL) {
            Py_CLEAR(columns);
        }
    }
    if (columns != NULL) {
        store_u32(map->ends, 0);
        store_u32(map->name_ends, 0);
        store_u32(map->value_ends, 0);
        add_maps(map, ends, data);
    }
    return columns;
}

/* metadata_columns(ends, data): (ends, name ends, names, value ends, values, a byte a value: 0 for null), or None. */
static PyObject *entries_metadata_columns(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Slice ends, data;
    MapColumns map = {0};
    if (expect_arguments("metadata_columns", count, 2, 2) < 0 || parse_bytes(arguments[0], "ends", &ends) < 0 ||
        parse_bytes(arguments[1], "data", &data) < 0) {
        return NULL;
    }
    if (ends.size < 4 || ends.size % 4 != 0) {
        PyErr_SetString(PyExc_ValueError, "ends are not an array of one more than the rows");
        return NULL;
    }
    int found = add_maps(&map, ends, data);
    if (found <= 0) {
        return found < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (map.name_bytes > INT32_MAX || map.value_bytes > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "more bytes than a column can hold");
        return NULL;
    }
    return map_columns(ends, data, &map);
}

#endif
