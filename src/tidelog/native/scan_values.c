/* The values of the rows of a scan: where they are, which of them come with one read, and what is in them.
   tests/oracles/scan_values.py gives the same answers; `engine/wal/scan_values.py` says how they are used together.

   A row is (key, size, seq, crc, codec, lsn, position, stored bytes, small value or None). A place is where its value is:

       byte u64, unit u32, length u32, codec u32, 0 u32       native; unit 2**32 - 1: nobody knows yet

   Invariants
   - Bytes are hostile: nothing is read that was not checked to lie inside of what was given.
   - A value that is complete here has the checksum of its row. Any other goes to Python as it is stored. */

#include "version_tuples.h"

#define NO_UNIT UINT32_MAX
#define INDEX_PLACE_BYTES 2
#define BLOB_KIND 1
#define BLOB_BYTES (1 + 1 + 4 + 8 + 4)
#define MAX_BLOB_CODEC 1

typedef struct {
    uint64_t byte;
    uint32_t unit, length, codec, zero;
} Place;

typedef struct {
    PyObject *rows, *values;
    Place *places;
    size_t count;
    Py_buffer buffer;
} Batch;

static void batch_release(Batch *batch) {
    PyBuffer_Release(&batch->buffer);
}

static int batch_take(Batch *batch, PyObject *const *arguments) {
    memset(batch, 0, sizeof *batch);
    batch->rows = arguments[0];
    batch->values = arguments[1];
    if (!PyList_Check(batch->rows) || !PyList_Check(batch->values)) {
        PyErr_SetString(PyExc_TypeError, "rows and values must be lists");
        return -1;
    }
    batch->count = (size_t)PyList_GET_SIZE(batch->rows);
    if (PyObject_GetBuffer(arguments[2], &batch->buffer, PyBUF_WRITABLE) < 0) {
        return -1;
    }
    batch->places = batch->buffer.buf;
    if ((size_t)PyList_GET_SIZE(batch->values) != batch->count ||
        (size_t)batch->buffer.len != batch->count * sizeof(Place)) {
        PyErr_SetString(PyExc_ValueError, "rows, values and places are not of the same count");
        batch_release(batch);
        return -1;
    }
    return 0;
}

enum { ROW_KEY, ROW_SIZE, ROW_SEQ, ROW_CRC, ROW_CODEC, ROW_LSN, ROW_POSITION, ROW_STORED_BYTES, ROW_INLINED };

static PyObject *row_of(const Batch *batch, size_t index) {
    PyObject *row = PyList_GET_ITEM(batch->rows, (Py_ssize_t)index);
    if (!PyTuple_Check(row) || PyTuple_GET_SIZE(row) != PLACE_COLUMNS) {
        PyErr_SetString(PyExc_TypeError, "a row has nine columns");
        return NULL;
    }
    return row;
}

static int row_number(PyObject *row, int column, uint64_t *number) {
    return parse_u64(PyTuple_GET_ITEM(row, column), number);
}

/* What a row says about where its value is. */
typedef struct {
    PyObject *row;
    uint64_t codec, position, stored_bytes;
} Wanted;

/* Whether the value of a row is in the log and nobody has said where; then what the row says. -1 with an error. */
static int batch_wants(const Batch *batch, size_t index, Wanted *wanted) {
    if (batch->places[index].unit != NO_UNIT || PyList_GET_ITEM(batch->values, (Py_ssize_t)index) != Py_None) {
        return 0;
    }
    wanted->row = row_of(batch, index);
    if (wanted->row == NULL || row_number(wanted->row, ROW_CODEC, &wanted->codec) < 0 ||
        row_number(wanted->row, ROW_POSITION, &wanted->position) < 0 ||
        row_number(wanted->row, ROW_STORED_BYTES, &wanted->stored_bytes) < 0) {
        return -1;
    }
    return PyTuple_GET_ITEM(wanted->row, ROW_INLINED) == Py_None;
}

