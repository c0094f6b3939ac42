/* Kafka's record batches, in C: their checksum, records to frames, frames to batches.
   `service/kafka/records.py` draws the batch; tests/oracles/record_batches.py defines every answer.

   Invariants
   - Records come from a network and frames from a disk: every length is checked against what is left, in 64 bits, before
     anything is read, and nothing is allocated by a number that the bytes do not back.
   - The work is done without the GIL on buffers that are held; a writer into one of them meanwhile gets other content or
     an error, never a read or a write outside of what was checked. */

#include "produce_requests.h"
#include "record_batches.h"
#include "record_batches_encode.h"
#include "record_batches_frames.h"
#include "record_batches_producers.h"
#include "record_batches_transactions.h"

static PyObject *batches_crc32c(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    return checksum_with("crc32c", crc32c_update, arguments, count);
}

static PyObject *batches_crc32c_portable(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
    return checksum_with("crc32c", crc32c_by_tables, arguments, count);
}

PyMethodDef record_batch_methods[] = {
    METHOD("crc32c", batches_crc32c, "crc32c(data, value=0): CRC-32C, the checksum of Kafka's batches."),
    METHOD("crc32c_portable", batches_crc32c_portable,
           "crc32c_portable(data, value=0): the same by tables, as on machines without special instructions."),
    METHOD("records_to_frames", records_to_frames,
           "records_to_frames(records, count, first_offset, base_timestamp_ms, time_us, is_atomic, producer, max_payload): "
           "(frames, payload positions, payload lengths), or (fault, index of the record)."),
    METHOD("produce_requests", produce_requests,
           "produce_requests(received, max_payload): for the bytes of each connection ([(key, version, correlation id, begin, "
           "start, stop, producer id, epoch, sequence, count, largest payload, max timestamp ms)], end of them), key being (topic, "
           "partition, acks, timeout ms), begin that of the request, start to stop the batch; as far as requests are plain."),
    METHOD("batches_to_frames", batches_to_frames,
           "batches_to_frames([(bytes, start, stop)], max_payload): (frames, payload positions, payload lengths) of batches "
           "that produce_requests found, one after the other."),
    METHOD("frames_to_batches", frames_to_batches,
           "frames_to_batches(first_offset, buffer, positions, lengths, start, stop, max_batch_bytes, leader_epoch): "
           "batches, one after the other."),
    METHOD("producer_batches", producer_batches,
           "producer_batches(first_offset, buffer, positions, lengths, start, stop): (first offset, last offset, producer "
           "id, epoch, sequence, is transactional, is control, is commit, time_us) of each. A control record has "
           "the number of its transaction in place of a sequence."),
    METHOD("transaction_marks", transaction_marks,
           "transaction_marks(first_offset, buffer, positions, lengths, start, stop): None, or (first offset, last offset, "
           "producer id, epoch, kind) of each stretch of a transaction (0) and of each end of one (1 abort, 2 commit)."),
    METHOD("payload_transaction_marks", payload_transaction_marks,
           "payload_transaction_marks(first_offset, payloads): the same of payloads that have no frames yet."),
    {NULL, NULL, 0, NULL},
};

void record_batches_prepare(void) {
    crc32c_prepare();
}
