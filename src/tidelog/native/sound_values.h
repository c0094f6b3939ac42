/* What the two indexes of a compaction say of values, as columns, and whether a blob file has exactly the values that they
   say. tests/oracles/sound.py gives the same answers; `sst/blob_file.py` draws blob files, pointers and rows of indexes.

   What an index says of a value is `said`: position u64, stored bytes u32, codec u8, and of a version also size u64,
   crc u32, LSN u64, stored bytes in the log u32; little-endian. */

#ifndef TIDELOG_SOUND_VALUES_H
#define TIDELOG_SOUND_VALUES_H

#include "tree_rows_files.h"

#define SAID_PLACE_BYTES (8 + 4 + 1)
#define SAID_BYTES (SAID_PLACE_BYTES + 8 + 4 + 8 + 4)
#define BLOB_HEAD_BYTES (4 + 4)
#define BLOB_TAIL_BYTES (4 + 4 + 8)
#define BLOB_VERSION 1
#define SAYS_PLACE 0
#define SAYS_VERSION 1
/* Values with files of their own come behind the blob files, spread over so many numbers. */
#define OWN_FILE_NUMBERS 1024

/* ---- said_places ---- */

typedef struct {
    uint64_t blob_files;
    size_t rows, name_bytes;
    uint8_t *files, *bytes, *said, *name_ends, *names; /* NULL while rows are counted */
} Saying;

static int complain_of_index(NativeState *state, const char *text) {
    PyErr_SetString(state->data_error, text);
    return -1;
}

static int say_value(NativeState *state, Saying *saying, Slice pointer, uint64_t position, const VersionCell *cell) {
    ValuePlace place;
    if (place_parse(state, pointer, &place) < 0) {
        return -1;
    }
    Slice name = {pointer.data, 0};
    if (place.blob_file == OWN_FILE) {
        name = (Slice){pointer.data + FILE_POINTER_HEAD_BYTES, pointer.size - FILE_POINTER_HEAD_BYTES};
        place.blob_file = (int64_t)(saying->blob_files + crc_of(name.data, name.size) % OWN_FILE_NUMBERS);
    } else if ((uint64_t)place.blob_file >= saying->blob_files) {
        return complain_of_index(state, "a pointer to a blob file that is not there");
    }
    if (saying->said != NULL) {
        uint8_t *at = saying->said + (cell == NULL ? SAID_PLACE_BYTES : SAID_BYTES) * saying->rows;
        store_u32(saying->files + 4 * saying->rows, (uint32_t)place.blob_file);
        store_u64(saying->bytes + 8 * saying->rows, place.byte);
        store_u64(at, position);
        store_u32(at + 8, place.stored_bytes);
        at[12] = place.codec;
        if (cell != NULL) {
            store_u64(at + 13, cell->size);
            store_u32(at + 21, cell->crc);
            store_u64(at + 25, cell->lsn);
            store_u32(at + 33, (uint32_t)cell->stored_bytes);
        }
        memcpy(saying->names + saying->name_bytes, name.data, name.size);
        store_u32(saying->name_ends + 4 * (saying->rows + 1), (uint32_t)(saying->name_bytes + name.size));
    }
    saying->rows++;
    saying->name_bytes += name.size;
    return 0;
}

static int say_place(NativeState *state, Saying *saying, Slice key, Slice pointer) {
    if (key.size != 8) {
        return complain_of_index(state, "a position that is none");
    }
    uint64_t position = 0;
    for (int at = 0; at < 8; at++) {
        position = position << 8 | key.data[at];
    }
    return say_value(state, saying, pointer, position, NULL);
}

static int say_version(NativeState *state, Saying *saying, Slice key, Slice value) {
    size_t cell_bytes = value.size < CELL_LENGTH_BYTES ? 0 : load_u16(value.data);
    if (cell_bytes == 0 || cell_bytes > value.size - CELL_LENGTH_BYTES) {
        return complain_of_index(state, "a row that has no cell");
    }
    Slice cell = {value.data + CELL_LENGTH_BYTES, cell_bytes};
    Slice pointer = {cell.data + cell_bytes, value.size - CELL_LENGTH_BYTES - cell_bytes};
    if (key.size == 0 || key.data[0] != 'o' || (cell.data[0] & 15) != CELL_POINTER) {
        return pointer.size == 0 ? 0 : complain_of_index(state, "a place of what has no value elsewhere");
    }
    VersionCell version;
    if (!version_cell_parse(cell, &version)) {
        return complain_of_index(state, "a version that is none");
    }
    return say_value(state, saying, pointer, version.position, &version);
}

static int say_rows(NativeState *state, Saying *saying, Slice rest, int is_values) {
    saying->rows = saying->name_bytes = 0;
    while (rest.size > 0) {
        Slice key, value;
        if (block_row(state, &rest, 0, &key, &value) < 0 ||
            (is_values ? say_place : say_version)(state, saying, key, value) < 0) {
            return -1;
        }
    }
    return 0;
}