/* (key, size, seq, crc, data, {}) of a plain value; (stored value, codec) of any other. */
static PyObject *value_object(PyObject *row, Slice stored, uint64_t codec) {
    uint64_t size, crc;
    if (row_number(row, ROW_SIZE, &size) < 0 || row_number(row, ROW_CRC, &crc) < 0) {
        return NULL;
    }
    if (crc > UINT32_MAX || !value_is_plain(stored, codec, size, (uint32_t)crc)) {
        return Py_BuildValue("(y#K)", (const char *)stored.data, (Py_ssize_t)stored.size, (unsigned long long)codec);
    }
    PyObject *items[PLAIN_COLUMNS] = {[4] = bytes_object(stored.data + METADATA_LENGTH_BYTES, size),
                                      [5] = PyDict_New()};
    for (Py_ssize_t column = 0; column < 4; column++) {
        items[column] = Py_NewRef(PyTuple_GET_ITEM(row, column));
    }
    return tuple_of_all(items, PLAIN_COLUMNS);
}

/* ---- cut_rows ---- */

/* cut_rows(rows, start, most_rows, most_bytes): where the next batch ends. Its values have no more bytes than that without
   the last one; there is a row in it if there is one left. */
static PyObject *scan_cut_rows(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    size_t at, most_rows;
    uint64_t most_bytes, sum = 0;
    if (expect_arguments("cut_rows", count, 4, 4) < 0 || parse_index(arguments[1], "start", &at) < 0 ||
        parse_index(arguments[2], "most_rows", &most_rows) < 0 || parse_u64(arguments[3], &most_bytes) < 0) {
        return NULL;
    }
    if (!PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "rows must be a list");
        return NULL;
    }
    Batch batch = {.rows = arguments[0], .count = (size_t)PyList_GET_SIZE(arguments[0])};
    for (size_t taken = 0; at < batch.count && taken < most_rows && sum < most_bytes; at++, taken++) {
        uint64_t size, stored_bytes;
        PyObject *row = row_of(&batch, at);
        if (row == NULL || row_number(row, ROW_SIZE, &size) < 0 ||
            row_number(row, ROW_STORED_BYTES, &stored_bytes) < 0) {
            return NULL;
        }
        size = size > stored_bytes ? size : stored_bytes;
        sum = size > UINT64_MAX - sum ? UINT64_MAX : sum + size;
    }
    return PyLong_FromSize_t(at);
}

/* ---- unfinished ---- */

