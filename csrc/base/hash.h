/* FNV-1a: one number for many bytes, for names and for comparing across ranks. It holds
 * against accidents, not against attackers. */
#ifndef CP_BASE_HASH_H
#define CP_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>

#define CP_HASH_START UINT64_C(0xcbf29ce484222325)

/* Goes on from `hash`, which is CP_HASH_START or what an earlier call returned. */
static inline uint64_t cp_hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *byte = (const unsigned char *)data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

/* For numbers of which 0 says "none". */
static inline uint64_t cp_hash_not_zero(uint64_t hash)
{
    return hash == 0 ? 1 : hash;
}

#endif
