/* BLAKE2b (RFC 7693) with 32 bytes and without a key: what the digest of a state adds up. */

#ifndef TIDELOG_BLAKE2B_H
#define TIDELOG_BLAKE2B_H

#include "endian.h"

#define BLAKE2B_BLOCK_BYTES 128
#define BLAKE2B_BYTES 32

static const uint64_t blake2b_start[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};

/* Which word of the block comes when; rounds 10 and 11 are as 0 and 1. */
static const uint8_t blake2b_order[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static inline uint64_t rotated(uint64_t word, int bits) {
    return word >> bits | word << (64 - bits);
}

static inline void blake2b_mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y) {
    v[a] += v[b] + x;
    v[d] = rotated(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = rotated(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = rotated(v[b] ^ v[c], 63);
}

static inline void blake2b_block(uint64_t *state, const uint8_t *block, uint64_t total, int is_last) {
    uint64_t v[16], words[16];
    for (int at = 0; at < 16; at++) {
        words[at] = load_u64(block + 8 * at);
        v[at] = at < 8 ? state[at] : blake2b_start[at - 8];
    }
    v[12] ^= total;
    v[14] ^= is_last ? UINT64_MAX : 0;
    for (int round = 0; round < 12; round++) {
        const uint8_t *order = blake2b_order[round % 10];
        for (int at = 0; at < 4; at++) {
            blake2b_mix(v, at, at + 4, at + 8, at + 12, words[order[2 * at]], words[order[2 * at + 1]]);
        }
        for (int at = 0; at < 4; at++) {
            blake2b_mix(v, at, (at + 1) % 4 + 4, (at + 2) % 4 + 8, (at + 3) % 4 + 12, words[order[8 + 2 * at]],
                        words[order[9 + 2 * at]]);
        }
    }
    for (int at = 0; at < 8; at++) {
        state[at] ^= v[at] ^ v[at + 8];
    }
}

/* The digest as four words, the least first. */
static inline void blake2b_256(const uint8_t *data, size_t size, uint64_t *digest) {
    uint64_t state[8];
    memcpy(state, blake2b_start, sizeof state);
    state[0] ^= 0x01010000 ^ BLAKE2B_BYTES;
    size_t at = 0;
    for (; size - at > BLAKE2B_BLOCK_BYTES; at += BLAKE2B_BLOCK_BYTES) {
        blake2b_block(state, data + at, at + BLAKE2B_BLOCK_BYTES, 0);
    }
    uint8_t last[BLAKE2B_BLOCK_BYTES] = {0};
    memcpy(last, data + at, size - at);
    blake2b_block(state, last, size, 1);
    memcpy(digest, state, BLAKE2B_BYTES);
}

#endif
