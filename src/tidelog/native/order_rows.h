/* The order of rows by several columns: numbers by value, bytes as unsigned, null last; equal rows stay as they were.

   A row gets 64 bits that sort as its columns do, as far as they reach: what all rows have in common is left out, so that
   a few bits tell most rows apart. They are sorted by these bits, digit by digit; rows whose bits are the same are told
   apart by what follows, in the same way, and a few of them, or those that no bits tell apart, by comparing. */

#ifndef TIDELOG_ORDER_ROWS_H
#define TIDELOG_ORDER_ROWS_H

#include "arrow.h"

#define ORDER_COLUMNS 8
#define ORDER_DIGITS 8
#define ORDER_DIGIT_VALUES 256
#define ORDER_FEW_ROWS 24
#define ORDER_DEPTH 32

typedef struct {
    Column column;
    size_t width; /* of a number; 0: bytes */
} OrderColumn;

typedef struct {
    uint64_t bits;
    uint32_t row;
} OrderedRow;

typedef struct {
    OrderColumn columns[ORDER_COLUMNS];
    int count;
    OrderedRow *room; /* as many as there are rows */
    uint32_t counts[ORDER_DIGITS][ORDER_DIGIT_VALUES];
} Order;

static inline int64_t order_number(const OrderColumn *of, size_t row) {
    size_t at = of->column.first + row;
    return of->width == 8 ? (int64_t)native_u64(of->column.data.buf, at) : (int32_t)native_u32(of->column.data.buf, at);
}

/* Every row was checked to lie inside of its column. */
static inline Slice order_bytes(const OrderColumn *of, size_t row) {
    Slice slice = {NULL, 0};
    row_slice(&of->column, row, &slice);
    return slice;
}

static int order_compare_column(const OrderColumn *of, size_t one, size_t other) {
    int is_first_null = is_null(&of->column, one), is_second_null = is_null(&of->column, other);
    if (is_first_null || is_second_null) {
        return is_first_null - is_second_null;
    }
    if (of->width > 0) {
        int64_t first = order_number(of, one), second = order_number(of, other);
        return (first > second) - (first < second);
    }
    Slice first = order_bytes(of, one), second = order_bytes(of, other);
    int result = memcmp(first.data, second.data, first.size < second.size ? first.size : second.size);
    return result != 0 ? result : (first.size > second.size) - (first.size < second.size);
}

static int order_compare(const Order *order, size_t one, size_t other) {
    int result = 0;
    for (int at = 0; result == 0 && at < order->count; at++) {
        result = order_compare_column(&order->columns[at], one, other);
    }
    return result;
}

/* ---- by comparing ---- */

static void order_insert(const Order *order, OrderedRow *rows, size_t count) {
    for (size_t next = 1; next < count; next++) {
        OrderedRow moved = rows[next];
        size_t at = next;
        for (; at > 0 && order_compare(order, rows[at - 1].row, moved.row) > 0; at--) {
            rows[at] = rows[at - 1];
        }
        rows[at] = moved;
    }
}

static void order_merge(const Order *order, OrderedRow *rows, size_t count) {
    if (count <= ORDER_FEW_ROWS) {
        order_insert(order, rows, count);
        return;
    }
    size_t half = count / 2, one = 0, other = half;
    order_merge(order, rows, half);
    order_merge(order, rows + half, count - half);
    memcpy(order->room, rows, half * sizeof *rows);
    for (OrderedRow *to = rows; one < half; to++) {
        int takes_first = other == count || order_compare(order, order->room[one].row, rows[other].row) <= 0;
        *to = takes_first ? order->room[one++] : rows[other++];
    }
}

/* ---- by bits ---- */

static inline int bits_of(uint64_t number) {
    return number == 0 ? 0 : 64 - __builtin_clzll(number);
}

/* Numbers as bits behind those that there are: their distance from the least, and null behind the largest. Returns how
   many bits are left. */
