/* The loops over pages, in C. `page.py` draws the page, `updates.py` the page updates. The twins that define every
   answer are `page_python.py`, `page_image_python.py`, `tree_python.py`, `version_python.py`, `updates_python.py`,
   `results_python.py` and `rows_python.py`.

   Invariants
   - Bytes are hostile: nothing is read or written that was not checked to lie inside of its page or record.
   - No call lets go of the GIL or runs anybody's code before it has finished with the pages: each is one step for all
     threads, which is all the locking that readers need. */

#include "_engine_list.h"
#include "_engine_rows.h"
#include "_engine_results.h"

#define METHOD(name, function, text) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, PyDoc_STR(text)}

static PyMethodDef engine_methods[] = {
    METHOD("format_page", engine_format_page, "format_page(page, page_id, level): makes an empty page."),
    METHOD("insert", engine_insert, "insert(page, key, value, lsn): adds a cell."),
    METHOD("replace", engine_replace, "replace(page, key, value, lsn): gives a cell another value."),
    METHOD("remove", engine_remove, "remove(page, key, lsn): takes a cell away."),
    METHOD("set_header", engine_set_header, "set_header(page, right, lsn): sets right sibling and LSN."),
    METHOD("get", engine_get, "get(page, key): the value, or None."),
    METHOD("cells", engine_cells, "cells(page): all cells, in order."),
    METHOD("compact_image", engine_compact_image, "compact_image(page): the page without its free middle."),
    METHOD("set_image", engine_set_image, "set_image(page, image): makes the page what the image says."),
    METHOD("sealed", engine_sealed, "sealed(page): the page as it goes into the file."),
    METHOD("verify_crc", engine_verify_crc, "verify_crc(page): whether the bytes are those that were sealed."),
    METHOD("check_page", engine_check_page, "check_page(page, page_id): what is wrong with its structure, or None."),
    METHOD("put_back", engine_put_back, "put_back(pages, copies): makes pages what they were, in one step."),
    METHOD("find", engine_find, "find(pages, root, key): first cell at or behind the key, None, or a missing page."),
    METHOD("scan", engine_scan,
           "scan(pages, root, start, stop, limit): (cells, key to go on from), or a missing page."),
    METHOD("skip", engine_skip, "skip(pages, root, key): where the next leaf begins if this one has nothing, or None."),
    METHOD("place", engine_place, "place(pages, root, key, cell_bytes, image_floor): the leaf, or what to do first."),
    METHOD("plan_split", engine_plan_split, "plan_split(pages, path, key, next_page): (page updates, new pages)."),
    METHOD("redo", engine_redo, "redo(pages, updates, lsn): -1 when done, or a missing page."),
    METHOD("redo_frames", engine_redo_frames,
           "redo_frames(pages, rec_lsns, first_lsn, buffer, positions, lengths, start): "
           "(next index, missing page or -1, whether it must be read)."),
    METHOD("decode_updates", engine_decode_updates,
           "decode_updates(updates, lsn): a list of (page, what, key, value, old)."),
    METHOD("record_updates", engine_record_updates,
           "record_updates(record, lsn): its page updates, that of a put written out."),
    METHOD("find_version", engine_find_version,
           "find_version(pages, root, bucket, key, seq): a pointer, (seq, cell), None, or a missing page."),
    METHOD("list_seen", engine_list_seen,
           "list_seen(pages, root, start, stop, seq, created_seq, created_order, limit, has_crc): "
           "(rows, key to go on from, missing page or 0)."),
    METHOD("survey", engine_survey,
           "survey(first_lsn, buffer, positions, lengths, open_seq, open_lsn): "
           "(applied seq, its LSN, open seq, its LSN, indexes of other records)."),
    METHOD("results_in", engine_results_in,
           "results_in(first_lsn, buffer, positions, lengths, open): (seqs, prints, statuses, others, open)."),
    METHOD("results_of", engine_results_of, "results_of(first_lsn, records, open): the same of a list of records."),
    METHOD("check_rows", engine_check_rows, "check_rows(raw, count, after_key, has_places): the last key."),
    METHOD("find_row", engine_find_row, "find_row(raw, key): the first row that is not before a key, or None."),
    METHOD("merge_rows", engine_merge_rows, "merge_rows(sources, drops_removed): (raw, rows, where each source is then)."),
    METHOD("fill_page", engine_fill_page,
           "fill_page(page, raw, at, reserved_bytes, lsn): (where the next row is, where the last one was)."),
    {NULL, NULL, 0, NULL},
};

static int engine_execute(PyObject *module) {
    EngineState *state = PyModule_GetState(module);
    crc_prepare();
    PyObject *errors = PyImport_ImportModule("tidelog.errors");
    if (errors == NULL) {
        return -1;
    }
    state->data_error = PyObject_GetAttrString(errors, "DataError");
    Py_DECREF(errors);
    return state->data_error == NULL ? -1 : 0;
}

static int engine_traverse(PyObject *module, visitproc visit, void *arg) {
    EngineState *state = PyModule_GetState(module);
    Py_VISIT(state->data_error);
    return 0;
}

static int engine_clear(PyObject *module) {
    EngineState *state = PyModule_GetState(module);
    Py_CLEAR(state->data_error);
    return 0;
}

static void engine_free(void *module) {
    engine_clear(module);
}

static PyModuleDef_Slot engine_slots[] = {
    {Py_mod_exec, engine_execute},
    {0, NULL},
};

static struct PyModuleDef engine_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "tidelog.engine._engine",
    .m_doc = PyDoc_STR("The loops over pages, in C; the modules *_python are its twins."),
    .m_size = sizeof(EngineState),
    .m_methods = engine_methods,
    .m_slots = engine_slots,
    .m_traverse = engine_traverse,
    .m_clear = engine_clear,
    .m_free = engine_free,
};

PyMODINIT_FUNC PyInit__engine(void) {
    return PyModuleDef_Init(&engine_module);
}