/* unfinished(values): the numbers of those that are not rows with data. */
static PyObject *scan_unfinished(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    if (expect_arguments("unfinished", count, 1, 1) < 0) {
        return NULL;
    }
    if (!PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "values must be a list");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (Py_ssize_t at = 0; found != NULL && at < PyList_GET_SIZE(arguments[0]); at++) {
        PyObject *value = PyList_GET_ITEM(arguments[0], at);
        if (PyTuple_Check(value) && PyTuple_GET_SIZE(value) == PLAIN_COLUMNS) {
            continue;
        }
        PyObject *number = PyLong_FromSsize_t(at);
        if (number == NULL || PyList_Append(found, number) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(number);
    }
    return found;
}

/* ---- start_values ---- */

static int start_value(Batch *batch, size_t index) {
    uint64_t codec;
    PyObject *row = row_of(batch, index), *value = NULL;
    if (row == NULL || row_number(row, ROW_CODEC, &codec) < 0) {
        return -1;
    }
    PyObject *inlined = PyTuple_GET_ITEM(row, ROW_INLINED);
    if (PyBytes_Check(inlined) && codec != CODEC_OF_FILES) {
        Slice stored = {(const uint8_t *)PyBytes_AS_STRING(inlined), (size_t)PyBytes_GET_SIZE(inlined)};
        value = value_object(row, stored, codec);
    } else {
        value = Py_NewRef(Py_None);
    }
    if (value == NULL) {
        return -1;
    }
    PyList_SET_ITEM(batch->values, (Py_ssize_t)index, value);
    return value == Py_None;
}

/* start_values(rows): (values, how many are not there): those that are in the index. */
static PyObject *scan_start_values(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    if (expect_arguments("start_values", count, 1, 1) < 0) {
        return NULL;
    }
    if (!PyList_Check(arguments[0])) {
        PyErr_SetString(PyExc_TypeError, "rows must be a list");
        return NULL;
    }
    Batch batch = {.rows = arguments[0], .count = (size_t)PyList_GET_SIZE(arguments[0])};
    batch.values = PyList_New((Py_ssize_t)batch.count);
    Py_ssize_t missing = 0;
    int got = batch.values == NULL ? -1 : 0;
    for (size_t index = 0; got >= 0 && index < batch.count; index++) {
        got = start_value(&batch, index);
        missing += got;
    }
    if (got < 0) {
        Py_XDECREF(batch.values);
        return NULL;
    }
    return Py_BuildValue("(Nn)", batch.values, missing);
}

/* ---- place_in_log ---- */

typedef struct {
    Py_buffer starts, ends;
    size_t count;
} Files;

static void files_release(Files *files) {
    PyBuffer_Release(&files->starts);
    PyBuffer_Release(&files->ends);
}

static int files_take(Files *files, PyObject *starts, PyObject *ends) {
    memset(files, 0, sizeof *files);
    if (PyObject_GetBuffer(starts, &files->starts, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(ends, &files->ends, PyBUF_SIMPLE) < 0) {
        files_release(files);
        return -1;
    }
    files->count = (size_t)files->starts.len / 8;
    if (files->starts.len % 8 != 0 || files->ends.len != files->starts.len) {
        PyErr_SetString(PyExc_ValueError, "starts and ends are not arrays of the same count");
        files_release(files);
        return -1;
    }
    return 0;
}

/* The last file that begins at or before a position, if the value is inside of it. */
static int file_of(const Files *files, const Wanted *wanted, size_t *found) {
    size_t low = 0, high = files->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (native_u64(files->starts.buf, middle) <= wanted->position) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low == 0) {
        return 0;
    }
    *found = low - 1;
    uint64_t end = native_u64(files->ends.buf, low - 1);
    return wanted->position <= end && wanted->stored_bytes <= end - wanted->position;
}

/* The first row from `start` on that is still wanted, or the number of rows; -1 with an error. */
static Py_ssize_t place_all_in_log(Batch *batch, const Files *files, uint32_t first_unit, size_t start) {
    size_t next = batch->count;
    for (size_t index = 0; index < batch->count; index++) {
        Wanted wanted;
        size_t file;
        int wants = batch_wants(batch, index, &wanted);
        if (wants < 0) {
            return -1;
        }
        if (!wants) {
            continue;
        }
        if (wanted.stored_bytes > UINT32_MAX || wanted.codec > MAX_BLOB_CODEC || !file_of(files, &wanted, &file)) {
            next = next == batch->count && index >= start ? index : next;
            continue;
        }
        batch->places[index] = (Place){.byte = wanted.position - native_u64(files->starts.buf, file),
                                       .unit = first_unit + (uint32_t)file,
                                       .length = (uint32_t)wanted.stored_bytes,
                                       .codec = (uint32_t)wanted.codec};
    }
    return (Py_ssize_t)next;
}

/* place_in_log(rows, values, places, first_unit, starts, ends, start): places values in files that have the log from and
   to these positions; the first row from `start` on whose value is in none of them. */
static PyObject *scan_place_in_log(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Batch batch;
    Files files;
    uint32_t first_unit;
    size_t start;
    if (expect_arguments("place_in_log", count, 7, 7) < 0 ||
        parse_u32(arguments[3], "first_unit", &first_unit) < 0 || parse_index(arguments[6], "start", &start) < 0 ||
        batch_take(&batch, arguments) < 0) {
        return NULL;
    }
    Py_ssize_t next = -1;
    if (files_take(&files, arguments[4], arguments[5]) == 0) {
        if (files.count < NO_UNIT - first_unit) {
            next = place_all_in_log(&batch, &files, first_unit, start);
        } else {
            PyErr_SetString(PyExc_OverflowError, "too many files");
        }
        files_release(&files);
    }
    batch_release(&batch);
    return next < 0 ? NULL : PyLong_FromSsize_t(next);
}

/* ---- place_in_index ---- */

typedef struct {
    Slice prefix, rest; /* of the block that is being read */
    PyObject *blocks;
    Py_ssize_t next_block;
    uint32_t first_unit;
    int is_reverse;
    uint8_t *key; /* of the row that is looked for */
    size_t key_bytes, room;
} Joining;

/* The key of a row in the tree: prefix, name, NUL, inverted seq. */
static int joining_aim(Joining *joining, PyObject *row) {
    Py_ssize_t name_bytes;
    uint64_t seq;
    const char *name = PyUnicode_AsUTF8AndSize(PyTuple_GET_ITEM(row, 0), &name_bytes);
    if (name == NULL || parse_u64(PyTuple_GET_ITEM(row, 2), &seq) < 0) {
        return -1;
    }
    joining->key_bytes = joining->prefix.size + (size_t)name_bytes + 1 + SEQ_BYTES;
    if (joining->key_bytes > joining->room) {
        uint8_t *grown = PyMem_Realloc(joining->key, 2 * joining->key_bytes);
        if (grown == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        joining->key = grown;
        joining->room = 2 * joining->key_bytes;
    }
    uint8_t *at = joining->key;
    memcpy(at, joining->prefix.data, joining->prefix.size);
    at += joining->prefix.size;
    memcpy(at, name, (size_t)name_bytes);
    at += name_bytes;
    *at++ = 0;
    for (int shift = 56; shift >= 0; shift -= 8) {
        *at++ = (uint8_t)(~seq >> shift);
    }
    return 0;
}

/* The row of a block at its beginning; 0 when there is none, or not all of it. */
static int first_row(Slice rest, Slice *key, Slice *value) {
    if (rest.size < 4) {
        return 0;
    }
    size_t key_bytes = load_u16(rest.data), value_bytes = load_u16(rest.data + 2);
    if (rest.size - 4 < key_bytes + value_bytes) {
        return 0;
    }
    *key = (Slice){rest.data + 4, key_bytes};
    *value = (Slice){key->data + key_bytes, value_bytes};
    return 1;
}

/* The row of the blocks that comes next; 0 behind the last one, -1 with an error. */
static int joining_next(Joining *joining, Slice *key, Slice *value) {
    while (!first_row(joining->rest, key, value)) {
        if (joining->next_block >= PyList_GET_SIZE(joining->blocks)) {
            return 0;
        }
        if (parse_bytes(PyList_GET_ITEM(joining->blocks, joining->next_block++), "a block", &joining->rest) < 0) {
            return -1;
        }
    }
    return 1;
}

/* The pointer behind the cell of a version, if it is one into a blob file and the value was where it is now. */
static int blob_place(Slice value, const Wanted *wanted, uint32_t first_unit, Place *place) {
    VersionCell cell;
    size_t cell_bytes = value.size < INDEX_PLACE_BYTES ? 0 : load_u16(value.data);
    if (value.size < INDEX_PLACE_BYTES + cell_bytes + BLOB_BYTES ||
        !version_cell_parse((Slice){value.data + INDEX_PLACE_BYTES, cell_bytes}, &cell) || cell.flags != CELL_POINTER ||
        cell.position != wanted->position) {
        return 0;
    }
    const uint8_t *at = value.data + INDEX_PLACE_BYTES + cell_bytes;
    uint32_t blob_file = load_u32(at + 2);
    if (value.size != INDEX_PLACE_BYTES + cell_bytes + BLOB_BYTES || at[0] != BLOB_KIND || at[1] > MAX_BLOB_CODEC ||
        blob_file >= NO_UNIT - first_unit) {
        return 0;
    }
    *place = (Place){
        .byte = load_u64(at + 6), .unit = first_unit + blob_file, .length = load_u32(at + 14), .codec = at[1]};
    return 1;
}

static Py_ssize_t place_all_in_index(Batch *batch, Joining *joining) {
    Py_ssize_t placed = 0;
    Slice key, value;
    int is_more = joining_next(joining, &key, &value);
    for (size_t number = 0; is_more > 0 && number < batch->count; number++) {
        size_t index = joining->is_reverse ? batch->count - 1 - number : number;
        Wanted wanted;
        int wants = batch_wants(batch, index, &wanted);
        if (wants < 0 || (wants && joining_aim(joining, wanted.row) < 0)) {
            return -1;
        }
        while (wants && is_more > 0) {
            size_t least = key.size < joining->key_bytes ? key.size : joining->key_bytes;
            int order = memcmp(key.data, joining->key, least);
            order = order != 0 ? order : (key.size > joining->key_bytes) - (key.size < joining->key_bytes);
            if (order > 0) {
                break;
            }
            placed += order == 0 && blob_place(value, &wanted, joining->first_unit, &batch->places[index]);
            wants = order != 0;
            size_t row_bytes = 4 + key.size + value.size;
            joining->rest = (Slice){joining->rest.data + row_bytes, joining->rest.size - row_bytes};
            is_more = joining_next(joining, &key, &value);
        }
    }
    return is_more < 0 ? -1 : placed;
}

/* place_in_index(rows, values, places, first_unit, prefix, blocks, is_reverse): how many have a pointer in blocks of the
   version index of a compaction, which follow each other. Rows are in the order of their keys, or in reverse. */
static PyObject *scan_place_in_index(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Batch batch;
    Joining joining;
    memset(&joining, 0, sizeof joining);
    if (expect_arguments("place_in_index", count, 7, 7) < 0 ||
        parse_u32(arguments[3], "first_unit", &joining.first_unit) < 0 ||
        parse_bytes(arguments[4], "prefix", &joining.prefix) < 0) {
        return NULL;
    }
    joining.blocks = arguments[5];
    if (!PyList_Check(joining.blocks)) {
        PyErr_SetString(PyExc_TypeError, "blocks must be a list");
        return NULL;
    }
    joining.is_reverse = PyObject_IsTrue(arguments[6]);
    if (joining.is_reverse < 0 || batch_take(&batch, arguments) < 0) {
        return NULL;
    }
    Py_ssize_t placed = place_all_in_index(&batch, &joining);
    PyMem_Free(joining.key);
    batch_release(&batch);
    return placed < 0 ? NULL : PyLong_FromSsize_t(placed);
}

/* ---- group_places ---- */

typedef struct {
    Place place;
    uint32_t index;
} Numbered;

static int compare_numbered(const void *left, const void *right) {
    const Numbered *a = left, *b = right;
    if (a->place.unit != b->place.unit) {
        return a->place.unit < b->place.unit ? -1 : 1;
    }
    if (a->place.byte != b->place.byte) {
        return a->place.byte < b->place.byte ? -1 : 1;
    }
    return a->index < b->index ? -1 : a->index > b->index;
}

static uint64_t end_of(const Place *place) {
    return place->byte > UINT64_MAX - place->length ? UINT64_MAX : place->byte + place->length;
}

/* Adds (unit, first byte, end, indexes) of some that follow each other. */
static int add_group(PyObject *groups, const Numbered *some, size_t count, uint64_t end) {
    PyObject *indexes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * count));
    if (indexes == NULL) {
        return -1;
    }
    for (size_t at = 0; at < count; at++) {
        memcpy(PyBytes_AS_STRING(indexes) + 4 * at, &some[at].index, 4);
    }
    PyObject *group = Py_BuildValue("(IKKN)", (unsigned int)some->place.unit, (unsigned long long)some->place.byte,
                                    (unsigned long long)end, indexes);
    int got = group == NULL ? -1 : PyList_Append(groups, group);
    Py_XDECREF(group);
    return got;
}

