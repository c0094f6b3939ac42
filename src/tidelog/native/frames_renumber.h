/* Frames with other offsets, in a copy or where they are: frames that lie one behind the other, each header with its new
   number, and with the checksum that follows from the old one, so that no payload is read. */

#ifndef TIDELOG_FRAMES_RENUMBER_H
#define TIDELOG_FRAMES_RENUMBER_H

#include "frames.h"

/* Where the first frame begins and the last one ends; -1 with ValueError when they are not whole and side by side. */
static int frames_extent(const Places *places, uint64_t *begin, uint64_t *end) {
    *begin = *end = 0;
    for (size_t index = 0; index < places->count; index++) {
        Slice payload;
        if (place_of(places, index, &payload) < 0) {
            return -1;
        }
        uint64_t position = (uint64_t)(payload.data - (const uint8_t *)places->buffer.buf);
        if (position < FRAME_HEADER_BYTES || (index > 0 && position - FRAME_HEADER_BYTES != *end)) {
            PyErr_Format(PyExc_ValueError, "frame %zu is not right behind the one before", index);
            return -1;
        }
        if (index == 0) {
            *begin = position - FRAME_HEADER_BYTES;
        }
        *end = position + payload.size;
    }
    return 0;
}

static inline void renumber_header(uint8_t *header, uint64_t offset) {
    store_u32(header + 12, crc_of_renumbered(load_u32(header + 12), load_u64(header), offset));
    store_u64(header, offset);
}

/* Writes a copy to byte `at` of `frames`, and the positions that the payloads have there. */
static void write_renumbered(const Places *places, uint64_t begin, uint64_t end, uint64_t offset, uint8_t *frames,
                             uint64_t at, uint8_t *positions) {
    memcpy(frames + at, (const uint8_t *)places->buffer.buf + begin, end - begin);
    uint64_t position = at + FRAME_HEADER_BYTES;
    for (size_t index = 0; index < places->count; index++) {
        renumber_header(frames + position - FRAME_HEADER_BYTES, offset + index);
        memcpy(positions + 8 * index, &position, 8);
        position += (uint64_t)native_u32(places->lengths.buf, index) + FRAME_HEADER_BYTES;
    }
}

static PyObject *renumbered(const Places *places, uint64_t begin, uint64_t end, uint64_t offset) {
    PyObject *frames = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(end - begin));
    PyObject *positions = PyBytes_FromStringAndSize(NULL, 8 * (Py_ssize_t)places->count);
    PyObject *result = NULL;
    if (frames != NULL && positions != NULL) {
        uint8_t *frames_at = (uint8_t *)PyBytes_AS_STRING(frames);
        uint8_t *positions_at = (uint8_t *)PyBytes_AS_STRING(positions);
        /* With the GIL: the places were checked, and nobody may change them until they are used. */
        write_renumbered(places, begin, end, offset, frames_at, 0, positions_at);
        result = PyTuple_Pack(2, frames, positions);
    }
    Py_XDECREF(frames);
    Py_XDECREF(positions);
    return result;
}

/* Several pieces of frames, joined in one buffer with consecutive offsets. */
typedef struct {
    Places places;
    uint64_t begin, end;
} Piece;

typedef struct {
    Piece *pieces;
    Py_ssize_t taken;
    uint64_t bytes;
    size_t count;
} Pieces;

static void pieces_release(Pieces *all) {
    for (Py_ssize_t index = 0; index < all->taken; index++) {
        places_release(&all->pieces[index].places);
    }
    PyMem_Free(all->pieces);
}

static int pieces_add(Pieces *all, PyObject *item) {
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != 3) {
        PyErr_SetString(PyExc_TypeError, "a piece is a tuple of buffer, positions and lengths");
        return -1;
    }
    Piece *piece = &all->pieces[all->taken];
    if (places_take(&piece->places, ((PyTupleObject *)item)->ob_item) < 0) {
        return -1;
    }
    all->taken++;
    if (frames_extent(&piece->places, &piece->begin, &piece->end) < 0) {
        return -1;
    }
    uint64_t size = piece->end - piece->begin;
    if (size > (uint64_t)PY_SSIZE_T_MAX - all->bytes) {
        PyErr_NoMemory();
        return -1;
    }
    all->bytes += size;
    all->count += piece->places.count;
    return 0;
}

