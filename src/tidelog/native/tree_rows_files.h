/* Rows of row files as columns: blocks taken apart and packed, values of versions put together, pointers encoded. */

#ifndef TIDELOG_TREE_ROWS_FILES_H
#define TIDELOG_TREE_ROWS_FILES_H

#include "tree_rows_values.h"

#define BLOB_ENTRY_BYTES (8 + 4 + 4)
#define CELL_LENGTH_BYTES 2

/* ---- block_rows ---- */

/* The next row of a block; with places only the cell is taken. */
static int block_row(NativeState *state, Slice *rest, int has_places, Slice *key, Slice *value) {
    size_t key_bytes = rest->size < ROW_LENGTHS_BYTES ? 0 : load_u16(rest->data);
    size_t value_bytes = rest->size < ROW_LENGTHS_BYTES ? 0 : load_u16(rest->data + 2);
    size_t size = ROW_LENGTHS_BYTES + key_bytes + value_bytes;
    if (rest->size < size) {
        PyErr_SetString(state->data_error, "truncated row in a block");
        return -1;
    }
    *key = (Slice){rest->data + ROW_LENGTHS_BYTES, key_bytes};
    *value = (Slice){key->data + key_bytes, value_bytes};
    *rest = (Slice){rest->data + size, rest->size - size};
    if (has_places) {
        size_t cell_bytes = value_bytes < CELL_LENGTH_BYTES ? 0 : load_u16(value->data);
        if (cell_bytes == 0 || cell_bytes > value_bytes - CELL_LENGTH_BYTES) {
            PyErr_SetString(state->data_error, "a block with a row that has no cell");
            return -1;
        }
        *value = (Slice){value->data + CELL_LENGTH_BYTES, cell_bytes};
    }
    return 0;
}

static PyObject *block_columns(NativeState *state, Slice raw, int has_places) {
    size_t rows = 0, key_bytes = 0, value_bytes = 0;
    Slice key, value, rest = raw;
    while (rest.size > 0) {
        if (block_row(state, &rest, has_places, &key, &value) < 0) {
            return NULL;
        }
        rows++;
        key_bytes += key.size;
        value_bytes += value.size;
    }
    const size_t sizes[] = {4 * (rows + 1), key_bytes, 4 * (rows + 1), value_bytes, 4 * rows};
    uint8_t *at[5];
    PyObject *columns = new_columns(sizes, 5, at);
    if (columns == NULL) {
        return NULL;
    }
    uint32_t key_end = 0, value_end = 0;
    store_u32(at[0], 0);
    store_u32(at[2], 0);
    rest = raw;
    for (size_t row = 0; row < rows; row++) {
        block_row(state, &rest, has_places, &key, &value);
        memcpy(at[1] + key_end, key.data, key.size);
        memcpy(at[3] + value_end, value.data, value.size);
        key_end += (uint32_t)key.size;
        value_end += (uint32_t)value.size;
        store_u32(at[0] + 4 * (row + 1), key_end);
        store_u32(at[2] + 4 * (row + 1), value_end);
        size_t name_bytes = key.size > SEQ_BYTES ? key.size - SEQ_BYTES : 0;
        store_u32(at[4] + 4 * row, crc_of(key.data, name_bytes) & INT32_MAX);
    }
    return Py_BuildValue("(nN)", (Py_ssize_t)rows, columns);
}

/* block_rows(raw, has_places): (rows, (key ends, keys, value ends, values, parts)). */
static PyObject *tree_block_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Slice raw;
    if (expect_arguments("block_rows", count, 2, 2) < 0 || parse_bytes(arguments[0], "raw", &raw) < 0) {
        return NULL;
    }
    int has_places = PyObject_IsTrue(arguments[1]);
    if (has_places < 0 || raw.size > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "more bytes than a column can hold");
        return NULL;
    }
    return block_columns(PyModule_GetState(module), raw, has_places);
}

/* ---- pack_rows ---- */

/* pack_rows(keys, values, count, start, target_bytes, after_key): (where the next block begins, raw): the rows that fill a
   block, in strict order. */