static int group_all(PyObject *groups, Batch *Py_UNUSED(batch), const Numbered *sorted, size_t count, uint64_t gap,
                     uint64_t most) {
    size_t first = 0;
    uint64_t end = 0;
    for (size_t at = 0; at < count; at++) {
        const Place *place = &sorted[at].place, *begin = &sorted[first].place;
        uint64_t behind = end_of(place);
        int is_far = at > first && (place->unit != begin->unit || (place->byte > end && place->byte - end > gap) ||
                                    behind - begin->byte > most);
        if (is_far) {
            if (add_group(groups, sorted + first, at - first, end) < 0) {
                return -1;
            }
            first = at;
        }
        end = at == first || behind > end ? behind : end;
    }
    return count > first ? add_group(groups, sorted + first, count - first, end) : 0;
}

typedef int (*Grouping)(PyObject *groups, Batch *batch, const Numbered *sorted, size_t count, uint64_t gap,
                        uint64_t most);

/* The places of values that are not there, in order, as a call groups them. */
static PyObject *grouped(const char *name, PyObject *const *arguments, Py_ssize_t count, Grouping group) {
    uint64_t gap, most;
    Batch batch;
    PyObject *taken[] = {arguments[0], arguments[0], count > 1 ? arguments[1] : NULL};
    if (expect_arguments(name, count, 4, 4) < 0 || parse_u64(arguments[2], &gap) < 0 ||
        parse_u64(arguments[3], &most) < 0 || batch_take(&batch, taken) < 0) {
        return NULL;
    }
    PyObject *groups = PyList_New(0);
    Numbered *sorted = PyMem_Malloc((batch.count + 1) * sizeof(Numbered));
    if (groups != NULL && sorted == NULL) {
        PyErr_NoMemory();
    }
    int got = groups == NULL || sorted == NULL ? -1 : 0;
    size_t found = 0;
    for (size_t index = 0; got == 0 && index < batch.count; index++) {
        if (batch.places[index].unit != NO_UNIT && PyList_GET_ITEM(batch.values, (Py_ssize_t)index) == Py_None) {
            sorted[found++] = (Numbered){batch.places[index], (uint32_t)index};
        }
    }
    if (got == 0) {
        Py_BEGIN_ALLOW_THREADS
        qsort(sorted, found, sizeof(Numbered), compare_numbered);
        Py_END_ALLOW_THREADS
        got = group(groups, &batch, sorted, found, gap, most);
    }
    PyMem_Free(sorted);
    batch_release(&batch);
    if (got < 0) {
        Py_CLEAR(groups);
    }
    return groups;
}

