/* CRC-32C (Castagnoli), the checksum of Kafka's record batches, as fast as the machine allows.

   P = 0x1EDC6F41, reflected 0x82F63B78. Bits are reflected, as in `crc32.h`; every table is worked out from P.

   Three ways, one answer:
   - the crc32 instruction of x86-64 (SSE4.2, looked up at run time), on three lanes side by side: one instruction takes
     three cycles, but one can start in each. The lanes are joined by moving a register over the zeros that follow it.
   - the CRC instructions of ARMv8, where the compiler was told that they exist
   - eight tables of 256 entries, eight bytes a step, everywhere */

#ifndef TIDELOG_CRC32C_H
#define TIDELOG_CRC32C_H

#include <stddef.h>
#include <stdint.h>

#include "endian.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define TIDELOG_CRC32C_SSE 1
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

#define CRC32C_POLYNOMIAL 0x82F63B78u
#define CRC32C_LANE_BYTES 1024
#define CRC32C_SHORT_LANE_BYTES 128

static uint32_t crc32c_tables[8][256];

static uint32_t crc32c_by_tables(uint32_t state, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        uint64_t word = load_u64(data) ^ state;
        state = crc32c_tables[7][word & 0xFF] ^ crc32c_tables[6][word >> 8 & 0xFF] ^
                crc32c_tables[5][word >> 16 & 0xFF] ^ crc32c_tables[4][word >> 24 & 0xFF] ^
                crc32c_tables[3][word >> 32 & 0xFF] ^ crc32c_tables[2][word >> 40 & 0xFF] ^
                crc32c_tables[1][word >> 48 & 0xFF] ^ crc32c_tables[0][word >> 56];
    }
    for (; size > 0; data++, size--) {
        state = (state >> 8) ^ crc32c_tables[0][(state ^ *data) & 0xFF];
    }
    return state;
}

static uint32_t (*crc32c_update)(uint32_t state, const uint8_t *data, size_t size) = crc32c_by_tables;

static void crc32c_prepare_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t remainder = byte;
        for (int bit = 0; bit < 8; bit++) {
            remainder = (remainder >> 1) ^ (CRC32C_POLYNOMIAL & (0u - (remainder & 1)));
        }
        crc32c_tables[0][byte] = remainder;
    }
    for (int table = 1; table < 8; table++) {
        for (int byte = 0; byte < 256; byte++) {
            uint32_t shorter = crc32c_tables[table - 1][byte];
            crc32c_tables[table][byte] = (shorter >> 8) ^ crc32c_tables[0][shorter & 0xFF];
        }
    }
}

#if defined(TIDELOG_CRC32C_SSE)

/* What a register becomes after so many zero bytes, by each of its four bytes: it is linear. */
static uint32_t crc32c_over_lane[4][256], crc32c_over_short_lane[4][256];

static void crc32c_prepare_moves(uint32_t moves[4][256], size_t zeros) {
    uint32_t of_bit[32];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t state = (uint32_t)1 << bit;
        for (size_t byte = 0; byte < zeros; byte++) {
            state = (state >> 8) ^ crc32c_tables[0][state & 0xFF];
        }
        of_bit[bit] = state;
    }
    for (int part = 0; part < 4; part++) {
        for (int byte = 0; byte < 256; byte++) {
            uint32_t sum = 0;
            for (int bit = 0; bit < 8; bit++) {
                sum ^= byte >> bit & 1 ? of_bit[8 * part + bit] : 0;
            }
            moves[part][byte] = sum;
        }
    }
}

static inline uint64_t crc32c_move(uint32_t moves[4][256], uint64_t state) {
    return moves[0][state & 0xFF] ^ moves[1][state >> 8 & 0xFF] ^ moves[2][state >> 16 & 0xFF] ^
           moves[3][state >> 24 & 0xFF];
}

__attribute__((target("sse4.2"))) static inline uint64_t crc32c_three_lanes(uint64_t first, const uint8_t *data,
                                                                            size_t lane, uint32_t moves[4][256]) {
    uint64_t second = 0, third = 0;
    for (size_t at = 0; at < lane; at += 8) {
        first = _mm_crc32_u64(first, load_u64(data + at));
        second = _mm_crc32_u64(second, load_u64(data + lane + at));
        third = _mm_crc32_u64(third, load_u64(data + 2 * lane + at));
    }
    return crc32c_move(moves, crc32c_move(moves, first) ^ second) ^ third;
}

__attribute__((target("sse4.2"))) static uint32_t crc32c_by_instruction(uint32_t start, const uint8_t *data,
                                                                        size_t size) {
    uint64_t state = start;
    for (; size >= 3 * CRC32C_LANE_BYTES; data += 3 * CRC32C_LANE_BYTES, size -= 3 * CRC32C_LANE_BYTES) {
        state = crc32c_three_lanes(state, data, CRC32C_LANE_BYTES, crc32c_over_lane);
    }
    for (; size >= 3 * CRC32C_SHORT_LANE_BYTES; data += 3 * CRC32C_SHORT_LANE_BYTES, size -= 3 * CRC32C_SHORT_LANE_BYTES) {
        state = crc32c_three_lanes(state, data, CRC32C_SHORT_LANE_BYTES, crc32c_over_short_lane);
    }
    for (; size >= 8; data += 8, size -= 8) {
        state = _mm_crc32_u64(state, load_u64(data));
    }
    for (; size > 0; data++, size--) {
        state = _mm_crc32_u8((uint32_t)state, *data);
    }
    return (uint32_t)state;
}

#elif defined(__ARM_FEATURE_CRC32)

static uint32_t crc32c_by_instruction(uint32_t state, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        state = __crc32cd(state, load_u64(data));
    }
    for (; size > 0; data++, size--) {
        state = __crc32cb(state, *data);
    }
    return state;
}

#endif

static inline uint32_t crc32c_of(const uint8_t *data, size_t size) {
    return ~crc32c_update(~0u, data, size);
}

/* Called once at import; calling it again changes nothing. */
static void crc32c_prepare(void) {
    crc32c_prepare_tables();
#if defined(TIDELOG_CRC32C_SSE)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("sse4.2")) {
        crc32c_prepare_moves(crc32c_over_lane, CRC32C_LANE_BYTES);
        crc32c_prepare_moves(crc32c_over_short_lane, CRC32C_SHORT_LANE_BYTES);
        crc32c_update = crc32c_by_instruction;
    }
#elif defined(__ARM_FEATURE_CRC32)
    crc32c_update = crc32c_by_instruction;
#endif
}

#endif