static PyObject *tree_pack_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    TreeRows rows;
    size_t start, target, size = 0, row;
    Slice after, key, value;
    memset(&rows, 0, sizeof rows);
    if (expect_arguments("pack_rows", count, 6, 6) < 0 || parse_index(arguments[3], "start", &start) < 0 ||
        parse_index(arguments[4], "target_bytes", &target) < 0 || parse_bytes(arguments[5], "after_key", &after) < 0) {
        return NULL;
    }
    PyObject *raw = NULL;
    int is_good = tree_rows_take(&rows, arguments[0], arguments[1], arguments[2]) == 0;
    for (row = start; is_good && row < rows.count && size < target; row++) {
        is_good = tree_row(&rows, row, &key, &value) == 0;
        if (is_good && compare_slices(key, after) <= 0) {
            PyErr_SetString(state->input_error, "rows of a file are not in order, or a key comes twice");
            is_good = 0;
        } else if (is_good && (key.size > UINT16_MAX || value.size > UINT16_MAX)) {
            PyErr_SetString(state->input_error, "a key or a value of a row is too large");
            is_good = 0;
        } else if (is_good) {
            after = key;
            size += ROW_LENGTHS_BYTES + key.size + value.size;
        }
    }
    if (is_good && (raw = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size)) != NULL) {
        uint8_t *to = (uint8_t *)PyBytes_AS_STRING(raw);
        for (size_t at = start; at < row; at++) {
            tree_row(&rows, at, &key, &value);
            store_u16(to, (uint16_t)key.size);
            store_u16(to + 2, (uint16_t)value.size);
            memcpy(to + ROW_LENGTHS_BYTES, key.data, key.size);
            memcpy(to + ROW_LENGTHS_BYTES + key.size, value.data, value.size);
            to += ROW_LENGTHS_BYTES + key.size + value.size;
        }
    }
    tree_rows_release(&rows);
    return raw == NULL ? NULL : Py_BuildValue("(nN)", (Py_ssize_t)row, raw);
}

/* ---- file_numbers ---- */

static int cut_at(PyObject *cuts, Py_ssize_t index, Slice *cut) {
    return parse_bytes(PyTuple_GET_ITEM(cuts, index), "cut", cut);
}

static int count_cuts(const Column *keys, size_t count, PyObject *cuts, uint8_t *numbers) {
    for (size_t row = 0; row < count; row++) {
        Slice key, cut;
        if (!row_slice(keys, row, &key)) {
            return outside_column();
        }
        Py_ssize_t low = 0, high = PyTuple_GET_SIZE(cuts);
        while (low < high) {
            Py_ssize_t middle = low + (high - low) / 2;
            if (cut_at(cuts, middle, &cut) < 0) {
                return -1;
            }
            if (compare_slices(cut, key) <= 0) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        store_u32(numbers + 4 * row, (uint32_t)low);
    }
    return 0;
}

/* file_numbers(keys, count, cuts): of each key how many of the cuts are not above it. */
static PyObject *tree_file_numbers(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Column keys;
    size_t rows;
    memset(&keys, 0, sizeof keys);
    if (expect_arguments("file_numbers", count, 3, 3) < 0 || parse_index(arguments[1], "count", &rows) < 0) {
        return NULL;
    }
    if (!PyTuple_Check(arguments[2])) {
        PyErr_SetString(PyExc_TypeError, "cuts must be a tuple of bytes");
        return NULL;
    }
    PyObject *numbers = NULL;
    if (column_take_bytes(&keys, arguments[0]) == 0) {
        if (keys.rows < rows) {
            PyErr_SetString(PyExc_ValueError, "a column has fewer rows than were named");
        } else if ((numbers = PyBytes_FromStringAndSize(NULL, 4 * (Py_ssize_t)rows)) != NULL &&
                   count_cuts(&keys, rows, arguments[2], (uint8_t *)PyBytes_AS_STRING(numbers)) < 0) {
            Py_CLEAR(numbers);
        }
    }
    column_release(&keys);
    return numbers;
}

/* ---- join_versions ---- */

/* join_versions(cells, pointers, count): (ends, data): the values of rows of the version index. A null pointer is none. */
static PyObject *tree_join_versions(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    TreeRows rows;
    Slice cell, pointer;
    memset(&rows, 0, sizeof rows);
    if (expect_arguments("join_versions", count, 3, 3) < 0) {
        return NULL;
    }
    size_t size = 0;
    PyObject *columns = NULL;
    int is_good = tree_rows_take(&rows, arguments[0], arguments[1], arguments[2]) == 0;
    for (size_t row = 0; is_good && row < rows.count; row++) {
        is_good = tree_row(&rows, row, &cell, &pointer) == 0;
        if (is_good && cell.size > UINT16_MAX) {
            PyErr_Format(state->input_error, "a cell of %zu bytes is too large", cell.size);
            is_good = 0;
        }
        size += is_good ? CELL_LENGTH_BYTES + cell.size + pointer.size : 0;
    }
    if (is_good && size > INT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "more bytes than a column can hold");
        is_good = 0;
    }
    const size_t sizes[] = {4 * (rows.count + 1), size};
    uint8_t *at[2];
    if (is_good && (columns = new_columns(sizes, 2, at)) != NULL) {
        uint8_t *to = at[1];
        store_u32(at[0], 0);
        for (size_t row = 0; row < rows.count; row++) {
            tree_row(&rows, row, &cell, &pointer);
            store_u16(to, (uint16_t)cell.size);
            memcpy(to + CELL_LENGTH_BYTES, cell.data, cell.size);
            memcpy(to + CELL_LENGTH_BYTES + cell.size, pointer.data, pointer.size);
            to += CELL_LENGTH_BYTES + cell.size + pointer.size;
            store_u32(at[0] + 4 * (row + 1), (uint32_t)(to - at[1]));
        }
    }
    tree_rows_release(&rows);
    return columns;
}

