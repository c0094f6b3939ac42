/* Envelopes to messages: everything is checked, then `message_type` is called. */

#ifndef TIDELOG_ENVELOPES_DECODE_H
#define TIDELOG_ENVELOPES_DECODE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <datetime.h>
#include <stdint.h>

#include "envelopes_parse.h"

/* Microseconds since 1970 to a datetime in UTC. */

#define MICROSECONDS_A_DAY INT64_C(86400000000)

/* The last timestamp that was built: neighbours in a log often carry the same one, and nearly always the same day. */
typedef struct {
    PyObject *datetime;
    int64_t timestamp_us;
    int64_t day;
    int year, month, month_day;
} Moment;

/* Years counted from March end with the leap day, which makes months a straight line: (153 * month + 2) / 5 days have
   passed before the month with that number (March is 0). 400 such years always have 146097 days. */
static void moment_set_day(Moment *moment, int64_t days_since_1970) {
    int64_t days = days_since_1970 + 719468; /* since 0000-03-01 */
    int64_t cycle = days / 146097;           /* never negative: year 1 is the earliest */
    int64_t day_of_cycle = days % 146097;
    int64_t year_of_cycle = (day_of_cycle - day_of_cycle / 1460 + day_of_cycle / 36524 - day_of_cycle / 146096) / 365;
    int64_t day_of_year = day_of_cycle - (365 * year_of_cycle + year_of_cycle / 4 - year_of_cycle / 100);
    int month = (int)((5 * day_of_year + 2) / 153);
    moment->day = days_since_1970;
    moment->month_day = (int)day_of_year - (153 * month + 2) / 5 + 1;
    moment->month = month < 10 ? month + 3 : month - 9;
    moment->year = (int)(cycle * 400 + year_of_cycle) + (moment->month <= 2);
}

/* A new reference to the UTC datetime of a timestamp that a datetime can hold. */
static PyObject *moment_get(Moment *moment, int64_t timestamp_us) {
    if (moment->datetime != NULL && moment->timestamp_us == timestamp_us) {
        return Py_NewRef(moment->datetime);
    }
    int64_t day = timestamp_us / MICROSECONDS_A_DAY;
    int64_t rest_us = timestamp_us % MICROSECONDS_A_DAY;
    if (rest_us < 0) {
        rest_us += MICROSECONDS_A_DAY;
        day--;
    }
    if (moment->datetime == NULL || moment->day != day) {
        moment_set_day(moment, day);
    }
    int microsecond = (int)(rest_us % 1000000);
    int second = (int)(rest_us / 1000000);
    PyObject *datetime = PyDateTimeAPI->DateTime_FromDateAndTime(
        moment->year, moment->month, moment->month_day, second / 3600, second / 60 % 60, second % 60, microsecond,
        PyDateTime_TimeZone_UTC, PyDateTimeAPI->DateTimeType);
    if (datetime != NULL) {
        Py_XSETREF(moment->datetime, Py_NewRef(datetime));
        moment->timestamp_us = timestamp_us;
    }
    return datetime;
}

typedef struct {
    PyObject *data_error;
    PyObject *message_type;
    PyObject *first_offset;
    long long first; /* `first_offset` when it fits */
    int first_fits;
    Moment moment;
    PyObject *headers_type; /* for headers that a dict cannot hold; looked up when the first are met */
} Decoder;

static int decoder_start(Decoder *decoder, NativeState *state, PyObject *message_type, PyObject *first_offset) {
    int overflow;
    *decoder = (Decoder){.data_error = state->data_error, .message_type = message_type, .first_offset = first_offset};
    decoder->first = PyLong_AsLongLongAndOverflow(first_offset, &overflow);
    decoder->first_fits = overflow == 0;
    return decoder->first == -1 && PyErr_Occurred() ? -1 : 0;
}

static void decoder_finish(Decoder *decoder) {
    Py_CLEAR(decoder->moment.datetime);
    Py_CLEAR(decoder->headers_type);
}

/* first_offset + index, which may be any Python int. */
static PyObject *decoder_offset(const Decoder *decoder, size_t index) {
    long long sum;
    if (decoder->first_fits && !__builtin_add_overflow(decoder->first, (long long)index, &sum)) {
        return PyLong_FromLongLong(sum);
    }
    PyObject *addend = PyLong_FromSize_t(index);
    PyObject *offset = addend == NULL ? NULL : PyNumber_Add(decoder->first_offset, addend);
    Py_XDECREF(addend);
    return offset;
}

