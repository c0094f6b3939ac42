/* The message codec, in C. `topics/message.py` draws the envelope; tests/oracles/envelopes.py defines every answer.

   Invariants
   - A stored payload is hostile: every length is checked against what is left, in 64 bits, before anything is read.
   - Encoding takes its sizes first and copies second. No Python code runs in between (only bytes, bytearray, memoryview
     and str are looked into, with the GIL held), so the sizes still hold when the bytes are copied.
   - Decoding calls `message_type`, which may be anybody's code: buffers and items are held until it has returned.
   - Columns are gathered without the GIL. Sizes and places are taken once and kept aside, so that a buffer which
     somebody changes meanwhile gives other content, never a read or a write outside of what was checked. */

#include "envelopes_columns.h"
#include "envelopes_decode.h"
#include "envelopes_encode.h"
#include "envelopes_partitions.h"
#include "envelopes_producers.h"
#include "envelopes_rows.h"
#include "murmur2.h"

PyMethodDef envelope_methods[] = {
    METHOD("encode", envelopes_encode, "encode(value, key, headers, timestamp_us, extension=b''): the envelope of one message."),
    METHOD("encode_values", envelopes_encode_values,
           "encode_values(values, timestamp_us, name, epoch, sequence): the envelopes of values that are appended "
           "together, with their marks; None unless all are bytes."),
    METHOD("decode_frames", envelopes_decode_frames,
           "decode_frames(message_type, first_offset, buffer, positions, lengths, start, stop): messages of frames."),
    METHOD("decode_payloads", envelopes_decode_payloads,
           "decode_payloads(message_type, first_offset, payloads): messages of payloads that are not framed yet."),
    METHOD("extensions", envelopes_extensions,
           "extensions(buffer, positions, lengths, start, stop): those of frames, or None when no message has one."),
    METHOD("newest_producers", envelopes_newest_producers,
           "newest_producers(first_offset, buffer, positions, lengths, start, stop): [(name, offset of its newest)]."),
    METHOD("gather_columns", envelopes_gather_columns,
           "gather_columns(first_offset, buffer, positions, lengths, start, stop, wanted, max_rows, max_bytes): "
           "messages of frames as the buffers of Arrow columns."),
    METHOD("encode_columns", envelopes_encode_columns,
           "encode_columns(first_offset, count, timestamp_us, max_message_bytes, values, keys, headers, timestamps): "
           "frames of the rows of Arrow columns, or what is wrong with a row."),
    METHOD("frames_digest", envelopes_frames_digest,
           "frames_digest(first_offset, buffer, positions, lengths, start, stop): a sum over frames, in any order."),
    METHOD("partitions_of", envelopes_partitions_of,
           "partitions_of(count, keys, partitions, turn): (the partition of each row as i32, the next turn); rows "
           "without a key take turns."),
    METHOD("murmur2", murmur2, "murmur2(key): the hash of a key, as Kafka's clients compute it."),
    {NULL, NULL, 0, NULL},
};

int envelopes_prepare(void) {
    PyDateTime_IMPORT;
    return PyDateTimeAPI == NULL ? -1 : 0;
}
