/* Which records of the log are puts and deletions with nothing wrong, so that nobody has to take them apart one by one.
   tests/oracles/sound.py gives the same answer. */

#ifndef TIDELOG_SOUND_RECORDS_H
#define TIDELOG_SOUND_RECORDS_H

#include "crc32.h"
#include "updates.h"

#define OP_DELETE_OBJECT 5

/* A value as it is, without metadata, with the size and the checksum that its record tells. */
static int is_sound_value(const Operation *put) {
    return put->codec == 0 && put->stored.size >= METADATA_LENGTH_BYTES &&
           put->stored.size - METADATA_LENGTH_BYTES == put->size && load_u32(put->stored.data) == 0 &&
           crc_of(put->stored.data, put->stored.size) == put->crc;
}

/* Whether all page updates can be read; that of a put is page u32, kind u8, position varint. */
static int has_sound_updates(NativeState *state, const Operation *operation, uint64_t lsn) {
    Slice rest = operation->updates;
    if (rest.size >= PUT_HEADER_BYTES && rest.data[4] == UPDATE_PUT) {
        uint64_t position;
        rest = (Slice){rest.data + PUT_HEADER_BYTES, rest.size - PUT_HEADER_BYTES};
        return operation->op == OP_PUT_OBJECT && take_varint(&rest, UINT64_MAX, &position) && rest.size == 0 &&
               operation->names[0].size + operation->names[1].size + 11 <= PUT_KEY_BYTES;
    }
    while (rest.size > 0) {
        Update update;
        if (update_parse(state, &rest, lsn, &update) < 0) {
            PyErr_Clear(); /* who takes the record apart says it */
            return 0;
        }
    }
    return 1;
}

static int is_sound_record(NativeState *state, Slice record, uint64_t lsn, Operation *operation) {
    if (record.size < OPERATION_FIXED_BYTES || !is_operation(record) || !operation_parse(record, operation) ||
        (operation->flags & ~(RECORD_FLAG_LAST | RECORD_FLAG_PART_OF_BATCH)) != 0 || operation->seq == 0 ||
        operation->previous_lsn >= lsn || operation->names[0].size == 0 || operation->names[1].size == 0 ||
        !is_ascii(operation->names[0]) || !is_ascii(operation->names[1])) {
        return 0;
    }
    int is_put = operation->op == OP_PUT_OBJECT && is_sound_value(operation);
    int is_delete = operation->op == OP_DELETE_OBJECT && operation->stored.size == 0 && operation->codec == 0;
    return (is_put || is_delete) && has_sound_updates(state, operation, lsn);
}

/* sound_records(first_lsn, buffer, positions, lengths): (entries that end in sound records, values in them, indexes of all
   other records). */
static PyObject *pages_sound_records(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    Places places;
    uint64_t first_lsn;
    if (expect_arguments("sound_records", count, 4, 4) < 0 || parse_u64(arguments[0], &first_lsn) < 0 ||
        places_take(&places, arguments + 1) < 0) {
        return NULL;
    }
    size_t entries = 0, values = 0;
    PyObject *others = PyList_New(0);
    for (size_t index = 0; others != NULL && index < places.count; index++) {
        Slice record;
        Operation operation;
        if (place_of(&places, index, &record) < 0) {
            Py_CLEAR(others);
        } else if (is_sound_record(PyModule_GetState(module), record, first_lsn + index, &operation)) {
            entries += (operation.flags & RECORD_FLAG_LAST) != 0;
            values += operation.op == OP_PUT_OBJECT;
        } else {
            PyObject *number = PyLong_FromSize_t(index);
            if (number == NULL || PyList_Append(others, number) < 0) {
                Py_CLEAR(others);
            }
            Py_XDECREF(number);
        }
    }
    places_release(&places);
    return others == NULL ? NULL : Py_BuildValue("(nnN)", (Py_ssize_t)entries, (Py_ssize_t)values, others);
}

#endif
