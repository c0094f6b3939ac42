/* CRC-32: the three ways, and which of them this machine goes. `crc32.h` says how it works. */

#include "crc32.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define TIDELOG_CRC_FOLDS 1
#include <immintrin.h>
#define TIDELOG_FOLDING __attribute__((target("pclmul,sse4.1")))
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

/* P without x^32, reflected: bit i is x^(31-i). */
#define CRC_POLYNOMIAL 0xEDB88320u

uint32_t crc_tables[8][256];

/* The remainder times x, modulo P. */
static inline uint32_t crc_times_x(uint32_t remainder) {
    return (remainder >> 1) ^ (CRC_POLYNOMIAL & (0u - (remainder & 1)));
}

static void crc_prepare_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t remainder = byte;
        for (int bit = 0; bit < 8; bit++) {
            remainder = crc_times_x(remainder);
        }
        crc_tables[0][byte] = remainder;
    }
    /* Table k is the effect of a byte with k more bytes after it. */
    for (int table = 1; table < 8; table++) {
        for (int byte = 0; byte < 256; byte++) {
            uint32_t shorter = crc_tables[table - 1][byte];
            crc_tables[table][byte] = (shorter >> 8) ^ crc_tables[0][shorter & 0xFF];
        }
    }
}

#if defined(__ARM_FEATURE_CRC32)

static uint32_t crc_by_instruction(uint32_t state, const uint8_t *data, size_t size) {
    for (; size >= 8; data += 8, size -= 8) {
        state = __crc32d(state, load_u64(data));
    }
    for (; size > 0; data++, size--) {
        state = __crc32b(state, *data);
    }
    return state;
}

#endif

#ifdef TIDELOG_CRC_FOLDS

/* Folding. A 128-bit register X with d more bits of message after it stands for X * x^d. Written as two halves,
   X = H * x^64 + L, and modulo P each half may be moved on its own:

       X * x^d  =  H * (x^(d+64) mod P)  +  L * (x^d mod P)

   so two carry-less multiplications carry 16 bytes d bits ahead, where they are added (xor) to what is there.
   A reflected product of 64-bit and 33-bit factors comes out 32 powers too high when it is read as a 128-bit register,
   hence the exponents d+32 and d-32 below. H lies in the low half of the register: bits are reflected. */

/* The multiplier for x^n: x^n mod P, reflected in bits 1 to 32. */
static uint64_t crc_multiplier(int power) {
    uint32_t remainder = 0x80000000u; /* x^0 */
    while (power-- > 0) {
        remainder = crc_times_x(remainder);
    }
    return (uint64_t)remainder << 1;
}

/* The quotient of x^95 by P, reflected in 64 bits: the bits that fall out while x^95 mod P is worked out. */
static uint64_t crc_quotient(void) {
    uint64_t quotient = 0;
    uint32_t remainder = 0x80000000u;
    for (int power = 0; power < 95; power++) {
        if (remainder & 1) {
            quotient |= (uint64_t)1 << (power - 31); /* x^31 appears at power 31 for the first time */
        }
        remainder = crc_times_x(remainder);
    }
    return quotient;
}

static struct {
    uint64_t by_512[2], by_384[2], by_256[2], by_128[2], by_96[2]; /* multipliers for the halves H and L */
    uint64_t to_96[2];                                   /* x^96, and the quotient for the last division */
    uint64_t polynomial[2];                              /* P without x^32 in bits 1 to 32 */
} crc_constants;

static void crc_prepare_fold(uint64_t multipliers[2], int distance_bits) {
    multipliers[0] = crc_multiplier(distance_bits + 32);
    multipliers[1] = crc_multiplier(distance_bits - 32);
}

static void crc_prepare_folding(void) {
    crc_prepare_fold(crc_constants.by_512, 512);
    crc_prepare_fold(crc_constants.by_384, 384);
    crc_prepare_fold(crc_constants.by_256, 256);
    crc_prepare_fold(crc_constants.by_128, 128);
    crc_prepare_fold(crc_constants.by_96, 96);
    crc_constants.to_96[0] = crc_multiplier(96);
    crc_constants.to_96[1] = crc_quotient();
    crc_constants.polynomial[0] = (uint64_t)CRC_POLYNOMIAL << 1;
}

TIDELOG_FOLDING static inline __m128i crc_load(const void *at) {
    return _mm_loadu_si128((const __m128i *)at);
}

TIDELOG_FOLDING static inline __m128i crc_fold(__m128i block, __m128i multipliers) {
    return _mm_xor_si128(_mm_clmulepi64_si128(block, multipliers, 0x00),
                         _mm_clmulepi64_si128(block, multipliers, 0x11));
}

/* The last 1 to 15 bytes. `block` and they are read as one message of 16 + size bytes: its first `size` bytes, with zero
   bytes before them, are folded onto its last 16. At least 16 bytes of data lie before `data + size`. */