/* group_places(values, places, gap_bytes, range_bytes): [(unit, first byte, end, indexes)] of the places of values that
   are not there, in order; neighbours that come with one read together. */
static PyObject *scan_group_places(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    return grouped("group_places", arguments, count, group_all);
}

/* ---- join_places ---- */

/* Ranges of a unit that are read together: pairs (first byte, bytes), and what they have in all. */
typedef struct {
    uint64_t *pairs;
    uint32_t *indexes;
    size_t pair_count, index_count;
    uint32_t unit;
    uint64_t sum;
} Joined;

/* Adds (unit, ranges, indexes), and begins the next. */
static int joined_add(PyObject *groups, Joined *joined) {
    PyObject *group = Py_BuildValue("(Iy#y#)", (unsigned int)joined->unit, (const char *)joined->pairs,
                                    (Py_ssize_t)(16 * joined->pair_count), (const char *)joined->indexes,
                                    (Py_ssize_t)(4 * joined->index_count));
    int got = group == NULL ? -1 : PyList_Append(groups, group);
    Py_XDECREF(group);
    joined->pair_count = joined->index_count = 0;
    joined->sum = 0;
    return got;
}

static int join_sorted(PyObject *groups, Batch *batch, const Numbered *sorted, size_t count, uint64_t gap,
                       uint64_t most, Joined *joined) {
    for (size_t at = 0; at < count; at++) {
        const Place *place = &sorted[at].place;
        uint64_t *last = joined->pairs + 2 * joined->pair_count - 2; /* not looked at if there is none */
        uint64_t behind = end_of(place), end = joined->pair_count == 0 ? 0 : last[0] + last[1];
        int is_near = joined->pair_count > 0 && (place->byte <= end || place->byte - end <= gap);
        uint64_t grows = !is_near ? behind - place->byte : behind > end ? behind - end : 0;
        if (joined->index_count > 0 &&
            (place->unit != joined->unit || joined->sum >= most || grows > most - joined->sum)) {
            if (joined_add(groups, joined) < 0) {
                return -1;
            }
            is_near = 0;
            grows = behind - place->byte;
        }
        if (!is_near) {
            last = joined->pairs + 2 * joined->pair_count++;
            last[0] = place->byte;
            last[1] = 0;
        }
        joined->unit = place->unit;
        joined->indexes[joined->index_count++] = sorted[at].index;
        batch->places[sorted[at].index].byte = joined->sum - last[1] + (place->byte - last[0]);
        last[1] += grows;
        joined->sum += grows;
    }
    return joined->index_count > 0 ? joined_add(groups, joined) : 0;
}

