/* The loops over pages, in C. `btree/page.py` draws the page and the page updates. What defines every answer is in
   tests/oracles: pages.py, page_images.py, tree.py, versions.py, updates.py, results.py, rows.py, changes.py
   and vacuum_rows.py.

   Invariants
   - Bytes are hostile: nothing is read or written that was not checked to lie inside of its page or record.
   - No call lets go of the GIL or runs anybody's code before it has finished with the pages: each is one step for all
     threads, which is all the locking that readers need. */

#include "versions_list.h"
#include "rows.h"
#include "results.h"
#include "changes.h"
#include "sound_records.h"
#include "vacuum_rows.h"

PyMethodDef page_methods[] = {
    METHOD("format_page", pages_format_page, "format_page(page, page_id, level): makes an empty page."),
    METHOD("insert", pages_insert, "insert(page, key, value, lsn): adds a cell."),
    METHOD("replace", pages_replace, "replace(page, key, value, lsn): gives a cell another value."),
    METHOD("remove", pages_remove, "remove(page, key, lsn): takes a cell away."),
    METHOD("set_header", pages_set_header, "set_header(page, right, lsn): sets right sibling and LSN."),
    METHOD("get", pages_get, "get(page, key): the value, or None."),
    METHOD("cells", pages_cells, "cells(page): all cells, in order."),
    METHOD("page_rows", pages_page_rows, "page_rows(page): (how many cells, all of them as rows of a block)."),
    METHOD("compact_image", pages_compact_image, "compact_image(page): the page without its free middle."),
    METHOD("set_image", pages_set_image, "set_image(page, image): makes the page what the image says."),
    METHOD("sealed", pages_sealed, "sealed(page): the page as it goes into the file."),
    METHOD("verify_crc", pages_verify_crc, "verify_crc(page): whether the bytes are those that were sealed."),
    METHOD("check_page", pages_check_page, "check_page(page, page_id): what is wrong with its structure, or None."),
    METHOD("put_back", pages_put_back, "put_back(pages, copies): makes pages what they were, in one step."),
    METHOD("find", pages_find, "find(pages, root, key): first cell at or behind the key, None, or a missing page."),
    METHOD("scan_tree", pages_scan,
           "scan_tree(pages, root, start, stop, limit): (cells, key to go on from), or a missing page."),
    METHOD("skip", pages_skip, "skip(pages, root, key): where the next leaf begins if this one has nothing, or None."),
    METHOD("place", pages_place, "place(pages, root, key, cell_bytes, image_floor): the leaf, or what to do first."),
    METHOD("plan_split", pages_plan_split, "plan_split(pages, path, key, next_page): (page updates, new pages)."),
    METHOD("redo", pages_redo, "redo(pages, updates, lsn): -1 when done, or a missing page."),
    METHOD("redo_frames", pages_redo_frames,
           "redo_frames(pages, rec_lsns, first_lsn, buffer, positions, lengths, start): "
           "(next index, missing page or -1, whether it must be read)."),
    METHOD("decode_updates", pages_decode_updates,
           "decode_updates(updates, lsn): a list of (page, what, key, value, old)."),
    METHOD("record_updates", pages_record_updates,
           "record_updates(record, lsn): its page updates, that of a put written out."),
    METHOD("gather_changes", pages_gather_changes,
           "gather_changes(first_lsn, buffer, positions, lengths, indexes, start, max_rows): "
           "(rows, where to go on, records of retention, (key ends, keys, LSNs, steps, bits of cells, cell ends, cells, parts))."),
    METHOD("sound_records", pages_sound_records,
           "sound_records(first_lsn, buffer, positions, lengths): "
           "(entries that end in sound records, values in them, indexes of all others)."),
    METHOD("find_version", pages_find_version,
           "find_version(pages, root, bucket, key, seq): a pointer, (seq, cell), None, or a missing page."),
    METHOD("list_seen", pages_list_seen,
           "list_seen(pages, root, start, stop, seq, created_seq, created_order, limit, columns, is_reverse, "
           "prefix_bytes, delimiter): "
           "(rows, key to go on from, missing page or 0)."),
    METHOD("survey", pages_survey,
           "survey(first_lsn, buffer, positions, lengths, open_seq, open_lsn): "
           "(applied seq, its LSN, open seq, its LSN, indexes of other records)."),
    METHOD("entry_ends", pages_entry_ends,
           "entry_ends(first_lsn, buffer, positions, lengths): "
           "(seqs, LSNs, rollbacks as (ends before it, target seq, LSN))."),
    METHOD("results_in", pages_results_in,
           "results_in(first_lsn, buffer, positions, lengths, open): (seqs, prints, statuses, others, open)."),
    METHOD("results_of", pages_results_of, "results_of(first_lsn, records, open): the same of a list of records."),
    METHOD("check_rows", pages_check_rows, "check_rows(raw, count, after_key, has_places): the last key."),
    METHOD("find_row", pages_find_row, "find_row(raw, key): the first row that is not before a key, or None."),
    METHOD("merge_rows", pages_merge_rows, "merge_rows(sources, drops_removed): (raw, rows, where each source is then)."),
    METHOD("count_cells", pages_count_cells, "count_cells(cells, usage): the cells of values that have files of their own."),
    METHOD("pointing_cells", pages_pointing_cells,
           "pointing_cells(cells, first_lsn, below_lsn, last_seq): those of versions up to a seq that point there."),
    METHOD("judge_cells", pages_judge_cells,
           "judge_cells(cells, is_last, horizon, keep_versions, created, usage): (cells of complete names, keys that go, "
           "bytes that they point to, versions that stay, cells of names that are not judged, cells of values with files)."),
    METHOD("fill_page", pages_fill_page,
           "fill_page(page, raw, at, reserved_bytes, lsn): (where the next row is, where the last one was)."),
    {NULL, NULL, 0, NULL},
};
