/* Rows of the tree in order of key: the digest of what is to be seen of them, a sample of their keys, and what retention
   lets go. */

#ifndef TIDELOG_TREE_ROWS_SURVEY_H
#define TIDELOG_TREE_ROWS_SURVEY_H

#include "arrow.h"
#include "blake2b.h"
#include "crc32.h"
#include "version_rows.h"

/* 'o', lengths of bucket and name, seq, size, crc: as `mvcc/digest.py` has them. */
#define THING_HEAD_BYTES (1 + 2 + 2 + 8 + 8 + 4)

typedef struct {
    Column keys, cells;
    size_t count;
} TreeRows;

static void tree_rows_release(TreeRows *rows) {
    column_release(&rows->keys);
    column_release(&rows->cells);
}

/* Takes two columns of bytes; `count` is how many rows both must have. */
static int tree_rows_take(TreeRows *rows, PyObject *keys, PyObject *cells, PyObject *count) {
    memset(rows, 0, sizeof *rows);
    if (parse_index(count, "count", &rows->count) < 0 || column_take_bytes(&rows->keys, keys) < 0 ||
        column_take_bytes(&rows->cells, cells) < 0) {
        return -1;
    }
    if (rows->keys.rows < rows->count || rows->cells.rows < rows->count) {
        PyErr_SetString(PyExc_ValueError, "a column has fewer rows than were named");
        return -1;
    }
    return 0;
}

static int outside_column(void) {
    PyErr_SetString(PyExc_ValueError, "a row is outside of its column");
    return -1;
}

static int tree_row(const TreeRows *rows, size_t row, Slice *key, Slice *cell) {
    return row_slice(&rows->keys, row, key) && row_slice(&rows->cells, row, cell) ? 0 : outside_column();
}

/* ---- survey_rows ---- */

typedef struct {
    uint64_t total[4], things;
    uint8_t *thing; /* what is hashed; room for the longest names */
} ThingSum;

static void sum_thing(ThingSum *sum, const Version *version) {
    uint8_t *at = sum->thing;
    size_t size = THING_HEAD_BYTES + version->bucket.size + version->name.size;
    at[0] = 'o';
    store_u16(at + 1, (uint16_t)version->bucket.size);
    store_u16(at + 3, (uint16_t)version->name.size);
    store_u64(at + 5, version->seq);
    store_u64(at + 13, version->cell.size);
    store_u32(at + 21, version->cell.crc);
    memcpy(at + THING_HEAD_BYTES, version->bucket.data, version->bucket.size);
    memcpy(at + THING_HEAD_BYTES + version->bucket.size, version->name.data, version->name.size);
    uint64_t hash[4], carry = 0;
    blake2b_256(sum->thing, size, hash);
    for (int word = 0; word < 4; word++) {
        uint64_t with = sum->total[word] + carry;
        carry = with < carry;
        sum->total[word] = with + hash[word];
        carry += sum->total[word] < with;
    }
    sum->things++;
}

/* One row; -1 with the error set. Cells of what is not to be seen are not looked at. */
static int survey_row(NativeState *state, Looking *looking, ThingSum *sum, Slice key, Slice cell) {
    if (key.size > SEQ_BYTES && key.data[0] == 'b') {
        return 0;
    }
    Version version;
    if (key.size > UINT16_MAX || !parse_version(key, &version)) {
        PyErr_SetString(state->data_error, "a row that is no version of an object");
        return -1;
    }
    Slice prefix = {key.data, key.size - SEQ_BYTES};
    if (version.seq > looking->seq || (looking->settled.size == prefix.size &&
                                       memcmp(looking->settled.data, prefix.data, prefix.size) == 0)) {
        return 0;
    }
    looking->settled = prefix;
    if (!version_cell_parse(cell, &version.cell)) {
        PyErr_Format(state->data_error, "invalid version: %zu bytes", cell.size);
        return -1;
    }
    if (version.cell.flags != CELL_TOMBSTONE && is_of_bucket(looking, &version)) {
        sum_thing(sum, &version);
    }
    return 0;
}

static int add_sample(PyObject *samples, Slice key) {
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)key.data, (Py_ssize_t)key.size);
    int failed = bytes == NULL || PyList_Append(samples, bytes) < 0;
    Py_XDECREF(bytes);
    return failed ? -1 : 0;
}