/* ---- numbers in fixed forms ---- */

typedef struct {
    Py_buffer columns[4];
    size_t rows;
} FixedColumns;

static void fixed_release(FixedColumns *fixed) {
    for (int column = 0; column < 4; column++) {
        PyBuffer_Release(&fixed->columns[column]);
    }
}

/* Takes columns of these widths, all of the same number of rows. */
static int fixed_take(FixedColumns *fixed, PyObject *const *arguments, const size_t *widths, int count) {
    memset(fixed, 0, sizeof *fixed);
    for (int column = 0; column < count; column++) {
        if (PyObject_GetBuffer(arguments[column], &fixed->columns[column], PyBUF_SIMPLE) < 0) {
            return -1;
        }
        size_t rows = (size_t)fixed->columns[column].len / widths[column];
        if (column > 0 && rows != fixed->rows) {
            PyErr_SetString(PyExc_ValueError, "columns have different numbers of rows");
            return -1;
        }
        fixed->rows = rows;
    }
    return 0;
}

/* encode_pointers(codecs, blob_files, bytes, stored): pointers into blob files, one after the other. */
static PyObject *tree_encode_pointers(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    static const size_t widths[] = {1, 4, 8, 4};
    FixedColumns fixed;
    if (expect_arguments("encode_pointers", count, 4, 4) < 0) {
        return NULL;
    }
    PyObject *encoded = NULL;
    if (fixed_take(&fixed, arguments, widths, 4) == 0 &&
        (encoded = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(BLOB_POINTER_BYTES * fixed.rows))) != NULL) {
        uint8_t *to = (uint8_t *)PyBytes_AS_STRING(encoded);
        for (size_t row = 0; row < fixed.rows; row++, to += BLOB_POINTER_BYTES) {
            to[0] = BLOB_POINTER;
            to[1] = ((const uint8_t *)fixed.columns[0].buf)[row];
            store_u32(to + 2, native_u32(fixed.columns[1].buf, row));
            store_u64(to + 6, native_u64(fixed.columns[2].buf, row));
            store_u32(to + 14, native_u32(fixed.columns[3].buf, row));
        }
    }
    fixed_release(&fixed);
    return encoded;
}

/* blob_directory(positions, stored, crcs): the directory of a blob file. No value may be empty. */
static PyObject *tree_blob_directory(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    static const size_t widths[] = {8, 4, 4};
    NativeState *state = PyModule_GetState(module);
    FixedColumns fixed;
    if (expect_arguments("blob_directory", count, 3, 3) < 0) {
        return NULL;
    }
    PyObject *encoded = NULL;
    if (fixed_take(&fixed, arguments, widths, 3) == 0 &&
        (encoded = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(BLOB_ENTRY_BYTES * fixed.rows))) != NULL) {
        uint8_t *to = (uint8_t *)PyBytes_AS_STRING(encoded);
        for (size_t row = 0; encoded != NULL && row < fixed.rows; row++, to += BLOB_ENTRY_BYTES) {
            uint64_t position = native_u64(fixed.columns[0].buf, row);
            uint32_t stored = native_u32(fixed.columns[1].buf, row);
            if (stored == 0) {
                PyErr_SetString(state->input_error, "a value of a blob file is empty");
                Py_CLEAR(encoded);
                break;
            }
            store_u64(to, position);
            store_u32(to + 8, stored);
            store_u32(to + 12, native_u32(fixed.columns[2].buf, row));
        }
    }
    fixed_release(&fixed);
    return encoded;
}

/* position_keys(positions): keys of the value index, one after the other. */
static PyObject *tree_position_keys(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    static const size_t widths[] = {8};
    FixedColumns fixed;
    if (expect_arguments("position_keys", count, 1, 1) < 0) {
        return NULL;
    }
    PyObject *keys = NULL;
    if (fixed_take(&fixed, arguments, widths, 1) == 0 &&
        (keys = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(8 * fixed.rows))) != NULL) {
        uint8_t *to = (uint8_t *)PyBytes_AS_STRING(keys);
        for (size_t row = 0; row < fixed.rows; row++) {
            uint64_t position = native_u64(fixed.columns[0].buf, row);
            for (int shift = 56; shift >= 0; shift -= 8) {
                *to++ = (uint8_t)(position >> shift);
            }
        }
    }
    fixed_release(&fixed);
    return keys;
}

#endif
