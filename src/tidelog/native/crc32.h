/* CRC-32 with zlib's polynomial, as fast as the machine allows.

   P = x^32 + x^26 + x^23 + x^22 + x^16 + x^12 + x^11 + x^10 + x^8 + x^7 + x^5 + x^4 + x^2 + x + 1

   Bits are reflected: the lowest bit of the first byte is the highest power of x. A register of n bits therefore holds
   the power x^(n-1-i) in bit i, and multiplying by x is a shift to the right. No constant below is copied from
   anywhere: crc_prepare() works all of them out from P.

   Three ways, one answer:
   - carry-less multiplication (x86-64 with PCLMULQDQ, looked up at run time), for 16 bytes and more
   - the CRC instructions of ARMv8, where the compiler was told that they exist
   - eight tables of 256 entries, eight bytes a step, everywhere

   The functions with `state` work on the inverted value that the algorithm carries from byte to byte.

   The checksum of a frame goes over its payload, then over the 12 bytes offset and length. With carry-less
   multiplication the 12 bytes are folded in before the one reduction, so that they cost next to nothing. */

#ifndef TIDELOG_CRC32_H
#define TIDELOG_CRC32_H

#include <stddef.h>
#include <stdint.h>

#include "endian.h"

/* Called once at import; calling it again changes nothing. */
void crc_prepare(void);

/* Which of the three ways this machine goes, in words. */
extern const char *crc_way;

extern uint32_t crc_tables[8][256];

static inline uint32_t crc_by_tables(uint32_t state, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word = load_u64(data) ^ state;
        state = crc_tables[7][word & 0xFF] ^ crc_tables[6][word >> 8 & 0xFF] ^ crc_tables[5][word >> 16 & 0xFF] ^
                crc_tables[4][word >> 24 & 0xFF] ^ crc_tables[3][word >> 32 & 0xFF] ^
                crc_tables[2][word >> 40 & 0xFF] ^ crc_tables[1][word >> 48 & 0xFF] ^ crc_tables[0][word >> 56];
    }
    for (; size > 0; data++, size--) {
        state = (state >> 8) ^ crc_tables[0][(state ^ *data) & 0xFF];
    }
    return state;
}

extern uint32_t (*crc_update)(uint32_t state, const uint8_t *data, size_t size);
/* The checksum of a frame. */
extern uint32_t (*crc_of_frame)(uint64_t offset, const uint8_t *payload, uint32_t length);

/* The 12 bytes of a frame's header that its checksum covers. */
#define CRC_CLAIMS_BYTES 12

static inline void crc_claims(uint8_t *claims, uint64_t offset, uint32_t length) {
    store_u64(claims, offset);
    store_u32(claims + 8, length);
}

static inline uint32_t crc_of(const uint8_t *data, size_t size) {
    return ~crc_update(~0u, data, size);
}

/* The checksum of a frame once it has another offset. A checksum is linear: what differs between the two headers, worked
   out by itself, is what differs between the checksums. The payload is not read, and a wrong checksum stays wrong. */
static inline uint32_t crc_of_renumbered(uint32_t crc, uint64_t old_offset, uint64_t new_offset) {
    uint8_t claims[CRC_CLAIMS_BYTES];
    crc_claims(claims, old_offset ^ new_offset, 0);
    return crc ^ crc_by_tables(0, claims, sizeof claims);
}

#endif