static int join_all(PyObject *groups, Batch *batch, const Numbered *sorted, size_t count, uint64_t gap, uint64_t most) {
    Joined joined = {.pairs = PyMem_Malloc((count + 1) * 16), .indexes = PyMem_Malloc((count + 1) * 4)};
    int got = -1;
    if (joined.pairs == NULL || joined.indexes == NULL) {
        PyErr_NoMemory();
    } else {
        got = join_sorted(groups, batch, sorted, count, gap, most, &joined);
    }
    PyMem_Free(joined.pairs);
    PyMem_Free(joined.indexes);
    return got;
}

/* join_places(values, places, gap_bytes, most_bytes): [(unit, ranges, indexes)] of the places of values that are not
   there, in order: ranges of one unit that have so many bytes at most, or one value of more, and come one after the
   other. The places are those in what comes, from here on. */
static PyObject *scan_join_places(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    return grouped("join_places", arguments, count, join_all);
}

/* ---- take_values ---- */

/* How many bytes the values had that were taken; -1 with an error. */
static Py_ssize_t take_all(Batch *batch, const Py_buffer *indexes, Slice data, uint64_t first_byte) {
    Py_ssize_t used = 0;
    for (size_t number = 0; number < (size_t)indexes->len / 4; number++) {
        uint32_t index = native_u32(indexes->buf, number);
        if (index >= batch->count) {
            PyErr_SetString(PyExc_ValueError, "an index is behind the rows");
            return -1;
        }
        const Place *place = &batch->places[index];
        uint64_t begin = place->byte - first_byte;
        if (place->byte < first_byte || begin > data.size || place->length > data.size - begin) {
            continue; /* the file ends before it */
        }
        PyObject *row = row_of(batch, index);
        PyObject *value =
            row == NULL ? NULL : value_object(row, (Slice){data.data + begin, place->length}, place->codec);
        if (value == NULL || PyList_SetItem(batch->values, (Py_ssize_t)index, value) < 0) {
            return -1;
        }
        used += place->length;
    }
    return used;
}

