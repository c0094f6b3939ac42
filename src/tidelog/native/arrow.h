/* Arrow's columns as they come from Python: buffers that are held, whose every number is a claim until it was checked. */

#ifndef TIDELOG_ARROW_H
#define TIDELOG_ARROW_H

#include "arguments.h"

/* A column of bytes, of lists (without data) or of numbers (without ends). `rows` are those that the buffers have room
   for, counted from `first`. */
typedef struct {
    Py_buffer validity, ends, data;
    size_t first, rows;
    int is_wide; /* ends have 8 bytes rather than 4 */
} Column;

static inline void column_release(Column *column) {
    PyBuffer_Release(&column->validity);
    PyBuffer_Release(&column->ends);
    PyBuffer_Release(&column->data);
}

/* Rows from `first` on, of those that a buffer has. */
static inline size_t rows_after(size_t rows, size_t first) {
    return rows > first ? rows - first : 0;
}

static inline int column_take_validity(Column *column, PyObject *validity, PyObject *first) {
    if (parse_index(first, "first", &column->first) < 0) {
        return -1;
    }
    column->rows = SIZE_MAX;
    if (validity == Py_None) {
        return 0;
    }
    if (PyObject_GetBuffer(validity, &column->validity, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    column->rows = rows_after((size_t)column->validity.len * 8, column->first);
    return 0;
}

static inline int column_take_ends(Column *column, PyObject *ends, PyObject *end_bytes) {
    size_t width;
    if (parse_index(end_bytes, "end_bytes", &width) < 0 || PyObject_GetBuffer(ends, &column->ends, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    if (width != 4 && width != 8) {
        PyErr_SetString(PyExc_ValueError, "end_bytes must be 4 or 8");
        return -1;
    }
    column->is_wide = width == 8;
    size_t count = (size_t)column->ends.len / width;
    size_t rows = rows_after(count > 0 ? count - 1 : 0, column->first);
    column->rows = rows < column->rows ? rows : column->rows;
    return 0;
}

static inline int expect_fields(PyObject *tuple, Py_ssize_t count) {
    if (PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) == count) {
        return 0;
    }
    PyErr_Format(PyExc_TypeError, "a column is a tuple of %zd fields", count);
    return -1;
}

/* (validity, ends, data, first, end_bytes) */
static inline int column_take_bytes(Column *column, PyObject *tuple) {
    return expect_fields(tuple, 5) < 0 ||
                   column_take_validity(column, PyTuple_GET_ITEM(tuple, 0), PyTuple_GET_ITEM(tuple, 3)) < 0 ||
                   column_take_ends(column, PyTuple_GET_ITEM(tuple, 1), PyTuple_GET_ITEM(tuple, 4)) < 0 ||
                   PyObject_GetBuffer(PyTuple_GET_ITEM(tuple, 2), &column->data, PyBUF_SIMPLE) < 0
               ? -1
               : 0;
}

/* (validity, numbers, first) */
static inline int column_take_numbers(Column *column, PyObject *tuple) {
    if (expect_fields(tuple, 3) < 0 ||
        column_take_validity(column, PyTuple_GET_ITEM(tuple, 0), PyTuple_GET_ITEM(tuple, 2)) < 0 ||
        PyObject_GetBuffer(PyTuple_GET_ITEM(tuple, 1), &column->data, PyBUF_SIMPLE) < 0) {
        return -1;
    }
    size_t rows = rows_after((size_t)column->data.len / 8, column->first);
    column->rows = rows < column->rows ? rows : column->rows;
    return 0;
}

/* The next three want a row below `rows`. */

static inline int is_null(const Column *column, size_t row) {
    const uint8_t *bits = column->validity.buf;
    size_t bit = column->first + row;
    return bits != NULL && !(bits[bit / 8] >> bit % 8 & 1);
}

static inline int64_t end_at(const Column *column, size_t index) {
    const uint8_t *ends = column->ends.buf;
    return column->is_wide ? (int64_t)load_u64(ends + 8 * index) : (int64_t)(int32_t)load_u32(ends + 4 * index);
}

/* From where to where a row goes; 0 when it does not lie inside `limit`. */
static inline int row_range(const Column *column, size_t row, size_t limit, size_t *from, size_t *to) {
    int64_t start = end_at(column, column->first + row), stop = end_at(column, column->first + row + 1);
    if (start < 0 || stop < start || (uint64_t)stop > limit) {
        return 0;
    }
    *from = (size_t)start;
    *to = (size_t)stop;
    return 1;
}

static inline int row_slice(const Column *column, size_t row, Slice *slice) {
    size_t from, to;
    if (!row_range(column, row, (size_t)column->data.len, &from, &to)) {
        return 0;
    }
    *slice = (Slice){(const uint8_t *)column->data.buf + from, to - from};
    return 1;
}

#endif