static int survey_all(NativeState *state, const TreeRows *rows, Looking *looking, size_t every, ThingSum *sum,
                      PyObject *samples) {
    for (size_t row = 0; row < rows->count; row++) {
        Slice key, cell;
        if (tree_row(rows, row, &key, &cell) < 0 || survey_row(state, looking, sum, key, cell) < 0) {
            return -1;
        }
        if (every != 0 && crc_of(key.data, key.size) % every == 0 && add_sample(samples, key) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *surveyed(NativeState *state, const TreeRows *rows, Looking *looking, size_t every) {
    ThingSum sum = {{0}, 0, PyMem_Malloc(THING_HEAD_BYTES + UINT16_MAX)};
    PyObject *samples = PyList_New(0), *answer = NULL;
    if (sum.thing == NULL) {
        PyErr_NoMemory();
    } else if (samples != NULL && survey_all(state, rows, looking, every, &sum, samples) == 0) {
        uint8_t total[BLAKE2B_BYTES];
        for (int word = 0; word < 4; word++) {
            store_u64(total + 8 * word, sum.total[word]);
        }
        answer = Py_BuildValue("(y#Ky#O)", (const char *)total, (Py_ssize_t)sizeof total, (unsigned long long)sum.things,
                               (const char *)looking->settled.data, (Py_ssize_t)looking->settled.size, samples);
    }
    PyMem_Free(sum.thing);
    Py_XDECREF(samples);
    return answer;
}

/* survey_rows(keys, cells, count, seq, every, settled, bucket_ends, bucket_names, bucket_seqs, bucket_orders) */
static PyObject *tree_survey_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    TreeRows rows;
    Looking looking;
    size_t every;
    memset(&looking, 0, sizeof looking);
    memset(&rows, 0, sizeof rows);
    if (expect_arguments("survey_rows", count, 10, 10) < 0 || parse_u64(arguments[3], &looking.seq) < 0 ||
        parse_index(arguments[4], "every", &every) < 0 || take_slice(arguments[5], &looking.settled) < 0) {
        return NULL;
    }
    PyObject *answer = NULL;
    if (take_created(arguments + 6, &looking.created) == 0 &&
        tree_rows_take(&rows, arguments[0], arguments[1], arguments[2]) == 0) {
        answer = surveyed(PyModule_GetState(module), &rows, &looking, every);
    }
    created_release(&looking.created);
    tree_rows_release(&rows);
    return answer;
}

/* ---- judge_rows ---- */

/* What is known of the name whose versions are being looked at, newest first. */
typedef struct {
    Slice prefix;
    size_t kept, keep;
    int is_bucket;
    size_t *tombstones; /* those of the kept ones that are deletions, and behind which nothing was kept */
    size_t tombstone_count;
} Judged;

typedef struct {
    Looking looking;
    size_t keep_versions;
    uint8_t *goes; /* a byte a row */
} Judging;

static void end_of_name(Judging *judging, Judged *name) {
    for (size_t at = 0; at < name->tombstone_count; at++) {
        judging->goes[name->tombstones[at]] = 1;
    }
    name->tombstone_count = 0;
}

/* The next older version of a name. As `mvcc/vacuum_rules.py` decides it. */
static int judge_version(NativeState *state, Judging *judging, Judged *name, size_t row, Slice key, Slice cell) {
    Version version;
    uint64_t left = 0;
    for (int at = 0; at < SEQ_BYTES; at++) {
        left = left << 8 | key.data[key.size - SEQ_BYTES + (size_t)at];
    }
    if (cell.size == 0 || (!name->is_bucket && !parse_version(key, &version))) {
        PyErr_SetString(state->data_error, "a row that is no version of an object");
        return -1;
    }
    if (~left > judging->looking.seq) {
        return 0;
    }
    int is_hidden = 0;
    if (!name->is_bucket && name->kept < name->keep) {
        if (!version_cell_parse(cell, &version.cell)) {
            PyErr_Format(state->data_error, "invalid version: %zu bytes", cell.size);
            return -1;
        }
        is_hidden = !is_of_bucket(&judging->looking, &version);
    }
    if (name->kept >= name->keep || is_hidden) {
        judging->goes[row] = 1;
        return 0;
    }
    name->kept++;
    if (cell.data[0] & 1) {
        name->tombstones[name->tombstone_count++] = row;
    } else {
        name->tombstone_count = 0;
    }
    return 0;
}

static int judge_all(NativeState *state, const TreeRows *rows, Judging *judging, size_t *tombstones) {
    Judged name = {.tombstones = tombstones};
    for (size_t row = 0; row < rows->count; row++) {
        Slice key, cell;
        if (tree_row(rows, row, &key, &cell) < 0) {
            return -1;
        }
        if (key.size <= SEQ_BYTES) {
            PyErr_SetString(state->data_error, "a row that is no version of an object");
            return -1;
        }
        Slice prefix = {key.data, key.size - SEQ_BYTES};
        if (row == 0 || compare_slices(prefix, name.prefix) != 0) {
            end_of_name(judging, &name);
            int is_bucket = key.data[0] == 'b';
            name = (Judged){prefix, 0, is_bucket ? 1 : judging->keep_versions, is_bucket, tombstones, 0};
        }
        if (judge_version(state, judging, &name, row, key, cell) < 0) {
            return -1;
        }
    }
    end_of_name(judging, &name);
    return 0;
}

/* judge_rows(keys, cells, count, horizon, keep_versions, bucket_ends, bucket_names, bucket_seqs, bucket_orders): a byte a
   row, 1 when the rule lets it go. All versions of a name are among the rows. */
static PyObject *tree_judge_rows(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    TreeRows rows;
    Judging judging;
    memset(&judging, 0, sizeof judging);
    memset(&rows, 0, sizeof rows);
    if (expect_arguments("judge_rows", count, 9, 9) < 0 || parse_u64(arguments[3], &judging.looking.seq) < 0 ||
        parse_index(arguments[4], "keep_versions", &judging.keep_versions) < 0) {
        return NULL;
    }
    PyObject *answer = NULL;
    size_t *tombstones = NULL;
    if (take_created(arguments + 5, &judging.looking.created) == 0 &&
        tree_rows_take(&rows, arguments[0], arguments[1], arguments[2]) == 0 &&
        (answer = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)rows.count)) != NULL) {
        judging.goes = (uint8_t *)PyBytes_AS_STRING(answer);
        memset(judging.goes, 0, rows.count);
        tombstones = PyMem_Malloc((rows.count + 1) * sizeof *tombstones);
        if (tombstones == NULL) {
            PyErr_NoMemory();
            Py_CLEAR(answer);
        } else if (judge_all(PyModule_GetState(module), &rows, &judging, tombstones) < 0) {
            Py_CLEAR(answer);
        }
    }
    PyMem_Free(tombstones);
    created_release(&judging.looking.created);
    tree_rows_release(&rows);
    return answer;
}

#endif