static int pieces_take(Pieces *all, PyObject *items) {
    Py_ssize_t count = PyTuple_GET_SIZE(items);
    *all = (Pieces){PyMem_New(Piece, (size_t)(count > 0 ? count : 1)), 0, 0, 0};
    if (all->pieces == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t index = 0; index < count; index++) {
        if (pieces_add(all, PyTuple_GET_ITEM(items, index)) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *pieces_join(const Pieces *all, uint64_t offset) {
    PyObject *frames = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)all->bytes);
    PyObject *positions = PyBytes_FromStringAndSize(NULL, 8 * (Py_ssize_t)all->count);
    PyObject *lengths = PyBytes_FromStringAndSize(NULL, 4 * (Py_ssize_t)all->count);
    PyObject *result = NULL;
    if (frames != NULL && positions != NULL && lengths != NULL) {
        uint64_t at = 0;
        size_t done = 0;
        for (Py_ssize_t index = 0; index < all->taken; index++) { /* with the GIL, as in renumbered() */
            const Piece *piece = &all->pieces[index];
            const Places *places = &piece->places;
            write_renumbered(places, piece->begin, piece->end, offset + done, (uint8_t *)PyBytes_AS_STRING(frames), at,
                             (uint8_t *)PyBytes_AS_STRING(positions) + 8 * done);
            memcpy(PyBytes_AS_STRING(lengths) + 4 * done, places->lengths.buf, 4 * places->count);
            at += piece->end - piece->begin;
            done += places->count;
        }
        result = PyTuple_Pack(3, frames, positions, lengths);
    }
    Py_XDECREF(frames);
    Py_XDECREF(positions);
    Py_XDECREF(lengths);
    return result;
}

static PyObject *frames_join(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    NativeState *state = PyModule_GetState(module);
    Bound first;
    if (expect_arguments("join_frames", argument_count, 2, 2) < 0 || parse_bound(arguments[0], &first) < 0) {
        return NULL;
    }
    PyObject *items = PySequence_Tuple(arguments[1]);
    if (items == NULL) {
        return NULL;
    }
    Pieces all;
    PyObject *result = NULL;
    if (pieces_take(&all, items) == 0) {
        uint64_t more = all.count > 0 ? (uint64_t)all.count - 1 : 0;
        if (first.outside != 0 || first.number > UINT64_MAX - more) {
            PyErr_SetString(state->input_error, "offsets of frames must be in the range 0 to 2**64 - 1");
        } else {
            result = pieces_join(&all, first.number);
        }
    }
    pieces_release(&all);
    Py_DECREF(items);
    return result;
}

/* Every place is checked when it is used: the arrays may change while the GIL is away. -1 when one is not inside. */
static int renumber_where_they_are(const Places *places, uint64_t offset) {
    for (size_t index = 0; index < places->count; index++) {
        Slice payload;
        if (!place_is_inside(places, index, &payload) ||
            payload.data - (const uint8_t *)places->buffer.buf < FRAME_HEADER_BYTES) {
            return -1;
        }
        renumber_header((uint8_t *)payload.data - FRAME_HEADER_BYTES, offset + index);
    }
    return 0;
}

static PyObject *renumber_in_place(const Places *places, uint64_t begin, uint64_t end, uint64_t offset) {
    if (places->buffer.readonly) {
        PyErr_SetString(PyExc_BufferError, "frames are renumbered in a buffer that can be written to");
        return NULL;
    }
    PyThreadState *saved = release_gil_for(end - begin);
    int failed = renumber_where_they_are(places, offset);
    take_gil_back(saved);
    if (failed) {
        PyErr_SetString(PyExc_ValueError, "the places of frames changed while they were renumbered");
        return NULL;
    }
    Py_RETURN_NONE;
}

typedef PyObject *(*Renumber)(const Places *places, uint64_t begin, uint64_t end, uint64_t offset);

static PyObject *renumber_with(const char *name, Renumber renumber, PyObject *module, PyObject *const *arguments,
                               Py_ssize_t argument_count) {
    NativeState *state = PyModule_GetState(module);
    Places places;
    Bound first;
    if (expect_arguments(name, argument_count, 4, 4) < 0 || parse_bound(arguments[3], &first) < 0 ||
        places_take(&places, arguments) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    uint64_t begin, end, more = places.count > 0 ? (uint64_t)places.count - 1 : 0;
    if (first.outside != 0 || first.number > UINT64_MAX - more) {
        PyErr_SetString(state->input_error, "offsets of frames must be in the range 0 to 2**64 - 1");
    } else if (frames_extent(&places, &begin, &end) == 0) {
        result = renumber(&places, begin, end, first.number);
    }
    places_release(&places);
    return result;
}

static PyObject *frames_renumber(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    return renumber_with("renumber", renumbered, module, arguments, argument_count);
}

static PyObject *frames_renumber_in_place(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    return renumber_with("renumber_in_place", renumber_in_place, module, arguments, argument_count);
}

/* Whether a header says what the arrays say; 0 when it does not. */
static int header_agrees(const Places *places, size_t index, uint64_t first_offset) {
    Slice payload;
    if (!place_is_inside(places, index, &payload) || payload.size == 0) {
        return 0;
    }
    const uint8_t *header = payload.data - FRAME_HEADER_BYTES;
    return load_u64(header) == first_offset + index && load_u32(header + 8) == payload.size;
}

static PyObject *measure_sound(NativeState *state, const Places *places, uint64_t begin, uint64_t end) {
    uint64_t first_offset = places->count > 0 ? load_u64((const uint8_t *)places->buffer.buf + begin) : 0;
    uint32_t largest = 0;
    for (size_t index = 0; index < places->count; index++) {
        if (!header_agrees(places, index, first_offset)) {
            PyErr_Format(state->input_error, "the header of frame %zu does not say what the frames say", index);
            return NULL;
        }
        uint32_t length = native_u32(places->lengths.buf, index);
        largest = length > largest ? length : largest;
    }
    return Py_BuildValue("(KI)", (unsigned long long)(end - begin - FRAME_HEADER_BYTES * places->count), largest);
}

static PyObject *frames_measure(PyObject *module, PyObject *const *arguments, Py_ssize_t argument_count) {
    Places places;
    if (expect_arguments("measure_frames", argument_count, 3, 3) < 0 || places_take(&places, arguments) < 0) {
        return NULL;
    }
    PyObject *result = NULL;
    uint64_t begin, end;
    if (frames_extent(&places, &begin, &end) == 0) {
        result = measure_sound(PyModule_GetState(module), &places, begin, end);
    }
    places_release(&places);
    return result;
}

#endif