static int order_add_numbers(const OrderColumn *of, OrderedRow *rows, size_t count, int left) {
    int64_t least = INT64_MAX, most = INT64_MIN;
    int has_null = 0;
    for (size_t at = 0; at < count; at++) {
        if (is_null(&of->column, rows[at].row)) {
            has_null = 1;
            continue;
        }
        int64_t number = order_number(of, rows[at].row);
        least = number < least ? number : least;
        most = number > most ? number : most;
    }
    if (least > most) {
        return left; /* all of them are null */
    }
    uint64_t range = (uint64_t)most - (uint64_t)least;
    if (has_null && range == UINT64_MAX) {
        return 0; /* to be compared */
    }
    int needed = bits_of(range + (uint64_t)has_null), cut = needed > left ? needed - left : 0;
    if (needed == 0) {
        return left;
    }
    for (size_t at = 0; at < count; at++) {
        int is_nothing = is_null(&of->column, rows[at].row);
        uint64_t distance = is_nothing ? range + 1 : (uint64_t)order_number(of, rows[at].row) - (uint64_t)least;
        rows[at].bits |= cut > 0 ? distance >> cut : distance << (left - needed);
    }
    return left - (needed - cut);
}

/* Bytes as bits, from the first on that is not the same in all rows. What is behind them is told only once these bits are
   the same, unless the whole column is. */
static int order_add_bytes(const OrderColumn *of, OrderedRow *rows, size_t count, int left) {
    Slice first = {NULL, 0};
    size_t common = 0, nulls = 0;
    int is_same = 1;
    for (size_t at = 0; at < count; at++) {
        if (is_null(&of->column, rows[at].row)) {
            nulls++;
            continue;
        }
        Slice bytes = order_bytes(of, rows[at].row);
        if (nulls == at) {
            first = bytes;
            common = bytes.size;
            continue;
        }
        size_t same = 0, most = bytes.size < common ? bytes.size : common;
        if (memcmp(first.data, bytes.data, most) == 0) {
            same = most;
        } else {
            while (first.data[same] == bytes.data[same]) {
                same++;
            }
        }
        is_same = is_same && bytes.size == first.size && same == bytes.size;
        common = same;
    }
    if (is_same && (nulls == 0 || nulls == count)) {
        return left;
    }
    left -= nulls > 0;
    for (size_t at = 0; at < count; at++) {
        if (is_null(&of->column, rows[at].row)) {
            rows[at].bits |= (uint64_t)1 << left;
            continue;
        }
        Slice bytes = order_bytes(of, rows[at].row);
        int shift = left - 8;
        for (size_t from = common; shift >= 0 && from < bytes.size; from++, shift -= 8) {
            rows[at].bits |= (uint64_t)bytes.data[from] << shift;
        }
    }
    return 0;
}

static void order_fill_bits(const Order *order, OrderedRow *rows, size_t count) {
    int left = 64;
    for (size_t at = 0; at < count; at++) {
        rows[at].bits = 0;
    }
    for (int at = 0; at < order->count && left > 0; at++) {
        const OrderColumn *of = &order->columns[at];
        left = of->width > 0 ? order_add_numbers(of, rows, count, left) : order_add_bytes(of, rows, count, left);
    }
}

static void order_by_bits(Order *order, OrderedRow *rows, size_t count) {
    memset(order->counts, 0, sizeof order->counts);
    for (size_t at = 0; at < count; at++) {
        for (int digit = 0; digit < ORDER_DIGITS; digit++) {
            order->counts[digit][rows[at].bits >> 8 * digit & 255]++;
        }
    }
    OrderedRow *from = rows, *to = order->room;
    for (int digit = 0; digit < ORDER_DIGITS; digit++) {
        uint32_t *counts = order->counts[digit], before = 0;
        if (counts[from[0].bits >> 8 * digit & 255] == count) {
            continue; /* the same in all */
        }
        for (int value = 0; value < ORDER_DIGIT_VALUES; value++) {
            uint32_t here = counts[value];
            counts[value] = before;
            before += here;
        }
        for (size_t at = 0; at < count; at++) {
            to[counts[from[at].bits >> 8 * digit & 255]++] = from[at];
        }
        OrderedRow *swapped = from;
        from = to;
        to = swapped;
    }
    if (from != rows) {
        memcpy(rows, from, count * sizeof *rows);
    }
}