/* Raises what is wrong with a payload, and returns -1. */
static int complain(PyObject *data_error, PyObject *offset, Slice payload, Fault fault) {
    if (fault == TOO_SHORT) {
        PyErr_Format(data_error, "message %S is too short for an envelope (%zu bytes)", offset, payload.size);
    } else if (fault == OTHER_VERSION) {
        PyErr_Format(data_error, "message %S has envelope version %d, this tidelog reads version %d", offset,
                     (int)payload.data[0], VERSION);
    } else if (fault == UNKNOWN_FLAGS) {
        PyErr_Format(data_error, "message %S has unknown envelope flags 0x%02x", offset, (int)payload.data[1]);
    } else {
        PyErr_Format(data_error, "message %S %s", offset, fault_text(fault));
    }
    return -1;
}

static PyObject *bytes_of(const uint8_t *data, uint64_t size) {
    return PyBytes_FromStringAndSize((const char *)data, (Py_ssize_t)size);
}

/* 0, a fault, or -1 when Python raised something. */
static int add_header(PyObject *headers, Slice name, Slice value) {
    PyObject *key = PyUnicode_DecodeUTF8((const char *)name.data, (Py_ssize_t)name.size, NULL);
    if (key == NULL) {
        if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
            PyErr_Clear();
            return BAD_NAME;
        }
        return -1;
    }
    PyObject *content = bytes_of(value.data, value.size);
    int result = content == NULL ? -1 : PyDict_SetItem(headers, key, content);
    Py_DECREF(key);
    Py_XDECREF(content);
    return result;
}

/* Fills `headers` from the block, which must hold `count` of them and nothing else: 0, a fault, or -1. */
static int parse_headers(PyObject *headers, Slice block, uint16_t count) {
    for (; count > 0; count--) {
        Slice name, value;
        if (next_header(&block, &name, &value) != SOUND) {
            return BAD_HEADERS;
        }
        int result = add_header(headers, name, value);
        if (result != 0) {
            return result;
        }
    }
    return block.size == 0 ? SOUND : BAD_HEADERS;
}

/* All headers as a list of (name, value) tuples; they were parsed before. */
static PyObject *header_pairs(const Parts *parts) {
    PyObject *pairs = PyList_New(0);
    Slice block = parts->block, name, value;
    for (size_t index = 0; pairs != NULL && index < parts->header_count; index++) {
        PyObject *pair = NULL;
        if (next_header(&block, &name, &value) != SOUND) {
            PyErr_SetString(PyExc_ValueError, "a message was changed by somebody while it was read");
        } else if (header_is_null(parts, index)) {
            pair = Py_BuildValue("(s#O)", name.data, (Py_ssize_t)name.size, Py_None);
        } else {
            pair = Py_BuildValue("(s#y#)", name.data, (Py_ssize_t)name.size, value.data, (Py_ssize_t)value.size);
        }
        if (pair == NULL || PyList_Append(pairs, pair) < 0) {
            Py_CLEAR(pairs);
        }
        Py_XDECREF(pair);
    }
    return pairs;
}

/* Headers with a name twice or with a null, as what keeps both (`topics/message.py`). */
static PyObject *special_headers(Decoder *decoder, const Parts *parts) {
    if (decoder->headers_type == NULL) {
        PyObject *module = PyImport_ImportModule("tidelog.topics.message");
        decoder->headers_type = module == NULL ? NULL : PyObject_GetAttrString(module, "Headers");
        Py_XDECREF(module);
        if (decoder->headers_type == NULL) {
            return NULL;
        }
    }
    PyObject *pairs = header_pairs(parts);
    PyObject *headers = pairs == NULL ? NULL : PyObject_CallOneArg(decoder->headers_type, pairs);
    Py_XDECREF(pairs);
    return headers;
}

static int are_special(const Parts *parts, PyObject *headers) {
    return parts->nulls.size > 1 || PyDict_GET_SIZE(headers) < parts->header_count;
}