/* said_places(raw, is_values, blob_files): (rows, (file numbers, bytes, said, name ends, names)). */
static PyObject *tree_said_places(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    NativeState *state = PyModule_GetState(module);
    Saying saying;
    Slice raw;
    memset(&saying, 0, sizeof saying);
    if (expect_arguments("said_places", count, 3, 3) < 0 || parse_bytes(arguments[0], "raw", &raw) < 0 ||
        parse_u64(arguments[2], &saying.blob_files) < 0) {
        return NULL;
    }
    int is_values = PyObject_IsTrue(arguments[1]);
    if (is_values < 0 || raw.size > INT32_MAX || saying.blob_files > INT32_MAX - OWN_FILE_NUMBERS) {
        PyErr_SetString(PyExc_OverflowError, "more bytes, or more files, than a column can hold");
        return NULL;
    }
    if (say_rows(state, &saying, raw, is_values) < 0) {
        return NULL;
    }
    const size_t sizes[] = {4 * saying.rows, 8 * saying.rows,
                            (is_values ? SAID_PLACE_BYTES : SAID_BYTES) * saying.rows, 4 * (saying.rows + 1),
                            saying.name_bytes};
    uint8_t *at[5];
    PyObject *columns = new_columns(sizes, 5, at);
    if (columns == NULL) {
        return NULL;
    }
    saying.files = at[0];
    saying.bytes = at[1];
    saying.said = at[2];
    saying.name_ends = at[3];
    saying.names = at[4];
    store_u32(saying.name_ends, 0);
    if (say_rows(state, &saying, raw, is_values) < 0) {
        Py_CLEAR(columns);
        return NULL;
    }
    return Py_BuildValue("(nN)", (Py_ssize_t)saying.rows, columns);
}

/* ---- sound_blob_file ---- */

typedef struct {
    Slice data;
    const uint8_t *entries; /* position u64, stored bytes u32, crc32 u32 */
    size_t count, values_end;
    uint64_t first_position, last_position;
} BlobFile;

static int blob_take(Slice data, BlobFile *blob) {
    if (data.size < BLOB_HEAD_BYTES + BLOB_TAIL_BYTES || memcmp(data.data, "TBLB", 4) != 0 ||
        load_u32(data.data + 4) != BLOB_VERSION || memcmp(data.data + data.size - 8, "TBLBEND1", 8) != 0) {
        return 0;
    }
    const uint8_t *tail = data.data + data.size - BLOB_TAIL_BYTES;
    blob->data = data;
    blob->count = load_u32(tail);
    size_t room = data.size - BLOB_HEAD_BYTES - BLOB_TAIL_BYTES;
    if (blob->count == 0 || blob->count > room / BLOB_ENTRY_BYTES) {
        return 0;
    }
    blob->values_end = BLOB_HEAD_BYTES + room - blob->count * BLOB_ENTRY_BYTES;
    blob->entries = data.data + blob->values_end;
    return crc_of(blob->entries, blob->count * BLOB_ENTRY_BYTES) == load_u32(tail + 4);
}

