/* Rows of an engine's tree as Arrow columns, for jobs that look at all of them: what is to be seen, where values are, and
   the files that hold both. tests/oracles/tree_rows.py gives the same answers; `mvcc/cells.py` draws keys and cells,
   `sst/blob_file.py` pointers, `sst/block.py` blocks.

   Invariant: bytes are hostile. Nothing is read that was not checked to lie inside of its column, and nothing is written
   that was not counted before. */

#include "order_rows.h"
#include "sound_values.h"

PyMethodDef tree_row_methods[] = {
    METHOD("survey_rows", tree_survey_rows,
           "survey_rows(keys, cells, count, seq, every, settled, bucket_ends, bucket_names, bucket_seqs, bucket_orders): "
           "(sum of digests, things, the last name, sampled keys)."),
    METHOD("judge_rows", tree_judge_rows,
           "judge_rows(keys, cells, count, horizon, keep_versions, bucket_ends, bucket_names, bucket_seqs, bucket_orders): "
           "a byte a row, 1 when retention lets it go."),
    METHOD("point_rows", tree_point_rows,
           "point_rows(keys, cells, count, window_bytes, cuts): (how many, (rows, units, positions))."),
    METHOD("place_units", tree_place_units, "place_units(keys, count, window_bytes, cuts): (units, positions)."),
    METHOD("merge_values", tree_merge_values,
           "merge_values(positions, keys, values, count): (how many, columns of the values that are alive)."),
    METHOD("gather_values", tree_gather_values,
           "gather_values(first_lsn, buffer, positions, lengths, lsns, sizes, stored, crcs, codecs, start, stop): "
           "(stored values, their checksums)."),
    METHOD("cut_values", tree_cut_values,
           "cut_values(first_byte, buffer, bytes, stored, lsns, sizes, stored, crcs, codecs, start, stop): "
           "(stored values, their checksums)."),
    METHOD("block_rows", tree_block_rows,
           "block_rows(raw, has_places): (rows, (key ends, keys, value ends, values, parts))."),
    METHOD("pack_rows", tree_pack_rows,
           "pack_rows(keys, values, count, start, target_bytes, after_key): (where the next block begins, raw)."),
    METHOD("file_numbers", tree_file_numbers, "file_numbers(keys, count, cuts): how many cuts are not above each key."),
    METHOD("join_versions", tree_join_versions, "join_versions(cells, pointers, count): (ends, data)."),
    METHOD("encode_pointers", tree_encode_pointers, "encode_pointers(codecs, blob_files, bytes, stored): pointers."),
    METHOD("blob_directory", tree_blob_directory, "blob_directory(positions, stored, crcs): of a blob file."),
    METHOD("position_keys", tree_position_keys, "position_keys(positions): keys of the value index."),
    METHOD("said_places", tree_said_places,
           "said_places(raw, is_values, blob_files): (rows, (file numbers, bytes, said, name ends, names))."),
    METHOD("sound_blob_file", tree_sound_blob_file,
           "sound_blob_file(data, bytes, sources, said): None when it is not what is said, or (values, live values, "
           "live bytes, first position, last position, rows whose values have to be decoded)."),
    METHOD("order_rows", tree_order_rows,
           "order_rows(columns, count): the numbers of rows, u32, in the order of the columns."),
    {NULL, NULL, 0, NULL},
};