static void order_all(Order *order, OrderedRow *rows, size_t count, int depth) {
    if (count <= ORDER_FEW_ROWS) {
        order_insert(order, rows, count);
        return;
    }
    order_fill_bits(order, rows, count);
    order_by_bits(order, rows, count);
    for (size_t first = 0, end; first < count; first = end) {
        for (end = first + 1; end < count && rows[end].bits == rows[first].bits; end++) {
        }
        if (end - first == count || depth == ORDER_DEPTH) {
            order_merge(order, rows + first, end - first);
        } else {
            order_all(order, rows + first, end - first, depth + 1);
        }
    }
}

/* ---- order_rows ---- */

static int order_take_column(OrderColumn *of, PyObject *tuple, size_t rows) {
    if (PyTuple_Check(tuple) && PyTuple_GET_SIZE(tuple) == 5) {
        if (column_take_bytes(&of->column, tuple) < 0) {
            return -1;
        }
    } else if (expect_fields(tuple, 4) < 0 || parse_index(PyTuple_GET_ITEM(tuple, 3), "width", &of->width) < 0 ||
               column_take_validity(&of->column, PyTuple_GET_ITEM(tuple, 0), PyTuple_GET_ITEM(tuple, 2)) < 0 ||
               PyObject_GetBuffer(PyTuple_GET_ITEM(tuple, 1), &of->column.data, PyBUF_SIMPLE) < 0) {
        return -1;
    } else if (of->width != 4 && of->width != 8) {
        PyErr_SetString(PyExc_ValueError, "numbers have 4 or 8 bytes");
        return -1;
    } else {
        size_t there = rows_after((size_t)of->column.data.len / of->width, of->column.first);
        of->column.rows = there < of->column.rows ? there : of->column.rows;
    }
    if (of->column.rows < rows) {
        PyErr_SetString(PyExc_ValueError, "a column has fewer rows than were named");
        return -1;
    }
    Slice slice;
    for (size_t row = 0; of->width == 0 && row < rows; row++) {
        if (!row_slice(&of->column, row, &slice)) {
            PyErr_SetString(PyExc_ValueError, "a row is outside of its column");
            return -1;
        }
    }
    return 0;
}

static PyObject *order_numbers(Order *order, size_t count) {
    OrderedRow *rows = PyMem_RawMalloc(2 * (count > 0 ? count : 1) * sizeof *rows);
    PyObject *numbers = PyBytes_FromStringAndSize(NULL, 4 * (Py_ssize_t)count);
    if (rows == NULL || numbers == NULL) {
        PyMem_RawFree(rows);
        Py_XDECREF(numbers);
        return PyErr_NoMemory();
    }
    uint8_t *to = (uint8_t *)PyBytes_AS_STRING(numbers);
    order->room = rows + count;
    PyThreadState *saved = release_gil_for(count * sizeof *rows);
    for (size_t at = 0; at < count; at++) {
        rows[at].row = (uint32_t)at;
    }
    order_all(order, rows, count, 0);
    for (size_t at = 0; at < count; at++) {
        memcpy(to + 4 * at, &rows[at].row, 4);
    }
    take_gil_back(saved);
    PyMem_RawFree(rows);
    return numbers;
}

/* order_rows(columns, count): the numbers of rows, u32, in the order of the columns. */
static PyObject *tree_order_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    size_t rows;
    if (expect_arguments("order_rows", count, 2, 2) < 0 || parse_index(arguments[1], "count", &rows) < 0) {
        return NULL;
    }
    if (!PyTuple_Check(arguments[0]) || PyTuple_GET_SIZE(arguments[0]) > ORDER_COLUMNS || rows > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "columns must be a tuple of up to 8, of up to 2147483647 rows");
        return NULL;
    }
    Order *order = PyMem_Calloc(1, sizeof *order);
    if (order == NULL) {
        return PyErr_NoMemory();
    }
    int columns = (int)PyTuple_GET_SIZE(arguments[0]);
    while (order->count < columns) {
        OrderColumn *of = &order->columns[order->count];
        order->count++;
        if (order_take_column(of, PyTuple_GET_ITEM(arguments[0], order->count - 1), rows) < 0) {
            break;
        }
    }
    PyObject *numbers = PyErr_Occurred() ? NULL : order_numbers(order, rows);
    for (int at = 0; at < order->count; at++) {
        column_release(&order->columns[at].column);
    }
    PyMem_Free(order);
    return numbers;
}

#endif