TIDELOG_FOLDING static inline __m128i crc_fold_rest(__m128i block, const uint8_t *data, size_t size) {
    static const uint8_t shuffles[48] = {
        0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
        0,    1,    2,    3,    4,    5,    6,    7,    8,    9,    10,   11,   12,   13,   14,   15,
        0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
    };
    __m128i first = _mm_shuffle_epi8(block, crc_load(shuffles + size));
    __m128i move_down = crc_load(shuffles + 16 + size); /* top bit set where the data's own bytes belong */
    __m128i last = _mm_blendv_epi8(_mm_shuffle_epi8(block, move_down), crc_load(data + size - 16), move_down);
    return _mm_xor_si128(last, crc_fold(first, crc_load(crc_constants.by_128)));
}

/* What is left of 128 bits: X * x^32 mod P. H moves down first, which leaves U of 96 bits; then, as U has 64 powers above
   x^31, the quotient of U by P is exactly the top half of (U / x^32) * (x^95 / P), and the remainder is U - quotient * P. */
TIDELOG_FOLDING static inline uint32_t crc_reduce(__m128i block) {
    __m128i to_96 = crc_load(crc_constants.to_96);
    __m128i rest = _mm_xor_si128(_mm_clmulepi64_si128(block, to_96, 0x00), _mm_srli_si128(block, 8));
    __m128i quotient = _mm_clmulepi64_si128(rest, to_96, 0x10);
    __m128i multiple = _mm_clmulepi64_si128(quotient, crc_load(crc_constants.polynomial), 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(rest, multiple), 2);
}

/* 16 bytes or more as the 128 bits that they come to. */
TIDELOG_FOLDING static inline __m128i crc_fold_all(uint32_t state, const uint8_t *data, size_t size) {
    __m128i by_128 = crc_load(crc_constants.by_128);
    __m128i block = _mm_xor_si128(crc_load(data), _mm_cvtsi32_si128((int)state));
    data += 16;
    size -= 16;
    if (size >= 48) {
        /* Four registers side by side, for a multiplication takes several cycles but one can start in each. */
        __m128i by_512 = crc_load(crc_constants.by_512);
        __m128i second = crc_load(data), third = crc_load(data + 16), fourth = crc_load(data + 32);
        for (data += 48, size -= 48; size >= 64; data += 64, size -= 64) {
            block = _mm_xor_si128(crc_fold(block, by_512), crc_load(data));
            second = _mm_xor_si128(crc_fold(second, by_512), crc_load(data + 16));
            third = _mm_xor_si128(crc_fold(third, by_512), crc_load(data + 32));
            fourth = _mm_xor_si128(crc_fold(fourth, by_512), crc_load(data + 48));
        }
        block = crc_fold(block, crc_load(crc_constants.by_384));
        second = crc_fold(second, crc_load(crc_constants.by_256));
        third = crc_fold(third, by_128);
        block = _mm_xor_si128(_mm_xor_si128(block, second), _mm_xor_si128(third, fourth));
    }
    for (; size >= 16; data += 16, size -= 16) {
        block = _mm_xor_si128(crc_fold(block, by_128), crc_load(data));
    }
    if (size > 0) {
        block = crc_fold_rest(block, data, size);
    }
    return block;
}

TIDELOG_FOLDING static uint32_t crc_by_folding(uint32_t state, const uint8_t *data, size_t size) {
    return size < 16 ? crc_by_tables(state, data, size) : crc_reduce(crc_fold_all(state, data, size));
}

/* The payload's 128 bits move 96 bits ahead, and the 12 bytes are added below; the 4 bytes above them are zero. */
TIDELOG_FOLDING static uint32_t crc_frame_by_folding(uint64_t offset, const uint8_t *payload, uint32_t length) {
    __m128i claims = _mm_slli_si128(_mm_set_epi64x((long long)length, (long long)offset), 4);
    if (length < 16) {
        uint32_t state = crc_by_tables(~0u, payload, length);
        return ~crc_reduce(_mm_xor_si128(claims, _mm_slli_si128(_mm_cvtsi32_si128((int)state), 4)));
    }
    __m128i block = crc_fold(crc_fold_all(~0u, payload, length), crc_load(crc_constants.by_96));
    return ~crc_reduce(_mm_xor_si128(block, claims));
}

#endif

uint32_t (*crc_update)(uint32_t state, const uint8_t *data, size_t size) = crc_by_tables;

static uint32_t crc_frame_by_parts(uint64_t offset, const uint8_t *payload, uint32_t length) {
    uint8_t claims[CRC_CLAIMS_BYTES];
    crc_claims(claims, offset, length);
    return ~crc_update(crc_update(~0u, payload, length), claims, sizeof claims);
}

uint32_t (*crc_of_frame)(uint64_t offset, const uint8_t *payload, uint32_t length) = crc_frame_by_parts;

const char *crc_way = "tables";

void crc_prepare(void) {
    crc_prepare_tables();
#ifdef TIDELOG_CRC_FOLDS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
        crc_prepare_folding();
        crc_update = crc_by_folding;
        crc_of_frame = crc_frame_by_folding;
        crc_way = "carry-less multiplication";
    }
#elif defined(__ARM_FEATURE_CRC32)
    crc_update = crc_by_instruction;
    crc_way = "CRC instructions";
#endif
}