/* take_values(rows, values, places, indexes, data, first_byte): how many bytes of the data were values of these rows. */
static PyObject *scan_take_values(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    Batch batch;
    uint64_t first_byte;
    Py_buffer indexes, data;
    if (expect_arguments("take_values", count, 6, 6) < 0 || parse_u64(arguments[5], &first_byte) < 0 ||
        batch_take(&batch, arguments) < 0) {
        return NULL;
    }
    Py_ssize_t used = -1;
    if (PyObject_GetBuffer(arguments[3], &indexes, PyBUF_SIMPLE) == 0) {
        if (PyObject_GetBuffer(arguments[4], &data, PyBUF_SIMPLE) == 0) {
            used = take_all(&batch, &indexes, (Slice){data.buf, (size_t)data.len}, first_byte);
            PyBuffer_Release(&data);
        }
        PyBuffer_Release(&indexes);
    }
    batch_release(&batch);
    return used < 0 ? NULL : PyLong_FromSsize_t(used);
}

PyMethodDef scan_value_methods[] = {
    METHOD("cut_rows", scan_cut_rows, "cut_rows(rows, start, most_rows, most_bytes): where the next batch ends."),
    METHOD("unfinished", scan_unfinished, "unfinished(values): the numbers of those that are not rows with data."),
    METHOD("start_values", scan_start_values, "start_values(rows): (values, how many are not there)."),
    METHOD("place_in_log", scan_place_in_log,
           "place_in_log(rows, values, places, first_unit, starts, ends, start): the first row that is in none."),
    METHOD("place_in_index", scan_place_in_index,
           "place_in_index(rows, values, places, first_unit, prefix, blocks, is_reverse): how many are in blob files."),
    METHOD("group_places", scan_group_places,
           "group_places(values, places, gap_bytes, range_bytes): [(unit, first byte, end, indexes)]."),
    METHOD("join_places", scan_join_places,
           "join_places(values, places, gap_bytes, most_bytes): [(unit, ranges, indexes)]."),
    METHOD("take_values", scan_take_values,
           "take_values(rows, values, places, indexes, data, first_byte): how many bytes were values."),
    {NULL, NULL, 0, NULL},
};
