/* Whether bytes are UTF-8, by the rules of Python's strict decoder: no surrogates, nothing longer than needed, nothing
   above U+10FFFF. Needs no GIL. */

#ifndef TIDELOG_UTF8_H
#define TIDELOG_UTF8_H

#include "arguments.h"
#include "endian.h"

/* Bytes of the character that begins with `lead`, and the range of its second byte; 0 when none begins so. */
static inline size_t utf8_expect(uint8_t lead, uint8_t *least, uint8_t *most) {
    *least = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80; /* what is less has a shorter form */
    *most = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;  /* above are surrogates, or no characters at all */
    if (lead < 0xC2 || lead > 0xF4) {
        return 0;
    }
    return lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

/* Bytes of the first character, which is not ASCII; 0 when there is none. */
static inline size_t utf8_character(const uint8_t *at, size_t left) {
    uint8_t least, most;
    size_t size = utf8_expect(at[0], &least, &most);
    if (size == 0 || size > left || at[1] < least || at[1] > most) {
        return 0;
    }
    for (size_t more = 2; more < size; more++) {
        if ((at[more] & 0xC0) != 0x80) {
            return 0;
        }
    }
    return size;
}

static int is_utf8(Slice text) {
    size_t at = 0;
    while (at < text.size) {
        if (text.size - at >= 8 && (load_u64(text.data + at) & UINT64_C(0x8080808080808080)) == 0) {
            at += 8;
        } else if (text.data[at] < 0x80) {
            at++;
        } else {
            size_t size = utf8_character(text.data + at, text.size - at);
            if (size == 0) {
                return 0;
            }
            at += size;
        }
    }
    return 1;
}

#endif