static PyObject *new_message(Decoder *decoder, const Parts *parts, PyObject **fields) {
    PyObject *type = decoder->message_type;
    if (!parts->has_delivery) {
        return PyObject_Vectorcall(type, fields + 1, 5 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    fields[6] = moment_get(&decoder->moment, parts->deliver_at_us);
    if (fields[6] == NULL) {
        return NULL;
    }
    PyObject *message = PyObject_Vectorcall(type, fields + 1, 6 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    Py_DECREF(fields[6]);
    return message;
}

static PyObject *build_message(Decoder *decoder, PyObject *offset, const Parts *parts, PyObject *headers) {
    PyObject *message = NULL;
    PyObject *value = value_is_null(parts) ? Py_NewRef(Py_None) : bytes_of(parts->value.data, parts->value.size);
    PyObject *key = parts->has_key ? bytes_of(parts->key.data, parts->key.size) : Py_NewRef(Py_None);
    PyObject *timestamp = moment_get(&decoder->moment, parts->timestamp_us);
    if (value != NULL && key != NULL && timestamp != NULL) {
        /* the first place is the callee's to use, the last for a time of delivery */
        PyObject *fields[] = {NULL, value, key, headers, timestamp, offset, NULL};
        message = new_message(decoder, parts, fields);
    }
    Py_XDECREF(value);
    Py_XDECREF(key);
    Py_XDECREF(timestamp);
    return message;
}

static PyObject *decode_payload(Decoder *decoder, PyObject *offset, Slice payload) {
    Parts parts;
    PyObject *headers = NULL, *message = NULL;
    int fault = parse_envelope(payload, &parts);
    if (fault == SOUND) {
        headers = PyDict_New();
        fault = headers == NULL ? -1 : parse_headers(headers, parts.block, parts.header_count);
    }
    if (fault == SOUND && are_special(&parts, headers)) {
        Py_SETREF(headers, special_headers(decoder, &parts));
        fault = headers == NULL ? -1 : SOUND;
    }
    if (fault == SOUND) {
        message = build_message(decoder, offset, &parts, headers);
    } else if (fault > 0) {
        complain(decoder->data_error, offset, payload, fault);
    }
    Py_XDECREF(headers);
    return message;
}

static PyObject *decode_one(Decoder *decoder, size_t index, Slice payload) {
    PyObject *offset = decoder_offset(decoder, index);
    if (offset == NULL) {
        return NULL;
    }
    PyObject *message = decode_payload(decoder, offset, payload);
    Py_DECREF(offset);
    return message;
}

/* Takes over the reference to `message`. */
static int append_message(PyObject *messages, PyObject *message) {
    if (message == NULL) {
        return -1;
    }
    int result = PyList_Append(messages, message);
    Py_DECREF(message);
    return result;
}

static PyObject *decode_places(Decoder *decoder, const Places *places, size_t start, size_t stop) {
    PyObject *messages = PyList_New(0);
    for (size_t index = start; messages != NULL && index < stop; index++) {
        Slice payload;
        if (place_of(places, index, &payload) < 0 ||
            append_message(messages, decode_one(decoder, index, payload)) < 0) {
            Py_CLEAR(messages);
        }
    }
    return messages;
}

static PyObject *envelopes_decode_frames(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    Decoder decoder;
    Places places;
    size_t start, stop;
    if (expect_arguments("decode_frames", argument_count, 7, 7) < 0 ||
        decoder_start(&decoder, PyModule_GetState(module), arguments[0], arguments[1]) < 0 ||
        parse_index(arguments[5], "start", &start) < 0 || parse_index(arguments[6], "stop", &stop) < 0 ||
        places_take(&places, arguments + 2) < 0) {
        return NULL;
    }
    PyObject *messages = decode_places(&decoder, &places, start, stop < places.count ? stop : places.count);
    places_release(&places);
    decoder_finish(&decoder);
    return messages;
}

static PyObject *decode_item(Decoder *decoder, size_t index, PyObject *item) {
    Py_buffer view;
    if (PyObject_GetBuffer(item, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    PyObject *message = decode_one(decoder, index, (Slice){view.buf, (size_t)view.len});
    PyBuffer_Release(&view);
    return message;
}

static PyObject *envelopes_decode_payloads(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    Decoder decoder;
    if (expect_arguments("decode_payloads", argument_count, 3, 3) < 0 ||
        decoder_start(&decoder, PyModule_GetState(module), arguments[0], arguments[1]) < 0) {
        return NULL;
    }
    PyObject *items = PySequence_Tuple(arguments[2]);
    PyObject *messages = items == NULL ? NULL : PyList_New(0);
    for (Py_ssize_t index = 0; messages != NULL && index < PyTuple_GET_SIZE(items); index++) {
        PyObject *message = decode_item(&decoder, (size_t)index, PyTuple_GET_ITEM(items, index));
        if (append_message(messages, message) < 0) {
            Py_CLEAR(messages);
        }
    }
    Py_XDECREF(items);
    decoder_finish(&decoder);
    return messages;
}

#endif