static int compare_positions(const void *left, const void *right) {
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

/* Every value has its checksum, all of them fill the file, and none comes twice; `positions` is room to sort them. */
static int blob_is_sound(BlobFile *blob, uint64_t *positions) {
    size_t byte = BLOB_HEAD_BYTES;
    for (size_t number = 0; number < blob->count; number++) {
        const uint8_t *entry = blob->entries + number * BLOB_ENTRY_BYTES;
        size_t stored = load_u32(entry + 8);
        if (stored == 0 || stored > blob->values_end - byte ||
            crc_of(blob->data.data + byte, stored) != load_u32(entry + 12)) {
            return 0;
        }
        positions[number] = load_u64(entry);
        byte += stored;
    }
    qsort(positions, blob->count, sizeof *positions, compare_positions);
    for (size_t number = 1; number < blob->count; number++) {
        if (positions[number - 1] == positions[number]) {
            return 0;
        }
    }
    blob->first_position = positions[0];
    blob->last_position = positions[blob->count - 1];
    return byte == blob->values_end;
}

typedef struct {
    size_t number, byte;  /* the value of the directory that rows are compared with, and where it begins */
    size_t values, bytes; /* those that are referred to */
    Slice place, version; /* what was said of it; empty when nothing was */
    PyObject *others;     /* rows whose values have to be decoded */
} Comparing;

/* Goes on to the value that begins at a byte. What was said of the one before has to be complete. */
static int go_to_value(const BlobFile *blob, Comparing *comparing, uint64_t byte) {
    if (comparing->place.size != 0 && comparing->version.size == 0) {
        return 0;
    }
    while (comparing->number < blob->count && comparing->byte < byte) {
        comparing->byte += load_u32(blob->entries + comparing->number * BLOB_ENTRY_BYTES + 8);
        comparing->number++;
    }
    comparing->place.size = comparing->version.size = 0;
    return comparing->number < blob->count && comparing->byte == byte;
}

/* Whether the index of values says what the directory says. */
static int is_sound_place(const BlobFile *blob, Comparing *comparing, Slice said) {
    const uint8_t *entry = blob->entries + comparing->number * BLOB_ENTRY_BYTES;
    if (said.size != SAID_PLACE_BYTES || comparing->place.size != 0 || memcmp(said.data, entry, 8 + 4) != 0) {
        return 0;
    }
    comparing->place = said;
    comparing->values++;
    comparing->bytes += load_u32(entry + 8);
    return 1;
}

/* Whether a version says the place that the other index says, and of the value what it is: -1 with the error set. */
static int is_sound_version(const BlobFile *blob, Comparing *comparing, Slice said, size_t row) {
    if (said.size != SAID_BYTES || comparing->place.size == 0 ||
        memcmp(said.data, comparing->place.data, SAID_PLACE_BYTES) != 0) {
        return 0;
    }
    if (comparing->version.size != 0) {
        return memcmp(said.data, comparing->version.data, SAID_BYTES) == 0;
    }
    comparing->version = said;
    const uint8_t *entry = blob->entries + comparing->number * BLOB_ENTRY_BYTES;
    uint64_t stored = load_u32(entry + 8), size = load_u64(said.data + 13);
    int is_plain = said.data[12] == 0;
    if (is_plain && load_u32(entry + 12) != load_u32(said.data + 21)) {
        return 0;
    }
    if (is_plain && stored >= METADATA_LENGTH_BYTES && stored - METADATA_LENGTH_BYTES == size &&
        load_u32(blob->data.data + comparing->byte) == 0) {
        return 1;
    }
    PyObject *number = PyLong_FromSize_t(row);
    int failed = number == NULL || PyList_Append(comparing->others, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 1;
}

typedef struct {
    Py_buffer bytes, sources;
    Column said;
    size_t count;
} SaidRows;

static int said_rows_take(SaidRows *rows, PyObject *const *arguments) {
    if (PyObject_GetBuffer(arguments[0], &rows->bytes, PyBUF_SIMPLE) < 0 ||
        PyObject_GetBuffer(arguments[1], &rows->sources, PyBUF_SIMPLE) < 0 ||
        column_take_bytes(&rows->said, arguments[2]) < 0) {
        return -1;
    }
    rows->count = (size_t)rows->bytes.len / 8;
    if ((size_t)rows->sources.len / 4 != rows->count || rows->said.rows < rows->count) {
        PyErr_SetString(PyExc_ValueError, "columns have different numbers of rows");
        return -1;
    }
    return 0;
}

static void said_rows_release(SaidRows *rows) {
    PyBuffer_Release(&rows->bytes);
    PyBuffer_Release(&rows->sources);
    column_release(&rows->said);
}

/* Rows are in order of (byte, source): 1 all of them are right, 0 one is not, -1 error. */
static int compare_said(const BlobFile *blob, const SaidRows *rows, Comparing *comparing) {
    comparing->byte = BLOB_HEAD_BYTES;
    uint64_t byte = 0;
    for (size_t row = 0; row < rows->count; row++) {
        Slice said;
        if (!row_slice(&rows->said, row, &said)) {
            return outside_column();
        }
        uint64_t at = native_u64(rows->bytes.buf, row);
        if (row == 0 || at != byte) {
            if ((row > 0 && at < byte) || !go_to_value(blob, comparing, at)) {
                return 0;
            }
            byte = at;
        }
        int got = native_u32(rows->sources.buf, row) == SAYS_PLACE ? is_sound_place(blob, comparing, said)
                                                                    : is_sound_version(blob, comparing, said, row);
        if (got <= 0) {
            return got;
        }
    }
    return comparing->place.size == 0 || comparing->version.size != 0;
}

/* sound_blob_file(data, bytes, sources, said): None when it is not, else (values, live values, live bytes, first and last
   position, rows whose values have to be decoded). */
static PyObject *tree_sound_blob_file(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    SaidRows rows;
    BlobFile blob;
    Comparing comparing;
    Slice data;
    memset(&rows, 0, sizeof rows);
    memset(&comparing, 0, sizeof comparing);
    if (expect_arguments("sound_blob_file", count, 4, 4) < 0 || parse_bytes(arguments[0], "data", &data) < 0) {
        return NULL;
    }
    PyObject *answer = NULL;
    comparing.others = PyList_New(0);
    if (comparing.others != NULL && said_rows_take(&rows, arguments + 1) == 0) {
        int got = blob_take(data, &blob);
        uint64_t *positions = got ? PyMem_Malloc(blob.count * sizeof *positions) : NULL;
        if (got && positions == NULL) {
            PyErr_NoMemory();
            got = -1;
        } else {
            got = got && blob_is_sound(&blob, positions) ? compare_said(&blob, &rows, &comparing) : 0;
        }
        PyMem_Free(positions);
        if (got == 0) {
            answer = Py_NewRef(Py_None);
        } else if (got > 0) {
            answer = Py_BuildValue("(nnnKKO)", (Py_ssize_t)blob.count, (Py_ssize_t)comparing.values,
                                   (Py_ssize_t)comparing.bytes, (unsigned long long)blob.first_position,
                                   (unsigned long long)blob.last_position, comparing.others);
        }
    }
    said_rows_release(&rows);
    Py_XDECREF(comparing.others);
    return answer;
}

#endif
