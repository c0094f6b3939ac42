/* Numbers in the formats are little-endian and lie at any address: loads and stores that are right on every machine.
   memcpy of a fixed size is one instruction after optimisation, and the swap vanishes on little-endian machines. */

#ifndef TIDELOG_ENDIAN_H
#define TIDELOG_ENDIAN_H

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define TIDELOG_LITTLE16(number) __builtin_bswap16(number)
#define TIDELOG_LITTLE32(number) __builtin_bswap32(number)
#define TIDELOG_LITTLE64(number) __builtin_bswap64(number)
#else
#define TIDELOG_LITTLE16(number) (number)
#define TIDELOG_LITTLE32(number) (number)
#define TIDELOG_LITTLE64(number) (number)
#endif

static inline uint16_t load_u16(const uint8_t *at) {
    uint16_t number;
    memcpy(&number, at, sizeof number);
    return TIDELOG_LITTLE16(number);
}

static inline uint32_t load_u32(const uint8_t *at) {
    uint32_t number;
    memcpy(&number, at, sizeof number);
    return TIDELOG_LITTLE32(number);
}

static inline uint64_t load_u64(const uint8_t *at) {
    uint64_t number;
    memcpy(&number, at, sizeof number);
    return TIDELOG_LITTLE64(number);
}

static inline void store_u16(uint8_t *at, uint16_t number) {
    number = TIDELOG_LITTLE16(number);
    memcpy(at, &number, sizeof number);
}

static inline void store_u32(uint8_t *at, uint32_t number) {
    number = TIDELOG_LITTLE32(number);
    memcpy(at, &number, sizeof number);
}

static inline void store_u64(uint8_t *at, uint64_t number) {
    number = TIDELOG_LITTLE64(number);
    memcpy(at, &number, sizeof number);
}

/* The arrays of positions and lengths stay in memory, so they are in the machine's own order, but may lie anywhere. */
static inline uint64_t native_u64(const uint8_t *array, size_t index) {
    uint64_t number;
    memcpy(&number, array + 8 * index, sizeof number);
    return number;
}

static inline uint32_t native_u32(const uint8_t *array, size_t index) {
    uint32_t number;
    memcpy(&number, array + 4 * index, sizeof number);
    return number;
}

#endif
